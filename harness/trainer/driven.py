"""Driven: a training whose loops a framework runs. It comes to the place of the snapshot by its own means.

Owns what an integration needs of a training: what this start resumes, before any state exists; boundaries and
validations where the framework says that they are; and the framework's own progress, as one more state. It knows no
framework: `harness/integrations` has those.

    resumed ─▶ the framework makes its states ─▶ begin ─▶ restore ─▶ step ─▶ boundary ─▶ … ─▶ finish
                                                 follow(loader): its next iteration continues where the snapshot was

A training may consist of several *calls* of the framework, one after the other, such as two of `trainer.train()`. In a
new start the calls before that of the snapshot are not made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from harness.errors import StateError
from harness.trainer import opening
from harness.trainer.distributed import buckets
from harness.trainer.link import Link
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.resuming import SmallState, record_of, tensors_of
from harness.trainer.state.kinds import flatten
from harness.trainer.state.restore import restore, restore_values
from harness.trainer.state.rng import capture_moment, restore_rng
from harness.trainer.training import Training
from harness.trainer.validation import Validations
from harness.trainer.voice import say

_FLAGS = ("run", "store", "local", "every_s", "every_steps")
_ONLY_IF_TRUE = ("fresh", "continue_")
PROGRESS = "progress"
"""The name of the framework's own progress among the states."""


class Options(TypedDict, total=False):
    """Options of an integration: those of `Checkpointer`.

    Attributes:
        overlap: see `Checkpointer`.
        settle_ddp: see `Checkpointer`.
        run: see `Checkpointer`; used only without `harness run`, like the next six.
        store: see `Checkpointer`.
        local: see `Checkpointer`.
        every_s: see `Checkpointer`.
        every_steps: see `Checkpointer`.
        fresh: see `Checkpointer`.
        continue_: see `Checkpointer`.
    """

    overlap: bool | None
    settle_ddp: bool
    run: str | None
    store: str | None
    local: str | None
    every_s: float | None
    every_steps: int | None
    fresh: bool
    continue_: bool


def check_options(options: Options) -> None:
    """Raise TypeError, as a call with a keyword that there is not does."""
    unknown = sorted(set(options) - Options.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}: there are {', '.join(Options.__annotations__)}")


@dataclass(frozen=True)
class Resumed:
    """The snapshot that this start resumes. Nothing is restored yet.

    Attributes:
        step: completed optimizer steps, of all calls.
        call: the framework's call in which it was taken, from 1.
        at: "step", "evaluating" or "end" of that call.
        own: the framework's own progress, as it was; its tensors are copies, on the CPU.
    """

    step: int
    call: int
    at: str
    own: Any


