"""Deduplication: have the store copy shards that are byte-identical to the newest committed snapshot.

Owns the comparison, when it is worth making, and the copies: several at once, since each is a wait for the store. The
snapshot that is copied from is called the base. Each snapshot stays self-contained: a copy is an object in the
snapshot's own directory, and the base may be retired right afterwards. `commit.publish` sends the other shards.

    a shard in a slot ─▶ sum of its first chunk ─▶ no shard of the base has it: send (trained tensors end here)
                                 └─▶ of the next, … of the last, all equal ─▶ copy that one

So the search for changes reads one chunk of each changed shard, and not the whole state. A shard that was often
compared in vain is rarely compared again. Equal means: equal in size and in the CRC64NVME of every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cloud.digest import crc64nvme, format_crc, parse_crc
from cloud.errors import CloudError, CopyDiffers, NotFound
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.store import CHUNK_BYTES, ObjectStore, Receipt, Source
from harness.core.manifest import Manifest, ShardEntry
from harness.core.policy.copying import copy_patience_s, should_probe
from harness.core.snapshot import RunKeys

COPIES = 4
"""Shards that are copied at the same time; in S3, several requests copy each of them."""


@dataclass(frozen=True)
class Wanted:
    """A shard of a new snapshot.

    Attributes:
        name: the shard's name; name and size together identify it across snapshots.
        source: its bytes.
        known: their size and sums, if known already; then the bytes are not read.
    """

    name: str
    source: Source
    known: ShardEntry | None = None


@dataclass
class _Looks:
    """Counts of comparisons in a row that found nothing, and of those skipped since the last comparison."""

    in_vain: int = 0
    passed: int = 0

    def due(self) -> bool:
        """Whether to compare now; if not, count a skipped comparison."""
        if should_probe(self.in_vain, self.passed):
            return True
        self.passed += 1
        return False

    def found(self, found: bool) -> None:
        """Note whether a comparison found an equal shard."""
        self.in_vain, self.passed = (0 if found else self.in_vain + 1), 0


class Deduplicator:
    """Finds and copies unchanged shards for one tier, and learns when that is worth trying. For the tier's thread."""

    def __init__(self) -> None:
        """Begin without a base, so that no shard is found."""
        self.base: Manifest | None = None
        self._shards: dict[tuple[str, int], _Looks] = {}
        self._store = _Looks()

    def committed(self, manifest: Manifest) -> None:
        """Use `manifest`, the newest in the store, as the base from now on, unless the store does not copy."""
        self.base = manifest if self._store.due() else None

    def forget(self) -> None:
        """Drop the base, because it is gone or damaged."""
        self.base = None

    def copy(
        self,
        store: ObjectStore,
        keys: RunKeys,
        directory: str,
        wanted: Sequence[Wanted],
        deadline: Deadline,
        copied: Callable[[ShardEntry], None],
        refused: Callable[[str, CloudError], None],
    ) -> None:
        """Have the store copy into `directory` every shard that it holds already. Blocks until all copies have ended.

        The first copy is made alone: if the store refuses it, no other copy is requested.

        Args:
            store: the store that holds the base.
            keys: keys of the run.
            directory: the new snapshot's directory.
            wanted: the new snapshot's shards.
            deadline: for the whole; each copy has a share of it.
            copied: called with each shard that is there now; if it raises, this call ends, with copies in progress.
            refused: called with the name of each shard that could not be copied, and the error.

        Raises:
            CloudError: there is no time left.
        """
        base = self.base
        if base is None:
            return

        def make(one: Wanted, equal: ShardEntry) -> ShardEntry:
            source, key = keys.payload(base.directory, equal.name), keys.payload(directory, one.name)
            patience = deadline.sooner(copy_patience_s(equal.size, deadline.remaining_s))
            if source != key:
                store.copy(source, key, _receipt(equal), deadline=patience)
            elif not is_there(store, key, equal, patience):  # this snapshot itself, committed by a previous agent
                raise CopyDiffers(f"the store does not confirm that {key} is what was committed")
            return msgspec.structs.replace(equal, name=one.name)

        def conclude(name: str, result: Callable[[], ShardEntry]) -> None:
            try:
                entry = result()
            except CloudError as err:
                if deadline.expired:
                    raise
                # The base was retired just now, or is damaged: the store itself is able to copy.
                self._failed(store_is_able=isinstance(err, NotFound | CopyDiffers))
                refused(name, err)
            else:
                self._store.found(True)
                copied(entry)

        looks = Pool(1, "harness-look")  # reads all that is frozen: not in this thread, which is never lowered
        try:
            found = ((one, equal) for one in wanted if (equal := looks.submit(self.find, one).result()) is not None)
            for one, equal in found:
                conclude(one.name, lambda: make(one, equal))  # noqa: B023  called at once
                break
            self._copy_rest(found, make, conclude)
        finally:
            looks.shutdown()

    def _copy_rest(
        self,
        found: Iterator[tuple[Wanted, ShardEntry]],
        make: Callable[[Wanted, ShardEntry], ShardEntry],
        conclude: Callable[[str, Callable[[], ShardEntry]], None],
    ) -> None:
        pool, pending = Pool(COPIES, "harness-copy"), dict[Future[ShardEntry], str]()
        try:
            while True:
                while len(pending) < COPIES and (following := next(found, None)) is not None:
                    pending[pool.submit(make, *following)] = following[0].name
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)  # each ends soon after its deadline
                for future in done:
                    conclude(pending.pop(future), future.result)
        finally:
            pool.shutdown()

    def _failed(self, *, store_is_able: bool) -> None:
        """Drop the base after a failed copy. A store that cannot copy is rarely asked again."""
        if not store_is_able:
            self._store.found(False)
        self.base = None

    def find(self, wanted: Wanted) -> ShardEntry | None:
        """Return the base's shard that is equal to this one; `None` if there is none, or no base."""
        name, source, known = wanted.name, wanted.source, wanted.known
        base = self.base  # an upkeep that was overtaken may forget it meanwhile
        if base is None:
            return None
        shards = (shard for part in base.parts for shard in part.stored if shard.chunk_bytes == CHUNK_BYTES)
        if known is not None:
            return next((shard for shard in shards if _content(shard) == _content(known)), None)
        if isinstance(source, Path):
            return None  # bytes in a file were committed before, and are known
        candidates = [shard for shard in shards if shard.size == source.nbytes]
        looks = self._shards.setdefault((name, source.nbytes), _Looks())
        if not candidates or not looks.due():
            return None
        found = _equal(source.cast("B"), candidates)
        looks.found(found is not None)
        return found


