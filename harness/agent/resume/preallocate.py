"""Preallocation: memory is allocated in a thread, from front to back, ahead of the reads into it.

Owns that thread and its progress. Knows neither what is read nor where it comes from: a read waits until its part is
allocated. Allocating memory costs a core 0.05 to 0.5 s per GB, reading from a disk costs none, so that the two together
take no longer than the slower one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator


class OutOfMemory(Exception):
    """The memory that seemed to be free could not be allocated."""


class Preallocation:
    """One allocation under way. `wait_for` from any thread, everything else from the one that made it."""

    def __init__(self, making: Generator[int]) -> None:
        """Begin.

        Args:
            making: allocates some at each turn, and yields how many bytes are allocated so far; raises OSError.
        """
        self._making = making
        self._changed = threading.Condition()
        self._there = 0
        self._all = self._stopped = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="harness-allocate", daemon=True)
        self._thread.start()

    def wait_for(self, end: int) -> None:
        """Block until the bytes up to `end` are allocated.

        Raises:
            OutOfMemory: they cannot be allocated.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._all or self._there >= end)
            if self._there < end:
                self._check()

    def wait(self) -> None:
        """Block until all of it is allocated. Raises OutOfMemory."""
        self._thread.join()
        self._check()

    def stop(self) -> None:
        """Stop allocating, and end every `wait_for`. Idempotent."""
        self._stopped = True
        self._thread.join()

    def _check(self) -> None:
        if isinstance(self._failure, OSError):
            raise OutOfMemory(str(self._failure.strerror)) from self._failure
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with contextlib.closing(self._making):
                for there in self._making:
                    with self._changed:
                        self._there = there
                        self._changed.notify_all()
                    if self._stopped:
                        break
        except Exception as err:  # noqa: BLE001  the thread's root; threads that wait raise it
            self._failure = err
        finally:
            with self._changed:
                self._all = True
                self._changed.notify_all()
