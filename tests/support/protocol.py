"""Stores that watch the protocol, die in the middle of it, and rot; and snapshots small enough to have thousands of.

`ProtocolStore` checks at the moment of every write and delete what must hold at that moment (I2, I3, I6): a violation
is an AssertionError there, not a riddle later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cloud.digest import crc64nvme, format_crc
from cloud.directory.filesystem import FileSystem
from cloud.errors import NotFound, OutcomeUnknown, Unavailable
from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.store import CHUNK_BYTES, ObjectInfo, ObjectStore, Progress, Receipt, Source
from harness.core.manifest import ShardEntry, StoredPiece, parse_manifest, parse_part
from harness.core.snapshot import RunKeys, SnapshotId, shard_name
from harness.ipc.slots import ShardSpan, Slot, SlotRecord, place_shards, slot_bytes
from harness.snapshots.commit import Staged, StagedPart

KEYS = RunKeys("run")
RUN_ID = "0123456789abcdef" * 2
SEALED_AT = "2026-01-02T03:04:05.678+00:00"
FOREVER = Deadline.never()


class Crash(BaseException):
    """The process dies here. Nothing may catch it: no `finally:` of a dead process runs, and none is relied on."""


@dataclass(frozen=True)
class Fault:
    """What happens at the `at`-th call of a store from now on.

    `die before` and `die after` the call's effect; `lose reply`: the effect happens, and an error is raised; `fail`: no
    effect, once; `down`: no effect, from then on.
    """

    kind: str
    at: int


FAULTS = ("die before", "die after", "lose reply", "fail", "down")


class FastFileSystem(FileSystem):
    """No disk is waited for: these tests crash processes, not machines."""

    @staticmethod
    def fsync(fd: int) -> None:
        """Nothing."""

    @staticmethod
    def fdatasync(fd: int) -> None:
        """Nothing."""


@dataclass
class ProtocolStore:
    """An ObjectStore around `inner` that fails as told and refuses to watch a broken rule.

    Attributes:
        inner: holds the objects; asked directly by a test that wants to see or to damage them.
        may_uncommit: called with each snapshot whose manifest is about to be deleted; raises where that is wrong.
        written: what every object holds that was not deleted, by key; what is damaged may hold something else.
        damaged: keys whose bytes were changed on purpose.
        shared: several agents write at once. What one of them deletes another may be about to name: then a torn commit
            may be seen for a moment, and whoever watches the whole judges it.
        deleted: every key that was there and was deleted.
        spoils: called with the key of each copy of something damaged.
    """

    inner: ObjectStore
    may_uncommit: Callable[[SnapshotId], None] = lambda snapshot: None
    written: dict[str, bytes] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    shared: bool = False
    deleted: set[str] = field(default_factory=set)
    spoils: Callable[[str], None] = lambda key: None
    _fault: Fault | None = None
    _calls: int = 0

    @property
    def url(self) -> str:
        return self.inner.url

    @contextmanager
    def armed(self, fault: Fault | None) -> Iterator[None]:
        """Let `fault` happen inside; what is left of it afterwards is forgotten."""
        self._fault, self._calls = fault, 0
        try:
            yield
        finally:
            self._fault = None

    def damage(self, key: str, how: str, at: float = 0.5) -> None:
        """Flip a bit of an object, cut it off or delete it: behind everybody's back. `at` is where, of 1."""
        data = bytearray(self.peek(key))
        self.damaged.add(key)
        if how == "delete" or not data:
            self.inner.delete(key, deadline=FOREVER)
            self.written.pop(key, None)
            return
        if how == "flip":
            data[int(len(data) * at)] ^= 1
        elif how == "truncate":
            del data[int(len(data) * at) :]
        self.inner.put(key, memoryview(data), deadline=FOREVER)

    def peek(self, key: str) -> bytes:
        """An object's bytes, without faults."""
        return self.inner.read(key, limit_bytes=1 << 30, deadline=FOREVER)

    def keys(self, prefix: str = "") -> list[str]:
        """Keys, without faults."""
        return [info.key for info in self.inner.list(prefix, deadline=FOREVER)]

    # ---- ObjectStore ------------------------------------------------------------------------------------------------

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        def effect() -> Receipt:
            try:
                data = source.read_bytes() if isinstance(source, Path) else bytes(source)
            except FileNotFoundError as err:
                raise NotFound(f"the source {source} is gone") from err
            self._check_write(key, data)
            return self.inner.put(key, source, deadline=deadline, progress=progress)

        return self._change(effect)

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        def effect() -> None:
            if key not in self.keys(key):
                self._check_write(key, data)
            self.inner.put_if_absent(key, data, deadline=deadline)

        self._change(effect)

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        def effect() -> None:
            self.inner.copy(source, key, expected, deadline=deadline)
            self._check_write(key, self.written[source])
            if source in self.damaged:  # a store without sums copies what it has; whoever reads it back finds out
                self.damaged.add(key)
                self.spoils(key)
            else:
                assert self.peek(key) == self.written[key], f"I3: {key} is not what {source} was when it was written"

        self._change(effect)

    def delete(self, key: str, *, deadline: Deadline) -> None:
        def effect() -> None:
            self._check_delete(key)
            self.inner.delete(key, deadline=deadline)
            if self.written.pop(key, None) is not None:
                self.deleted.add(key)

        self._change(effect)

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        self._look(lambda: self.inner.get(key, into, offset=offset, deadline=deadline))

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        return self._look(lambda: self.inner.read(key, limit_bytes=limit_bytes, deadline=deadline))

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        return self._look(lambda: self.inner.stat(key, deadline=deadline))

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._look(lambda: self.inner.list(prefix, after=after, deadline=deadline))

    def unfinished(self, prefix: str, *, deadline: Deadline) -> list[str]:
        return self._look(lambda: self.inner.unfinished(prefix, deadline=deadline))

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        self._change(lambda: self.inner.abandon(key, deadline=deadline))

    def local_path(self, key: str) -> Path | None:
        return self.inner.local_path(key)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def reserve(self, size: int) -> None:
        self.inner.reserve(size)

    def close(self) -> None:
        self.inner.close()

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _change(self, effect: Callable[[], Any]) -> Any:
        kind = self._strikes()
        if kind == "die before":
            raise Crash
        if kind in ("fail", "down"):
            raise Unavailable("injected: not done")
        result = effect()
        if kind == "die after":
            raise Crash
        if kind == "lose reply":
            raise OutcomeUnknown("injected: done, and nobody knows")
        return result

    def _look(self, look: Callable[[], Any]) -> Any:
        kind = self._strikes()
        if kind in ("die before", "die after"):
            raise Crash
        if kind is not None:
            raise Unavailable("injected: no answer")
        return look()

    def _strikes(self) -> str | None:
        self._calls += 1
        fault = self._fault
        if fault is None or not (self._calls == fault.at or (fault.kind == "down" and self._calls > fault.at)):
            return None
        return fault.kind

    # ---- rules ------------------------------------------------------------------------------------------------------

    def _check_write(self, key: str, data: bytes) -> None:
        before = self.written.get(key)
        assert before is None or before == data, f"I2: {key} was written before, with other bytes"
        self.written[key] = data
        self.damaged.discard(key)
        snapshot = KEYS.parse_commit(key)
        if snapshot is not None:
            manifest = parse_manifest(data, KEYS, snapshot)
            for part in manifest.parts:
                self._check_present(KEYS.part(manifest.directory, part.rank, part.world_size), None)
                for shard in part.shards:
                    self._check_present(KEYS.payload(manifest.directory, shard.name), shard)
        elif key.startswith(KEYS.snapshots) and key.endswith(".json"):
            part = parse_part(data, key)
            for shard in part.shards:
                self._check_present(KEYS.payload(part.directory, shard.name), shard)

    def _check_present(self, key: str, shard: ShardEntry | None) -> None:
        if key in self.damaged:
            return
        try:
            data = self.peek(key)
        except NotFound:
            if self.shared and key in self.deleted:
                return
            raise AssertionError(f"I3: {key} is named before it is durable") from None
        if shard is not None:
            assert (len(data), format_crc(crc64nvme(data))) == (shard.size, shard.crc64nvme), f"I3: {key}"

    def _check_delete(self, key: str) -> None:
        present = set(self.keys(KEYS.run))
        if key not in present:
            return
        assert KEYS.parse_claim(key) is None, "a claim is never deleted"
        snapshot = KEYS.parse_commit(key)
        if snapshot is not None:
            self.may_uncommit(snapshot)
            return
        named = KEYS.parse_directory(key)
        if named is None:
            return
        snapshot, directory = named
        manifest_key = KEYS.commit(snapshot)
        if manifest_key in present:
            manifest = parse_manifest(self.written[manifest_key], KEYS, snapshot)
            assert self.shared or manifest.directory != directory, f"I6: {key} is deleted while its manifest stands"
        if not key.endswith(".json"):
            parts = [
                other
                for other in present
                if other.startswith(f"{KEYS.snapshots}{directory}/") and other.endswith(".json")
            ]
            assert self.shared or not parts, f"I6: the shard {key} is deleted before its part"


