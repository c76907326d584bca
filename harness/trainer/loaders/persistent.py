"""Persistent: loaders with persistent workers that the Checkpointer does not instrument, such as a validation's.

Owns when such a loader may draw. torch draws the seed of persistent workers when they are started, at the loader's
first iteration, and never again. A program that resumes starts them again, at a time when the unbroken run draws
nothing. So it is remembered which of these loaders were started, and after a resume their start leaves the random
states as they were. A loader that is made after the resume is new in the unbroken run too, and draws.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from harness.trainer.loaders.generators import generators_in, roots_of
from harness.trainer.loaders.hook import is_hooked


class PersistentLoaders:
    """The loaders whose persistent workers were started, by a name that is the same in every start of the program."""

    def __init__(self, capture_rng: Callable[[], Any], restore_rng: Callable[[Any], None]) -> None:
        """Follow no loader yet.

        Args:
            capture_rng: returns the state of every global RNG. Draws nothing.
            restore_rng: takes such a state.
        """
        self._capture_rng, self._restore_rng = capture_rng, restore_rng
        self._before: frozenset[str] = frozenset()
        self._known = Present()
        self._names: weakref.WeakKeyDictionary[DataLoader[Any], str] = weakref.WeakKeyDictionary()
        self._kinds: Counter[str] = Counter()

    def follow(self) -> None:
        """Follow every DataLoader that starts workers from now on, until `leave`, or until another one follows them."""
        _follower[:] = [weakref.ref(self)]
        if DataLoader._get_iterator is not _start_and_note:
            _start[:] = [DataLoader._get_iterator]
            _replace_start(_start_and_note)

    def leave(self) -> None:
        """Follow no loader any more."""
        if _follower and _follower[0]() is self:
            _follower.clear()
            if DataLoader._get_iterator is _start_and_note:  # unless it was replaced once more
                _replace_start(_start[0])

    def started(self) -> list[str]:
        """Return the names of the loaders whose workers run, or ran at the snapshot and were not started again yet."""
        return sorted(self._before | set(self._names.values()))

    def restore(self, started: Iterable[str]) -> None:
        """Go back to a snapshot at which the loaders with these names were started."""
        self._before = frozenset(started)
        if self._before:
            self._known.look()

    def start(self, loader: DataLoader[Any], start: Callable[[DataLoader[Any]], Any]) -> Any:
        """Start the workers of a loader by `start`; after a resume, leave the random states as they were."""
        name = self._name_of(loader)
        if loader not in self._known or name not in self._before:
            return start(loader)
        rng = self._capture_rng()
        try:
            return start(loader)
        finally:
            self._restore_rng(rng)

    def _name_of(self, loader: DataLoader[Any]) -> str:
        """Return a name from what the loader reads; equal ones are numbered in the order of their start."""
        if loader not in self._names:
            kind = form_of(loader).parts
            self._kinds[kind] += 1
            self._names[loader] = f"{kind} {self._kinds[kind]}"
        return self._names[loader]


class Form(NamedTuple):
    """What a loader looks like, the same in every start of the program.

    Attributes:
        parts: what it reads, how much of it, and in which pieces.
        seed: the seed that torch's generator in it got last; `None` if there is none in it.
    """

    parts: str
    seed: int | None


def form_of(loader: Any) -> Form:
    """Return what a loader looks like; of one that is no DataLoader, its type alone."""
    if not issubclass(type(loader), DataLoader):
        return Form(type(loader).__qualname__, None)
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else "endless"
    held = generators_in(roots_of(loader)).values()
    seed = next((each.initial_seed() for each in held if isinstance(each, torch.Generator)), None)
    return Form(f"{type(loader.dataset).__qualname__} {size}/{loader.batch_size}", seed)


class Present:
    """The DataLoaders that the process has at a moment. A look takes some 25 ms for each 100 000 objects.

    What a program has frozen (`gc.freeze`) is hidden from the look. So a loader that is still hidden when it is asked
    for was there as well.
    """

    def __init__(self) -> None:
        """There is none before the first look."""
        self._found: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._some_hidden = False

    def look(self) -> None:
        """Take the present moment."""
        # issubclass: isinstance would ask proxies for their class, which some compute.
        self._found.update(each for each in gc.get_objects() if issubclass(type(each), DataLoader))
        self._some_hidden = gc.get_freeze_count() > 0

    def __contains__(self, loader: DataLoader[Any]) -> bool:
        """Whether a loader was there at that moment."""
        return loader in self._found or (self._some_hidden and not any(each is loader for each in gc.get_objects()))


_follower: list[weakref.ref[PersistentLoaders]] = []
"""The one that follows the loaders of this process."""
_start: list[Callable[[DataLoader[Any]], Any]] = []
"""torch's own method."""


def _start_and_note(loader: DataLoader[Any]) -> Any:
    follower = _follower[0]() if _follower else None
    if follower is None or not loader.persistent_workers or loader.num_workers == 0 or is_hooked(loader):
        return _start[0](loader)
    return follower.start(loader, _start[0])


def _replace_start(start: Any) -> None:
    DataLoader._get_iterator = start  # type: ignore[method-assign]