def is_there(store: ObjectStore, key: str, known: ShardEntry, deadline: Deadline) -> bool:
    """Whether the store itself reports that `key` holds exactly the known bytes. False if it keeps no sums."""
    try:
        info = store.stat(key, deadline=deadline)
    except NotFound:
        return False
    return info.size == known.size and info.crc64nvme is not None and format_crc(info.crc64nvme) == known.crc64nvme


def sum_of(source: Source) -> str:
    """Return the CRC64NVME of bytes in memory, as a part holds it. A thread of the lowest priority reads them."""
    if isinstance(source, Path):
        raise ValueError(f"{source}: the sums of files are known")
    looks = Pool(1, "harness-look")
    try:
        return format_crc(looks.submit(crc64nvme, source.cast("B")).result())
    finally:
        looks.shutdown()


def _equal(data: memoryview, candidates: list[ShardEntry]) -> ShardEntry | None:
    """Return the candidate that `data` equals in every chunk, or `None`; all candidates have the size of `data`."""
    for index, offset in enumerate(range(0, len(data), CHUNK_BYTES)):
        digest = format_crc(crc64nvme(data[offset : offset + CHUNK_BYTES]))
        candidates = [shard for shard in candidates if shard.chunks[index] == digest]
        if not candidates:
            return None
    return candidates[0]


def _receipt(entry: ShardEntry) -> Receipt:
    return Receipt(entry.size, parse_crc(entry.crc64nvme), tuple(parse_crc(crc) for crc in entry.chunks))


def _content(shard: ShardEntry) -> tuple[int, str, int, tuple[str, ...]]:
    return shard.size, shard.crc64nvme, shard.chunk_bytes, shard.chunks
