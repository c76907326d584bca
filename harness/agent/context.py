"""Objects that all parts of one agent share: the run's settings and keys, the main loop, the journal, and the log.

Owns nothing that changes; made once, before anything runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from harness.agent.journal import Emit
from harness.agent.loop import Loop
from harness.config.settings import Settings
from harness.core.snapshot import RunKeys


class CalledOff(Exception):
    """The agent has to exit while it waits for an earlier start of this host to end: nothing was begun."""


@dataclass(frozen=True)
class Context:
    """The shared objects of one agent.

    Attributes:
        settings: of the run.
        keys: of the run.
        host: this host's name, for records.
        loop: the main thread's.
        emit: the journal; from any thread.
        say: logs a message to the user; from any thread.
        on_bug: called with the exception that ended a thread unexpectedly; from that thread.
    """

    settings: Settings
    keys: RunKeys
    host: str
    loop: Loop
    emit: Emit
    say: Callable[[str], None]
    on_bug: Callable[[BaseException], None]

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the main thread soon. From any thread, and from signal handlers."""
        self.loop.post(action)

    def thread(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` in a daemon thread of this name. It posts its results; an exception is a bug."""

        def root() -> None:
            try:
                work()
            except Exception as err:  # noqa: BLE001  the thread's root: a bug here must end the agent, not hang it
                self.on_bug(err)

        threading.Thread(target=root, name=name, daemon=True).start()
