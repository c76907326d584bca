"""Hazards: what a resume could not repeat, as far as a loop can see it. Looked for in the first iterations, told once.

Owns the signs: random numbers that were drawn before the loop, something that counts or pairs the iterations, a wrapper
that reads one batch ahead, a scheduler that was not given, a loop in another thread than the training. Knows no agent;
changes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.errors import StateError
from harness.trainer.loaders.hook import UNWRAP
from harness.trainer.state.capture import Captured
from harness.trainer.state.copies import Copies
from harness.trainer.state.gradients import Gradients
from harness.trainer.state.kinds import Kind, classify, held_by, parameter_names

_WATCHED_STEPS = 3
_FRAMES_OF_A_STEP = 10
_NAMES = {"python": "Python's", "numpy": "numpy's", "torch": "torch's"}
_WRAPPERS: dict[type, str] = {
    enumerate: "enumerate() begins at 0 again: use ckpt.enumerate(loader), or the number that ckpt.steps() yields",
    zip: "what zip() pairs with it begins again: pair it in the dataset, or index it by ckpt.batch",
    itertools.islice: "islice() counts from 0 again: end the loop by ckpt.batch, or give the loader fewer batches",
    itertools.cycle: "cycle() repeats what it has kept, without boundaries: loop over ckpt.epochs() instead",
}


class Hazards:
    """The signs in one program.

    Attributes:
        made_in: the thread that made the Checkpointer.
        stepped_in: the thread in which an optimizer stepped first; `None` before that.
    """

    def __init__(
        self, capture_moment: Callable[[], Any], states: Mapping[str, object], warn: Callable[[str], None]
    ) -> None:
        """Look at nothing yet.

        Args:
            capture_moment: returns the global random states, by library. Draws nothing.
            states: the Checkpointer's states, by name.
            warn: shows a warning to the user.
        """
        self._capture_moment, self._warn = capture_moment, warn
        self._states = states
        self._optimizers = [state for state in states.values() if isinstance(state, Optimizer)]
        self._strangers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._told_stranger = False
        self._looked_at = set[str]()
        self.made_in = threading.get_ident()
        self.stepped_in: int | None = None
        self._scaler: GradScaler | None = None
        self._before: Mapping[str, Any] | None = None
        self._drawn: set[str] = set()
        self._iterators: dict[str, weakref.ref[Any]] = {}
        self._fetches: list[int] | None = None
        """Batches that were fetched in each of the first steps; the last number is that of the step under way."""

    # ---- before the loop --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the random states at the end of the constructor: a run that has no snapshot yet begins."""
        self._before = self._capture_moment()
        self._fetches = [0]

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Context manager for what may draw before the loop: it draws the same after a resume, and keeps nothing."""
        self._note_drawn()
        try:
            yield
        finally:
            if self._before is not None:
                self._before = self._capture_moment()

    def loop_begins(self) -> None:
        """Warn if random numbers were drawn between the Checkpointer and its first loop."""
        self._note_drawn()
        self._before = None
        if not self._drawn:
            return
        names = ", ".join(_NAMES.get(name, f"{name}'s") for name in sorted(self._drawn))
        self._drawn.clear()
        self._warn(
            f"{names} random numbers were drawn between Checkpointer(...) and the loop. After a resume they are drawn "
            "again; but what has changed since then (a batch that was fetched ahead) is not in the snapshot. Draw it "
            "inside the loop, or keep it in ckpt.extra or in a state. What never changes can be drawn before "
            "Checkpointer(...)"
        )

    def _note_drawn(self) -> None:
        if self._before is None:
            return
        now = self._capture_moment()
        self._drawn |= {name for name in now if name in self._before and now[name] != self._before[name]}

    # ---- the first iterations ---------------------------------------------------------------------------------------

    def follow(self, kind: str, iterator: Any) -> Any:
        """Return the iterator of a loop; remember the first one of each kind."""
        self._iterators.setdefault(kind, weakref.ref(iterator))
        return iterator

    def look_at(self, kind: str) -> None:
        """Warn if something counts or pairs what the first loop of this kind yields. Takes some 20 ms, once."""
        iterator = self._iterators[kind]() if kind in self._iterators else None
        if iterator is None:
            return
        self._iterators[kind] = lambda: None  # type: ignore[assignment]
        for wrapper in _holders_of(iterator):
            self._warn(f"a resume in the middle of ckpt.{kind}() is not exact here: {_WRAPPERS[wrapper]}")

    def look_ahead(self) -> None:
        """Warn if the first batch seems unused when the second one is wanted. No optimizer has stepped meanwhile."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        parameters = (param for group in groups for param in group["params"])
        if self._optimizers and all(param.grad is None for param in parameters):
            self._warn(
                "the second batch is fetched before anything was computed from the first one. If a wrapper around "
                "ckpt.batches(loader) reads ahead, the batch that it holds is lost at a resume: wrap the loader "
                "instead. If the loop has just left that batch out, there is nothing to do"
            )

    def count_fetches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the iterator over a loader that the program iterates over itself, with a count in the first steps."""
        return batches if self._fetches is None else self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if self._fetches is not None:
                self._fetches[-1] += 1
            yield batch

    def look_at_fetches(self) -> None:
        """A step is over. Warn if the first one has fetched one batch more than each after it."""
        if self._fetches is None:
            return
        if len(self._fetches) < _WATCHED_STEPS:
            self._fetches.append(0)
            return
        first, *others = self._fetches
        self._fetches = None
        if set(others) == {first - 1} and first > 1:
            self._warn(
                "the first step has fetched one batch more than those after it. If a wrapper around the loader reads "
                f"ahead, the batch that it holds is lost at a resume: {UNWRAP}. If the first step needs one more, "
                "there is nothing to do"
            )

    def look_for_forgotten(self) -> None:
        """Warn if a scheduler or a gradient scaler was not given to the Checkpointer.

        Once; takes some 25 ms for each 100 000 objects of the process: 40 ms with torch, 90 ms with transformers.
        """
        schedulers = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
        optimizers = {id(optimizer) for optimizer in self._optimizers}
        known = _held_by(self._states.values()) | {id(part) for each in schedulers for part in _parts(each)}
        users = [each for each in schedulers if id(getattr(each, "optimizer", None)) in optimizers]
        self._look_for_hidden(schedulers)
        users += [] if self._scaler is None else [self._scaler]
        self._scaler = None
        for each in [each for each in users if id(each) not in known][:1]:
            self._warn(
                f"the program has a {type(each).__name__} that was not given to the Checkpointer: a resume resets it. "
                "Pass it by name, like the model"
            )

    def _look_for_hidden(self, schedulers: Iterable[LRScheduler]) -> None:
        """Warn if an optimizer has a scheduler that is hidden by `gc.freeze()`, and was not given.

        Args:
            schedulers: those that can be seen.
        """
        if not gc.get_freeze_count():
            return
        given = [each for state in self._states.values() for each in (state, *held_by(state, LRScheduler).values())]
        followed = {id(getattr(each, "optimizer", None)) for each in (*schedulers, *given)}
        for name, optimizer in self._states.items():
            is_scheduled = isinstance(optimizer, Optimizer) and hasattr(optimizer.step, "_wrapped_by_lr_sched")
            if is_scheduled and id(optimizer) not in followed:
                self._warn(
                    f"{name} has a scheduler that gc.freeze() hides from the harness. If it was not given to the "
                    "Checkpointer, a resume resets it: pass it by name, like the model"
                )

    def note_stranger(self, optimizer: Any, step: int) -> None:
        """Note that an optimizer has stepped that is in no state. Warn, once, if it lives longer than one step."""
        if self._told_stranger or self._strangers.setdefault(optimizer, step) == step:
            return
        self._told_stranger = True
        self._warn(
            f"an optimizer steps that was not given to the Checkpointer ({type(optimizer).__name__}): a resume resets "
            "it, and the parameters of a model that was not given either. Pass both by name"
        )

    def look_for_inner(self) -> None:
        """Warn if an optimizer among the states holds another one whose state is not in its own state_dict (SAM)."""
        given = {id(state) for state in self._states.values()}
        for name, outer in self._states.items():
            if not isinstance(outer, Optimizer) or type(outer).state_dict is not Optimizer.state_dict:
                continue
            for path, inner in held_by(outer, Optimizer).items():
                if id(inner) not in given and inner.state and inner.state is not outer.state:
                    self._warn(
                        f"{name}.{path} has a state of its own, and {name} does not save it: a resume resets it. Pass "
                        f"it by name, before {name}"
                    )

    def look_for_unsaved(self, captured: Captured, gradients: Gradients) -> None:
        """Warn if an optimizer updates parameters that no state has. Once for each, behind its first step.

        An object of the user's own may save a copy of a parameter: then it has the parameter's values. Before the first
        step, others have them too: zeros, mostly.

        Args:
            captured: what a snapshot gets.
            gradients: tells which optimizers have stepped.
        """
        for name, optimizer in self._states.items():
            if name in self._looked_at or not isinstance(optimizer, Optimizer) or not gradients.has_stepped(optimizer):
                continue
            self._looked_at.add(name)
            names, places = parameter_names(self._states), {each.data_ptr() for each in captured.tensors.values()}
            lone = [param for group in optimizer.param_groups for param in group["params"] if id(param) not in names]
            lost = [param for param in lone if type(param) in (Tensor, nn.Parameter) and param.data_ptr() not in places]
            if not lost:
                continue
            objects = [each for each, state in self._states.items() if classify("", state) is Kind.STATE]
            copies, own = Copies(captured, objects), [each for each in objects if _is_users_own(self._states[each])]
            if lost := [param for param in lost if param not in copies]:
                unless = f", and {', '.join(own)} does not save their values" if own else ""
                form = ". If it saves them in a form of its own, there is nothing to do" if own else ""
                self._warn(
                    f"{name} updates {len(lost)} parameters that are in no module among the states{unless}: a resume "
                    f"resets them. Pass the module by name, or keep them in one (nn.ParameterList){form}"
                )

    def note_step(self) -> None:
        """Note the first step of an optimizer, from inside of it: its thread, and the gradient scaler that makes it."""
        self.stepped_in = threading.get_ident()
        frame: types.FrameType | None = sys._getframe()
        for _ in range(_FRAMES_OF_A_STEP):
            # Of torch's own frames alone: before Python 3.13, asking for f_locals keeps all variables of a frame alive
            # until its function returns, and with the user's the outputs and the graph of the first step.
            if frame is not None and frame.f_globals.get("__name__") == GradScaler.__module__:
                made_by = frame.f_locals.get("self")
                if isinstance(made_by, GradScaler) and made_by.is_enabled():
                    self._scaler = made_by
            frame = None if frame is None else frame.f_back

    # ---- threads ----------------------------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raise StateError if the loop is in another thread than the training: a snapshot would mix two steps."""
        here = threading.get_ident()
        if here != self.made_in and self.stepped_in == self.made_in:
            raise StateError(
                f"a loop of the Checkpointer runs in the thread {threading.current_thread().name!r}, and the "
                "training in another one: a snapshot would mix two steps. Iterate in the thread that trains; to fetch "
                "ahead, use the loader's num_workers"
            )


def _is_users_own(state: object) -> bool:
    """Whether a state is none of torch's, such as a GradScaler, and no framework's progress."""
    return not type(state).__module__.startswith(("torch.", "harness."))


def _held_by(states: Iterable[object]) -> set[int]:
    """Return the identities of states, and of what they hold as attributes."""
    found, queue = set[int](), list(states)
    for each in queue:
        found.add(id(each))
        for value in getattr(each, "__dict__", {}).values():
            found |= {id(item) for item in (value if isinstance(value, (list, tuple)) else [value])}
        queue += _parts(each)
    return found


def _parts(scheduler: object) -> Iterable[object]:
    """Return the schedulers of which a scheduler consists."""
    return getattr(scheduler, "_schedulers", ()) if isinstance(scheduler, LRScheduler) else ()


def _holders_of(iterator: Any) -> Iterator[type]:
    """Yield the types in `_WRAPPERS` of the objects that draw from an iterator."""
    for holder in gc.get_referrers(iterator):
        holders = gc.get_referrers(holder) if type(holder) is tuple else [holder]  # zip keeps its iterators in a tuple
        yield from (type(each) for each in holders if type(each) in _WRAPPERS)
