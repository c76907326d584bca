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
- Read-after-write and list-after-write: once a call has returned, every later call of every process sees its effect.
- `copy` makes the same promises as `put`, for an object that the store holds already. It compares the size, and the sum
  where the store keeps one, with what the caller expects. Where the store keeps no sum, the bytes on the medium are as
  unread as after a `put`. The copy is an object of its own: deleting either leaves the other. A store may refuse to
  copy; then the caller sends the bytes.
- `delete` of an absent key succeeds. Deleting is durable when it returns.
- `list` gives keys in ascending code-point order, and only keys that `check_key` accepts: all others are not ours.
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
"""A source of `put`: a contiguous byte buffer, or a file that does not change during the call."""


class Progress(Protocol):
    """What `put` calls with the number of bytes newly sent, from the thread that called `put`. May block."""

    def __call__(self, sent: int, /, *, idle_s: Callable[[], float] | None = None) -> None:
        """Note that `sent` more bytes are stored. Nothing is begun while this call lasts.

        Args:
            sent: bytes.
            idle_s: returns for how many seconds nothing has been on its way; 0 while something, begun before this call,
                still is. `None`: nothing is on its way during this call.
        """
        ...


@dataclass(frozen=True)
class ObjectInfo:
    """An object's key, size and sum, known to the store without reading the object.

    Attributes:
        key: its key.
        size: bytes.
        crc64nvme: the store's own sum of the whole object, or `None` if the store keeps none.
    """

    key: str
    size: int
    crc64nvme: int | None = None


@dataclass(frozen=True)
class Receipt:
    """Size and sums of the written bytes, computed while the bytes were written.

    Attributes:
        size: bytes.
        crc64nvme: CRC-64/NVME of all bytes.
        chunk_crcs: CRC-64/NVME of each `CHUNK_BYTES` chunk, in order; the last may be shorter. Empty for an
            empty object.
    """

    size: int
    crc64nvme: int
    chunk_crcs: tuple[int, ...]


class ObjectStore(Protocol):
    """Durable bytes under keys. The module's docstring lists the obligations of every implementation."""

    url: str
    """The user's name for this store: "s3://bucket/prefix", or a directory's absolute path."""

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        """Make an object of `source` durable under `key`.

        Raises:
            SourceUnreadable: the source file is gone, cut short or cannot be read.
            Full: no room; nothing is left behind.
            OutcomeUnknown: the reply was lost; the caller reads back.
            CloudError: any other kind; nothing is visible under `key`.
        """
        ...

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        """Make a small object durable unless `key` exists. This call is the only way to commit.

        Raises:
            AlreadyExists: the key exists (a caller that had to retry compares: the object may be its own).
            OutcomeUnknown: the reply was lost; the caller reads back.
        """
        ...

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        """Make a copy of the object `source` durable under `key`; the bytes do not pass through this process.

        Args:
            source: the key of an object.
            key: the key of the copy; no object should exist there.
            expected: size and sums that the caller expects of the bytes.
            deadline: for the whole.

        Raises:
            NotFound: no such source; perhaps it has just been deleted.
            CopyDiffers: the source or the copy does not hold the expected bytes: it is damaged.
            CannotCopy: this store does not copy, or cannot prove what a copy holds, or another object exists at `key`.
            CloudError: any other kind. Whatever is raised, the caller may `put` to `key` afterwards.
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
        """Return all bytes of a small object.

        Raises:
            NotFound: no such object.
            TooLarge: the object has more than `limit_bytes` bytes (a hostile or foreign object).
        """
        ...

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        """Return the object's size and, if the store keeps one, its sum. Raises `NotFound`."""
        ...

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys start with `prefix` and are greater than `after`, ascending.

        An unknown prefix gives no objects.
        """
        ...

    def delete(self, key: str, *, deadline: Deadline) -> None:
        """Remove an object. An absent object is a success."""
        ...

    def unfinished(self, prefix: str, *, deadline: Deadline) -> Sequence[str]:
        """Return keys below `prefix` with uploads that were begun and neither completed nor abandoned.

        Such uploads may cost money. A store that cleans up by itself returns no keys.
        """
        ...

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        """Abandon every unfinished upload of `key`, of any process. It is a success if there are none.

        An object at `key` stays.
        """
        ...

    def local_path(self, key: str) -> Path | None:
        """Return the file that holds exactly this object's bytes, or `None` for a store without files."""
        ...

    def free_bytes(self) -> int | None:
        """Return the bytes left for new objects, with this store's own reservations; `None` if there is no limit."""
        ...

    def reserve(self, size: int) -> None:
        """Keep `size` bytes free for this process's later puts (0 gives them back). Raises `Full`.

        A store without a limit does nothing. A `put` uses up the reservation; the caller renews it afterwards.
        """
        ...

    def close(self) -> None:
        """Close connections and release reservations. Idempotent."""
        ...


_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*")
MAX_KEY_BYTES = 900  # S3 allows 1024 with the bucket's prefix


def check_key(key: str) -> str:
    """Return `key` if every store can hold it. No such key leads out of a store.

    A key is segments of ASCII letters, digits and `_.=+-`, joined by `/`; no segment starts with a dot or a dash.

    Raises:
        ValueError: `key` is not such a key; the harness built it wrong or read it from a hostile manifest unchecked.
    """
    if not is_key(key):
        raise ValueError(f"not a store key: {key[:120]!r}")
    return key


def is_key(key: str) -> bool:
    """Whether every store can hold `key`. No call reaches objects that others put into a bucket under other names."""
    return len(key) <= MAX_KEY_BYTES and all(_SEGMENT.fullmatch(part) for part in key.split("/"))


def check_prefix(prefix: str) -> str:
    """Return `prefix` if some key could start with it; every key starts with the empty prefix.

    Raises:
        ValueError: no key can start with `prefix`; it was built wrong.
    """
    check_key(prefix + "0")
    return prefix
