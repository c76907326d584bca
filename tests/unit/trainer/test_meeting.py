"""A rank's side of a meeting: what it says before it goes on, and what follows if its snapshot is dropped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core import messages
from harness.core.policy.meeting import Hold, Place, Where
from harness.ipc.control_page import AgentSide, Command, TrainerSide
from harness.trainer.boundary import Boundary
from harness.trainer.loops import Loops
from harness.trainer.meeting import Meeting


class Page(TrainerSide):
    """A page on which the agent may act while the rank speaks."""

    said: list[Hold]
    agent: AgentSide
    then: Command | None = None
    as_it_waits: list[Callable[[], None]]
    as_it_passes: Callable[[], None] | None = None
    as_it_speaks: Callable[[Hold], None] | None = None

    def say(self, news: int, hold: Hold, *, entering: bool = False, passed: int = 0) -> None:
        super().say(news, hold, entering=entering, passed=passed)
        self.said.append(hold)
        if hold is Hold.NONE and self.then is not None:
            self.agent.command(self.then)
        if hold is Hold.LAST and self.as_it_waits:
            self.as_it_waits.pop(0)()
        if hold is Hold.PASSED and self.as_it_passes is not None:
            self.as_it_passes()
        if self.as_it_speaks is not None:
            self.as_it_speaks(hold)


@dataclass
class Link:
    page: Page
    gone: bool = False
    sent: list[tuple[messages.AnyMessage, bool]] = field(default_factory=list)

    def check_meeting(self) -> None:
        pass

    def send(self, message: messages.AnyMessage, *, repeat: bool = False) -> None:
        self.sent.append((message, repeat))

    def forget(self, kind: type[messages.AnyMessage]) -> None:
        pass


@dataclass
class Saver:
    """What a stager knows, and what saving does."""

    boundary: Boundary
    durable: bool = True
    planned: bool = True
    pending: bool = False
    sealed_step: int | None = None
    waited: int = 0
    seals: int = 0
    compared: list[bool] = field(default_factory=list)
    as_it_waits: Callable[[], None] | None = None
    is_void: Callable[[int], bool] = bool

    def plan(self, step: int) -> None:
        pass

    def take(self, *, overlap: bool, compares: bool) -> bool:
        self.sealed_step = self.boundary.step
        self.compared.append(compares)
        self.seals += 1
        return True

    def take_waiting(self, news: int, *, compares: bool) -> None:
        act, self.as_it_waits = self.as_it_waits, None
        if act is None:
            self.take(overlap=False, compares=compares)
        else:
            act()

    def forget_void(self) -> None:
        if self.is_void(self.seals):
            self.sealed_step = None

    def wait_durable(self) -> bool:
        self.waited += 1
        return self.durable


class Scene:
    """A rank at the boundary of step 7."""

    def __init__(self) -> None:
        self.agent = AgentSide.create()
        page = Page(os.dup(self.agent.fd))
        page.said, page.agent, page.as_it_waits = [], self.agent, []
        self.page, self.link = page, Link(page)
        self.boundary = Boundary(accumulate=None, sees_optimizers=True)
        self.boundary.step = 7
        self.saver = Saver(self.boundary, is_void=page.is_void)
        self.meeting = Meeting(self.link, self.saver, self.saver, self.boundary, print)  # type: ignore[arg-type]

    def attend(self) -> bool:
        return self.meeting.attend(overlap=False)

    def close(self) -> None:
        self.page.close()
        self.agent.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_a_rank_says_that_it_goes_on_before_it_does(scene: Scene) -> None:
    scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(9))

    assert not scene.attend()

    assert scene.page.said == [Hold.NONE]
    assert scene.boundary.next_due == 9


def test_a_rank_that_is_told_otherwise_as_it_says_so_does_not_go_on(scene: Scene) -> None:
    scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(9))
    scene.page.then = Command.LEAVE

    assert scene.attend()


def test_a_rank_that_waits_for_a_slot_goes_on_to_a_step_that_is_asked_for_meanwhile(scene: Scene) -> None:
    """The others are there already, and hang in a collective without it."""
    scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(7))
    scene.saver.as_it_waits = lambda: scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(8))

    assert not scene.attend()

    assert scene.page.said == [Hold.NONE], "it has not said that it is beyond the step"
    assert scene.boundary.next_due == 8


def test_a_snapshot_that_is_dropped_is_wanted_again(scene: Scene) -> None:
    """The program waits until one is durable: the next one is."""
    scene.meeting.want(wait=True)
    assert scene.link.sent == [(messages.SaveWanted(), True)]
    scene.saver.durable = False
    scene.agent.command(Command.SNAPSHOT, at=Place(7))

    assert not scene.attend()

    assert scene.saver.waited == 1
    assert scene.boundary.waits
    assert scene.link.sent == 2 * [(messages.SaveWanted(), True)]


@pytest.mark.parametrize(
    ("command", "is_compared"),
    [(Command.SNAPSHOT, False), (Command.SNAPSHOT_AND_COMPARE, True), (Command.SNAPSHOT_AND_LEAVE, True)],
)
def test_what_a_wrapper_keeps_equal_is_compared_as_all_leave(scene: Scene, command: Command, is_compared: bool) -> None:
    """No later snapshot would show that it is not."""
    scene.agent.command(command, at=Place(7))
    scene.page.as_it_speaks = lambda hold: scene.agent.command(Command.LEAVE)

    scene.attend()

    assert scene.saver.compared == [is_compared]


def test_what_all_leave_with_is_sealed_again_if_it_is_dropped(scene: Scene) -> None:
    """Ranks differ in it: no step is to follow in which that could be mended."""

    def drop(hold: Hold) -> None:
        if hold is Hold.HOLDS and scene.saver.seals == 1:
            scene.agent.tell_void(1)
            scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(7))
        elif hold is Hold.HOLDS:
            scene.agent.command(Command.LEAVE)

    scene.page.as_it_speaks = drop
    scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(7))

    assert scene.attend()

    assert scene.saver.seals == 2
    assert Hold.PASSED not in scene.page.said


def test_what_is_sealed_as_the_rank_is_asked_again_counts_if_it_is_not_dropped(scene: Scene) -> None:
    """It had heard what it stores from then on before it saw the new word."""

    def ask(hold: Hold) -> None:
        again = len(scene.page.said) == 1
        scene.agent.command(Command.SNAPSHOT_AND_LEAVE if again else Command.LEAVE, at=Place(7))

    scene.page.as_it_speaks = ask
    scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(7))

    assert scene.attend()

    assert (scene.page.said, scene.saver.seals) == ([Hold.HOLDS] * 2, 1)


# ---- validations -----------------------------------------------------------------------------------------------------


def test_a_rank_before_a_validation_looks_again_behind_it(scene: Scene) -> None:
    scene.agent.command(Command.SNAPSHOT, at=Place(7, Where.AFTER, 1))

    assert not scene.meeting.attend(overlap=False, entering=True)
    assert (scene.page.said, scene.saver.seals) == ([Hold.NONE], 0)
    assert scene.page.news != scene.boundary.seen, "the next place decides, whatever its step is"

    scene.boundary.enter()
    assert not scene.attend()
    assert scene.saver.seals == 1


def test_a_rank_that_has_entered_more_than_was_agreed_says_that_it_is_beyond(scene: Scene) -> None:
    scene.boundary.enter()
    scene.agent.command(Command.SNAPSHOT, at=Place(7, Where.AFTER, 0))

    assert not scene.attend()

    assert (scene.page.said, scene.saver.seals) == ([Hold.PASSED], 0)
    assert (scene.agent.said.passed, scene.agent.said.entering) == (1, False)


def test_a_rank_at_its_end_that_is_beyond_the_place_waits_to_be_asked_again(scene: Scene) -> None:
    scene.boundary.enter()
    scene.agent.command(Command.SNAPSHOT, at=Place(7, Where.AFTER, 0))
    scene.page.as_it_passes = lambda: scene.agent.command(Command.SNAPSHOT, at=Place(7, Where.AFTER, 1))
    scene.page.as_it_waits = [lambda: scene.agent.tell_set(7)]

    assert not scene.meeting.attend_last()

    assert (scene.page.said[0], scene.saver.seals) == (Hold.PASSED, 1)


def test_validations_are_counted_anew_at_each_step(scene: Scene) -> None:
    scene.boundary.enter()
    scene.boundary.enter()
    assert scene.boundary.passed == 2

    scene.boundary.step += 1

    assert scene.boundary.passed == 0


# ---- the last step --------------------------------------------------------------------------------------------------


def test_a_rank_does_not_end_before_all_have_sealed_the_last_step(scene: Scene) -> None:
    scene.agent.command(Command.SNAPSHOT, at=Place(7))
    scene.page.as_it_waits = [
        lambda: None,
        lambda: scene.agent.command(Command.NOTHING),
        lambda: scene.agent.tell_set(7),
    ]

    assert not scene.meeting.attend_last()

    assert scene.page.as_it_waits == []
    assert (scene.saver.seals, scene.saver.compared) == (1, [True])


def test_a_last_step_whose_seal_is_dropped_is_sealed_again(scene: Scene) -> None:
    def drop() -> None:
        scene.agent.tell_void(1)
        scene.agent.command(Command.SNAPSHOT, at=Place(7))

    scene.agent.command(Command.SNAPSHOT, at=Place(7))
    scene.page.as_it_waits = [drop, lambda: scene.agent.tell_set(7)]

    assert not scene.meeting.attend_last()

    assert scene.saver.seals == 2
    assert Hold.PASSED not in scene.page.said


def test_a_last_step_that_all_have_sealed_before_is_not_sealed_again(scene: Scene) -> None:
    scene.agent.command(Command.SNAPSHOT, at=Place(7))
    assert not scene.attend()
    scene.agent.tell_set(7)

    assert not scene.meeting.attend_last()

    assert (scene.saver.seals, scene.link.sent) == (1, [])


def test_a_rank_at_its_end_leaves_when_it_is_told_though_others_have_not_sealed(scene: Scene) -> None:
    scene.agent.command(Command.SNAPSHOT_AND_LEAVE, at=Place(7))
    scene.page.as_it_waits = [lambda: scene.agent.command(Command.LEAVE)]

    assert scene.meeting.attend_last()


def test_a_rank_that_learns_late_what_it_stores_looks_again_at_the_next_boundary(scene: Scene) -> None:
    scene.agent.command(Command.NOTHING)
    scene.saver.planned = False

    assert not scene.attend()

    assert scene.boundary.next_due == 8


# ---- a loop that is left early ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breaks_off", "requested", "done"),
    [(True, True, ["saves"]), (True, False, ["tells"]), (False, True, []), (False, False, [])],
)
def test_a_rank_that_breaks_off_without_a_snapshot_tells_that_it_has_left_its_loop(
    breaks_off: bool, requested: bool, done: list[str]
) -> None:
    """An exception is told as such: others that wait for this rank begin again with it."""
    found: list[str] = []
    loops: Any = SimpleNamespace(
        _training=SimpleNamespace(
            inert=False,
            interrupted=False,
            save_as_it_leaves=lambda completed: found.append("saves"),
            note_left=lambda: found.append("tells"),
        ),
        _replay=SimpleNamespace(early=True, restored=True),
        _boundary=SimpleNamespace(requested=requested),
    )

    Loops._save_as_it_leaves(loops, 3, breaks_off=breaks_off)

    assert found == done
