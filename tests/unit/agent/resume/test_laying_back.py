"""Laying back: the newest whole checkpoint is where the program looks, and nothing that was there is lost."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloud.digest import parse_crc
from cloud.errors import NotFound
from cloud.store import ObjectInfo
from cloud.testing.memory import MemoryStore
from harness.agent.resume import finder
from harness.agent.resume.finder import Finder
from harness.agent.resume.laying_back import CheckpointFinder
from harness.agent.resume_point import ResumePoint
from harness.config.settings import Settings
from harness.core import events
from harness.core.manifest import Manifest
from harness.errors import ConfigError, NoSpace, SnapshotCorrupt
from harness.snapshots import commit
from harness.snapshots.candidates import StoredCopy
from harness.watch import place
from harness.watch.ours import ASIDE, FETCHED, LINEAGE, MOVED, POINTER, folder_of
from harness.watch.record import Record, decode, encode
from harness.watch.survey import Survey
from tests.support.context import a_context
from tests.support.layouts import LAYOUTS, by_torch, contents, everything
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content, Crash, ProtocolStore
from tests.support.watched import publish_newest, write


class Scene:
    """A machine that has made snapshots, a store, and another machine."""

    def __init__(self, root: Path, layout: str) -> None:
        self.layout, self.adapter = layout, LAYOUTS[layout][0]
        self.made, self.root = root / "made", root / "out"
        self.store = ProtocolStore(MemoryStore())
        self.said, self.events = list[str](), list[events.Event]()
        self.manifests: dict[int, Manifest] = {}

    def snapshot(self, *steps: int) -> None:
        for step in steps:
            write(self.made, self.layout, step)
            self.manifests[step] = publish_newest(self.store, self.made, self.adapter, step)

    def find(
        self, *, name: str | None = "", goes_back: bool = False, steps: tuple[int, ...] = ()
    ) -> ResumePoint | None:
        context = a_context(Settings(store="s", run="run"), emit=self.events.append, say=self.said.append)
        named = self.adapter if name == "" else name
        self.finder = CheckpointFinder(context, RUN_ID, self.root, named, goes_back=goes_back)
        wanted = steps or tuple(self.manifests)
        copies = [StoredCopy(self.manifests[step].id, "remote", self.store) for step in wanted]
        return self.finder.find(copies, lambda copy, records: None)

    def files_of(self, step: int) -> dict[str, bytes]:
        files = self.manifests[step].parts[0].files
        assert isinstance(files, tuple)
        return {file.path: self.store.peek(KEYS.payload(self.manifests[step].directory, file.name)) for file in files}

    def is_there(self, step: int) -> bool:
        wanted = self.files_of(step)
        return all((self.root / path).is_file() for path in wanted) and contents(self.root, [*wanted]) == wanted

    def bytes_here(self) -> Counter[bytes]:
        """Every file's bytes, wherever they lie, but for those that are only half fetched."""
        mine = (FETCHED, POINTER, ASIDE, LINEAGE)
        ours = {path: data for path, data in everything(folder_of(self.root)).items() if not path.startswith(mine)}
        return Counter([*everything(self.root).values(), *ours.values()])


@pytest.fixture(params=[name for name in LAYOUTS if name not in ("torch-save-renamed", "transformers-jit")])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    return Scene(tmp_path, request.param)


def test_on_a_fresh_machine_the_newest_snapshot_is_laid_back(scene: Scene) -> None:
    scene.snapshot(10, 20)
    point = scene.find()

    assert point is not None
    assert point.id == scene.manifests[20].id
    assert scene.is_there(20)
    newest = Survey.of(scene.root, scene.adapter, None).judged[-1].candidate
    assert scene.finder.laid.taken.order == newest.order, "it is not taken for a newer one"
    assert scene.finder.laid.checkpoint == scene.root / newest.name
    assert not (folder_of(scene.root) / FETCHED).exists()


def test_the_pointer_that_the_program_reads_names_what_was_laid_back(tmp_path: Path) -> None:
    for layout, path, says in (
        ("deepspeed", "latest", "global_step20"),
        ("megatron", "latest_checkpointed_iteration.txt", "20"),
        ("composer", "latest-rank0.pt", "ep0-ba20-rank0.pt"),
        ("detectron2", "last_checkpoint", "model_0000020.pth"),
        ("mmengine", "last_checkpoint", str(tmp_path / "mmengine" / "out" / "iter_20.pth")),
    ):
        scene = Scene(tmp_path / layout, layout)
        (tmp_path / layout).mkdir()
        scene.snapshot(10, 20)
        write(scene.root, layout, 10)
        scene.find()
        pointer = scene.root / path
        assert (str(pointer.readlink()) if pointer.is_symlink() else pointer.read_text()) == says


