"""The instances that a run has had, by its journal.

Owns how they are found there: each agent on an instance of a fleet says at its start which one it is (`NodeBooted`).
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator
from functools import partial

from cloud.errors import CloudError
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.store import ObjectStore
from harness.core import events
from harness.core.snapshot import RunKeys
from harness.fleet.costs import Machine
from harness.snapshots.journal import MAX_SEGMENT_BYTES, decode_segment, segments

_FIRST_SEGMENTS, _LAST_SEGMENTS = 16, 2
_READS = 16  # concurrently
_JOURNAL_S = 120.0


def machines_of(store: ObjectStore, run: str, generations: int) -> list[Machine]:
    """Return the instances of all generations, in the order of their launches. What cannot be read is left out.

    Args:
        store: of the run.
        run: its name.
        generations: the newest generation.
    """
    keys, deadline = RunKeys(run), Deadline.after(_JOURNAL_S)
    pool = Pool(_READS, "harness-history")
    try:
        futures = [
            pool.submit(partial(_lines_of, store, keys, number, deadline)) for number in range(1, generations + 1)
        ]
        lines = [future.result() for future in futures]
    finally:
        pool.shutdown()
    return merge(machine for told in lines if (machine := machine_of(told)) is not None)


def machine_of(lines: Iterable[events.Line]) -> Machine | None:
    """Return the instance that wrote these lines; `None` if they do not say which."""
    node: events.NodeBooted | None = None
    began = trained = last = None
    for line in lines:
        at = _instant(line.at)
        if at is None:
            continue
        last = at
        if isinstance(line.body, events.NodeBooted):
            node, began = line.body, at
        if isinstance(line.body, events.FirstStep) and trained is None:
            trained = at
    if node is None or began is None:
        return None
    booted = _instant(node.booted_at) if node.booted_at else None
    return Machine(
        node.instance, node.instance_type, node.zone, node.spot,
        began_at=min(booted or began, began), ended_at=last, trained_at=trained,
    )  # fmt: skip


def merge(machines: Iterable[Machine]) -> list[Machine]:
    """Return one machine for each instance: several generations may have been on it."""
    found: dict[str, Machine] = {}
    for machine in machines:
        known = found.get(machine.id)
        if known is None:
            found[machine.id] = machine
            continue
        trained = [at for at in (known.trained_at, machine.trained_at) if at is not None]
        found[machine.id] = Machine(
            machine.id, machine.type, machine.zone, machine.spot,
            began_at=min(known.began_at, machine.began_at),
            ended_at=max(at for at in (known.ended_at, machine.ended_at) if at is not None),
            trained_at=min(trained, default=None),
        )  # fmt: skip
    return sorted(found.values(), key=lambda machine: machine.began_at)


def _lines_of(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> list[events.Line]:
    return list(_read(store, keys, generation, deadline))


def _read(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> Iterator[events.Line]:
    with contextlib.suppress(CloudError):
        for first, last in segments(store, keys, generation, _FIRST_SEGMENTS, _LAST_SEGMENTS, deadline):
            for key in (*first, *last):
                yield from decode_segment(store.read(key, limit_bytes=MAX_SEGMENT_BYTES, deadline=deadline))


def _instant(text: str) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else None
