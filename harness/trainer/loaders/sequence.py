"""Sequence: resumes a list, tuple or range of batches, whose position is an index.

Owns only that index; reads no batch that is skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.errors import StateError
from harness.trainer.loaders.hook import OnIter, Tree, check_kind

_KIND = "sequence"


class SequenceLoader:
    """A list, tuple or range of batches: the position is an index."""

    repeats = True

    def __init__(
        self,
        batches: Sequence[Any],
        name: str,
        capture_moment: Callable[[], Any],
        restore_rng: Callable[[Any], None],
    ) -> None:
        self.name = name
        self.loader = batches
        self._capture_moment = capture_moment
        self._restore_rng = restore_rng
        self._repeating = False
        self._pending: tuple[Tree, Any] | None = None
        self._iteration: Callable[[], Iterator[Any] | None] = lambda: None
        self._handed = 0

    def iterate(self, again: Any = None) -> Iterator[Any]:
        """See `InstrumentedLoader.iterate`."""
        self._handed = 0
        self._repeating = again is not None
        if self._pending is not None:
            position, rng = self._pending
            self._handed = position["handed"]
            if self._handed > len(self.loader):
                raise StateError(
                    f"{self.name} had given {self._handed} batches when the snapshot was taken, and has"
                    f" {len(self.loader)} now: resume with the old ones, or start a new run"
                )
            self._restore_rng(again["rng"] if again else rng)
            self._handed -= self._repeating
            self._pending = None
        iteration = self._hand_out()
        self._iteration = weakref.ref(iteration)
        return iteration

    def moment(self) -> Tree:
        """See `InstrumentedLoader.moment`."""
        return {"rng": self._capture_moment()}

    def position(self) -> Tree:
        """See `InstrumentedLoader.position`."""
        if self._pending is not None:
            return self._pending[0]
        return {"kind": _KIND, "handed": None if self._iteration() is None else self._handed}

    def restore(self, position: Tree, rng: Any) -> None:
        """See `InstrumentedLoader.restore`."""
        check_kind(position, _KIND, self.name)
        if self._repeating:
            self._repeating = False
            return
        self._pending = None if position["handed"] is None else (position, rng)

    def generators(self) -> dict[str, Any]:
        """See `InstrumentedLoader.generators`."""
        return {}

    def changed_outside(self) -> str | None:
        """See `InstrumentedLoader.changed_outside`."""
        return None

    def hook_iter(self, on_iter: OnIter) -> None:
        """See `InstrumentedLoader.hook_iter`."""
        raise StateError(
            f"{self.name} is a sequence, whose iteration cannot be followed: use ckpt.batches({self.name})"
        )

    def _hand_out(self) -> Iterator[Any]:
        for index in range(self._handed, len(self.loader)):  # not by iter(), which would read the skipped batches
            self._handed += 1
            yield self.loader[index]
