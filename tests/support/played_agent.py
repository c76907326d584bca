"""An agent that is played in the test's own process: what a Checkpointer does can be tried in milliseconds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer

from harness import Checkpointer
from harness.core import messages
from harness.core.snapshot import SnapshotId
from harness.ipc.control_page import AgentSide, TrainerSide
from harness.ipc.slots import Slot, SlotRecord
from harness.trainer import opening, process, training
from harness.trainer.link import Ready, ResumeHeader
from harness.trainer.ranks import ALONE

BATCHES = [torch.ones(1, 2)] * 4


class PlayedLink:
    """An agent that grants a slot whenever it is asked, and makes what is sealed durable at once."""

    slot_error = stores = None
    rank = ALONE
    superseded = detached = gone = False
    sequence = restarts = 0

    def __init__(self, resumes: Slot | None = None, *, generation: int = 1, every_steps: int | None = None) -> None:
        """Resume the snapshot in a sealed slot, or nothing."""
        self.settings = SimpleNamespace(overlap=False, every_steps=every_steps)
        self.generation = messages.GenerationInfo(generation, "0" * 32, "")
        self.resumes = resumes
        self.agent = AgentSide.create()
        self.page = TrainerSide(os.dup(self.agent.fd))
        self.slot: Slot | None = None
        self.sealed: Slot | None = None
        self.seals = 0
        self._slots: list[Slot] = []
        self.told: list[type[messages.AnyMessage]] = []
        self.signals: list[int] = []
        self.parted: dict[str, bool] = {}
        self.held = False

    def wait_head(self) -> ResumeHeader | None:
        return None if self.resumes is None else ResumeHeader(self._snapshot, "memory", record_of(self.resumes))

    def wait_ready(self) -> Ready | None:
        return None if self.resumes is None else Ready(self._snapshot, "memory", True, (self.resumes,))

    def drop_ready(self) -> None: ...

    def close_in_child(self) -> None: ...

    def close(self) -> None:
        """Both sides of the page, and every slot."""
        self.agent.close()
        self.page.close()
        for slot in self._slots:
            slot.close()

    @property
    def _snapshot(self) -> str:
        assert self.resumes is not None
        return str(SnapshotId(self.generation.number - 1, record_of(self.resumes).step))

    def stepped(self, step: int, wanted_at: float) -> None: ...

    def forget(self, kind: type[messages.AnyMessage]) -> None:
        self.told.remove(kind)

    def poke(self, signum: int) -> None:
        self.signals.append(signum)

    def part(self, **how: bool) -> None:
        self.parted = how

    def ask_slots(self, size: int, prepare: Callable[[Slot], None] | None = None) -> None:
        self.slot = Slot.create(size)
        self._slots.append(self.slot)

    def granted(self, used: int, sealed: int) -> tuple[int, Slot] | None:
        return None if self.slot is None or used == self.seals + 1 else (self.seals + 1, self.slot)

    def index_of(self, slot: Slot) -> int:
        return 0

    def send(self, message: messages.AnyMessage, *, repeat: bool = False) -> None:
        self.told.append(type(message))
        if isinstance(message, messages.Sealed):
            self.seals += 1
            self.sealed = self.slot
            self.held = message.held
            self.agent.tell_steps(local=None, durable=message.step)


def record_of(slot: Slot) -> SlotRecord:
    """Of a slot that is sealed."""
    record = slot.record()
    assert record is not None
    return record


class Program:
    """A training script with the harness in it."""

    def __init__(self, link: PlayedLink | None = None, **options: Any) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.link: Any = link or PlayedLink()
        self.ckpt = Checkpointer(model=self.model, optimizer=self.optimizer, link=self.link, **options)

    def train(self) -> None:
        """A step."""
        self.model(BATCHES[0]).sum().backward()
        self.optimizer.step()

    def end(self) -> str:
        """The process ends; what the agent is told of it."""
        self.ckpt._training.at_exit()
        if self.link.parted["early"]:
            return "stopped early"
        return "finished" if messages.Finished in self.link.told else "left"


def no_checkpointer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fixture: nothing of this process is changed for good."""
    for name in ("HARNESS_RUN_ID", "HARNESS_RESTARTS"):
        monkeypatch.setenv(name, "")
    with as_before():
        yield


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """What a process brings that is new: no Checkpointer, and none that stays behind, be it as torch's hook alone."""
    hooks = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    before = [dict(each) for each in hooks]
    try:
        yield
    finally:
        opening._newest.clear()
        training._unanswered.clear()
        while process._attached:
            process._attached[-1].detach()
        for now, was in zip(hooks, before, strict=True):
            now.clear()
            now.update(was)
