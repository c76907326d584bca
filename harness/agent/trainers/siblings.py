"""The end of several ranks: one that has failed ends the attempt of all, and one that has left a drained run, too.

Owns when that was, and the end of those that are left: they hang in a collective with a process that is gone, and
answer no signal. Main thread of the agent.

    a rank dies or fails ──▶ 2 s for the others to end by themselves ──▶ SIGKILL
    their launcher dies, and nothing has told all to leave ──▶ 2 s ──▶ SIGKILL
    a rank leaves, and another waits for it ──▶ 5 s ──▶ SIGKILL
    a rank leaves, all are told to, and all is durable ──▶ 5 s ──▶ SIGKILL; behind the training, at the deadline only
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from harness.agent.trainers.ranks import Connection, Rank, Ranks
from harness.ipc.process import kill, pidfd_dead

_FAILED_S = 2.0  # the others' own errors say more, if they come
_LEFT_S = 5.0
_GONE_S = 3.0  # until a killed process is gone


class Siblings:
    """The ranks of one attempt, of which one has ended. Does nothing as long as there is one rank only."""

    def __init__(self, ranks: Ranks, on_dead: Callable[[Rank], None]) -> None:
        """`on_dead` handles the death of a connected rank."""
        self._ranks, self._on_dead = ranks, on_dead
        self.broken_at: float | None = None
        """Monotonic; when the first rank failed, so that the others cannot go on."""
        self._left_at: float | None = None
        self._told_at: float | None = None  # when all were told to leave
        self._orphaned_at: float | None = None

    def begin_again(self) -> None:
        """Note that another attempt has begun."""
        self.broken_at = self._left_at = self._told_at = self._orphaned_at = None

    def note_missing(self) -> None:
        """Note that a rank will not come: it has died before its Checkpointer, or before a dead agent was replaced."""
        if self._ranks.several:
            self.broken_at = self.broken_at or time.monotonic()

    def note_ended(self, ended: Connection) -> None:
        """Note that a connected rank has ended."""
        if not self._ranks.several:
            return
        now, self._ranks.one_has_left = time.monotonic(), True
        if ended.exception or not ended.said_bye:
            self.broken_at = self.broken_at or now
        else:
            self._left_at = self._left_at or now

    def note_orphaned(self) -> None:
        """Note that the launcher has died before its ranks."""
        self._orphaned_at = time.monotonic()

    @property
    def broken(self) -> bool:
        """Whether one of several ranks has failed: what its launcher then does to the others is no notice."""
        if self.broken_at is None:  # its pidfd may not have been looked at yet
            for rank in self._ranks if self._ranks.several else ():
                if rank.connection is not None and pidfd_dead(rank.connection.pidfd):
                    self._on_dead(rank)
        return self.broken_at is not None

    def end_in_time(self, *, leaving: bool, saved: bool, finished: bool) -> None:
        """Kill the others of one that has ended, if they have not ended by themselves within seconds.

        Args:
            leaving: whether all are told to leave: those that have lost their launcher can still save until then.
            saved: whether, besides, nothing is left to save: then one that has left as it was told counts as well, as
                it does where another one waits for it.
            finished: whether those that live are behind their training: one may work on alone, to write a result.
        """
        now = time.monotonic()
        self._told_at = (self._told_at or now) if leaving else None
        orphaned = not leaving and self._orphaned_at is not None and now - self._orphaned_at > _FAILED_S
        failed = self.broken_at is not None and now - self.broken_at > _FAILED_S
        awaited = any(rank.control.view.waits for rank in self._ranks if rank.connection is not None)
        since = self._left_at if awaited or self._left_at is None else max(self._left_at, self._told_at or now)
        left = ((leaving and saved and not finished) or awaited) and since is not None and now - since > _LEFT_S
        if (failed or orphaned or left) and self._ranks.connections:
            self.end()

    def end(self) -> None:
        """Kill every connected rank, and wait until none can write to a slot any more."""
        for connection in self._ranks.connections:
            kill(connection.pidfd)
        give_up_at = time.monotonic() + _GONE_S
        for rank in self._ranks:
            while (there := rank.connection) is not None and time.monotonic() < give_up_at:
                if pidfd_dead(there.pidfd):
                    self._on_dead(rank)
                else:
                    threading.Event().wait(0.005)
