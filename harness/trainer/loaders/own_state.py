"""Own state: resumes a loader that knows its own position, such as torchdata's StatefulDataLoader.

Owns when such a loader is asked, and how tensors in its state become plain values; replays nothing. The position is as
exact as the loader's own. What a StatefulDataLoader leaves out is added to it: the random states of its workers, the
generators that its parts hold, and the random states from which a sampler without a state draws its order.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from harness.errors import StateError
from harness.trainer.loaders.generators import roots_of
from harness.trainer.loaders.hook import OnIter, Tree, call, check_kind, hook, is_hooked, switch, weakly
from harness.trainer.loaders.sampler_state import Moments, replayable
from harness.trainer.loaders.worker_state import remembering
from harness.trainer.loaders.workers import Workers

_KIND = "own state"
_TENSOR = "\u0000tensor"
_COMPLETED = "_harness_completed"


class OwnStateLoader:
    """A loader that knows its own position, such as torchdata's StatefulDataLoader. As exact as that position."""

    repeats = False

    def __init__(
        self, loader: Any, name: str, capture_rng: Callable[[], Any], restore_rng: Callable[[Any], None]
    ) -> None:
        self.name = name
        self.loader = loader
        stateful = _is_stateful_data_loader(loader)
        self._moments = Moments(roots_of(loader) if stateful else {}, name, capture_rng, restore_rng)
        if stateful:
            _complete(loader, self._moments)
        self._iter = type(loader).__iter__
        self._on_iter: Callable[[], OnIter | None] = lambda: None
        self._capture_rng = capture_rng
        self._restore_rng = restore_rng
        self._pending: tuple[Tree, Any] | None = None
        self._start: Tree | None = None
        self._iteration: Callable[[], Iterator[Any] | None] = lambda: None
        self._exhausted = False

    def iterate(self, again: Any = None) -> Iterator[Any]:
        """See `InstrumentedLoader.iterate`."""
        self._exhausted = False
        if self._pending is None:
            self._start = self._moments.take()
            batches = self._iter(self.loader)
        else:
            position, rng = self._pending
            self._start = position["start"]
            self._moments.set(self._start)
            self.loader.load_state_dict(_with_tensors(position["state"]))
            batches = self._iter(self.loader)
            values = position.get("values", {})
            self._moments.set({"rng": rng, "generators": position["generators"], "values": values})
            self._pending = None
        iteration = self._hand_out(batches)
        self._iteration = weakref.ref(iteration)
        return iteration

    def moment(self) -> Tree:
        """See `InstrumentedLoader.moment`."""
        return {}  # the iteration cannot be repeated

    def position(self) -> Tree:
        """See `InstrumentedLoader.position`."""
        if self._pending is not None:
            return self._pending[0]
        under_way = self._iteration() is not None and not self._exhausted
        # Not before the first iteration: StatefulDataLoader would start one, which draws. Not after a break: its state
        # is then in the middle, but the next iteration starts at the beginning.
        state = _without_tensors(self.loader.state_dict()) if under_way or self._exhausted else None
        return {
            "kind": _KIND,
            "under_way": under_way,
            "state": state,
            "start": self._start if under_way else None,
            "generators": self._moments.generators(),
            "values": self._moments.kept_values(under_way=under_way),
        }

    def restore(self, position: Tree, rng: Any) -> None:
        """See `InstrumentedLoader.restore`."""
        check_kind(position, _KIND, self.name)
        if "generators" not in position:
            raise StateError(
                f"the position of {self.name} was recorded by an older version of the harness, which left out random "
                "states: resume this run with that version, or start a new run"
            )
        self._pending = None
        if position["under_way"]:
            self._pending = position, rng
            return
        if position["state"] is not None:
            now = self._capture_rng()
            self.loader.load_state_dict(_with_tensors(position["state"]))
            self.loader.state_dict()  # makes StatefulDataLoader start, and draw, now and not in the next iteration
            self._restore_rng(now)
            self._exhausted = True
        self._moments.set_generators(position["generators"])
        self._moments.values.set(position.get("values", {}))

    def generators(self) -> dict[str, Any]:
        """See `InstrumentedLoader.generators`."""
        return self._moments.found()

    def changed_outside(self) -> str | None:
        """See `InstrumentedLoader.changed_outside`."""
        return self._moments.values.changed_outside()

    def hook_iter(self, on_iter: OnIter) -> None:
        """See `InstrumentedLoader.hook_iter`."""
        self._on_iter = weakly(on_iter)
        if not is_hooked(self.loader):
            hook(self.loader, self)

    def on_iter(self) -> Iterator[Any] | None:
        """See `Hookable.on_iter`."""
        return call(self._on_iter, self)

    def _hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._exhausted = True


def _is_stateful_data_loader(loader: Any) -> bool:
    module = sys.modules.get("torchdata.stateful_dataloader")  # without the import there is none
    return module is not None and issubclass(type(loader), module.StatefulDataLoader)


def _complete(loader: Any, moments: Moments) -> None:
    """Have the state of a StatefulDataLoader include its workers' random states, and that of each sampler."""
    if hasattr(loader, _COMPLETED):
        return
    kind: Any = type(loader)
    workers = Workers(remembering)

    class Completed(kind):  # type: ignore[misc]
        @property
        def _index_sampler(self) -> Any:
            sampler = super()._index_sampler
            return sampler if isinstance(self.dataset, IterableDataset) else replayable(sampler, moments)

        def _get_iterator(self) -> Any:
            return workers.start(self, super()._get_iterator)

    switch(loader, Completed)
    setattr(loader, _COMPLETED, True)


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {_TENSOR: (str(value.dtype).removeprefix("torch."), tuple(value.shape), bytes(flat.tolist()))}
    if type(value) is dict:
        return {key: _without_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(part) for part in value)
    return value


def _with_tensors(value: Any) -> Any:
    if type(value) is dict:
        if value.keys() == {_TENSOR}:
            dtype, shape, data = value[_TENSOR]
            flat = torch.tensor(list(data), dtype=torch.uint8).view(getattr(torch, dtype))
            return flat.reshape(shape)
        return {key: _with_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(part) for part in value)
    return value
