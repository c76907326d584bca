"""What a run of tests says at its end: what it could not run, and where the time went.

A pytest plugin. What this machine lacks is said in one line for each thing, however many tests wanted it. A test of
more than LONG_S seconds says why by `@pytest.mark.long("reason")`; one that does not is told apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

LONG_S = 10.0
SHOWN, WORTH_A_LINE_S = 20, 0.1
_REASON = "long"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the reports know why a test takes long."""
    for item in items:
        if (marker := item.get_closest_marker("long")) is not None:
            (reason,) = marker.args
            item.user_properties.append((_REASON, reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it, below all else that pytest says."""
    reports = [
        report
        for kind in ("passed", "failed", "error", "skipped", "")
        for report in terminalreporter.stats.get(kind, [])
        if isinstance(report, pytest.TestReport)
    ]
    if lines := not_run(reports):
        terminalreporter.section("not run here")
        terminalreporter.write_line("\n".join(lines))
    if len(lines := by_folder(reports)) > 1:
        terminalreporter.section("time by folder, all workers together")
        terminalreporter.write_line("\n".join(lines))
    if lines := slowest(reports):
        terminalreporter.section(f"slowest {len(lines)}")
        terminalreporter.write_line("\n".join(lines))


def not_run(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each reason for which tests were skipped, the one of most tests first."""
    skipped = (report.longrepr for report in reports if report.skipped)
    reasons = Counter(told[2].removeprefix("Skipped: ") for told in skipped if isinstance(told, tuple))
    return [f"{count:5} {'test' if count == 1 else 'tests'}: {reason}" for reason, count in reasons.most_common()]


def by_folder(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each folder of tests/, in whose tests most of the time went first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for report in reports:
        path = report.nodeid.partition("::")[0].removeprefix("tests/")
        folder = path.rpartition("/")[0] if not path.startswith("unit/") else "unit"
        seconds[folder] += report.duration
        tests[folder].add(report.nodeid)
    return [
        f"{seconds[folder]:6.0f} s  {folder}, {len(tests[folder])} {'test' if len(tests[folder]) == 1 else 'tests'}"
        for folder in sorted(seconds, key=seconds.__getitem__, reverse=True)
    ]


def slowest(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each of the tests that took longest, set-up and teardown included."""
    seconds: defaultdict[str, float] = defaultdict(float)
    reasons: dict[str, str] = {}
    for report in reports:
        seconds[report.nodeid] += report.duration
        for name, why in report.user_properties:
            if name == _REASON:
                reasons[report.nodeid] = str(why)
    lines = []
    long = (test for test, took in seconds.items() if took >= WORTH_A_LINE_S)
    for test in sorted(long, key=seconds.__getitem__, reverse=True)[:SHOWN]:
        why = reasons.get(test, "no reason is given") if seconds[test] > LONG_S else ""
        lines.append(f"{seconds[test]:6.1f} s  {test}{why and f'  ({why})'}")
    return lines
