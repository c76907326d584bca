"""Loops: the loops of a Checkpointer: `epochs`, `batches`, `steps`, and those that the script writes itself.

Owns when there is a boundary, and what a loop that begins does on a resume. `replay.py` knows where the program is in
its loops; `training.py` acts at boundaries.

    normal step:  the optimizer stepped ─▶ step += 1 ─▶ one word of the control page is unchanged ─▶ continue
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NoReturn

from harness.errors import StateError
from harness.trainer.batches import Batches
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.process import CallStack, breaks_off
from harness.trainer.replay import Loop, Way
from harness.trainer.training import Training
from harness.trainer.validation import Validations
from harness.trainer.voice import warn

_WATCHED_FETCHES = 2  # of the first batch a sampler draws the order of all
_LATE_VALIDATION = (
    "ckpt.evaluating() comes after ckpt.step() here: a run that is interrupted between the two continues with the next "
    "step, without that validation. Validate before ckpt.step()"
)
_NO_STEP = (
    "an optimizer has stepped in an epoch of ckpt.epochs(), and the Checkpointer has counted no step: nothing is saved "
    "before the last epoch is over. Loop over ckpt.batches(loader) inside of it, or over ckpt.steps(n) instead; with "
    "loader=, call ckpt.step() after each batch"
)


class Loops:
    """The loops of one training. Used from the thread that trains."""

    def __init__(self, training: Training, loader: Any = None) -> None:
        """Begin outside of all loops.

        Args:
            training: the training whose loops these are.
            loader: a loader that the script iterates over directly, or `None`.
        """
        self._training = training
        self._replay, self._boundary, self._hazards = training.replay, training.boundary, training.hazards
        self._loaders = training.loaders
        self._validations = Validations(training)
        self._validates_late = self._told_idle = False
        self._loader = None
        if loader is not None:
            self._loader = self._loaders.instrumented(loader, "loader")
            self._loader.hook_iter(self._iterate_hooked)

    # ---- what a script calls ----------------------------------------------------------------------------------------

    def epochs(self, numbers: range) -> Iterator[int]:
        """See `Checkpointer.epochs`."""
        return self._hazards.follow("epochs", self._epochs(numbers))  # type: ignore[no-any-return]

    def batches(self, loader: Any) -> Batches:
        """See `Checkpointer.batches`."""
        return Batches(loader, lambda: self._hazards.follow("batches", self._batches(loader)))

    def enumerate(self, loader: Any, start: int) -> Batches:
        """See `Checkpointer.enumerate`."""
        return Batches(loader, lambda: self._numbered(loader, start))

    def steps(self, numbers: range | None) -> Iterator[int]:
        """See `Checkpointer.steps`."""
        return self._hazards.follow("steps", self._steps(numbers))  # type: ignore[no-any-return]

    def resume(self) -> int:
        """See `Checkpointer.resume`."""
        self._hazards.loop_begins()
        self._training.keep_extra()
        way = self._replay.begin_by_hand(steps_only=self._loader is None)
        self._come_to(way, self._replay.hand)
        self._replay.next_by_hand()
        return self._boundary.step

    def step(self) -> None:
        """See `Checkpointer.step`."""
        if self._training.inert:
            self._after_batch("step")
            return
        replay = self._replay
        if replay.stack and replay.stack[-1].kind != "step":
            raise StateError(
                f"ckpt.step() inside ckpt.{replay.stack[-1].kind}(): that loop counts its steps itself. Leave it out"
            )
        if replay.in_epochs and self._loader is None:
            raise StateError(
                "ckpt.step() in ckpt.epochs() without loader=: the position within the epoch is not known. "
                "Use ckpt.batches(loader) or ckpt.steps(n), or pass Checkpointer(loader=loader)"
            )
        if replay.hand is None and self._loader is None:
            raise StateError(
                "ckpt.step() without ckpt.resume(): begin the hand-written loop with it, as in "
                "`for step in range(ckpt.resume(), n)`. A loop of ckpt.epochs() or ckpt.steps() cannot be inside it"
            )
        if self._validates_late:
            self._validates_late = False
            warn(_LATE_VALIDATION)
        if self._training.led_back and not replay.restored:
            self._training.miss()
        elif not replay.restored:
            self._training.restore()
        self._after_batch("step")
        if self._loader is not None:
            self._hazards.look_at_fetches()
        replay.next_by_hand()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """See `Checkpointer.evaluating`."""
        self._training.settle()
        if not self._training.inert and not self._validations.inside and not self._training.interrupted:
            self._before_evaluation()
        with self._validations.measured():
            yield

    # ---- loops begin and end ----------------------------------------------------------------------------------------

    def _epochs(self, numbers: range) -> Iterator[int]:
        way, replay = self._enter_stage(), self._replay
        if way is Way.SKIP:
            return
        first = _index_of(replay.first_epoch, numbers)
        if way is Way.RESTORE:
            self._training.restore()
            first = replay.place.iteration
        replay.early, asked_from = True, CallStack.now()
        worked = False
        for completed, epoch in enumerate(numbers[first:], first + 1):
            step = self._boundary.step
            with replay.epoch(epoch):
                try:
                    yield epoch
                except GeneratorExit:
                    if not self._training.closed:
                        replay.early = asked_from.is_left(CallStack.now())
                        self._save_as_it_leaves(completed, breaks_off=breaks_off())
                    raise
            if self._training.interrupted:
                return
            self._look_at_first("epochs", epoch == numbers[first])
            self._look_for_steps(step)
            if self._training.witness is not None:
                self._training.witness.epoch_ended(epoch, self._boundary.step)
            replay.check_reached(f"epoch {epoch}")
            worked |= replay.worked or self._boundary.optimizer_stepped
        if first < len(numbers) and not worked and not self._training.inert:
            raise StateError(
                f"ckpt.epochs({len(numbers)}) is over, and no epoch did any work: was it used up before the training, "
                "as list(ckpt.epochs(…)) does? Iterate over it while you train"
            )
        self._end_stage(max(first, len(numbers)))

    def _steps(self, numbers: range | None) -> Iterator[int]:
        training, replay, boundary, stack = self._training, self._replay, self._boundary, self._replay.stack
        hazards, given = self._hazards, self._loader is not None
        outermost = not (replay.in_epochs or replay.innermost)
        way = self._enter_stage() if outermost else Way.RUN
        if way is Way.SKIP:
            return
        inner = self._enter_loop("steps", at_its_end=way is Way.RESTORE)
        if inner is Way.SKIP:
            return
        loop = replay.begun
        self._come_to(inner, loop)
        first = replay.place.iteration if way is Way.RESTORE else loop.number
        replay.early, asked_from = outermost or replay.early, CallStack.now()
        with replay.handing_out(loop):
            loop.keep(replay.capture_rng)
            for iteration in itertools.count(first) if numbers is None else range(first, len(numbers)):
                loop.number = iteration + 1
                try:
                    yield iteration if numbers is None else numbers[iteration]
                except GeneratorExit:
                    if outermost and not training.closed:
                        replay.early = asked_from.is_left(CallStack.now())
                        made = boundary.ends_in_iteration(early=replay.early)
                        self._save_as_it_leaves(iteration + made, breaks_off=breaks_off())
                    raise
                if stack[-1] is not loop:
                    _refuse_crossing(loop, stack[-1])
                if inner is Way.AGAIN and not replay.restored:
                    training.miss()
                elif boundary.counted:
                    self._end_counted("steps")
                else:
                    boundary.optimizer_stepped = False
                    self._count_step("steps")
                if training.interrupted:
                    return
                if iteration == first:
                    self._look_at_first("steps")
                if given:
                    hazards.look_at_fetches()
                if loop.keeps_moments:
                    loop.keep(replay.capture_rng)
        if outermost and numbers is not None:
            self._end_stage(max(first, len(numbers)))

    def _batches(self, loader: Any) -> Iterator[Any]:
        """Yield a loader's batches, with a boundary after each. After a `break` the batch counts, but no boundary."""
        if self._training.inert or self._validations.inside:
            yield from self._only_batches(loader)
            return
        if self._training.interrupted:
            return
        replay = self._replay
        way = self._enter_loop("batches")
        loop = replay.begun
        instrumented = self._loaders.instrumented(loader, replay.name_of(loop))
        if way is Way.SKIP:
            return
        loop.repeats = instrumented.repeats
        self._come_to(way, loop)
        yield from self._with_boundaries(instrumented, loop, again=way is Way.AGAIN)

    def _with_boundaries(self, instrumented: InstrumentedLoader, loop: Loop, *, again: bool) -> Iterator[Any]:
        training, replay, boundary = self._training, self._replay, self._boundary
        batches = self._witnessed(instrumented.iterate(replay.moment_again(loop) if again else None), loop)
        watched, step, stack = loop.number + _WATCHED_FETCHES, boundary.step, replay.stack
        with replay.handing_out(loop):
            loop.keep(instrumented.moment)
            for batch in batches:
                loop.number = number = loop.number + 1
                if number == watched:
                    loop.fetched(instrumented.moment())
                try:
                    yield batch
                except GeneratorExit:
                    boundary.broken_off(replay.place)
                    replay.early |= training.process.exiting
                    raise
                if stack[-1] is not loop:
                    _refuse_crossing(loop, stack[-1])
                if again and not replay.restored:
                    training.miss()
                else:
                    if number < watched and boundary.step == step and not boundary.optimizer_stepped:
                        self._hazards.look_ahead()
                    self._after_batch("batches")
                if training.interrupted:
                    return
                if number < watched:
                    self._look_at_first("batches")
                if loop.keeps_moments or number < watched:
                    loop.keep(instrumented.moment)

    def _witnessed(self, batches: Iterator[Any], loop: Loop) -> Iterator[Any]:
        """Return the iterator itself, or in a rehearsal one that writes down what it yields."""
        training = self._training
        if training.witness is None:
            return batches
        epoch = self._replay.place.epoch
        return training.witness.watch(batches, epoch, loop.number, lambda: training.replaying)

    def _only_batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a validation, or of a Checkpointer that is off."""
        loop = Loop("batches", 0)
        with contextlib.nullcontext() if self._validations.inside else self._replay.handing_out(loop):
            for batch in loader:
                self._training.leave_if_it_presses()
                loop.number += 1
                yield batch
                if not self._validations.inside:
                    self._after_batch("batches")

    def _numbered(self, loader: Any, start: int) -> Iterator[tuple[int, Any]]:
        """Yield a loader's batches with their numbers."""
        if self._validations.inside:
            yield from enumerate(self._batches(loader), start)
            return
        for batch in self._batches(loader):
            yield start + self._replay.stack[-1].number - 1, batch

    def _iterate_hooked(self, instrumented: InstrumentedLoader) -> Iterator[Any]:
        """Return the iterator of a plain `for batch in loader` over the loader that the constructor got."""
        replay = self._replay
        if self._training.inert or self._validations.inside or any(loop.kind != "step" for loop in replay.stack):
            return self._without_boundaries(self._hazards.count_fetches(instrumented.iterate()))
        if self._training.interrupted:
            return iter(())
        if not replay.restored:
            self._training.confirm()
            if replay.target is not None and replay.target.outermost[0] in ("steps", "batches"):
                # It is set to where it was as soon as that loop restores the snapshot.
                return self._without_boundaries(instrumented.iterate())
        replay.by_hand = not replay.in_epochs
        way = self._enter_loop("step")
        loop = replay.begun
        if way is Way.SKIP:
            return iter(())
        loop.repeats = instrumented.repeats
        self._come_to(way, loop)
        batches = instrumented.iterate(replay.moment_again(loop) if way is Way.AGAIN else None)
        return self._handed_out(instrumented, self._hazards.count_fetches(batches), loop)

    def _without_boundaries(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the iterator for the body of a loop of ours: the loader's position is all that there is to know."""
        training, replay = self._training, self._replay
        if training.inert or self._validations.inside:
            return batches
        if training.witness is not None:
            return training.witness.watch(batches, replay.place.epoch, 0, lambda: training.replaying)
        return batches

    def _handed_out(self, instrumented: InstrumentedLoader, batches: Iterator[Any], loop: Loop) -> Iterator[Any]:
        """Yield batches until the loop is left. Meanwhile the program is inside a loop, as `Replay.hands_out` tells."""
        replay = self._replay
        if any(around.kind != "step" for around in replay.stack):  # begun before a loop of ours, and used in it
            yield from self._without_boundaries(batches)
            return
        watched = loop.number + _WATCHED_FETCHES
        with replay.handing_out(loop):
            loop.keep(instrumented.moment)
            for batch in self._witnessed(batches, loop):
                loop.number += 1
                if loop.number == watched:
                    loop.fetched(instrumented.moment())
                try:
                    yield batch
                except GeneratorExit:
                    replay.early |= self._training.process.exiting
                    raise
                if replay.stack[-1] is not loop:
                    _refuse_crossing(loop, replay.stack[-1])
                if self._training.interrupted:
                    return
                if loop.keeps_moments or loop.number < watched:
                    loop.keep(instrumented.moment)

    def _enter_stage(self) -> Way:
        """Begin an outermost loop; return what it has to do. After an interruption that is SKIP."""
        if not self._training.inert and not self._replay.restored:
            # Loops are skipped up to the place of the snapshot that is restored, not of a newer one that is damaged.
            self._training.confirm()
        way = self._replay.enter_stage()
        self._training.go_on()
        return Way.SKIP if self._training.interrupted else way

    def _enter_loop(self, kind: str, *, at_its_end: bool = False) -> Way:
        """Begin a loop; return what it has to do. `at_its_end`: the snapshot was taken at the end of this loop."""
        self._training.go_on()
        way = self._replay.enter_loop(kind, at_its_end=at_its_end, step=self._boundary.step)
        self._boundary.optimizer_stepped = False  # a step between loops does not count for this loop's first batch
        return way

    def _come_to(self, way: Way, loop: Loop | None) -> None:
        """Restore what a loop that begins needs: the snapshot, or what leads back to its place in the loop's body."""
        if way is Way.RESTORE:
            self._training.restore()
        elif way is Way.AGAIN:
            self._training.lead_back(loop)

    def _save_as_it_leaves(self, completed: int, *, breaks_off: bool) -> None:
        """Take the snapshot that the program asked for before it broke off an outermost loop: no boundary follows.

        Not when an exception leaves the loop: then the iteration is not over, and cannot be resumed from there.
        """
        training, replay = self._training, self._replay
        if training.inert or training.interrupted or not (breaks_off and replay.early):
            return
        if replay.restored and self._boundary.requested:
            training.save_as_it_leaves(completed)
        else:
            training.note_left()

    def _end_stage(self, completed: int) -> None:
        """End an outermost loop: take a final snapshot and wait until it is durable."""
        self._replay.end_stage(completed)
        if self._training.inert or self._training.interrupted:
            return
        self._replay.check_reached("the loop")
        if not self._replay.restored:
            self._training.restore()
        self._training.finish()

    # ---- boundaries -------------------------------------------------------------------------------------------------

    def _after_batch(self, kind: str) -> None:
        """Count a batch that has just ended. The hot path: no system call, no lock, no clock."""
        boundary = self._boundary
        if boundary.counted:
            self._end_counted(kind)
        elif boundary.ends_step(self._replay.place):
            self._count_step(kind)

    def _count_step(self, kind: str) -> None:
        boundary = self._boundary
        self._training.reshard()
        boundary.step = step = boundary.step + 1
        if self._training.page.completed(step) != boundary.seen or step == boundary.next_due:
            self._training.at_boundary(kind)

    def _end_counted(self, kind: str) -> None:
        """End a batch whose step was counted at a validation in it. Its end is a boundary all the same."""
        boundary, page = self._boundary, self._training.page
        if not boundary.ends_counted(self._replay.place):
            boundary.optimizer_stepped = False
            self._count_step(kind)
            return
        self._training.reshard()
        if page.news != boundary.seen or boundary.step == boundary.next_due or boundary.always:
            self._training.at_boundary(kind)

    def _before_evaluation(self) -> None:
        """Enter a validation: a boundary, if the program can come back to this place."""
        replay, boundary = self._replay, self._boundary
        loop = replay.innermost
        if replay.enter_evaluation(self._boundary.step) is Way.RESTORE:
            self._training.restore()
        if not replay.restored:
            return
        self._training.reshard()
        if self._training.witness is not None:
            self._training.witness.entered(boundary.step, boundary=True)
        if loop is None:
            news = self._training.has_news
            begins_with_one = self._validations.begins_with_one(unless_known=True)
            due = news or boundary.overdue
            kind = "evaluating"
        else:
            if boundary.is_complete(replay.place) and not boundary.counted:
                boundary.count_early()
                self._training.page.completed(boundary.step)
            news = self._training.has_news
            begins_with_one = self._validations.begins_with_one(unless_known=False)
            due = boundary.overdue or (news and self._training.page.command.leaves)
            kind = self._kind_inside(loop)
        if due and replay.leads_back(kind, counted=boundary.counted):
            self._training.at_boundary(kind, entering=True)
        else:
            self._training.leave_if_it_presses()
        if begins_with_one and not news:
            boundary.overdue = False  # also if there was no slot: later it would be of no use for the validation
        boundary.enter()

    def _kind_inside(self, loop: Loop) -> str:
        """Return the kind of a boundary on the way into a validation in the body of `loop`."""
        after_step = loop.stepped == loop.number if loop.kind == "step" else loop.kind == "hand"
        if after_step and not self._boundary.counted:
            self._validates_late = True
            return "step"
        return "evaluating"

    def _look_for_steps(self, before: int) -> None:
        """Warn, once, if no step was counted in an epoch in which an optimizer has stepped: nothing is saved then."""
        training, boundary = self._training, self._boundary
        accumulates = bool(self._replay.place.calls)
        if boundary.step > before or not boundary.optimizer_stepped or accumulates or training.resumed_from is not None:
            return
        if not (self._told_idle or training.inert):
            self._told_idle = True
            warn(_NO_STEP)

    def _look_at_first(self, kind: str, is_first: bool = True) -> None:
        """After a loop's first iteration in this process, look for what could not be resumed exactly."""
        if is_first and not self._training.inert:
            self._hazards.look_at(kind)


def _refuse_crossing(loop: Loop, inside: Loop) -> NoReturn:
    """Refuse a loop that continues while another one, which began after it, is still inside an iteration."""
    raise StateError(
        f"ckpt.{loop.kind}() continues while a loop that began after it ({inside.kind}) is not over, so a place in "
        "them cannot be reached again. Nest the loops; or give the loader of one of them as Checkpointer(loader=…), "
        "and draw from iter(loader) in the other loop"
    )


def _index_of(epoch: int | None, numbers: range) -> int:
    """Return where an epoch is among the epochs' numbers; 0 for `None`."""
    if epoch is None:
        return 0
    if epoch not in numbers:
        raise StateError(f"the snapshot was taken in epoch {epoch}, and these are {numbers}: use the same numbers")
    return numbers.index(epoch)
