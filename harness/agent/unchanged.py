"""What need not be sent: shards whose very bytes the store holds already, in the newest snapshot committed there.

Owns the comparison, and when it is worth making; `commit.publish` has the store copy what was found. The snapshot that
is copied from is called the base. Each snapshot stays self-contained: a copy is an object in the snapshot's own
directory, and the base may be retired the moment after.

    a shard in a slot ─▶ sum of its first chunk ─▶ no shard of the base has it: send (trained tensors end here)
                                 └─▶ of the next, … of the last, all equal ─▶ copy that one

So looking for what has changed costs one chunk of each shard, and not a pass over the state. A shard that was looked at
often and in vain is rarely looked at again. Equal means: equal in size and in the CRC64NVME of every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cloud.digest import crc64nvme, format_crc
from cloud.store import CHUNK_BYTES, Source
from harness.core.manifest import Manifest, ShardEntry
from harness.core.policy import worth_a_look


@dataclass
class _Looks:
    """How often nothing was found in a row, and how often nobody has looked since."""

    in_vain: int = 0
    passed: int = 0

    def due(self) -> bool:
        """Whether to look now; if not, that is counted."""
        if worth_a_look(self.in_vain, self.passed):
            return True
        self.passed += 1
        return False

    def found(self, found: bool) -> None:
        """What a look came to."""
        self.in_vain, self.passed = (0 if found else self.in_vain + 1), 0


class Unchanged:
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

    def tried(self, copied: bool) -> None:
        """Whether the store made a copy. One that refused is not asked again for this snapshot."""
        self._store.found(copied)
        if not copied:
            self.base = None

    def find(self, name: str, source: Source, known: ShardEntry | None) -> ShardEntry | None:
        """The base's shard that is equal to this one.

        Args:
            name: of the shard; with its size, what it was called before.
            source: its bytes.
            known: what they are, where that is known already; then nothing is read.
        """
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


def _equal(data: memoryview, candidates: list[ShardEntry]) -> ShardEntry | None:
    """The candidate that `data` equals in every chunk, and so as a whole; all of them have its size."""
    for index, offset in enumerate(range(0, len(data), CHUNK_BYTES)):
        digest = format_crc(crc64nvme(data[offset : offset + CHUNK_BYTES]))
        candidates = [shard for shard in candidates if shard.chunks[index] == digest]
        if not candidates:
            return None
    return candidates[0]


def _content(shard: ShardEntry) -> tuple[int, str, int, tuple[str, ...]]:
    return shard.size, shard.crc64nvme, shard.chunk_bytes, shard.chunks
