"""When several ranks are asked for a snapshot. Whole agents with ranks are tests/ranks and tests/process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.agent.requests import Requests
from harness.agent.trainers import meeting
from harness.config.settings import Settings
from harness.core import events
from harness.core.messages import Sealed
from harness.core.policy.drain import Choice
from harness.core.policy.meeting import Hold, Place, Where
from harness.ipc.control_page import Command
from tests.support.context import Posts, a_context
from tests.support.played_ranks import PlayedRanks


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
            is_open=True,
            agreed=None,
            given_up=None,
            take_missed=self.take_missed,
            turn=lambda sealed: None,
            close=lambda: None,
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
        sealed_step=7, sealed_at=None, forget=lambda *_: [], forget_others=lambda *_: [], forget_passed=lambda *_: []
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


class LeavingRanks:
    """Two ranks after step 8, which both have sealed, though the agent does not know it; and a notice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(meeting.time, "monotonic", lambda: self.now)
        context = a_context(Settings(store="memory", run="run", every_s=1000.0), Posts())
        self.played = PlayedRanks(context, 2)
        self.ranks, self.at = self.played.ranks, self.played.at
        self.at(7, 7)
        self.ranks.meeting.ask(Command.SNAPSHOT)
        self.drain: Any = SimpleNamespace(current=None)
        lateness: Any = SimpleNamespace(in_the_way=False)
        self.requests = Requests(context, self.ranks, self.played.pipeline, self.drain, lateness)
        assert self.turn() is Command.SNAPSHOT
        assert self.ranks.meeting.agreed == 8
        self.at(8, 8)
        self.drain.current = SimpleNamespace(plan=SimpleNamespace(choice=Choice.NEW))

    def turn(self) -> Command:
        """What the ranks are to do then."""
        attempt: Any = SimpleNamespace(first_step_at=None, began_at=0.0)
        for _ in range(2):  # what is asked in one is agreed in the next
            self.requests.turn(attempt, attached=False)
            self.now += 2 * meeting.SEEN_S
        return self.played.pages[0].command

    def sealed(self, step: int) -> None:
        for rank in self.ranks:
            taken = self.ranks.sealed(rank, Sealed(rank.number, step, 1, 0.0, 0.0))
            if taken is not None:
                self.requests.taken(taken)


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeavingRanks]:
    made = LeavingRanks(monkeypatch)
    yield made
    made.played.close()


@pytest.mark.parametrize("is_asked_to_leave_first", [True, False])
def test_a_notice_loses_no_step_where_an_earlier_snapshot_is_just_being_sealed(
    leaving: LeavingRanks, is_asked_to_leave_first: bool
) -> None:
    if is_asked_to_leave_first:
        leaving.turn()
    leaving.sealed(8)

    assert leaving.turn() is Command.SNAPSHOT_AND_LEAVE

    assert leaving.ranks.meeting.agreed == 9
    leaving.at(9, 9, hold=Hold.HOLDS)
    leaving.sealed(9)
    assert leaving.turn() is Command.LEAVE
