from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.ipc.pages import PAGE
from harness.ipc.slots import ShardSpan, Slot, SlotFull, SlotRecord, SlotState, place_shards, slot_bytes
from tests.support.forks import seen_in_a_fork
from tests.support.open_files import open_files

SPANS = place_shards([("a", 10), ("b", 5000), ("c", PAGE)])
RECORD = SlotRecord(
    step=12,
    rank=0,
    world_size=1,
    generation=3,
    shards=SPANS,
    state='{"step": 12, "name": "é"}',
    environment={"torch": "2.13"},
    sealed_at="2026-01-02T03:04:05.678+00:00",
)
HEADER = struct.Struct("<8sQQQQQQQ")


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot.create(slot_bytes(SPANS, 100))
    yield slot
    slot.close()


def seal(slot: Slot, sequence: int = 1, record: SlotRecord = RECORD) -> None:
    slot.begin()
    for index, span in enumerate(record.shards):
        slot.shard(span)[:] = bytes([index + 1]) * span.size
    slot.seal(record, sequence)


# ---- layout ---------------------------------------------------------------------------------------------------------


def test_shards_begin_at_page_boundaries_behind_the_header() -> None:
    assert (ShardSpan("a", 4096, 10), ShardSpan("b", 8192, 5000), ShardSpan("c", 16384, 4096)) == SPANS


@given(st.lists(st.integers(0, 20_000), max_size=6), st.integers(0, 1_000_000))
def test_shards_never_overlap_and_the_record_may_grow_to_twice_its_size(sizes: list[int], record_bytes: int) -> None:
    spans = place_shards([(str(index), size) for index, size in enumerate(sizes)])

    end = PAGE
    for span in spans:
        assert span.offset % PAGE == 0
        assert span.offset >= end
        end = span.offset + span.size
    assert slot_bytes(spans, record_bytes) >= end + 2 * record_bytes


def test_the_header_is_pinned(slot: Slot) -> None:
    seal(slot, sequence=9)

    magic, state, sequence, step, payload, offset, length, _crc = HEADER.unpack_from(slot.buffer)
    assert (magic, state, sequence, step, payload) == (b"HRNSLOT1", 2, 9, 12, 10 + 5000 + 4096)
    assert (offset, length) == (20480, len(RECORD.encode()))
    assert (
        bytes(slot.buffer[offset : offset + length])
        == (
            '{"step": 12, "rank": 0, "world_size": 1, "generation": 3, "shards": [{"name": "a", "offset": 4096, '
            '"size": 10}, {"name": "b", "offset": 8192, "size": 5000}, {"name": "c", "offset": 16384, "size": 4096}], '
            '"environment": {"torch": "2.13"}, "sealed_at": "2026-01-02T03:04:05.678+00:00"}\n'
            '{"step": 12, "name": "é"}'
        ).encode()
    )


def test_a_record_survives_its_bytes() -> None:
    assert SlotRecord.decode(RECORD.encode()) == RECORD


# ---- states ---------------------------------------------------------------------------------------------------------


def test_a_new_slot_is_empty_and_holds_nothing(slot: Slot) -> None:
    assert (slot.state, slot.sequence, slot.record()) == (SlotState.EMPTY, 0, None)


def test_a_sealed_slot_holds_its_record_and_its_bytes(slot: Slot) -> None:
    seal(slot, sequence=4)

    assert (slot.state, slot.sequence, slot.step, slot.payload_bytes) == (SlotState.SEALED, 4, 12, 9106)
    assert slot.record() == RECORD
    assert [bytes(slot.shard(span)) for span in SPANS] == [b"\1" * 10, b"\2" * 5000, b"\3" * 4096]


def test_another_process_that_maps_the_slot_sees_the_seal(slot: Slot) -> None:
    other = Slot(os.dup(slot.fd))
    seal(slot)

    assert other.record() == RECORD
    assert bytes(other.shard(SPANS[2])) == b"\3" * 4096
    other.close()


def test_a_slot_is_void_from_the_first_byte_of_the_next_snapshot(slot: Slot) -> None:
    seal(slot)
    slot.begin()

    assert (slot.state, slot.record()) == (SlotState.FILLING, None)


def test_an_abandoned_fill_leaves_nothing_to_find(slot: Slot) -> None:
    seal(slot)
    slot.begin()
    slot.shard(SPANS[0])[:] = bytes(10)

    found = Slot(os.dup(slot.fd))

    assert (found.state, found.record()) == (SlotState.FILLING, None)
    found.close()


