from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cloud.digest import Digester, crc64nvme, format_crc
from cloud.store import CHUNK_BYTES
from harness.agent import unchanged
from harness.agent.unchanged import Unchanged
from harness.core.manifest import Manifest, Part, ShardEntry
from harness.core.policy import LOOKS_EVERY, LOOKS_IN_VAIN

pytestmark = pytest.mark.usefixtures("_small_chunks")
CHUNK = 1024
DATA = bytes(range(256)) * 10  # two chunks and a half


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that was summed."""
    sizes: list[int] = []

    def counting(data: Any, previous: int = 0) -> int:
        sizes.append(len(data))
        return crc64nvme(data, previous)

    monkeypatch.setattr(unchanged, "crc64nvme", counting)
    return sizes


def entry(data: bytes, name: str = "a") -> ShardEntry:
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return ShardEntry(
        name=name,
        size=len(data),
        crc64nvme=format_crc(crc64nvme(data)),
        chunk_bytes=CHUNK,
        chunks=tuple(format_crc(crc64nvme(chunk)) for chunk in chunks),
    )


def manifest(*entries: ShardEntry) -> Manifest:
    part = Part(
        format=1,
        run_id="0" * 32,
        generation=1,
        step=1,
        rank=0,
        world_size=1,
        directory="d",
        parent=None,
        sealed_at="",
        shards=entries,
        state=msgspec.Raw(b"{}"),
        state_crc64nvme="0" * 16,
    )
    return Manifest(format=1, run_id=part.run_id, generation=1, step=1, directory="d", parent=None, parts=(part,))


def over(*entries: ShardEntry) -> Unchanged:
    made = Unchanged()
    made.committed(manifest(*entries))
    return made


def test_a_shard_that_is_equal_to_the_last_byte_is_found() -> None:
    base = entry(DATA)

    assert over(base).find("a", memoryview(DATA), None) is base


def test_it_is_found_under_another_name_as_well() -> None:
    """Tensors were frozen or came to be: the plan has other numbers now."""
    other, base = entry(DATA[::-1], "a"), entry(DATA, "b")

    assert over(other, base).find("a", memoryview(DATA), None) is base


@pytest.mark.parametrize("at", [0, CHUNK, len(DATA) - 1])
def test_a_single_bit_makes_another_shard(at: int) -> None:
    changed = bytearray(DATA)
    changed[at] ^= 1

    assert over(entry(DATA)).find("a", memoryview(changed), None) is None


def test_a_shard_that_differs_in_its_first_chunk_costs_no_more_than_that(summed: list[int]) -> None:
    assert over(entry(DATA)).find("a", memoryview(b"x" * len(DATA)), None) is None

    assert summed == [CHUNK]


def test_a_shard_of_a_size_that_the_base_has_not_costs_nothing(summed: list[int]) -> None:
    assert over(entry(DATA)).find("a", memoryview(DATA[:-1]), None) is None

    assert summed == []


def test_where_the_sums_are_known_nothing_is_read(summed: list[int]) -> None:
    base = entry(DATA)

    assert over(base).find("b", memoryview(b""), entry(DATA, "b")) is base
    assert over(base).find("b", memoryview(b""), entry(DATA[:-1] + b"x", "b")) is None
    assert summed == []


def test_without_a_base_nothing_is_found_or_read(summed: list[int]) -> None:
    looks = over(entry(DATA))
    looks.forget()

    assert looks.find("a", memoryview(DATA), None) is None
    assert Unchanged().find("a", memoryview(DATA), None) is None
    assert summed == []


def test_what_changes_every_time_is_rarely_looked_at(summed: list[int]) -> None:
    looks, snapshots = over(entry(DATA)), 100
    for _ in range(snapshots):
        assert looks.find("a", memoryview(b"x" * len(DATA)), None) is None

    assert len(summed) == LOOKS_IN_VAIN + (snapshots - LOOKS_IN_VAIN) // LOOKS_EVERY


def test_what_stops_changing_is_found_out_before_long() -> None:
    looks = over(entry(DATA))
    for _ in range(50):
        looks.find("a", memoryview(b"x" * len(DATA)), None)

    found = [looks.find("a", memoryview(DATA), None) is not None for _ in range(2 * LOOKS_EVERY)]

    assert found.index(True) < LOOKS_EVERY
    assert all(found[found.index(True) :])


def test_one_shard_s_looks_say_nothing_of_another_s() -> None:
    looks = over(entry(DATA), entry(b"frozen"))
    for _ in range(10):
        looks.find("a", memoryview(b"x" * len(DATA)), None)

    assert looks.find("b", memoryview(b"frozen"), None) is not None


def test_a_store_that_refuses_is_rarely_asked_again() -> None:
    looks = Unchanged()
    asked = 0
    for _ in range(100):
        looks.committed(manifest(entry(DATA)))
        if looks.find("a", memoryview(DATA), None) is not None:
            asked += 1
            looks.tried(False)
            assert looks.base is None

    assert asked == LOOKS_IN_VAIN + (100 - LOOKS_IN_VAIN) // LOOKS_EVERY


def test_the_sums_are_those_that_a_receipt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same chunks as of every shard that was sent: else nothing would ever be equal."""
    monkeypatch.setattr(unchanged, "CHUNK_BYTES", CHUNK_BYTES)
    data = bytes(CHUNK_BYTES) + b"tail"
    digester = Digester()
    digester.update(data)
    receipt = digester.receipt()
    base = ShardEntry(
        name="a",
        size=receipt.size,
        crc64nvme=format_crc(receipt.crc64nvme),
        chunk_bytes=CHUNK_BYTES,
        chunks=tuple(map(format_crc, receipt.chunk_crcs)),
    )

    assert over(base).find("a", memoryview(data), None) is base
