"""When the Stager fills a slot, and how it counts."""

from __future__ import annotations

from harness.ipc.slots import Slot
from harness.trainer.overlap import Overlap
from harness.trainer.stager import Stager


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
