"""A fleet in words: nothing that is not known is said, and nothing that is known is left out."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from cloud.aws.console import Activity, Group, Member
from harness.fleet.costs import Bill, Offer
from harness.fleet.fleet import Looked, Planned
from harness.fleet.screen import fleets, plan_in_words, screen, to_json

NOON = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)
MEMBER = Member("i-1", "g6.xlarge", "eu-west-1a", "InService")
GROUP = Group("harness-gpt", 1, (MEMBER,), {"harness-run": "gpt", "harness-store": "s3://b/checkpoints"})
BILL = Bill(machines=3, paid_s=7200, usd=0.7, on_demand_usd=2.0, interruptions=2, idle_s=600, idle_usd=0.05, unpriced=0)
PROGRESS: dict[str, Any] = {
    "durable_step": 1200,
    "step": 1234,
    "generation": 3,
    "state": "not running here",
    "ended_at": None,
}


def planned(**changed: Any) -> dict[str, object]:
    known: dict[str, Any] = {
        "changes": ["command: default -> \"python a.py\"", "max_size: 2 -> 3"],
        "counts": {"add": 30, "change": 0, "destroy": 0},
        "types": ["g6.xlarge", "g5.xlarge"],
        "offers": [Offer("g5.xlarge", {"a": 0.4}, 1.0), Offer("g6.xlarge", {"a": 0.3, "b": 0.6}, None)],
        "desired": 1, "ringing": [], "on_demand_percentage": 0, "boot_s": None, "why_no_prices": "",
    }  # fmt: skip
    return dict(plan_in_words(Planned(**{**known, **changed})))


def looked(**changed: Any) -> Looked:
    known: dict[str, Any] = {
        "group": GROUP, "activities": [], "alarms": {}, "bill": BILL, "strangers": 0, "notes": [],
    }  # fmt: skip
    return Looked(**{**known, **changed})


def test_before_anything_is_bought_its_price_is_told() -> None:
    told = planned()

    assert told["change 2"] == "max_size: 2 -> 3"
    assert told["plan"] == "30 to add, 0 to change, 0 to destroy"
    assert told["price 2"] == "g6.xlarge an hour: a $0.3000, b $0.6000; on demand unknown"
    assert str(told["expected"]).startswith("$0.3000 to $0.6000 an hour")
    assert told["interruption"] == (
        "costs the boot of the next instance, 0.5 to 1 cents a minute; how long that takes is not known yet"
    )


def test_an_alarm_that_would_undo_the_start_is_told_before_it() -> None:
    assert planned(ringing=["no-progress"])["wait"] == (
        "the alarm no-progress still rings, and sets the group to zero each minute until it is OK again"
    )
    assert "wait" not in planned()
    assert "wait" not in planned(ringing=["no-progress"], desired=0)


def test_an_interruption_costs_what_this_run_s_boots_have_shown() -> None:
    assert planned(boot_s=360.0)["interruption"] == (
        "costs $0.0300 to $0.0600: from a launch to the next step it took 6.0 min (median of this run)"
    )


@pytest.mark.parametrize(
    ("changed", "absent", "present"),
    [
        ({"desired": 0}, "expected", "no instances are wanted"),
        ({"offers": [], "why_no_prices": "not allowed"}, "expected", "not every price is known: not allowed"),
        ({"on_demand_percentage": 20}, "nothing", "20 % of the instances are bought at the on-demand price"),
    ],
)
def test_what_is_not_known_is_not_told(changed: dict[str, Any], absent: str, present: str) -> None:
    told = planned(**changed)

    assert absent not in told
    assert present in told.values()


def test_what_it_has_cost_is_compared_with_on_demand() -> None:
    told = dict(screen(looked(), PROGRESS))

    assert told["fleet"] == "harness-gpt wants 1: i-1 (g6.xlarge, eu-west-1a, InService)"
    assert told["run"] == "start 3, at step 1 234 when last heard; step 1 200 is durable"
    assert told["paid"] == (
        "about $0.7000 for 2.00 hours of 3 instances; on demand it would have been $2.00 (saved: 65 %)"
    )
    assert told["interruptions"] == "2, for which 10.0 min were paid before the next step: about $0.0500"


def test_a_launch_that_failed_and_an_alarm_that_rings_are_told() -> None:
    failed = Activity(NOON, NOON, None, launch=True, failed=True, words="Launching: MaxSpotInstanceCountExceeded")
    done = Activity(NOON, NOON, "i-1", launch=True, failed=False, words="Launching i-1")

    found = looked(activities=[done, failed], alarms={"no-progress": "ALARM", "never-ready": "OK"}, strangers=2)
    told = dict(screen(found, None))

    assert told["group 1"] == "12:00:00 failed: Launching: MaxSpotInstanceCountExceeded"
    assert "group 2" not in told
    assert told["alarms"] == "no-progress"
    assert told["never trained"] == "2 instances, which are not in the sum"
    assert told["run"] == "nothing is in its store yet"


def test_machines_read_the_same() -> None:
    running = Activity(NOON, None, "i-1", launch=True, failed=False, words="Launching i-1")

    found = to_json(looked(activities=[running]), PROGRESS)

    assert found["group"]["members"][0]["id"] == "i-1"
    assert found["bill"]["usd"] == 0.7
    assert found["activities"][0]["ended_at"] is None
    assert fleets([GROUP]) == [
        {"run": "gpt", "wants": 1, "instances": "i-1 g6.xlarge eu-west-1a InService", "store": "s3://b/checkpoints"}
    ]
