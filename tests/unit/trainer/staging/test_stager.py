"""When the Stager fills a slot, and how it counts."""

from __future__ import annotations

import pytest
import torch

from harness.core.messages import GenerationInfo, Sealed
from harness.errors import StateError
from harness.ipc.slots import Slot
from harness.trainer.ranks import ALONE
from harness.trainer.staging import stager as module
from harness.trainer.staging.overlap import Overlap
from harness.trainer.staging.stager import Stager, read_tensors
from harness.trainer.state.capture import Captured, capture


class PlayedLink:
    """Whoever the Stager asks for a slot; grants none."""

    slot_error = None
    rank = ALONE

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.asked: list[tuple[int, int]] = []

    def granted(self, used: int, sealed: int) -> tuple[int, Slot] | None:
        self.asked.append((used, sealed))
        return None


def test_seals_are_counted_on_from_those_that_the_agent_knows_who_found_what_is_resumed() -> None:
    """Counted on from those of an agent that had died before, no grant of the next one counted, ever."""
    link = PlayedLink(sequence=5)
    stager = Stager(link, {}, lambda sure, found=None: capture({}), lambda step, captured: {}, Overlap(print))  # type: ignore[arg-type]
    link.sequence = 2  # another agent: the first one died while it looked

    stager.begin()
    stager.stage(1)

    assert link.asked == [(0, 2)]


class Growing:
    """A state whose one tensor grows; the agent that is asked for slots grants one at once."""

    slot_error = None
    rank = ALONE
    sequence = 0

    def __init__(self) -> None:
        self.generation = GenerationInfo(1, "0" * 32, "")
        self.asked: list[int] = []
        self.used: list[int] = []
        self.sealed: list[int] = []
        self.rows = 1
        self._slot: Slot | None = None

    def ask_slots(self, size: int, prepare: object) -> None:
        self.asked.append(size)
        if self._slot is not None:
            self._slot.close()
        self._slot = Slot.create(size)

    def granted(self, used: int, sealed: int) -> tuple[int, Slot] | None:
        self.used.append(used)
        return None if self._slot is None else (used + 10, self._slot)

    def index_of(self, slot: Slot) -> int:
        return 0

    def send(self, message: Sealed) -> None:
        assert self._slot is not None
        record = self._slot.record()
        assert record is not None
        self.sealed.append(read_tensors(self._slot, record)["ckpt.extra/history"].shape[0])

    def capture(self, sure: bool, found: object = None) -> Captured:
        return capture({}, extra={"history": torch.zeros(self.rows, 1000)})


def test_a_state_that_grows_at_every_step_is_saved_at_nearly_every_step() -> None:
    """It was planned anew at every boundary, and sealed at none."""
    agent = Growing()
    stager = Stager(agent, {}, agent.capture, lambda step, captured: {}, Overlap(print))  # type: ignore[arg-type]
    stager.plan(0)
    for step in range(1, 101):
        agent.rows += 5
        stager.stage(step)

    assert len(agent.sealed) > 85
    assert len(agent.asked) < 15, "a slot that is asked for again has room to grow"
    assert agent.sealed[-1] == agent.rows


def test_a_grant_that_was_used_is_named_when_the_next_one_is_looked_for() -> None:
    """Else one that is not yet seen to be withdrawn would be used twice: over what the agent reads."""
    agent = Growing()
    stager = Stager(agent, {}, agent.capture, lambda step, captured: {}, Overlap(print))  # type: ignore[arg-type]
    stager.plan(0)
    for step in (1, 2, 3):
        assert stager.stage(step)

    assert agent.used == [0, 10, 20]


def test_small_state_that_nobody_could_read_back_is_refused_while_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called durable, and no start could read its manifest."""
    monkeypatch.setattr(module, "MAX_STATE_BYTES", 1000)
    stager = Stager(
        PlayedLink(0),  # type: ignore[arg-type]
        {},
        lambda sure, found=None: capture({}),
        lambda step, captured: {"extra": "x" * step},
        Overlap(print),
    )

    stager._dumped(900, Captured({}, {}, frozenset()))
    with pytest.raises(StateError, match="keep large data"):
        stager._dumped(1000, Captured({}, {}, frozenset()))
