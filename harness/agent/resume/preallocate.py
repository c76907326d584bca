"""Ahead: memory that is allocated beside the reads into it, from front to back, and always a little further.

Owns one thread and how far it is. Knows neither what is read nor where it comes from: a read waits for its part. Memory
costs a core 0.05 to 0.5 s per GB, and a disk none, so that the two together take no longer than the slower one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator


class OutOfMemory(Exception):
    """There is not so much memory after all."""


class Preallocation:
    """One allocation under way. `wait_for` from any thread, everything else from the one that made it."""

    def __init__(self, making: Generator[int]) -> None:
        """Begin.

        Args:
            making: does some of it at each turn, and yields how many bytes are there; raises OSError.
        """
        self._making = making
        self._changed = threading.Condition()
        self._there = 0
        self._all = self._stopped = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="harness-allocate", daemon=True)
        self._thread.start()

    def wait_for(self, end: int) -> None:
        """Block until the bytes up to `end` are there.

        Raises:
            OutOfMemory: they never will be.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._all or self._there >= end)
            if self._there < end:
                self._check()

    def wait(self) -> None:
        """Block until all of it is there. Raises OutOfMemory."""
        self._thread.join()
        self._check()

    def stop(self) -> None:
        """Nothing more is allocated; whoever waits is told that this is all. Idempotent."""
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
        except Exception as err:  # noqa: BLE001  the thread's root; whoever waits is told
            self._failure = err
        finally:
            with self._changed:
                self._all = True
                self._changed.notify_all()
