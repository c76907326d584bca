from __future__ import annotations

import itertools

import pytest

from harness.agent.run_state import MOVES, State
from harness.core.messages import RunState

STARTING, RUNNING, DRAINING, DONE = RunState.STARTING, RunState.RUNNING, RunState.DRAINING, RunState.DONE
WAYS = {STARTING: [], RUNNING: [RUNNING], DRAINING: [DRAINING], DONE: [DONE]}
LEGAL = {
    (STARTING, RUNNING),
    (STARTING, DRAINING),
    (RUNNING, STARTING),
    (RUNNING, DRAINING),
    *((state, DONE) for state in (STARTING, RUNNING, DRAINING)),
}


@pytest.mark.parametrize(("before", "to"), list(itertools.product(RunState, RunState)))
def test_a_state_goes_where_it_may_and_stays_otherwise(before: RunState, to: RunState) -> None:
    state = State()
    for step in WAYS[before]:
        state.move(step)
    assert state.now is before

    state.move(to)

    assert state.now is (to if (before, to) in LEGAL else before)


def test_every_state_has_its_moves() -> None:
    assert set(MOVES) == set(RunState)