class Ordered:
    """A buffer that tells in which order it is written."""

    def __init__(self, inner: memoryview) -> None:
        self.inner, self.states = inner, [int.from_bytes(inner[8:16], "little")]

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.states.append(int.from_bytes(self.inner[8:16], "little"))
        self.inner[where] = data

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_the_record_is_in_place_before_the_state_word_says_so(slot: Slot) -> None:
    seal(slot, sequence=1)
    slot.begin()
    real, slot.buffer = slot.buffer, Ordered(slot.buffer)  # type: ignore[assignment]
    with pytest.raises(TypeError):  # struct.pack_into wants the real buffer: the process dies right behind the record
        slot.seal(replace(RECORD, step=13), 2)
    written, slot.buffer = slot.buffer, real

    assert written.states == [SlotState.FILLING, SlotState.FILLING]  # type: ignore[attr-defined]
    assert slot.record() is None


def test_a_record_that_does_not_fit_is_refused_and_seals_nothing(slot: Slot) -> None:
    slot.begin()

    with pytest.raises(SlotFull):
        slot.seal(replace(RECORD, state="x" * slot.size), 1)

    assert (slot.state, slot.record()) == (SlotState.FILLING, None)


def test_a_snapshot_without_tensors_is_one_too(slot: Slot) -> None:
    bare = replace(RECORD, shards=())
    slot.begin()
    slot.seal(bare, 1)

    assert slot.record() == bare


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 8, 15, 40, 41, 48, 49, 56, 59])
def test_a_flipped_bit_in_the_header_leaves_no_record(slot: Slot, at: int) -> None:
    seal(slot)
    slot.buffer[at] ^= 0x40

    assert slot.record() is None


def test_a_flipped_bit_in_the_record_leaves_no_record(slot: Slot) -> None:
    seal(slot)
    start = HEADER.unpack_from(slot.buffer)[5]
    for at in range(start, start + len(RECORD.encode()), 17):
        slot.buffer[at] ^= 1
        assert slot.record() is None
        slot.buffer[at] ^= 1
    assert slot.record() == RECORD


@pytest.mark.parametrize("spans", [(ShardSpan("x", 0, 10),), (ShardSpan("x", 4096, 1 << 40),)])
def test_a_record_that_names_bytes_outside_the_payload_is_none(slot: Slot, spans: tuple[ShardSpan, ...]) -> None:
    slot.begin()
    slot.seal(replace(RECORD, shards=()), 1)
    data = replace(RECORD, shards=spans).encode()
    offset = HEADER.unpack_from(slot.buffer)[5]
    slot.buffer[offset : offset + len(data)] = data
    slot._write_header(SlotState.SEALED, 1, 12, 0, offset, len(data), zlib.crc32(data))

    assert slot.record() is None


def test_foreign_memory_is_an_empty_slot() -> None:
    fd = os.memfd_create("foreign")
    os.ftruncate(fd, 2 * PAGE)
    os.pwrite(fd, b"\xff" * 64, 0)
    slot = Slot(fd)

    assert (slot.state, slot.record()) == (SlotState.EMPTY, None)
    slot.close()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_forked_worker_neither_sees_nor_copies_a_slot(slot: Slot) -> None:
    assert "harness-slot" in Path("/proc/self/maps").read_text()
    assert not seen_in_a_fork("harness-slot")


def test_every_page_of_a_new_slot_is_allocated(slot: Slot) -> None:
    assert os.fstat(slot.fd).st_blocks * 512 >= slot.size


def test_populating_changes_no_byte(slot: Slot) -> None:
    seal(slot)
    before = bytes(slot.buffer)
    slot.populate()

    assert bytes(slot.buffer) == before


def test_a_slot_closes_twice_and_gives_its_descriptor_back() -> None:
    before = open_files()
    slot = Slot.create(PAGE * 4)
    slot.close()
    slot.close()

    assert open_files() <= before


def test_a_view_outlives_a_closed_slot() -> None:
    slot = Slot.create(slot_bytes(SPANS, 100))
    seal(slot)
    view = slot.shard(SPANS[0])
    slot.close()

    assert bytes(view) == b"\1" * 10


def test_a_slot_that_cannot_be_allocated_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    before = open_files()

    with pytest.raises(OSError, match="no memory"):
        Slot.create(PAGE * 4)

    assert open_files() <= before


def test_memory_is_unregistered_where_a_slot_is_dropped_without_being_closed() -> None:
    called: list[str] = []
    slot = Slot.create(PAGE)
    fd = slot.fd
    slot.at_close(lambda: called.append("unpin"))

    del slot

    assert called == ["unpin"]
    os.close(fd)


def test_a_forked_child_unregisters_nothing() -> None:
    read, write = os.pipe()
    slot = Slot.create(PAGE)
    slot.at_close(lambda: os.write(write, b"unpin"))
    child = os.fork()
    if child == 0:
        del slot
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)

    assert os.read(read, 10) == b""
    os.close(read)
    slot._at_close.clear()
    slot.close()
