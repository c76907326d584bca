from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from cloud.errors import CloudError, Unavailable
from cloud.notice import Notice, NoticeKind
from harness.agent.notices import poller as module
from harness.agent.notices.poller import Poller
from harness.core import events
from tests.support.clock import FakeClock
from tests.support.patience import HANG_S

SPOT = Notice("spot-1", NoticeKind.INTERRUPT, "ec2 spot", None)
OTHER = Notice("spot-2", NoticeKind.INTERRUPT, "ec2 spot", None)


class Source:
    """Announces what a test puts into `now`."""

    lead_s: float | None = None
    expected = True

    def __init__(self, name: str = "ec2") -> None:
        self.name, self.now, self.polls, self.closed = name, list[Notice](), 0, 0
        self.error: Exception | None = None

    def poll(self) -> Sequence[Notice]:
        self.polls += 1
        if self.error is not None:
            raise self.error
        return list(self.now)

    def close(self) -> None:
        self.closed += 1


class Scene:
    def __init__(self, *sources: Source) -> None:
        self.clock, self.told = FakeClock(), list[object]()
        self.poller = Poller(
            sources,
            self.told.append,
            lambda notice: self.told.append(("notice", notice.id)),
            lambda notice: self.told.append(("withdrawn", notice.id)),
            self.told.append,
            clock=self.clock,
        )

    def tick(self, seconds: float = 1.0) -> list[object]:
        """What a turn had to tell."""
        before = len(self.told)
        self.poller.tick()
        self.clock.advance(seconds)
        return self.told[before:]


def test_a_notice_is_told_once_however_often_it_is_seen() -> None:
    source = Source()
    scene = Scene(source)
    assert scene.tick() == []

    source.now = [SPOT]
    assert scene.tick() == [("notice", "spot-1")]
    assert scene.tick() == []
    source.now = [SPOT, OTHER]
    assert scene.tick() == [("notice", "spot-2")]


def test_a_notice_that_is_in_force_at_the_start_is_told() -> None:
    source = Source()
    source.now = [SPOT]

    assert ("notice", "spot-1") in Scene(source).tick()


def test_a_withdrawn_notice_is_told_once_and_may_come_again() -> None:
    source = Source()
    source.now = [SPOT]
    scene = Scene(source)
    scene.tick()
    source.now = []
    assert scene.tick() == [("withdrawn", "spot-1")]
    assert scene.tick() == []
    source.now = [SPOT]
    assert scene.tick() == [("notice", "spot-1")]


def test_a_failed_question_withdraws_nothing() -> None:
    source = Source()
    source.now = [SPOT]
    scene = Scene(source)
    scene.tick()
    source.error = Unavailable("down")
    assert scene.tick() == []
    source.error = None
    assert scene.tick() == []


def test_a_source_that_fails_for_5_s_is_said_to_be_blind_once_and_said_when_it_is_back() -> None:
    source = Source()
    scene = Scene(source)
    scene.tick()
    source.error = Unavailable("down")

    told = [scene.tick() for _ in range(8)]

    assert told[:5] == [[]] * 5
    assert told[5] == [events.SourceBlind(source="ec2", reason="down")]
    assert told[6:] == [[], []]
    assert scene.poller.unreachable == ("ec2",)
    source.error = None
    assert [event for _ in range(6) for event in scene.tick()] == [events.SourceBack(source="ec2")]
    assert scene.poller.unreachable == ()


def test_a_short_failure_is_no_news() -> None:
    source = Source()
    scene = Scene(source)
    scene.tick()
    for _ in range(10):
        source.error = Unavailable("hiccup")
        assert [scene.tick() for _ in range(4)] == [[]] * 4
        source.error = None
        assert scene.tick() == []


def test_a_blind_source_is_asked_less_often_and_never_given_up() -> None:
    source = Source()
    source.error = Unavailable("no such service")
    scene = Scene(source)
    for _ in range(3600):
        scene.tick()

    assert 3600 / 5 - 2 <= source.polls <= 3600 / 5 + 10


def test_a_source_that_fails_does_not_hide_another() -> None:
    bad, good = Source("bad"), Source("good")
    bad.error, good.now = CloudError("for good"), [SPOT]
    scene = Scene(bad, good)

    assert ("notice", "spot-1") in scene.tick()
    for _ in range(20):
        scene.tick()
    good.now = [SPOT, OTHER]
    assert ("notice", "spot-2") in scene.tick()


