"""Accelerate: resumes a loader that was prepared by Accelerate, which fetches one batch ahead of the training loop.

Owns what stands between such a loader and the DataLoader inside of it; `dataloader.py` replays that one. Accelerate is
not imported: a loader of its is recognized where it comes from.

    unbroken:   fetch 1 ─ fetch 2 ─ hand out 1 ─ step 1 ─ fetch 3 ─ hand out 2 ─ step 2 ─ snapshot
    resumed:    fetch 3 once more, as it was drawn ─ random states of the snapshot ─ fetch 4 ─ hand out 3

This file relies on the following behaviour of `DataLoaderShard` (accelerate 1.0 to 1.15, accelerate/data_loader.py):

- `iter` calls `base_dataloader.__iter__()`, and fetches the first batch and the second one before it hands out the
  first. Each later batch is fetched before the one ahead of it is handed out.
- `iteration` counts the iterations that came to their end, and `iter` calls `set_epoch(iteration)`.
- Its `__class__` is that of the loader inside of it, and cannot be assigned in the usual way.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from harness.errors import StateError
from harness.trainer.loaders.hook import (
    InstrumentedLoader,
    OnIter,
    Tree,
    call,
    check_kind,
    hook,
    is_hooked,
    weakly,
)

_KIND = "Accelerate"
_MODULE = "accelerate.data_loader"


class Instrument(Protocol):
    """Makes the loader inside resumable: see `instrument`."""

    def __call__(self, loader: Any, name: str) -> InstrumentedLoader:
        """Return the loader's instruments."""
        ...


def is_prepared(loader: Any) -> bool:
    """Whether a loader was prepared by Accelerate."""
    module = sys.modules.get(_MODULE)  # without the import there is none
    return module is not None and issubclass(type(loader), module.DataLoaderAdapter)


class AccelerateLoader:
    """A loader that Accelerate has prepared, made resumable. As exact as the loader inside of it."""

    repeats = False

    def __init__(self, loader: Any, name: str, instrument: Instrument, restore_rng: Callable[[Any], None]) -> None:
        """Instrument the loader inside.

        Args:
            loader: the prepared loader.
            name: see `InstrumentedLoader.name`.
            instrument: makes the loader inside resumable.
            restore_rng: sets the global random states.

        Raises:
            StateError: it hands out batches in a way that cannot be followed, or the loader inside cannot be resumed.
        """
        _check(loader, name)
        self.name = name
        self.loader, self._restore_rng = loader, restore_rng
        self._base = instrument(loader.base_dataloader, name)
        self._base.hook_iter(self._iterate_base)
        self._iter = type(loader).__iter__
        self._on_iter: Callable[[], OnIter | None] = lambda: None
        self._live: weakref.WeakSet[_Iteration] = weakref.WeakSet()
        self._beginning: _Inside | None = None
        self._pending: tuple[Tree, Any] | None = None

    def iterate(self, again: Any = None) -> Iterator[Any]:
        """See `InstrumentedLoader.iterate`."""
        pending, self._pending = self._pending, None
        iteration = _Iteration(self) if pending is None else self._continued(*pending)
        self._live.add(iteration)
        return iteration

    def moment(self) -> Tree:
        """See `InstrumentedLoader.moment`."""
        return {}  # the iteration cannot be repeated

    def position(self) -> Tree:
        """See `InstrumentedLoader.position`."""
        if self._pending is not None:
            return self._pending[0]
        live = [iteration for iteration in self._live if iteration.is_under_way]
        if len(live) > 1:
            raise StateError(
                f"{len(live)} iterations of {self.name} are under way at once: finish one before the next, delete"
                " iterators that are not needed, or make a second DataLoader"
            )
        return {
            "kind": _KIND,
            "iteration": self.loader.iteration,
            "under_way": bool(live),
            "over": bool(live) and live[0].inside.is_over,
            "ahead": live[0].inside.moment if live else None,
            "base": self._base.position(),
        }

    def restore(self, position: Tree, rng: Any) -> None:
        """See `InstrumentedLoader.restore`."""
        check_kind(position, _KIND, self.name)
        if any(iteration.is_under_way for iteration in self._live):
            raise StateError(
                f"{self.name} was iterated over before the snapshot was restored: draw nothing before that"
            )
        self._pending = None
        self._base.restore(position["base"], rng)
        if position["under_way"]:
            self._pending = position, rng
        else:
            self.loader.iteration = position["iteration"]

    def generators(self) -> dict[str, Any]:
        """See `InstrumentedLoader.generators`."""
        return self._base.generators()

    def changed_outside(self) -> str | None:
        """See `InstrumentedLoader.changed_outside`."""
        return self._base.changed_outside()

    def hook_iter(self, on_iter: OnIter) -> None:
        """See `InstrumentedLoader.hook_iter`."""
        self._on_iter = weakly(on_iter)
        if not is_hooked(self.loader):
            hook(self.loader, self)

    def on_iter(self) -> Iterator[Any] | None:
        """See `Hookable.on_iter`."""
        return call(self._on_iter, self)

    def begin(self, inside: _Inside) -> Iterator[Any]:
        """Begin an iteration of the prepared loader; return its iterator, whose first batch is to be fetched next."""
        self._beginning = inside
        batches: Iterator[Any] = self._iter(self.loader)
        return batches

    def end(self) -> None:
        """Do what the prepared loader does behind its last batch."""
        self.loader.iteration += 1

    def _continued(self, position: Tree, rng: Any) -> _Iteration:
        """Return the iteration that was under way at the snapshot; leave the global random states as they were then."""
        self.loader.set_epoch(position["iteration"])  # the loader inside is iterated before its owner says so
        if position["over"]:
            self._restore_rng(rng)
            return _Iteration(self, is_over=True)
        batches = self._base.iterate(position["ahead"])
        ahead = next(batches)
        self._base.restore(position["base"], rng)  # it is in place: only its generators are set
        self._restore_rng(rng)
        return _Iteration(self, batches=batches, ahead=ahead, moment=position["ahead"])

    def _iterate_base(self, base: InstrumentedLoader) -> Iterator[Any] | None:
        """Return what the loader inside hands out; `None`, for its own, if it is not asked by an iteration of ours."""
        beginning, self._beginning = self._beginning, None
        return None if beginning is None else beginning.fetch(base)


