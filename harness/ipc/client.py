"""Requests of other processes on this host to a run's agent: for its status, and for a drill.

Owns the requests and their timeouts; knows nothing of how an agent answers them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from harness.config.settings import Settings
from harness.core.events import Drilled
from harness.core.messages import AskDrill, AskStatus, DrillDone, Drilling, NoDrill, Status
from harness.errors import ConfigError
from harness.ipc.channel import Channel, ChannelClosed, connect
from harness.ipc.runtime_dir import RuntimeDir

ANSWER_S = 5.0  # an agent may be busy for a moment


class AgentSilent(ConfigError):
    """An agent of the run listens on this host, but does not answer: it is frozen, or the host is overloaded."""


def ask_status(settings: Settings) -> Status | None:
    """Ask the run's agent here for its status; `None` if none listens. Blocks for seconds. Raises AgentSilent."""
    try:
        channel = _connect(settings, ANSWER_S)
        if channel is None:
            return None
        with contextlib.closing(channel), contextlib.suppress(ChannelClosed):
            channel.send(AskStatus())
            answer = channel.receive().message
            return answer if isinstance(answer, Status) else None
    except TimeoutError as err:
        raise AgentSilent(
            f"the agent of run {settings.run!r} on this host has not answered for {ANSWER_S:g} s"
            f"{_runtime_dir(settings).holder()}: is it stopped (kill -CONT), or frozen by its cgroup?"
        ) from err
    return None


def drill(settings: Settings, in_s: float, *, end: bool, on_plan: Callable[[str], None]) -> tuple[Drilled, str]:
    """Have the run's agent on this host rehearse an interruption notice, and wait for the result.

    Args:
        settings: of the run.
        in_s: seconds from the notice to the end of the instance.
        end: whether the run then really exits, with exit code 75.
        on_plan: called with the plan, in words, before the drill starts.

    Returns:
        The result, as an event and as text for people.

    Raises:
        ConfigError: no agent of this run listens here, or a drill is not possible now.
        AgentSilent: the agent listens, but does not answer.
    """
    if ask_status(settings) is None or (channel := _connect(settings, None)) is None:
        raise ConfigError(
            f"no agent of run {settings.run!r}, store {settings.store}, listens on this host: a drill needs a run "
            "that trains here, under the same user"
        )
    with contextlib.closing(channel):
        try:
            channel.send(AskDrill(in_s, end))
            while True:
                match channel.receive().message:
                    case Drilling(words):
                        on_plan(words)
                    case DrillDone(drilled, words):
                        return drilled, words
                    case NoDrill(why):
                        raise ConfigError(f"no drill: {why}")
        except ChannelClosed as err:
            raise ConfigError("the agent ended before the drill did: see its own output") from err


def _runtime_dir(settings: Settings) -> RuntimeDir:
    return RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)


def _connect(settings: Settings, timeout_s: float | None) -> Channel | None:
    """Connect to the run's agent on this host; `None` if there is none. Raises TimeoutError."""
    try:
        return connect(_runtime_dir(settings).socket, timeout_s)
    except TimeoutError:
        raise
    except OSError:
        return None  # no agent of this user can listen there
