"""RNG: captures the state of every random number generator as plain bytes and numbers, and restores it.

Owns which generators exist. Draws no number itself. Captures numpy's only if the process has imported numpy.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from harness.errors import SnapshotCorrupt, StateError
from harness.trainer.ranks import find_rank
from harness.trainer.state.kinds import SAME_PROGRAM, is_array

_MOST_POSITIONS: Final = {"pos": 624, "buffer_pos": 4}  # of MT19937 and Philox
_DEVICES: Final = ("cuda", "xpu", "mps")


def capture_rng() -> dict[str, Any]:
    """Return the state of each global generator: Python, numpy if imported, torch on the CPU and on devices in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": tensor_bytes(torch.get_rng_state())}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        state["numpy"] = arrays_to_bytes(numpy_random.get_state(legacy=False))
    for device, module in devices_in_use():
        state[device] = [tensor_bytes(module.get_rng_state(index)) for index in _indexes(module)]
    return state


def capture_moment() -> dict[str, Any]:
    """Return what `capture_rng` returns, in a form that is encoded ten times faster; `restore_rng` takes it too."""
    state = capture_rng()
    return state | {"python": python_bytes(state["python"])}


def restore_rng(tree: object) -> None:
    """Restore every global generator. Skips a device that this machine lacks; `environment` shows the difference.

    Raises:
        StateError: a generator refused its stored state.
        SnapshotCorrupt: `capture_rng` did not make this `tree`.
    """
    if not isinstance(tree, dict) or not ({"python", "torch"} <= set(tree) <= {"python", "torch", "numpy", *_DEVICES}):
        raise SnapshotCorrupt("the stored state of the random number generators has unknown or missing parts")
    try:
        random.setstate(python_state(tree["python"]))
        torch.set_rng_state(bytes_tensor(tree["torch"]))
        if "numpy" in tree:
            numpy_random = importlib.import_module("numpy.random")
            numpy_random.set_state(arrays_from_bytes(tree["numpy"], numpy_random.get_state(legacy=False)))
        for device in _DEVICES:
            module = getattr(torch, device)
            if device in tree and module.device_count():
                for index, state in zip(_indexes(module), tree[device], strict=False):
                    module.set_rng_state(bytes_tensor(state), index)
    except ImportError as err:
        raise StateError("the snapshot holds numpy's random state, and numpy is not installed: install it") from err
    except (RuntimeError, ValueError, TypeError, LookupError) as err:
        raise StateError(f"a random number generator refused its stored state ({err}): {SAME_PROGRAM}") from err


def _indexes(module: Any) -> Sequence[int]:
    """Return the devices whose generators count: all of them, or of several ranks its own, whatever its number."""
    return range(module.device_count()) if find_rank(os.environ).is_alone else [module.current_device()]


def python_bytes(state: Any) -> Any:
    """Return the state of a generator of Python with bytes in place of its words; `python_state` is the inverse."""
    version, words, gauss = state
    return version, array.array("I", words).tobytes(), gauss


def python_state(state: Any) -> Any:
    """Return what `python_bytes` got; anything else as it is."""
    if not (isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], bytes)):
        return state
    return (state[0], tuple(array.array("I", state[1])), state[2])


def check_positions(state: Any) -> None:
    """Raise ValueError if a numpy generator would read beyond the words that it holds: numpy does not check."""
    if not isinstance(state, dict):
        return
    for name, most in _MOST_POSITIONS.items():
        if name in state and not (type(state[name]) is int and 0 <= state[name] <= most):
            raise ValueError(f"its {name} is {str(state[name])[:40]}, and it holds {most} words")
    for part in state.values():
        check_positions(part)


def devices_in_use() -> Iterator[tuple[str, Any]]:
    """Yield the kinds of devices that this process uses. Does not initialize a device: that costs device memory."""
    for device in ("cuda", "xpu"):
        module = getattr(torch, device)
        if module.is_initialized():
            yield device, module
    if torch.backends.mps.is_available():
        yield "mps", torch.mps


def tensor_bytes(state: Tensor) -> bytes:
    """Return a torch generator's state as bytes."""
    return ctypes.string_at(state.data_ptr(), state.numel())  # a generator's state: uint8, contiguous, on the CPU


def bytes_tensor(state: object) -> Tensor:
    """Return the tensor that `tensor_bytes` got. Raises SnapshotCorrupt if `state` is not such bytes."""
    if not (isinstance(state, bytes) and len(state) > 0):
        raise SnapshotCorrupt("a generator's state is stored as something else than bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def arrays_to_bytes(state: Any) -> Any:
    """Return a numpy generator's state with bytes in place of arrays; the rest are ints, floats and names."""
    if isinstance(state, dict):
        return {key: arrays_to_bytes(value) for key, value in state.items()}
    return state.tobytes() if is_array(state) else state


def arrays_from_bytes(state: Any, live: Any) -> Any:
    """Invert `arrays_to_bytes`, with the dtypes of the live state. Raises ValueError, LookupError, TypeError."""
    if isinstance(live, dict):
        check_positions(state)
        return {key: arrays_from_bytes(state[key], value) for key, value in live.items()}
    return sys.modules["numpy"].frombuffer(state, live.dtype) if is_array(live) else state