class Driven:
    """One process's training. Used from the thread that trains."""

    def __init__(self, options: Options, progress: Callable[[], Any]) -> None:
        """Connect to the agent, and learn what is resumed. Blocks until the snapshot is here, if there is one.

        Args:
            options: see `Options`.
            progress: returns the framework's own progress at a boundary: a dict of plain values, and tensors. What it
                has under `places`, names of files and times, is different in each run: a rehearsal does not compare it.

        Raises:
            ConfigError: the run is being trained already, or it is finished; or this process has a training.
            SnapshotCorrupt: the run has snapshots, and none can be used.
            AgentGone: no agent answers.
        """
        opening.take_turn(self)
        flags = {name: options.get(name) for name in _FLAGS}
        self._link: Link = opening.open_link(flags | {name: options.get(name) or None for name in _ONLY_IF_TRUE})
        self._overlap, self._settle_ddp = options.get("overlap"), options.get("settle_ddp", True)
        self._progress = _Progress(progress)
        self._training: Training | None = None
        self._validations: Validations | None = None
        self._states: dict[str, Any] = {}
        self._restored_random: Any = None
        self._random: Any = None
        self.call = 0
        """The framework's present call, from 1."""
        self.resumed = self._read()
        """The snapshot that this start resumes; `None` for a new run."""

    def _read(self) -> Resumed | None:
        ready = self._link.wait_ready()
        if ready is None:
            return None
        small = SmallState.of(ready.snapshot, ready.tier, record_of(ready))
        try:
            progress = small.states[PROGRESS]["state"]
            own = restore_values(progress["own"], tensors_of(ready), {})
            return Resumed(small.step, progress["call"], progress["at"], own)
        except (KeyError, TypeError) as err:
            raise StateError(
                f"snapshot {ready.snapshot} was made by a loop of the script's own, and not by this framework: use the "
                "program that made it, or start over with --fresh or another --run"
            ) from err

    @property
    def has_begun_before(self) -> bool:
        """Whether this is a later start of the run. It may have no snapshot all the same."""
        return self._link.generation.number > 1

    # ---- a call of the framework ------------------------------------------------------------------------------------

    def begin_call(self) -> bool:
        """Begin the framework's next call. Return whether it is over already, in an earlier start."""
        self.call += 1
        return self.resumed is not None and self.call < self.resumed.call

    def lend(self, states: Mapping[str, Any]) -> None:
        """Give states what the snapshot has of them, in a call that is over: code behind it sees them as they were.

        Raises StateError where they differ from those of the snapshot.
        """
        ready = self._link.wait_ready()
        if ready is not None:
            small = SmallState.of(ready.snapshot, ready.tier, record_of(ready))
            restore(states, {name: small.states[name] for name in flatten(states)}, tensors_of(ready))

    @property
    def is_resumed_here(self) -> bool:
        """Whether the snapshot was taken in the present call."""
        return self.resumed is not None and self.call == self.resumed.call

    def begin(self, states: Mapping[str, Any]) -> None:
        """Take the framework's states, by name, as they are made for this call. Nothing is restored yet.

        Raises StateError if one of them cannot be captured; it names it, and the remedy.
        """
        self._progress.call = self.call
        flat = {**flatten(states), PROGRESS: self._progress}
        if self._settle_ddp and not self._link.rank.is_alone:
            for line in buckets.settle(flat.values()):
                say(line)
        if self._training is not None:
            self._states.clear()
            self._states.update(flat)
            return self._training.take_others()
        self._states = flat
        self._training = Training(flat, accumulate=None, on_interrupt="exit", seed_workers=True, inert=False)
        self._validations = Validations(self._training)
        self._training.connect(self._link, self._overlap)
        return opening.has_begun(self)

    def follow(self, loader: Any, name: str = "train") -> None:
        """Follow a loader of the training: its next iteration continues where the snapshot was, once that is restored.

        Args:
            loader: the loader. In another call of the framework it may be another object.
            name: the same in every start.

        Raises:
            StateError: its position cannot be restored exactly; says why, and the remedy.
        """
        made = self.training.loaders.instrumented(loader, name, alone=True)
        made.hook_iter(self._iterate)

    def _iterate(self, made: InstrumentedLoader) -> Iterator[Any] | None:
        """Return the batches of the training; `None`, for the loader's own, in a validation."""
        training = self.training
        if training.inert or self.validations.inside:
            return None
        batches = made.iterate()
        if self._random is not None:
            restore_rng(self._random)
            self._random = None
        if training.witness is None:
            return batches
        return training.witness.watch(batches, training.replay.place.epoch, 0, lambda: training.replaying)

    def restore(self) -> None:
        """Restore all states from the snapshot. Without a snapshot, just begin. Blocks until it is restored.

        Raises:
            StateError: the states differ from those of the snapshot.
            SnapshotCorrupt: no snapshot can be used any more.
        """
        training = self.training
        training.go_on()
        training.replay.by_hand = training.replay.early = True  # until it is finished
        if not training.replay.restored:
            training.restore()
            self._restored_random = capture_moment()
            training.replay.by_hand = training.replay.early = True

    def settle_random(self) -> None:
        """Set all random states as they were at the snapshot's place: the next batch comes next."""
        restore_rng(self._restored_random)

    @contextlib.contextmanager
    def redo(self) -> Iterator[None]:
        """Context manager around what the program does between the snapshot's place and the next batch.

        It begins with the random states of the snapshot. The next iteration of the loader, which is still to begin,
        fetches its first batch with those that this leaves behind.
        """
        restore_rng(self._restored_random)
        yield
        self._random = capture_moment()

    # ---- places -----------------------------------------------------------------------------------------------------

    def boundary(self, step: int, *, at: str = "step", begins_validation: bool = False) -> None:
        """Act at the boundary after a step: take a snapshot, or leave.

        Args:
            step: completed steps, of all calls.
            at: see `Resumed`.
            begins_validation: whether a validation follows, with nothing between it and this place.

        Raises:
            SystemExit: an interruption ends the training.
        """
        training, boundary = self.training, self.training.boundary
        self._progress.at = at
        boundary.optimizer_stepped = False
        training.reshard()
        counts, boundary.step = step != boundary.step, step
        begins = begins_validation and self.validations.begins_with_one(unless_known=True)
        news = training.page.completed(step) if counts else training.page.news
        if news != boundary.seen or step == boundary.next_due or boundary.always or begins:
            # Not a step to a witness, which writes down what each one has computed.
            training.at_boundary("evaluating" if begins and training.witness is None else "step")
        if begins and news == boundary.seen:
            boundary.overdue = False

    @contextlib.contextmanager
    def validation(self, step: int, *, resumable: bool) -> Iterator[None]:
        """Context manager around a validation. Entering is a boundary; one that may take long begins with a snapshot.

        Args:
            step: completed steps, of all calls.
            resumable: whether the framework can begin with this validation again, in a new start.

        Raises:
            SystemExit: an interruption ends the training.
        """
        training = self.training
        training.settle()
        if not (training.inert or self.validations.inside or training.interrupted):
            self._before_validation(step, resumable=resumable)
            training.boundary.enter()
        with self.validations.measured():
            yield

    def _before_validation(self, step: int, *, resumable: bool) -> None:
        training, boundary = self.training, self.training.boundary
        counts, boundary.step = step != boundary.step, step
        if counts:
            training.page.completed(step)
        if not resumable:
            return training.leave_if_it_presses()
        training.reshard()
        if training.witness is not None:
            training.witness.entered(step, boundary=True)
        news = training.has_news
        begins = self.validations.begins_with_one(unless_known=True)
        if news or boundary.overdue:
            self._progress.at = "evaluating"
            training.at_boundary("evaluating", entering=True)
        else:
            training.leave_if_it_presses()
        if begins and not news:
            boundary.overdue = False  # also if there was no slot: later it would be of no use for the validation
        return None

    def safe_point(self) -> None:
        """Leave a validation if the next boundary cannot save more than is sealed already. Raises SystemExit."""
        if not self.training.interrupted:
            self.training.leave_if_it_presses()

    def epoch_ended(self, epoch: int) -> None:
        """Note, for a rehearsal, that a pass over the data is over. `epoch` is its number, from 0."""
        if self.training.witness is not None:
            self.training.witness.epoch_ended(epoch, self.training.boundary.step)

    def finish(self, step: int) -> None:
        """End the framework's call: take its last snapshot, and wait until it is durable. Raises SystemExit."""
        training = self.training
        training.replay.early = False
        training.boundary.step = step
        training.page.completed(step)
        self._progress.at = "end"
        training.finish()

    def end(self) -> None:
        """Note that the program goes on behind the framework's call."""
        self.training.replay.by_hand = False

    def close(self) -> None:
        """Part from the agent while the process continues. See `Checkpointer.close`."""
        if self._training is not None:
            self._training.replay.by_hand = False
            self._training.close()
        else:
            self._link.part(exception=False, process_lives=True)
        opening.has_ended(self)

    # ---- what it consists of ----------------------------------------------------------------------------------------

    @property
    def training(self) -> Training:
        """The training. Only after `begin`."""
        assert self._training is not None, "begin comes first"
        return self._training

    @property
    def validations(self) -> Validations:
        """Its validations. Only after `begin`."""
        assert self._validations is not None, "begin comes first"
        return self._validations

    @property
    def is_replaced(self) -> bool:
        """Whether another training of this process has taken over."""
        return self._training is not None and self._training.inert


class _Progress:
    """The framework's own progress, as a state."""

    def __init__(self, own: Callable[[], Any]) -> None:
        self._own = own
        self.call, self.at = 0, "step"

    def state_dict(self) -> dict[str, Any]:
        return {"call": self.call, "at": self.at, "own": self._own()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass  # the framework has it since the beginning, and puts it where it belongs
