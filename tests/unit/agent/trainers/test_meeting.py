"""The agent's side of a meeting: when all may leave where they stand, and when a step is missed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.agent.save.slot_pool import SlotPool
from harness.agent.trainers import meeting as module
from harness.agent.trainers.control import TrainerControl
from harness.agent.trainers.meeting import SEEN_S, Meeting
from harness.core.policy.meeting import Hold
from harness.ipc.control_page import Command, TrainerSide


class Scene:
    """Two ranks, asked to take a snapshot and leave; a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        pool = SlotPool()
        controls = [TrainerControl(pool, rank) for rank in range(2)]
        self.pages = [TrainerSide(os.dup(control.page_fd)) for control in controls]
        self.meeting = Meeting(lambda: controls)
        self.meeting.ask(Command.SNAPSHOT_AND_LEAVE)
        self.now += 2 * SEEN_S

    def say(self, step: int, *holds: Hold) -> None:
        """What each rank says at a boundary about the present command; `NONE` for one that is on its way."""
        for page, hold in zip(self.pages, holds, strict=True):
            page.completed(step)
            page.say(page.news, hold)

    def close(self) -> None:
        for page in self.pages:
            page.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.close()


def test_all_that_wait_at_a_step_that_is_sealed_may_leave_there(scene: Scene) -> None:
    scene.say(7, Hold.HOLDS, Hold.HOLDS)

    assert not scene.meeting.all_stand(None)
    assert not scene.meeting.all_stand(6)
    assert scene.meeting.all_stand(7)


def test_a_rank_that_was_told_to_go_on_may_be_on_its_way(scene: Scene) -> None:
    """It had said that it waits, and the others left: it hung in a collective, without them."""
    scene.say(7, Hold.HOLDS, Hold.NONE)
    assert scene.meeting.turn(sealed=7) == 8
    asked = [page.news for page in scene.pages]
    scene.say(7, Hold.HOLDS, Hold.HOLDS)

    assert not scene.meeting.all_stand(7), "one of them may have seen the step by now"
    assert [page.news for page in scene.pages] != asked, "they are asked anew"
    assert not scene.meeting.all_stand(7), "that may not be seen yet"

    scene.now += 2 * SEEN_S
    scene.pages[1].say(asked[1], Hold.NONE)  # about the step that was agreed before
    assert not scene.meeting.all_stand(7)
    assert scene.meeting.turn(sealed=7) == 8


def test_ranks_that_stand_for_long_leave_without_saying_it_again(scene: Scene) -> None:
    """In a validation a rank looks seldom."""
    scene.say(7, Hold.HOLDS, Hold.NONE)
    assert scene.meeting.turn(sealed=7) == 8
    scene.say(7, Hold.HOLDS, Hold.HOLDS)
    assert not scene.meeting.all_stand(7)

    scene.now += 2 * SEEN_S

    assert scene.meeting.all_stand(7)


def test_a_step_that_a_rank_has_passed_is_missed_once_and_all_are_asked_again(scene: Scene) -> None:
    assert scene.meeting.take_missed() is None
    scene.say(7, Hold.HOLDS, Hold.NONE)
    assert scene.meeting.turn(sealed=None) == 8
    assert scene.meeting.take_missed() is None
    asked = [page.news for page in scene.pages]

    scene.say(9, Hold.HOLDS, Hold.PASSED)

    assert scene.meeting.take_missed() == 8
    assert scene.meeting.take_missed() is None
    assert [page.news for page in scene.pages] != asked
    assert scene.meeting.agreed is None


def test_a_step_is_given_up_until_it_is_agreed_again(scene: Scene) -> None:
    scene.say(7, Hold.HOLDS, Hold.NONE)
    assert scene.meeting.turn(sealed=None) == 8
    assert scene.meeting.given_up is None

    scene.meeting.ask_again()

    assert scene.meeting.given_up == 8
    scene.now += 2 * SEEN_S
    scene.say(8, Hold.HOLDS, Hold.HOLDS)
    assert scene.meeting.turn(sealed=None) == 8
    assert scene.meeting.given_up is None


def test_what_was_sealed_for_an_earlier_ask_is_not_what_ranks_leave_with(scene: Scene) -> None:
    """They had gone on from it before they saw the ask to leave, and the step since would be lost."""
    assert not scene.meeting.sealed(7)
    assert scene.meeting.is_open

    scene.say(8, Hold.HOLDS, Hold.HOLDS)
    assert scene.meeting.turn(sealed=7) == 8
    assert not scene.meeting.sealed(7)
    assert scene.meeting.sealed(8)
    assert not scene.meeting.is_open


def test_ranks_that_were_not_asked_to_leave_go_on(scene: Scene) -> None:
    scene.meeting.ask(Command.SNAPSHOT)

    assert not scene.meeting.sealed(7)

    assert not scene.meeting.is_open


def test_what_all_have_sealed_in_vain_as_they_leave_is_sealed_again_where_they_stand(scene: Scene) -> None:
    scene.say(7, Hold.HOLDS, Hold.NONE)
    scene.meeting.turn(sealed=7)
    place = scene.pages[0].agreed(scene.pages[0].news)

    assert scene.meeting.sealed_in_vain(8)
    scene.meeting.ask_again()

    assert scene.meeting.agreed == 8
    assert [page.agreed(page.news) for page in scene.pages] == [place, place]
    assert scene.meeting.sealed(8)


def test_what_all_have_sealed_in_vain_as_they_train_is_behind_them(scene: Scene) -> None:
    scene.meeting.ask(Command.SNAPSHOT)
    assert not scene.meeting.sealed_in_vain(8)
    assert not scene.meeting.is_open
