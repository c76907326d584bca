"""MemoryStore: an ObjectStore in this process's memory, under the same contract as the durable ones.

For tests, models of the protocol, and experiments. Its objects end with the process; it has no room limit and no files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from cloud.digest import Digester
from cloud.errors import AlreadyExists, CopyDiffers, NotFound, SourceUnreadable, TooLarge, Truncated, Unavailable
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, ObjectInfo, Progress, Receipt, Source, check_key, check_prefix


class MemoryStore:
    """Objects in a dict. Safe for threads. To share a store, pass the instance; a new instance is empty."""

    url = "memory:"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}  # bytes and their sum; a pair is replaced, never changed

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        """See `ObjectStore.put`."""
        check_key(key)
        data, receipt = _take(source, deadline, progress)
        with self._lock:
            self._objects[key] = data, receipt.crc64nvme
        return receipt

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        """See `ObjectStore.put_if_absent`."""
        check_key(key)
        data, receipt = _take(memoryview(data), deadline, None)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"{key} is already in {self.url}")
            self._objects[key] = data, receipt.crc64nvme

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        """See `ObjectStore.copy`."""
        check_key(key)
        data, receipt = _take(memoryview(self._find(source)[0]), deadline, None)
        if receipt != expected:
            raise CopyDiffers(f"{source} in {self.url} is not what was expected")
        with self._lock:
            self._objects[key] = data, receipt.crc64nvme

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        """See `ObjectStore.get`."""
        data, _ = self._find(key)
        into = into.cast("B")
        if len(data) < offset + len(into):
            raise Truncated(f"{key} in {self.url} has {len(data)} bytes; {offset + len(into)} were expected")
        if deadline.expired:
            raise Unavailable(f"no time left to read {key} from {self.url}")
        into[:] = data[offset : offset + len(into)]

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        """See `ObjectStore.read`."""
        data, _ = self._find(key)
        if len(data) > limit_bytes:
            raise TooLarge(f"{key} in {self.url} has {len(data)} bytes; at most {limit_bytes} were expected")
        return data

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        """See `ObjectStore.stat`."""
        data, crc = self._find(key)
        return ObjectInfo(key, len(data), crc)

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        check_prefix(prefix)
        with self._lock:
            found = [item for item in self._objects.items() if item[0].startswith(prefix) and item[0] > after]
        return iter([ObjectInfo(key, len(data), crc) for key, (data, crc) in sorted(found)])

    def delete(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.delete`."""
        with self._lock:
            self._objects.pop(check_key(key), None)

    def unfinished(self, prefix: str, *, deadline: Deadline) -> Sequence[str]:
        """See `ObjectStore.unfinished`. Always empty."""
        check_prefix(prefix)
        return []

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.abandon`."""
        check_key(key)

    def local_path(self, key: str) -> Path | None:
        """Always `None`: there are no files."""
        check_key(key)
        return None

    def free_bytes(self) -> int | None:
        """Always `None`: there is no limit."""
        return None

    def reserve(self, size: int) -> None:
        """Do nothing: there is no limit."""

    def close(self) -> None:
        """Do nothing: the objects exist as long as this instance."""

    def _find(self, key: str) -> tuple[bytes, int]:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{key} is not in {self.url}")
        return found


def _take(source: Source, deadline: Deadline, progress: Progress | None) -> tuple[bytes, Receipt]:
    """Return a copy of the source's bytes, and their receipt."""
    try:
        data = source.read_bytes() if isinstance(source, Path) else bytes(source)
    except FileNotFoundError as err:
        raise SourceUnreadable(f"the source {source} is gone") from err
    except OSError as err:
        raise SourceUnreadable(f"cannot read the source {source}: {err.strerror}") from err
    digester = Digester()
    for start in range(0, len(data), CHUNK_BYTES):
        if deadline.expired:
            raise Unavailable(f"no time left after {start} of {len(data)} bytes")
        piece = memoryview(data)[start : start + CHUNK_BYTES]
        digester.update(piece)
        if progress is not None:
            progress(len(piece))
    if deadline.expired:
        raise Unavailable("no time left")
    return data, digester.receipt()
