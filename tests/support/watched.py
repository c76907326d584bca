"""Snapshots of files for tests: checkpoints in the layout of a framework, published as a watching agent does it."""

from __future__ import annotations

from pathlib import Path

from cloud.store import ObjectStore
from harness.agent.generation import Generation
from harness.agent.save.jobs import FilesSnapshot
from harness.core.manifest import Manifest
from harness.core.snapshot import RunKeys
from harness.snapshots import commit
from harness.watch.aside import set_aside
from harness.watch.survey import Survey, record_of
from harness.watch.watcher import Checkpoint
from tests.support.layouts import LAYOUTS
from tests.support.protocol import FOREVER, KEYS, RUN_ID


def write(root: Path, name: str, *steps: int) -> None:
    """Write whole checkpoints in a layout."""
    root.mkdir(exist_ok=True)
    for step in steps:
        for _ in LAYOUTS[name][1](root, step):
            pass


def publish_newest(store: ObjectStore, root: Path, adapter: str, step: int, keys: RunKeys = KEYS) -> Manifest:
    """Commit the newest checkpoint of a directory under a step, and let go of what was kept for it."""
    there = Survey.of(root, adapter)
    assert there.adapter is not None
    whole = there.newest_whole or there.judged[-1].candidate
    record = record_of(whole, there.adapter, step, None)
    kept = set_aside(root, {**whole.files, **whole.shared}, "test", may_link=False)
    made = Generation(1, RUN_ID, "0123456789abcdef")
    job = FilesSnapshot(Checkpoint(record, kept, 0.0), made, 0.0)
    manifest = commit.publish(store, keys, job.stage(), "remote", FOREVER, lambda event: None, attempt=job.attempt())
    kept.let_go()
    return manifest
