"""The lives of a training of `tests.support.loops` in this process: interrupted at an event, resumed, compared.

Owns what a new process would bring: a new job, other random numbers, no Checkpointer. A life takes milliseconds, so a
style of loop can be interrupted at each of its events. The agent is played; what only processes show (signals, workers,
memory) is in tests/process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from harness.core import rehearsal
from harness.core.rehearsal import AnyLine, Instructions, Interruption
from harness.errors import ExitCode
from harness.ipc.control_page import Command
from harness.trainer import opening
from harness.trainer.hazards import Hazards
from tests.support import loops
from tests.support.played_agent import PlayedLink, as_before


class Killed(BaseException):
    """What stands for SIGKILL: the program does nothing more."""


@dataclass
class Outcome:
    """What a training has left: its curve, and a digest of its weights."""

    curve: list[str] = field(default_factory=list)
    final: str = ""
    ended: bool = False


class Lives:
    """One training, life by life."""

    def __init__(self, style: loops.Style, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._style, self._folder, self._monkeypatch = style, folder, monkeypatch
        self._link: PlayedLink | None = None
        self._links: list[PlayedLink] = []
        self._lives = 0
        self.events: list[str] = []
        """Of the last life."""
        self.outcome = Outcome()

    def unbroken(self) -> Outcome:
        """The same training without any harness."""
        with self._monkeypatch.context() as patch:
            patch.setenv("HARNESS", "off")
            self._train()
        return self.outcome

    def rehearse(self, stop: int, interruptions: Sequence[Interruption] = ()) -> list[AnyLine]:
        """Live as in a pass of a rehearsal, life by life; return what was written down."""
        written = self._folder / "lines"
        for interruption in [*interruptions, None]:
            told = Instructions(str(written), stop, interruption)
            self._monkeypatch.setenv(rehearsal.VARIABLE, msgspec.json.encode(told).decode())
            self.live()
        self._monkeypatch.delenv(rehearsal.VARIABLE)
        return rehearsal.decode_lines(written.read_bytes())

    def live(self, *, notice_at: int | None = None, kill_at: int | None = None, every_steps: int | None = None) -> None:
        """Live until the end, or until what happens at the event of this number."""
        self._lives += 1
        before = self._link
        sealed = None if before is None else before.sealed or before.resumes
        link = self._link = PlayedLink(sealed, generation=self._lives, every_steps=every_steps)
        self._links.append(link)

        def poke(_: int) -> None:
            link.agent.command(Command.SNAPSHOT_AND_LEAVE)

        def happens(_: str) -> None:
            if len(self.events) == kill_at:
                raise Killed
            if len(self.events) == notice_at:
                link.agent.command(Command.SNAPSHOT_AND_LEAVE)

        with self._monkeypatch.context() as patch:
            patch.setattr(opening, "open_link", lambda _: link)
            patch.setattr(link, "poke", poke)
            for search in ("look_at", "look_for_forgotten"):  # of the heap: longer than a whole life
                patch.setattr(Hazards, search, lambda *_: None)
            self._train(happens)

    def close(self) -> None:
        """Memory and descriptors of every life."""
        while self._links:
            self._links.pop().close()

    def _train(self, happens: object = None) -> None:
        curve = self._folder / "curve"
        self.events = []
        random.seed(self._lives)
        torch.manual_seed(self._lives)

        def event(what: str) -> None:
            self.events.append(what)
            if callable(happens):
                happens(what)

        with self._monkeypatch.context() as patch, as_before():
            patch.setattr(loops, "happens", event)
            job = loops.Job(curve)
            try:
                self._style(job)
                self.outcome.ended, self.outcome.final = True, loops.digest(job.model)
            except Killed:
                pass
            except SystemExit as leaving:
                if leaving.code != ExitCode.INTERRUPTED:
                    raise
            finally:
                job.curve.close()
                self.outcome.curve = curve.read_text().splitlines()
