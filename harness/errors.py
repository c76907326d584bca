"""Every exception that a user can meet, and the exit code it becomes.

    HarnessError
    ├── ConfigError        64  a mistake in usage or configuration
    │   └── RunFinished    64  the run is over: it has finished, or its own program has stopped it early
    ├── StateError         70  this object cannot be captured or restored, and the remedy
    ├── SnapshotCorrupt    70  bytes are not what was committed
    ├── NoSpace            70  not enough disk or memory, with the numbers
    ├── Superseded         73  a newer generation of this run took over
    ├── DeadlineExceeded   74  the instance's time ran out
    └── AgentGone          70  the agent died and no other could be started

`cloud.errors` has its own tree; `harness.agent` converts its errors into these where a user would see them.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of `harness run`, for a shell, a unit file or a fleet; any other is the trainer's own, passed on."""

    FINISHED = 0
    USAGE = 64
    BUG = 70
    SUPERSEDED = 73
    INTERRUPTED_LOCAL = 74
    INTERRUPTED = 75
    CTRL_C = 130


class HarnessError(Exception):
    """Base of every error that the harness raises on purpose."""

    exit_code: ExitCode = ExitCode.BUG


class ConfigError(HarnessError):
    """A mistake in usage or configuration: nothing was started, nothing was changed."""

    exit_code = ExitCode.USAGE


class RunFinished(ConfigError):
    """The run is over: it has finished, or its own program has stopped it early. A sweep goes on with its next run."""


class StateError(HarnessError):
    """This object cannot be captured or restored exactly. Names the path in the tree, and the remedy."""


class SnapshotCorrupt(HarnessError):
    """A snapshot's bytes are not what was committed, or its manifest cannot be trusted."""


class NoSpace(HarnessError):
    """Not enough disk or memory. Names what is needed, what is available, where, and what to do."""


class Superseded(HarnessError):
    """A newer generation of this run took over: do not restart."""

    exit_code = ExitCode.SUPERSEDED


class DeadlineExceeded(HarnessError):
    """The instance's time ran out before the work was done."""

    exit_code = ExitCode.INTERRUPTED_LOCAL


class AgentGone(HarnessError):
    """The agent died and no other could be started: training may continue, but nothing is being saved."""
