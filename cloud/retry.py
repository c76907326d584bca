"""RetryingStore: an ObjectStore that retries, and never guesses (invariant I9).

Owns the meaning of a second attempt: a `put_if_absent` that finds its own bytes after an attempt of unknown outcome has
succeeded. Knows no store in particular. `cloud.errors.call_with_retry` decides how often and how long to retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cloud.errors import AlreadyExists, CloudError, OutcomeUnknown, TooLarge, call_with_retry
from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore, Progress, Receipt, Source, check_prefix

COPY_ATTEMPTS = 5

_T = TypeVar("_T")


class RetryingStore:
    """An ObjectStore that repeats every call to `store` while the error is retryable and the deadline not reached.

    Args:
        store: receives the calls; closed with this one.
        sleep: how to pause between attempts.
    """

    def __init__(self, store: ObjectStore, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = store.url
        self._store = store
        self._sleep = sleep

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        """See `ObjectStore.put`. Repeating it is safe after an unknown outcome too: the same bytes, replaced whole."""
        furthest = 0  # bytes reported so far, over all attempts: bytes that are sent again are not new

        def attempt() -> Receipt:
            sent = 0

            def advance(count: int, *, idle_s: Callable[[], float] | None = None) -> None:
                nonlocal sent, furthest
                sent += count
                if progress is not None and sent > furthest:
                    progress(sent - furthest, idle_s=idle_s)
                furthest = max(furthest, sent)

            return self._store.put(key, source, deadline=deadline, progress=advance)

        return self._retry(attempt, deadline)

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        """See `ObjectStore.put_if_absent`. `OutcomeUnknown` only if the deadline left no time to find out."""
        earlier_failed = earlier_unknown = False

        def attempt() -> None:
            nonlocal earlier_failed, earlier_unknown
            try:
                self._store.put_if_absent(key, data, deadline=deadline)
            except AlreadyExists:
                # IMPORTANT: the call is repeated before the object is read back. A store raises AlreadyExists only for
                # durable objects; a read may show an object whose directory or quorum has not been synced yet.
                if not earlier_failed:
                    raise
                try:
                    ours = self._holds(key, data, deadline)
                except CloudError as err:
                    earlier_unknown = True
                    raise OutcomeUnknown(f"{key} exists in {self.url}; cannot tell if it is ours: {err}") from err
                if not ours:
                    raise
            except CloudError as err:
                earlier_failed = True
                earlier_unknown = earlier_unknown or isinstance(err, OutcomeUnknown)
                raise

        try:
            self._retry(attempt, deadline)
        except (AlreadyExists, OutcomeUnknown):
            raise
        except CloudError as err:
            if earlier_unknown:
                raise OutcomeUnknown(f"{key} in {self.url}: a reply was lost, and a retry failed: {err}") from err
            raise

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        """See `ObjectStore.copy`. Retried less often than other calls: a caller that cannot copy sends."""
        call_with_retry(
            lambda: self._store.copy(source, key, expected, deadline=deadline),
            deadline,
            sleep=self._sleep,
            attempts=COPY_ATTEMPTS,
        )

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        """See `ObjectStore.get`."""
        self._retry(lambda: self._store.get(key, into, offset=offset, deadline=deadline), deadline)

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        """See `ObjectStore.read`."""
        return self._retry(lambda: self._store.read(key, limit_bytes=limit_bytes, deadline=deadline), deadline)

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        """See `ObjectStore.stat`."""
        return self._retry(lambda: self._store.stat(key, deadline=deadline), deadline)

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. A retry of a listing continues after the last key that was given."""
        check_prefix(prefix)
        return self._list(prefix, after, deadline)

    def delete(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.delete`."""
        self._retry(lambda: self._store.delete(key, deadline=deadline), deadline)

    def unfinished(self, prefix: str, *, deadline: Deadline) -> Sequence[str]:
        """See `ObjectStore.unfinished`."""
        return self._retry(lambda: self._store.unfinished(prefix, deadline=deadline), deadline)

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.abandon`."""
        self._retry(lambda: self._store.abandon(key, deadline=deadline), deadline)

    def local_path(self, key: str) -> Path | None:
        """See `ObjectStore.local_path`."""
        return self._store.local_path(key)

    def free_bytes(self) -> int | None:
        """See `ObjectStore.free_bytes`."""
        return self._store.free_bytes()

    def reserve(self, size: int) -> None:
        """See `ObjectStore.reserve`."""
        self._store.reserve(size)

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._store.close()

    def _retry(self, call: Callable[[], _T], deadline: Deadline) -> _T:
        return call_with_retry(call, deadline, sleep=self._sleep)

    def _holds(self, key: str, data: bytes, deadline: Deadline) -> bool:
        """Whether `key` holds exactly `data`. Raises `NotFound` if it has just gone; to callers, an unknown outcome."""
        try:
            return self._store.read(key, limit_bytes=len(data), deadline=deadline) == data
        except TooLarge:
            return False

    def _list(self, prefix: str, after: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        entries: Iterator[ObjectInfo] | None = None

        def following() -> ObjectInfo | None:
            nonlocal entries
            try:
                if entries is None:
                    entries = self._store.list(prefix, after=after, deadline=deadline)
                return next(entries, None)
            except CloudError:
                entries = None  # a generator that raised is finished
                raise

        while (info := self._retry(following, deadline)) is not None:
            after = info.key
            yield info
