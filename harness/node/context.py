"""What all parts of one `harness resume` share: the run's name, signals to us, words to the user, the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cloud.notice import Clock
from harness.node.signals import Signals


@dataclass(frozen=True)
class Context:
    """Of one `harness resume`.

    Attributes:
        run: the run's name; empty if it is not known.
        signals: to us; one that asks us to leave cuts every wait short.
        say: a word to the user.
        clock: monotonic seconds.
    """

    run: str
    signals: Signals
    say: Callable[[str], None]
    clock: Clock = time.monotonic
