"""Look: what there is, in which order, and by which table it is known."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from harness.watch.adapter import Adapter, Layout, Resume, built_in, named
from harness.watch.look import Look, Seen, candidates, recognized
from tests.support.layouts import LAYOUTS
from tests.support.watched import write


def table(**layout: object) -> Adapter:
    return Adapter("a", "a", msgspec.convert(layout, Layout), Resume("a"))


def touch(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
        os.utime(path, ns=(number, number))


def found(root: Path, adapter: Adapter) -> list[tuple[str, int | None]]:
    return [(one.name, one.step) for one in candidates(Look.at(root), adapter)]


def test_the_newest_is_the_one_of_the_greatest_step(tmp_path: Path) -> None:
    touch(tmp_path, "step-10/a", "step-9/a", "step-100/a", "step-x/a", "other/step-3/a")
    assert found(tmp_path, table(directory="step-{step}")) == [("step-9", 9), ("step-10", 10), ("step-100", 100)]


def test_a_step_that_begins_anew_in_each_epoch_comes_behind_the_epoch(tmp_path: Path) -> None:
    touch(tmp_path, "epoch-1_step-5/a", "epoch-0_step-900/a", "epoch-1_step-40/a", "epoch-0_step-0/a")
    names = [name for name, step in found(tmp_path, table(directory="epoch-{epoch}_step-{step}", step="epoch/step"))]
    assert names == ["epoch-0_step-0", "epoch-0_step-900", "epoch-1_step-5", "epoch-1_step-40"]


def test_without_a_step_it_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    touch(tmp_path, "b.pt", "a.pt")
    assert found(tmp_path, table(files=["{name}.pt"], files_are="each")) == [("b.pt", None), ("a.pt", None)]


def test_files_with_the_same_numbers_are_one(tmp_path: Path) -> None:
    touch(tmp_path, "model_1.pt", "optim_1.pt", "model_2.pt", "rank0_1.pt")
    adapter = table(files=["model_{step}.pt", "optim_{step}.pt", "rank{rank}_{step}.pt"])
    assert [(one.name, len(one.files)) for one in candidates(Look.at(tmp_path), adapter)] == [
        ("model_1.pt", 3),
        ("model_2.pt", 1),
    ]


def test_a_number_that_no_snapshot_can_have_is_no_step_and_tells_the_order_all_the_same(tmp_path: Path) -> None:
    touch(tmp_path, "model_20261129140324.pt", "model_20261129140323.pt", "model_7.pt")
    there = candidates(Look.at(tmp_path), named("torch-save"))
    assert [(one.order, one.step) for one in there] == [(7, 7), (20261129140323, None), (20261129140324, None)]


def test_a_number_that_a_record_has_no_room_for_is_no_order_either(tmp_path: Path) -> None:
    touch(tmp_path, f"model_{10**40}.pt", f"epoch-{10**12}_step-1/a")
    for name in ("torch-save", "colossalai"):
        (only,) = candidates(Look.at(tmp_path), named(name))
        assert (only.order, only.step) == (max(seen.modified_ns for seen in only.files.values()), None)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch{}.pt", 10),
        ("{}.pt", 10),
        ("model_epoch{}.pth", 10),
        ("model-{}.ckpt", 10),
        ("step{}.ckpt", 10),
        ("gpt2_{}.pt", 10),
        ("model_lr0.1_{}.pt", 10),
        ("model_{}_loss_0.25.pt", None),
        ("model_2026-11-29_14-03-{}.pt", None),
        ("model_20261129_1403{}.pt", None),
    ],
)
def test_of_files_of_torch_save_each_number_is_another_checkpoint(name: str, step: int | None, tmp_path: Path) -> None:
    touch(tmp_path, name.format("09"), name.format("10"), name.format("10").replace("model", "optim"))
    first, *_ = recognized(Look.at(tmp_path), built_in())
    assert first.name == ("torch-save-dated" if step is None else "torch-save")
    assert found(tmp_path, first) == [(name.format("09"), step and 9), (name.format("10"), step)]


def test_what_is_left_out_and_what_is_shared(tmp_path: Path) -> None:
    touch(tmp_path, "step-1/a", "step-1/log.txt", "config.json")
    adapter = table(directory="step-{step}", leave_out=["*.txt"], shared=["config.json"])
    (only,) = candidates(Look.at(tmp_path), adapter)
    assert (set(only.files), set(only.shared)) == ({"step-1/a"}, {"config.json"})


@pytest.mark.parametrize(
    "content", [b'{"n": 7}', b'{"n": -1}', b'{"n": "7"}', b"[7]", b"{", b"", b'{"n": 7.5}', b'"\xff"', b"[" * 100_000]
)
def test_a_step_in_a_file(content: bytes, tmp_path: Path) -> None:
    touch(tmp_path, "epoch-1/state.json")
    (tmp_path / "epoch-1" / "state.json").write_bytes(content)
    adapter = table(directory="epoch-{epoch}", step="state.json:n")
    assert found(tmp_path, adapter) == [("epoch-1", 7 if content == b'{"n": 7}' else None)]


def test_links_and_our_own_names_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    touch(outside, "step-1/a")
    root = tmp_path / "out"
    touch(root, ".harness-aside/step-2/a", "step-3/a")
    (root / "step-1").symlink_to(outside / "step-1")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "step-3" / "pipe")
    look = Look.at(root)
    assert set(look.files) == {"step-3/a"}
    assert look.links == {"step-1": str(outside / "step-1"), "loop": str(root)}
    assert found(root, table(directory="step-{step}")) == [("step-3", 3)]


def test_links_are_kept_as_what_they_lead_to_needs_it(tmp_path: Path) -> None:
    touch(tmp_path, "base.bin", "out/step-1/a", "out/step-1/deep/b", "out/step-2/a")
    at = tmp_path / "out" / "step-2"
    (at / "empty" / "deep").mkdir(parents=True)
    (at / "inside").symlink_to("a")
    (at / "empty" / "up").symlink_to("../a")
    (at / "folder").symlink_to("empty")
    (at / "outside").symlink_to(tmp_path / "base.bin")
    (at / "before").symlink_to("../step-1/deep/b")
    (at / "absolute").symlink_to(at / "a")
    one, two = candidates(Look.at(tmp_path / "out"), table(directory="step-{step}"))
    assert (one.links, one.folders, one.odd) == ({}, (), {})
    assert two.links == {"step-2/inside": "a", "step-2/empty/up": "../a", "step-2/folder": "empty"}
    assert set(two.files) == {"step-2/a", "step-2/outside", "step-2/before", "step-2/absolute"}
    assert two.files["step-2/outside"] == Seen.of((tmp_path / "base.bin").stat())
    assert (two.folders, two.odd) == (("step-2/empty/deep",), {})


@pytest.mark.parametrize(
    ("name", "to", "words"),
    [
        ("nowhere", "gone", "link to no file"),
        ("out", "/", "link to no file"),
        ("above", "..", "link to no file"),
        ("pipe", None, "neither a file nor a directory"),
        ("\udce9tat", "", r"\xe9tat, which has a name that is no UTF-8"),
    ],
)
def test_what_cannot_be_kept_is_told(name: str, to: str | None, words: str, tmp_path: Path) -> None:
    touch(tmp_path, "step-1/a", "step-1/log/b")
    path = os.path.join(tmp_path, "step-1", "log", name)  # noqa: PTH118  a path of Path would do as well
    if to is None:
        os.mkfifo(path)
    elif to:
        os.symlink(to, path)  # noqa: PTH211
    else:
        os.mkdir(path)  # noqa: PTH102
    (one,) = candidates(Look.at(tmp_path), table(directory="step-{step}"))
    assert words in one.why_odd
    (one,) = candidates(Look.at(tmp_path), table(directory="step-{step}", leave_out=["log/*"]))
    assert one.why_odd == ""


def test_links_are_no_checkpoints_of_their_own(tmp_path: Path) -> None:
    touch(tmp_path, "model_1.pt")
    (tmp_path / "last.pt").symlink_to("model_1.pt")
    assert found(tmp_path, named("torch-save-one")) == [("model_1.pt", None)]


def test_a_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert Look.at(tmp_path / "nowhere").files == {}


ALIKE = {"mindnlp": "transformers", "fairscale": "torch-save"}
"""Tables that a user has to name, and those that their files look like."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_known_by_its_names(name: str, tmp_path: Path) -> None:
    write(tmp_path / "out", name, 10, 20)
    first, *_ = recognized(Look.at(tmp_path / "out"), built_in())
    adapter = LAYOUTS[name][0]
    assert first.name == ALIKE.get(adapter, adapter)
    assert candidates(Look.at(tmp_path / "out"), first)


