"""A fleet in words: what an apply would do and cost, and what there is.

Owns the words and the figures' form; `fleet.py` has found them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cloud.aws.console import RUN_TAG, STORE_TAG, Activity, Group
from harness.core.words import count, duration
from harness.fleet.costs import HOUR_S, Bill

if TYPE_CHECKING:
    from harness.fleet.fleet import Looked, Planned

_SHOWN_TYPES = 4
_SHOWN_ACTIVITIES = 3


def plan_in_words(planned: Planned) -> list[tuple[str, object]]:
    """Return one pair of heading and text for each line of what an apply would do and cost."""
    counts = planned.counts
    rows: list[tuple[str, object]] = [(f"change {number + 1}", one) for number, one in enumerate(planned.changes)]
    rows.append(("plan", f"{counts['add']} to add, {counts['change']} to change, {counts['destroy']} to destroy"))
    if not planned.desired:
        return [*rows, ("price", "no instances are wanted")]
    rows += [
        ("wait", f"the alarm {name} still rings, and sets the group to zero each minute until it is OK again")
        for name in planned.ringing
    ]
    priced = [offer for offer in planned.offers if offer.pools]
    for number, offer in enumerate(priced[:_SHOWN_TYPES]):
        pools = ", ".join(f"{zone} {_usd(usd)}" for zone, usd in sorted(offer.pools.items(), key=lambda pool: pool[1]))
        rows.append((f"price {number + 1}", f"{offer.type} an hour: {pools}; on demand {_usd(offer.on_demand)}"))
    prices = [usd for offer in priced for usd in offer.pools.values()]
    if prices:
        span = _usd(min(prices)) if min(prices) == max(prices) else f"{_usd(min(prices))} to {_usd(max(prices))}"
        rows.append(("expected", f"{span} an hour for the instance, and its root volume; {len(planned.types)} types"))
        rows.append(("interruption", _interruption(planned.boot_s, min(prices), max(prices))))
    if planned.on_demand_percentage:
        rows.append(
            ("on demand", f"{planned.on_demand_percentage} % of the instances are bought at the on-demand price")
        )
    if planned.why_no_prices:
        rows.append(("note", f"not every price is known: {planned.why_no_prices}"))
    return rows


def _interruption(boot_s: float | None, least: float, most: float) -> str:
    if boot_s is None:
        cents = f"{100 * least / 60:.2g} to {100 * most / 60:.2g} cents"
        return f"costs the boot of the next instance, {cents} a minute; how long that takes is not known yet"
    usd = f"{_usd(least * boot_s / HOUR_S)} to {_usd(most * boot_s / HOUR_S)}"
    return f"costs {usd}: from a launch to the next step it took {duration(boot_s)} (median of this run)"


def screen(looked: Looked, progress: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    """Return one pair of heading and text for each line of what there is.

    Args:
        looked: the fleet.
        progress: what `inspect.status.status` found; `None` if the run has nothing yet.
    """
    rows: list[tuple[str, object]] = [("fleet", _group(looked.group))]
    rows.append(("run", _run(progress)))
    told = [activity for activity in looked.activities if activity.failed or activity.ended_at is None]
    rows += [(f"group {number + 1}", _activity(one)) for number, one in enumerate(told[:_SHOWN_ACTIVITIES])]
    ringing = sorted(name for name, state in looked.alarms.items() if state == "ALARM")
    if looked.alarms:
        rows.append(("alarms", ", ".join(ringing) or f"none of {len(looked.alarms)} rings"))
    if looked.bill is not None:
        rows.append(("paid", _bill(looked.bill)))
        rows.append(("interruptions", _interruptions(looked.bill)))
    if looked.strangers:
        rows.append(("never trained", f"{looked.strangers} instances, which are not in the sum"))
    return rows + [(f"note {number + 1}", note) for number, note in enumerate(looked.notes)]


def to_json(looked: Looked, progress: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the same for machines."""
    group = looked.group
    return {
        "group": None if group is None else asdict(group),
        "run": progress,
        "alarms": dict(looked.alarms),
        "bill": None if looked.bill is None else asdict(looked.bill),
        "never_trained": looked.strangers,
        "activities": [
            asdict(one) | {"began_at": one.began_at.isoformat(), "ended_at": _iso(one)} for one in looked.activities
        ],
        "notes": list(looked.notes),
    }


def fleets(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return one row for each fleet of a region."""
    return [
        {
            "run": group.tags.get(RUN_TAG),
            "wants": group.desired,
            "instances": ", ".join(f"{one.id} {one.type} {one.zone} {one.state}" for one in group.members) or None,
            "store": group.tags.get(STORE_TAG),
        }
        for group in sorted(groups, key=lambda group: group.name)
    ]


def _group(group: Group | None) -> str:
    if group is None:
        return "there is none"
    members = ", ".join(f"{one.id} ({one.type}, {one.zone}, {one.state})" for one in group.members)
    return f"{group.name} wants {group.desired}: {members or 'no instance'}"


def _run(progress: Mapping[str, Any] | None) -> str:
    if progress is None:
        return "nothing is in its store yet"
    durable, step = progress["durable_step"], progress["step"]
    safe = "nothing is durable yet" if durable is None else f"step {count(durable)} is durable"
    if progress["ended_at"] is not None:
        return f"start {progress['generation']} has ended ({progress['state']}); {safe}"
    return (
        f"start {progress['generation']}"
        + ("" if step is None else f", at step {count(step)} when last heard")
        + f"; {safe}"
    )


def _activity(one: Activity) -> str:
    return f"{one.began_at:%H:%M:%S} {'failed: ' if one.failed else ''}{one.words}"


def _bill(bill: Bill) -> str:
    text = f"about {_usd(bill.usd)} for {bill.paid_s / HOUR_S:.2f} hours of {bill.machines} instances"
    if bill.on_demand_usd:
        saved = 100 * (1 - bill.usd / bill.on_demand_usd)
        text += f"; on demand it would have been {_usd(bill.on_demand_usd)} (saved: {saved:.0f} %)"
    if bill.unpriced:
        text += f"; {bill.unpriced} instances have no known price, and are not in it"
    return text


def _interruptions(bill: Bill) -> str:
    if not bill.interruptions:
        return "none"
    cost = f"{duration(bill.idle_s)} were paid before the next step: about {_usd(bill.idle_usd)}"
    return f"{bill.interruptions}, for which {cost}"


def _iso(one: Activity) -> str | None:
    return None if one.ended_at is None else one.ended_at.isoformat()


def _usd(usd: float | None) -> str:
    return "unknown" if usd is None else f"${usd:.2f}" if usd >= 1 else f"${usd:.4f}"
