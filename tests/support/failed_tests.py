"""What a failed test tells, and leaves behind: nothing, so that the next test does not fail for it.

A pytest plugin. The report of a failure shows what each process of the test has said. What the failed frames still
held is collected in the test's own teardown: a socket or a file that they forgot is a warning there, and not the error
of whatever test comes next.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator

import pytest

from tests.support.process import STARTED

MOST_CHARACTERS = 20_000
_FAILED = pytest.StashKey[bool]()


def has_failed(item: pytest.Item) -> bool:
    """Return whether a phase of this test has failed so far."""
    return item.stash.get(_FAILED, False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the processes of the test before."""
    STARTED.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure what each process has said."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
        for process in STARTED:
            said = process.stderr[-MOST_CHARACTERS:] or "(nothing)\n"
            report.sections.append((f"stderr of {process.pid}: {process.command}", said))
    return report


@pytest.fixture(autouse=True)
def _forgets(request: pytest.FixtureRequest) -> Generator[None]:
    """Collect what a failed test leaves, when its other fixtures are gone."""
    yield
    if has_failed(request.node):
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):  # they hold the failed frames
            vars(sys).pop(name, None)
        gc.collect()
