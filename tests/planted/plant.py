"""Plants each defect of `defects.py` in a copy of this clone, and looks whether `scripts/test` finds it.

    python -m tests.planted.plant [--only WORDS] [--beginning-with WORDS] [--skip-control]

A defect is found if a test of the everyday tier fails, and fails again when it runs alone: red, and not unsteady. First
come the tests that are near it, then all others. Before any defect the same tests run without one: what is red then
would find everything. Exit code 1 if a defect was not found. Takes about an hour and a half.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.planted.defects import DEFECTS, ROOT, Defect
from tests.support.second_run import PARALLEL, Run

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info")
PATIENCE = "0.4"
"""Some defects let a test hang until its limit, twice. On a quiet machine none takes so much of it without a defect."""
NOT_ASKED = ("--ignore", "tests/unit/support/test_planted.py")  # it compares text: it would find every defect


@contextmanager
def copied(defect: Defect | None) -> Iterator[Path]:
    """A copy of the clone, with an interpreter that imports the copy, and with the defect."""
    with tempfile.TemporaryDirectory(prefix="harness-planted-") as directory:
        copy = Path(directory) / "clone"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
        (packages,) = (copy / ".venv/lib").glob("python*/site-packages")
        packages.joinpath("planted.pth").write_text(f"{copy}\n{sysconfig.get_path('purelib')}\n")
        if defect is not None:
            defect.plant(copy)
        yield copy


def failing(copy: Path, *arguments: str) -> dict[str, str]:
    """Run these tests of the copy until one fails; what failed, each with the reason."""
    record = copy.parent / "record.json"
    record.unlink(missing_ok=True)
    plugin = ["-p", "tests.support.second_run", "--record", str(record)]
    command: list[str | Path] = [copy / ".venv/bin/python", "-m", "pytest", *plugin, *NOT_ASKED, "--quiet", *arguments]
    environ = os.environ | {"HARNESS_TEST_PATIENCE": PATIENCE}
    done = subprocess.run(command, cwd=copy, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if not record.exists():
        return {"pytest itself": (done.stdout + done.stderr)[-500:]}
    run = msgspec.json.decode(record.read_bytes(), type=Run)
    return run.failed or dict.fromkeys(run.fatal, "fatal")


def found_by(copy: Path, defect: Defect) -> tuple[str, str] | None:
    """The test that finds it, and why that fails; None if no test does."""
    for where in ([defect.near], []):
        first = failing(copy, *PARALLEL, "--everyday", "--exitfirst", *where)
        tests = [test for test in first if "::" in test]
        if not tests:
            if first:  # it cannot even be imported, or takes a worker with it
                return next(iter(first.items()))
            continue
        again = failing(copy, "--numprocesses", "0", *tests)
        if again:
            return next(iter(again.items()))
    return None


def main(arguments: Sequence[str]) -> int:
    """Plant them all; 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted.plant", description="Plant defects; are they found?")
    parser.add_argument("--only", metavar="WORDS", default="", help="only defects whose name has these words")
    parser.add_argument("--beginning-with", metavar="WORDS", default="", help="only this one and those behind it")
    parser.add_argument("--skip-control", action="store_true", help="do not run the tests without a defect first")
    args = parser.parse_args(arguments)
    if not args.skip_control:
        with copied(None) as copy:
            if red := failing(copy, *PARALLEL, "--everyday"):
                print("\n".join(["these are red without any defect:", *red]))
                return 1
    behind = itertools.dropwhile(lambda defect: args.beginning_with not in defect.name, DEFECTS)
    defects = [defect for defect in behind if args.only in defect.name]
    missed = 0
    for defect in defects:
        with copied(defect) as copy:
            found = found_by(copy, defect)
        missed += found is None
        words = "NOT FOUND" if found is None else f"found by {found[0]} - {found[1][:100]}"
        print(f"{defect.name}: {words}", flush=True)
    print(f"{len(defects) - missed} of {len(defects)} defects were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
