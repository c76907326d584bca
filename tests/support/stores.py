"""Stores around stores: one that fails as told, one that remembers what it was asked; and a disk with bad blocks."""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cloud.directory.filesystem import FileSystem
from cloud.errors import CloudError, Unavailable
from cloud.store import ObjectStore

VERBS = frozenset({"put", "put_if_absent", "get", "read", "stat", "list", "copy", "delete", "reserve", "free_bytes"})


class _Wrapper:
    """Passes everything on to `store`, the calls in VERBS through `_call`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        return functools.partial(self._call, name, attribute) if name in VERBS else attribute

    def _call(self, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class FaultyStore(_Wrapper):
    """Fails some calls of one verb, before or after they took effect; everything else passes.

    Args:
        store: what takes the calls that do not fail.
        verb: whose calls fail.
        fail_on: which of them, counted from 1; a number, several, or `None` for every one.
        error: what is raised; a class is called with words.
        after: let the call take effect first, as when only the reply is lost.
    """

    def __init__(
        self,
        store: ObjectStore,
        verb: str,
        *,
        fail_on: int | tuple[int, ...] | None = 1,
        error: CloudError | type[CloudError] = Unavailable,
        after: bool = False,
    ) -> None:
        assert verb in VERBS, verb
        super().__init__(store)
        self.calls = 0
        self._verb = verb
        self._fail_on = (fail_on,) if isinstance(fail_on, int) else fail_on
        self._error = error if isinstance(error, CloudError) else error(f"injected into {verb}")
        self._after = after
        self._lock = threading.Lock()

    def _call(self, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if verb != self._verb:
            return call(*args, **kwargs)
        with self._lock:
            self.calls += 1
            fails = self._fail_on is None or self.calls in self._fail_on
        if fails and not self._after:
            raise self._error
        result = call(*args, **kwargs)
        if fails:
            raise self._error
        return result


class RecordingStore(_Wrapper):
    """Remembers every call as (verb, key or prefix or size), in the order in which they began."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.calls: list[tuple[str, Any]] = []

    def _call(self, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls.append((verb, args[0] if args else None))
        return call(*args, **kwargs)

    def keys(self, verb: str) -> list[Any]:
        """What `verb` was called with, in order."""
        return [subject for name, subject in self.calls if name == verb]


class BadBlocks(FileSystem):
    """The system calls of a disk that cannot read some of its files. Waits for no disk."""

    def __init__(self) -> None:
        self._bad = set[int]()

    def spoil(self, path: Path) -> None:
        """From now on `path` cannot be read, whatever its name."""
        self._bad.add(path.stat().st_ino)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if os.fstat(fd).st_ino in self._bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Nothing."""

    def fdatasync(self, fd: int) -> None:
        """Nothing."""
