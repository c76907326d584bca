"""Prepared: what Accelerate has wrapped, or holds, as the plain states inside of it.

Owns how they are found. Accelerate is not imported: its objects are recognized by the modules that they come from.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from harness.errors import StateError


def expanded(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states with all that an Accelerator has prepared in its place, and prepared ones without wrappers.

    Raises:
        StateError: an Accelerator has prepared no model yet, or has given the training to DeepSpeed.
    """
    return {name: _expanded(name, state) for name, state in states.items()}


def _expanded(name: str, state: Any) -> Any:
    if _is_a(state, "accelerate.accelerator", "Accelerator"):
        return _parts(name, state)
    if isinstance(state, dict):
        return {key: _expanded(f"{name}.{key}", item) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        return [_expanded(f"{name}.{index}", item) for index, item in enumerate(state)]
    return unwrapped(state)


def unwrapped(state: Any) -> Any:
    """Return the optimizer or scheduler inside of a prepared one; anything else as it is."""
    if _is_a(state, "accelerate.optimizer", "AcceleratedOptimizer"):
        return state.optimizer
    if _is_a(state, "accelerate.scheduler", "AcceleratedScheduler"):
        return state.scheduler
    return state


def _parts(name: str, accelerator: Any) -> dict[str, Any]:
    if accelerator.distributed_type.value == "DEEPSPEED":
        raise StateError(
            f"{name}: DeepSpeed keeps the state of this training: "
            "watch the checkpoints that it writes (harness run --watch)"
        )
    found: dict[str, Any] = {
        "model": accelerator._models,
        "optimizer": [unwrapped(each) for each in accelerator._optimizers],
        "scheduler": [unwrapped(each) for each in accelerator._schedulers],
        "registered": accelerator._custom_objects,
    }
    if not found["model"]:
        raise StateError(f"{name}: this Accelerator has prepared no model yet: call accelerator.prepare(…) before")
    if accelerator.scaler is not None:
        found["scaler"] = [accelerator.scaler]
    parts = {key: value[0] if len(value) == 1 else list(value) for key, value in found.items() if value}
    return parts | {"accumulation": _Accumulation(accelerator)}


class _Accumulation:
    """The count of batches by which `accelerator.accumulate` tells where a step ends."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


def _is_a(state: Any, module: str, name: str) -> bool:
    found = sys.modules.get(module)  # without the import there is none
    return found is not None and isinstance(state, getattr(found, name))