class _Inside:
    """The iteration of the loader inside. Refers to nothing that leads to `_Iteration`, whose end has to be seen."""

    def __init__(self, batches: Iterator[Any] | None, ahead: Any, moment: Any, *, is_over: bool) -> None:
        self._batches, self._ahead = batches, ahead
        self.is_continued = is_over or batches is not None
        """Whether it was under way at the snapshot."""
        self.moment = moment
        """The random states before the last batch was fetched, which is not handed out yet."""
        self.is_over = is_over
        """Whether no batch is left that is not handed out yet."""

    def fetch(self, base: InstrumentedLoader) -> Iterator[Any]:
        """Yield the batches to the prepared loader."""
        if self._batches is None:
            self._batches = base.iterate()
        else:
            ahead, self._ahead = self._ahead, None
            yield ahead
        while True:
            self.moment = base.moment()
            try:
                batch = next(self._batches)
            except StopIteration:
                self.is_over = True
                return
            yield batch


class _Iteration:
    """The iterator of the training loop, around the prepared loader's own, which fetches ahead."""

    def __init__(
        self,
        owner: AccelerateLoader,
        batches: Iterator[Any] | None = None,
        ahead: Any = None,
        moment: Any = None,
        *,
        is_over: bool = False,
    ) -> None:
        """Begin, or continue one that was under way.

        Args:
            owner: the loader.
            batches: of the loader inside, to continue with; `None` to begin.
            ahead: the batch that was fetched, and not handed out.
            moment: the random states before that.
            is_over: whether all batches were handed out, and the end was not reached.
        """
        self._owner = owner
        self.inside = _Inside(batches, ahead, moment, is_over=is_over)
        self._has_ended = False
        self._outer: Iterator[Any] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the prepared loader has begun it, and has not come to its end."""
        return not self._has_ended and (self._outer is not None or self.inside.is_continued)

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if self._outer is None and self.inside.is_over:
            self._has_ended = True
            self._owner.end()
            raise StopIteration
        if self._outer is None:
            self._outer = self._owner.begin(self.inside)
        try:
            return next(self._outer)
        except StopIteration:
            self._has_ended = True
            raise


def _check(loader: Any, name: str) -> None:
    module = sys.modules[_MODULE]
    if not issubclass(type(loader), module.DataLoaderShard):
        raise StateError(
            f"{name} is a {type(loader).__name__}, whose batches the first process reads for all: prepare it with "
            "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)); an IterableDataset needs "
            "a position of its own, such as torchdata's StatefulDataLoader, which is not to be prepared"
        )
    if loader.use_stateful_dataloader:
        raise StateError(
            f"{name} was prepared with use_stateful_dataloader: leave that out; the position of the plain DataLoader "
            "inside is kept without it"
        )
    if loader.skip_batches:
        raise StateError(
            f"{name} was made by skip_first_batches: give the loader itself; a resume continues in the middle of it"
        )
