"""Opening: connects a training to its agent, and sees to it that a process has one training at a time.

Owns the process's training that was opened last. Knows neither loops nor states.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from harness.config.settings import SOCKET_VARIABLE, here, resolve
from harness.errors import ConfigError
from harness.requirements import FREE_THREADED, is_free_threaded
from harness.trainer.link import Link
from harness.trainer.process import script
from harness.trainer.ranks import find_rank
from harness.trainer.relied_on import check_torch
from harness.trainer.voice import say, warn


class Open(Protocol):
    """A training that can be closed."""

    def close(self) -> None:
        """Part from the agent. Raises StateError inside one of its loops."""
        ...


_newest: list[Open] = []
"""The training that this process opened last."""


def take_turn(newcomer: Open, *, anywhere: bool = False) -> None:
    """Close the previous training of this process, if there is one. `anywhere`: under `harness run` too.

    Raises:
        ConfigError: there is one, and `harness run` started this process: it runs one training.
        StateError: it is inside one of its loops.
    """
    before = _newest[0] if _newest else None
    if before is None or before is newcomer:
        return
    if os.environ.get(SOCKET_VARIABLE) and not anywhere:
        raise ConfigError(
            "`harness run` runs one training, and this program has a Checkpointer already: use that one for all loops, "
            "or start the program without `harness run` and name each training with Checkpointer(run=…)"
        )
    before.close()


def has_begun(training: Open) -> None:
    """Note the training as the process's own."""
    _newest[:] = [training]


def has_ended(training: Open) -> None:
    """Note that a training is closed."""
    if training in _newest:
        _newest.remove(training)


def open_link(options: Mapping[str, Any]) -> Link:
    """Connect to the agent of `harness run`, or start one with these options. Blocks until it answers.

    Raises:
        ConfigError: the run has no name, or is being trained already; or it is finished (RunFinished); or this torch is
            too new.
        AgentGone: no agent answers.
    """
    check_torch()
    if is_free_threaded():
        warn(FREE_THREADED)
    settings = None
    if not os.environ.get(SOCKET_VARIABLE):
        settings = resolve(options, os.environ, _began_in(), script=script())
    rank = find_rank(os.environ)
    link = Link(settings, [sys.executable, *sys.argv], os.environ, rank)
    if link.detached and rank.speaks:
        say(
            f"run {link.settings.run!r} in {link.settings.store}, without `harness run`: "
            "no restart in place, no early fetch, no exit-code mapping"
        )
    return link


def _began_in() -> Path:
    """Return the directory in which the program began. Hydra changes to a new one at each start, named by the time."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is not None and hydra.HydraConfig.initialized():
        return Path(hydra.HydraConfig.get().runtime.cwd)
    return here()
