"""Decisions of the main thread, with nothing running. Whole agents are tests/process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud.memory import MemoryStore
from harness.agent.main import Agent
from harness.config import Settings
from harness.core.manifest import FORMAT, Claim
from harness.core.policy import Choice
from harness.errors import ExitCode
from tests.support.protocol import RUN_ID


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    settings = Settings(store="memory", run="run", handover_s=45.0, runtime_dir=str(tmp_path))
    made = Agent(settings, None, environ={}, sources=[], stores=lambda _: MemoryStore())
    yield made
    made._shut()


def newer() -> Claim:
    return Claim(
        format=FORMAT, run_id=RUN_ID, generation=2, nonce="a" * 16, claimed_at="", host="h", pid=1, fresh=False,
        parent=None, command=(), named=True,
    )  # fmt: skip


def test_one_that_is_superseded_has_the_time_that_its_last_snapshot_takes(agent: Agent) -> None:
    """A newcomer waits for a journal that goes on. `handover_s` is about one that does not, and cost the last steps."""
    told = list[str]()
    trainer: Any = SimpleNamespace(channel=SimpleNamespace(send=told.append))
    agent.trainer, agent._wants.layout_bytes = trainer, 1000
    agent._saves.remote._rate.add(1000, 100.0)

    agent._on_superseded(newer())

    assert agent._drain is not None
    assert agent._drain.plan.choice is Choice.NEW
    assert agent._drain.plan.fits
    assert agent._drain.deadline.remaining_s > 100.0
    assert agent._drain.exit_code is ExitCode.SUPERSEDED
    assert told == ["superseded"]
