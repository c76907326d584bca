"""Snapshots that tests publish, whole or half, and a store that lets them in between two calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cloud.notice import Deadline
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from harness.core import events
from harness.core.manifest import FORMAT, Claim
from harness.core.snapshot import SnapshotId
from harness.snapshots import commit, fetch, records
from harness.snapshots.dedup import Deduplicator
from tests.support.protocol import (
    FOREVER,
    KEYS,
    RUN_ID,
    Content,
    Crash,
    Fault,
    ProtocolStore,
)

FIRST, SECOND, THIRD = SnapshotId(1, 10), SnapshotId(1, 20), SnapshotId(2, 15)


def publish(store: ProtocolStore, *names: SnapshotId, run_id: str = RUN_ID) -> None:
    for name in names:
        commit.publish(store, KEYS, Content(name, run_id).staged(), "remote", FOREVER, lambda event: None)


def wanted(generation: int = 1, nonce: str = "a" * 16, run_id: str = RUN_ID) -> Claim:
    return Claim(
        format=FORMAT,
        run_id=run_id,
        generation=generation,
        nonce=nonce,
        claimed_at="2026-01-02T03:04:05.678+00:00",
        host="here",
        pid=1,
        fresh=False,
        parent=None,
        command=("python", "train.py"),
        named=True,
    )


def die_before_the_manifest(store: ProtocolStore, name: SnapshotId, run_id: str = RUN_ID) -> None:
    with store.armed(Fault("die before", 5)), pytest.raises(Crash):
        publish(store, name, run_id=run_id)


class Bucket(MemoryStore):
    """A store that keeps unfinished uploads, as S3 does, and lets a test in between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: set[str] = set()
        self.after: dict[str, Callable[[], object]] = {}

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        super().put_if_absent(key, data, deadline=deadline)
        self._interrupt("put_if_absent")

    def delete(self, key: str, *, deadline: Deadline) -> None:
        super().delete(key, deadline=deadline)
        self._interrupt("delete")

    def unfinished(self, prefix: str, *, deadline: Deadline) -> list[str]:
        return sorted(key for key in self.uploads if key.startswith(prefix))

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        self.uploads.discard(key)

    def _interrupt(self, verb: str) -> None:
        if (act := self.after.pop(verb, None)) is not None:
            act()


def keys_of(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, deadline=FOREVER)]


def quiet(event: events.Event) -> None:
    """No journal."""


def frozen(name: SnapshotId) -> Content:
    return Content(name, frozen=True)


def publish_onto(
    store: ObjectStore, base: SnapshotId, name: SnapshotId, attempt: commit.Attempt | None = None
) -> list[events.Event]:
    """Publish `name` where its first shard is that of `base`; what was told."""
    unchanged, told = Deduplicator(), list[events.Event]()
    unchanged.committed(records.read_manifest(store, KEYS, base, FOREVER))
    commit.publish(
        store, KEYS, frozen(name).staged(), "remote", FOREVER, told.append, attempt=attempt, unchanged=unchanged
    )
    return told


def is_whole(store: ObjectStore, name: SnapshotId) -> bool:
    return fetch.verify(store, KEYS, records.read_manifest(store, KEYS, name, FOREVER), FOREVER)
