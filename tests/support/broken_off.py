"""A small program, broken off at a step and lived on from its last snapshot: the same as if it had never been?

Owns what a new process would bring: the seeds, and no Checkpointer. The agent is played, so a life takes milliseconds.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from harness import Checkpointer
from harness.ipc.slots import Slot
from tests.support.played_agent import PlayedLink, as_before


class BrokenOff(BaseException):
    """What stands for SIGKILL: the program does nothing more."""


class Life:
    """One life of a program, which makes everything anew: `program(life)` returns what is to be compared."""

    def __init__(self, link: PlayedLink, stop: int | None) -> None:
        self.link, self._stop = link, stop
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer: Any = SGD(self.model.parameters(), lr=0.003, momentum=0.9)

    def begin(self, **states: Any) -> Checkpointer:
        """Return the Checkpointer of this life, with the model and its optimizer, and with others."""
        return self.begin_with(**{"model": self.model, "optimizer": self.optimizer} | states)

    def begin_with(self, **states: Any) -> Checkpointer:
        """Return the Checkpointer of this life, with these states alone."""
        self.ckpt = Checkpointer(states, link=self.link)  # type: ignore[arg-type]
        return self.ckpt

    def is_alive(self) -> None:
        """Be broken off, if it is time."""
        if self._stop is not None and self.ckpt.step_count == self._stop and not self.ckpt.replaying:
            raise BrokenOff

    def loss(self, x: Tensor) -> Tensor:
        """Compute a loss, with dropout from the global generator; nothing is stepped."""
        self.is_alive()
        loss: Tensor = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        return loss

    def step(self, x: Tensor) -> None:
        """Make one step with a batch."""
        loss = self.loss(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @property
    def outcome(self) -> Any:
        """The weights, and how many steps there were."""
        return [parameter.detach().clone() for parameter in self.model.parameters()], self.ckpt.step_count


Program = Callable[[Life], Any]


def rows(count: int) -> TensorDataset:
    """Return data of four columns, the same in every life."""
    return TensorDataset(torch.randn(count, 4, generator=torch.Generator().manual_seed(5)))


def check_goes_on(program: Program, stops: Iterable[int | tuple[int, ...]]) -> None:
    """Assert that the program is the same after it was broken off. It takes a snapshot at each step.

    Args:
        program: the program.
        stops: each a step at which it is broken off, or several for one life after the other.
    """
    unbroken = live(program)
    for stop in stops:
        with contextlib.ExitStack() as stack:
            sealed: Slot | None = None
            for step in stop if isinstance(stop, tuple) else (stop,):
                link = stack.enter_context(played(sealed))
                assert _lived(program, link, step) is None, f"it ended before step {step}"
                sealed = link.sealed
                assert sealed is not None, f"nothing was saved before step {step}"
            after = _lived(program, stack.enter_context(played(sealed)), None)
        assert same(after, unbroken), f"broken off at step {stop}"


def live(program: Program) -> Any:
    """Return what a life comes to that is not broken off."""
    with played(None) as link:
        return _lived(program, link, None)


@contextlib.contextmanager
def played(resumes: Slot | None) -> Iterator[PlayedLink]:
    """Context manager around an agent for one life, which asks for a snapshot at each step."""
    link = PlayedLink(resumes, every_steps=1, generation=1 if resumes is None else 2)
    with contextlib.closing(link):
        yield link


def _lived(program: Program, link: PlayedLink, stop: int | None) -> Any:
    with as_before():
        try:
            return program(Life(link, stop))
        except BrokenOff:
            return None


def same(one: Any, other: Any) -> bool:
    """Whether two outcomes are the same, bit by bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
