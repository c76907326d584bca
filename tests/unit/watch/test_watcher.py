"""Watcher: each whole checkpoint is set aside once, while the program writes, deletes, fails and ends."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.watch import processes, watcher
from harness.watch.adapter import named
from harness.watch.lineage import Lineage
from harness.watch.look import Look, candidates
from harness.watch.ours import ASIDE, folder_of
from harness.watch.survey import Survey
from harness.watch.watcher import Checkpoint, Taken, Watcher, taken_of
from tests.support.layouts import LAYOUTS, RANKS, by_safetensors, by_torch
from tests.support.patience import HANG_S
from tests.support.process import Process
from tests.support.watched import write


class Scene:
    """A watched directory, and what a watcher says of it. This process is the program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: queue.SimpleQueue[Checkpoint] = queue.SimpleQueue()
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.bugs: list[BaseException] = []
        self.watcher = Watcher(root, self.found.put, self.said.put, self.bugs.append)

    def begin(
        self,
        name: str | None = "transformers",
        taken: Taken | None = None,
        pid: int | None = None,
        mark: tuple[str, str] | None = None,
    ) -> None:
        adapter = None if name is None else named(name)
        self.watcher.begin(adapter, taken or Taken(), pid or os.getpid(), is_named=name is not None, mark=mark)

    def next(self) -> Checkpoint:
        return self.found.get(timeout=HANG_S)

    def look_again(self) -> None:
        """Return once what lies there now was looked at, and has not changed since."""
        for _ in range(2):
            before = self.watcher._before
            while self.watcher._before is before:
                threading.Event().wait(0.005)

    def ended(self, *, well: bool = True, is_last: bool = False, leaves_s: float | None = None) -> None:
        """The program has ended; returns after the last look."""
        self.watcher.program_ended(well=well, is_last=is_last, leaves_s=leaves_s)
        while not self.watcher.settled:
            threading.Event().wait(0.005)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(watcher, "LOOK_S", 0.01)
    monkeypatch.setattr(watcher, "_SURVIVORS_S", 0.02)
    monkeypatch.setattr(processes, "world_size", lambda pids: RANKS)
    (tmp_path / "out").mkdir()
    made = Scene(tmp_path / "out")
    yield made
    made.watcher.close()
    assert made.bugs == []


def test_each_one_is_set_aside_once_it_is_whole(scene: Scene) -> None:
    scene.begin()
    for step in (10, 20):
        write(scene.root, "transformers", step)
        found = scene.next()
        assert (found.record.step, found.record.name) == (step, f"checkpoint-{step}")
        for file in found.kept.files:
            assert file.source.read_bytes() == (scene.root / file.path).read_bytes()
    assert scene.watcher.step == 20
    scene.ended()
    assert scene.found.empty()


def test_it_finds_out_by_itself_what_is_written_there(scene: Scene) -> None:
    scene.begin(None)
    write(scene.root, "dcp", 10)
    assert scene.next().record.adapter == "dcp"
    assert scene.watcher.adapter is named("dcp")


def test_a_first_file_that_is_no_checkpoint_does_not_hide_those_that_come(scene: Scene) -> None:
    scene.watcher.begin(None, Taken(), os.getpid(), is_named=False)
    (scene.root / "tokens.pt").write_bytes(by_torch(1))
    assert scene.next().record.adapter == "torch-save-one"
    write(scene.root, "transformers", 500)
    found = scene.next().record
    assert (found.adapter, found.step) == ("transformers", 500)
    assert "it was taken for torch-save-one so far" in scene.said.get()


def test_a_file_that_is_rewritten_is_taken_though_numbered_ones_come_beside_it(scene: Scene) -> None:
    scene.begin(None)
    for number in range(1, 5):
        write(scene.root, "torch-save-one", number)
        if number > 2:
            (scene.root / f"step_{number}.pt").write_bytes(by_torch(number))
        record = scene.next().record
        assert (record.adapter, record.name, record.step) == ("torch-save-one", "last.pt", number)


