"""When the Stager fills a slot, and how it counts."""

from __future__ import annotations

import pytest

from harness.errors import StateError
from harness.ipc.slots import Slot
from harness.trainer.staging import stager as module
from harness.trainer.staging.overlap import Overlap
from harness.trainer.staging.stager import Stager
from harness.trainer.state.capture import Captured


class PlayedLink:
    """Whoever the Stager asks for a slot; grants none."""

    slot_error = None

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.asked: list[tuple[int, int]] = []

    def granted(self, used: int, sealed: int) -> tuple[int, Slot] | None:
        self.asked.append((used, sealed))
        return None


def test_seals_are_counted_on_from_those_that_the_agent_knows_who_found_what_is_resumed() -> None:
    """Counted on from those of an agent that had died before, no grant of the next one counted, ever."""
    link = PlayedLink(sequence=5)
    stager = Stager(link, {}, lambda step, states: {}, Overlap(print))  # type: ignore[arg-type]
    link.sequence = 2  # another agent: the first one died while it looked

    stager.begin()
    stager.stage(1)

    assert link.asked == [(0, 2)]


def test_small_state_that_nobody_could_read_back_is_refused_while_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called durable, and no start could read its manifest."""
    monkeypatch.setattr(module, "MAX_STATE_BYTES", 1000)
    stager = Stager(PlayedLink(0), {}, lambda step, tree: {"extra": "x" * step}, Overlap(print))  # type: ignore[arg-type]

    stager._dumped(900, Captured({}, {}, frozenset()))
    with pytest.raises(StateError, match="keep large data"):
        stager._dumped(1000, Captured({}, {}, frozenset()))
