"""Gradients: which ones a later step of an optimizer reads. Those are state; the others are not stored.

Owns the knowledge of when gradients were accumulated, and what the program does with them after a step. It is gained
from two parameters of each optimizer that had a gradient at its first step, so that watching costs next to nothing.

    optimizer.step() ─▶ consumed ─▶ set to None, to zero, or kept ─▶ backward: pending ─▶ optimizer.step()
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from harness.trainer.copy import cuda_runtime

_SAMPLES: Final = 2


class Habit(enum.StrEnum):
    """The program's treatment of gradients between a step and the next backward. The values are part of the format."""

    UNKNOWN = "unknown"
    DROPPED = "dropped"
    """Set to `None`."""
    ZEROED = "zeroed"
    """Set to zero in place: a parameter without a new gradient is updated nevertheless."""
    KEPT = "kept"
    """Left as they are, or changed: the next backward adds to them."""


class Watched:
    """The gradients of one optimizer's parameters.

    Attributes:
        pending: whether some were accumulated since the optimizer's last step; true before its first one.
        habit: what the program does with them after a step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Watch nothing yet: the first step tells which parameters have gradients."""
        self.optimizer = optimizer
        self.pending = True
        self.habit = Habit.UNKNOWN
        self._samples: list[Tensor] = []
        self._hooks: list[Any] = []

    def stepped(self) -> None:
        """Note that the optimizer has stepped."""
        self.pending = False
        if not self._samples:
            self._choose()

    def are_read(self, *, sure: bool) -> bool:
        """Whether a later step may read the gradients that there are now: then they have to be in a snapshot.

        Args:
            sure: what the program does with them is not known before its second step. Then assume that they are read.
        """
        unknown = sure and self.habit is Habit.UNKNOWN
        return self.pending or unknown or self.habit is Habit.KEPT or not self._hooks

    def remove(self) -> None:
        """Watch no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def _choose(self) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        found = [param for param in params if param.grad is not None and param.requires_grad and param.is_leaf]
        self._samples = [found[0], found[-1]][:_SAMPLES] if len(found) > 1 else found
        for param in self._samples:
            self._hooks.append(param.register_hook(self._accumulates))  # type: ignore[no-untyped-call]

    def _accumulates(self, _added: Tensor) -> None:
        """Note that a backward is about to add to a sampled gradient. May be called in a thread of autograd."""
        # A CUDA graph is spoiled by waiting for the device. Its replays call no hook: the habit stays unknown then.
        if self.habit is Habit.UNKNOWN and not self.pending and not cuda_runtime.is_recording():
            grads = [param.grad for param in self._samples]
            if any(grad is None for grad in grads):
                self.habit = Habit.DROPPED
            else:
                self.habit = Habit.KEPT if any(bool(grad.any()) for grad in grads if grad is not None) else Habit.ZEROED
        self.pending = True


class Gradients:
    """The gradients of all optimizers of one training."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch these."""
        self._watched = {id(optimizer): Watched(optimizer) for optimizer in optimizers}

    def stepped(self, optimizer: object) -> None:
        """Note that an optimizer has stepped. Called at every step: 0.1 µs."""
        watched = self._watched.get(id(optimizer))
        if watched is not None:
            watched.stepped()

    def of(self, optimizer: object) -> Watched | None:
        """Return what is known of an optimizer's gradients; `None` if it is not one of the training's."""
        return self._watched.get(id(optimizer))

    def by_parameter(self) -> Mapping[int, Watched]:
        """Return what is known of each parameter's gradient, by the parameter's `id`."""
        return {
            id(param): watched
            for watched in self._watched.values()
            for group in watched.optimizer.param_groups
            for param in group["params"]
        }

    def remove(self) -> None:
        """Watch no longer."""
        for watched in self._watched.values():
            watched.remove()
