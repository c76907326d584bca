"""Programs that are watched, as processes of their own."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.support.process import Process


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start some code with these arguments; its process group is killed after the test, however that ends."""
    started: list[Process] = []

    def start(code: str, *arguments: str | Path, env: Mapping[str, str] = MappingProxyType({})) -> Process:
        made = Process([sys.executable, "-c", code, *arguments], cwd=tmp_path, env=env, stdin=-1)
        started.append(made)
        return made

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.signal_group(signal.SIGKILL)
        process.reap()
