"""Judge: the reasons why something is no whole checkpoint, one by one, and when each of them does not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from harness.watch.adapter import Adapter, Complete, Index, Layout, Pointer, Resume, named
from harness.watch.judge import Circumstances, Lack, is_named_by, lack_of, shape_of
from harness.watch.look import Look, candidates
from harness.watch.sound import Sound
from tests.support.watched import write


def table(directory: str = "step-{step}", *pointers: Pointer, **complete: object) -> Adapter:
    marks = msgspec.convert(complete, Complete)
    return Adapter("a", "a", Layout(directory), Resume("a"), marks, pointers, by_name=bool(complete.get("quiet_s")))


def of_files(*patterns: str, files_are: str = "parts") -> Adapter:
    layout = msgspec.convert({"files": patterns, "files_are": files_are}, Layout)
    return Adapter("a", "a", layout, Resume("a"))


def put(root: Path, **files: bytes | str) -> None:
    """Write files; `__` in a name stands for `/`, and `_dot_` for a dot."""
    for name, data in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)


def judged(root: Path, adapter: Adapter, known: Circumstances | None = None) -> dict[str, Lack | None]:
    look = Look.at(root)
    found = candidates(look, adapter)
    known = known or Circumstances()
    return {one.name: lack_of(one, look, adapter, found, Sound(), known) for one in found}


def why(root: Path, adapter: Adapter, known: Circumstances | None = None) -> str:
    """Why the newest is not whole; empty if it is."""
    lack = list(judged(root, adapter, known).values())[-1]
    return "" if lack is None else lack.why


MARKED = table(has=("DONE",))


def test_one_with_its_mark_is_whole_and_one_without_is_torn(tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/DONE": "", "step-1/a": "1", "step-2/a": "1"})
    found = judged(tmp_path, MARKED)
    assert found["step-1"] is None
    assert found["step-2"] == Lack("has no DONE")


def test_what_is_there_while_it_is_written(tmp_path: Path) -> None:
    adapter = table(has=("a",), has_not=("*.lock",), beside_not=("{name}.busy",))
    put(tmp_path, **{"step-1/a": "1"})
    assert why(tmp_path, adapter) == ""
    put(tmp_path, **{"step-1.busy": ""})
    assert "step-1.busy is there" in why(tmp_path, adapter)
    (tmp_path / "step-1.busy").unlink()
    put(tmp_path, **{"step-1/x.lock": ""})
    assert "x.lock is there" in why(tmp_path, adapter)


@pytest.mark.parametrize("name", ["model.tmp", "tmp.model", "model.partial", "x-incomplete", "a_tmp_1"])
def test_a_file_whose_name_says_that_it_is_being_written(name: str, tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/DONE": "", f"step-1/{name}": "1"})
    assert name in why(tmp_path, MARKED)


@pytest.mark.parametrize("name", ["template.json", "attempt", "temperature"])
def test_a_name_that_only_begins_like_that(name: str, tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/DONE": "", f"step-1/{name}": "{}"})
    assert why(tmp_path, MARKED) == ""


def test_every_file_that_an_index_names(tmp_path: Path) -> None:
    adapter = table(index=(Index("*.index.json|sub/*.index.json", "map"),))
    put(tmp_path, **{"step-1/sub/m.index.json": '{"map": {"w": "one", "v": "two"}}', "step-1/sub/one": "1"})
    assert "lacks sub/two" in why(tmp_path, adapter)
    put(tmp_path, **{"step-1/sub/two": "1"})
    assert why(tmp_path, adapter) == ""
    put(tmp_path, **{"step-1/sub/m.index.json": '{"map": {"w": "one'})
    assert "index that cannot be read" in why(tmp_path, adapter)


@pytest.mark.parametrize("content", ["[1]", "1", "null", '{"map": 3}', '{"map": [1, null]}', "{}"])
def test_an_index_of_any_content_is_no_error(content: str, tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/m.index.json": content})
    why(tmp_path, table(index=(Index("m.index.json", "map"),)))


def test_a_file_of_each_rank(tmp_path: Path) -> None:
    adapter = table(each_rank=("rank{rank}.pt",))
    put(tmp_path, **{"step-1/rank0.pt": b"\x80\x04N.", "step-1/rank2.pt": b"\x80\x04N."})
    assert "file of rank 1" in why(tmp_path, adapter)
    (tmp_path / "step-1" / "rank2.pt").unlink()
    assert why(tmp_path, adapter, Circumstances(ranks=1)) == ""
    assert "file of rank 1" in why(tmp_path, adapter, Circumstances(ranks=2))
    (tmp_path / "step-1" / "rank0.pt").rename(tmp_path / "step-1" / "other.pt")
    assert "file of rank 0" in why(tmp_path, adapter, Circumstances(ranks=1))


LATEST = Pointer("latest", "{name}", is_last=True)


def test_what_the_pointer_does_not_name_yet(tmp_path: Path) -> None:
    adapter = table("step-{step}", LATEST)
    put(tmp_path, **{"step-1/a": "1", "step-2/a": "1", "latest": "step-1\n"})
    assert judged(tmp_path, adapter) == {
        "step-1": None,
        "step-2": Lack("is not named by latest yet, which says 'step-1'"),
    }
    put(tmp_path, latest="step-2")
    assert why(tmp_path, adapter) == ""


@pytest.mark.parametrize("says", ["", "   ", None])
def test_a_pointer_that_says_nothing_leaves_it_open(says: str | None, tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/a": "1"})
    if says is not None:
        put(tmp_path, latest=says)
    lack = judged(tmp_path, table("step-{step}", LATEST))["step-1"]
    assert lack is not None
    assert not lack.is_torn


@pytest.mark.parametrize("says", ["step-", "elsewhere", "\xff\xfe", "step-" + "9" * 100])
def test_a_pointer_that_leads_nowhere(says: str, tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/a": "1", "latest": says})
    assert why(tmp_path, table("step-{step}", LATEST)).startswith("is not named by latest")


def test_a_pointer_names_by_number(tmp_path: Path) -> None:
    put(tmp_path, **{"iter_0000020/a": "1", "tracker": "20"})
    look, adapter = Look.at(tmp_path), table("iter_{step}", Pointer("tracker", "{step}", is_last=True))
    assert is_named_by(look, adapter.pointers[0], candidates(look, adapter)[0])
    assert why(tmp_path, adapter) == ""


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/DONE": "", "step-1/a.json": "{"})
    assert "a.json" in why(tmp_path, MARKED)


def test_one_that_is_written_or_has_just_changed_is_not_torn(tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/DONE": "", "step-1/a": "1"})
    before = Look.at(tmp_path)
    assert why(tmp_path, MARKED, Circumstances(before)) == ""
    assert "is open" in why(tmp_path, MARKED, Circumstances(before, writing={"step-1/a"}))
    put(tmp_path, **{"step-1/a": "22"})
    lack = judged(tmp_path, MARKED, Circumstances(before))["step-1"]
    assert lack is not None
    assert lack == Lack("has just changed: step-1/a", is_torn=False, is_passing=True)


# ---- without a mark that comes last ---------------------------------------------------------------------------------

PARTS = of_files("model_{step}.json", "optimizer_{step}.json")


def test_the_first_one_shows_with_the_next_or_with_a_good_end(tmp_path: Path) -> None:
    put(tmp_path, **{"model_1.json": "{}"})
    before = Look.at(tmp_path)
    assert "is the first one" in why(tmp_path, PARTS, Circumstances(before))
    assert why(tmp_path, PARTS, Circumstances(ended_well=True)) == ""
    put(tmp_path, **{"model_2.json": "{}"})
    assert judged(tmp_path, PARTS)["model_1.json"] is None


def test_one_that_is_named_by_the_user_counts_after_a_while(tmp_path: Path) -> None:
    put(tmp_path, **{"model_1.json": "{}"})
    for changed_s, is_named, whole in ((60.0, True, True), (60.0, False, False), (5.0, True, False)):
        known = Circumstances(Look.at(tmp_path), changed_s={"model_1.json": changed_s}, is_named=is_named)
        assert (why(tmp_path, PARTS, known) == "") is whole


def shape(root: Path, adapter: Adapter) -> frozenset[str]:
    return shape_of(candidates(Look.at(root), adapter)[-1])


def test_one_that_lacks_a_file_of_the_one_before(tmp_path: Path) -> None:
    put(tmp_path, **{"model_1.json": "{}", "optimizer_1.json": "{}"})
    known = Circumstances(shape=shape(tmp_path, PARTS))
    put(tmp_path, **{"model_2.json": "{}"})
    assert why(tmp_path, PARTS, known) == "lacks optimizer_#.json, which the one before has"
    assert why(tmp_path, PARTS, replace(known, ended_well=True)) == ""

    put(tmp_path, **{"model_3.json": "{}"})
    assert judged(tmp_path, PARTS, known)["model_2.json"] is not None, "another life may have written the third"
    live = replace(known, before=Look.at(tmp_path))
    assert judged(tmp_path, PARTS, live)["model_2.json"] is None, "the program has gone on to the third"


def test_files_with_the_same_name_but_for_a_number_are_counted(tmp_path: Path) -> None:
    put(tmp_path, **{"step-1/rank0": "1", "step-1/rank1": "1", "step-1/rank17": "1", "step-1/a": "1"})
    assert shape(tmp_path, table()) == {"rank#", "rank# (2)", "rank# (3)", "a"}


def test_an_early_mark_of_unknown_ranks_is_not_believed(tmp_path: Path) -> None:
    adapter = table(has=("DONE",), each_rank=("rank{rank}",), early=True)
    put(tmp_path, **{"step-1/DONE": "", "step-1/rank0": "1"})
    assert "is the first one" in why(tmp_path, adapter)
    assert why(tmp_path, adapter, Circumstances(ranks=1)) == ""


def test_a_mark_that_other_files_may_follow_is_believed_once_the_program_has_gone_on(tmp_path: Path) -> None:
    adapter = table(has=("DONE",), late=("more*",))
    put(tmp_path, **{"step-1/DONE": ""})
    assert "is the first one" in why(tmp_path, adapter, Circumstances(ranks=1))
    for lived_s, whole in ((29.9, False), (30.0, True)):
        known = Circumstances(ranks=1, changed_s={"step-1/DONE": lived_s})
        assert (why(tmp_path, adapter, known) == "") is whole
    put(tmp_path, **{"step-1/more0": "1", "step-2/DONE": ""})
    known = Circumstances(ranks=1, before=Look.at(tmp_path))
    assert judged(tmp_path, adapter, known)["step-1"] is None, "the next one has begun"
    known = Circumstances(ranks=1, shape=frozenset({"DONE", "more#"}))
    assert why(tmp_path, adapter, known) == "lacks more#, which the one before has"


def test_a_file_that_is_named_as_that_of_the_only_rank_shows_that_there_is_one(tmp_path: Path) -> None:
    adapter = table(has=("DONE",), each_rank=("rng_{rank}|rng",), early=True)
    put(tmp_path, **{"step-1/DONE": "", "step-1/rng": "1"})
    assert why(tmp_path, adapter) == ""


GROUPS = table(each_rank=("dp_{rank}_mp_*",), each_rank_or_none=True, has=("latest",), early=True)


@pytest.mark.parametrize(
    ("files", "ranks", "lack"),
    [
        (["dp_0_mp_0", "dp_0_mp_1", "dp_1_mp_0", "dp_1_mp_1"], 4, ""),
        (["dp_0_mp_0", "dp_0_mp_1", "dp_1_mp_0"], 4, "a file of rank 1"),
        (["dp_0_mp_0", "dp_0_mp_1"], 4, "has 2 files of 4 ranks"),
        (["dp_0_mp_0", "dp_0_mp_1"], 2, ""),
        (["dp_0_mp_0"], 2, "the file of rank 1"),
        (["dp_0_mp_0", "dp_0_mp_1", "dp_1_mp_0"], None, "a file of rank 1"),
        (["model"], 1, ""),
        (["model"], 2, "is the first one"),
    ],
)
def test_ranks_of_groups_have_a_file_for_each_rank_of_the_other_group(
    files: list[str], ranks: int | None, lack: str, tmp_path: Path
) -> None:
    put(tmp_path, **{f"step-1/{name}": "1" for name in [*files, "latest"]})
    found = why(tmp_path, GROUPS, Circumstances(ranks=ranks))
    assert lack in found if lack else not found


def test_every_shard_that_a_metadata_file_names_and_all_of_its_bytes(tmp_path: Path) -> None:
    write(tmp_path, "dcp", 10)
    shard = tmp_path / "step-10" / "__1_0.distcp"
    assert why(tmp_path, named("dcp")) == ""
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert why(tmp_path, named("dcp")) == (
        f"has a file that is cut off: __1_0.distcp, which has {len(whole)} bytes by .metadata"
    )
    shard.unlink()
    assert why(tmp_path, named("dcp")) == "lacks __1_0.distcp, which .metadata names"


def test_a_file_that_may_be_cut_off_without_a_sign(tmp_path: Path) -> None:
    put(tmp_path, **{"model_1.bin": b"\x00\x01\x02\x03\x04"})
    lack = judged(tmp_path, of_files("model_{step}.bin"), Circumstances(ended_well=True))["model_1.bin"]
    assert lack == Lack("has nothing that shows that model_1.bin is whole", is_torn=False)


def test_two_files_where_there_is_one_of_its_kind(tmp_path: Path) -> None:
    put(tmp_path, **{"last.json": "{}", "other.json": "{}"})
    adapter = of_files("*.json", files_are="one")
    assert "is not the only one" in why(tmp_path, adapter)


def test_a_quiet_time_counts_only_as_far_as_the_program_was_seen(tmp_path: Path) -> None:
    adapter = table(has=("DONE",), quiet_s=5.0)
    put(tmp_path, **{"step-1/DONE": ""})
    assert "has changed in the last 5 s" in why(tmp_path, adapter)
    for changed_s, whole in ((4.9, False), (5.0, True)):
        assert (why(tmp_path, adapter, Circumstances(changed_s={"step-1/DONE": changed_s})) == "") is whole


def test_real_layouts_are_whole_once_they_are(tmp_path: Path) -> None:
    write(tmp_path / "out", "transformers", 10)
    assert why(tmp_path / "out", named("transformers"), Circumstances(ranks=2)) == ""


def test_a_directory_that_is_empty(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    assert why(tmp_path, table()) == "has no files"
