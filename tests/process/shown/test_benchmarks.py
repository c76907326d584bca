"""Every benchmark runs, at a size that says nothing; and a bar that is missed is told."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.world import World

pytestmark = pytest.mark.long("a benchmark of several processes with torch")

ROOT = Path(__file__).parents[3]
BENCHMARKS = ROOT / "benchmarks"
STEP = ["--steps", "100", "--rounds", "5"]
CHEAP = {"save", "stall", "window"}
QUICK = {
    "agent": ["--starts", "1", "--saves", "1", "--idle-s", "0.5", "--mb", "4"],
    "s3": ["--quick"],
    "unchanged": ["--mb", "40", "--rounds", "1"],
    "save": ["--sizes", "0.01", "--rounds", "1", "--peers", "safetensors", "DCP async_save, thread"],
    "stall": ["--gb", "0.02", "--rounds", "1"],
    "window": ["--gb", "0.05", "--rounds", "1"],
    "ranks": ["--size", "0.005", "--ranks", "1,2", "--rounds", "1", "--peers", "DCP async_save, thread"],
    "load": ["--sizes", "0.01", "--rounds", "1"],
}


def python(world: World, *arguments: str | Path) -> tuple[int, str, str]:
    """Run it in a world that ends whatever it has started; exit code, standard output and error."""
    process = world.start(sys.executable, *arguments, env={"PYTHONWARNINGS": "ignore"}, cwd=ROOT)
    return process.wait(), process.stdout.decode(), process.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.nightly]) for name in QUICK]
)
def test_a_benchmark_ends_in_verdicts(name: str, world: World) -> None:
    code, said, stderr = python(world, BENCHMARKS / f"bench_{name}.py", *QUICK[name], "--json")
    assert code == 0, stderr
    document = json.loads(said)
    assert {"command", "machine", "versions"} < document.keys()
    assert "--json" not in document["command"]
    assert document["rows"]
    assert all(verdict["question"] and verdict["bar"] and verdict["measured"] for verdict in document["verdicts"])
    assert document["verdicts"]


@pytest.mark.sample
def test_a_check_fails_when_a_bar_is_missed(world: World) -> None:
    script = "import bench_step; bench_step.BAR_US = 0; sys.exit(bench_step.main())"
    path = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); "
    code, said, stderr = python(world, "-c", path + script, *STEP, "--check")
    assert code == 1, stderr
    assert "| NO  |" in said


def test_all_benchmarks_make_one_table_that_replaces_the_one_in_the_readme(tmp_path: Path, world: World) -> None:
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    for name in ("harness", "cloud", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = tmp_path / "benchmarks" / "README.md"
    kept = "| [b](results/save.md) | 2 | 1 | yes |"
    rows = f"| question | bar | measured | met |\n|---|---|---|---|\n| [a](results/step.md) | 1 | 2 | NO |\n{kept}\n"
    path.write_text(path.read_text().partition("## Results")[0] + f"## Results\n\n{rows}")
    run_all = tmp_path / "benchmarks" / "run_all"
    code, said, stderr = python(world, run_all, "--quick", "--only", "step", "--write")
    assert code == 0, stderr
    readme = path.read_text()
    assert readme.startswith((BENCHMARKS / "README.md").read_text().partition("## Results")[0])
    table = readme.partition("## Results\n\n")[2]
    assert [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]] == [
        "[b](results/save.md)",
        "[what a normal step costs, hook included](results/step.md)",
    ]
    assert said.rstrip().endswith(table.splitlines()[-1])
    result = (tmp_path / "benchmarks" / "results" / "step.md").read_text()
    assert result.startswith("# bench_step\n\nWhat does a normal step cost")
    assert "    machine    " in result


def test_what_a_peer_does_better_than_the_bar_allows_is_told(world: World) -> None:
    """Ours against figures that are made up: by the medians, and by the peer that is nearest."""
    script = """
import json, sys
from bench_save import Found, judge
from gpt_state import Size

def figures(stall, durable, lost, cpu):
    return {"stall_s": [stall] * 3, "durable_s": [durable] * 3, "lost_s": [lost, lost, 99], "cpu_s_per_gb": [cpu] * 3}

ours, near, far = figures(1.0, 2.0, 1.0, 0.2), figures(0.8, 3.0, 3.9, 0.7), figures(5.0, 9.0, 9.0, 5.0)
names = {"ours": ours, "DCP async_save, thread": near, "torchsnapshot async_take": far}
found = Found(bytes=2 * 10**9, copy_s=[0.8] * 3, write_s=[0.7] * 3, error=[0.0], figures=names, absent={})
print(json.dumps([[verdict.question, verdict.measured, verdict.met] for verdict in judge(Size.parse("2"), [found])]))
"""
    code, said, stderr = python(world, "-c", f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{script}")
    assert code == 0, stderr
    assert json.loads(said) == [
        ["2 GB: training time lost for a checkpoint, DCP async_save, thread / ours", "3.9", False],
        ["2 GB: stall, ours / memcpy", "1.25", True],
        ["2 GB: stall, DCP async_save, thread / ours", "0.8", False],
        ["2 GB: durable, ours / memcpy and O_DIRECT write", "1.33", False],
        ["2 GB: durable, DCP async_save, thread / ours", "1.5", False],
        ["2 GB: CPU of a GB, DCP async_save, thread / ours", "3.5", True],
    ]
