"""Hook: the interface of an instrumented loader, and the redirection of a plain `for batch in loader` to it.

Owns the interface that every kind of loader implements, and the switch of a loader's class; knows no kind of loader.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

from harness.errors import StateError

Tree: TypeAlias = dict[str, Any]
"""Plain values that the tagged encoding of small state knows: numbers, str, bytes, None, tuples, lists, dicts."""

OnIter: TypeAlias = "Callable[[InstrumentedLoader], Iterator[Any] | None]"

_HOOK = "_harness_hook"
_set_class = object.__dict__["__class__"].__set__
"""Sets the class of an object, also of one that shows another class than it has, as Accelerate's loaders do."""
UNWRAP = (
    "use the DataLoader that is inside of it, or one that was not prepared by a framework, here and in the loop, and "
    "move its batches to the device in the loop"
)
"""The remedy for a loader that wraps another one."""


class InstrumentedLoader(Protocol):
    """A loader whose iteration can be resumed exactly. Made by `instrument`; one thread.

    Attributes:
        name: the name of the loop that brought the loader first: its name in errors, and part of its workers' seeds.
        loader: the program's own loader.
    """

    name: str
    loader: Any
    repeats: bool
    """Whether the batch that was handed out last can be handed out again: see `iterate`."""

    def iterate(self, again: Any = None) -> Iterator[Any]:
        """Start an iteration; after `restore`, continue the one that was under way at the snapshot.

        An iteration is under way until it is exhausted or its iterator is deleted: do not keep the iterator after the
        loop. When an iteration continues, this leaves the global RNG at the snapshot's state: fetch the next batch, and
        draw nothing before that.

        Args:
            again: the result of `moment` before the snapshot's last batch was fetched; empty if fetching it draws
                nothing. Continue with that batch, and not with the one after it; only if `repeats`. The next `restore`
                then only sets the generators.

        Raises:
            StateError: the order of batches has changed, or the sampler cannot be replayed.
        """
        ...

    def moment(self) -> Tree:
        """Return all random states from which the next batch may draw. Draws nothing itself."""
        ...

    def position(self) -> Tree:
        """Return the loader's position, between two batches. Draws no random number, reads no data.

        The batch that was handed out last counts as used.

        Raises:
            StateError: two iterations of this loader are under way.
        """
        ...

    def restore(self, position: Tree, rng: Any) -> None:
        """Go back to `position`. Does not change the global RNG; sets the generators that the loader holds.

        If an iteration was under way, the next `iterate` continues it (and not before: `set_epoch` comes first). If the
        program has started one before this, at the same place as in its first life, that one continues.

        Args:
            position: the result of `position` when the snapshot was taken.
            rng: the result of `capture_rng` when the snapshot was taken.

        Raises:
            StateError: the position is of another kind of loader.
        """
        ...

    def generators(self) -> dict[str, Any]:
        """Return the generators that the loader holds, by their paths in its position."""
        ...

    def changed_outside(self) -> str | None:
        """Return the path of something in its sampler that the program has changed since the last iteration.

        Only of what cannot be restored; `None` if there is nothing.
        """
        ...

    def hook_iter(self, on_iter: OnIter) -> None:
        """Have a plain `for batch in loader` call `on_iter(self)`, which returns the iterator; `None` for its own.

        A bound method is held weakly. Once its object, or this one, is gone, the loader iterates as before.

        Raises:
            StateError: the loader's `iter` cannot be hooked.
        """
        ...


class Hookable(Protocol):
    """An object that a hooked loader asks at every `iter` for an iterator."""

    def on_iter(self) -> Iterator[Any] | None:
        """Return the iterator to hand out; `None` for the loader's own."""
        ...


def hook(loader: Any, instrumented: Hookable) -> None:
    """Switch the class of `loader` to a subclass, so that a plain `for batch in loader` can be redirected.

    The subclass has only the loader's class as its base: with a mixin before it, Python sees another layout and refuses
    the switch. It holds `instrumented` weakly, for the reason given at `_Order` in `dataloader.py`; once that is gone,
    the loader iterates as before.
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
    """Whether `hook` was called for `loader`."""
    return _HOOK in _attributes(loader)


def _attributes(loader: Any) -> dict[str, Any]:
    """Return what the loader itself has: one that wraps another may show the other one's as its own."""
    found: dict[str, Any] = getattr(loader, "__dict__", {})
    return found


def switch(loader: Any, subclass: Any) -> None:
    """Make `loader` an instance of a subclass of its class. The subclass gets the same name."""
    kind = type(loader)
    subclass.__module__, subclass.__name__, subclass.__qualname__ = kind.__module__, kind.__name__, kind.__qualname__
    try:
        _set_class(loader, subclass)
    except (AttributeError, TypeError) as err:
        raise StateError(f"a {kind.__module__}.{kind.__qualname__} cannot be followed ({err}): {UNWRAP}") from err


def instruments_of(loader: Any) -> InstrumentedLoader | None:
    """Return the instruments that were made for `loader` before. If they are gone, restore the loader's own class."""
    if not is_hooked(loader):
        return None
    owner, kind = _attributes(loader)[_HOOK]
    instrumented: InstrumentedLoader | None = owner()
    if instrumented is None:
        delattr(loader, _HOOK)
        _set_class(loader, kind)
    return instrumented


def is_held_elsewhere(instrumented: InstrumentedLoader, *, collects: bool = False) -> bool:
    """Whether anything but its instruments holds a loader. They let go of it for a moment, and of a dead one for good.

    One that cannot be referred to weakly, as a list, counts as not held.

    Args:
        instrumented: the instruments.
        collects: collect garbage meanwhile: what is left in a cycle holds nothing.
    """
    try:
        loader = weakref.ref(instrumented.loader)
    except TypeError:
        return False
    instrumented.loader = None
    if collects:
        gc.collect()
    instrumented.loader = loader()
    return instrumented.loader is not None


def weakly(on_iter: OnIter) -> Callable[[], OnIter | None]:
    """Return a reference to `on_iter`; weak for a bound method, whose object usually owns the loader's instruments."""
    return weakref.WeakMethod(on_iter) if isinstance(on_iter, types.MethodType) else lambda: on_iter


def call(on_iter: Callable[[], OnIter | None], instrumented: InstrumentedLoader) -> Iterator[Any] | None:
    """Call the function to which `weakly` refers, and return its result; `None` if it is gone."""
    function = on_iter()
    return None if function is None else function(instrumented)


def check_kind(position: Tree, kind: str, name: str) -> None:
    """Raise StateError if the position is of another kind of loader."""
    if position["kind"] != kind:
        raise StateError(
            f"{name} was another kind of loader when the snapshot was taken ({position['kind']}; {kind} now):"
            " resume with the old one, or start a new run"
        )
