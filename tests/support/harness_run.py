"""`harness run` with kills at named events of the journal: real SIGKILLs, from inside, at exactly that line.

    python -m tests.support.harness_run --kill Published:2:agent --store DIR --run NAME -- python train.py

`--kill EVENT:NTH:WHO` kills WHO (trainer, agent or both) when EVENT is emitted for the NTH time.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.agent.main import Agent
from harness.config import resolve
from harness.core import events
from harness.errors import HarnessError


@dataclass
class KillAt:
    """A journal listener that kills."""

    event: str
    nth: int
    who: str
    agent: Agent | None = None
    seen: int = 0

    def __call__(self, line: events.Line) -> None:
        """Called by the journal, in the thread in which the event happens."""
        if type(line.body).__name__ != self.event:
            return
        self.seen += 1
        if self.seen != self.nth:
            return
        assert self.agent is not None
        child = self.agent.child
        if self.who in ("trainer", "both") and child is not None:
            os.kill(child.pid, signal.SIGKILL)
        if self.who in ("agent", "both"):
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run; the exit code."""
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    flags = {options[i][2:].replace("-", "_"): options[i + 1] for i in range(0, len(options), 2)}
    killers = []
    if kill := flags.pop("kill", None):
        event, nth, who = kill.split(":")
        killers.append(KillAt(event, int(nth), who))
    numbers = {"every_s": float, "durable_every_s": float, "every_steps": int, "grace_s": float, "max_crashes": int,
               "keep_last": int, "slots": int}  # fmt: skip
    settings = resolve({name: numbers.get(name, str)(value) for name, value in flags.items()}, os.environ, Path.cwd(), script=None)
    try:
        agent = Agent(settings, command, environ=os.environ, listeners=killers)
        for killer in killers:
            killer.agent = agent
        return agent.run()
    except HarnessError as err:
        sys.stderr.write(f"harness: error: {err}\n")
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
