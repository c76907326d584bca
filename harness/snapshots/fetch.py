"""Read a snapshot's bytes from a store, and compare them with the committed sums.

Owns the comparison, chunk by chunk: a resume, an export and a verification read through it. The caller decides where
the bytes go, and how many chunks are in flight at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from cloud.digest import combine, crc64nvme, format_crc
from cloud.directory.direct import aligned_buffer
from cloud.errors import NotFound, Truncated
from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore
from harness.core.manifest import Manifest, ShardEntry
from harness.core.snapshot import RunKeys
from harness.errors import SnapshotCorrupt

_T = TypeVar("_T")


class Differs(SnapshotCorrupt):
    """The bytes that were read are not those that were committed. Another read, or another host, may succeed."""


class DamagedInStore(Differs):
    """The store itself reports that its bytes are not those that were committed, so every reader gets wrong bytes."""


class NotRead(SnapshotCorrupt):
    """The snapshot cannot be read here; another host may be able to read it."""


class Retry(Protocol):
    """Calls what reads, and returns its result; may call it again where it raises."""

    def __call__(self, read: Callable[[], _T], /) -> _T:
        """Read."""
        ...


def once(read: Callable[[], _T], /) -> _T:
    """A `Retry` that does not try again."""
    return read()


@dataclass(frozen=True)
class StoredShard:
    """One committed shard in a store.

    Attributes:
        store: the store.
        key: key of the shard's object.
        entry: committed size and sums.
    """

    store: ObjectStore
    key: str
    entry: ShardEntry

    def stat(self, deadline: Deadline) -> ObjectInfo:
        """Return the store's size and sum of the shard, after a check of the size.

        Raises:
            DamagedInStore: the size is not the committed one.
            CloudError: the store could not be asked, or the shard is not there.
        """
        info = self.store.stat(self.key, deadline=deadline)
        if info.size != self.entry.size:
            raise DamagedInStore(f"{self.key}: {info.size} bytes, {self.entry.size} were committed")
        return info

    def span(self, number: int) -> tuple[int, int]:
        """Return the offset and the size of a chunk, in bytes."""
        begin = number * self.entry.chunk_bytes
        return begin, min(self.entry.chunk_bytes, self.entry.size - begin)

    def read_chunk(self, number: int, target: memoryview, deadline: Deadline) -> int:
        """Fill `target` with a chunk, and return its sum.

        Raises:
            Differs: the sum is not the committed one; `target` has the bytes that were read.
            CloudError: the chunk could not be read.
        """
        self.store.get(self.key, target, offset=self.span(number)[0], deadline=deadline)
        crc = crc64nvme(target)
        if format_crc(crc) != self.entry.chunks[number]:
            count = len(self.entry.chunks)
            raise Differs(f"{self.key}: chunk {number} of {count} is not what was committed")
        return crc

    def check_whole(self, crc: int) -> None:
        """Compare the sum of the whole shard. Raises Differs."""
        if format_crc(crc) != self.entry.crc64nvme:
            raise Differs(f"{self.key}: not what was committed")

    @contextlib.contextmanager
    def unless_right(self, info: ObjectInfo) -> Iterator[None]:
        """Context manager for reading it: what differs here, while the store's own sum is right, is no damage there.

        Args:
            info: what `stat` has returned.

        Raises:
            NotRead: in place of such a Differs.
        """
        try:
            yield
        except Differs as err:
            if info.crc64nvme is not None and format_crc(info.crc64nvme) == self.entry.crc64nvme:
                raise NotRead(f"{err}; but the store's own checksum is right: this host may be at fault") from err
            raise

    def chunks(
        self,
        deadline: Callable[[], Deadline],
        wanted: Callable[[int, int], bool] = lambda begin, size: True,
        retry: Retry = once,
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield one chunk after the other, each compared before it is yielded.

        Args:
            deadline: makes the deadline for each chunk.
            wanted: whether to read a chunk, by its offset in the shard and its size. If all chunks are read, the sum of
                the whole is compared at the end as well.
            retry: reads each chunk.

        Yields:
            The offset of a chunk in the shard, and its bytes, which are valid until the next chunk.

        Raises:
            Differs: see `read_chunk`.
            CloudError: a chunk could not be read.
        """
        # Aligned for direct I/O: bytes that were just written are read from the disk, and the training's cache stays.
        scratch = aligned_buffer(max(1, min(self.entry.chunk_bytes, self.entry.size)))
        whole, read = 0, 0
        for number in range(len(self.entry.chunks)):
            begin, size = self.span(number)
            if wanted(begin, size):
                crc = retry(partial(self.read_chunk, number, scratch[:size], deadline()))
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

    If the store keeps sums itself (S3), size and sum of each shard are compared; otherwise every byte is read again.

    Args:
        store: the store that holds the snapshot.
        keys: keys of the run.
        manifest: manifest of the committed snapshot.
        deadline: for the whole.
        interrupted: called between chunks; if it returns True, verification stops.

    Returns:
        False if it was interrupted; True if the snapshot is verified.

    Raises:
        SnapshotCorrupt: a shard differs or is gone; the message says which, and how.
        DamagedInStore: the same, and the store itself reports it, so this reader is not the cause.
    """
    for part in manifest.parts:
        for entry in part.stored:
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
