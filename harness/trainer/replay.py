"""Replay: leads a program that runs again from the top to the place where its snapshot was taken.

Owns where the program is among the Checkpointer's loops, and what each loop that begins has to do: run, be skipped, or
restore the snapshot first. Of the snapshot it knows only the place, and it knows no agent: a test drives it call by
call.

    enter_stage ─▶ enter_loop ─▶ (iterations) ─▶ leave ─▶ … ─▶ end_stage
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from harness.errors import StateError
from harness.trainer.position import Position

_OTHER_LOOPS = "the script's loops differ from those that made the snapshot. Use the unchanged script, or --fresh"


class Way(enum.Enum):
    """The action of a loop that begins."""

    RUN = "run"
    SKIP = "skip"
    """Yield nothing: the loop lies wholly before the place of the snapshot."""
    RESTORE = "restore"
    """Restore the snapshot first, then run: its place is in this loop. Without a snapshot, the program just begins."""


class Replay:
    """Where one program is in its loops, and the snapshot's place, which it has to reach. Used from one thread."""

    def __init__(self) -> None:
        """Begin at the top of the program, without a snapshot."""
        self.place = Position()
        """Where the program is."""
        self.target: Position | None = None
        """Where the snapshot was taken; `None` without a snapshot."""
        self.restored = False
        """Whether the snapshot was restored, or the program has begun without one."""
        self.in_epochs = False
        """Whether the program is inside an iteration of `epochs`."""
        self.by_hand = False
        """Whether the outermost loop is hand-written: then nothing tells when it ends."""
        self.early = False
        """Whether the program has left a loop of the Checkpointer before its end, as far as that is known."""
        self._handing_out = 0
        """Number of the Checkpointer's loops, without `epochs`, that are inside an iteration."""

    # ---- loops begin ------------------------------------------------------------------------------------------------

    def enter_stage(self) -> Way:
        """Begin an outermost loop: `epochs`, or `steps` outside of `epochs`. Return what it has to do.

        RESTORE only if the snapshot was taken at this loop's very end; otherwise the inner loops decide.

        Raises:
            StateError: inside `epochs`.
        """
        if self.in_epochs:
            raise StateError(
                "ckpt.epochs() inside ckpt.epochs(): put the inner loop into ckpt.batches() or ckpt.steps()"
            )
        self.place.enter_stage()
        self.by_hand = False
        target = self._ahead
        if target is None or target.stage < self.place.stage:
            return Way.RUN
        if target.stage > self.place.stage:
            return Way.SKIP
        return Way.RESTORE if target.kind == "end" else Way.RUN

    @property
    def first_epoch(self) -> int:
        """The first epoch of this stage: the snapshot's, if the snapshot was taken in this stage, otherwise 0."""
        target = self._ahead
        in_it = target is not None and target.stage == self.place.stage
        return target.epoch or 0 if target is not None and in_it else 0

    def enter_loop(self, kind: str, *, at_its_end: bool = False) -> Way:
        """Begin a loop that yields batches or steps. Return what it has to do.

        Args:
            kind: "batches" or "steps", as the call is named; "step" for a loop over the Checkpointer's `loader`.
            at_its_end: whether it is the outermost loop, and the snapshot was taken at its end.

        Raises:
            StateError: the place of the snapshot cannot be reached any more: the program has changed.
        """
        if not self.in_epochs:
            self.early = False  # an earlier loop that was left does not count: the program continues
        self.place.loop += 1
        if self.restored:
            return Way.RUN
        if at_its_end or (target := self.target) is None:
            return Way.RESTORE
        place = self.place
        if target.in_loop(place.stage, place.epoch, place.loop):
            if target.kind != kind:
                raise StateError(
                    f"the snapshot was taken in a loop of ckpt.{target.kind}, and this is ckpt.{kind}: {_OTHER_LOOPS}"
                )
            return Way.RESTORE
        if not self.in_epochs and (target.stage, target.loop) < (place.stage, place.loop):
            # Nothing tells the end of a hand-written loop: the program would run on, and train nothing.
            raise StateError(
                f"loop {place.loop} begins, but the place of the snapshot ({target.kind} {target.loop}) was not "
                f"reached: {_OTHER_LOOPS}"
            )
        return Way.SKIP

    def enter_evaluation(self) -> Way:
        """Begin a validation between two loops. Return RUN or RESTORE; never SKIP, since the program runs it anyway."""
        place, target = self.place, self._ahead
        place.evaluation += 1
        is_it = target is not None and target.in_evaluation(place.stage, place.epoch, place.evaluation)
        return Way.RESTORE if is_it else Way.RUN

    def begin_by_hand(self) -> Way:
        """Begin a hand-written loop, as the program has just announced. Return what it has to do.

        Raises:
            StateError: the snapshot was taken in a loop of the Checkpointer.
        """
        target = self._ahead
        if target is not None and target.kind not in ("step", "end"):
            raise StateError(
                f"the snapshot was taken in a loop of ckpt.{target.kind}; ckpt.resume() cannot continue there: use the "
                "same loops as before, or --fresh"
            )
        self.by_hand, self.early = True, False
        return Way.RUN if self.restored else Way.RESTORE

    # ---- inside loops -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Context manager around one iteration of `epochs`."""
        self.place.enter_epoch(number)
        self.in_epochs = True
        try:
            yield
        finally:
            self.in_epochs = False

    @contextlib.contextmanager
    def handing_out(self) -> Iterator[None]:
        """Context manager around the iterations of any other loop of the Checkpointer."""
        self._handing_out += 1
        try:
            yield
        finally:
            self._handing_out -= 1

    @property
    def hands_out(self) -> bool:
        """Whether a loop of the Checkpointer, other than `epochs`, is inside an iteration."""
        return self._handing_out > 0

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

    # ---- loops end --------------------------------------------------------------------------------------------------

    def check_reached(self, where: str) -> None:
        """Raise StateError if the place of the snapshot was not reached, now that `where` (in words) is over."""
        if (target := self._ahead) is not None:
            place = f"the place of the snapshot ({target.kind} {target.loop})"
            raise StateError(f"{where} ended without reaching {place}: {_OTHER_LOOPS}")

    def end_stage(self, iterations: int) -> None:
        """End the outermost loop, after so many iterations, those before a resume included."""
        self.place.epoch = None
        self.place.iteration = iterations
        self.early = False

    # ---- the snapshot -----------------------------------------------------------------------------------------------

    def aim(self, target: Position) -> None:
        """Set the place to reach: where the snapshot was taken."""
        self.target = target

    def arrive(self, place: Position | None) -> None:
        """Note that the snapshot was restored, and the program is at its place; `None`: it begins without one."""
        self.restored = True
        if place is not None:
            self.place = place

    @property
    def _ahead(self) -> Position | None:
        """The place of the snapshot until it is reached; `None` afterwards, or without a snapshot."""
        return None if self.restored else self.target
