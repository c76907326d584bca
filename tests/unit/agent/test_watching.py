"""Watching: what a program's command becomes, what --fresh moves away, what answers a demand to save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.agent import watching
from harness.agent.resume.laying_back import Laid
from harness.agent.watching import Watching, WatchingEvents
from harness.config.settings import Settings
from harness.watch.adapter import Save
from harness.watch.survey import Survey, record_of
from harness.watch.watcher import Checkpoint
from tests.support.context import a_context
from tests.support.watched import write


class Scene:
    def __init__(self, root: Path) -> None:
        self.root = root / "out"
        self.said, self.found, self.signals = list[str](), list[Checkpoint](), list[int]()
        context = a_context(Settings(store="s", run="run"), say=self.said.append)
        self.watching = Watching(context, self.root, None, WatchingEvents(self.found.append, self.signals.append))

    def takes(self, name: str) -> None:
        """The watcher has found the newest checkpoint of a layout."""
        there = Survey.of(self.root, name)
        assert there.adapter is not None
        record = record_of(there.judged[-1].candidate, there.adapter, 1, 1)
        self.watching._take(Checkpoint(record, None, 0.0))  # type: ignore[arg-type]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.watching.close()


@pytest.mark.parametrize(
    ("command", "first", "later"),
    [
        (["train", "--resume", "{checkpoint}", "-v"], ["train", "-v"], ["train", "--resume", "/c", "-v"]),
        (["train", "--resume={checkpoint}"], ["train"], ["train", "--resume=/c"]),
        (["train", "{checkpoint}"], ["train"], ["train", "/c"]),
        (
            ["bash", "-c", "train '{checkpoint}' && x"],
            ["bash", "-c", "train '' && x"],
            ["bash", "-c", "train '/c' && x"],
        ),
    ],
)
def test_the_path_of_a_checkpoint_stands_in_a_command_and_without_one_nothing_does(
    command: list[str], first: list[str], later: list[str], scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scene.watching.command(command) == first
    monkeypatch.setattr(Watching, "_found", Laid(checkpoint=Path("/c")))
    assert scene.watching.command(command) == later


@pytest.mark.parametrize("layout", ["deepspeed", "megatron", "composer"])
def test_fresh_moves_the_pointer_too_so_that_it_does_not_lead_nowhere(layout: str, scene: Scene) -> None:
    write(scene.root, layout, 10, 20)
    (scene.root / "config.json").write_text("{}")
    scene.watching.begin_at_zero()
    assert [path.name for path in scene.root.iterdir()] == ["config.json"]


def test_fresh_leaves_what_is_no_checkpoint_and_what_names_that(scene: Scene) -> None:
    """Megatron's tracker may say `release`: a model that was converted, which a run begins with."""
    write(scene.root, "megatron", 10)
    (scene.root / "release").mkdir()
    (scene.root / "latest_checkpointed_iteration.txt").write_text("release")
    scene.watching.begin_at_zero()
    assert sorted(path.name for path in scene.root.iterdir()) == [
        "latest_checkpointed_iteration.txt",
        "release",
    ]


def test_only_a_checkpoint_that_was_written_since_answers_a_demand_to_save(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was being set aside when the notice came is no reason to end the program, which is still to save."""
    monkeypatch.setattr(Watching, "_save", Save(signal="SIGUSR1", leaves=False))
    monkeypatch.setattr(watching, "ask", lambda save, root, pid: "SIGUSR1")
    write(scene.root, "transformers", 10)
    for path in (scene.root / "checkpoint-10").iterdir():
        os.utime(path, (1, 1))
    scene.watching._pid = os.getpid()
    scene.watching.leave(by_signal=False)
    scene.takes("transformers")
    assert (len(scene.found), scene.signals) == (1, [])
    write(scene.root, "transformers", 20)
    scene.takes("transformers")
    assert (len(scene.found), len(scene.signals)) == (2, 1)
