"""The state of every random number generator, as plain bytes and numbers; and back.

Owns which generators there are. Draws no number itself. numpy is used only where the process has it.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from harness.errors import SnapshotCorrupt, StateError
from harness.trainer.state.kinds import SAME_PROGRAM, is_array

_MOST_POSITIONS: Final = {"pos": 624, "buffer_pos": 4}  # of MT19937 and Philox
_DEVICES: Final = ("cuda", "xpu", "mps")


def capture_rng() -> dict[str, Any]:
    """The state of every global generator: Python, numpy if it is imported, torch on the CPU and on devices in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": tensor_bytes(torch.get_rng_state())}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        state["numpy"] = arrays_to_bytes(numpy_random.get_state(legacy=False))
    for device, module in devices_in_use():
        state[device] = [tensor_bytes(module.get_rng_state(index)) for index in range(module.device_count())]
    return state


def restore_rng(tree: object) -> None:
    """Put every global generator back. A device that this machine does not have is left out; `environment` tells.

    Raises:
        StateError: a generator refused its stored state.
        SnapshotCorrupt: `tree` is not one that `capture_rng` made.
    """
    if not isinstance(tree, dict) or not ({"python", "torch"} <= set(tree) <= {"python", "torch", "numpy", *_DEVICES}):
        raise SnapshotCorrupt("the stored state of the random number generators has unknown or missing parts")
    try:
        random.setstate(tree["python"])
        torch.set_rng_state(bytes_tensor(tree["torch"]))
        if "numpy" in tree:
            numpy_random = importlib.import_module("numpy.random")
            numpy_random.set_state(arrays_from_bytes(tree["numpy"], numpy_random.get_state(legacy=False)))
        for device in _DEVICES:
            module = getattr(torch, device)
            for index, state in enumerate(tree.get(device, [])[: module.device_count()]):
                module.set_rng_state(bytes_tensor(state), index)
    except ImportError as err:
        raise StateError("the snapshot holds numpy's random state, and numpy is not installed: install it") from err
    except (RuntimeError, ValueError, TypeError, LookupError) as err:
        raise StateError(f"a random number generator refused its stored state ({err}): {SAME_PROGRAM}") from err


def check_positions(state: Any) -> None:
    """Raise ValueError where a generator of numpy's would read beyond the words that it holds: numpy does not look."""
    if not isinstance(state, dict):
        return
    for name, most in _MOST_POSITIONS.items():
        if name in state and not (type(state[name]) is int and 0 <= state[name] <= most):
            raise ValueError(f"its {name} is {str(state[name])[:40]}, and it holds {most} words")
    for part in state.values():
        check_positions(part)


def devices_in_use() -> Iterator[tuple[str, Any]]:
    """Kinds of devices that this process has begun to use. Asking must not begin it: that costs device memory."""
    for device in ("cuda", "xpu"):
        module = getattr(torch, device)
        if module.is_initialized():
            yield device, module
    if torch.backends.mps.is_available():
        yield "mps", torch.mps


def tensor_bytes(state: Tensor) -> bytes:
    """A generator's state as torch gives it."""
    return ctypes.string_at(state.data_ptr(), state.numel())  # a generator's state: uint8, contiguous, on the CPU


def bytes_tensor(state: object) -> Tensor:
    """The inverse. Raises SnapshotCorrupt."""
    if not (isinstance(state, bytes) and len(state) > 0):
        raise SnapshotCorrupt("a generator's state is stored as something else than bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def arrays_to_bytes(state: Any) -> Any:
    """A numpy generator's state with bytes for arrays; the rest are ints, floats and names."""
    if isinstance(state, dict):
        return {key: arrays_to_bytes(value) for key, value in state.items()}
    return state.tobytes() if is_array(state) else state


def arrays_from_bytes(state: Any, live: Any) -> Any:
    """The inverse, with the dtypes of the live generator's state. Raises ValueError, LookupError, TypeError."""
    if isinstance(live, dict):
        check_positions(state)
        return {key: arrays_from_bytes(state[key], value) for key, value in live.items()}
    return sys.modules["numpy"].frombuffer(state, live.dtype) if is_array(live) else state
