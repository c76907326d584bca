"""Position: a place in the program, which a script reaches again when it runs from the top.

Owns what a place consists of and when two are the same; knows neither loops nor snapshots.

A place is a path: the number of the outermost loop, its epoch, the bodies of the loops around it, and where in the
innermost one. On resume the script runs again from the top. Loops before the place yield nothing; a loop around the
place hands out the same batch or step again, so that its body leads to the place; and at the place everything is
restored, which overwrites all changes that were made to the states before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

LOOPS: Final = ("batches", "steps", "step")
"""The kinds of a place in a loop."""


@dataclass(frozen=True)
class Draws:
    """The random states from which code between loops draws, so that it draws the same when it runs again.

    Attributes:
        began: at the beginning of the program (its Checkpointer), or of the epoch.
        resumed: after the last loop there; `None` if there was none.
    """

    began: Any = None
    resumed: Any = None


@dataclass(frozen=True)
class Body:
    """One iteration of a loop, in whose body a place lies.

    Attributes:
        kind: batches | steps | step (a loop over the Checkpointer's `loader`) | hand (a hand-written loop).
        loop: number of the loop in the body around it, from 1; 0 for a hand-written one.
        number: iterations that the loop has handed out, this one included.
        step: completed steps when the body began.
        calls: batches when the body began, if several make a step.
        moment: the random states before the iteration was handed out; see `InstrumentedLoader.moment`.
        resumed: the random states after the last loop in this body; `None` if there was none.
    """

    kind: str
    loop: int
    number: int
    step: int
    calls: int
    moment: Any = None
    resumed: Any = None


@dataclass
class Position:
    """A place in the program. That of the running program changes as the program continues.

    Attributes:
        stage: number of the outermost loop, from 1; 0 before the first.
        epoch: number of the epoch in that loop; `None` outside `epochs`.
        loop: number of the loop in the innermost body, or in that epoch or outermost loop, from 1; 0 before the first.
        evaluation: number of the `evaluating` there, counted likewise.
        kind: start | batches | steps | step | evaluating | end.
        iteration: completed iterations of the innermost loop, those before a resume included.
        calls: batches so far, if several make a step.
        counted: whether the step of the innermost body is counted already, though the body goes on.
        bodies: the loops around the place, outermost first: their current bodies lead to it.
        program: what the code between the outermost loops draws from.
        in_epoch: what the code of this epoch, outside of its loops, draws from.
        keeping: the loops in whose bodies there was a loop or a validation: see `Loop.keeps_moments`.
    """

    stage: int = 0
    epoch: int | None = None
    loop: int = 0
    evaluation: int = 0
    kind: str = "start"
    iteration: int = 0
    calls: int = 0
    counted: bool = False
    bodies: tuple[Body, ...] = ()
    program: Draws = Draws()
    in_epoch: Draws = Draws()
    keeping: tuple[tuple[int, ...], ...] = ()

    def to_tree(self) -> dict[str, Any]:
        """Return it in the form that a snapshot keeps; `from_tree` is the inverse."""
        tree: dict[str, Any] = vars(self) | {
            "program": vars(self.program).copy(),
            "in_epoch": vars(self.in_epoch).copy(),
        }
        tree["bodies"] = [dict(vars(body)) for body in self.bodies]
        tree["keeping"] = [list(path) for path in self.keeping]
        return tree

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Position:
        """Return the place that `to_tree` described."""
        place = cls(**tree)
        place.program, place.in_epoch = (Draws(**tree.get(name, {})) for name in ("program", "in_epoch"))
        place.bodies = tuple(Body(**body) for body in tree.get("bodies", ()))
        place.keeping = tuple(tuple(path) for path in tree.get("keeping", ()))
        return place

    def enter_stage(self) -> None:
        """Begin an outermost loop. One that was left by `break` is over."""
        self.stage += 1
        self.epoch = None
        self.loop = self.evaluation = 0

    def enter_epoch(self, epoch: int) -> None:
        """Begin an epoch of this stage."""
        self.epoch, self.loop, self.evaluation = epoch, 0, 0

    @property
    def outermost(self) -> tuple[str, int]:
        """Kind and number of the outermost of these loops, `epochs` not counted."""
        return (self.bodies[0].kind, self.bodies[0].loop) if self.bodies else (self.kind, self.loop)

    def next_loop(self, depth: int) -> tuple[str, int] | None:
        """Return kind and number of the loop that leads on from inside of `depth` bodies; `None` if the place is there.

        The place itself is in the innermost of these loops, unless it is the beginning of a validation.
        """
        if depth < len(self.bodies):
            return self.bodies[depth].kind, self.bodies[depth].loop
        return (self.kind, self.loop) if depth == len(self.bodies) and self.kind in LOOPS else None
