from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from cloud.digest import Digester, crc64nvme, format_crc
from cloud.errors import CannotCopy, Denied, NotFound, Unavailable
from cloud.store import CHUNK_BYTES, ObjectStore
from cloud.testing.memory import MemoryStore
from harness.core.manifest import Manifest, Part, ShardEntry
from harness.core.policy.copying import LOOKS_EVERY, LOOKS_IN_VAIN
from harness.snapshots import dedup
from harness.snapshots.dedup import Deduplicator, Wanted
from tests.support.patience import HANG_S
from tests.support.protocol import FOREVER, KEYS
from tests.support.stores import FaultyStore

pytestmark = pytest.mark.usefixtures("_small_chunks")
CHUNK = 1024
DATA = bytes(range(256)) * 10  # two chunks and a half


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that was summed."""
    sizes: list[int] = []

    def counting(data: Any, previous: int = 0) -> int:
        sizes.append(len(data))
        return crc64nvme(data, previous)

    monkeypatch.setattr(dedup, "crc64nvme", counting)
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


def over(*entries: ShardEntry) -> Deduplicator:
    made = Deduplicator()
    made.committed(manifest(*entries))
    return made


def test_a_shard_that_is_equal_to_the_last_byte_is_found() -> None:
    base = entry(DATA)

    assert over(base).find(Wanted("a", memoryview(DATA), None)) is base


def test_it_is_found_under_another_name_as_well() -> None:
    """Tensors were frozen or came to be: the plan has other numbers now."""
    other, base = entry(DATA[::-1], "a"), entry(DATA, "b")

    assert over(other, base).find(Wanted("a", memoryview(DATA), None)) is base


@pytest.mark.parametrize("at", [0, CHUNK, len(DATA) - 1])
def test_a_single_bit_makes_another_shard(at: int) -> None:
    changed = bytearray(DATA)
    changed[at] ^= 1

    assert over(entry(DATA)).find(Wanted("a", memoryview(changed), None)) is None


def test_a_shard_that_differs_in_its_first_chunk_costs_no_more_than_that(summed: list[int]) -> None:
    assert over(entry(DATA)).find(Wanted("a", memoryview(b"x" * len(DATA)), None)) is None

    assert summed == [CHUNK]


def test_a_shard_of_a_size_that_the_base_has_not_costs_nothing(summed: list[int]) -> None:
    assert over(entry(DATA)).find(Wanted("a", memoryview(DATA[:-1]), None)) is None

    assert summed == []


def test_where_the_sums_are_known_nothing_is_read(summed: list[int]) -> None:
    base = entry(DATA)

    assert over(base).find(Wanted("b", memoryview(b""), entry(DATA, "b"))) is base
    assert over(base).find(Wanted("b", memoryview(b""), entry(DATA[:-1] + b"x", "b"))) is None
    assert summed == []


def test_without_a_base_nothing_is_found_or_read(summed: list[int]) -> None:
    looks = over(entry(DATA))
    looks.forget()

    assert looks.find(Wanted("a", memoryview(DATA), None)) is None
    assert Deduplicator().find(Wanted("a", memoryview(DATA), None)) is None
    assert summed == []


def test_what_changes_every_time_is_rarely_looked_at(summed: list[int]) -> None:
    looks, snapshots = over(entry(DATA)), 100
    for _ in range(snapshots):
        assert looks.find(Wanted("a", memoryview(b"x" * len(DATA)), None)) is None

    assert len(summed) == LOOKS_IN_VAIN + (snapshots - LOOKS_IN_VAIN) // LOOKS_EVERY


def test_what_stops_changing_is_found_out_before_long() -> None:
    looks = over(entry(DATA))
    for _ in range(50):
        looks.find(Wanted("a", memoryview(b"x" * len(DATA)), None))

    found = [looks.find(Wanted("a", memoryview(DATA), None)) is not None for _ in range(2 * LOOKS_EVERY)]

    assert found.index(True) < LOOKS_EVERY
    assert all(found[found.index(True) :])


def test_one_shard_s_looks_say_nothing_of_another_s() -> None:
    looks = over(entry(DATA), entry(b"frozen"))
    for _ in range(10):
        looks.find(Wanted("a", memoryview(b"x" * len(DATA)), None))

    assert looks.find(Wanted("b", memoryview(b"frozen"), None)) is not None


def test_the_sums_are_those_that_a_receipt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same chunks as of every shard that was sent: else nothing would ever be equal."""
    monkeypatch.setattr(dedup, "CHUNK_BYTES", CHUNK_BYTES)
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

    assert over(base).find(Wanted("a", memoryview(data), None)) is base


