"""Bytes of a snapshot, read from a store and compared with what was committed.

Owns the comparison, chunk by chunk: a resume, an export and a verification read through it. Whoever reads decides where
the bytes go, and how many chunks are on their way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cloud.digest import combine, crc64nvme, format_crc
from cloud.directory.direct import aligned_buffer
from cloud.errors import NotFound, Truncated
from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore
from harness.core.manifest import Manifest, ShardEntry
from harness.core.snapshot import RunKeys
from harness.errors import SnapshotCorrupt


class Differs(SnapshotCorrupt):
    """What was read is not what was committed. Another read, or another host, may read it well."""


class DamagedInStore(Differs):
    """A snapshot whose bytes the store itself says are not what was committed, whoever reads them."""


@dataclass(frozen=True)
class StoredShard:
    """One committed shard, where a store has it.

    Attributes:
        store: where.
        key: its object.
        entry: what was committed.
    """

    store: ObjectStore
    key: str
    entry: ShardEntry

    def stat(self, deadline: Deadline) -> ObjectInfo:
        """What the store says of it, whose size is the committed one.

        Raises:
            DamagedInStore: it is not.
            CloudError: the store could not be asked, or it is not there.
        """
        info = self.store.stat(self.key, deadline=deadline)
        if info.size != self.entry.size:
            raise DamagedInStore(f"{self.key}: {info.size} bytes, {self.entry.size} were committed")
        return info

    def span(self, number: int) -> tuple[int, int]:
        """Where a chunk begins in the shard, and its bytes."""
        begin = number * self.entry.chunk_bytes
        return begin, min(self.entry.chunk_bytes, self.entry.size - begin)

    def read_chunk(self, number: int, target: memoryview, deadline: Deadline) -> int:
        """Fill `target` with a chunk. Its sum.

        Raises:
            Differs: its sum is not the committed one; `target` has what was read.
            CloudError: it could not be read.
        """
        self.store.get(self.key, target, offset=self.span(number)[0], deadline=deadline)
        crc = crc64nvme(target)
        if format_crc(crc) != self.entry.chunks[number]:
            count = len(self.entry.chunks)
            raise Differs(f"{self.key}: chunk {number} of {count} is not what was committed")
        return crc

    def check_whole(self, crc: int) -> None:
        """Compare the sum of all of it. Raises Differs."""
        if format_crc(crc) != self.entry.crc64nvme:
            raise Differs(f"{self.key}: not what was committed")

    def chunks(
        self, deadline: Callable[[], Deadline], wanted: Callable[[int, int], bool] = lambda begin, size: True
    ) -> Iterator[tuple[int, memoryview]]:
        """One chunk after the other, each compared before it is given.

        Args:
            deadline: for each chunk.
            wanted: whether one is, given its beginning in the shard and its bytes. If all of them are, their sum is
                compared at the end as well.

        Yields:
            Where in the shard a chunk begins, and its bytes, which are valid until the next.

        Raises:
            Differs: see `read_chunk`.
            CloudError: it could not be read.
        """
        # Aligned, so that what was just written is read from the disk, and what a training has cached stays cached.
        scratch = aligned_buffer(max(1, min(self.entry.chunk_bytes, self.entry.size)))
        whole, read = 0, 0
        for number in range(len(self.entry.chunks)):
            begin, size = self.span(number)
            if wanted(begin, size):
                crc = self.read_chunk(number, scratch[:size], deadline())
                whole, read = combine(whole, crc, size), read + size
                yield begin, scratch[:size]
        if read == self.entry.size:
            self.check_whole(whole)


def verify(
    store: ObjectStore,
    keys: RunKeys,
    manifest: Manifest,
    deadline: Deadline,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> bool:
    """Whether the store still holds exactly what was committed, without keeping the bytes.

    Where the store keeps sums itself (S3), size and sum of each shard are compared; elsewhere every byte is read again.

    Args:
        store: where the snapshot is committed.
        keys: of the run.
        manifest: what was committed.
        deadline: for the whole.
        interrupted: asked between chunks; when true, verification stops.

    Returns:
        False if it was interrupted; a verified snapshot returns True.

    Raises:
        SnapshotCorrupt: which shard differs, and how.
        DamagedInStore: the same, and this reader is not to blame.
    """
    for part in manifest.parts:
        for entry in part.shards:
            shard = StoredShard(store, keys.payload(manifest.directory, entry.name), entry)
            try:
                info = shard.stat(deadline)
                if info.crc64nvme is not None:
                    if format_crc(info.crc64nvme) != entry.crc64nvme:
                        raise DamagedInStore(f"{shard.key}: the store's sum is not the committed one")
                    continue
                for _ in shard.chunks(lambda: deadline):
                    if interrupted():
                        return False
            except (NotFound, Truncated) as err:
                raise SnapshotCorrupt(f"{shard.key}: {err}") from err
    return True