def retrying(store: ObjectStore) -> RetryingStore:
    """As the agent uses every store, without the pauses."""
    return RetryingStore(store, sleep=lambda seconds: None)


# ---- small snapshots ------------------------------------------------------------------------------------------------


def altered(staged: Staged, **changes: Any) -> Staged:
    """`staged`, of one rank, with a part that differs in these fields."""
    (part,) = staged.parts
    return dataclasses.replace(staged, parts=[dataclasses.replace(part, **changes)])


SHARD_BYTES = (64, 5000)


@dataclass(frozen=True)
class Content:
    """What a snapshot holds: a function of its name and of the run, so that no two are alike.

    With `frozen` the first shard is the same in all of a run's. It is of `world_size` ranks; what is said of its
    shards, without more, is said of the first one's.
    """

    id: SnapshotId
    run_id: str = RUN_ID
    parent: str | None = None
    frozen: bool = False
    world_size: int = 1

    @property
    def shards(self) -> list[bytes]:
        """Each shard's bytes."""
        return self.shards_of(0)

    def shards_of(self, rank: int) -> list[bytes]:
        """Each shard's bytes, of one rank."""
        seeds = [self.run_id if self.frozen else f"{self.run_id} {self.id}", f"{self.run_id} {self.id}"]
        whose = f" {rank}" if rank else ""
        return [
            hashlib.shake_128(f"{seeds[index]}{whose}".encode() + bytes([index])).digest(size)
            for index, size in enumerate(SHARD_BYTES)
        ]

    @property
    def state(self) -> str:
        """Small state."""
        return json.dumps({"step": self.id.step, "generation": self.id.generation}, separators=(",", ":"))

    def staged(self) -> Staged:
        """Ready to publish."""
        return Staged(
            id=self.id,
            run_id=self.run_id,
            parent=self.parent,
            parts=[
                StagedPart(
                    rank=rank,
                    world_size=self.world_size,
                    state=b"{}" if rank else self.state.encode(),
                    environment={},
                    sealed_at=SEALED_AT,
                    pieces=self._pieces or msgspec.UNSET,
                    shards=[
                        (shard_name(rank, self.world_size, index), memoryview(data))
                        for index, data in enumerate(self.shards_of(rank))
                    ],
                )
                for rank in range(self.world_size)
            ],
        )

    def entries(self) -> list[ShardEntry]:
        """What each shard has to be, as a manifest says it."""
        return [
            ShardEntry(
                name=shard_name(0, 1, index),
                size=len(data),
                crc64nvme=format_crc(crc64nvme(data)),
                chunk_bytes=CHUNK_BYTES,
                chunks=(format_crc(crc64nvme(data)),),
            )
            for index, data in enumerate(self.shards)
        ]

    def record(self, rank: int = 0) -> SlotRecord:
        """What a slot says of it."""
        return SlotRecord(
            step=self.id.step,
            rank=rank,
            world_size=self.world_size,
            generation=self.id.generation,
            shards=_spans(rank, self.world_size),
            state=self.state,
            environment={},
            sealed_at=SEALED_AT,
            pieces=self._pieces,
        )

    @property
    def _pieces(self) -> dict[str, StoredPiece] | None:
        """Of several ranks: each has its own."""
        return None if self.world_size == 1 else {"weights": StoredPiece(own=True)}

    def fill(self, slot: Slot, rank: int = 0, *, half: bool = False) -> None:
        """Copy the shards into the slot, as a trainer does; or die over it."""
        slot.begin()
        for span, data in list(zip(_spans(rank, self.world_size), self.shards_of(rank), strict=True))[
            : 1 if half else None
        ]:
            slot.shard(span)[:] = data

    def seal(self, slot: Slot, sequence: int, rank: int = 0, *, assignment: str = "") -> None:
        """Copy the shards, and say so."""
        self.fill(slot, rank)
        slot.seal(dataclasses.replace(self.record(rank), assignment=assignment), sequence)

    def is_in(self, slot: Slot, rank: int = 0) -> bool:
        """Whether a sealed slot holds exactly this."""
        record = slot.record()
        if (
            record is None
            or record.state != self.state
            or (record.generation, record.step) != (self.id.generation, self.id.step)
        ):
            return False
        return [bytes(slot.shard(span)) for span in record.shards] == self.shards_of(rank)


def _spans(rank: int, world_size: int) -> tuple[ShardSpan, ...]:
    return place_shards([(shard_name(rank, world_size, index), size) for index, size in enumerate(SHARD_BYTES)])


SLOT_BYTES = slot_bytes(_spans(0, 1), 100)
