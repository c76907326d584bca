"""Runs the tests again and again, and keeps count: how steady they are, over as many sittings as it takes.

    python -m tests.support.steady [--busy N | --seams | --seam NAME] [--times K] [--show]

A round is all that has to hold before a change lands, on the machine as it is, or beside N busy loops; or the tests
that come by a seam, with a delay there (delays.py). A round is clean if nothing failed, not even a test that would pass
alone. Rounds are on record in .steady.json, which counts for these very files: it begins anew after a change of
harness/, cloud/ or tests/. Without options it does what is still missing of GOAL.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.support import with_parent
from tests.support.delays import NODE, SEAMS, VARIABLE
from tests.support.second_run import PARALLEL, Run, run_pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / ".steady.json"
COUNTED = ("harness", "cloud", "tests")
LOOP = (sys.executable, "-c", "while True: pass")


class Interrupted(Exception):
    """Somebody ended the round: it is none."""


class Setting(msgspec.Struct, frozen=True):
    """What a round has to bear.

    Attributes:
        busy: how many busy loops run beside it.
        seam: where there is a delay; then the round has only the tests that come by there.
    """

    busy: int = 0
    seam: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        """What pytest is given."""
        if not self.seam:
            return ("--all",)
        return ("tests/process", "tests/node" if self.seam in NODE else "tests/ranks")

    @property
    def words(self) -> str:
        if self.seam:
            return f"a delay at {self.seam}"
        return f"beside {self.busy} busy loops" if self.busy else "quiet"


GOAL: dict[Setting, int] = {
    Setting(): 10,
    Setting(busy=2): 5,
    Setting(busy=4): 3,
    **{Setting(seam=seam): 1 for seam in SEAMS},
}
"""How many clean rounds in a row are wanted."""


class Round(msgspec.Struct):
    """What one round came to: the tests that failed, each with the reason, and what else was wrong."""

    setting: Setting
    seconds: float
    passed: int
    failed: dict[str, str] = {}
    fatal: list[str] = []

    @property
    def clean(self) -> bool:
        return not self.failed and not self.fatal


class Record(msgspec.Struct):
    """All rounds of these files."""

    digest: str
    rounds: list[Round] = []

    def in_a_row(self, setting: Setting) -> int:
        """Return how many of the last rounds of a setting were clean."""
        rounds = [each.clean for each in self.rounds if each.setting == setting]
        return len(rounds) if all(rounds) else rounds[::-1].index(False)


def missing(record: Record, goal: dict[Setting, int]) -> Iterator[Setting]:
    """Return the settings of the rounds that are still to be made, one for each round."""
    for setting, times in goal.items():
        yield from [setting] * (times - record.in_a_row(setting))


def summary(record: Record) -> list[str]:
    """Return the lines that say what there is, and which test failed how often."""
    lines = []
    for setting in dict.fromkeys(each.setting for each in record.rounds):
        rounds = [each for each in record.rounds if each.setting == setting]
        clean, minutes = sum(each.clean for each in rounds), sum(each.seconds for each in rounds) / len(rounds) / 60
        lines.append(f"{clean:3} of {len(rounds):3} rounds clean, {minutes:5.1f} min each: {setting.words}")
    failures = Counter(test for each in record.rounds for test in each.failed)
    reasons = {test: reason for each in record.rounds for test, reason in each.failed.items()}
    lines += [f"{count:3} times failed: {test} - {reasons[test]}" for test, count in failures.most_common()]
    return lines + [f"    red: {why}" for each in record.rounds for why in each.fatal]


def digest_of(paths: Iterable[Path]) -> str:
    """Return what tells these files from any others."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        whole.update(f"{path.relative_to(ROOT)}\0{hashlib.blake2b(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def counted() -> list[Path]:
    """Return the files that count: those of the folders, but what Python has compiled."""
    files = (path for folder in COUNTED for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path for path in files if "__pycache__" not in path.parts]


def make(setting: Setting) -> Round:
    """Make one round; blocks until it is over. Raises Interrupted."""
    delayed = {VARIABLE: f"{setting.seam}={SEAMS[setting.seam].seconds}"} if setting.seam else {}
    with tempfile.TemporaryDirectory(prefix="harness-steady-") as kept, contextlib.ExitStack() as stack:
        for _ in range(setting.busy):
            loop = subprocess.Popen(with_parent.command(*LOOP), cwd=ROOT)
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        os.environ.update(delayed)
        began = time.monotonic()
        code, run = run_pytest(Path(kept), "round", [*PARALLEL, "--quiet", *setting.tests])
        for name in delayed:
            del os.environ[name]
        if code == pytest.ExitCode.INTERRUPTED or code > 128:
            raise Interrupted
        return Round(setting, time.monotonic() - began, len(run.passed), run.failed, why_fatal(code, run))


def why_fatal(code: int, run: Run) -> list[str]:
    """Return what was wrong with a round beside its failed tests."""
    ended = [] if code == 0 or (code == 1 and run.failed) else [f"pytest ended with exit code {code}"]
    return [*run.fatal, *ended]


def main(arguments: Sequence[str]) -> int:
    """Make the rounds that were asked for; 1 if one of them was not clean."""
    parser = argparse.ArgumentParser(prog="scripts/steady", description="Run the tests again and again; keep count.")
    parser.add_argument("--busy", type=int, metavar="N", help="only rounds beside so many busy loops")
    parser.add_argument("--seams", action="store_true", help="only rounds with a delay, one for each seam")
    parser.add_argument("--seam", choices=list(SEAMS), help="only rounds with a delay at this seam")
    parser.add_argument(
        "--times", type=int, metavar="K", help="so many rounds more (default: what the goal still lacks)"
    )
    parser.add_argument("--show", action="store_true", help="say what there is, and run nothing")
    args = parser.parse_args(arguments)
    digest = digest_of(counted())
    record = Record(digest)
    if RECORD.exists() and (found := msgspec.json.decode(RECORD.read_bytes(), type=Record)).digest == digest:
        record = found
    goal = GOAL
    if args.seams:
        goal = {setting: times for setting, times in GOAL.items() if setting.seam}
    elif args.busy is not None or args.seam:
        setting = Setting(args.busy or 0, args.seam or "")
        goal = {setting: GOAL.get(setting, 1)}
    to_do = [] if args.show else list(missing(record, goal))
    if args.times is not None:
        to_do = [setting for setting in goal for _ in range(args.times)]
    clean = True
    for number, setting in enumerate(to_do, start=1):
        print(f"steady: round {number} of {len(to_do)}, {setting.words}", flush=True)
        try:
            made = make(setting)
        except Interrupted:
            break
        if digest_of(counted()) != digest:
            print(
                "steady: the files have changed meanwhile: this round does not count, and the next sitting begins anew"
            )
            return 1
        record.rounds.append(made)
        RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        clean = clean and made.clean
    print("\n".join(summary(record)))
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
