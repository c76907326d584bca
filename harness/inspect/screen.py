"""One screen about a run, for people: is it safe, is it moving, what would a notice cost now?

Owns the words of `harness status`; `status.py` owns the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.core import events
from harness.core.words import count, duration, size

_NEWS_S = 60.0  # after this time without a new step, the screen asks whether that is normal


def screen(found: Mapping[str, Any], fleet: str | None) -> list[tuple[str, str]]:
    """Return one pair of heading and sentence for each line.

    Args:
        found: what `inspect.status.status` found.
        fleet: the Auto Scaling group, in words; `None` where there is none.
    """
    rows = _live(found) if "agent_pid" in found else _stored(found)
    rows.append(("store", found["store"] + (f", local tier {found['local']}" if found.get("local") else "")))
    if fleet is not None:
        rows.append(("fleet", fleet))
    if found["restart"] is not None:
        rows.append(("last start", events.Restarted(**found["restart"]).words()))
    return rows


def _live(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    started = f"start {found['generation']}, process {found['trainer_pid'] or found['agent_pid']}"
    rows = [
        ("run", f"{found['run']} is {found['state']} on this machine ({started})"),
        ("safe", _safe(found)),
        ("moving", _moving(found)),
        ("notice", _notice(found)),
    ]
    if found["unsaved"]:
        rows.insert(2, ("unsaved", found["unsaved"]))
    if found["ranks"]:
        rows.insert(3, ("ranks", _ranks(found["ranks"])))
    if found["bytes_pending"]:
        in_s = "" if found["estimate_s"] is None else f", about {duration(found['estimate_s'])}"
        rows.insert(2, ("saving", f"{size(found['bytes_pending'])} are still to be sent to the store{in_s}"))
    return rows


def _safe(found: Mapping[str, Any]) -> str:
    durable, local = found["durable_step"], found["local_step"]
    if durable is None:
        return "nothing is durable yet" + ("" if local is None else f"; step {count(local)} is on this machine's disk")
    since = "" if found["durable_age_s"] is None else f", committed {duration(found['durable_age_s'])} ago"
    nearer = f"; step {count(local)} is on this machine's disk" if local is not None and local > durable else ""
    return f"step {count(durable)} is durable{since}{nearer}"


def _moving(found: Mapping[str, Any]) -> str:
    if found["finished_step"] is not None:
        return f"no: the last loop ended at step {count(found['finished_step'])}"
    if found["step"] is None:
        return "not yet: the training loop has not begun"
    age_s = found["step_age_s"]
    since = "" if age_s is None else f", reached {duration(age_s)} ago"
    stands = " (does a step take this long?)" if age_s is not None and age_s > _NEWS_S else ""
    times = f"; restarted in place {found['restarts']} times" if found["restarts"] else ""
    return f"step {count(found['step'])}{since}{stands}{times}"


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    absent = [rank["rank"] for rank in ranks if rank["pid"] is None]
    if absent:
        return f"{len(ranks)}; not connected: {', '.join(map(str, absent))}"
    steps = [rank["step"] for rank in ranks if rank["step"] is not None]
    if len(steps) < len(ranks):
        return f"{len(ranks)}; {len(steps)} of them are in their loops"
    first, last = min(steps), max(steps)
    where = f"all at step {count(first)}" if first == last else f"at steps {count(first)} to {count(last)}"
    late = "".join(
        f"; rank {rank['rank']} is late: at step {count(rank['step'])} for {duration(rank['step_age_s'] or 0.0)}"
        for rank in ranks
        if rank["late"]
    )
    return f"{len(ranks)}, {where}{late}"


def _notice(found: Mapping[str, Any]) -> str:
    if found["deadline_s"] is not None:
        return f"in force: its deadline is in {duration(found['deadline_s'])}"
    deaf = ", ".join(found["unreachable"])
    heard = f". {deaf} does not answer: a notice could be missed" if deaf else ""
    forecast = found["notice"]
    if forecast is None:
        return f"nothing could be saved yet{heard}"
    window, needs = duration(forecast["in_s"]), duration(forecast["needs_s"])
    if forecast["lost_steps"]:
        return f"of {window} would cost {count(forecast['lost_steps'])} steps: saving takes {needs}{heard}"
    return f"of {window} would cost nothing: saving takes {needs}{heard}"


def _stored(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    state = found["state"]
    at = "" if found["ended_at"] is None else f", {found['ended_at']}"
    start = "" if found["generation"] is None else f" (start {found['generation']}{at})"
    kept = f"{found['snapshots']} snapshots"
    bad = f", {found['quarantined']} quarantined" if found["quarantined"] else ""
    durable = found["durable_step"]
    safe = "nothing is durable" if durable is None else f"step {count(durable)} is durable"
    rows = [("run", f"{found['run']}: {state}{start}"), ("safe", f"{safe} ({kept}{bad})")]
    step = found["step"]
    if step is not None and durable is not None and step > durable:
        rows.append(("moving", f"step {count(step)} is the last one in its journal"))
    return rows
