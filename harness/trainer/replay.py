"""Replay: leads a program that runs again from the top to the place where its snapshot was taken.

Owns where the program is among the Checkpointer's loops, and what each loop that begins has to do: run, be skipped,
hand out an iteration again, or restore the snapshot first. Of the snapshot it knows only the place, and it knows no
agent: a test drives it call by call.

    enter_stage ─▶ enter_loop ─▶ handing_out(loop) ─▶ … ─▶ end_stage

The loops that are inside an iteration are a stack. Code between loops runs again with the random states that it began
with, so that what it draws is drawn again.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import StateError
from harness.trainer.collection import is_collecting
from harness.trainer.position import LOOPS, Body, Draws, Position

_OTHER_LOOPS = "the script's loops differ from those that made the snapshot. Use the unchanged script, or --fresh"


class Way(enum.Enum):
    """The action of a loop that begins."""

    RUN = "run"
    SKIP = "skip"
    """Yield nothing: the loop lies wholly before the place of the snapshot."""
    AGAIN = "again"
    """Hand out the iteration again in whose body the place is: the body leads there."""
    RESTORE = "restore"
    """Restore the snapshot first, then run: its place is in this loop. Without a snapshot, the program just begins."""


@dataclass(slots=True, eq=False)
class Loop:
    """A loop of the Checkpointer that has begun. In a hand-written loop, `ckpt.step()` begins the next iteration.

    Attributes:
        kind: batches | steps | step | hand, as in `Body`.
        ordinal: number of this loop in the body around it, from 1.
        number: iterations handed out, those before a resume included.
        repeats: whether it can hand out its last iteration again.
        keeps_moments: whether the random states are recorded before each iteration, and not only before the first one:
            once there was a loop or a validation in a body.
        stepped: the iteration in which `ckpt.step()` was called last.
        fetch_draws: whether fetching a batch draws random numbers in this process, as far as the first ones tell.
    """

    kind: str
    ordinal: int
    number: int = 0
    repeats: bool = True
    keeps_moments: bool = False
    stepped: int = -1
    fetch_draws: bool = False
    _moment: Any = None
    _moment_of: int = -1
    _body: int = -1
    _step: int = 0
    _calls: int = 0
    _loops: int = 0
    _evaluations: int = 0
    _resumed: Any = None

    def keep(self, moment: Callable[[], Any]) -> None:
        """Record the random states before the next iteration is handed out, if they are not known."""
        if self._moment_of != self.number + 1:
            self._moment, self._moment_of = moment(), self.number + 1

    def fetched(self, moment: Any) -> None:
        """Note the random states after the last iteration was fetched. With those before, they tell whether it drew."""
        self.fetch_draws |= self._moment_of == self.number and self._moment != moment

    def again(self, body: Body) -> None:
        """Continue before an iteration that is handed out again."""
        self.number = body.number - 1
        self._moment, self._moment_of = body.moment, -1 if body.moment is None else body.number
        self._resumed = body.resumed

    def enter_body(self, step: int, calls: int) -> None:
        """Note that a loop or a validation begins in the body of the last iteration. Each body counts from 1."""
        if self._body != self.number:
            self._resumed = self._resumed if self._body < 0 else None
            self._body, self._step, self._calls = self.number, step, calls
            self._loops = self._evaluations = 0
        self.keeps_moments = True

    def count_loop(self) -> int:
        """Count a loop that begins in this body; return its number."""
        self._loops += 1
        return self._loops

    def count_evaluation(self) -> int:
        """Count a validation that begins in this body; return its number."""
        self._evaluations += 1
        return self._evaluations

    def note_draws(self, rng: Any) -> None:
        """Record the random states after a loop in this body."""
        self._resumed = rng

    @property
    def counts(self) -> tuple[int, int]:
        """Loops and validations that have begun in this body."""
        return self._loops, self._evaluations

    def leads_back(self, *, trained: bool) -> bool:
        """Whether the last iteration can be handed out again as it was. `trained`: its body has made its step.

        A body that has made its step draws nothing more that matters: then only the batch has to be the same.
        """
        return self.repeats and (self._moment_of == self.number or (trained and not self.fetch_draws))

    @property
    def body(self) -> Body:
        """The body of the last iteration, for a place in it."""
        moment = self._moment if self._moment_of == self.number else None
        return Body(self.kind, self.ordinal, self.number, self._step, self._calls, moment, self._resumed)


class Replay:
    """Where one program is in its loops, and the snapshot's place, which it has to reach. Used from one thread."""

    def __init__(
        self, capture_rng: Callable[[], Any] = lambda: None, restore_rng: Callable[[Any], None] = lambda _: None
    ) -> None:
        """Begin at the top of the program, without a snapshot.

        Args:
            capture_rng: returns the global random states. Draws nothing.
            restore_rng: sets them.
        """
        self.capture_rng, self._restore_rng = capture_rng, restore_rng
        self.place = Position()
        """Where the program is, as far as its outermost loops tell; `position` has the rest."""
        self.target: Position | None = None
        """Where the snapshot was taken; `None` without a snapshot."""
        self.restored = False
        """Whether the snapshot was restored, or the program has begun without one."""
        self.in_epochs = False
        """Whether the program is inside an iteration of `epochs`."""
        self.by_hand = False
        """Whether the outermost loop is hand-written: then nothing tells when it ends."""
        self.hand: Loop | None = None
        """The hand-written loop, if `ckpt.step()` alone tells of its iterations."""
        self.early = False
        """Whether the program has left a loop of the Checkpointer before its end, as far as that is known."""
        self.begun = Loop("", 0)
        """The loop that began last."""
        self.yielded_nothing = False
        """Whether the loop that ended last has yielded nothing: the place of the snapshot is not before its end."""
        self.stack: list[Loop] = []
        """The loops that are inside an iteration, outermost first, without `epochs` and hand-written ones."""
        self._keeping: set[tuple[int, ...]] = set()
        self._is_finalizing = sys.is_finalizing  # kept: an iterator may be closed when this module is gone already

    def begin(self) -> None:
        """Begin the program: its Checkpointer is made. The code up to the first loop draws what it drew before."""
        if self.target is None:
            self.place.program = Draws(self.capture_rng())
        else:
            self.place.program = self.target.program
            self._draw_again(self.target.program.began)

    # ---- loops begin ------------------------------------------------------------------------------------------------

    def enter_stage(self) -> Way:
        """Begin an outermost loop: `epochs`, or `steps` outside of any other. Return what it has to do.

        RESTORE only if the snapshot was taken at this loop's very end; otherwise the inner loops decide.

        Raises:
            StateError: inside another loop.
        """
        if self.in_epochs or self.stack:
            around = _called("epochs" if self.in_epochs else self.stack[-1].kind)
            raise StateError(f"ckpt.epochs() inside {around}: put the inner loop into ckpt.batches() or ckpt.steps()")
        self.place.enter_stage()
        self.by_hand, self.hand = False, None
        target = self._ahead
        if target is None or target.stage < self.place.stage:
            return Way.RUN
        if target.stage > self.place.stage:
            self._draw_again(target.program.resumed)
            return Way.SKIP
        return Way.RESTORE if target.kind == "end" else Way.RUN

    @property
    def first_epoch(self) -> int | None:
        """The epoch of this stage in which the snapshot was taken; `None` if it was taken elsewhere."""
        target = self._ahead
        return target.epoch if target is not None and target.stage == self.place.stage else None

    def enter_loop(self, kind: str, *, at_its_end: bool = False, step: int = 0) -> Way:
        """Begin a loop that yields batches or steps; it becomes `begun`. Return what it has to do.

        Args:
            kind: "batches" or "steps", as the call is named; "step" for a loop over the Checkpointer's `loader`.
            at_its_end: whether it is the outermost loop, and the snapshot was taken at its end.
            step: completed steps.

        Raises:
            StateError: the place of the snapshot cannot be reached any more: the program has changed. Or the loop
                around this one cannot hand out a batch again, so that no place in its body can be returned to.
        """
        around = self._around
        self.begun = Loop(kind, self._count_loop(around, step))
        self.begun.keeps_moments = self._path(self.begun) in self._keeping
        if self.restored:
            return Way.RUN
        if at_its_end or (target := self.target) is None:
            return Way.RESTORE
        ahead = target.next_loop(len(around)) if self._leads_to(target, around) else None
        if ahead is not None and ahead[1] == self.begun.ordinal:
            if ahead[0] != kind:
                raise StateError(
                    f"the snapshot was taken in a loop of {_called(ahead[0])}, and this is {_called(kind)}: "
                    f"{_OTHER_LOOPS}"
                )
            if len(around) == len(target.bodies):
                self.begun.number = target.iteration
                return Way.RESTORE
            self.begun.again(target.bodies[len(around)])
            return Way.AGAIN
        passed = (target.stage, target.outermost[1]) < (self.place.stage, self.begun.ordinal)
        if not self.in_epochs and not around and passed:
            # Nothing tells the end of a hand-written loop: the program would run on, and train nothing.
            raise StateError(f"loop {self.begun.ordinal} begins, but {_there(target)} was not reached: {_OTHER_LOOPS}")
        self._draw_again(self._draws_after_loops(target, len(around)))
        self.yielded_nothing = True
        return Way.SKIP

    def enter_evaluation(self, step: int = 0) -> Way:
        """Begin a validation. Return RUN or RESTORE; never SKIP, since the program runs it anyway.

        Args:
            step: completed steps.
        """
        target, around = self._ahead, self._around
        if around:
            self._enter_body(around, step)
            number = around[-1].count_evaluation()
        else:
            number = self.place.evaluation = self.place.evaluation + 1
        if target is None or target.kind != "evaluating" or len(target.bodies) != len(around):
            return Way.RUN
        return Way.RESTORE if self._leads_to(target, around) and target.evaluation == number else Way.RUN

    def begin_by_hand(self, *, steps_only: bool = True) -> Way:
        """Begin a hand-written loop, as the program has just announced. Return what it has to do.

        Args:
            steps_only: whether `ckpt.step()` alone tells of its iterations; false if it iterates over `loader`.

        Raises:
            StateError: the snapshot was taken in a loop of the Checkpointer.
        """
        self.by_hand, self.early = True, False
        target = self._ahead
        way = Way.RUN if self.restored else Way.RESTORE
        hand = Loop("hand", 0)
        if target is not None and target.outermost[0] not in ("hand", "step", "end"):
            raise StateError(
                f"the snapshot was taken in a loop of {_called(target.outermost[0])}; ckpt.resume() cannot continue "
                "there: use the same loops as before, or --fresh"
            )
        if target is not None and target.bodies:
            way = Way.AGAIN
            hand.again(target.bodies[0])
        self.hand = hand if steps_only else None
        return way

    # ---- inside loops -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Context manager around one iteration of `epochs`."""
        self.place.enter_epoch(number)
        self.in_epochs = True
        if (target := self._ahead) is None:
            self.place.in_epoch = Draws(self.capture_rng())
        else:
            self.place.in_epoch = target.in_epoch
            self._draw_again(target.in_epoch.began)
        try:
            yield
        finally:
            self.in_epochs = False
            self._note_draws()

    @contextlib.contextmanager
    def handing_out(self, loop: Loop) -> Iterator[None]:
        """Context manager around the iterations of any other loop of the Checkpointer."""
        self.stack.append(loop)
        begun, self.yielded_nothing = loop.number, False
        try:
            yield
            self.yielded_nothing = loop.number == begun
        finally:
            self.stack.remove(loop)
            self._note_draws()

    def next_by_hand(self) -> None:
        """Begin the next iteration of a hand-written loop: `ckpt.resume()` or `ckpt.step()` was called."""
        if self.hand is not None:
            if self.hand.keeps_moments or not self.hand.number:
                self.hand.keep(self.capture_rng)
            self.hand.number += 1
        elif self.stack:
            self.stack[-1].stepped = self.stack[-1].number

    @property
    def hands_out(self) -> bool:
        """Whether a loop of the Checkpointer, other than `epochs`, is inside an iteration."""
        return bool(self.stack)

    @property
    def innermost(self) -> Loop | None:
        """The innermost loop that is inside an iteration, hand-written ones included; `None` outside of all."""
        return self.stack[-1] if self.stack else self.hand

    @property
    def worked(self) -> bool:
        """Whether a loop or a validation of the Checkpointer has begun in this epoch."""
        return bool(self.place.loop or self.place.evaluation)

    @property
    def loops(self) -> bool:
        """Whether another boundary is expected: the program is inside a loop."""
        return self.in_epochs or self.hands_out or self.by_hand

    def left_early(self, *, exiting: bool) -> bool:
        """Whether the program has left its outermost loop before its end; `exiting`: it has called sys.exit.

        An `epochs` iterator that is still open between two epochs does not count: a `zip` that has ended may hold it.
        """
        kept = self.in_epochs and not self.hands_out and not exiting
        return self.early and not kept

    # ---- the place --------------------------------------------------------------------------------------------------

    def position(self, kind: str, *, counted: bool = False) -> Position:
        """Return where the program is now, as a place that a script can reach again.

        Args:
            kind: see `Position`.
            counted: see `Position`.
        """
        bodies = self._bodies(kind)
        loop, evaluation = bodies[-1].counts if bodies else (self.place.loop, self.place.evaluation)
        return replace(
            self.place,
            kind=kind,
            loop=loop,
            evaluation=evaluation,
            iteration=self.stack[-1].number if kind in LOOPS and self.stack else self.place.iteration,
            counted=counted,
            bodies=tuple(loop.body for loop in bodies),
            keeping=tuple(sorted(self._keeping)),
        )

    def body_ahead(self, loop: Loop | None) -> Body:
        """Return the body, on the way to the snapshot's place, that `loop` hands out again; `None`: the outermost."""
        assert self.target is not None
        return self.target.bodies[sum(other is not loop for other in self._around)]

    def moment_again(self, loop: Loop) -> Any:
        """Return the random states with which `loop` hands out its iteration again; empty: those of the snapshot."""
        return self.body_ahead(loop).moment or {}

    def name_of(self, loop: Loop) -> str:
        """Return a name for a loop that has just begun: the same in every start of the program."""
        stage, *ordinals = self._path(loop)
        return f"loop-{stage}-{'.'.join(map(str, ordinals))}"

    def leads_back(self, kind: str, *, counted: bool = False) -> bool:
        """Whether a script can reach the `position` again: the loops around it can hand out their iterations again."""
        bodies = self._bodies(kind)
        return all(loop.leads_back(trained=counted and loop is bodies[-1]) for loop in bodies)

    # ---- loops end --------------------------------------------------------------------------------------------------

    def check_reached(self, where: str) -> None:
        """Raise StateError if the place of the snapshot was not reached, now that `where` (in words) is over."""
        if (target := self._ahead) is not None:
            raise StateError(f"{where} ended without reaching {_there(target)}: {_OTHER_LOOPS}")

    def end_stage(self, iterations: int) -> None:
        """End the outermost loop, after so many iterations, those before a resume included."""
        self.place.epoch = None
        self.place.iteration = iterations
        self.early = False

    def leave_stage(self, iterations: int) -> None:
        """Note that the program leaves the outermost loop before its end, after so many iterations."""
        self.place.kind, self.place.epoch, self.place.iteration = "end", None, iterations

    # ---- the snapshot -----------------------------------------------------------------------------------------------

    def aim(self, target: Position) -> None:
        """Set the place to reach: where the snapshot was taken."""
        self.target = target
        self._keeping |= {*target.keeping}

    def arrive(self, place: Position | None) -> None:
        """Note that the snapshot was restored, and the program is at its place; `None`: it begins without one."""
        self.restored = True
        if place is not None:  # in a body, the numbers of the place are those of the body
            here = self.place if place.bodies else place
            self.place = replace(place, bodies=(), counted=False, loop=here.loop, evaluation=here.evaluation)

    @property
    def _ahead(self) -> Position | None:
        """The place of the snapshot until it is reached; `None` afterwards, or without a snapshot."""
        return None if self.restored else self.target

    @property
    def _around(self) -> list[Loop]:
        """The loops around whatever begins now, outermost first; `epochs` not counted."""
        return self.stack if self.hand is None else [self.hand, *self.stack]

    def _bodies(self, kind: str) -> list[Loop]:
        """Return the loops in whose bodies a place of this kind lies: not the loop at whose boundary it is."""
        if kind == "evaluating":
            return self._around
        return self._around[:-1] if self.stack else []

    def _leads_to(self, target: Position, around: list[Loop]) -> bool:
        """Whether the program is on its way to the target: in the same epoch, and in the same bodies."""
        return (target.stage, target.epoch) == (self.place.stage, self.place.epoch) and all(
            loop.number == body.number for loop, body in zip(around, target.bodies, strict=False)
        )

    def _count_loop(self, around: list[Loop], step: int) -> int:
        if around:
            if not around[-1].repeats:
                raise StateError(
                    f"a loop of the Checkpointer inside {_called(around[-1].kind)}, whose loader keeps its own "
                    "position and cannot hand out a batch again: write the inner loop without ckpt, or use a plain "
                    "DataLoader"
                )
            self._enter_body(around, step)
            return around[-1].count_loop()
        if not self.in_epochs:
            self.early = False  # an earlier loop that was left does not count: the program continues
        self.place.loop += 1
        return self.place.loop

    def _enter_body(self, around: list[Loop], step: int) -> None:
        around[-1].enter_body(step, self.place.calls)
        self._keeping.add(self._path(around[-1]))

    def _path(self, loop: Loop) -> tuple[int, ...]:
        around = [other.ordinal for other in self._around if other is not loop]
        return (self.place.stage, *around, loop.ordinal)

    # ---- random numbers that code between loops draws ---------------------------------------------------------------

    def _note_draws(self) -> None:
        """Record with which random states the code after a loop begins."""
        if not self.restored or self._is_finalizing() or is_collecting():
            return  # in the last two cases the program has long left the loop
        now = self.capture_rng()
        if self._around:
            self._around[-1].note_draws(now)
        elif self.in_epochs:
            self.place.in_epoch = replace(self.place.in_epoch, resumed=now)
        else:
            self.place.program = replace(self.place.program, resumed=now)

    def _draws_after_loops(self, target: Position, depth: int) -> Any:
        if depth:
            return target.bodies[depth - 1].resumed if depth <= len(target.bodies) else None
        return target.in_epoch.resumed if self.in_epochs else target.program.resumed

    def _draw_again(self, rng: Any) -> None:
        if rng is not None:
            self._restore_rng(rng)


def _called(kind: str) -> str:
    return {"hand": "a hand-written loop", "step": "the Checkpointer's loader"}.get(kind, f"ckpt.{kind}()")


def _there(target: Position) -> str:
    kind, loop = target.outermost
    return f"the place of the snapshot ({kind} {loop})"
