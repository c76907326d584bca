"""Pool: threads that wait in the network, and that nobody waits for when the process ends.

Owns how they are started and how they end. They are daemons: `concurrent.futures` joins its own when the interpreter
ends, and one that hangs in the network would hold the process, and its exit code, until the last time-out is over.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Job = tuple[Future[Any], Callable[[], Any]]


class Pool:
    """At most `size` calls at once, each in a thread. For one owner, who submits and in the end shuts down.

    Args:
        size: threads; each is started when there is something for it to do.
        name: what the threads' names begin with.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = 0

    def submit(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have it called soon."""
        future: Future[_T] = Future()
        self._jobs.put((future, functools.partial(call, *args, **kwargs)))
        if self._threads < self._size:
            threading.Thread(target=self._work, name=f"{self._name}_{self._threads}", daemon=True).start()
            self._threads += 1
        return future

    def shutdown(self) -> None:
        """What has not begun is cancelled; nobody waits for what runs. A thread ends with its call."""
        while not self._jobs.empty():
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:  # a thread was quicker
                break
            if job is not None:
                job[0].cancel()
                job[0].set_running_or_notify_cancel()  # tells whoever waits for it
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as err:  # noqa: BLE001  the thread's root: whoever asks for the result hears of it
                future.set_exception(err)
            del job, future, call  # nothing is kept while this waits
