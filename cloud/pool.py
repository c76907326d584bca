"""Pool: threads that wait for a network or a disk, and that nobody waits for when the process ends.

Owns how they are started, at which priority, and how they end. They are daemons: `concurrent.futures` joins its own
when the interpreter ends, and one that hangs in the network would hold the process, and its exit code, until the last
time-out is over.
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
    """Threads of one priority, and what they have to do."""

    def __init__(self, *, low: bool) -> None:
        self.low = low
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.threads = 0


class Pool:
    """At most `size` calls at once, each in a thread. For one owner, who submits and in the end shuts down.

    Made by a thread that works in the background (`priority.py`), its threads do too. When that becomes urgent, calls
    submitted from then on have new threads; what runs already is finished as it was begun.

    Args:
        size: threads; each is started when there is something for it to do.
        name: what the threads' names begin with.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._background = priority.current()
        self._team = _Team(low=self._is_low())
        self._dismissed: list[_Team] = []

    def submit(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Have it called soon."""
        if self._team.low is not self._is_low():
            self._dismiss()
        future: Future[_T] = Future()
        team = self._team
        if team.threads < self._size:
            # IMPORTANT: before the call is in the queue. Where no thread can be had (pids.max), this raises, and nobody
            # makes a call later that its owner does not know of: into a file, say, that has been closed by then.
            name = f"{self._name}_{team.threads}"
            threading.Thread(target=_work, args=(team,), name=name, daemon=True).start()
            team.threads += 1
        team.jobs.put((future, functools.partial(call, *args, **kwargs)))
        return future

    def shutdown(self) -> None:
        """What has not begun is cancelled; nobody waits for what runs. A thread ends with its call."""
        self._dismiss()
        for team in self._dismissed:
            _cancel(team)
        self._dismissed = []

    def _is_low(self) -> bool:
        return self._background is not None and not self._background.urgent

    def _dismiss(self) -> None:
        """Let the threads go when they have done what they were given."""
        for _ in range(self._team.threads):
            self._team.jobs.put(None)
        self._dismissed.append(self._team)
        self._team = _Team(low=self._is_low())


def _cancel(team: _Team) -> None:
    kept = 0
    while not team.jobs.empty():
        try:
            job = team.jobs.get_nowait()
        except queue.Empty:  # a thread was quicker
            break
        if job is None:
            kept += 1
            continue
        job[0].cancel()
        job[0].set_running_or_notify_cancel()  # tells whoever waits for it
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
        except Exception as err:  # noqa: BLE001  the thread's root: whoever asks for the result hears of it
            future.set_exception(err)
        del job, future, call  # nothing is kept while this waits
