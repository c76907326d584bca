"""The state of random number generators as a store may give it back: whole, or written by somebody who means harm."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

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


class Devices:
    """Four devices with a generator each, of a kind that this machine lacks."""

    def __init__(self) -> None:
        self.states = [torch.tensor([10 + index], dtype=torch.uint8) for index in range(4)]
        self.current = 0

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.states[index]

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    made = Devices()
    monkeypatch.setattr(torch, "xpu", made)
    return made


def test_all_devices_of_one_process_have_their_states_back(devices: Devices) -> None:
    stored = capture_rng()
    assert stored["xpu"] == [bytes([10]), bytes([11]), bytes([12]), bytes([13])]
    devices.states = [torch.tensor([0], dtype=torch.uint8)] * 4

    restore_rng(stored)

    assert [int(state) for state in devices.states] == [10, 11, 12, 13]


def test_one_of_several_ranks_has_its_own_device_s_state_whatever_its_number(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    devices.current = 1
    stored = capture_rng()
    assert stored["xpu"] == [bytes([11])]

    devices.current = 3
    restore_rng(stored)

    assert [int(state) for state in devices.states] == [10, 11, 12, 11]
