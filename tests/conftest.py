"""What every test starts from: nobody's settings, an empty home, the same examples every time."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests.support.environment import GIVEN, heed_signals, hide_callers, move_home, move_temporary_files
from tests.support.patience import limit_s

os.environ |= GIVEN  # before a test's file imports torch, which reads it once

# A fork leaves the garbage of earlier tests alone. A data worker that collected a DDP model of one would wait without
# end for the threads of its process group, which only the parent has.
os.register_at_fork(after_in_child=gc.freeze)

pytest_plugins = [
    "tests.support.failed_tests",
    "tests.support.order",
    "tests.support.summary",
    "tests.support.tiers",
]

settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True)
settings.load_profile("default")

HERE = Path(__file__).parent
MANY = 100


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its folder's limit, and mark those that start processes."""
    many = config.getoption("--hypothesis-profile") in ("explore", "nightly")
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        is_nightly = item.get_closest_marker("nightly") is not None
        item.add_marker(pytest.mark.timeout(limit_s(folder, many_examples=many, is_nightly=is_nightly)))
        if folder in ("integrations", "process", "ranks"):
            item.add_marker(pytest.mark.process)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what is there now out of the garbage collector's sight: thousands of tests, and the modules they import.

    A `Checkpointer` looks through all objects of its process, and would look through these each time: 0.2 s, and not
    the few milliseconds of a training.
    """
    if len(session.items) > MANY and "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # half of torch's modules, which the first optimizer imports
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _hidden_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the caller's environment and home, also from fixtures that outlive a test.

    What killed programs leave of their temporary files goes with this process's own directory.
    """
    home = tmp_path_factory.mktemp("home")
    with (
        TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as temporary,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        hide_callers(monkeypatch)
        move_home(monkeypatch, home)
        move_temporary_files(monkeypatch, Path(temporary))
        yield


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test an empty home of its own, and signals that do what they always do."""
    move_home(monkeypatch, tmp_path_factory.mktemp("home"))
    heed_signals()
