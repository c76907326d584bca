"""Report what a run is doing: by its live agent's own answer, or from its store and its journal.

Owns how the journal is read for that: only its beginning and its end, however long it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from cloud.errors import CloudError
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core import events
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError
from harness.inspect.tiers import CALL_S
from harness.ipc.client import AgentSilent, ask_status
from harness.snapshots import records
from harness.snapshots.journal import MAX_SEGMENT_BYTES, decode_segment, segments
from harness.snapshots.open import open_existing_store

_JOURNAL_S = 20.0
_FIRST_SEGMENTS, _LAST_SEGMENTS = 48, 16  # `Restarted` comes once, near the beginning; figures every 15 s
_READS = 16  # concurrently


def status(settings: Settings) -> dict[str, Any]:
    """Return a live agent's own answer; without one, what the store and its journal hold of the last generation.

    Raises:
        ConfigError: there is no such run.
    """
    silent = False
    try:
        if (live := ask_status(settings)) is not None:
            return live.fields()
    except AgentSilent:
        silent = True
    store, keys = open_existing_store(settings.store, settings), RunKeys(settings.run)
    known = _survey(store, keys, settings)
    told = fold(_read_ends(store, keys, known.last_claim.generation if known.last_claim else 0))
    newest = known.commits[-1] if known.commits else None
    return {
        "run": settings.run,
        "store": settings.store,
        "state": "does not answer here" if silent else known.done.outcome if known.done else "not running here",
        "generation": known.last_claim.generation if known.last_claim else None,
        "step": told["step"],
        "local_step": told["local_step"],
        "durable_step": newest.step if newest else None,
        "latest": str(newest) if newest else None,
        "snapshots": len(known.commits),
        "quarantined": len(known.quarantined),
        "restart": told["restart"],
        "ended_at": known.done.ended_at if known.done else None,
    }


def fold(lines: Iterator[events.Line]) -> dict[str, Any]:
    """Return the newest value of each figure in a journal."""
    told: dict[str, Any] = {"step": None, "local_step": None, "durable_step": None, "restart": None}
    for line in lines:
        body = line.body
        if isinstance(body, events.Published):
            told["durable_step" if body.tier == "remote" else "local_step"] = body.step
        if isinstance(body, events.Ended):
            told["local_step"], told["durable_step"] = body.local_step, body.durable_step
        if isinstance(body, events.Restarted):
            told["restart"] = body.fields()
        if isinstance(body, events.Sealed | events.TrainerFinished) or (
            isinstance(body, events.Heartbeat | events.TrainerLeft) and body.step is not None
        ):
            told["step"] = body.step
    return told


def _read_ends(store: ObjectStore, keys: RunKeys, generation: int) -> Iterator[events.Line]:
    """Yield the first and the last lines of a generation's journal. Skip what cannot be read."""
    deadline, wanted = Deadline.after(_JOURNAL_S), list[str]()
    with contextlib.suppress(CloudError):
        for first, last in segments(store, keys, generation, _FIRST_SEGMENTS, _LAST_SEGMENTS, deadline):
            wanted += [*first, *last]

    def read(key: str) -> bytes:
        with contextlib.suppress(CloudError):
            return store.read(key, limit_bytes=MAX_SEGMENT_BYTES, deadline=deadline)
        return b""

    pool = Pool(_READS, "harness-journal")
    try:
        for future in [pool.submit(partial(read, key)) for key in wanted]:
            yield from decode_segment(future.result())
    finally:
        pool.shutdown()


def _survey(store: ObjectStore, keys: RunKeys, settings: Settings) -> records.Survey:
    known = records.survey(store, keys, Deadline.after(CALL_S))
    if known.last_claim is None and not known.commits:
        raise ConfigError(f"no run {settings.run!r} in {settings.store}; see harness ls --store {settings.store}")
    return known
