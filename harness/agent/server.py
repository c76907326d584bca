"""The one agent of a run on a host: the lock that ensures that, the socket where it listens, and its connections.

Owns the run's lock, the listening socket and every connection, and the handover from one agent of this host to the
next. Does not know the purpose of a connection: it passes messages on. Main thread of the agent.

    locked by another ──Takeover──▶ Busy: its trainer lives, nothing is started here
                                └─▶ HandedOver: its slots are ours, and so is the lock as soon as it has ended
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from harness.agent.context import CalledOff, Context
from harness.agent.generation import Generation
from harness.agent.outcome import write_outcome
from harness.agent.save.pipeline import SavePipeline
from harness.core import events
from harness.core.messages import Busy, HandedOver, Takeover
from harness.core.policy.end import Outcome
from harness.errors import ConfigError
from harness.ipc.channel import MAX_FDS, Channel, ChannelClosed, Received, connect, listen, peer_uid
from harness.ipc.runtime_dir import RuntimeDir
from harness.ipc.slots import Slot

_TAKE_OVER_S = 30.0  # an agent that is ending has released the lock by then
_ANSWER_S = 2.0
_LOOK_S = 0.05
_HALF_A_MESSAGE_S = 2.0  # for the rest of a message that has begun


class Server:
    """Lock, socket and connections of one agent. Closed until `open`."""

    def __init__(
        self, context: Context, pipeline: SavePipeline, on_message: Callable[[Channel, Received], None]
    ) -> None:
        """Prepare; no file or socket is opened yet.

        Args:
            context: of the agent.
            pipeline: which takes over, and hands over, slots.
            on_message: called with each message that comes. Raises ChannelClosed where an answer cannot be sent.
        """
        settings = context.settings
        self._run, self._loop, self._emit, self._say = settings.run, context.loop, context.emit, context.say
        self._pipeline, self._on_message = pipeline, on_message
        self._runtime_dir = RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)
        self._lock_fd: int | None = None
        self._listener: socket.socket | None = None
        self._clients: set[Channel] = set()
        self._taken_over = 0  # slots

    @property
    def address(self) -> Path:
        """Path of the socket that trainers connect to."""
        return self._runtime_dir.socket

    def open(self, is_called_off: Callable[[], bool]) -> str:
        """Become this host's agent of the run, and listen. Return the name of the lock that it holds from now on.

        Raises:
            ConfigError: another agent has the run, and keeps it; or no agent can listen here.
            CalledOff: `is_called_off` was true while another agent had the run. Posts are run meanwhile.
        """
        try:
            self._runtime_dir.prepare()
            self._lock_fd = lock = self._take_lock(is_called_off)
            identity = self._runtime_dir.identity(lock)
            self._listener = listen(self._runtime_dir.socket)
        except OSError as err:
            raise ConfigError(
                f"no agent can listen in {self._runtime_dir.directory}: {err}; "
                "HARNESS_RUNTIME_DIR names another directory"
            ) from err
        self._loop.watch(self._listener.fileno(), self._on_connection)
        return identity

    def leave_word(self, outcome: Outcome) -> None:
        """Write the outcome to a file for the process that started this agent.

        The exit code alone does not tell it, since it may be the program's own; and the store may be out of reach.
        """
        with contextlib.suppress(OSError):  # then there is only the exit code
            write_outcome(self._runtime_dir, os.getpid(), outcome)

    def has(self, channel: Channel) -> bool:
        """Return whether a channel is still connected."""
        return channel in self._clients

    def hang_up(self, channel: Channel) -> None:
        """Close a connection. Idempotent."""
        if channel in self._clients:
            self._clients.discard(channel)
            self._loop.forget(channel.fileno())
            channel.close()

    def close(self) -> None:
        """Close all connections, and release the lock for the next agent: the last thing that an agent does."""
        for channel in self._clients:
            channel.close()
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                self._runtime_dir.socket.unlink()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    # ---- connections ------------------------------------------------------------------------------------------------

    def _on_connection(self) -> None:
        assert self._listener is not None, "registered with the loop"
        sock, _address = self._listener.accept()
        channel = Channel(sock)
        if peer_uid(channel) in (os.geteuid(), 0):
            self._clients.add(channel)
            self._loop.watch(sock.fileno(), lambda: self._on_readable(channel))
        else:
            channel.close()

    def _on_readable(self, channel: Channel) -> None:
        channel.socket.settimeout(_HALF_A_MESSAGE_S)
        try:
            message = channel.receive()
        except (ChannelClosed, TimeoutError):  # a sender that was stopped in the middle of a message must not stop us
            return self.hang_up(channel)
        channel.socket.settimeout(None)
        try:
            self._on_message(channel, message)
        except ChannelClosed:
            self.hang_up(channel)
        return None

    # ---- from one agent to the next ---------------------------------------------------------------------------------

    def _take_lock(self, is_called_off: Callable[[], bool]) -> int:
        """Return the run's lock. An agent that has it, and whose trainer is dead, hands its slots over."""
        give_up_at, told = time.monotonic() + _TAKE_OVER_S, False
        while (lock := self._runtime_dir.try_lock()) is None:
            try:
                if (other := connect(self._runtime_dir.socket, _ANSWER_S)) is not None:
                    with contextlib.closing(other), contextlib.suppress(ChannelClosed):
                        other.send(Takeover())
                        while self._on_takeover_answer(other.receive()):
                            pass
            except TimeoutError:  # it is ending, or frozen
                if not told:
                    told = True
                    self._say(
                        f"another agent of this run on this host does not answer{self._runtime_dir.holder()}: "
                        f"waiting up to {_TAKE_OVER_S:g} s for it to end"
                    )
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"another agent of run {self._run!r} on this host neither answers nor ends"
                    f"{self._runtime_dir.holder()}. Resume it (kill -CONT) or end it (kill -KILL), then start again"
                )
            self._loop.wait(_LOOK_S)
            self._loop.run_posts()
            if is_called_off():
                raise CalledOff
        return lock

    def _on_takeover_answer(self, answer: Received) -> bool:
        """Take the slots that come with an answer. Return whether more of them follow. Raises ConfigError."""
        match answer.message:
            case Busy(trainer_pid):
                raise ConfigError(
                    f"run {self._run!r} is being trained on this host already, by process {trainer_pid}: "
                    "stop that one, or choose another --run"
                )
            case HandedOver(indexes, generations, more):
                for fd, index, info in zip(answer.fds, indexes, generations, strict=True):
                    self._pipeline.adopt(index, Slot(fd), Generation.of(info), ends=True)
                self._taken_over += len(answer.fds)
                if not more:
                    self._pipeline.note_all_taken()
                    if self._taken_over:
                        self._emit(events.AgentReplaced(slots=self._taken_over))
                return more
        return False

    def refuse_takeover(self, channel: Channel, trainer_pid: int) -> None:
        """Tell an agent that wants the run that our trainer is alive. Raises ChannelClosed."""
        channel.send(Busy(trainer_pid))

    def hand_over(self, channel: Channel) -> None:
        """Send our slots to an agent that wants the run. Raises ChannelClosed."""
        sealed = self._pipeline.handed_over()
        for begin in range(0, max(len(sealed), 1), MAX_FDS):
            part = sealed[begin : begin + MAX_FDS]
            indexes, generations = tuple(index for index, _ in part), tuple(made.info for _, made in part)
            fds = [self._pipeline.pool[index].fd for index in indexes]
            channel.send(HandedOver(indexes, generations, more=begin + MAX_FDS < len(sealed)), fds)
