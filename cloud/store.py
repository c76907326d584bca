"""ObjectStore: the one interface between the harness and durable bytes.

Owns the interface, its obligations in prose, and what a key may look like. Implementations are `directory/`, `s3/` and
`testing/memory.py`; every one passes `tests/contract`. Cross-cutting concerns (retry, faults) wrap an ObjectStore
with an ObjectStore.

Obligations of every implementation:

- Objects are immutable. There is put, put-if-absent, copy and delete; no append, no rename, no overwrite of a committed
  name. (`put` to a key that exists replaces it atomically; the harness never does that: every payload key holds a
  nonce.)
- When `put` or `put_if_absent` returns, the whole object is durable against process death and power loss. Before that,
  no reader sees any of it: not in `get`, not in `stat`, not in `list`.
- `put_if_absent` succeeds for exactly one of any number of concurrent callers.
- Read-after-write and list-after-write: what has returned is seen by every later call, from every process.
- `copy` promises what `put` does, of an object that is there already. Size, and where the store keeps one its sum, are
  compared with what the caller expects; where it keeps none, what the medium holds is as unread as after a `put`.
  The copy is an object of its own: deleting either leaves the other. A store may refuse; then the caller sends.
- `delete` of an absent key succeeds. Deleting is durable when it returns.
- Keys come from `list` in ascending code-point order, and only such as `check_key` takes: the rest is not ours.
- Every call blocks, may be made from several threads at once, and ends soon after its deadline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cloud.notice import Deadline

CHUNK_BYTES = 16 * 1024 * 1024
"""Bytes per chunk digest in a `Receipt`; a multiple of 8 MiB, so that a chunk can be one part of an S3 upload."""

Source = memoryview | Path
"""What `put` can send: a contiguous byte buffer, or a file that does not change meanwhile."""

Progress = Callable[[int], None]
"""Called with the number of bytes newly sent, from the thread that called `put`."""


@dataclass(frozen=True)
class ObjectInfo:
    """What a store knows of an object without reading it.

    Attributes:
        key: its key.
        size: bytes.
        crc64nvme: the store's own sum of the whole object, or `None` where it keeps none.
    """

    key: str
    size: int
    crc64nvme: int | None = None


@dataclass(frozen=True)
class Receipt:
    """What was written, computed from the very bytes as they passed.

    Attributes:
        size: bytes.
        crc64nvme: CRC-64/NVME of all bytes.
        chunk_crcs: CRC-64/NVME of each `CHUNK_BYTES` chunk, in order; the last may be shorter. None for an
            empty object.
    """

    size: int
    crc64nvme: int
    chunk_crcs: tuple[int, ...]


class ObjectStore(Protocol):
    """Durable bytes under keys. See the module's docstring for what every implementation owes."""

    url: str
    """How a user names this store: "s3://bucket/prefix", or a directory's absolute path."""

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        """Make an object of `source` durable under `key`.

        Raises:
            SourceUnreadable: a file that is to be sent is gone, cut short or cannot be read.
            Full: no room; nothing is left behind.
            OutcomeUnknown: the reply was lost; the caller reads back.
            CloudError: any other kind; nothing is visible under `key`.
        """
        ...

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        """Make a small object durable unless `key` exists: the only commit there is.

        Raises:
            AlreadyExists: the key exists (a caller that had to retry compares: it may be its own).
            OutcomeUnknown: the reply was lost; the caller reads back.
        """
        ...

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        """Make an object of what the object `source` holds durable under `key`, without the bytes coming by here.

        Args:
            source: the key of an object.
            key: the key of the copy; nothing should stand there.
            expected: what the bytes are that the caller means.
            deadline: for the whole.

        Raises:
            NotFound: no such source; perhaps it has just been deleted.
            CopyDiffers: the source, or what was made of it, is not what was expected: damaged.
            CannotCopy: this store does not copy, or cannot prove what a copy holds, or something else stands there.
            CloudError: any other kind. Whatever is raised, a `put` of `key` is right afterwards.
        """
        ...

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        """Fill the writable buffer `into` with the object's bytes from `offset` on.

        Raises:
            NotFound: no such object.
            Truncated: the object ends before `into` is full.
        """
        ...

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        """A small object, whole.

        Raises:
            NotFound: no such object.
            TooLarge: it has more than `limit_bytes` bytes (a hostile or foreign object).
        """
        ...

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        """Size and, where the store keeps one, sum. Raises `NotFound`."""
        ...

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and is greater than `after`, ascending. An unknown prefix is empty."""
        ...

    def delete(self, key: str, *, deadline: Deadline) -> None:
        """Remove an object; absent is success."""
        ...

    def unfinished(self, prefix: str, *, deadline: Deadline) -> Sequence[str]:
        """Keys below `prefix` with uploads that were begun and neither completed nor abandoned; they may cost money.

        A store that cleans up by itself has none to tell of.
        """
        ...

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        """Give up every unfinished upload of `key`, whoever began it; none is success. An object there stays."""
        ...

    def local_path(self, key: str) -> Path | None:
        """The file that holds exactly this object's bytes, or `None` for a store without files."""
        ...

    def free_bytes(self) -> int | None:
        """Room left for new objects, reservations of this store's own included; `None` where there is no limit."""
        ...

    def reserve(self, size: int) -> None:
        """Keep `size` bytes free for this process's later puts (0 gives them back). Raises `Full`.

        A store without a limit does nothing. A `put` uses up the reservation; the caller renews it afterwards.
        """
        ...

    def close(self) -> None:
        """Give up connections and reservations. Idempotent."""
        ...


_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
MAX_KEY_BYTES = 900  # S3 allows 1024 with the bucket's prefix


def check_key(key: str) -> str:
    """Return `key` if it is one that every store can hold; a key is never a way out of a store.

    Segments of ASCII letters, digits and `_.=+-`, joined by `/`; no segment starts with a dot or a dash.

    Raises:
        ValueError: it is not; the harness built it wrong or read it from a hostile manifest unchecked.
    """
    if not is_key(key):
        raise ValueError(f"not a store key: {key[:120]!r}")
    return key


def is_key(key: str) -> bool:
    """Whether every store can hold `key`. What others put into a bucket under other names, no call can be asked for."""
    return len(key) <= MAX_KEY_BYTES and all(_SEGMENT.fullmatch(part) for part in key.split("/"))


def check_prefix(prefix: str) -> str:
    """Return `prefix` if some key could start with it; the empty prefix is every key.

    Raises:
        ValueError: no key can; it was built wrong.
    """
    check_key(prefix + "0")
    return prefix
