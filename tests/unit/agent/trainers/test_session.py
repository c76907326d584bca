"""The trainer as its agent sees it, without one: what it tells, and what it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud.testing.memory import MemoryStore
from harness.agent.generation import Generation
from harness.agent.main import Agent
from harness.agent.resume_point import ResumePoint
from harness.agent.save import slot_pool
from harness.agent.trainers.session import Trainer
from harness.config.program import Program
from harness.config.settings import Settings
from harness.core import messages
from harness.core.snapshot import SnapshotId
from harness.errors import NoSpace
from harness.ipc.channel import Received
from harness.ipc.slots import Slot
from tests.support.patience import HANG_S
from tests.support.protocol import RUN_ID, SLOT_BYTES, Content


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    settings = Settings(store="memory", run="run", slots=2, runtime_dir=str(tmp_path))
    made = Agent(settings, Program(), sources=[], stores=lambda _: MemoryStore())
    yield made
    made.trainer.connection = None
    made._shut()


class Told:
    """A trainer's end of the channel."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: messages.AnyMessage, fds: Sequence[int] = ()) -> None:
        self.messages.append(message)


def connect(trainer: Trainer) -> Told:
    told = Told()
    trainer.connection = SimpleNamespace(channel=told)  # type: ignore[assignment]
    return told


def test_small_state_that_is_large_is_told_with_the_tensors_only(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the slot as well: 200 MB of it, ahead of the tensors, took longer than they do."""
    told, record = connect(agent.trainer), Content(SnapshotId(1, 10)).record()
    agent._startup.header = (str(SnapshotId(1, 10)), "remote", record)

    agent.trainer.tell_resume()
    assert [type(message) for message in told.messages] == [messages.ResumeHeader]
    monkeypatch.setattr("harness.agent.trainers.session.MOST_OF_HEADER", len(record.state) - 1)
    agent.trainer.tell_resume()

    assert len(told.messages) == 1


def lay_out(agent: Agent, told: Told, number: int, size: int = SLOT_BYTES) -> None:
    agent._on_message(told, Received(messages.Layout(size, number)))  # type: ignore[arg-type]


def until(agent: Agent, told: Told, count: int) -> None:
    """As the main loop does, until so many messages were sent."""
    for _ in range(100):
        agent._loop.wait(0.1)
        agent._loop.run_posts()
        if len(told.messages) >= count:
            return
    raise TimeoutError(told.messages)


class Memory:
    """Gives slots when it is let to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self.may = threading.Semaphore(0)
        self.sizes: list[int] = []
        self._real = slot_pool.make_slots
        monkeypatch.setattr(slot_pool, "make_slots", self._make)

    def _make(self, size: int, count: int, disk: Path | None, *, beside: int = 0) -> list[Slot]:
        self.sizes.append(size)
        self.asked.set()
        if not self.may.acquire(timeout=HANG_S):
            raise NoSpace("nobody let it")
        return self._real(size, count, disk, beside=beside)


def making(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> tuple[Memory, Told]:
    """A trainer has told a layout, and its slots are being made."""
    slow, told = Memory(monkeypatch), connect(agent.trainer)
    lay_out(agent, told, 1)
    assert slow.asked.wait(HANG_S)
    return slow, told


def test_while_slots_are_made_the_agent_listens_and_grants_none(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, told = making(agent, monkeypatch)
    heard: list[str] = []
    agent._loop.post(lambda: heard.append("a notice"))
    agent._loop.run_posts()
    agent._control.grant()
    assert heard == ["a notice"]
    assert not agent._control.may_ask
    assert agent._control.layout_bytes == SLOT_BYTES, "how long a snapshot takes can be told already"
    slow.may.release()
    until(agent, told, 1)

    (slots,) = told.messages
    assert (type(slots), slots.number, len(slots.indexes)) == (messages.Slots, 1, 2)
    agent._control.grant()
    assert agent._control.may_ask


def test_a_layout_that_was_given_up_meanwhile_gets_no_slots_and_the_newest_does(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = making(agent, monkeypatch)

    lay_out(agent, told, 2, 2 * SLOT_BYTES)
    lay_out(agent, told, 3, 3 * SLOT_BYTES)
    slow.may.release(2)
    until(agent, told, 1)

    (slots,) = told.messages
    assert (type(slots), slots.number) == (messages.Slots, 3)
    assert slow.sizes == [SLOT_BYTES, 3 * SLOT_BYTES]
    assert [agent._pipeline.pool[index].size for index in agent._pipeline.pool.usable] == [3 * SLOT_BYTES] * 2


def test_slots_that_come_after_their_trainer_has_gone_are_the_next_ones(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = making(agent, monkeypatch)
    agent.trainer.connection = None  # as `drop` leaves it
    agent.trainer._supply.forget()

    again = connect(agent.trainer)
    lay_out(agent, again, 1)
    slow.may.release()
    until(agent, again, 1)

    assert not told.messages
    (slots,) = again.messages
    assert (type(slots), len(slots.indexes)) == (messages.Slots, 2)
    assert slow.sizes == [SLOT_BYTES]


def test_what_a_dead_trainer_was_to_resume_is_held_for_it_no_more(agent: Agent) -> None:
    """It was found after it had died, and nobody restores it."""
    slot, content = Slot.create(SLOT_BYTES), Content(SnapshotId(1, 10))
    content.fill(slot)
    point = ResumePoint(SnapshotId(1, 10), "remote", None, slot, content.record(), verified=True)
    agent._startup.point = agent._pipeline.note_resumed(point, Generation(2, RUN_ID, "b" * 16))
    index = agent._startup.point.index
    assert index is not None
    pool = agent._pipeline.pool
    assert pool.grant() is None

    agent.trainer.begin_again(lambda: None)

    assert pool.grant() == index


def test_too_little_memory_is_told_to_the_trainer(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_pool, "available_bytes", lambda: 0)
    told = connect(agent.trainer)

    lay_out(agent, told, 1)
    until(agent, told, 1)

    (refusal,) = told.messages
    assert (type(refusal), refusal.error) == (messages.NoSlots, "NoSpace")
    agent._control.grant()
    assert not agent._control.may_ask
