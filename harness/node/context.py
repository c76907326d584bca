"""The context that all parts of one `harness resume` share: run name, signals, messages to the user, clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cloud.notice import Clock
from harness.node.signals import Signals


@dataclass(frozen=True)
class Context:
    """The context of one `harness resume`.

    Attributes:
        run: the run's name; empty if it is not known.
        signals: to this process; one that asks us to exit cuts every wait short.
        say: shows a message to the user.
        clock: monotonic seconds.
    """

    run: str
    signals: Signals
    say: Callable[[str], None]
    clock: Clock = time.monotonic
