"""Open the ObjectStore that a location names. Owns the mapping from the user's text to a store, and nothing else.

boto3 is imported when the first S3 store is opened: by then, the pollers already watch for notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloud.directory.store import DirectoryStore
from cloud.errors import CloudError, Unavailable
from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.store import ObjectStore, check_key
from cloud.testing.memory import MemoryStore
from harness.config.settings import Settings
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError

if TYPE_CHECKING:
    from cloud.s3.store import S3Store

PROBE_S = 10.0
OPEN_S = 2.0


def open_existing_store(location: str, settings: Settings | None = None) -> ObjectStore:
    """Open the store at `location` for reading or deleting. Opening it changes nothing.

    A missing directory counts as an empty store, and is not made.

    Raises:
        ConfigError: the store cannot be used.
    """
    if location.startswith("s3://"):
        return RetryingStore(open_bucket(location, settings))
    if "://" in location:
        return open_store(location, settings)
    try:
        if not Path(location).exists():
            return MemoryStore()
    except OSError as err:  # a parent directory is another user's, or the name is too long
        raise ConfigError(f"the store {location} cannot be used: {err.strerror or err}") from err
    return _open_directory(location, settings)


def open_store(
    location: str, settings: Settings | None = None, say: Callable[[str], None] = lambda text: None
) -> ObjectStore:
    """Open the store at `location`, a directory or a URL. It retries transient failures inside each deadline.

    Args:
        location: an absolute directory or a URL, as in `Settings.store`.
        settings: how to reach a store that is not a directory.
        say: prints a message for the user about what the store cannot do.

    Raises:
        ConfigError: no such kind of store, or the directory cannot be used.
    """
    if location.startswith("s3://"):
        store = open_bucket(location, settings)
        prefix = RunKeys(settings.run).snapshots if settings is not None else ""
        return RetryingStore(_Guarded(store, prefix, say))
    if "://" in location:
        raise ConfigError(f"{location}: a store is a directory or s3://bucket/prefix")
    return _open_directory(location, settings, sweep=True)


def open_soon(location: str, settings: Settings, say: Callable[[str], None]) -> ObjectStore:
    """Open a store for an agent: a file system that does not answer (a dead server's mount) blocks at most `OPEN_S`.

    After that, the threads that use the store wait until it is open, while the agent itself stays responsive.

    Raises:
        ConfigError: no such kind of store, or the directory cannot be used, as far as that is known by then.
    """
    if "://" in location:
        return open_store(location, settings, say)
    store = _Opening(Path(location), shared=settings.shared)
    try:
        store.wait(OPEN_S)
    except CloudError as err:
        raise ConfigError(f"the store {location} cannot be used: {err}") from err
    return RetryingStore(store)


def _open_directory(location: str, settings: Settings | None, *, sweep: bool = False) -> ObjectStore:
    try:
        directory = DirectoryStore(Path(location), shared=settings is not None and settings.shared)
        if sweep:
            directory.sweep()  # removes the drafts of writers that were killed
        return RetryingStore(directory)
    except (CloudError, OSError) as err:
        raise ConfigError(f"the store {location} cannot be used: {err}") from err


def open_bucket(location: str, settings: Settings | None = None) -> S3Store:
    """Open the S3 store itself, without retries, for callers that ask questions that only a bucket can answer.

    Raises:
        ConfigError: location or options are invalid.
    """
    from cloud.s3.store import S3Options, S3Store

    try:
        if settings is None:
            return S3Store(location)
        options = S3Options(
            endpoint=settings.s3_endpoint,
            sse=settings.s3_sse or "",
            sse_kms_key_id=settings.s3_kms_key_id or "",
        )
        return S3Store(location, options)
    except ValueError as err:
        raise ConfigError(f"the store {location} cannot be used: {err}") from err


class _Opening:
    """A DirectoryStore that a thread opens; the thread also removes the drafts of writers that were killed."""

    def __init__(self, root: Path, *, shared: bool) -> None:
        self._root, self._shared = root.absolute(), shared
        self.url = str(self._root)
        self._lock = threading.Lock()
        self._opened: DirectoryStore | None = None
        self._error: CloudError | None = None
        self._thread = self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wait(), name)

    def local_path(self, key: str) -> Path | None:
        return self._root / check_key(key)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def wait(self, within_s: float | None = None) -> DirectoryStore | None:
        """Return the store; `None` if it is not open in time. Raises CloudError if opening failed, and retries it."""
        self._thread.join(within_s)
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                self._thread = self._begin()
        if error is not None:
            raise error
        return self._opened

    def _begin(self) -> threading.Thread:
        thread = threading.Thread(target=self._open, name="harness-open", daemon=True)
        thread.start()
        return thread

    def _open(self) -> None:
        try:
            store = DirectoryStore(self._root, shared=self._shared)
            store.sweep()
            self._opened = store
        except CloudError as err:
            self._error = err
        except OSError as err:
            self._error = Unavailable(f"{self._root}: {err.strerror or err}")


class _Guarded:
    """An S3 store that is probed for what it honours before the first commit or claim depends on it.

    The first `put_if_absent` probes it, and the next one again if the probe failed. AWS's own S3 is not probed.
    """

    def __init__(self, store: S3Store, prefix: str, say: Callable[[str], None]) -> None:
        self._store, self._prefix, self._say = store, prefix, say
        self._lock = threading.Lock()
        self._asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        self._ask(deadline)
        self._store.put_if_absent(key, data, deadline=deadline)

    def _ask(self, deadline: Deadline) -> None:
        with self._lock:
            if self._asked:
                return
            quirks = self._store.probe(self._prefix, deadline=deadline.sooner(PROBE_S))
            self._asked = True
        if not quirks.conditional:
            self._say(
                f"{self._store.url} ignores put-if-absent (If-None-Match): nothing there would guard a run against a "
                "second writer, so it is not used. Use a store that honours it"
            )
        elif not quirks.takes_sums:
            self._say(f"{self._store.url} takes no CRC64NVME: damage on the way is found when a snapshot is read back")
        elif not quirks.checks_sums:
            self._say(f"{self._store.url} does not check the sums that it takes: every snapshot is read back")
