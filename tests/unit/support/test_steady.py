"""Rounds of tests are counted for the very files that they were made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import steady
from tests.support.delays import SEAMS
from tests.support.steady import GOAL, ROOT, Record, Round, Setting

QUIET, BUSY = Setting(), Setting(busy=2)


def clean(setting: Setting) -> Round:
    return Round(setting, 600, 4000)


def red(setting: Setting, *tests: str) -> Round:
    return Round(setting, 600, 4000, dict.fromkeys(tests, "assert 1 == 2"))


def test_only_clean_rounds_after_the_last_that_was_not_are_in_a_row() -> None:
    rounds = [clean(QUIET), red(QUIET, "a"), clean(QUIET), red(BUSY, "a"), clean(QUIET)]

    record = Record("digest", rounds)

    assert record.in_a_row(QUIET) == 2
    assert record.in_a_row(BUSY) == 0
    assert record.in_a_row(Setting(busy=4)) == 0


def test_a_round_in_which_a_worker_was_lost_is_not_clean_though_no_test_failed() -> None:
    assert not Round(QUIET, 1, 1, {}, ["a worker was lost"]).clean


def test_what_is_missing_is_what_the_goal_wants_beyond_the_last_failure() -> None:
    record = Record("digest", [clean(QUIET), clean(QUIET), clean(BUSY), red(BUSY, "a")])

    assert list(steady.missing(record, {QUIET: 3, BUSY: 2})) == [QUIET, BUSY, BUSY]
    assert list(steady.missing(record, {QUIET: 1})) == []


def test_the_goal_has_every_seam() -> None:
    assert {setting.seam for setting in GOAL if setting.seam} == SEAMS.keys()


def test_a_round_with_a_delay_has_the_tests_that_come_by_there() -> None:
    assert Setting(busy=2).tests == ("--all",)
    assert Setting(seam="publish").tests == Setting(seam="trainer-send").tests == ("tests/process", "tests/ranks")
    assert Setting(seam="resume-act").tests == ("tests/process", "tests/node")


def test_the_summary_says_which_test_failed_how_often() -> None:
    said = steady.summary(Record("digest", [red(QUIET, "a", "b"), clean(QUIET), red(BUSY, "b")]))

    assert said == [
        "  1 of   2 rounds clean,  10.0 min each: quiet",
        "  0 of   1 rounds clean,  10.0 min each: beside 2 busy loops",
        "  2 times failed: b - assert 1 == 2",
        "  1 times failed: a - assert 1 == 2",
    ]


def test_any_change_of_a_file_begins_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "ROOT", tmp_path)
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a")
    two.write_text("b")
    before = steady.digest_of([one, two])

    assert steady.digest_of([two, one]) == before
    assert steady.digest_of([one]) != before
    two.write_text("c")
    assert steady.digest_of([one, two]) != before


def test_harness_cloud_and_tests_are_counted_and_nothing_else() -> None:
    counted = {path.relative_to(ROOT).parts[0] for path in steady.counted()}

    assert counted == {"harness", "cloud", "tests"}
    assert Path(__file__) in steady.counted()
