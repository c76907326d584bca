"""locate → fetch → verify → ResumePoint; falls back to an older snapshot, and logs it.

Owns how a copy becomes a resume point; `snapshots.candidates` decides which copy comes first. A copy is verified before
it is used, if a tier has digests of it. A copy that is damaged in every one of several reads is skipped, and the next
older one is taken (I12). It is quarantined for all hosts only if this reader cannot be the cause of the damage. A run
that is known to have commits never silently starts at step 0 (I10).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from cloud.digest import combine, crc64nvme, format_crc
from cloud.directory.direct import aligned_buffer
from cloud.errors import NotFound, Truncated
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.store import ObjectStore
from harness.agent.resume.preallocate import OutOfMemory, Preallocation
from harness.agent.resume_point import MemoryCopy, ResumePoint
from harness.agent.save.slot_pool import Medium, SlotRequest
from harness.core import events, small_state
from harness.core.manifest import ForeignFormat, Manifest, Part
from harness.core.policy.copying import patience_s
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import ConfigError, NoSpace, SnapshotCorrupt
from harness.ipc.slots import ShardSpan, Slot, SlotRecord, place_shards, slot_bytes
from harness.ipc.window import put
from harness.snapshots import commit, records
from harness.snapshots.candidates import ForeignRun, StoredCopy, check_run, choose
from harness.snapshots.fetch import Differs, NotRead, StoredShard

FETCH_S = 3600.0
LOOK_S = 60.0
REQUESTS = 16  # at once, to a store behind a network: one connection to S3 gives about 0.09 GB/s
PAUSES_S = (0.5, 1.0, 2.0)  # before bytes that differ, or are missing, are read again
READS = 8  # at once, from a disk: while some chunks are verified, others arrive
_T = TypeVar("_T")


Copy = MemoryCopy | StoredCopy
Records = tuple[SlotRecord, ...]


class _Missing(NotRead):
    """The snapshot's manifest is there, but a shard is missing."""


class SnapshotsMissing(SnapshotCorrupt):
    """The store lists snapshots, but reports each of them as missing. A retry may get another answer."""


