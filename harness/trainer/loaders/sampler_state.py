"""Sampler state: has a sampler that has no state draw the same order again, for a loader that knows its own position.

Owns the stand-in for such a sampler in a StatefulDataLoader, which by itself iterates over the sampler once more and
skips: an order that is random is then another one. Reads no data.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from harness.trainer.loaders.generators import generators_in, make_missing, set_states, states
from harness.trainer.loaders.hook import Tree
from harness.trainer.loaders.order import draws_at_once, draws_in_turns, ends_early, fingerprint, other_order
from harness.trainer.loaders.sampler_values import SamplerValues
from harness.trainer.state.random_states import global_ones

_WATCHED = 1000
"""So many of a pass's indices are watched, which takes some 20 µs each: a sampler that draws in turns does so soon."""


class Moments:
    """Takes and sets the random states on which a loader's batches depend: the global ones, and its generators'.

    Holds no reference to the loader: see `_Order` in `dataloader.py`.
    """

    def __init__(
        self, roots: Tree, name: str, capture_rng: Callable[[], Any], restore_rng: Callable[[Any], None]
    ) -> None:
        """`roots`: the objects to be searched for generators; `name`: the loader's."""
        self.name = name
        self._roots = roots
        self.values = SamplerValues(roots)
        self._restore_rng = restore_rng
        self.rng = capture_rng

    def found(self) -> dict[str, Any]:
        """Return all generators, by the path to each."""
        return generators_in(self._roots)

    def generators(self) -> Tree:
        """Return the states of all generators."""
        return states(self.found())

    def take(self) -> Tree:
        """Return all random states."""
        return {"rng": self.rng(), "generators": self.generators(), "values": self.values.kept()}

    def set(self, moment: Tree) -> None:
        """Set what `take` returned. Raises StateError: see `set_generators`."""
        self.set_generators(moment["generators"])
        self.values.set(moment.get("values", {}))
        self._restore_rng(moment["rng"])

    def kept_values(self, *, under_way: bool) -> Tree:
        """Return the values that samplers have counted. `under_way`: whether an iteration is, which may count too."""
        if under_way:
            self.values.note()
        return self.values.kept()

    def set_generators(self, states: Tree) -> None:
        """Set what `generators` returned. Raises StateError if one is missing, or refuses its state."""
        make_missing(self._roots, states)
        set_states(self.found(), states, self.name)


def replayable(sampler: Any, moments: Moments) -> Any:
    """Return a stand-in for a loader's sampler, or for its batch sampler; one that has a state itself."""
    if is_stateful(sampler):
        return sampler
    if isinstance(sampler, sys.modules["torchdata.stateful_dataloader.sampler"].BatchSampler):
        inner = replayable(sampler.sampler, moments)
        sampler = copy.copy(sampler)  # its iterator has a state, and asks the inner one's
        sampler.sampler = inner
        return sampler
    return _Replayable(sampler, moments)


def is_stateful(value: object) -> bool:
    """Whether torchdata asks it for its state."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class _Replayable:
    def __init__(self, sampler: Any, moments: Moments) -> None:
        self._sampler, self._moments = sampler, moments

    def __iter__(self) -> Iterator[Any]:
        opened = self._moments.take()
        self._moments.values.begin()
        indices = iter(self._sampler)
        return indices if is_stateful(indices) else _Indices(self._sampler, indices, opened, self._moments)

    def __len__(self) -> int:
        return len(self._sampler)


class _Indices:
    """The iterator over a sampler. Its state: the random states where it began and drew first, and how many indices."""

    def __init__(self, sampler: Any, indices: Iterator[Any], opened: Tree, moments: Moments) -> None:
        self._sampler, self._indices, self._moments = sampler, indices, moments
        self._opened = opened
        self._first: Tree | None = None
        self._drawn = 0
        self._last: Any = None
        self._watched = 0 if draws_at_once(sampler) else _WATCHED

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        if self._first is None:
            self._first = self._moments.take()
            index = next(self._indices)
            self._moments.values.note()
        elif self._drawn < self._watched:
            before = global_ones(self._moments.rng())
            index = next(self._indices)
            if global_ones(self._moments.rng()) != before:
                raise draws_in_turns(self._moments.name, self._sampler)
        else:
            index = next(self._indices)
        self._drawn += 1
        self._last = index
        return index

    def state_dict(self) -> Tree:
        return {"opened": self._opened, "first": self._first, "drawn": self._drawn, "last": _checksum(self._last)}

    def load_state_dict(self, state: Tree) -> None:
        """Draw again what was drawn. Leaves the random states as they were then.

        Raises:
            StateError: the order has changed.
        """
        self._opened, self._first = state["opened"], state["first"]
        self._moments.set(self._opened)
        self._moments.values.begin()
        self._indices = iter(self._sampler)
        if self._first is not None:
            self._moments.set(self._first)
        for index in islice(self._indices, state["drawn"]):
            self._last = index
            self._drawn += 1
        if self._drawn < state["drawn"]:
            raise ends_early(self._moments.name, "indices", state["drawn"], self._drawn)
        if _checksum(self._last) != state["last"]:
            raise other_order(self._moments.name)


def _checksum(index: Any) -> int | None:
    """`index`: one, or a batch of them."""
    return fingerprint(index if isinstance(index, list | tuple | torch.Tensor) else [index])
