"""A place in the program, to which a script that runs again from the top comes back.

Owns what a place consists of and when two are the same; knows neither loops nor snapshots.

A place is (stage, epoch, loop, kind): the how-manieth outermost loop, its epoch, the how-manieth loop in that epoch,
and where in it. On resume the script runs again from the top; loops before that place hand out nothing, and at that
place everything is restored: whatever ran before is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Position:
    """One of them; the running program's changes as it goes on.

    Attributes:
        stage: the how-manieth outermost loop.
        epoch: of that; `None` outside `epochs`.
        loop: the how-manieth in that epoch, or outermost loop.
        evaluation: the how-manieth `evaluating` there.
        kind: start | batches | steps | step | evaluating | end.
        iteration: completed, of a loop that counts.
        calls: batches, where several make a step.
    """

    stage: int = 0
    epoch: int | None = None
    loop: int = 0
    evaluation: int = 0
    kind: str = "start"
    iteration: int = 0
    calls: int = 0

    def to_tree(self) -> dict[str, Any]:
        """As a snapshot keeps it: `Position(**tree)` is the inverse."""
        return dict(vars(self))

    def enter_stage(self) -> None:
        """An outermost loop begins. One that was left by `break` is over."""
        self.stage += 1
        self.epoch = None
        self.loop = self.evaluation = 0

    def enter_epoch(self, epoch: int) -> None:
        """An epoch of this stage begins."""
        self.epoch, self.loop, self.evaluation = epoch, 0, 0

    def in_loop(self, stage: int, epoch: int | None, loop: int) -> bool:
        """Whether it lies in that loop."""
        in_one = self.kind in ("batches", "steps", "step")
        return in_one and (self.stage, self.epoch, self.loop) == (stage, epoch, loop)

    def in_evaluation(self, stage: int, epoch: int | None, evaluation: int) -> bool:
        """Whether it is the beginning of that validation."""
        same = (self.stage, self.epoch, self.evaluation) == (stage, epoch, evaluation)
        return self.kind == "evaluating" and same
