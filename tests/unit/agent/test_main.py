"""Decisions of the main thread, with nothing running. Whole agents are tests/process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud.testing.memory import MemoryStore
from harness.agent.generation import Generation
from harness.agent.main import Agent
from harness.config.program import Program
from harness.config.settings import Settings
from harness.core import messages
from harness.core.manifest import FORMAT, Claim
from harness.core.policy.drain import Choice
from harness.core.policy.end import Outcome
from harness.core.snapshot import SnapshotId
from harness.errors import ExitCode
from harness.ipc.channel import Received
from tests.support.clock import standing
from tests.support.protocol import RUN_ID, SHARD_BYTES, Content
from tests.support.slots import a_slot


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    settings = Settings(store="memory", run="run", handover_s=45.0, runtime_dir=str(tmp_path))
    made = Agent(settings, Program(starter=os.getppid()), sources=[], stores=lambda _: MemoryStore())
    yield made
    made._shut()


def sealed(agent: Agent, step: int) -> None:
    """A snapshot is in memory, and nowhere else."""
    generation = Generation(1, RUN_ID, "a" * 16)
    agent._startup.claims.begin(generation)
    agent._pipeline.take(agent._pipeline.pool.add(a_slot(Content(SnapshotId(1, step)), step)), generation)
    while agent._pipeline.remote.jobs:  # its thread does not run: nothing is in flight
        agent._pipeline.remote._pending = None
    agent._pipeline._given.clear()


def connect(agent: Agent, connection: Any, layout_bytes: int | None = None) -> None:
    """A trainer is there, which the test plays."""
    rank = agent._ranks.of(0)
    rank.connection, rank.control.layout_bytes = connection, layout_bytes


def newer() -> Claim:
    return Claim(
        format=FORMAT, run_id=RUN_ID, generation=2, nonce="a" * 16, claimed_at="", host="h", pid=1, fresh=False,
        parent=None, command=(), named=True,
    )  # fmt: skip


def test_one_that_is_superseded_has_the_time_that_its_last_snapshot_takes(agent: Agent) -> None:
    """A newcomer waits for a journal that goes on. `handover_s` is about one that does not, and cost the last steps."""
    told = list[Any]()
    trainer: Any = SimpleNamespace(channel=SimpleNamespace(send=told.append))
    connect(agent, trainer, layout_bytes=1000)
    agent._pipeline.remote._throttle._rate.add(1000, 100.0)

    agent._on_superseded(newer())

    assert agent._drain.current is not None
    assert agent._drain.current.plan.choice is Choice.NEW
    assert agent._drain.current.plan.fits
    assert agent._drain.current.deadline.remaining_s > 100.0
    assert agent._drain.current.exit_code is ExitCode.SUPERSEDED
    assert told == [messages.Superseded()]


@pytest.mark.parametrize(
    ("has_s", "choice"),
    [
        (50.0, Choice.NEW),  # twice an upload does not fit: the plan was given up as soon as it was made
        (38.5, Choice.NEW),
        (36.5, Choice.NEWEST),  # the copy and the upload of a new one do not fit any more; those of the newest do
    ],
)
def test_a_plan_for_a_new_snapshot_stands_for_as_long_as_it_fits(agent: Agent, has_s: float, choice: Choice) -> None:
    sealed(agent, 100)
    size = sum(SHARD_BYTES)
    connect(agent, SimpleNamespace())
    agent._speeds.sealed(size, 1.0)
    agent._pipeline.remote._throttle._rate.add(size, 35.0)
    agent._begin_drain(standing(50.0), ExitCode.INTERRUPTED)
    assert agent._drain.current is not None
    assert (agent._drain.current.plan.choice, agent._drain.current.plan.fits) == (Choice.NEW, True)

    agent._drain.current.deadline = standing(has_s)
    agent._drain.save_what_there_is_in_time()

    assert agent._drain.current.plan.choice is choice
    assert bool(agent._pipeline.remote.jobs) is (choice is Choice.NEWEST)


def test_where_nothing_else_is_left_to_save_a_new_snapshot_is_tried_to_the_end(agent: Agent) -> None:
    """It will at least be on the local disk, and nothing is lost by trying."""
    connect(agent, SimpleNamespace(), layout_bytes=1000)
    agent._pipeline.remote._throttle._rate.add(1000, 100.0)
    agent._begin_drain(standing(10.0), ExitCode.INTERRUPTED)

    agent._drain.save_what_there_is_in_time()

    assert agent._drain.current is not None
    assert (agent._drain.current.plan.choice, agent._drain.current.plan.fits) == (Choice.NEW, False)


def test_an_agent_whose_trainer_is_about_to_say_hello_is_not_taken_over_from(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer had started two, since the first one's socket was still there: each ended the other's run."""
    told = list[Any]()
    channel: Any = SimpleNamespace(send=lambda message, *_: told.append(message))

    agent._on_takeover(channel)
    assert told == [messages.Busy(os.getppid())]
    assert agent._outcome is None

    monkeypatch.setattr(os, "getppid", lambda: 1)  # it has died
    agent._on_takeover(channel)
    assert told[-1] == messages.HandedOver((), ())
    assert agent._outcome is not None


def test_an_agent_whose_starter_died_before_it_lived_is_taken_over_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took whoever had inherited it for the trainer, and held the run of a dead one for a minute."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    settings = Settings(store="memory", run="run", runtime_dir=str(tmp_path))
    made = Agent(settings, Program(starter=4711), sources=[], stores=lambda _: MemoryStore())
    told = list[Any]()
    channel: Any = SimpleNamespace(send=lambda message, *_: told.append(message))
    try:
        made._on_takeover(channel)
        assert told == [messages.HandedOver((), ())]
    finally:
        made._shut()


def test_an_agent_that_is_ending_takes_no_trainer_over_that_goes_on(agent: Agent) -> None:
    agent._end(Outcome("superseded", ExitCode.SUPERSEDED))
    hung_up = list[Any]()
    agent._server.hang_up = hung_up.append  # type: ignore[method-assign]
    channel: Any = object()

    goes_on = messages.Hello(messages.PROTOCOL, generation=messages.GenerationInfo(1, RUN_ID, "a" * 16))
    agent._on_message(channel, Received(goes_on))

    assert hung_up == [channel]
