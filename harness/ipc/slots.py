"""Slots: shared memory between one trainer and its agent, for one snapshot each.

Owns their memory layout; knows neither tensors nor stores. A slot is a memfd, or where memory has no room for one a
file without a name, which `window.py` fills:

    0      header page: magic, state, sequence, step, payload bytes, where the record is
    4096   shards, each a whole safetensors file, each at a multiple of 4096
    ...    record: JSON that describes the shards and holds the small state

Payload first, then one small record that names it: `seal` writes the record, then the state word. A slot whose state
word is not SEALED holds nothing, whatever died in between (I8). The sequence number orders slots of one host.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.manifest import StoredPiece, pieces_from_json, pieces_to_json
from harness.ipc import pages
from harness.ipc.pages import PAGE, keep_from_children

_MAGIC = b"HRNSLOT1"
_HEADER = struct.Struct("<8sQQQQQQQ")
_STATE_AT = 8
_MIN_RECORD_BYTES = 256 * 1024
_POPULATE_PIECE = 8 * 1024 * 1024
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; mmap.madvise would hold the GIL for the whole range


class SlotState(enum.IntEnum):
    """EMPTY → FILLING → SEALED → FILLING → ...; only the trainer (or a fetch) moves it."""

    EMPTY = 0
    FILLING = 1
    SEALED = 2


@dataclass(frozen=True)
class ShardSpan:
    """Where one shard lies in a slot: `offset` is a multiple of 4096, `size` the file's bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class SlotRecord:
    """The record of a sealed slot, which describes its content.

    Attributes:
        step: completed optimizer steps.
        rank: the rank that the shards belong to.
        world_size: number of ranks.
        generation: the start of the trainers that made it.
        shards: in file order.
        state: small state, JSON text in the tagged encoding.
        environment: what bit-identity depends on.
        sealed_at: ISO 8601 UTC.
        pieces: of several ranks, as in `Part`.
        assignment: of several ranks: identity of what all of them store. Shares of two assignments are no snapshot.
        sums: of several ranks: of each piece that was compared between them, a sum of its bytes, by `pieces.label`. It
            is here, and not in a message, for whatever agent finds the slot: shares that differ are no snapshot.
    """

    step: int
    rank: int
    world_size: int
    generation: int
    shards: tuple[ShardSpan, ...]
    state: str
    environment: dict[str, str]
    sealed_at: str
    pieces: dict[str, StoredPiece] | None = None
    assignment: str = ""
    sums: dict[str, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the record's bytes: a line of JSON, then the small state unchanged."""
        head = {**vars(self), "shards": [vars(span) for span in self.shards]}
        state = str(head.pop("state"))
        if (pieces := head.pop("pieces")) is not None:
            head["pieces"] = pieces_to_json(pieces)
        if not self.assignment:
            del head["assignment"]
        if not self.sums:
            del head["sums"]
        return json.dumps(head).encode() + b"\n" + state.encode()

    @classmethod
    def decode(cls, data: bytes) -> SlotRecord:
        """The inverse of `encode`. Raises ValueError, KeyError or TypeError on anything else."""
        head, _, state = data.partition(b"\n")
        fields: dict[str, Any] = {**json.loads(head), "state": state.decode()}
        fields["shards"] = tuple(ShardSpan(**span) for span in fields["shards"])
        if "pieces" in fields:
            fields["pieces"] = pieces_from_json(fields["pieces"])
        return cls(**fields)


def place_shards(sizes: Sequence[tuple[str, int]]) -> tuple[ShardSpan, ...]:
    """Lay shards of the given names and sizes behind the header page."""
    spans, offset = [], PAGE
    for name, size in sizes:
        spans.append(ShardSpan(name, offset, size))
        offset = _align(offset + size)
    return tuple(spans)


def slot_bytes(spans: Sequence[ShardSpan], record_bytes: int) -> int:
    """Return the size of a slot that holds `spans` and a record of up to twice `record_bytes`: small state may grow."""
    end = spans[-1].offset + spans[-1].size if spans else PAGE
    return _align(end) + _align(max(_MIN_RECORD_BYTES, 2 * record_bytes))


class SlotFull(ValueError):
    """The record does not fit: a larger slot is needed."""


class Slot:
    """One mapped slot. Created by the agent, filled by the trainer, read by the agent between seal and release."""

    def __init__(self, fd: int) -> None:
        """Map the memfd or file `fd`, which the slot owns from now on."""
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.on_disk = not _is_memory(fd)
        self._map, start = (mmap.mmap(fd, self.size), 0) if self.on_disk else pages.mapped(fd, self.size)
        # A forked DataLoader worker must neither see the slot nor pay for copying its page tables.
        keep_from_children(self._map)
        self.buffer = memoryview(self._map)[start : start + self.size]
        self._at_close: list[Callable[[], object]] = []
        self._pid = os.getpid()

    @classmethod
    def create(cls, size: int, directory: Path | None = None) -> Slot:
        """Make a new, empty slot with every page or block allocated. Blocks up to 0.5 s per GiB in memory.

        Args:
            size: bytes.
            directory: of a slot on a disk; `None` for a slot in memory.

        Raises:
            OSError: there is not enough room (ENOMEM, ENOSPC).
        """
        fd = os.memfd_create("harness-slot", os.MFD_CLOEXEC) if directory is None else _unnamed_file(directory)
        try:
            pages.allocate(fd, size) if directory is None else pages.reserve(fd, 0, size)
            return cls._empty(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def creating(cls, size: int) -> tuple[Slot, Generator[int]]:
        """Make a slot in memory that can be filled from its beginning while it is still being allocated.

        Args:
            size: bytes.

        Returns:
            The empty slot, and the generator that allocates it: see `pages.allocating`.

        Raises:
            OSError: there is no memory even for its first page, or no room in the address space.
        """
        fd = os.memfd_create("harness-slot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            pages.reserve(fd, 0, min(PAGE, size))  # the header page: without memory for it, a write would kill us
            return cls._empty(fd), pages.allocating(fd, size)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def _empty(cls, fd: int) -> Slot:
        slot = cls(fd)
        slot._write_header(SlotState.EMPTY, 0, 0, 0, 0, 0, 0)
        return slot

    def populate(self, *, to_write: bool = True) -> None:
        """Map every page now, so that the first copy does not wait. Small pieces through ctypes do not hold the GIL.

        Does nothing for a slot on a disk, which is not filled through its mapping.

        Args:
            to_write: whether the pages will be written. Pages that will only be read are mapped several at a time.
        """
        if self.on_disk:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        advice = _MADV_POPULATE_WRITE if to_write else _MADV_POPULATE_READ
        for offset in range(0, self.size, _POPULATE_PIECE):
            length = min(_POPULATE_PIECE, self.size - offset)
            if libc.madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), advice) != 0:
                return  # an older kernel: the first copy maps the pages instead

    @property
    def state(self) -> SlotState:
        """The slot's state; EMPTY for a foreign or damaged header too, since such a slot holds nothing."""
        magic, state, *_ = _HEADER.unpack_from(self.buffer)
        return SlotState(state) if magic == _MAGIC and state in (1, 2) else SlotState.EMPTY

    @property
    def sequence(self) -> int:
        """Sequence number of the last seal: the order of seals on this host; 0 before the first."""
        return int(_HEADER.unpack_from(self.buffer)[2])

    @property
    def step(self) -> int:
        """Step of the last seal."""
        return int(_HEADER.unpack_from(self.buffer)[3])

    @property
    def payload_bytes(self) -> int:
        """Bytes of shards in the last seal."""
        return int(_HEADER.unpack_from(self.buffer)[4])

    def begin(self) -> None:
        """Mark the content as void, before its first byte changes."""
        struct.pack_into("<Q", self.buffer, _STATE_AT, SlotState.FILLING)

    def seal(self, record: SlotRecord, sequence: int) -> None:
        """Seal the payload that is in place: write the record that names it, then the state word.

        Raises:
            SlotFull: the record does not fit behind the shards.
        """
        data = record.encode()
        last = record.shards[-1] if record.shards else ShardSpan("", 0, PAGE)
        offset = _align(last.offset + last.size)
        if offset + len(data) > self.size:
            raise SlotFull(f"{len(data)} bytes of record behind {offset} of {self.size}")
        self.buffer[offset : offset + len(data)] = data
        payload = sum(span.size for span in record.shards)
        self._write_header(SlotState.FILLING, sequence, record.step, payload, offset, len(data), zlib.crc32(data))
        struct.pack_into("<Q", self.buffer, _STATE_AT, SlotState.SEALED)

    def record(self) -> SlotRecord | None:
        """Return the sealed content's record; `None` if there is no sealed content or it cannot be trusted."""
        magic, state, _, _, _, offset, length, crc = _HEADER.unpack_from(self.buffer)
        if magic != _MAGIC or state != SlotState.SEALED or offset + length > self.size:
            return None
        data = bytes(self.buffer[offset : offset + length])
        if zlib.crc32(data) != crc:
            return None
        try:
            record = SlotRecord.decode(data)
        except (ValueError, KeyError, TypeError):
            return None
        inside = all(span.offset >= PAGE and span.offset + span.size <= offset for span in record.shards)
        return record if inside else None

    def shard(self, span: ShardSpan) -> memoryview:
        """Return the bytes of one shard, without a copy."""
        return self.buffer[span.offset : span.offset + span.size]

    def at_close(self, call: Callable[[], object]) -> None:
        """Call `call` before the memory is unmapped, for a caller that has registered it elsewhere."""
        self._at_close.append(call)

    def close(self) -> None:
        """Close the descriptor, and unmap the memory unless something (such as a tensor) still uses it. Idempotent."""
        if self.fd < 0:
            return
        self._call_at_close()
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):  # views are alive: the mapping ends with the last of them
            self.buffer.release()
            self._map.close()

    def __del__(self) -> None:
        # A slot that was dropped without being closed. Its memory goes now, and may not stay registered with CUDA: what
        # is mapped here next would be taken for it, and a copy from a GPU would go to the old memory, without an error.
        if getattr(self, "_pid", None) == os.getpid():
            self._call_at_close()

    def _call_at_close(self) -> None:
        while self._at_close:
            self._at_close.pop()()

    def _write_header(
        self, state: int, sequence: int, step: int, payload: int, offset: int, length: int, crc: int
    ) -> None:
        _HEADER.pack_into(self.buffer, 0, _MAGIC, state, sequence, step, payload, offset, length, crc)


def _unnamed_file(directory: Path) -> int:
    """Create a file that vanishes with its last descriptor. Raises OSError."""
    with tempfile.TemporaryFile(dir=directory) as file:  # O_TMPFILE, or made and unlinked at once
        return os.dup(file.fileno())


def _is_memory(fd: int) -> bool:
    """Return whether a descriptor is a memfd. Its receiver has no other way to tell: only memory has seals."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _align(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
