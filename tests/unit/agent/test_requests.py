"""When several ranks are asked for a snapshot. Whole agents with ranks are tests/ranks and tests/process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from harness.agent.requests import Requests
from harness.core import events
from harness.core.policy.meeting import Place, Where
from harness.ipc.control_page import Command


class EnteringRanks:
    """Two ranks that stand at the beginning of a validation, after step 8, and what they are asked."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []
        self.missed: int | None = None
        self.connections, self.several, self.complete, self.one_has_left = [object()], True, True, False
        self.may_ask, self.evaluate_at, self.farthest_step = True, Place(8, Where.AFTER), 8
        self.reasons = set[str]()
        self.sealed_step = 7
        self.holdings = SimpleNamespace(compares=False)
        self.meeting = SimpleNamespace(
            is_open=True, given_up=None, take_missed=self.take_missed, turn=lambda sealed: None, close=lambda: None
        )

    def __iter__(self) -> Iterator[Any]:
        return iter([SimpleNamespace(control=SimpleNamespace(trainer_step=8, at_end=False))] * 2)

    def take_missed(self) -> int | None:
        missed, self.missed = self.missed, None
        return missed

    def grant(self) -> None: ...

    def drop(self, dropped: object) -> None: ...

    def command(self, command: Command, at: Place | None = None) -> None:
        assert command is Command.SNAPSHOT
        self.asked.append(None if at is None else at.step)


def test_a_validation_s_snapshot_that_a_rank_has_missed_is_not_asked_for_again() -> None:
    told = list[events.Event]()
    ranks: Any = EnteringRanks()
    settings = SimpleNamespace(every_s=1000.0, durable_every_s=1000.0, local=None, every_steps=None)
    context: Any = SimpleNamespace(settings=settings, emit=told.append)
    pipeline: Any = SimpleNamespace(
        sealed_step=7, sealed_at=None, forget=lambda *steps: [], forget_passed=lambda *steps: []
    )
    drain: Any = SimpleNamespace(current=None)
    lateness: Any = SimpleNamespace(in_the_way=False)
    requests = Requests(context, ranks, pipeline, drain, lateness)
    attempt: Any = SimpleNamespace(first_step_at=None, began_at=0.0)

    requests.turn(attempt, attached=False)
    assert ranks.asked == [8]
    ranks.missed = 8
    for _ in range(3):
        requests.turn(attempt, attached=False)
    assert ranks.asked == [8], "a rank that has passed a step does not come back to it"

    requests.forget()  # another attempt may come to that step again
    requests.turn(attempt, attached=False)
    assert ranks.asked == [8, 8]
    assert told == [events.Due(reason="evaluating")] * 2
