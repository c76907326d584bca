"""Runs pytest, and what failed once more, alone: tells a test that is red by luck from one that is red.

`scripts/test` is this program. A first run uses the cores that it may (workers.py). If, and only if, it ended with
failed tests (exit code 1), those run again, one at a time in one process. What passes then is *unsteady*: the command
succeeds, and its last lines name each of them with the reason of its first failure. An unsteady test is a defect, to be
mended before other work; there is no mark and no list of tests that may be unsteady. Everything else stays red: a test
that fails twice, more than MOST failures, a crashed worker, a file that cannot be collected, a run that was cut short.

    python -m tests.support.second_run [pytest's arguments]

It is a plugin of both runs as well (`-p tests.support.second_run --record FILE`): the facts are pytest's own reports,
not its printed words.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import workers

MOST = 5
PARALLEL = ("--numprocesses", str(workers.of_this_process()), "--dist", "worksteal")
ALONE = ("--numprocesses", "0", "--last-failed", "--last-failed-no-failures", "none")


class Run(msgspec.Struct):
    """What one run of pytest came to.

    Attributes:
        failed: the tests that failed in any phase, each with the reason.
        passed: the tests that ran and did not fail; those that were skipped are not among them.
        fatal: what makes a run red whatever its tests say.
        collected: how many tests were to run.
        reported: how many of them did, or were skipped.
    """

    failed: dict[str, str] = {}
    passed: list[str] = []
    fatal: list[str] = []
    collected: int = 0
    reported: int = 0


def why_no_second_run(code: int, run: Run) -> str | None:
    """Return why a first run that ended with `code` is final, or None if its failed tests may run again."""
    if code != pytest.ExitCode.TESTS_FAILED or not run.failed:
        return f"exit code {code}"
    if run.fatal:
        return run.fatal[0]
    if run.reported < run.collected:
        return f"only {run.reported} of {run.collected} tests ran"
    if len(run.failed) > MOST:
        return f"{len(run.failed)} tests failed, and more than {MOST} are no matter of luck"
    return None


def why_red(code: int, first: Run, second: Run) -> str | None:
    """Return why the second run does not clear the first, or None if every test that had failed passed alone."""
    if second.failed:
        return f"{len(second.failed)} of {len(first.failed)} failed alone as well"
    if code != pytest.ExitCode.OK:
        return f"the second run ended with exit code {code}"
    if sorted(second.passed) != sorted(first.failed):
        return "the second run did not run exactly the tests that had failed"
    return None


# ---- the program -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run once or twice; the exit code."""
    kept = Path(tempfile.mkdtemp(prefix="harness-tests-"))
    code, first = run_pytest(kept, "first", [*PARALLEL, *arguments])
    if code == pytest.ExitCode.OK:
        shutil.rmtree(kept)
        return code
    if (reason := why_no_second_run(code, first)) is not None:
        print(f"red, without a second run: {reason} (the output is in {kept})")
        return code
    print(f"\n{len(first.failed)} failed: once more, one at a time", flush=True)
    code, second = run_pytest(kept, "second", [*PARALLEL, *arguments, *ALONE])
    if (reason := why_red(code, first, second)) is not None:
        print(f"red after a second run: {reason} (both outputs are in {kept})")
        return int(pytest.ExitCode.TESTS_FAILED)
    print(f"green after a second run, but these tests are unsteady, which is a defect (both outputs are in {kept}):")
    for test, failure in first.failed.items():
        print(f"UNSTEADY {test} - {failure}")
    return int(pytest.ExitCode.OK)


def run_pytest(kept: Path, name: str, arguments: Sequence[str]) -> tuple[int, Run]:
    """Run pytest, with its output on the terminal and in `kept/NAME.txt`; the exit code and what was recorded."""
    record = kept / f"{name}.json"
    ours = ["-p", "tests.support.second_run", "--record", str(record), "--override-ini", f"cache_dir={kept / 'cache'}"]
    colour = ["--color=yes"] if sys.stdout.isatty() else []
    process = subprocess.Popen([sys.executable, "-m", "pytest", *colour, *ours, *arguments], stdout=subprocess.PIPE)
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest gets Ctrl-C as well, and ends in its own way
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    with (kept / f"{name}.txt").open("wb") as copy:
        for data in output_of(process):
            copy.write(data)
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    code = process.wait()
    if not record.exists():
        return (code if code >= 0 else 128 - code), Run(fatal=["pytest did not finish"])
    return code, msgspec.json.decode(record.read_bytes(), type=Run)


def output_of(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What `process` writes until it ends, even if somebody who inherited its output lives on."""
    assert process.stdout is not None
    fd, ended = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(fd, False)
    try:
        while True:
            ready, _, _ = select.select([fd, ended], [], [])
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                data = b""
            if data:
                yield data
            elif ended in ready:
                return
            elif fd in ready:  # it closed its output before its end
                select.select([ended], [], [])
    finally:
        os.close(ended)


# ---- the plugin ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which `run_pytest` says where to record."""
    parser.addoption("--record", type=Path, help="write what the run came to into this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that hears of every test, not in the workers."""
    path = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


class Recorder:
    """Collects pytest's reports into a `Run`, and writes it when the session ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._run, self._reported, self._called = path, Run(), set[str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hear of one phase of one test."""
        self._reported.add(report.nodeid)
        if report.failed:
            self._run.failed.setdefault(report.nodeid, reason_of(report))
        elif report.when == "call" and report.passed:
            self._called.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Hear of a file that could not be collected."""
        if report.failed:
            self._run.fatal.append(f"{report.nodeid} could not be collected")

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Hear of a test that took its worker with it."""
        self._run.fatal.append(f"a worker crashed in {crashitem}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object) -> None:
        """Hear of the end of a worker."""
        if error is not None:
            self._run.fatal.append(f"a worker was lost: {error}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Hear of a bug of pytest or of a plugin."""
        self._run.fatal.append(f"an internal error of pytest: {str(excrepr).splitlines()[-1]}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write all of it."""
        run = self._run
        run.passed = [test for test in self._called if test not in run.failed]
        run.collected, run.reported = session.testscollected, len(self._reported)
        self._path.write_bytes(msgspec.json.encode(run))


def reason_of(report: pytest.TestReport) -> str:
    """The first line of what a failed test raised."""
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return next((line.strip() for line in text.splitlines() if line.strip()), f"failed in {report.when}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
