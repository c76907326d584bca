"""What the fleet is told while a run is under way, and when."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from cloud.errors import Denied
from cloud.notice import Deadline, Notice, NoticeKind
from harness.core.messages import RunState, Status
from harness.node.context import Context
from harness.node.fleet_reporter import FleetReporter
from harness.node.notices import Notices, Outlook
from tests.support.clock import FakeClock
from tests.support.node import RUNNING, FakeFleet, FakeSource


class Watched:
    """A watch, and what it looks at."""

    def __init__(self) -> None:
        self.clock, self.fleet = FakeClock(), FakeFleet()
        self.source = FakeSource(self.clock)
        self.status: Status | None = None
        self.said: list[str] = []
        fleet: Any = self.fleet
        announcements = Notices((self.source,), self.clock)
        signals: Any = None
        self.context = Context("a", signals, self.said.append, self.clock)
        self.reporter = FleetReporter(self.context, fleet, announcements, lambda: self.status)

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.reporter.tick()
            self.clock.advance(1.0)

    def protections(self) -> list[bool]:
        return [call[1] for call in self.fleet.calls if call[0] == "protect"]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def durable_steps(watched: Watched) -> list[float]:
    return [values["DurableSteps"] for values in watched.fleet.measured()]


def test_the_age_of_the_last_durable_commit_is_measured_every_minute(watched: Watched) -> None:
    watched.reporter.started()
    watched.status = replace(RUNNING, durable_age_s=7.0)
    watched.pass_time(121)

    assert watched.fleet.measured() == [
        {"DurableAgeSeconds": 0.0, "DurableSteps": 0, "Starts": 1, "Ready": 1},  # it knows of nothing before itself
        {"DurableAgeSeconds": 7.0, "DurableSteps": 0},
        {"DurableAgeSeconds": 7.0, "DurableSteps": 0},
    ]


def test_without_a_durable_commit_the_age_counts_from_the_start(watched: Watched) -> None:
    watched.status = RUNNING
    watched.pass_time(61)

    assert [values["DurableAgeSeconds"] for values in watched.fleet.measured()] == [0.0, 60.0]


def test_the_age_goes_on_while_no_agent_answers(watched: Watched) -> None:
    watched.status = replace(RUNNING, durable_age_s=0.0)
    watched.pass_time(31)
    watched.status = None
    watched.pass_time(91)

    assert watched.fleet.measured()[-1]["DurableAgeSeconds"] == 90.0


def test_a_start_and_a_failed_one_are_counted_once(watched: Watched) -> None:
    watched.reporter.started()
    watched.pass_time(3)
    watched.reporter.ended(failed=True)
    watched.reporter.started()
    watched.pass_time(3)
    watched.reporter.ended(failed=False)

    assert sum(values.get("Starts", 0) for values in watched.fleet.measured()) == 2
    assert sum(values.get("FailedStarts", 0) for values in watched.fleet.measured()) == 1


def test_what_could_not_be_told_is_told_later(watched: Watched) -> None:
    watched.fleet.failing = {"measure": Denied("cloudwatch:PutMetricData is missing")}
    watched.reporter.started()
    watched.pass_time(61)
    watched.fleet.failing = {}
    watched.pass_time(60)

    assert watched.fleet.measured()[-1]["Starts"] == 1
    assert len(watched.said) == 1, "a failure is said once"


@pytest.mark.parametrize(
    ("status", "protected"),
    [
        (RUNNING, False),
        (replace(RUNNING, state=RunState.DRAINING), True),
        (replace(RUNNING, finished_step=20, everything_durable=False), True),
        (replace(RUNNING, finished_step=20, everything_durable=True), False),
        (replace(RUNNING, finished_step=None, everything_durable=False), False),
    ],
)
def test_the_instance_is_protected_while_the_last_snapshot_is_being_saved(
    watched: Watched, status: Status, protected: bool
) -> None:
    watched.status = status
    watched.pass_time(5)

    assert watched.protections() == ([True] if protected else [])


def test_protection_ends_with_the_run(watched: Watched) -> None:
    watched.status = replace(RUNNING, state=RunState.DRAINING)
    watched.pass_time(5)
    watched.reporter.ended(failed=False)

    assert watched.protections() == [True, False]


def test_an_agent_that_is_too_busy_to_answer_is_still_saving(watched: Watched) -> None:
    watched.status = replace(RUNNING, state=RunState.DRAINING)
    watched.pass_time(5)
    watched.status = None
    watched.pass_time(20)

    assert watched.protections() == [True]


def test_an_instance_that_its_group_ends_is_not_protected_from_it_but_keeps_it_waiting(watched: Watched) -> None:
    watched.source.group()
    watched.status = replace(RUNNING, state=RunState.DRAINING)
    watched.pass_time(121)

    assert watched.protections() == []
    assert watched.fleet.names().count("heartbeat") == 3


def test_each_look_costs_one_call_at_most(watched: Watched) -> None:
    watched.reporter.started()
    watched.status = replace(RUNNING, state=RunState.DRAINING)
    for _ in range(200):
        before = len(watched.fleet.calls)
        watched.reporter.tick()
        watched.clock.advance(1.0)
        assert len(watched.fleet.calls) - before <= 1


def test_outside_a_fleet_nobody_is_told_and_no_service_is_asked(watched: Watched) -> None:
    polls: list[float] = []
    watched.source.announces = lambda now: polls.append(now) or ()
    reporter = FleetReporter(watched.context, None, Notices((watched.source,), watched.clock), lambda: RUNNING)
    reporter.started()
    reporter.tick()
    reporter.ended(failed=True)

    assert polls == []
    assert (reporter.generation, reporter.claimed) == (3, True)


# ---- announcements --------------------------------------------------------------------------------------------------


def test_a_drain_file_has_no_end(watched: Watched) -> None:
    deadline = Deadline(2000.0, watched.clock)
    file = Notice("file", NoticeKind.INTERRUPT, "drain file", deadline, while_it_stands=True)
    watched.source.announces = lambda now: (file,)
    announcements = Notices((watched.source,), watched.clock)

    assert announcements.look() == Outlook(float("inf"))


def test_the_latest_end_counts(watched: Watched) -> None:
    other = FakeSource(watched.clock)
    other.name = "other"
    watched.source.spot(ends_at=2000.0)
    other.spot(ends_at=1500.0)

    assert Notices((watched.source, other), watched.clock).look() == Outlook(2000.0)


def test_what_was_announced_before_is_forgotten_what_is_in_force_is_not(watched: Watched) -> None:
    watched.source.spot(ends_at=2000.0)
    announcements = Notices((watched.source,), watched.clock)
    announcements.look()
    announcements.forget()
    assert not announcements.seen

    announcements.look()
    assert announcements.seen


# ---- what the alarms of the fleet count -----------------------------------------------------------------------------


def test_new_durable_steps_are_counted_and_each_once(watched: Watched) -> None:
    watched.status = replace(RUNNING, step=1000, durable_step=1000)  # resumed there
    watched.pass_time(61)
    watched.status = replace(RUNNING, step=1300, durable_step=1200)
    watched.pass_time(60)
    watched.status = replace(RUNNING, step=1350, durable_step=1300)
    watched.pass_time(60)
    watched.pass_time(60)

    assert durable_steps(watched) == [0, 0, 200, 100, 0]


def test_what_an_agent_resumes_from_is_no_progress(watched: Watched) -> None:
    """A fleet that boots again and again, and makes nothing durable, makes none."""
    for _ in range(3):
        watched.reporter.started()
        watched.status = replace(RUNNING, step=None, durable_step=None)
        watched.pass_time(30)
        watched.status = replace(RUNNING, step=None, durable_step=12_000)  # found in the store
        watched.pass_time(30)
        watched.status = replace(RUNNING, step=12_010, durable_step=12_000)
        watched.pass_time(61)

    assert sum(durable_steps(watched)) == 0


def test_the_first_snapshot_of_a_new_run_is_progress(watched: Watched) -> None:
    watched.status = replace(RUNNING, step=0, durable_step=None)
    watched.pass_time(10)
    watched.status = replace(RUNNING, step=320, durable_step=300)
    watched.pass_time(120)

    assert sum(durable_steps(watched)) == 300


def test_steps_that_could_not_be_told_are_told_later(watched: Watched) -> None:
    watched.status = replace(RUNNING, step=0, durable_step=None)
    watched.pass_time(10)
    watched.fleet.failing = {"measure": Denied("no")}
    watched.status = replace(RUNNING, step=320, durable_step=300)
    watched.pass_time(120)
    watched.fleet.failing = {}
    watched.pass_time(120)

    assert durable_steps(watched)[-2:] == [300, 0]


def test_the_launch_is_over_when_the_run_is_taken_over_and_that_is_counted_once(watched: Watched) -> None:
    watched.fleet.launching = True
    watched.reporter.started()
    watched.status = replace(RUNNING, claimed=False, step=None)
    watched.pass_time(100)
    assert "ready" not in watched.fleet.names()

    watched.status = replace(RUNNING, claimed=True, step=None)
    watched.pass_time(100)
    watched.reporter.started()
    watched.pass_time(100)

    assert watched.fleet.names().count("ready") == 1
    assert sum(values.get("Ready", 0) for values in watched.fleet.measured()) == 1


def test_a_launch_whose_end_cannot_be_told_is_told_again(watched: Watched) -> None:
    watched.fleet.launching = True
    watched.fleet.failing = {"ready": Denied("no")}
    watched.status = RUNNING
    watched.pass_time(10)
    assert watched.fleet.launching
    watched.fleet.failing = {}
    watched.pass_time(10)

    assert not watched.fleet.launching