# ---- copying --------------------------------------------------------------------------------------------------------


class Base:
    """A snapshot of several shards in a store, and another one that has the same."""

    def __init__(self, store: ObjectStore, count: int) -> None:
        self.store, self.wanted, entries = store, list[Wanted](), list[ShardEntry]()
        for index in range(count):
            data = bytes([index]) * CHUNK
            store.put(KEYS.payload("d", str(index)), memoryview(data), deadline=FOREVER)
            entries.append(entry(data, str(index)))
            self.wanted.append(Wanted(str(index), memoryview(data)))
        self.unchanged = over(*entries)
        self.copied, self.refused = list[str](), list[str]()

    def copy(self, store: ObjectStore) -> None:
        self.unchanged.copy(
            store,
            KEYS,
            "new",
            self.wanted,
            FOREVER,
            lambda entry: self.copied.append(entry.name),
            lambda name, err: self.refused.append(name),
        )


def test_every_shard_that_the_base_has_is_copied_into_the_new_directory() -> None:
    base = Base(MemoryStore(), 10)

    base.copy(base.store)

    assert sorted(base.copied) == [str(index) for index in range(10)]
    new = [info.key for info in base.store.list(KEYS.payload("new", ""), deadline=FOREVER)]
    assert new == [KEYS.payload("new", str(index)) for index in range(10)]


def test_a_first_copy_is_made_alone_and_then_several_at_once() -> None:
    together = threading.Barrier(dedup.COPIES)
    first = threading.Event()

    class Meets(MemoryStore):
        def copy(self, *args: Any, **options: Any) -> None:
            if first.is_set():
                together.wait(HANG_S)
            first.set()
            super().copy(*args, **options)

    base = Base(Meets(), 1 + 2 * dedup.COPIES)

    base.copy(base.store)

    assert len(base.copied) == 1 + 2 * dedup.COPIES
    assert base.refused == []


def test_a_store_that_refuses_the_first_copy_is_not_asked_for_the_others() -> None:
    base = Base(MemoryStore(), 10)
    store = FaultyStore(base.store, "copy", fail_on=None, error=Denied)

    base.copy(store)

    assert (store.calls, base.copied, base.refused) == (1, [], ["0"])


def test_a_store_that_refuses_is_rarely_asked_again() -> None:
    base = Base(MemoryStore(), 2)
    store = FaultyStore(base.store, "copy", fail_on=None, error=CannotCopy)
    held = base.unchanged.base
    assert held is not None

    for _ in range(100):
        base.unchanged.committed(held)
        base.copy(store)

    assert store.calls == LOOKS_IN_VAIN + (100 - LOOKS_IN_VAIN) // LOOKS_EVERY


def test_one_that_fails_later_ends_it_and_what_was_copied_counts() -> None:
    base = Base(MemoryStore(), 20)
    store = FaultyStore(base.store, "copy", fail_on=5, error=NotFound)

    base.copy(store)

    assert len(base.refused) == 1
    assert 4 <= len(base.copied) < 20
    assert store.calls == len(base.copied) + 1


def test_who_gives_up_between_two_copies_is_heard() -> None:
    base = Base(MemoryStore(), 10)

    class Enough(Exception):
        pass

    def give_up(entry: ShardEntry) -> None:
        raise Enough

    with pytest.raises(Enough):
        base.unchanged.copy(
            base.store, KEYS, "new", base.wanted, FOREVER, give_up, lambda name, err: base.refused.append(name)
        )

    assert base.refused == []


def test_a_copy_that_is_given_up_in_the_middle_says_nothing_about_the_store() -> None:
    """A newer snapshot alone still fitted; it was sent whole, because the older one's copies had been cancelled."""
    cancelled = threading.Event()

    class Cancels(MemoryStore):
        def copy(self, source: str, key: str, expected: Any, *, deadline: Any) -> None:
            cancelled.set()
            raise Unavailable("no time left")

    tried, refused = over(entry(DATA)), list[str]()
    wanted = [Wanted("a", memoryview(DATA), None)]

    with pytest.raises(Unavailable):
        tried.copy(
            Cancels(),
            KEYS,
            "new",
            wanted,
            FOREVER.unless(cancelled),
            lambda _: None,
            lambda name, _: refused.append(name),
        )

    assert not refused
    assert tried.find(wanted[0]) is not None
