"""When ranks are ended that others have left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.agent.trainers import siblings as module
from harness.agent.trainers.ranks import Rank
from harness.agent.trainers.siblings import Siblings
from harness.config.settings import Settings
from harness.core.policy.meeting import Hold
from harness.ipc.control_page import Command
from tests.support.context import Posts, a_context
from tests.support.played_ranks import PlayedRanks


class Scene:
    """Two ranks, of which the second has ended well; a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "kill", lambda pidfd: None)
        monkeypatch.setattr(module, "pidfd_dead", lambda pidfd: True)
        self.played = PlayedRanks(a_context(Settings(store="memory", run="run"), Posts()), 2)
        self.siblings = Siblings(self.played.ranks, self._on_dead)
        ended = self.played.ranks.of(1).connection
        assert ended is not None
        ended.said_bye = True
        self.played.ranks.of(1).connection = None
        self.siblings.note_ended(ended)

    def _on_dead(self, rank: Rank) -> None:
        rank.connection = None

    def lives(self, after_s: float, *, leaving: bool, saved: bool = True, finished: bool = False) -> bool:
        """Whether the first rank is left alone after so many more seconds."""
        self.now += after_s
        self.siblings.end_in_time(leaving=leaving, saved=saved, finished=finished)
        return bool(self.played.ranks.connections)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.played.close()


def test_a_rank_that_is_alone_has_seconds_from_the_notice_on(scene: Scene) -> None:
    """The other one may have ended long before: that says nothing about this one."""
    assert scene.lives(100.0, leaving=False)
    assert scene.lives(1.0, leaving=True)
    assert scene.lives(4.0, leaving=True)
    assert not scene.lives(2.0, leaving=True)


def test_a_rank_that_works_alone_behind_the_training_has_all_of_the_time(scene: Scene) -> None:
    """As a program of one process has: it evaluates, and writes its result."""
    assert scene.lives(100.0, leaving=True, finished=True)
    assert scene.lives(100.0, leaving=True, finished=True)


def test_a_rank_that_waits_for_one_that_has_ended_is_ended(scene: Scene) -> None:
    scene.played.ranks.meeting.ask(Command.SNAPSHOT)
    page = scene.played.pages[0]
    page.completed(8)
    page.say(page.news, Hold.LAST)
    assert scene.lives(4.0, leaving=False)
    assert not scene.lives(2.0, leaving=False)
