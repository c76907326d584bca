"""Claims: whether a tensor should be equal on all ranks, may be, or is this rank's alone, before it is compared.

Owns what follows from the wrappers of torch.distributed. What it calls shared or perhaps shared is proved later: the
agent compares sums of it (`core/pieces.py`, `agent/trainers/holdings.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.core.pieces import Holding
from harness.errors import StateError

_FSDP: Final = "torch.distributed.fsdp.fully_sharded_data_parallel"
_ZERO: Final = "torch.distributed.optim.zero_redundancy_optimizer"


class LocalSteps:
    """Which DistributedDataParallel a rank has trained by itself, under `no_sync`: nothing keeps it equal any more."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._watched: tuple[Any, ...] = ()
        self._found: set[int] = set()

    def watch(self, states: Iterable[object]) -> None:
        """Watch the wrappers in these states."""
        self._watched = tuple(one for state in states if isinstance(state, nn.Module) for one in _wrappers(state))

    def note(self) -> None:
        """Note that an optimizer has stepped: with gradients of this rank alone, if the last forward was not to sync.

        A forward without gradients looks the same. Then a wrapper is watched closer than it has to be.
        """
        for wrapper in self._watched:
            if not wrapper.require_forward_param_sync:
                self._found.add(id(wrapper))

    def __contains__(self, wrapper: object) -> bool:
        return id(wrapper) in self._found


class Claims:
    """What the wrappers around the states say. Made for each capture: a wrapper may come late."""

    def __init__(self, flat: Mapping[str, object], local_steps: LocalSteps | None = None) -> None:
        """Look at the states.

        Args:
            flat: the states, by name.
            local_steps: the wrappers that a rank has trained by itself.

        Raises:
            StateError: one of them is wrapped in a way that cannot be stored; names the remedy.
        """
        self._synchronized: dict[int, int] = {}  # the group of each parameter, by its identity
        groups: dict[tuple[int, ...], int] = {}
        self._apart: set[int] = set()
        self._loose: set[int] = set()  # parameters that a wrapper has, and leaves to the program to keep equal
        for name, state in flat.items():
            _refuse(name, state)
            if isinstance(state, nn.Module):
                for wrapper in _wrappers(state):
                    ranks = tuple(torch.distributed.get_process_group_ranks(wrapper.process_group))
                    group = groups.setdefault(ranks, len(groups))
                    ignored = set(wrapper.parameters_to_ignore)
                    is_loose = bool(getattr(wrapper, "_comm_hooks", None)) or wrapper in (local_steps or ())
                    for key, param in wrapper.module.named_parameters(remove_duplicate=False):
                        if key not in ignored:
                            self._synchronized[id(param)] = group
                            if is_loose:
                                self._loose.add(id(param))
                    self._apart.update(id(buffer) for buffer in wrapper.module.buffers())

        self.groups = tuple(groups)
        """The groups of ranks that keep parameters equal."""

    def group_of(self, tensor: object) -> int | None:
        """Return the index of the group that keeps a parameter equal; `None` if none does."""
        return self._synchronized.get(id(tensor))

    def of(self, tensor: object) -> Holding:
        """Return how a rank holds a module's parameter or buffer, or an optimizer's state of that parameter."""
        if id(tensor) in self._loose:
            return Holding.MAYBE  # post_localSGD_hook, for example, averages among some ranks only
        if id(tensor) in self._synchronized:
            return Holding.SHARED
        return Holding.OWN if id(tensor) in self._apart else Holding.MAYBE


def _wrappers(module: nn.Module) -> Iterator[Any]:
    return (child for child in module.modules() if isinstance(child, DistributedDataParallel))


def _refuse(name: str, state: object) -> None:
    fsdp, zero = sys.modules.get(_FSDP), sys.modules.get(_ZERO)
    children = state.modules() if isinstance(state, nn.Module) else ()
    if fsdp is not None and any(isinstance(child, fsdp.FullyShardedDataParallel) for child in children):
        raise StateError(
            f"{name}: FullyShardedDataParallel gathers the whole model for each state_dict: use fully_shard "
            "(torch.distributed.fsdp), whose parameters are saved where they are"
        )
    if zero is not None and isinstance(state, zero.ZeroRedundancyOptimizer):
        raise StateError(
            f"{name}: ZeroRedundancyOptimizer gathers its state on one rank for each state_dict: use fully_shard with "
            "a torch optimizer, which divides the state of the optimizer too"
        )
