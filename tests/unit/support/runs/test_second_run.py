from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.second_run import MOST, Run, why_no_second_run, why_red

ROOT = Path(__file__).resolve().parents[4]

# ---- the decisions


def failed(count: int) -> Run:
    return Run(failed={f"t.py::test_{i}": "AssertionError" for i in range(count)}, collected=count, reported=count)


def test_failed_tests_run_again_after_exit_code_1_only() -> None:
    assert why_no_second_run(1, failed(1)) is None
    assert why_no_second_run(1, failed(MOST)) is None
    for code in (2, 3, 4, 5, 130, 137):
        assert why_no_second_run(code, failed(1)) is not None


def test_more_failures_than_luck_explains_stay_red() -> None:
    assert "no matter of luck" in (why_no_second_run(1, failed(MOST + 1)) or "")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (Run(collected=1, reported=1), "exit code 1"),
        (Run(failed={"t.py::a": ""}, fatal=["a worker crashed"], collected=1, reported=1), "a worker crashed"),
        (Run(failed={"t.py::a": ""}, collected=3, reported=1), "only 1 of 3 tests ran"),
    ],
)
def test_a_run_that_is_not_whole_stays_red(run: Run, reason: str) -> None:
    assert why_no_second_run(1, run) == reason


def test_a_second_run_clears_the_first_only_if_exactly_what_failed_has_passed() -> None:
    first = Run(failed={"t.py::a": "", "t.py::b": ""})

    assert why_red(0, first, Run(passed=["t.py::b", "t.py::a"])) is None
    assert why_red(0, first, Run(passed=["t.py::a"])) is not None, "one of them was skipped"
    assert why_red(0, first, Run(passed=["t.py::a", "t.py::b", "t.py::c"])) is not None
    assert why_red(1, first, Run(failed={"t.py::a": ""}, passed=["t.py::b"])) == "1 of 2 failed alone as well"
    assert why_red(3, first, Run(passed=["t.py::b", "t.py::a"])) is not None


# ---- the whole, on suites that are red in each way

ONCE = """
import pathlib
def test_steady(): pass
def test_by_luck(tmp_path_factory):
    seen = pathlib.Path(__file__).with_suffix(".seen")
    first = not seen.exists()
    seen.touch()
    assert not first, "too late by a hair"
"""


def run(suite: Path, text: str, *arguments: str) -> tuple[int, str]:
    """Run `scripts/test`'s program on a suite of one file."""
    (suite / "test_it.py").write_text(text)
    (suite / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.second_run", "-n", "2", *arguments],
        cwd=suite, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(suite)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.sample
def test_a_test_that_fails_once_is_named_in_the_last_lines_and_the_run_succeeds(tmp_path: Path) -> None:
    code, out = run(tmp_path, ONCE)

    assert code == 0, out
    assert out.splitlines()[-1] == "UNSTEADY test_it.py::test_by_luck - AssertionError: too late by a hair"
    (kept,) = (Path(found) for found in re.findall(r"both outputs are in (\S+)\)", out))
    assert "1 failed, 1 passed" in (kept / "first.txt").read_text()
    assert re.search(r"^1 passed|=+ 1 passed", (kept / "second.txt").read_text(), re.MULTILINE)


def test_a_run_without_failures_runs_once_and_leaves_nothing(tmp_path: Path) -> None:
    code, out = run(tmp_path, "def test_steady(): pass\n")

    assert code == 0, out
    assert "second run" not in out
    assert not list(tmp_path.glob("harness-tests-*"))


@pytest.mark.parametrize(
    ("text", "arguments", "code", "said"),
    [
        ("def test_red(): assert False\n", (), 1, "red after a second run: 1 of 1 failed alone"),
        (ONCE + "def test_red(): assert False\n", (), 1, "red after a second run: 1 of 2 failed alone"),
        (ONCE + "import os\ndef test_crash(): os._exit(9)\n", (), 1, "without a second run: a worker"),
        (ONCE + "import os\ndef test_crash(): os._exit(9)\n", ("-n", "0"), 9, "without a second run: exit code 9"),
        (ONCE + "import nothing_of_that_name\n", (), None, "without a second run: "),
        (
            ONCE.replace("def test_steady(): pass", "") + "def test_z(): pass\n",
            ("-x", "-n", "0"),
            1,
            "only 1 of 2 tests ran",
        ),
        (ONCE, ("-k", "no_such_test"), 5, "without a second run: exit code 5"),
    ],
    ids=["fails-twice", "one-of-two-fails-twice", "worker-crash", "crash", "not-collected", "cut-short", "no-tests"],
)
def test_everything_else_stays_red(
    tmp_path: Path, text: str, arguments: tuple[str, ...], code: int | None, said: str
) -> None:
    ended, out = run(tmp_path, text, *arguments)

    assert ended == code if code is not None else ended != 0, out
    assert said in out
    assert "UNSTEADY" not in out
