"""Bytes of a snapshot, read and compared with what was committed.

Owns the comparison, chunk by chunk; whoever reads decides where the bytes go.
"""

from __future__ import annotations

from collections.abc import Callable

from cloud.digest import crc64nvme, format_crc
from cloud.directory.direct import aligned_buffer
from cloud.errors import NotFound, Truncated
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, ObjectStore
from harness.core.manifest import Manifest
from harness.core.snapshot import RunKeys
from harness.errors import SnapshotCorrupt


class DamagedInStore(SnapshotCorrupt):
    """A snapshot whose bytes the store itself says are not what was committed, whoever reads them."""


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
    # Aligned, so that what was just written is read from the disk, and what the training loop has cached stays cached.
    scratch = aligned_buffer(min(CHUNK_BYTES, max((s.size for p in manifest.parts for s in p.shards), default=1)))
    for part in manifest.parts:
        for shard in part.shards:
            key = keys.payload(manifest.directory, shard.name)
            try:
                info = store.stat(key, deadline=deadline)
                if info.size != shard.size:
                    raise DamagedInStore(f"{key}: {info.size} bytes, {shard.size} were committed")
                if info.crc64nvme is not None:
                    if format_crc(info.crc64nvme) != shard.crc64nvme:
                        raise DamagedInStore(f"{key}: the store's sum is not the committed one")
                    continue
                crc = 0
                for offset in range(0, shard.size, len(scratch)):
                    if interrupted():
                        return False
                    piece = scratch[: min(len(scratch), shard.size - offset)]
                    store.get(key, piece, offset=offset, deadline=deadline)
                    crc = crc64nvme(piece, crc)
            except (NotFound, Truncated) as err:
                raise SnapshotCorrupt(f"{key}: {err}") from err
            if format_crc(crc) != shard.crc64nvme:
                raise SnapshotCorrupt(f"{key}: bytes differ from what was committed")
    return True
