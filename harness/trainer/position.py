"""Position: a place in the program, which a script reaches again when it runs from the top.

Owns what a place consists of and when two are the same; knows neither loops nor snapshots.

A place is (stage, epoch, loop, kind): the number of the outermost loop, its epoch, the number of the loop in that
epoch, and where in that loop. On resume the script runs again from the top. Loops before the place yield nothing, and
at the place everything is restored, which overwrites all changes that were made to the states before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Position:
    """A place in the program. That of the running program changes as the program continues.

    Attributes:
        stage: number of the outermost loop, from 1; 0 before the first.
        epoch: number of the epoch in that loop, from 0; `None` outside `epochs`.
        loop: number of the loop in that epoch, or in that outermost loop, from 1; 0 before the first.
        evaluation: number of the `evaluating` there, counted likewise.
        kind: start | batches | steps | step | evaluating | end.
        iteration: completed iterations, of a loop that counts them.
        calls: batches so far, if several make a step.
    """

    stage: int = 0
    epoch: int | None = None
    loop: int = 0
    evaluation: int = 0
    kind: str = "start"
    iteration: int = 0
    calls: int = 0

    def to_tree(self) -> dict[str, Any]:
        """Return it in the form that a snapshot keeps: `Position(**tree)` is the inverse."""
        return dict(vars(self))

    def enter_stage(self) -> None:
        """Begin an outermost loop. One that was left by `break` is over."""
        self.stage += 1
        self.epoch = None
        self.loop = self.evaluation = 0

    def enter_epoch(self, epoch: int) -> None:
        """Begin an epoch of this stage."""
        self.epoch, self.loop, self.evaluation = epoch, 0, 0

    def in_loop(self, stage: int, epoch: int | None, loop: int) -> bool:
        """Whether this place lies in the loop with these numbers."""
        in_one = self.kind in ("batches", "steps", "step")
        return in_one and (self.stage, self.epoch, self.loop) == (stage, epoch, loop)

    def in_evaluation(self, stage: int, epoch: int | None, evaluation: int) -> bool:
        """Whether this place is the beginning of the validation with these numbers."""
        same = (self.stage, self.epoch, self.evaluation) == (stage, epoch, evaluation)
        return self.kind == "evaluating" and same
