"""Batches: what `ckpt.batches(loader)` and `ckpt.enumerate(loader)` return.

Owns that they have the loader's length, for progress bars, and that each `iter` begins a loop. Knows no Checkpointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Batches:
    """An iterable over a loader's batches. Each `iter` begins a loop of the Checkpointer."""

    def __init__(self, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        """Begin nothing yet.

        Args:
            loader: whose length this has.
            begin: begins a loop.
        """
        self._loader, self._begin = loader, begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def __len__(self) -> int:
        """Return the loader's length: of a whole epoch, also in an epoch that is resumed in the middle."""
        return len(self._loader)
