"""Ranks that do not come: who is named, when, and what is not asked meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.agent.trainers import lateness as module
from harness.agent.trainers import meeting
from harness.agent.trainers.attempt import TrainerAttempt
from harness.agent.trainers.lateness import Lateness
from harness.config.settings import Settings
from harness.core import events
from harness.core.policy.meeting import Hold, Place
from harness.ipc.control_page import Command
from tests.support.context import Posts, a_context
from tests.support.played_ranks import PlayedRanks


class Scene:
    """Three ranks in their loops, a clock that the test sets, and what is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for each in (module, meeting):
            monkeypatch.setattr(each.time, "monotonic", lambda: self.now)
        self.told: list[events.Event] = []
        context = a_context(Settings(store="memory", run="run"), Posts(), emit=self.told.append)
        self.played = PlayedRanks(context, 3)
        self.ranks, self.pages, self.at = self.played.ranks, self.played.pages, self.played.at
        self.attempt = TrainerAttempt(self.now, self.now)
        self.lateness = Lateness(context, self.ranks)
        self.attempt.greeted |= {0, 1, 2}
        self.attempt.greeted_at = self.now

    def turn(self, after_s: float = 0.0, usual_s: float | None = None) -> bool:
        self.now += after_s
        return self.lateness.turn(self.attempt, usual_s, spawned=True)

    @property
    def named(self) -> list[tuple[int, int | None]]:
        return [(event.rank, event.step) for event in self.told if isinstance(event, events.RankLate)]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.played.close()


def test_a_rank_that_others_wait_for_is_named_once_and_is_in_the_way(scene: Scene) -> None:
    scene.at(7, 6, 7)
    scene.turn()
    scene.ranks.meeting.ask(Command.SNAPSHOT)
    for page in (scene.pages[0], scene.pages[2]):
        page.say(page.news, Hold.HOLDS)
    assert not scene.turn(59.0)
    assert scene.named == []

    assert scene.turn(2.0)
    assert scene.turn(5.0)

    assert scene.named == [(1, 6)]
    assert scene.lateness.in_the_way
    assert [row.late for row in scene.lateness.status()] == [False, True, False]
    scene.at(7, 7, 7)
    assert not scene.turn()
    assert not scene.lateness.in_the_way, "it has moved"


def test_nobody_is_late_whom_nobody_waits_for(scene: Scene) -> None:
    """A validation on all ranks, while a snapshot is asked for a later step."""
    scene.at(5, 5, 5)
    scene.turn()
    scene.ranks.meeting.ask(Command.SNAPSHOT, Place(20))

    assert not scene.turn(600.0)
    assert scene.named == []


def test_a_step_that_usually_takes_long_is_not_late(scene: Scene) -> None:
    scene.at(7, 6, 7)
    scene.turn()
    scene.ranks.meeting.ask(Command.SNAPSHOT)
    for page in (scene.pages[0], scene.pages[2]):
        page.say(page.news, Hold.HOLDS)

    assert not scene.turn(100.0, usual_s=30.0)
    assert scene.turn(30.0, usual_s=30.0)


def test_a_rank_that_is_not_at_its_end_is_named_and_is_in_nobody_s_way_once_it_is(scene: Scene) -> None:
    """A last validation on the first rank alone."""
    scene.at(9, 9, 9)
    scene.turn()
    for number in (1, 2):
        scene.ranks.of(number).control.at_end = True

    assert scene.turn(61.0)
    assert scene.named == [(0, 9)]
    assert scene.lateness.in_the_way
    scene.ranks.of(0).control.at_end = True
    assert not scene.lateness.in_the_way


def test_ranks_that_have_not_said_hello_are_named_a_minute_after_the_first(scene: Scene) -> None:
    scene.attempt.greeted.discard(2)
    scene.turn(59.0)
    assert scene.named == []

    scene.turn(2.0)
    scene.turn(2.0)

    assert scene.named == [(2, None)]
    scene.lateness.begin_again()
    scene.turn(61.0)
    assert scene.named == [(2, None)] * 2, "in another attempt it may be missing too"
