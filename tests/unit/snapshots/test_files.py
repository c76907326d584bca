"""Snapshots of files: each keeps its own path, also where the store has its bytes already."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud.testing.memory import MemoryStore
from harness.core import events
from harness.core.manifest import Manifest
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit
from harness.snapshots.dedup import Deduplicator
from harness.watch.aside import Kept, set_aside
from harness.watch.look import Look
from tests.support.protocol import FOREVER, KEYS, RUN_ID

STATE = b'{"step":1}'


class Scene:
    """A directory of files, published as it is then, again and again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store, self.unchanged = MemoryStore(), Deduplicator()
        self.how: dict[str, str] = {}

    def write(self, **files: str) -> None:
        for name, content in files.items():
            (self.root / name).write_text(content)

    def publish(self, step: int) -> Manifest:
        return self.commit(step, set_aside(self.root, Look.at(self.root).files, "kept", may_link=False))

    def commit(self, step: int, kept: Kept) -> Manifest:
        part = commit.StagedPart(
            rank=0,
            world_size=1,
            state=STATE,
            environment={},
            sealed_at="2026-01-01T00:00:00.000+00:00",
            shards=[],
            known=[file.entry for file in kept.files],
            files=[commit.StagedFile(file.path, file.source) for file in kept.files],
        )
        staged = commit.Staged(SnapshotId(1, step), RUN_ID, None, [part])
        manifest = commit.publish(self.store, KEYS, staged, "remote", FOREVER, self._note, unchanged=self.unchanged)
        self.unchanged.committed(manifest)
        return manifest

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.ShardStored):
            self.how[event.name] = event.how

    def content(self, manifest: Manifest) -> dict[str, str]:
        """What the store has, by path."""
        files = manifest.parts[0].files
        assert isinstance(files, tuple)
        keys = {file.path: KEYS.payload(manifest.directory, file.name) for file in files}
        return {path: self.store.read(key, limit_bytes=100, deadline=FOREVER).decode() for path, key in keys.items()}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_what_has_not_changed_is_copied_and_has_the_path_that_it_has_now(scene: Scene) -> None:
    scene.write(a="first", b="second")
    scene.publish(1)
    (scene.root / "b").rename(scene.root / "c")
    scene.write(b="third")
    scene.how.clear()
    second = scene.publish(2)
    assert scene.content(second) == {"a": "first", "b": "third", "c": "second"}
    assert sorted(scene.how.values()) == ["copied", "copied", "sent"]


def test_two_files_of_one_content_are_two(scene: Scene) -> None:
    scene.write(a="same", b="same", c="")
    assert scene.content(scene.publish(1)) == {"a": "same", "b": "same", "c": ""}
    assert scene.content(scene.publish(2)) == {"a": "same", "b": "same", "c": ""}


def test_a_file_that_is_not_what_was_set_aside_is_not_committed(scene: Scene) -> None:
    scene.write(a="first")
    kept = set_aside(scene.root, Look.at(scene.root).files, "kept", may_link=False)
    kept.files[0].source.write_text("other")
    with pytest.raises(SnapshotCorrupt):
        scene.commit(1, kept)
    assert not list(scene.store.list(KEYS.commits, deadline=FOREVER))
