"""Worker state: has the workers of a loader that knows its own position remember their random states as well.

Owns the stand-ins for the user's dataset in such workers. torchdata's StatefulDataLoader asks each worker, after each
batch, for the state of what it reads, and gives it back on a resume. The random states of the worker are not in that;
the stand-ins add them. They draw nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from harness.trainer.loaders.generators import generators_in, make_missing, set_state, states
from harness.trainer.loaders.sampler_state import is_stateful
from harness.trainer.loaders.workers import StandIn
from harness.trainer.state.rng import capture_moment, restore_rng

_SEARCHES = 4
"""In each worker, at its first batches: a generator may be made at its first use."""
_RANDOM, _GENERATORS, _OWN = "random", "generators", "own"


def remembering(dataset: Any, collate_fn: Any) -> Any:
    """Return a stand-in for a dataset, whose state includes the worker's random states; a pipe itself."""
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        return dataset
    if not isinstance(dataset, IterableDataset):
        return _Samples(dataset, collate_fn)
    return (_StatefulStream if is_stateful(dataset) else _Stream)(dataset, collate_fn)


class _Random:
    """The random states of a worker: the global ones, and those of the generators that its parts hold."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._roots = {"dataset": dataset, "collate_fn": collate_fn}
        self._found: dict[str, Any] = {}
        self._searches = 0

    @property
    def _generators(self) -> dict[str, Any]:
        if self._searches < _SEARCHES:
            self._searches += 1
            self._found = generators_in(self._roots)
        return self._found

    def with_own(self, own: Any) -> dict[str, Any]:
        """Return a state: the random states, and that of the user's object, or `None`."""
        return {_RANDOM: capture_moment(), _GENERATORS: states(self._generators), _OWN: own}

    def restore(self, state: Mapping[str, Any], load_own: Callable[[Any], object]) -> None:
        """Restore what `with_own` returned. The user's object first: that may draw."""
        if state[_OWN] is not None:
            load_own(state[_OWN])
        make_missing(self._roots, state[_GENERATORS])
        self._found, self._searches = generators_in(self._roots), _SEARCHES
        for path, value in state[_GENERATORS].items():
            if path in self._found:
                set_state(self._found[path], value)
        restore_rng(state[_RANDOM])


class _Samples(StandIn):
    """For a dataset that is indexed."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        super().__init__(dataset)
        self._random = _Random(dataset, collate_fn)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        getitems = getattr(self.dataset, "__getitems__", None)
        return getitems(indices) if getitems else [self.dataset[index] for index in indices]

    def state_dict(self) -> dict[str, Any]:
        return self._random.with_own(self.dataset.state_dict() if is_stateful(self.dataset) else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.restore(state, lambda own: self.dataset.load_state_dict(own))


class _Stream(StandIn):
    """For a dataset that is iterated over. One without a state is read again from its beginning, random numbers too."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        super().__init__(dataset)
        self._collate_fn = collate_fn

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self.dataset)
        if is_stateful(iterator) or is_stateful(self.dataset):
            return _StatefulIterator(iterator, _Random(self.dataset, self._collate_fn))
        return iterator


class _StatefulStream(_Stream):
    """For one that knows its own position. Its iterator has the random states: `iter` may draw."""

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


class _StatefulIterator:
    def __init__(self, iterator: Iterator[Any], random: _Random) -> None:
        self._iterator, self._random = iterator, random

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        iterator: Any = self._iterator
        return self._random.with_own(iterator.state_dict() if is_stateful(iterator) else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        iterator: Any = self._iterator
        self._random.restore(state, lambda own: iterator.load_state_dict(own))
