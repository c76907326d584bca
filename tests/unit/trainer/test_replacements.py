from __future__ import annotations

from harness.trainer.replacements import LASTED_S, PAUSES_S, Replacements
from tests.support.clock import FakeClock


def attempts(replacements: Replacements) -> list[float]:
    return list(iter(replacements.next_pause_s, None))


def test_the_first_attempt_is_made_at_once_and_later_ones_ever_later_until_there_have_been_enough() -> None:
    replacements = Replacements(FakeClock())
    replacements.note_lost()

    pauses = attempts(replacements)

    assert pauses[0] == 0
    assert pauses == sorted(pauses) == [*PAUSES_S]
    assert replacements.next_pause_s() is None


def test_an_agent_that_lasts_is_replaced_however_many_there_were() -> None:
    """The sixth one's death, days after the first one's, ended all saving."""
    clock = FakeClock()
    replacements = Replacements(clock)
    for _ in range(10 * len(PAUSES_S)):
        clock.advance(LASTED_S)
        replacements.note_lost()
        assert replacements.next_pause_s() == 0
        replacements.note_begun()


def test_agents_that_die_soon_after_they_began_are_counted_together() -> None:
    clock = FakeClock()
    replacements = Replacements(clock)
    for pause_s in PAUSES_S:
        clock.advance(LASTED_S - 1)
        replacements.note_lost()
        assert replacements.next_pause_s() == pause_s
        replacements.note_begun()
    replacements.note_lost()

    assert replacements.next_pause_s() is None
