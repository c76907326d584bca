"""The state of random number generators as a store may give it back: whole, or written by somebody who means harm."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from harness.errors import SnapshotCorrupt, StateError
from harness.trainer.loaders import generators
from harness.trainer.state.capture import capture
from harness.trainer.state.restore import restore
from harness.trainer.state.rng import capture_rng, restore_rng

BEYOND = {"the first beyond": 625, "far beyond": 2_000_000_000, "before": -1, "no integer": "7", "a truth": True}


@pytest.mark.parametrize("pos", BEYOND.values(), ids=BEYOND)
def test_a_position_outside_of_what_a_generator_holds_is_refused(pos: object) -> None:
    """Numpy takes it and reads from there: other memory's words as random numbers, or a segmentation fault."""
    stored: Any = capture_rng()
    stored["numpy"]["state"]["pos"] = pos

    with pytest.raises(StateError, match=f"refused its stored state .*its pos is {pos}, and it holds 624 words"):
        restore_rng(stored)


@pytest.mark.parametrize("pos", [0, 1, 624])
def test_every_position_inside_is_taken(pos: int) -> None:
    stored: Any = capture_rng()
    stored["numpy"]["state"]["pos"] = pos

    restore_rng(stored)

    assert numpy.random.get_state(legacy=False)["state"]["pos"] == pos  # type: ignore[call-overload,index]


GENERATORS = {
    "mt19937": (numpy.random.MT19937, ("state", "pos"), 625),
    "philox": (numpy.random.Philox, ("buffer_pos",), 5),
}


@pytest.mark.parametrize(("kind", "where", "beyond"), GENERATORS.values(), ids=GENERATORS)
def test_so_it_is_of_a_generator_that_a_loader_draws_from(kind: Any, where: tuple[str, ...], beyond: int) -> None:
    generator = numpy.random.Generator(kind(0))
    state = dict(generator.bit_generator.state)
    put(state, where, beyond)

    with pytest.raises(ValueError, match=f"its {where[-1]} is {beyond}"):
        generators.set_state(generator, state)


def test_so_it_is_of_one_that_a_script_keeps() -> None:
    stored = capture({"generator": numpy.random.Generator(numpy.random.MT19937(0))})
    stored.tree["generator"]["state"]["state"]["pos"] = 625

    with pytest.raises((StateError, SnapshotCorrupt), match="its pos is 625"):
        restore({"generator": numpy.random.Generator(numpy.random.MT19937(0))}, stored.tree, stored.tensors)


def put(state: dict[str, Any], where: tuple[str, ...], value: object) -> None:
    for name in where[:-1]:
        state = state[name]
    state[where[-1]] = value
