"""What another process of this host asks a run's agent: what it is doing, and what a notice would come to.

Owns the questions and their limits; knows nothing of how an agent finds its answers.
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
    """An agent of the run listens on this host, and does not answer: frozen, or the host is overloaded."""


def ask_status(settings: Settings) -> Status | None:
    """The answer of this host's agent of the run; `None` if none listens. Blocks for seconds. Raises AgentSilent."""
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
    """Tell the run's agent on this host of a notice that is none, and wait for what it comes to.

    Args:
        settings: of the run.
        in_s: seconds from the notice to the end of the instance.
        end: whether the run then really leaves, with exit code 75.
        on_plan: called with the plan, in words, before it starts.

    Returns:
        What it came to, and the same for people.

    Raises:
        ConfigError: no agent of this run listens here, or it cannot be done now.
        AgentSilent: it is frozen.
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
    """The run's agent on this host; `None` if there is none. Raises TimeoutError."""
    try:
        return connect(_runtime_dir(settings).socket, timeout_s)
    except TimeoutError:
        raise
    except OSError:
        return None  # where nobody can listen, nobody does
