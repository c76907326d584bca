"""The way through a program that runs again from the top, to the place where its snapshot was taken.

Owns where the program is among our loops, and what each loop that begins has to do: run, be passed over, or make the
snapshot's state live first. Knows no snapshot but its place, and no agent: a test drives it call by call.

    enter_stage ─▶ enter_loop ─▶ (iterations) ─▶ leave ─▶ … ─▶ end_stage
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator

from harness.errors import StateError
from harness.trainer.position import Position

_OTHER_LOOPS = "the script's loops differ from those that made it. Use the script as it was, or --fresh"


class Way(enum.Enum):
    """What a loop that begins has to do."""

    RUN = "run"
    SKIP = "skip"
    """It lies wholly before the place of the snapshot: it hands out nothing."""
    RESTORE = "restore"
    """The place of the snapshot is in it, or there is no snapshot: the state becomes the snapshot's first."""


class Replay:
    """Of one program. One thread."""

    def __init__(self) -> None:
        """At the top of the program, with nothing to go on from."""
        self.place = Position()
        """Where the program is."""
        self.target: Position | None = None
        """Where the snapshot was taken; `None` where there is none."""
        self.restored = False
        """Whether the state is the snapshot's, or the program has begun without one."""
        self.in_epochs = False
        """Whether the program is inside an iteration of `epochs`."""
        self.by_hand = False
        """Whether the outermost loop is the program's own: nobody tells its end."""
        self.early = False
        """Whether the program is out of a loop of ours before its end, as far as that is known."""
        self._handing_out = 0
        """Loops of ours, but `epochs`, that are in an iteration."""

    # ---- loops begin ------------------------------------------------------------------------------------------------

    def enter_stage(self) -> Way:
        """An outermost loop begins: `epochs`, or `steps` outside of them.

        RESTORE only where the snapshot was taken at this loop's very end; otherwise the loops in it tell.

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
        """The epoch with which this stage begins: that of the snapshot, if it was taken in this stage."""
        target = self._ahead
        in_it = target is not None and target.stage == self.place.stage
        return target.epoch or 0 if target is not None and in_it else 0

    def enter_loop(self, kind: str, *, at_its_end: bool = False) -> Way:
        """A loop of `batches`, of `steps`, or over a loader that we were given ("step") begins.

        Args:
            kind: which.
            at_its_end: whether it is the outermost loop, and the snapshot was taken at its end.

        Raises:
            StateError: the place of the snapshot cannot be reached any more: the program is another one.
        """
        if not self.in_epochs:
            self.early = False  # whatever was left before: the program goes on
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
            # A loop of the program's own has no end that would tell: it would run on, and train nothing.
            raise StateError(
                f"loop {place.loop} begins, and the place of the snapshot ({target.kind} {target.loop}) was not met: "
                f"{_OTHER_LOOPS}"
            )
        return Way.SKIP

    def enter_evaluation(self) -> Way:
        """A validation begins between two loops: SKIP is never the answer, since the program runs it anyway."""
        place, target = self.place, self._ahead
        place.evaluation += 1
        is_it = target is not None and target.in_evaluation(place.stage, place.epoch, place.evaluation)
        return Way.RESTORE if is_it else Way.RUN

    def begin_by_hand(self) -> Way:
        """The program says that its own loop begins now.

        Raises:
            StateError: the snapshot was taken in a loop of ours.
        """
        target = self._ahead
        if target is not None and target.kind not in ("step", "end"):
            raise StateError(
                f"the snapshot was taken in a loop of ckpt.{target.kind}; ckpt.resume() cannot go on there: use the "
                "same loops as before, or --fresh"
            )
        self.by_hand, self.early = True, False
        return Way.RUN if self.restored else Way.RESTORE

    # ---- in them ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Around an iteration of `epochs`."""
        self.place.enter_epoch(number)
        self.in_epochs = True
        try:
            yield
        finally:
            self.in_epochs = False

    @contextlib.contextmanager
    def handing_out(self) -> Iterator[None]:
        """Around the iterations of any other loop of ours."""
        self._handing_out += 1
        try:
            yield
        finally:
            self._handing_out -= 1

    @property
    def hands_out(self) -> bool:
        """Whether a loop of ours, but `epochs`, is in an iteration."""
        return self._handing_out > 0

    @property
    def worked(self) -> bool:
        """Whether anything of ours was done in this epoch."""
        return bool(self.place.loop or self.place.evaluation)

    @property
    def loops(self) -> bool:
        """Whether a boundary is still to come, as far as we know."""
        return self.in_epochs or self.hands_out or self.by_hand

    def left_early(self, *, exiting: bool) -> bool:
        """Whether the program has left its outermost loop before its end; `exiting`: it has called sys.exit.

        An iterator of epochs that nobody has closed between two epochs was kept by something that is through.
        """
        kept = self.in_epochs and not self.hands_out and not exiting
        return self.early and not kept

    # ---- where it ends ----------------------------------------------------------------------------------------------

    def check_reached(self, where: str) -> None:
        """`where`, in words, is over. Raises StateError: the place of the snapshot was in it, or before it."""
        if (target := self._ahead) is not None:
            place = f"the place of the snapshot ({target.kind} {target.loop})"
            raise StateError(f"{where} ended without reaching {place}: {_OTHER_LOOPS}")

    def end_stage(self, iterations: int) -> None:
        """The outermost loop is over, after so many iterations, those before a resume included."""
        self.place.epoch = None
        self.place.iteration = iterations
        self.early = False

    # ---- the snapshot -----------------------------------------------------------------------------------------------

    def aim(self, target: Position) -> None:
        """There is a snapshot, which was taken there."""
        self.target = target

    def arrive(self, place: Position | None) -> None:
        """The state is the snapshot's now, and the program is where that was taken; `None`: it begins without one."""
        self.restored = True
        if place is not None:
            self.place = place

    @property
    def _ahead(self) -> Position | None:
        """The place of the snapshot, while it is still to be reached."""
        return None if self.restored else self.target
