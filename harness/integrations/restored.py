"""Restored: the small values of states as they were restored, put back after hooks that a resume calls once more.

Owns which values of a model, an optimizer and a scheduler those are. Knows no framework.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Restored:
    """States as they are now, but for their large tensors, of which it only tells whether they were written to."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """Note the values.

        Args:
            model: its parameters' `requires_grad`, and the mode of each module.
            optimizer: the options of its groups.
            scheduler: its state_dict; `None` if there is none.
        """
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._flags = [(param, param.requires_grad) for param in model.parameters()]
        self._modes = [(child, child.training) for child in model.modules()]
        self._options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._versions = [(tensor, _version_of(tensor)) for tensor in self._tensors()]

    def put_back(self) -> bool:
        """Put the values back, once. Return whether each tensor is as it was; one that is not stays as it is."""
        for param, flag in self._flags:
            if param.requires_grad != flag:
                param.requires_grad_(flag)
        for child, mode in self._modes:
            child.training = mode
        for group, options in zip(self._optimizer.param_groups, self._options, strict=False):
            for name, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    with torch.no_grad():
                        group[name].copy_(value)  # others may hold it: a graph on the device, a scheduler
                else:
                    group[name] = value
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._schedule)
        return all(_version_of(tensor) == version for tensor, version in self._versions)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        for state in self._optimizer.state.values():
            if isinstance(state, dict):
                yield from (value for value in state.values() if isinstance(value, Tensor))


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
