"""Random states: those on which the program's next draw depends: the global ones, and those of generators it has given.

Owns how the states of given generators are taken beside the global ones, for code that runs again: between two loops,
at the top of an epoch or of a step. `rng.py` has the global ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from harness.errors import StateError
from harness.trainer.state.kinds import SAME_PROGRAM, is_numpy_generator
from harness.trainer.state.rng import (
    arrays_from_bytes,
    arrays_to_bytes,
    bytes_tensor,
    capture_moment,
    python_bytes,
    python_state,
    restore_rng,
    tensor_bytes,
)

_GIVEN: Final = "given"


class RandomStates:
    """Takes and sets the global random states, and those of the generators among a training's states."""

    def __init__(self, states: Mapping[str, object]) -> None:
        """`states`: the Checkpointer's states, by name; flat. Others may come into it later."""
        self._states = states

    def take(self) -> dict[str, Any]:
        """Return all of them. Draws nothing."""
        return self.completed(capture_moment())

    def completed(self, rng: dict[str, Any]) -> dict[str, Any]:
        """Return global random states, and with them what the given generators have now."""
        given = {name: forms[0](each) for name, each in self._states.items() if (forms := _forms_of(each)) is not None}
        return rng | {_GIVEN: given} if given else rng

    def set(self, moment: Mapping[str, Any]) -> None:
        """Set what `take` returned, or global states alone. A generator without a state there stays as it is.

        Raises:
            StateError: a generator refused its state.
            SnapshotCorrupt: `moment` is not what `take` returned.
        """
        for name, state in moment.get(_GIVEN, {}).items():
            generator = self._states.get(name)
            if (forms := _forms_of(generator)) is not None:
                try:
                    forms[1](generator, state)
                except (RuntimeError, ValueError, TypeError, LookupError) as err:
                    raise StateError(f"{name}: it refused its stored state ({err}): {SAME_PROGRAM}") from err
        restore_rng(global_ones(moment))


def global_ones(moment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the global states of a moment alone."""
    return {name: state for name, state in moment.items() if name != _GIVEN}


def _forms_of(state: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None:
    """Return how a generator's state is taken and set; `None` if it is no generator."""
    if isinstance(state, torch.Generator):
        return lambda each: tensor_bytes(each.get_state()), lambda each, stored: each.set_state(bytes_tensor(stored))
    if isinstance(state, random.Random):
        return lambda each: python_bytes(each.getstate()), lambda each, stored: each.setstate(python_state(stored))
    return (_take_numpy, _set_numpy) if is_numpy_generator(state) else None


def _take_numpy(generator: Any) -> Any:
    return arrays_to_bytes(generator.bit_generator.state)


def _set_numpy(generator: Any, state: Any) -> None:
    generator.bit_generator.state = arrays_from_bytes(state, generator.bit_generator.state)
