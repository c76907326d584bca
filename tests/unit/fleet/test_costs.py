"""What a fleet costs, by hand-made prices and instances."""

from __future__ import annotations

import datetime

import pytest

from cloud.aws.console import Activity, SpotPrice
from harness.fleet.costs import Machine, bill, boot_s, never_trained, offers, with_activities

MIDNIGHT = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)


def at(hours: float) -> datetime.datetime:
    return MIDNIGHT + datetime.timedelta(hours=hours)


def machine(
    id_: str, began: float, ended: float | None, trained: float | None, *, type_: str = "g6.xlarge", spot: bool = True
) -> Machine:
    moments = [None if hours is None else at(hours) for hours in (ended, trained)]
    return Machine(id_, type_, "a", spot, at(began), *moments)


def price(hours: float, usd: float, zone: str = "a", type_: str = "g6.xlarge") -> SpotPrice:
    return SpotPrice(type_, zone, at(hours), usd)


def activity(
    instance: str | None, began: float, ended: float | None, *, launch: bool, failed: bool = False
) -> Activity:
    return Activity(at(began), None if ended is None else at(ended), instance, launch, failed, "words")


def test_an_instance_pays_each_price_as_long_as_it_holds() -> None:
    # An hour at $1, two at $3, half an hour at $2, and it is still there.
    prices = [price(-5, 1.0), price(3, 2.0), price(1, 3.0), price(0, 9.0, zone="b")]

    found = bill([machine("i-1", 0, None, 0.25)], prices, {"g6.xlarge": 4.0}, at(3.5))

    assert found.usd == pytest.approx(1 * 1 + 2 * 3 + 0.5 * 2)
    assert found.on_demand_usd == pytest.approx(3.5 * 4)
    assert (found.machines, found.interruptions, found.idle_s, found.unpriced) == (1, 0, 0.0, 0)
    assert found.paid_s == 3.5 * 3600


def test_an_interruption_costs_what_the_next_instance_is_paid_before_it_trains() -> None:
    machines = [
        machine("i-1", 0, 2, 0.5),
        machine("i-2", 2, 4, 2.25),
        machine("i-3", 4, 4.5, None),
        machine("i-4", 4.5, 6, 5),
    ]

    found = bill(machines, [price(0, 2.0)], {"g6.xlarge": None}, at(6))

    assert found.interruptions == 2, "the third never trained, and the first is no interruption"
    assert found.idle_s == (0.25 + 0.5) * 3600
    assert found.idle_usd == pytest.approx(0.75 * 2)
    assert found.usd == pytest.approx(6 * 2)
    assert found.on_demand_usd is None
    assert boot_s(machines) == 0.5 * 3600


def test_what_has_no_known_price_is_counted_and_not_guessed() -> None:
    found = bill([machine("i-1", 0, 1, 0), machine("i-2", 1, 2, 1.5, type_="p9.huge")], [price(0, 2.0)], {}, at(2))

    assert (found.usd, found.unpriced, found.machines) == (pytest.approx(2.0), 1, 2)


def test_an_instance_bought_on_demand_costs_its_price() -> None:
    found = bill([machine("i-1", 0, 2, 0, spot=False)], [], {"g6.xlarge": 4.0}, at(2))

    assert (found.usd, found.on_demand_usd) == (pytest.approx(8.0), pytest.approx(8.0))


def test_the_group_knows_better_when_an_instance_began_and_was_gone() -> None:
    told = [
        activity("i-1", 0, 0.1, launch=True),
        activity("i-1", 2, 2.2, launch=False),
        activity("i-9", 1, 1.1, launch=True),
    ]

    (found,) = with_activities([machine("i-1", 0.2, 1.9, 0.5)], told)

    assert (found.began_at, found.ended_at, found.trained_at) == (at(0), at(2.2), at(0.5))
    assert never_trained([found], [*told, activity("i-8", 1, 1.1, launch=True, failed=True)]) == 1


def test_the_cheapest_type_is_first_and_one_without_a_price_last() -> None:
    prices = [price(0, 2.0), price(1, 1.5), price(0, 0.5, zone="b"), price(0, 0.4, type_="g5.xlarge")]

    found = offers(prices, {"g5.xlarge": 1.0}, ["g6.xlarge", "p5.48xlarge", "g5.xlarge"])

    assert [(offer.type, offer.pools, offer.on_demand) for offer in found] == [
        ("g5.xlarge", {"a": 0.4}, 1.0), ("g6.xlarge", {"a": 1.5, "b": 0.5}, None), ("p5.48xlarge", {}, None),
    ]  # fmt: skip