@pytest.mark.parametrize(
    ("adapter", "path"),
    [
        ("composer", "checkpoints/ep0-ba10-rank0.pt"),
        ("fastai", "run/models/model_3.pth"),
        ("lightning", "lightning_logs/version_0/checkpoints/epoch=1-step=20.ckpt"),
        ("lightning", "checkpoints/epoch=1-step=20.ckpt"),
        ("timm", "run/last.pth.tar"),
    ],
)
def test_the_directory_that_a_framework_puts_in_between_may_be_watched_from_above(
    adapter: str, path: str, tmp_path: Path
) -> None:
    touch(tmp_path, path)
    assert [one.name for one in candidates(Look.at(tmp_path), named(adapter))] == [path]


def test_names_alone_are_no_checkpoint(tmp_path: Path) -> None:
    touch(tmp_path, "checkpoint-1/readme.txt", "step_5/notes", "global_step3/a", "iter_7/a", "10/a", "0-5/a")
    assert recognized(Look.at(tmp_path), built_in()) == []


def test_every_table_says_where_it_is_from_and_explains_itself() -> None:
    assert len(built_in()) == 30
    for name, adapter in built_in().items():
        assert named(name) is adapter
        assert adapter.source
        assert any(line.startswith("a checkpoint is") for line in adapter.explained())
