"""No test sees, or hands on, what its caller happens to have in the environment."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tests.support.environment import CALLERS, GIVEN, SEEN, SEEN_PREFIXES, hide_callers, show_package_index

DANGERS = ("SLURM_JOB_ID", "GIT_DIR", "GIT_INDEX_FILE", "COLUMNS", "OMP_NUM_THREADS", "PIP_TARGET", "AWS_PROFILE")


def test_a_program_that_a_test_starts_sees_what_the_list_allows_and_a_home_of_its_own(tmp_path: Path) -> None:
    program = "import os; print(*os.environ, sep='\\n')"

    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    callers = {name for name in seen if name in CALLERS or name in DANGERS}  # libraries set some of their own
    others = {name for name in callers - SEEN - GIVEN.keys() if not name.startswith((*SEEN_PREFIXES, "XDG_"))}
    assert others <= {"HOME", "PYTEST_CURRENT_TEST", "LC_CTYPE"}
    assert os.environ["HOME"] != CALLERS.get("HOME")


@pytest.mark.parametrize("danger", DANGERS)
def test_what_is_dangerous_or_makes_a_difference_is_hidden(monkeypatch: pytest.MonkeyPatch, danger: str) -> None:
    monkeypatch.setenv(danger, "of the caller")

    hide_callers(monkeypatch)

    assert os.environ.get(danger) == GIVEN.get(danger)


def test_settings_of_the_package_index_come_back_where_a_test_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.environment.CALLERS", {"PIP_INDEX_URL": "https://index", "SLURM_JOB_ID": "1"})

    show_package_index(monkeypatch)

    assert os.environ["PIP_INDEX_URL"] == "https://index"
    assert "SLURM_JOB_ID" not in os.environ


class Garbage:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_fork_does_not_collect_what_tests_before_it_have_left() -> None:
    gc.disable()
    try:
        left = weakref.ref(Garbage())
        if not (child := os.fork()):
            gc.collect()
            os._exit(0 if left() is not None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()
    gc.collect()
    assert left() is None
