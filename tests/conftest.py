"""What every test starts from: nobody's settings, an empty home, the same examples every time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.environment import hide_callers, move_home

settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=5000, print_blob=True)
settings.load_profile("default")

PROCESS_TIMEOUT_S = 180


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in tests/process, and give it the time that starting real processes takes."""
    here = Path(__file__).parent / "process"
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.process)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(PROCESS_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def _hidden_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the caller's environment and home, also from fixtures that outlive a test."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        hide_callers(monkeypatch)
        move_home(monkeypatch, tmp_path_factory.mktemp("home"))
        yield


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test an empty home of its own."""
    move_home(monkeypatch, tmp_path_factory.mktemp("home"))