def test_two_sources_may_announce_the_same_id() -> None:
    one, other = Source("one"), Source("other")
    one.now = other.now = [SPOT]
    scene = Scene(one, other)
    assert scene.tick().count(("notice", "spot-1")) == 2

    one.now = []
    assert scene.tick() == [("withdrawn", "spot-1")]


def running(scene: Scene, wait: Callable[[], bool]) -> bool:
    scene.poller.start()
    try:
        return wait()
    finally:
        scene.poller.close()


def test_closing_closes_every_source_and_ends_the_thread() -> None:
    one, other = Source("one"), Source("other")
    scene = Scene(one, other)
    scene.poller.start()
    scene.poller.close()

    assert (one.closed, other.closed) == (1, 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("harness-poller")]


def test_a_bug_in_a_source_ends_the_agent_loudly() -> None:
    source, ended = Source(), threading.Event()
    source.error = KeyError("bug")
    scene = Scene(source)
    scene.poller._on_bug = lambda bug: ended.set()

    assert running(scene, lambda: ended.wait(HANG_S))


def test_a_source_that_should_not_answer_here_is_not_missed_until_it_has_answered() -> None:
    """Off the cloud, `harness status` warned of a metadata service that nobody has there."""
    source = Source()
    source.expected, source.error = False, Unavailable("no route to host")
    scene = Scene(source)

    told = [event for _ in range(8) for event in scene.tick()]
    assert told == [events.SourceBlind(source="ec2", reason="no route to host", expected=False)]
    assert scene.poller.unreachable == ()

    source.error = None
    for _ in range(8):
        scene.tick()
    source.error = Unavailable("down")
    told = [event for _ in range(8) for event in scene.tick()]
    assert told == [events.SourceBlind(source="ec2", reason="down")]
    assert scene.poller.unreachable == ("ec2",)


def test_what_a_notice_leaves_is_what_the_sources_that_answer_say() -> None:
    drain_file, ec2 = Source("drain file"), Source()
    ec2.lead_s, ec2.error = 120.0, Unavailable("down")
    scene = Scene(drain_file, ec2)
    scene.tick()
    assert scene.poller.lead_s is None

    ec2.error = None
    scene.tick()
    assert scene.poller.lead_s == 120.0


class Hanging(Source):
    """Does not come back from a question until it is let go: a mount whose server is gone, a service that drips."""

    def __init__(self) -> None:
        super().__init__("hanging")
        self.asked, self.let_go = threading.Event(), threading.Event()

    def poll(self) -> Sequence[Notice]:
        self.asked.set()
        self.let_go.wait()
        return super().poll()


def test_a_source_that_hangs_hides_no_other_and_is_said_to_be_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notice, and SIGTERM too, waited for it: the training went on until somebody killed it."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    hanging, good, heard, back = Hanging(), Source("good"), threading.Event(), threading.Event()
    scene = Scene(hanging, good)
    scene.poller._on_notice = lambda notice: heard.set()
    told, scene.poller._emit = scene.told, lambda event: (scene.told.append(event), back.set())[0]
    scene.poller.start()
    try:
        assert hanging.asked.wait(HANG_S)
        good.now = [SPOT]
        assert heard.wait(HANG_S)
        scene.poller.tell_silence()
        assert scene.poller.unreachable == ()
        scene.clock.advance(module.BLIND_AFTER_S)
        scene.poller.tell_silence()
        scene.poller.tell_silence()
        assert told == [events.SourceBlind(source="hanging", reason="no answer for 5 s")]
        assert scene.poller.unreachable == ("hanging",)
        back.clear()
        hanging.let_go.set()
        assert back.wait(HANG_S)
        assert told[1:] == [events.SourceBack(source="hanging")]
    finally:
        hanging.let_go.set()
        scene.poller.close()


def test_closing_waits_for_no_source_that_hangs() -> None:
    hanging = Hanging()
    scene = Scene(hanging)
    scene.poller.start()
    assert hanging.asked.wait(HANG_S)

    scene.poller.close(0.0)

    assert hanging.closed == 1
    hanging.let_go.set()
