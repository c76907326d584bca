"""What need not be sent: shards whose very bytes the store holds already, in the newest snapshot committed there.

Owns the comparison, when it is worth making, and the copies: several at once, since each is a wait for the store. The
snapshot that is copied from is called the base. Each snapshot stays self-contained: a copy is an object in the
snapshot's own directory, and the base may be retired the moment after. What is not copied is sent, by `commit.publish`.

    a shard in a slot ─▶ sum of its first chunk ─▶ no shard of the base has it: send (trained tensors end here)
                                 └─▶ of the next, … of the last, all equal ─▶ copy that one

So looking for what has changed costs one chunk of each shard, and not a pass over the state. A shard that was looked at
often and in vain is rarely looked at again. Equal means: equal in size and in the CRC64NVME of every chunk.
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
"""Shards that are copied at the same time, each in S3 by several requests."""


@dataclass(frozen=True)
class Wanted:
    """A shard of a new snapshot.

    Attributes:
        name: its own, which with its size is what it was called before.
        source: its bytes.
        known: what they are, where that is known already; then nothing is read.
    """

    name: str
    source: Source
    known: ShardEntry | None = None


@dataclass
class _Looks:
    """How often nothing was found in a row, and how often nobody has looked since."""

    in_vain: int = 0
    passed: int = 0

    def due(self) -> bool:
        """Whether to look now; if not, that is counted."""
        if should_probe(self.in_vain, self.passed):
            return True
        self.passed += 1
        return False

    def found(self, found: bool) -> None:
        """What a look came to."""
        self.in_vain, self.passed = (0 if found else self.in_vain + 1), 0


class Deduplicator:
    """What one tier has learned of its shards and of its store. For the tier's thread."""

    def __init__(self) -> None:
        """Without a base nothing is found."""
        self.base: Manifest | None = None
        self._shards: dict[tuple[str, int], _Looks] = {}
        self._store = _Looks()

    def committed(self, manifest: Manifest) -> None:
        """`manifest` is the newest in the store: the base from now on, unless the store makes no copies."""
        self.base = manifest if self._store.due() else None

    def forget(self) -> None:
        """The base is gone, or is not what was committed."""
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
        """Have the store copy into `directory` every shard that it holds already. Blocks until it has, or has not.

        The first copy is made alone: a store that refuses it is not asked for the others.

        Args:
            store: where the base is.
            keys: of the run.
            directory: the new snapshot's.
            wanted: its shards.
            deadline: for the whole; each has a share of it.
            copied: called with each shard that is there now; what it raises ends this, and leaves copies under way.
            refused: called with the name of each that is not, and why.

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
            elif not is_there(store, key, equal, patience):  # this very snapshot, which an agent before us committed
                raise CopyDiffers(f"{key} is not what was committed")
            return msgspec.structs.replace(equal, name=one.name)

        def conclude(name: str, result: Callable[[], ShardEntry]) -> None:
            try:
                entry = result()
            except CloudError as err:
                if deadline.expired:
                    raise
                # Retired just now, or damaged: nothing that the store could help.
                self._failed(store_is_able=isinstance(err, NotFound | CopyDiffers))
                refused(name, err)
            else:
                self._store.found(True)
                copied(entry)

        looks = Pool(1, "harness-look")  # a pass over all that is frozen: not by this thread, which is never lowered
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
        """A copy was not made. The base serves no more; a store that cannot copy is rarely asked again."""
        if not store_is_able:
            self._store.found(False)
        self.base = None

    def find(self, wanted: Wanted) -> ShardEntry | None:
        """The base's shard that is equal to this one; `None` without a base."""
        name, source, known = wanted.name, wanted.source, wanted.known
        if self.base is None:
            return None
        shards = (shard for part in self.base.parts for shard in part.shards if shard.chunk_bytes == CHUNK_BYTES)
        if known is not None:
            return next((shard for shard in shards if _content(shard) == _content(known)), None)
        if isinstance(source, Path):
            return None  # what lies in a file was committed, and is known
        candidates = [shard for shard in shards if shard.size == source.nbytes]
        looks = self._shards.setdefault((name, source.nbytes), _Looks())
        if not candidates or not looks.due():
            return None
        found = _equal(source.cast("B"), candidates)
        looks.found(found is not None)
        return found


def is_there(store: ObjectStore, key: str, known: ShardEntry, deadline: Deadline) -> bool:
    """Whether the store itself says that `key` holds exactly the known bytes. One that keeps no sums never does."""
    try:
        info = store.stat(key, deadline=deadline)
    except NotFound:
        return False
    return info.size == known.size and info.crc64nvme is not None and format_crc(info.crc64nvme) == known.crc64nvme


def _equal(data: memoryview, candidates: list[ShardEntry]) -> ShardEntry | None:
    """The candidate that `data` equals in every chunk, and so as a whole; all of them have its size."""
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
