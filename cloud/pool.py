"""Pool: threads that wait for a network or a disk; the end of the process does not wait for them.

Owns how the threads are started, at which priority, and how they end. They are daemon threads: `concurrent.futures`
joins its own threads when the interpreter ends, and a thread that hangs in the network would delay the exit of the
process until the last time-out is over.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from cloud import priority

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Job = tuple[Future[Any], Callable[[], Any]]


class _Team:
    """Threads of one priority, and the queue of their jobs."""

    def __init__(self, *, low: bool) -> None:
        self.low = low
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.threads = 0


class Pool:
    """Threads that run at most `size` calls at once. For one owner, which submits calls and finally shuts down.

    If a thread that works in the background (`priority.py`) makes the pool, the pool's threads work in the background
    too. When that work becomes urgent, new threads run the calls that are submitted from then on; calls that run
    already finish at their old priority.

    Args:
        size: number of threads; each is started when there is a call for it.
        name: prefix of the threads' names.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._background = priority.current()
        self._team = _Team(low=self._is_low())
        self._dismissed: list[_Team] = []

    def submit(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Queue a call for one of the threads; return the future of its result."""
        if self._team.low is not self._is_low():
            self._dismiss()
        future: Future[_T] = Future()
        team = self._team
        if team.threads < self._size:
            # IMPORTANT: start the thread before the call is in the queue. If no thread can be started (pids.max), this
            # raises, and no thread later makes a call that its owner does not know of: on a closed file, for example.
            name = f"{self._name}_{team.threads}"
            threading.Thread(target=_work, args=(team,), name=name, daemon=True).start()
            team.threads += 1
        team.jobs.put((future, functools.partial(call, *args, **kwargs)))
        return future

    def shutdown(self) -> None:
        """Cancel the calls that have not begun, without waiting for those that run. A thread ends after its call."""
        self._dismiss()
        for team in self._dismissed:
            _cancel(team)
        self._dismissed = []

    def _is_low(self) -> bool:
        return self._background is not None and not self._background.urgent

    def _dismiss(self) -> None:
        """Have the threads end after the calls that are queued for them."""
        for _ in range(self._team.threads):
            self._team.jobs.put(None)
        self._dismissed.append(self._team)
        self._team = _Team(low=self._is_low())


def _cancel(team: _Team) -> None:
    kept = 0
    while not team.jobs.empty():
        try:
            job = team.jobs.get_nowait()
        except queue.Empty:  # a thread took the last job first
            break
        if job is None:
            kept += 1
            continue
        job[0].cancel()
        job[0].set_running_or_notify_cancel()  # wakes threads that wait for it
    for _ in range(kept):
        team.jobs.put(None)


def _work(team: _Team) -> None:
    if team.low:
        priority.lower()
    while (job := team.jobs.get()) is not None:
        future, call = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except Exception as err:  # noqa: BLE001  the thread's root: `result` raises it again
            future.set_exception(err)
        del job, future, call  # keep no reference while this waits