class Finder:
    """Tries copies in order until one is in a slot and verified. Blocks on disk and network; one thread."""

    looks_ahead = True
    """Whether it may fetch a snapshot that turns out not to be the newest one."""

    def __init__(self, keys: RunKeys, run_id: str, host: str, emit: commit.Emit, slot_disk: Path | None = None) -> None:
        """Prepare; nothing is read yet.

        Args:
            keys: of the run.
            run_id: the identity that a copy must have to count.
            host: for quarantine records.
            emit: the journal.
            slot_disk: see `Settings.slot_disk`.
        """
        self._keys, self._run_id, self._host, self._emit, self._slot_disk = keys, run_id, host, emit, slot_disk
        self._condemned = False

    def find(self, copies: Sequence[Copy], head: Callable[[Copy, Records], None]) -> ResumePoint | None:
        """Return the newest usable copy, in slots; `None` if the run has no snapshot.

        Args:
            copies: candidates, in any order.
            head: called with each copy that is about to be fetched and its records, in rank order, as soon as those are
                known, so that small state is ready long before the tensors are.

        Raises:
            SnapshotCorrupt: there are snapshots of this run, and none of them can be used.
            ConfigError: the newest one has a version of the format that this harness does not know.
            NoSpace: the newest one fits neither into memory nor onto the disk.
            SnapshotsMissing: there are snapshots of this run, and the store reports each of them as missing.
            CloudError: a store failed; nothing was concluded.
        """
        refused: dict[SnapshotId, str] = {}
        missing = True
        damaged: dict[str, tuple[StoredCopy, str]] = {}

        def reject(copy: Copy, err: Exception) -> None:
            nonlocal missing
            self._emit(events.Rejected(snapshot=str(copy.id), tier=copy.tier, reason=str(err)))
            if isinstance(err, ForeignRun):
                return
            missing = missing and isinstance(err, NotFound | _Missing)
            refused[copy.id] = str(err)
            if isinstance(err, Differs) and isinstance(copy, StoredCopy):
                damaged.setdefault(copy.tier, (copy, str(err)))

        try:
            point = choose(copies, self._keys, lambda copy: self._take(copy, head), reject)
        except ForeignFormat as err:
            raise ConfigError(f"{err}. Nothing was started: resume with a version that knows it") from err
        if point is not None:
            if point.tier in damaged:
                self._condemn(*damaged[point.tier])
            return point
        if refused:
            kind = SnapshotsMissing if missing else SnapshotCorrupt
            raise kind(
                "this run has snapshots, and none of them can be used here: "
                + "; ".join(f"{snapshot}: {reason}" for snapshot, reason in refused.items())
                + f". Nothing was started. To find out whether this host ({self._host}) is at fault, run harness "
                "verify on another one; --fresh starts at step 0"
            )
        return None

    def _take(self, copy: Copy, head: Callable[[Copy, Records], None]) -> ResumePoint:
        if isinstance(copy, MemoryCopy):
            self._emit(events.Located(snapshot=str(copy.id), tier=copy.tier))
            head(copy, copy.records)
            return self._from_memory(copy)
        manifest = self._read_manifest(copy)
        check_run(manifest, self._run_id)
        self._emit(events.Located(snapshot=str(copy.id), tier=copy.tier))
        head(copy, to_records(manifest))
        return self._from_store(copy, manifest)

    def _read_manifest(self, copy: StoredCopy) -> Manifest:
        deadline = Deadline.after(FETCH_S)

        def read() -> Manifest:
            try:
                return records.read_manifest(copy.store, self._keys, copy.id, deadline)
            except ForeignFormat:
                raise
            except SnapshotCorrupt as err:
                raise Differs(str(err)) from err

        return again(read)

    def _condemn(self, copy: StoredCopy, reason: str) -> None:
        """Quarantine a damaged snapshot for all hosts: at most one per start, after another was read from that tier.

        A host that finds damage everywhere is most likely damaged itself: bad memory, a network card, a proxy.
        """
        if self._condemned:
            return
        self._condemned = True
        commit.quarantine(copy.store, self._keys, copy.id, reason, self._host, Deadline.after(60.0))
        self._emit(events.Quarantined(snapshot=str(copy.id), reason=reason))

    def _from_memory(self, copy: MemoryCopy) -> ResumePoint:
        began_at, verified = time.monotonic(), copy.manifest is not None
        if copy.manifest is not None:
            for sealed, part in zip(copy.slots, copy.manifest.parts, strict=True):
                for span, shard in zip(sealed.record.shards, part.shards, strict=True):
                    if format_crc(crc64nvme(sealed.slot.shard(span))) != shard.crc64nvme:
                        raise SnapshotCorrupt(f"slot {sealed.index}: {span.name} is not what was committed")
        size = sum(sealed.payload_bytes for sealed in copy.slots)
        seconds = self._emit_fetched(copy, size, began_at, verified=verified)
        slots, indexes = zip(*((sealed.slot, sealed.index) for sealed in copy.slots), strict=True)
        return ResumePoint(copy.id, copy.tier, slots, copy.records, indexes, verified, seconds)

    def _from_store(self, copy: StoredCopy, manifest: Manifest) -> ResumePoint:
        """Fetch the parts of all ranks. If one part cannot be fetched, the whole copy is unusable."""
        if manifest.parts[0].files is not msgspec.UNSET:
            raise ConfigError(
                f"snapshot {copy.id} is what a program has saved by itself: "
                "resume the run with --watch and its directory"
            )
        began_at, slots = time.monotonic(), list[Slot]()
        try:
            for part, record in zip(manifest.parts, to_records(manifest), strict=True):
                slots.append(self._fetch_part(copy, manifest, part, record))
        except BaseException:
            for slot in slots:
                slot.close()
            raise
        seconds = self._emit_fetched(copy, manifest.payload_bytes, began_at, verified=True)
        return ResumePoint(copy.id, copy.tier, tuple(slots), to_records(manifest), (), True, seconds, manifest)

    def _fetch_part(self, copy: StoredCopy, manifest: Manifest, part: Part, record: SlotRecord) -> Slot:
        size = slot_bytes(record.shards, len(record.encode()))
        # A trainer on the CPU, or one that builds its state there, will need as much memory again.
        reserve = size if self._slot_disk is not None else 0
        wanted = SlotRequest(size, self._slot_disk, reserve_bytes=reserve)
        try:
            return self._fetch(copy, manifest, part, record, wanted.begin())
        except OutOfMemory:
            return self._fetch(copy, manifest, part, record, replace(wanted, medium=Medium.DISK).begin())

    def _fetch(
        self, copy: StoredCopy, manifest: Manifest, part: Part, record: SlotRecord, begun: tuple[Slot, Generator[int]]
    ) -> Slot:
        """Fill and seal a slot whose allocation has begun."""
        slot, making = begun
        ahead = Preallocation(making)
        try:
            with self._unless_retired(copy):
                self._fill(slot, ahead, copy.store, manifest.directory, part, record)
            ahead.wait()
            if slot.on_disk:
                # IMPORTANT: the kernel drops pages that the disk fails to write: verified now, and missing when read.
                with _disk_failures():
                    os.fdatasync(slot.fd)
            slot.seal(record, 0)
        except BaseException:
            ahead.stop()
            slot.close()
            raise
        return slot

    @contextlib.contextmanager
    def _unless_retired(self, copy: StoredCopy) -> Iterator[None]:
        """Context manager for reading shards: one that is gone, or cut off, makes the copy one that cannot be read.

        Raises:
            NotRead: in place of NotFound and Truncated, if the manifest is there.
            NotFound: the manifest is gone as well: it was retired meanwhile, which is no damage.
        """
        try:
            yield
        except (NotFound, Truncated) as err:
            self._read_manifest(copy)
            raise (_Missing if isinstance(err, NotFound) else NotRead)(str(err)) from err

    def _fill(
        self, slot: Slot, ahead: Preallocation, store: ObjectStore, directory: str, part: Part, record: SlotRecord
    ) -> None:
        deadline = Deadline.after(patience_s(part.payload_bytes, FETCH_S))
        slot.begin()
        for span, shard in zip(record.shards, part.shards, strict=True):
            stored = StoredShard(store, self._keys.payload(directory, shard.name), shard)
            with stored.unless_right(again(partial(stored.stat, deadline))):
                stored.check_whole(_fetch_shard(stored, slot, span, ahead, deadline))

    def _emit_fetched(self, copy: Copy, size: int, began_at: float, *, verified: bool) -> float:
        """Emit `Fetched`; return the seconds since `began_at`."""
        seconds = time.monotonic() - began_at
        self._emit(
            events.Fetched(snapshot=str(copy.id), tier=copy.tier, bytes=size, seconds=seconds, verified=verified)
        )
        return seconds


