"""Choice: a guess gives way to a better one, and a file that is written again and again stays the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.watch.adapter import built_in, named
from harness.watch.choice import Choice
from harness.watch.look import Look, Seen
from harness.watch.sound import Sound
from tests.support.layouts import by_torch
from tests.support.watched import write


class Scene:
    """A program's directory, at which one looks twice behind each change."""

    def __init__(self, root: Path) -> None:
        self.root, self.choice = root, Choice(Sound())
        self.adapter: str | None = None
        self.known = frozenset[Seen]()
        self.numbers = iter(range(1, 1000))

    def begin(self, adapter: str, step: int) -> None:
        self.adapter, self.known = adapter, frozenset(Look.at(self.root).files.values())
        self.choice.begin(named(adapter), step)

    def writes(self, *names: str) -> str | None:
        """The adapter by which it is judged once these files are written."""
        for name in names:
            (self.root / name).write_bytes(by_torch(next(self.numbers)))
        for _ in range(2):
            look = Look.at(self.root)
            before = None if self.adapter is None else named(self.adapter)
            found = self.choice.of(look, before, self.known, has_taken=self.adapter is not None)
            self.adapter = None if found is None else found.name
        self.known |= frozenset(look.files.values())
        return self.adapter


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_one_that_is_written_again_and_again_stays_beside_numbered_ones(scene: Scene) -> None:
    for names in (["last.pt"], ["last.pt"], ["last.pt", "step_3.pt"], ["step_4.pt"], ["last.pt", "step_5.pt"]):
        assert scene.writes(*names) == "torch-save-one"


def test_one_that_was_written_once_gives_way_to_numbered_ones(scene: Scene) -> None:
    assert scene.writes("tokens.pt") == "torch-save-one"
    for number in range(1, 4):
        assert scene.writes(f"epoch{number}.pt") == "torch-save"


def test_numbered_ones_give_way_to_one_that_turns_out_to_be_written_again_and_again(scene: Scene) -> None:
    assert scene.writes("last.pt", "step_1.pt") == "torch-save"
    assert scene.writes("last.pt") == "torch-save-one"
    assert scene.writes("step_2.pt") == "torch-save-one"


def test_one_of_which_there_are_several_snapshots_is_known_to_be_written_again(scene: Scene) -> None:
    scene.writes("last.pt")
    scene.begin("torch-save-one", 2)
    assert scene.writes("step_9.pt") == "torch-save-one"


def test_one_of_which_there_is_a_single_snapshot_is_not(scene: Scene) -> None:
    scene.writes("tokens.pt")
    scene.begin("torch-save-one", 1)
    assert scene.writes("epoch1.pt") == "torch-save"


def test_a_file_that_grows_is_no_file_that_is_written_again(scene: Scene) -> None:
    data = by_torch(7)
    for end in (len(data) // 3, len(data) // 2, len(data)):
        (scene.root / "tokens.pt").write_bytes(data[:end])
        scene.writes()
    assert scene.writes("epoch1.pt") == "torch-save"


def test_two_files_of_one_kind_give_way_as_soon_as_numbers_explain_one(scene: Scene) -> None:
    assert scene.writes("model.pt", "optim.pt") is None
    assert scene.writes("model_1.pt", "optim_1.pt") == "torch-save"


def test_a_numbered_file_now_and_then_does_not_hide_those_of_each_step(scene: Scene) -> None:
    assert scene.writes("model_1.pt") == "torch-save"
    assert scene.writes("model_2.pt", "loss_0.25.pt") == "torch-save"
    assert scene.writes("loss_0.24.pt") == "torch-save"


@pytest.mark.parametrize("before", [["last.pt"], ["last.pt", "last.pt"], ["step_1.pt"]])
def test_each_guess_gives_way_to_the_table_of_a_framework(before: Sequence[str], scene: Scene) -> None:
    for name in before:
        scene.writes(name)
    write(scene.root, "transformers", 10)
    assert scene.writes() == "transformers"
    assert not built_in()["transformers"].general
