"""What every test starts from: nobody's settings, an empty home, the same examples every time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

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


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the caller's harness and AWS settings, proxies and home, from the test and from the processes it starts."""
    for name in list(os.environ):
        if name == "HARNESS_VENV":  # where scripts/ find their tools: a test that runs one needs it
            continue
        if name.startswith(("HARNESS", "AWS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        directory = home / name.removeprefix("XDG_").lower()
        directory.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(directory))
