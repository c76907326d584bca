"""Gradients: which ones a later step of an optimizer reads. Those are state; the others are not stored.

Owns the knowledge of when gradients were accumulated, and what the program does with them after a step. It is gained
from two parameters of each optimizer that had a gradient at its first step, so that watching costs next to nothing.

    optimizer.step() ─▶ consumed ─▶ set to None, to zero, or kept ─▶ backward: pending ─▶ optimizer.step()

A hook on a parameter tells of a backward. `fully_shard` calls none: of a DTensor, the gradient itself is compared with
the one that the optimizer has consumed.

Of an optimizer that does not step at each boundary, the two parameters do not tell enough: others may have got their
gradients alone (experts in turns). All of its gradients are compared with those that it has consumed, which are noted
when it steps behind a boundary at which it has not; before that is known, all are stored.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from harness.trainer.copy import cuda_runtime
from harness.trainer.distributed.boxes import is_dtensor, local_of
from harness.trainer.state.kinds import held_by

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
        habit: what the program does with them after a step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Watch nothing yet: the first step tells which parameters have gradients."""
        self.optimizer = optimizer
        self.habit = Habit.UNKNOWN
        self._pending = True
        self._samples: list[Tensor] = []
        self._hooks: list[Any] = []
        self._sharded: list[_Consumed] = []
        self._stepped_at = -1
        self._consumed: dict[int, _Consumed] = {}
        self._is_noted = False

    @property
    def has_stepped(self) -> bool:
        """Whether the optimizer has stepped in this start of the program."""
        return self._stepped_at >= 0

    @property
    def pending(self) -> bool:
        """Whether some were accumulated since the optimizer's last step; true before its first one."""
        return self._pending or any(consumed.has_changed for consumed in self._sharded)

    def stepped(self, step: int) -> None:
        """Note that the optimizer has stepped; `step`: completed steps before this one."""
        self._pending = False
        self._note(missed=step - self._stepped_at > 1)
        self._stepped_at = step
        if not self._samples:
            self._choose()
        for consumed in self._sharded:
            if self.habit is Habit.UNKNOWN:
                self.habit = consumed.habit
            consumed.note()

    def restore(self, *, pending: bool, habit: Habit) -> None:
        """Continue with what was known when a snapshot was taken."""
        self._pending, self.habit = pending, habit

    def are_read(self, *, sure: bool) -> bool:
        """Whether a later step may read the gradients that there are now: then they have to be in a snapshot.

        Args:
            sure: what the program does with them is not known before its second step. Then assume that they are read.
        """
        unknown = sure and self.habit is Habit.UNKNOWN
        return self.pending or unknown or self.habit is Habit.KEPT or not (self._hooks or self._sharded)

    def has_more(self, param: Tensor, *, completed: int, sure: bool) -> bool:
        """Whether a parameter may have a gradient that the sampled ones do not tell of.

        Args:
            param: the parameter.
            completed: completed steps. If the optimizer has stepped in the last one, its gradients are consumed.
            sure: see `are_read`.
        """
        if self._stepped_at >= completed - 1:
            return False
        if not self._is_noted:
            return sure
        consumed = self._consumed.get(id(param))
        return consumed is None or consumed.has_changed

    def _note(self, *, missed: bool) -> None:
        """Note all gradients that are consumed, if the optimizer has `missed` a boundary before this step."""
        self._is_noted = missed and bool(self._samples)
        if not self._is_noted:
            return
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._consumed:
                    self._consumed[id(param)] = _Consumed(param)
        for consumed in self._consumed.values():
            consumed.note()

    def remove(self) -> None:
        """Watch no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def _choose(self) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        found = [param for param in params if param.grad is not None and param.requires_grad and param.is_leaf]
        self._samples = [found[0], found[-1]][:_SAMPLES] if len(found) > 1 else found
        self._sharded = [_Consumed(param) for param in self._samples if is_dtensor(param)]
        for param in self._samples if not self._sharded else ():
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
        self._pending = True


class _Consumed:
    """The gradient of a parameter, as its optimizer has consumed it."""

    def __init__(self, param: Tensor) -> None:
        self._param = param
        self._grad: weakref.ref[Tensor] | None = None
        self._version = 0

    def note(self) -> None:
        grad = self._param.grad
        self._grad, self._version = (None, 0) if grad is None else (weakref.ref(grad), _version(grad))

    @property
    def habit(self) -> Habit:
        """What was done with it, as far as the present gradient shows."""
        if self._grad is None or not self.has_changed:
            return Habit.UNKNOWN
        return Habit.DROPPED if self._param.grad is not self._grad() else Habit.KEPT

    @property
    def has_changed(self) -> bool:
        """Whether there is another gradient now, or more of this one."""
        grad = self._param.grad
        if grad is None or self._grad is None:
            return grad is not None
        return grad is not self._grad() or _version(grad) != self._version


def _version(grad: Tensor) -> int:
    return grad._version + local_of(grad)._version if is_dtensor(grad) else grad._version


class Gradients:
    """The gradients of all optimizers of one training."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        """Watch these."""
        self._watched = {id(optimizer): Watched(optimizer) for optimizer in optimizers}
        self.completed = 0
        """Completed steps, when a snapshot is taken."""

    def stepped(self, optimizer: object, step: int) -> bool:
        """Note that an optimizer has stepped; return whether it is one of the training's. At every step: 0.2 µs.

        Args:
            optimizer: the optimizer.
            step: completed steps before this one.
        """
        watched = self._watched.get(id(optimizer))
        if watched is None:
            return False
        watched.stepped(step)
        return True

    def of(self, optimizer: object) -> Watched | None:
        """Return what is known of an optimizer's gradients; `None` if it is not one of the training's."""
        return self._watched.get(id(optimizer))

    def has_stepped(self, optimizer: object) -> bool:
        """Whether an optimizer of the training, or one that it holds, has stepped in this start of the program."""
        found = (self.of(each) for each in (optimizer, *held_by(optimizer, Optimizer).values()))
        return any(watched is not None and watched.has_stepped for watched in found)

    def have_stepped(self, states: Mapping[str, object]) -> dict[str, bool]:
        """Return, by name, whether each optimizer among the states has stepped in this start of the program."""
        return {name: self.has_stepped(each) for name, each in states.items() if isinstance(each, Optimizer)}

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
