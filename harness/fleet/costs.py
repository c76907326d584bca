"""What a fleet costs: before, by the pools that it may buy from; afterwards, by what its instances were and how long.

Owns the arithmetic; makes no calls. Money is dollars, time is seconds. Prices are those of the instances: volumes,
storage and traffic are not in them. AWS's bill is what counts.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cloud.aws.console import Activity, SpotPrice

HOUR_S = 3600.0


@dataclass(frozen=True)
class Machine:
    """An instance that a run had.

    Attributes:
        id: of the instance.
        type: "g6e.xlarge".
        zone: "us-east-1a".
        spot: whether it was bought on the spot market.
        began_at: when it was launched; from the boot of its kernel where AWS no longer tells.
        ended_at: when it was gone, or the last sign of it; `None` if it is there now.
        trained_at: when its first step was complete; `None` if none was.
    """

    id: str
    type: str
    zone: str
    spot: bool
    began_at: datetime.datetime
    ended_at: datetime.datetime | None
    trained_at: datetime.datetime | None

    def paid_s(self, now: datetime.datetime) -> float:
        """Return how long it has been paid for."""
        return max(0.0, ((self.ended_at or now) - self.began_at).total_seconds())

    @property
    def idle_s(self) -> float | None:
        """How long it was paid for before it trained; `None` if it never did."""
        return None if self.trained_at is None else max(0.0, (self.trained_at - self.began_at).total_seconds())


@dataclass(frozen=True)
class Offer:
    """What an instance of one type costs now.

    Attributes:
        type: of the instances.
        pools: dollars an hour of each zone that has it.
        on_demand: dollars an hour; `None` if it is not known.
    """

    type: str
    pools: Mapping[str, float]
    on_demand: float | None


@dataclass(frozen=True)
class Bill:
    """What a run's instances have cost.

    Attributes:
        machines: how many there were.
        paid_s: for how long in all.
        usd: for them; of those whose price is known.
        on_demand_usd: the same hours at the on-demand price; `None` if one of those is not known.
        interruptions: how often the run went to another instance and trained on.
        idle_s: paid for between the launch and the first step, without the very first instance.
        idle_usd: what that cost.
        unpriced: how many instances have no known price, and are not in the dollars.
    """

    machines: int
    paid_s: float
    usd: float
    on_demand_usd: float | None
    interruptions: int
    idle_s: float
    idle_usd: float
    unpriced: int


def offers(prices: Sequence[SpotPrice], on_demand: Mapping[str, float | None], types: Sequence[str]) -> list[Offer]:
    """Return the present price of each type, the cheapest first; types without a spot price come last."""
    newest: dict[tuple[str, str], SpotPrice] = {}
    for price in prices:
        key = (price.type, price.zone)
        if key not in newest or price.at > newest[key].at:
            newest[key] = price
    found = [
        Offer(
            type_,
            {zone: price.usd for (of, zone), price in sorted(newest.items()) if of == type_},
            on_demand.get(type_),
        )
        for type_ in types
    ]
    return sorted(found, key=lambda offer: min(offer.pools.values(), default=float("inf")))


def with_activities(machines: Sequence[Machine], activities: Sequence[Activity]) -> list[Machine]:
    """Return the machines with the begin and the end that the group itself knows, where it still does."""
    launched = {one.instance: one for one in activities if one.launch and not one.failed}
    ended = {one.instance: one for one in activities if not one.launch and not one.failed}
    found = []
    for machine in machines:
        launch, end = launched.get(machine.id), ended.get(machine.id)
        found.append(
            replace(
                machine,
                began_at=launch.began_at if launch is not None else machine.began_at,
                ended_at=(end.ended_at or machine.ended_at) if end is not None else machine.ended_at,
            )
        )
    return found


def never_trained(machines: Sequence[Machine], activities: Sequence[Activity]) -> int:
    """Return how many instances the group has started of which the run knows nothing."""
    known = {machine.id for machine in machines}
    return len({one.instance for one in activities if one.launch and not one.failed and one.instance} - known)


def bill(
    machines: Sequence[Machine],
    prices: Sequence[SpotPrice],
    on_demand: Mapping[str, float | None],
    now: datetime.datetime,
) -> Bill:
    """Add up what these instances have cost until now."""
    history: dict[tuple[str, str], list[SpotPrice]] = {}
    for price in sorted(prices, key=lambda price: price.at):
        history.setdefault((price.type, price.zone), []).append(price)
    usd = idle_usd = idle_s = 0.0
    full: float | None = 0.0
    unpriced = 0
    in_order = sorted(machines, key=lambda machine: machine.began_at)
    for number, machine in enumerate(in_order):
        hourly = on_demand.get(machine.type)
        end = machine.ended_at or now
        pool = history.get((machine.type, machine.zone), [])
        cost = _spot_cost(pool, machine.began_at, end) if machine.spot else _of(hourly, machine.paid_s(now))
        full = None if full is None or hourly is None else full + hourly * machine.paid_s(now) / HOUR_S
        if cost is None:
            unpriced += 1
            continue
        usd += cost
        if number and machine.idle_s is not None:
            idle_s += machine.idle_s
            idle_usd += cost * machine.idle_s / max(machine.paid_s(now), machine.idle_s, 1e-9)
    moves = sum(1 for machine in in_order[1:] if machine.trained_at is not None)
    paid_s = sum(machine.paid_s(now) for machine in machines)
    return Bill(len(machines), paid_s, usd, full, moves, idle_s, idle_usd, unpriced)


def boot_s(machines: Sequence[Machine]) -> float | None:
    """Return the median time from a launch to the first step; `None` before there was one."""
    known = [machine.idle_s for machine in machines if machine.idle_s is not None]
    return statistics.median(known) if known else None


def _of(hourly: float | None, seconds: float) -> float | None:
    return None if hourly is None else hourly * seconds / HOUR_S


def _spot_cost(pool: Sequence[SpotPrice], began: datetime.datetime, ended: datetime.datetime) -> float | None:
    """Return the dollars of one instance in a pool whose prices are in order of time."""
    if not pool:
        return None
    usd = 0.0
    for number, price in enumerate(pool):
        begin = (
            began if number == 0 else max(began, price.at)
        )  # the first price is all that is known of the time before
        end = min(ended, pool[number + 1].at) if number + 1 < len(pool) else ended
        usd += price.usd * max(0.0, (end - begin).total_seconds()) / HOUR_S
    return usd
