"""The end of a run says what was not run, once for each thing that was missing, and what took longest, and why."""

from __future__ import annotations

import pytest

from tests.support import needs
from tests.support.summary import by_folder, not_run, slowest


def report(test: str, seconds: float = 0.0, *, lacks: str = "", why: str = "") -> pytest.TestReport:
    longrepr = ("file.py", 1, f"Skipped: {lacks}") if lacks else None
    properties = [("long", why)] if why else []
    outcome = "skipped" if lacks else "passed"
    return pytest.TestReport(test, ("file.py", 1, test), {}, outcome, longrepr, "call", [], seconds,
                             user_properties=properties)  # fmt: skip


def test_what_is_missing_is_said_once_however_many_tests_wanted_it() -> None:
    reports = [report("a", lacks="this machine lacks root"), *(report(str(n), lacks="no terraform") for n in range(3))]

    assert not_run([*reports, report("b")]) == ["    3 tests: no terraform", "    1 test: this machine lacks root"]


def test_all_phases_of_a_test_count_and_a_long_one_says_why() -> None:
    lines = slowest([report("a", 6.0), report("a", 5.0), report("b", 12.0, why="it waits"), report("c", 9.9)])

    assert lines == ["  12.0 s  b  (it waits)", "  11.0 s  a  (no reason is given)", "   9.9 s  c"]


def test_time_is_summed_for_each_folder_and_units_are_one() -> None:
    tests = ["tests/unit/a/test_a.py::x", "tests/unit/test_b.py::x", "tests/process/torch/test_c.py::x[::1]"]

    lines = by_folder([report(test, seconds) for test in tests for seconds in (2.0, 1.5)])

    assert lines == ["     7 s  unit, 2 tests", "     4 s  process/torch, 1 test"]


def test_no_more_than_twenty_are_shown() -> None:
    assert len(slowest(report(str(number), number) for number in range(50))) == 20


def test_what_a_machine_lacks_is_skipped_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "CALLERS", {})
    with pytest.raises(pytest.skip.Exception, match=r"^this machine lacks root: not you$"):
        needs.lacking("root", "not you\nand much more")


def test_on_a_machine_that_is_told_to_have_it_a_skip_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "CALLERS", {needs.MUST_RUN: "root terraform"})

    with pytest.raises(pytest.fail.Exception, match="lacks root, and HARNESS_TESTS_MUST_RUN says that it has 'root'"):
        needs.lacking("root")
    with pytest.raises(pytest.skip.Exception):
        needs.lacking("mdadm")


def test_it_may_be_told_what_it_lacks_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "CALLERS", {needs.MUST_RUN: "all but cuda mdadm"})

    assert needs.must_run() == needs.NEEDS.keys() - {"cuda", "mdadm"}


@pytest.mark.parametrize("told", ["roof", "all but roof", "all"])
def test_a_thing_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr(needs, "CALLERS", {needs.MUST_RUN: told})

    with pytest.raises(ValueError, match=f"there is no {told.split()[-1]}; there are aws-cli"):
        needs.must_run()
