"""Entries: what a module's state_dict holds, where that has changed since the Checkpointer was made.

Owns which changes a module can take at a resume, when a start has made it as it was: a buffer that was None, and an
entry of another shape that the module's own loading takes, as the observers of a quantization do. Says of all others,
while the run is saved, that they could not be resumed. Changes no module.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from harness.trainer.state.kinds import plain_keys


class Entries:
    """The parameters and persistent buffers of one module as they were at the beginning."""

    def __init__(self, module: nn.Module) -> None:
        """Note how they are now."""
        self._shapes = _shapes(module, dict(module.named_parameters(remove_duplicate=False)))
        self._empty = {key for key, _, _ in empty_buffers(module).values()}

    def changed(self, module: nn.Module, params: Mapping[str, Tensor]) -> str | None:
        """Return in words the first change that a start could not take; `None` if there is none.

        Args:
            module: the module.
            params: its parameters, by name, duplicates too.
        """
        now = _shapes(module, params)
        if now == self._shapes:
            return None
        for key, shape in self._shapes.items():
            if key not in now:
                return f"{key} is gone"
            if now[key] != shape and not _loads_by_itself(module, key):
                return f"{key} has got another shape"
        return next((f"{key} is new" for key in now if key not in self._shapes.keys() | self._empty), None)


def empty_buffers(module: nn.Module) -> dict[str, tuple[str, nn.Module, str]]:
    """Return the persistent buffers that are None, each with its key in the state_dict, its module and its name there.

    By their keys without those of wrappers.
    """
    found = {
        f"{path}.{name}" if path else name: (child, name)
        for path, child in module.named_modules(remove_duplicate=False)
        for name, buffer in child._buffers.items()
        if buffer is None and name not in child._non_persistent_buffers_set
    }
    return {plain: (key, *found[key]) for key, plain in plain_keys(module, found).items()}


def takes(module: nn.Module, wanted: Mapping[str, Tensor]) -> bool:
    """Whether a module can load entries of other shapes: tried on a copy of it.

    Args:
        module: the live module; not changed.
        wanted: tensors of the form that these entries are to have, by their keys in the state_dict.
    """
    prefix = ""
    while isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        module, prefix = module.module, f"{prefix}module."
    try:
        twin = copy.deepcopy(module)
        state = twin.state_dict()
        forms = {key.removeprefix(prefix): tensor for key, tensor in wanted.items()}
        for key, tensor in forms.items():
            state[key] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=state[key].device)
        with torch.no_grad():
            twin.load_state_dict(state, strict=True)
        now = twin.state_dict()
        return all((now[key].shape, now[key].dtype) == (tensor.shape, tensor.dtype) for key, tensor in forms.items())
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError):
        return False


def _shapes(module: nn.Module, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the shape of each entry, by its key."""
    shapes: dict[str, Any] = {key: param.shape for key, param in params.items()}
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                shapes[f"{path}.{name}" if path else name] = buffer.shape
    return shapes


def _loads_by_itself(module: nn.Module, key: str) -> bool:
    """Whether a module on the way to an entry has a way of its own to load, which may take another shape."""
    *path, _ = key.split(".")
    for depth in range(len(path) + 1):
        child = module.get_submodule(".".join(path[:depth]))
        if type(child)._load_from_state_dict is not nn.Module._load_from_state_dict or child._load_state_dict_pre_hooks:
            return True
    return False