@contextlib.contextmanager
def _disk_failures() -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise NoSpace(f"the disk that takes a snapshot instead of memory has failed: {err.strerror}") from err


def again(read: Callable[[], _T], pointless: threading.Event | None = None) -> _T:
    """Repeat a failed read several times before its data counts as damaged or gone: the fault may be in the transfer.

    Args:
        read: raises errors that may be transient: Differs, NotFound, Truncated.
        pointless: set once the result does not matter any more.
    """
    for pause_s in PAUSES_S:
        try:
            return read()
        except (Differs, NotFound, Truncated):
            if (pointless or threading.Event()).wait(pause_s):
                break
    return read()


def _fetch_shard(shard: StoredShard, slot: Slot, span: ShardSpan, ahead: Preallocation, deadline: Deadline) -> int:
    """Fill `span` with many requests at once, verify each chunk as it arrives, and return the checksum of the whole."""
    target, local = slot.shard(span), shard.store.local_path(shard.key) is not None
    requests = READS if local or slot.on_disk else REQUESTS  # each holds a chunk in memory if the slot is on a disk

    failed = threading.Event()  # one chunk that cannot be fetched is enough

    def fetch(number: int) -> tuple[int, int]:
        at, size = shard.span(number)
        piece = target[at : at + size]
        # Not into the mapping of a file: that is slow, and a direct read would bypass its file system.
        by_way = aligned_buffer(size) if slot.on_disk else piece
        ahead.wait_for(span.offset + at + size)
        try:
            crc = again(lambda: shard.read_chunk(number, by_way, deadline), failed)
        except BaseException:
            failed.set()
            raise
        if slot.on_disk:
            with _disk_failures():
                put(slot, span.offset + at, by_way)
        return crc, size

    numbers = range(len(shard.entry.chunks))
    if len(numbers) == 1:
        fetched = [fetch(0)]
    else:
        pool = Pool(min(requests, len(numbers)), "harness-fetch")
        futures = [pool.submit(fetch, number) for number in numbers]
        try:
            fetched = [future.result() for future in futures]
        finally:
            pool.shutdown()
            wait(futures)  # from here on no thread writes into the target
    total = 0
    for crc, size in fetched:
        total = combine(total, crc, size)
    return total


def to_records(manifest: Manifest) -> Records:
    """Return the slot records that describe a stored snapshot's parts: the same as their trainers sealed."""
    states = small_state.whole_states(manifest)
    return tuple(_to_record(part, state) for part, state in zip(manifest.parts, states, strict=True))


def _to_record(part: Part, state: bytes) -> SlotRecord:
    spans: tuple[ShardSpan, ...] = place_shards([(shard.name, shard.size) for shard in part.shards])
    return SlotRecord(
        step=part.step,
        rank=part.rank,
        world_size=part.world_size,
        generation=part.generation,
        shards=spans,
        state=state.decode(),
        environment=part.environment,
        sealed_at=part.sealed_at,
        pieces=None if part.pieces is msgspec.UNSET else part.pieces,
    )