def test_what_is_there_and_is_newer_stays_and_wins(scene: Scene) -> None:
    scene.snapshot(10, 20)
    shutil.copytree(scene.made, scene.root, symlinks=True)
    write(scene.root, scene.layout, 30)
    before = everything(scene.root)
    point = scene.find()

    assert point is not None
    assert everything(scene.root) == before
    assert any("goes on from what it has" in words for words in scene.said) or scene.layout in PARTS


PARTS = ("fairscale", "stable-baselines3", "torch-save")
"""Where only the next checkpoint shows that one has all of its files. The snapshot before tells which they are."""


def test_what_is_there_already_is_not_fetched_again(scene: Scene) -> None:
    scene.snapshot(10, 20)
    shutil.copytree(scene.made, scene.root, symlinks=True)
    before = everything(scene.root)
    assert scene.find() is not None
    assert everything(scene.root) == before
    fetched = [event.bytes for event in scene.events if isinstance(event, events.Fetched)]
    assert fetched == [0]


def torn(scene: Scene, step: int, last: int) -> Iterator[Path]:
    """Directories in which a checkpoint was being written: one for each moment, and the last moments left out."""
    moments = list(range(len([None for _ in LAYOUTS[scene.layout][1](scene.root.with_name("whole"), step)]) - last))
    for number, end in enumerate(moments[:: max(1, len(moments) // 12)]):
        root = scene.root.with_name(f"out-{number}")
        shutil.copytree(scene.made, root, symlinks=True)
        writer = LAYOUTS[scene.layout][1](root, step)
        for _ in range(end + 1):
            next(writer)
        writer.close()  # type: ignore[attr-defined]
        yield root


def test_wherever_its_writer_was_killed_the_program_finds_a_whole_one_and_no_byte_is_lost(scene: Scene) -> None:
    scene.snapshot(10, 20)
    for root in torn(scene, 30, 1):
        scene.root = root
        before = scene.bytes_here()
        assert scene.find() is not None
        there = Survey.of(root, scene.adapter, None).judged
        assert not [one for one in there if one.lack is not None and one.lack.is_torn], root
        assert scene.is_there(20) or there[-1].candidate.order > scene.finder.laid.taken.order
        assert not before - scene.bytes_here() - pointers(scene), "nothing of the program's is lost"


def pointers(scene: Scene) -> Counter[bytes]:
    """What the program's pointers may have said: they are kept as well, but as a link they have no bytes."""
    return Counter({b"ep0-ba30-rank0.pt": 9, b"ep0-ba20-rank0.pt": 9})


def dies_at(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Have the process die at the `at`-th change of the directory; return how many were made so far."""
    changes = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal changes
            changes += 1
            if changes == at:
                raise Crash
            return real(*args, **options)

        return call

    for name in ("rename", "mkdir", "unlink", "symlink_to"):
        monkeypatch.setattr(place.Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(place, "_sync", counted(place._sync))
    return lambda: changes


def test_wherever_the_agent_dies_the_next_one_ends_what_it_began_and_nothing_is_lost(scene: Scene) -> None:
    """A torn checkpoint is in the way, and an older one is there."""
    scene.snapshot(10, 20, 30)
    shutil.rmtree(scene.made)
    write(scene.made, scene.layout, 10)
    half = [scene.root for scene.root in torn(scene, 30, 1) if not scene.is_there(30)][-1]
    at = 0
    while True:
        at += 1
        scene.root = half.with_name(f"dies-{at}")
        shutil.copytree(half, scene.root, symlinks=True)
        before = scene.bytes_here()
        with pytest.MonkeyPatch.context() as monkeypatch:
            changes = dies_at(monkeypatch, at)
            try:
                scene.find()
            except Crash:
                pass
            else:
                assert changes() < at
                break
        assert not before - scene.bytes_here() - pointers(scene), at
        assert scene.find() is not None
        assert scene.is_there(30), at
        assert not before - scene.bytes_here() - pointers(scene), at
    assert at > 4


def test_a_snapshot_with_a_damaged_file_is_not_laid_back_and_the_one_before_is(scene: Scene) -> None:
    scene.snapshot(10, 20)
    largest = max(scene.manifests[20].parts[0].stored, key=lambda entry: entry.size)
    key = KEYS.payload(scene.manifests[20].directory, largest.name)
    scene.store.damage(key, "flip")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("harness.agent.resume.finder.PAUSES_S", (0.0,))
        point = scene.find()
    assert point is not None
    assert point.id == scene.manifests[10].id
    assert scene.is_there(10)


@pytest.mark.parametrize("fault", ["differs", "is missing"])
def test_a_chunk_that_came_wrong_once_is_read_again(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, "transformers")
    scene.snapshot(10, 20)
    real, reads = scene.store.get, Counter[tuple[str, int]]()

    def flaky(key: str, into: memoryview, *, offset: int = 0, **options: Any) -> None:
        real(key, into, offset=offset, **options)
        reads[key, offset] += 1
        if reads[key, offset] <= len(finder.PAUSES_S):
            if fault == "is missing":
                raise NotFound(key)
            into[0] ^= 1

    monkeypatch.setattr(finder, "PAUSES_S", [0.0] * len(finder.PAUSES_S))
    monkeypatch.setattr(scene.store, "get", flaky)
    point = scene.find()
    assert point is not None
    assert point.id == scene.manifests[20].id
    assert scene.is_there(20)
    assert set(reads.values()) == {1 + len(finder.PAUSES_S)}


def test_files_that_the_store_reports_as_missing_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "transformers")
    scene.snapshot(10)

    def gone(key: str, into: memoryview, **_: Any) -> None:
        raise NotFound(key)

    monkeypatch.setattr(finder, "PAUSES_S", ())
    monkeypatch.setattr(scene.store, "get", gone)
    with pytest.raises(finder.SnapshotsMissing):
        scene.find()
    assert everything(scene.root) == {}


def test_a_host_that_reads_wrong_bytes_condemns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, "transformers")
    scene.snapshot(10, 20)
    folder = scene.manifests[20].directory
    sums = {KEYS.payload(folder, entry.name): entry.crc64nvme for entry in scene.manifests[20].parts[0].stored}
    real, stat = scene.store.get, scene.store.stat

    def bad_get(key: str, into: memoryview, **options: Any) -> None:
        real(key, into, **options)
        into[0] ^= key in sums

    def with_sum(key: str, **options: Any) -> ObjectInfo:
        return dataclasses.replace(stat(key, **options), crc64nvme=parse_crc(sums[key]) if key in sums else None)

    monkeypatch.setattr(finder, "PAUSES_S", ())
    monkeypatch.setattr(scene.store, "get", bad_get)
    monkeypatch.setattr(scene.store, "stat", with_sum)
    point = scene.find()
    assert point is not None
    assert point.id == scene.manifests[10].id
    assert scene.store.keys(KEYS.quarantine) == []
    (rejected,) = (event for event in scene.events if isinstance(event, events.Rejected))
    assert "the store's own checksum is right: this host may be at fault" in rejected.reason


def test_to_go_back_moves_what_is_newer_away(scene: Scene) -> None:
    scene.snapshot(10, 20)
    shutil.copytree(scene.made, scene.root, symlinks=True)
    before = scene.bytes_here()
    assert scene.find(goes_back=True, steps=(10,)) is not None
    assert scene.is_there(10)
    orders = [one.candidate.order for one in Survey.of(scene.root, scene.adapter, None).judged]
    assert max(orders) == scene.finder.laid.taken.order
    assert not before - scene.bytes_here() - pointers(scene)


def test_without_a_snapshot_only_what_is_torn_is_moved(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "transformers")
    write(scene.root, "transformers", 10, 20)
    (scene.root / "checkpoint-20" / "optimizer.pt").write_bytes(b"PK\x03\x04 cut")
    (scene.root / "runs").mkdir()
    assert scene.find() is None
    assert sorted(path.name for path in scene.root.iterdir()) == ["checkpoint-10", "runs"]
    assert list((folder_of(scene.root) / MOVED).glob("*-torn/checkpoint-20"))
    assert "optimizer.pt" in scene.said[0]
    assert scene.finder.laid.checkpoint == scene.root / "checkpoint-10"


@pytest.mark.parametrize("layout", ["deepspeed", "megatron", "composer", "detectron2", "mmengine"])
def test_a_pointer_to_the_only_checkpoint_goes_with_it_if_that_is_torn(layout: str, tmp_path: Path) -> None:
    """The program would look for what is not there, and fail each time."""
    scene = Scene(tmp_path, layout)
    write(scene.root, layout, 10)
    victim = next(path for path in sorted(scene.root.rglob("*.pt*")) if not path.is_symlink())
    victim.write_bytes(victim.read_bytes()[:-9])
    assert scene.find() is None
    assert list(scene.root.iterdir()) == []
    assert scene.finder.laid.checkpoint is None


@pytest.mark.parametrize("layout", ["deepspeed", "megatron", "composer", "detectron2", "mmengine"])
def test_wherever_the_agent_dies_no_pointer_to_a_torn_checkpoint_outlives_it(layout: str, tmp_path: Path) -> None:
    """Once that is moved, nothing shows the next start which adapter's pointer it is."""
    at, over = 0, False
    while not over:
        at += 1
        scene = Scene(tmp_path / str(at), layout)
        scene.root.mkdir(parents=True)
        write(scene.root, layout, 10)
        kept = {path for path in scene.root.iterdir() if path.is_symlink() or path.is_file()}
        victim = next(path for path in sorted(scene.root.rglob("*.pt*")) if not path.is_symlink())
        victim.write_bytes(victim.read_bytes()[:-9])
        with pytest.MonkeyPatch.context() as monkeypatch:
            dies_at(monkeypatch, at)
            try:
                scene.find(name=None)
                over = True
            except Crash:
                scene.find(name=None)
        pointers_left = [path for path in kept - {victim} if os.path.lexists(path)]
        assert not pointers_left or victim.exists(), at
    assert at > 2


def test_a_snapshot_of_another_adapter_is_older_than_what_was_written_since(tmp_path: Path) -> None:
    """A file that many programs have was taken before anything else was there: its order is no step."""
    scene = Scene(tmp_path, "torch-save-one")
    scene.snapshot(1)
    write(scene.root, "dcp", 10)
    assert scene.find(name=None) is not None
    assert sorted(path.name for path in scene.root.iterdir()) == ["step-10"]
    assert scene.finder.laid.checkpoint == scene.root / "step-10"
    assert (scene.finder.laid.taken.order, scene.finder.laid.taken.step) == (-1, 1)


def test_links_and_empty_directories_come_back(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "transformers")
    write(scene.made, "transformers", 10)
    (tmp_path / "base").write_bytes(b"base")
    at = scene.made / "checkpoint-10"
    (at / "empty" / "deep").mkdir(parents=True)
    (at / "inside").symlink_to("optimizer.pt")
    (at / "outside").symlink_to(tmp_path / "base")
    scene.manifests[10] = publish_newest(scene.store, scene.made, scene.adapter, 10)
    assert scene.find() is not None
    back = scene.root / "checkpoint-10"
    assert (back / "empty" / "deep").is_dir()
    assert str((back / "inside").readlink()) == "optimizer.pt"
    assert not (back / "outside").is_symlink()
    assert (back / "outside").read_bytes() == b"base"
    assert scene.find() is not None
    fetched = [event.bytes for event in scene.events if isinstance(event, events.Fetched)]
    assert fetched[1:] == [0]


@pytest.mark.parametrize(
    "odd",
    [
        {"links": {"checkpoint-10/a": "../../a"}},
        {"links": {"checkpoint-10/a": "/etc"}},
        {"links": {"../a": "b"}},
        {"folders": ("../a",)},
        {"folders": ("other/a",)},
    ],
)
def test_a_record_that_leads_out_of_its_checkpoint_is_refused(odd: dict[str, Any]) -> None:
    good = Record(
        adapter="transformers",
        name="checkpoint-10",
        is_directory=True,
        step=10,
        order=10,
        texts={},
        ranks=None,
        shape=(),
        modified_ns=0,
    )
    assert decode(encode(good)) == good
    with pytest.raises(SnapshotCorrupt, match="leads out of checkpoint-10"):
        decode(encode(msgspec.structs.replace(good, **odd)))


AHEAD_NS = 600 * 10**9
"""By which the clock of the machine that made the snapshots is ahead."""


def ahead(tmp_path: Path) -> Scene:
    """One file that is written again and again, by a machine whose clock is ahead, and laid back by another."""
    scene = Scene(tmp_path, "torch-save-one")
    scene.snapshot(1)
    at_ns = (scene.made / "last.pt").stat().st_mtime_ns + AHEAD_NS
    os.utime(scene.made / "last.pt", ns=(at_ns, at_ns))
    scene.manifests[2] = publish_newest(scene.store, scene.made, scene.adapter, 2)
    assert scene.find() is not None
    return scene


def test_what_is_written_here_is_newer_though_another_machine_s_clock_was_ahead(tmp_path: Path) -> None:
    scene = ahead(tmp_path)
    write(scene.root, "torch-save-one", 3)
    before = everything(scene.root)
    assert scene.find() is not None
    assert everything(scene.root) == before
    taken = scene.finder.laid.taken
    assert (taken.step, taken.files) == (2, frozenset()), "it is still to be taken"


def test_what_was_laid_back_is_found_again_by_what_it_is(tmp_path: Path) -> None:
    scene = ahead(tmp_path)
    assert scene.find() is not None
    fetched = [event.bytes for event in scene.events if isinstance(event, events.Fetched)]
    assert fetched[1:] == [0]
    newest = Survey.of(scene.root, scene.adapter).judged[-1].candidate
    assert {seen for _, seen in scene.finder.laid.taken.files} == newest.seen


def test_what_was_left_here_is_older_than_what_another_machine_has_gone_on_to(tmp_path: Path) -> None:
    scene = ahead(tmp_path)
    write(scene.root, "torch-save-one", 3)
    later_ns = (scene.root / "last.pt").stat().st_mtime_ns + 2 * AHEAD_NS
    os.utime(scene.root / "last.pt", ns=(later_ns, later_ns))
    before = scene.bytes_here()
    write(scene.made, "torch-save-one", 4)
    order_ns = (scene.made / "last.pt").stat().st_mtime_ns + AHEAD_NS + AHEAD_NS // 2
    os.utime(scene.made / "last.pt", ns=(order_ns, order_ns))
    scene.manifests[4] = publish_newest(scene.store, scene.made, scene.adapter, 4)
    assert scene.find() is not None
    assert scene.is_there(4)
    assert not before - scene.bytes_here(), "it is kept aside"


def test_of_several_without_a_number_the_one_that_is_newer_than_the_snapshot_stays(tmp_path: Path) -> None:
    """What was laid back has a later time than what was written since."""
    scene = Scene(tmp_path, "torch-save-one")
    scene.adapter = "torch-save-dated"
    scene.made.mkdir()
    at_ns = (scene.made.stat().st_mtime_ns) + AHEAD_NS
    for number in (1, 2):
        path = scene.made / f"model_0.{number}.pt"
        path.write_bytes(by_torch(number))
        os.utime(path, ns=(at_ns + number, at_ns + number))
    scene.manifests[2] = publish_newest(scene.store, scene.made, scene.adapter, 2)
    assert scene.find() is not None
    (scene.root / "model_0.3.pt").write_bytes(by_torch(3))
    assert scene.find() is not None
    assert sorted(path.name for path in scene.root.iterdir()) == ["model_0.2.pt", "model_0.3.pt"]
    assert scene.finder.laid.checkpoint == scene.root / "model_0.3.pt"
    there = {one.candidate.name: one.candidate for one in Survey.of(scene.root, scene.adapter).judged}
    taken = scene.finder.laid.taken
    assert there["model_0.2.pt"].seen <= taken.older
    assert not there["model_0.3.pt"].seen <= taken.older


def test_a_checkpointer_s_snapshot_and_one_of_files_are_told_apart(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "transformers")
    scene.snapshot(10)
    context = a_context(Settings(store="s", run="run"))
    plain = Finder(KEYS, RUN_ID, "host", context.emit)
    copies = [StoredCopy(scene.manifests[10].id, "remote", scene.store)]
    with pytest.raises(ConfigError, match="--watch"):
        plain.find(copies, lambda copy, records: None)

    content = Content(scene.manifests[10].id).staged()
    other = ProtocolStore(MemoryStore())
    scene.manifests[10] = commit.publish(other, KEYS, content, "remote", FOREVER, lambda event: None)
    scene.store = other
    with pytest.raises((ConfigError, SnapshotCorrupt), match="files"):
        scene.find()


def test_a_disk_that_takes_a_part_of_a_write_gets_the_rest_or_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, "transformers")
    scene.snapshot(10)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 2)], at))
    assert scene.find() is not None
    assert scene.is_there(10)

    shutil.rmtree(scene.root)
    left = [1000]

    def full(fd: int, data: memoryview, at: int) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = real(fd, data[: left[0]], at)
        left[0] -= count
        return count

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpace, match="cannot be laid back"):
        scene.find()
    assert not scene.root.exists()
