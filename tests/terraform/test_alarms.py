"""The alarms that set a fleet to zero, on recorded metrics: what rings, when, and what never does.

A record has a value by the minute, as CloudWatch has it: the group reports its size every minute; a node reports its
new durable steps every minute while `harness resume` runs, and nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.alarms import Alarm, Minutes, Unknown, evaluate
from tests.support.applied import RUN, Applied

pytestmark = pytest.mark.long("terraform and its provider wait for what they have changed")

STOP_AFTER = 120  # minutes
LAUNCH = 30  # minutes until a launch that is not ready is given up
DAY = 24 * 60


@pytest.fixture(scope="session")
def alarms(applied: Applied) -> dict[str, Alarm]:
    found = applied.client("cloudwatch").describe_alarms()["MetricAlarms"]
    return {alarm["AlarmName"].removeprefix(f"harness-{RUN}-"): Alarm(alarm) for alarm in found}


def always(value: float, minutes: int = DAY) -> Minutes:
    return dict.fromkeys(range(minutes), value)


def at(minutes: Iterable[int], value: float = 1.0) -> dict[int, float]:
    return dict.fromkeys(minutes, value)


class Fleet:
    """What a fleet reports over a day. Nothing is bought, and nothing reported, but for what is added."""

    def __init__(self) -> None:
        self.wanted: dict[int, float] = at(range(DAY))
        self.total: dict[int, float] = at(range(DAY), 0.0)
        self.steps: dict[int, float] = {}
        self.pending: dict[int, float] = at(range(DAY), 0.0)
        self.ready: dict[int, float] = {}

    def instance(self, begin: int, end: int, *, ready_after: int | None = 8, durable_every: int | None = 5) -> Fleet:
        """One that is bought, takes over the run after some minutes (or never), and makes steps durable (or never)."""
        self.total |= at(range(begin, end))
        self.pending |= at(range(begin, end if ready_after is None else min(end, begin + ready_after)))
        if ready_after is not None and begin + ready_after < end:
            self.ready[begin + ready_after] = 1.0
            reported = range(begin + ready_after, end)
            self.steps |= at(reported, 0.0)
            if durable_every is not None:
                self.steps |= at(reported[durable_every::durable_every], 300.0)
        return self

    def stopped_at(self, alarm: Alarm) -> int | None:
        return next(iter(self.ringing(alarm)), None)

    def ringing(self, alarm: Alarm) -> list[int]:
        recorded = {
            "wanted": self.wanted, "total": self.total, "steps": self.steps, "pending": self.pending,
            "ready": self.ready,
        }  # fmt: skip
        ids = {query["Id"] for query in alarm.described["Metrics"] if "MetricStat" in query}
        return alarm.ringing({name: recorded[name] for name in ids}, DAY)


def looping(minutes: int, gap: int, *, until: int = DAY, **how: Any) -> Fleet:
    """Instances that are replaced, each after so many minutes."""
    fleet = Fleet()
    for begin in range(0, until - minutes, minutes + gap):
        fleet.instance(begin, begin + minutes, **how)
    return fleet


NEVER = {
    "a run that makes progress": Fleet().instance(0, DAY),
    "a run that is interrupted every quarter of an hour, and makes progress": looping(15, 3),
    "a first boot that fetches data for an hour": Fleet().instance(0, DAY, ready_after=75, durable_every=5),
    "a snapshot that takes an hour": Fleet().instance(0, DAY, durable_every=60),
    "no capacity all day": Fleet(),
    "no capacity for hours, an instance for one, no capacity": Fleet().instance(600, 660, durable_every=None),
    "a fleet that was stopped": Fleet().instance(0, 90),
}


@pytest.mark.parametrize("what", NEVER)
def test_what_never_stops_a_fleet(alarms: dict[str, Alarm], what: str) -> None:
    assert NEVER[what].stopped_at(alarms["no-progress"]) is None
    if "data for an hour" not in what:  # longer than launch_timeout_s: the group ends such a launch
        assert NEVER[what].stopped_at(alarms["never-ready"]) is None


STOPS = {
    "a boot that never ends": Fleet().instance(0, DAY, ready_after=None),
    "a program that never makes a snapshot": Fleet().instance(0, DAY, durable_every=None),
    "boots again and again, with nothing durable in between": looping(20, 2, durable_every=None),
    "boots again and again that never come so far as to report": looping(20, 2, ready_after=None),
}


@pytest.mark.parametrize("what", STOPS)
def test_what_costs_money_for_nothing_is_stopped_in_time(alarms: dict[str, Alarm], what: str) -> None:
    stopped_at = STOPS[what].stopped_at(alarms["no-progress"])

    assert stopped_at is not None
    assert STOP_AFTER <= stopped_at <= STOP_AFTER + 15


def test_a_run_that_stands_still_after_hours_of_progress_is_stopped(alarms: dict[str, Alarm]) -> None:
    fleet = Fleet().instance(0, DAY)
    fleet.steps |= at(range(601, DAY), 0.0)

    stopped_at = fleet.stopped_at(alarms["no-progress"])

    assert stopped_at is not None
    assert 600 + STOP_AFTER <= stopped_at <= 600 + STOP_AFTER + 30


def test_hours_without_capacity_do_not_count(alarms: dict[str, Alarm]) -> None:
    fleet = Fleet().instance(0, 100, durable_every=None).instance(700, 790, durable_every=None)

    assert fleet.stopped_at(alarms["no-progress"]) is None


def test_three_launches_in_a_row_that_never_became_ready_stop_the_fleet(alarms: dict[str, Alarm]) -> None:
    stopped_at = looping(LAUNCH, 1, ready_after=None).stopped_at(alarms["never-ready"])

    assert stopped_at is not None
    assert 2 * LAUNCH < stopped_at <= 4 * LAUNCH


def test_two_are_no_reason(alarms: dict[str, Alarm]) -> None:
    fleet = looping(LAUNCH, 1, until=2 * LAUNCH + 5, ready_after=None).instance(2 * LAUNCH + 2, DAY)

    assert fleet.stopped_at(alarms["never-ready"]) is None


@pytest.mark.parametrize("name", ["no-progress", "never-ready"])
def test_an_alarm_that_has_stopped_a_fleet_is_over_when_the_group_wants_nothing(
    alarms: dict[str, Alarm], name: str
) -> None:
    """Else it sets the group to zero again each minute, and an owner who has raised it meanwhile learns nothing."""
    fleet = looping(LAUNCH, 1, ready_after=None)
    stopped_at = fleet.stopped_at(alarms[name])
    assert stopped_at is not None

    fleet.wanted |= at(range(stopped_at, stopped_at + 3), 0.0)  # and then it was raised

    assert [minute for minute in fleet.ringing(alarms[name]) if stopped_at < minute <= stopped_at + 100] == []


def test_a_series_without_any_value_counts_as_nothing_in_a_sum() -> None:
    assert evaluate("SUM([steps, 0 * total])", {"steps": {}, "total": {3: 2.0}}, range(5)) == {3: 0.0}


@pytest.mark.parametrize("expression", ["RATE(total)", "total ** 2", "total if total else 0", "other"])
def test_what_the_evaluator_does_not_know_it_refuses(expression: str) -> None:
    with pytest.raises(Unknown):
        evaluate(expression, {"total": {0: 1.0}}, range(1))
