"""Which instances a run has had, by its journal."""

from __future__ import annotations

import datetime

from cloud.notice import Deadline
from cloud.testing.memory import MemoryStore
from harness.core import events
from harness.core.snapshot import RunKeys
from harness.fleet.history import machine_of, machines_of

MIDNIGHT = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
KEYS = RunKeys("gpt")


def node(instance: str, booted_s: float | None) -> events.NodeBooted:
    booted_at = None if booted_s is None else at(booted_s)
    return events.NodeBooted(
        instance=instance, instance_type="g6.xlarge", zone="eu-west-1a", spot=True, booted_at=booted_at
    )


def at(seconds: float) -> str:
    return (MIDNIGHT + datetime.timedelta(seconds=seconds)).isoformat()


def line(seconds: float, body: events.Event) -> events.Line:
    return events.Line(at=at(seconds), mono=seconds, generation=1, body=body)


def keep(store: MemoryStore, generation: int, *segments: list[events.Line]) -> None:
    for number, lines in enumerate(segments):
        key = f"{KEYS.journal_of(generation)}host/{number:08d}.jsonl"
        store.put_if_absent(key, b"".join(map(events.encode_line, lines)), deadline=Deadline.never())


def test_each_instance_is_one_machine_whatever_many_starts_were_on_it() -> None:
    store = MemoryStore()
    keep(
        store,
        1,
        [line(60, node("i-1", 10)), line(90, events.FirstStep(step=1, seconds=1))],
        [line(200, events.Heartbeat())],
    )
    keep(
        store,
        2,
        [line(210, node("i-1", 10)), line(220, events.FirstStep(step=9, seconds=1))],
        [line(300, events.Heartbeat())],
    )
    keep(store, 3, [line(400, node("i-2", 330)), line(500, events.Heartbeat())])
    keep(store, 4, [line(600, events.Heartbeat())])  # of a laptop

    first, second = machines_of(store, "gpt", 5)

    assert (first.id, first.type, first.zone, first.spot) == ("i-1", "g6.xlarge", "eu-west-1a", True)
    assert [moment and moment.isoformat() for moment in (first.began_at, first.trained_at, first.ended_at)] == [
        at(10), at(90), at(300),
    ]  # fmt: skip
    assert [moment and moment.isoformat() for moment in (second.began_at, second.trained_at, second.ended_at)] == [
        at(330), None, at(500),
    ]  # fmt: skip


def test_a_boot_of_unknown_time_begins_with_its_agent() -> None:
    found = machine_of([line(50, events.Heartbeat()), line(60, node("i-1", None))])

    assert found is not None
    assert found.began_at.isoformat() == at(60)


def test_a_line_without_a_time_is_left_out() -> None:
    torn = events.Line(at="soon", mono=1.0, generation=1, body=events.Heartbeat())

    assert machine_of([torn]) is None
    found = machine_of([line(60, node("i-1", 10)), torn])
    assert found is not None
    assert found.ended_at is not None
    assert found.ended_at.isoformat() == at(60)
