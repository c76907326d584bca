"""The sets of versions of scripts/test-versions, what a release consists of, and the workflows that run both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.versions import contents, installed, table, wanted

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_oldest_has_all_that_is_promised_as_it_is_promised_and_the_tools_pinned() -> None:
    lines = list(wanted.wanted("oldest"))
    assert [line for line in lines if ">=" in line] == wanted.promised()
    pinned = [line for line in lines if ">=" not in line]
    assert len(pinned) == len(wanted.tools())
    assert all(re.fullmatch(r"[\w\[\].-]+==[\w.]+", line) for line in pinned)
    assert {"pytest", "hypothesis", "moto"} <= {wanted.name_of(line) for line in pinned}


def test_newest_pins_nothing() -> None:
    assert not any("==" in line for line in wanted.wanted("newest"))


def test_a_torch_between_comes_with_the_pins_but_its_own() -> None:
    torch, *others = wanted.wanted("torch=2.9")
    assert torch == "torch==2.9.*"
    assert all("==" in line and not line.startswith("torch==") for line in others)


@pytest.mark.parametrize("which", ["", "older", "torch", "torch=2", "torch=2.9.1"])
def test_there_is_no_other_set(which: str) -> None:
    with pytest.raises(ValueError, match="oldest, newest or torch"):
        list(wanted.wanted(which))


@pytest.mark.parametrize(
    ("version", "differs"), [("0.31", False), ("0.31.0", False), ("0.31.0+cpu", False), ("0.31.1", True), ("0.3", True)]
)
def test_a_minimum_that_was_not_tested_is_told(version: str, *, differs: bool) -> None:
    assert bool(list(installed.differing(["awscrt>=0.31"], lambda name: version))) is differs


def test_files_of_a_release_are_chosen_as_hatch_does() -> None:
    tracked = ["harness/a.py", "harness/b/c.py", "harnessed/d.py", "terraform/main.tf", "terraform/aws/main.tf", "e.md"]
    assert contents.chosen(tracked, ["/harness"]) == {"harness/a.py", "harness/b/c.py"}
    assert contents.chosen(tracked, ["/terraform/*.tf", "/e.md"]) == {"terraform/main.tf", "e.md"}
    assert contents.in_wheel("terraform/aws/main.tf") == "harness/fleet/terraform/aws/main.tf"
    assert contents.in_wheel("harness/a.py") == "harness/a.py"


def test_what_a_release_lacks_and_what_it_has_too_much_is_told() -> None:
    assert contents.compared("wheel", {"a", "b"}, {"b", "c"}) == [
        "wheel: c is missing",
        "wheel: a is not tracked, or not meant for it",
    ]
    assert contents.compared("wheel", {"a"}, {"a"}) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_are_there_and_can_read_only(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for step in job.get("steps", ()):
            for line in step.get("run", "").splitlines():
                assert line.startswith("./scripts/")
                assert (ROOT / line.split()[0]).is_file()


def test_the_matrix_is_what_is_promised() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(wanted.PROJECT["classifiers"]))
    for name in ("pinned", "ends"):
        assert jobs[name]["strategy"]["matrix"]["python"] == classified
    assert jobs["ends"]["strategy"]["matrix"]["versions"] == ["oldest", "newest"]
    assert wanted.PROJECT["requires-python"] == f">={classified[0]}"


def test_the_table_says_of_each_kind_what_became_of_it_with_which_torch() -> None:
    everywhere = {("optimizer", "SGD"): "exact", ("optimizer", "Adam"): "exact", ("sampler", "lazy"): "exact"}
    reports = {
        "2.10.0": {**everywhere, ("optimizer", "Muon"): "exact"},
        "2.9.1": everywhere,
        "2.8.0": {**everywhere, ("sampler", "lazy"): "**not exact**"},
    }
    assert [*table.table(reports)] == [
        "With torch 2.8.0, 2.9.1, 2.10.0:",
        "",
        "| what | which | result |",
        "| -- | -- | -- |",
        "| optimizer | Adam; SGD | exact in each |",
        "| optimizer | Muon | exact in 2.10.0; not there in 2.8.0, 2.9.1 |",
        "| sampler | lazy | **not exact** in 2.8.0; exact in 2.9.1, 2.10.0 |",
    ]


def test_the_document_has_the_table_and_nothing_that_is_not_exact() -> None:
    document = table.DOCUMENT.read_text()
    found = document.partition(table.BEGIN)[2].partition(table.END)[0]
    for group in ("optimizer", "scheduler", "sampler", "loader with workers"):
        assert f"| {group} |" in found
    assert "not exact" not in found
    assert table.written(document, found.strip().splitlines()) == document
