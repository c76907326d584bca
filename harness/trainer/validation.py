"""Validation: the validations of a training, which begin with a snapshot if they may take long.

Owns how long the last one took. `loops.py` and `driven.py` know where they begin.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from harness.trainer.training import Training

LONG_S = 10.0
"""A validation that takes this long begins with a snapshot: it may outlast what is left after a notice."""


class Validations:
    """The validations of one training. Used from the thread that trains."""

    def __init__(self, training: Training) -> None:
        """Begin outside of any. `training` is the one whose validations these are."""
        self._training = training
        self._depth = 0
        self._took_s: float | None = None

    @property
    def inside(self) -> bool:
        """Whether the program is inside one."""
        return self._depth > 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Context manager around one. What it draws before the first loop is drawn again after a resume."""
        training = self._training
        self._depth += 1
        if training.witness is not None and not training.replaying:
            training.witness.inside(training.boundary.step)
        began_at = time.monotonic()
        try:
            with training.hazards.exempt():
                yield
        finally:
            self._depth -= 1
            self._took_s = time.monotonic() - began_at

    def begins_with_one(self, *, unless_known: bool) -> bool:
        """Request a snapshot if the validation that begins may take long, and none is requested. Return whether.

        Args:
            unless_known: whether the first one counts as one that may take long.
        """
        takes_long = unless_known if self._took_s is None else self._took_s >= LONG_S
        boundary = self._training.boundary
        begins = takes_long and self._training.has_unsealed_steps and not boundary.overdue
        boundary.overdue |= begins
        return begins