def test_a_guess_gives_way_to_another_one_and_the_steps_go_on(scene: Scene) -> None:
    scene.begin(None)
    (scene.root / "tokens.pt").write_bytes(by_torch(9))
    assert scene.next().record.adapter == "torch-save-one"
    for number in (1, 2):
        (scene.root / f"epoch{number}.pt").write_bytes(by_torch(number))
        scene.look_again()
    record = scene.next().record
    assert (record.adapter, record.step) == ("torch-save", 2)
    assert "it was taken for torch-save-one so far" in scene.said.get()


def test_why_nothing_is_saved_is_told_once_it_has_been_so_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_STANDS_S", 0.0)
    scene.begin("torch-save-one")
    for name in ("model.pt", "optim.pt"):
        (scene.root / name).write_bytes(by_torch(1))
    words = scene.said.get(timeout=HANG_S)
    assert "nothing shows whether model.pt and optim.pt are of one moment: it is not saved so far" in words
    assert scene.watcher.why
    scene.look_again()
    scene.ended()
    assert scene.said.empty()


def test_that_nothing_is_known_as_a_checkpoint_is_told_once_weights_are_written(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_STANDS_S", 0.0)
    (scene.root / "base").mkdir()
    (scene.root / "base" / "weights.safetensors").write_bytes(by_safetensors(1))  # what it begins with
    scene.begin(None)
    (scene.root / "config.yaml").write_text("lr: 0.1")
    scene.look_again()
    assert scene.said.empty(), "it may save later"
    for step in (1, 2):
        (scene.root / f"{step}.d").mkdir()
        (scene.root / f"{step}.d" / "weights.pth.lora").write_bytes(by_torch(step))
        scene.look_again()
    assert f"nothing there is known as a checkpoint, and nothing is saved: see harness watch {scene.root}" in (
        scene.said.get(timeout=HANG_S)
    )
    scene.look_again()
    scene.ended()
    assert scene.said.empty()


def test_the_adapter_that_the_user_has_named_stays(scene: Scene) -> None:
    scene.begin("torch-save-one")
    (scene.root / "last.pt").write_bytes(by_torch(1))
    assert scene.next().record.step == 1
    write(scene.root, "transformers", 500)
    scene.ended()
    assert scene.found.empty()


def test_of_unknown_ranks_the_first_one_counts_with_the_next(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may start its ranks itself, which nothing in their environment shows."""
    monkeypatch.setattr(processes, "world_size", lambda pids: None)
    scene.begin("deepspeed")
    write(scene.root, "deepspeed", 10)
    scene.look_again()
    assert scene.found.empty()
    write(scene.root, "deepspeed", 20)
    assert scene.next().record.step in (10, 20)


def test_one_that_is_written_while_the_program_ends_counts(scene: Scene) -> None:
    scene.begin()
    write(scene.root, "transformers", 10)
    assert scene.next().record.step == 10
    write(scene.root, "transformers", 20)
    scene.ended(well=False)
    assert scene.next().record.step == 20
    assert scene.found.empty()


def test_one_that_it_died_in_does_not(scene: Scene) -> None:
    scene.begin()
    write(scene.root, "transformers", 10)
    assert scene.next().record.step == 10
    writer = LAYOUTS["transformers"][1](scene.root, 20)
    for _ in range(8):
        next(writer)
    writer.close()  # type: ignore[attr-defined]
    scene.ended(well=False)
    assert scene.found.empty()
    assert scene.watcher.why == "checkpoint-20 has no trainer_state.json"


def test_the_newest_goes_first_and_older_ones_are_left(scene: Scene) -> None:
    write(scene.root, "transformers", 10, 20, 30)
    scene.begin()
    assert scene.next().record.step == 30
    scene.ended()
    assert scene.found.empty()


def test_a_file_that_is_rewritten_is_counted(scene: Scene) -> None:
    scene.begin("torch-save-one")
    for number in (1, 2, 3):
        write(scene.root, "torch-save-one", 100 - number)
        found = scene.next()
        assert (found.record.step, found.record.name) == (number, "last.pt")


def test_one_whose_number_is_not_greater_is_told_once_and_not_taken(scene: Scene) -> None:
    write(scene.root, "transformers", 10)
    scene.begin()
    write(scene.root, "transformers", 20)
    assert scene.next().record.step == 20
    write(scene.root, "transformers", 15, 16)
    words = scene.said.get(timeout=HANG_S)
    assert "checkpoint-1" in words
    assert "was written behind the checkpoint that was saved last, but its number is not greater" in words
    assert words.startswith(scene.watcher.why)
    write(scene.root, "transformers", 30)
    assert scene.next().record.step == 30
    scene.ended()
    assert scene.watcher.why == ""
    assert (scene.said.empty(), scene.found.empty()) == (True, True)


def test_what_cannot_be_kept_is_told_once_and_not_taken(scene: Scene) -> None:
    scene.begin()
    for step in (10, 20):
        (scene.root / f"checkpoint-{step}").mkdir()
        (scene.root / f"checkpoint-{step}" / "weights").symlink_to("/")
        write(scene.root, "transformers", step)
        scene.look_again()
    scene.ended()
    assert scene.found.empty()
    assert "checkpoint-10 has a part that cannot be kept: checkpoint-10/weights, which is a link" in scene.said.get()
    assert scene.said.empty()
    assert "checkpoint-20/weights" in scene.watcher.why


def test_a_number_that_no_snapshot_can_have_is_counted(scene: Scene) -> None:
    scene.begin("horovod")
    for number, name in enumerate(("20261129140323", "20261129140324"), start=1):
        (scene.root / f"checkpoint-{name}.pt").write_bytes(by_torch(number))
        found = scene.next().record
        assert (found.step, found.order) == (number, int(name))


AHEAD = 1 << 62
"""The order of a snapshot that was taken where the clock was far ahead."""


def test_a_file_without_a_number_is_newer_if_it_was_not_there_before(scene: Scene) -> None:
    write(scene.root, "torch-save-one", 1)
    (before,) = candidates(Look.at(scene.root), named("torch-save-one"))
    scene.begin("torch-save-one", Taken(AHEAD, 7, older=before.seen))
    scene.look_again()
    assert scene.found.empty()
    for number in (1, 2):
        write(scene.root, "torch-save-one", number)
        record = scene.next().record
        assert (record.order, record.step) == (AHEAD + number, 7 + number)
        standing = Lineage(scene.root).standing(record.order)
        assert standing is not None
        assert standing.age(candidates(Look.at(scene.root), named("torch-save-one"))[0].seen) == 0
    scene.ended()
    assert scene.found.empty()


def test_a_file_that_is_renamed_is_no_newer_one(scene: Scene) -> None:
    scene.begin("torch-save-dated")
    (scene.root / "model_0.5.pt").write_bytes(by_torch(1))
    (scene.root / "model_0.4.pt").write_bytes(by_torch(2))
    assert scene.next().record.name == "model_0.4.pt"
    (scene.root / "model_0.4.pt").rename(scene.root / "model_0.9.pt")
    scene.look_again()
    scene.ended()
    assert scene.found.empty()


class Passing(threading.Condition):
    """Time that passes only while a watcher waits. Every 0.1 s of it the program writes, until the end."""

    def __init__(self, write: Callable[[int], None]) -> None:
        super().__init__()
        self._write, self._now, self._number = write, 0.0, 0
        self.over = False

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if timeout is None or self.over:
            return super().wait_for(predicate, timeout)
        self._now += timeout
        while self._number < self._now * 10:
            self._number += 1
            self._write(self._number)
        return predicate()


def test_one_that_is_written_again_and_again_is_taken_between_two_writes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "LOOK_S", 0.4)
    written = {}

    def program(number: int) -> None:
        path = scene.root / "last.pt"
        written[number] = by_torch(number)
        path.write_bytes(written[number])
        os.utime(path, ns=(number, number))

    scene.watcher._condition = passing = Passing(program)
    scene.begin("torch-save-one")
    try:
        found = scene.next()
    finally:
        passing.over = True
    assert found.kept.files[0].source.read_bytes() in written.values()


def test_what_was_taken_in_an_earlier_life_is_not_taken_again(scene: Scene) -> None:
    scene.begin()
    write(scene.root, "transformers", 10)
    first = scene.next()
    scene.ended(well=False)
    whole = Survey.of(scene.root, "transformers", first.record).newest_whole
    assert whole is not None
    scene.begin(taken=taken_of(whole, first.record))
    scene.ended()
    assert scene.found.empty()
    scene.begin(taken=taken_of(whole, first.record))
    write(scene.root, "transformers", 20)
    assert scene.next().record.step == 20


def test_what_is_kept_stays_as_it_is_when_the_program_deletes_its_own(scene: Scene) -> None:
    scene.begin()
    write(scene.root, "transformers", 10)
    found = scene.next()
    shutil.rmtree(scene.root / "checkpoint-10")
    assert sum(file.source.stat().st_size for file in found.kept.files) == found.kept.bytes


def test_what_an_earlier_agent_has_left_aside_is_swept(scene: Scene) -> None:
    kept = folder_of(scene.root) / ASIDE
    (kept / "1-1").mkdir(parents=True)
    scene.begin()
    scene.ended()
    assert not kept.exists()


def test_without_room_for_a_copy_nothing_is_taken_and_it_is_said_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_NOT_BELOW_BYTES", 1 << 60)
    scene.begin()
    write(scene.root, "transformers", 10)
    assert "the disk has no room" in scene.said.get(timeout=HANG_S)
    scene.ended()
    assert scene.said.empty()
    assert scene.found.empty()


def test_what_the_last_program_has_left_needs_no_room(
    scene: Scene, python: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "_NOT_BELOW_BYTES", 1 << 60)
    process = python("import sys; sys.stdin.read()")
    scene.begin(pid=process.pid)
    write(scene.root, "transformers", 10)
    assert "the disk has no room" in scene.said.get(timeout=HANG_S)
    process.input.close()
    process.wait()
    scene.ended(is_last=True)
    assert scene.next().kept.how in ("link", "reflink")


PARENT = """
import os, signal, sys
if not os.fork():
    file = open(sys.argv[1], "ab")
    print("open", file=sys.stderr, flush=True)
    signal.pause()
sys.stdin.read()
"""


def test_a_file_that_a_child_which_outlives_the_program_has_open_is_not_taken(
    scene: Scene, python: Callable[..., Process]
) -> None:
    write(scene.root, "transformers", 20)
    path = scene.root / "checkpoint-20" / "optimizer.pt"
    process = python(PARENT, path)
    process.wait_for("open")
    scene.begin(pid=process.pid)
    write(scene.root, "transformers", 10)
    assert scene.next().record.step == 10
    process.input.close()
    assert process.wait_exit() == 0
    scene.ended()
    assert scene.found.empty()
    assert "checkpoint-20/optimizer.pt is open" in scene.watcher.why


@pytest.mark.parametrize(("well", "lives"), [(False, []), (True, ["a child"])])
def test_children_of_a_program_that_died_are_killed_before_it_starts_again(
    scene: Scene, python: Callable[..., Process], *, well: bool, lives: list[str]
) -> None:
    mark = ("MARK", str(scene.root))
    process = python(PARENT, scene.root / "log", env=dict([mark]))
    process.wait_for("open")
    scene.begin(pid=process.pid, mark=mark)
    process.input.close()
    assert process.wait_exit() == 0
    scene.ended(well=well)
    assert ["a child" for _ in processes.alive(processes.marked(*mark))] == lives
    assert scene.said.empty() is well


READER = PARENT.replace('file = open(sys.argv[1], "ab")', "pass")
STUBBORN = PARENT.replace("if not os.fork():", "if not os.fork():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)")


@pytest.mark.parametrize(
    ("code", "within_s", "words"),
    [(READER, HANG_S, ["get SIGTERM"]), (STUBBORN, 0.02, ["get SIGTERM", "are killed"])],
    ids=["ends", "stubborn, and writes"],
)
def test_what_an_interrupted_program_has_left_ends_before_the_last_look(
    scene: Scene, python: Callable[..., Process], code: str, within_s: float, words: list[str]
) -> None:
    """A shell script ends by the signal that it gets, and what it has started trains on."""
    mark = ("MARK", str(scene.root))
    process = python(code, scene.root / "log", env=dict([mark]))
    process.wait_for("open")
    scene.begin(pid=process.pid, mark=mark)
    process.input.close()
    assert process.wait_exit() == 0
    write(scene.root, "transformers", 10)
    scene.ended(well=False, is_last=True, leaves_s=within_s)
    assert processes.alive(processes.marked(*mark)) == []
    assert scene.next().record.step == 10
    for expected in words:
        assert expected in scene.said.get(timeout=HANG_S)
    assert scene.said.empty()
