"""What an instrumented loader promises, and how a plain `for batch in loader` is led through one.

Owns the interface that every kind of loader keeps, and the switch of a loader's class; knows no kind of loader.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from harness.errors import StateError

Tree: TypeAlias = dict[str, Any]
"""Plain values that the tagged encoding of small state knows: numbers, str, bytes, None, tuples, lists, dicts."""

OnIter: TypeAlias = "Callable[[InstrumentedLoader], Iterator[Any]]"

_HOOK = "_harness_hook"


class InstrumentedLoader(Protocol):
    """A loader whose iteration can be resumed exactly. Made by `instrument`; one thread.

    Attributes:
        name: how the loader is called in errors, and what its position is filed under.
    """

    name: str

    def iterate(self) -> Iterator[Any]:
        """Start an iteration; after `restore`, go on with the one that was under way at the snapshot.

        An iteration is under way until it is exhausted or its iterator is let go: do not hold on to it after the loop.
        When it goes on, the global RNG is left at the snapshot's state: fetch next, draw nothing in between.

        Raises:
            StateError: the order of batches is not what it was, or the sampler cannot be replayed.
        """
        ...

    def position(self) -> Tree:
        """Where the loader stands, between two batches. Draws no random number, reads no data.

        The batch that was handed out last counts as used.

        Raises:
            StateError: two iterations of the one loader are under way.
        """
        ...

    def restore(self, position: Tree, rng: Any) -> None:
        """Go back to `position`. Leaves the global RNG as it is; generators held by the loader are set.

        If an iteration was under way, the next `iterate` goes on with it (and not before: `set_epoch` comes first).

        Args:
            position: what `position` returned when the snapshot was taken.
            rng: what `capture_rng` returned when the snapshot was taken.

        Raises:
            StateError: the position is of another kind of loader.
        """
        ...

    def hook_iter(self, on_iter: OnIter) -> None:
        """Have a plain `for batch in loader` go through `on_iter(self)`, which returns the iterator.

        A bound method is held weakly. Without instruments, or its object, the loader iterates as it always did.

        Raises:
            StateError: the loader's `iter` cannot be hooked.
        """
        ...


class Hookable(Protocol):
    """Made for one loader, which asks it at every `iter` whether that is its affair."""

    def on_iter(self) -> Iterator[Any] | None:
        """The iterator to hand out; `None` for the loader's own."""
        ...


def hook(loader: Any, instrumented: Hookable) -> None:
    """Switch the class of `loader` to a subclass, so that a plain `for batch in loader` can be redirected.

    A subclass of the one class alone: with a mixin before it, Python sees another layout and refuses the switch. It
    knows `instrumented` weakly, for the reason that `dataloader.py` gives; without it the loader is its old self.
    """
    owner = weakref.ref(instrumented)
    kind: Any = type(loader)

    class Hooked(kind):  # type: ignore[misc]
        def __iter__(self) -> Any:
            instrumented = owner()
            batches = instrumented.on_iter() if instrumented is not None else None
            return super().__iter__() if batches is None else batches

    switch(loader, Hooked)
    setattr(loader, _HOOK, (owner, kind))


def is_hooked(loader: Any) -> bool:
    """Whether `hook` was called for it."""
    return hasattr(loader, _HOOK)


def switch(loader: Any, subclass: Any) -> None:
    """Make `loader` an instance of a subclass of its class, which goes by the same name."""
    kind = type(loader)
    subclass.__module__, subclass.__name__, subclass.__qualname__ = kind.__module__, kind.__name__, kind.__qualname__
    loader.__class__ = subclass


def instruments_of(loader: Any) -> InstrumentedLoader | None:
    """What was made for `loader` before. If that is gone, the loader gets back the class that its maker gave it."""
    if not hasattr(loader, _HOOK):
        return None
    owner, kind = getattr(loader, _HOOK)
    instrumented: InstrumentedLoader | None = owner()
    if instrumented is None:
        delattr(loader, _HOOK)
        loader.__class__ = kind
    return instrumented


def weakly(on_iter: OnIter) -> Callable[[], OnIter | None]:
    """A method's object usually owns the loader's instruments: no ring."""
    return weakref.WeakMethod(on_iter) if isinstance(on_iter, types.MethodType) else lambda: on_iter


def call(on_iter: Callable[[], OnIter | None], instrumented: InstrumentedLoader) -> Iterator[Any] | None:
    """What the function that `weakly` gave returns; `None` if it is gone."""
    function = on_iter()
    return None if function is None else function(instrumented)


def check_kind(position: Tree, kind: str, name: str) -> None:
    """Raises StateError: the position is of another kind of loader."""
    if position["kind"] != kind:
        raise StateError(
            f"{name} was another kind of loader when the snapshot was taken ({position['kind']}; {kind} now):"
            " resume with the old one, or start a new run"
        )
