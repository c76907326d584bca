"""The Unix socket between trainer and agent: messages, and the descriptors that come with them.

Owns framing, and the check of who is at the other end; `core.messages` defines the messages. A message is framed by its
length, with file descriptors beside it. Payload never travels here: it lies in slots. The connection does not show
whether the trainer lives: after its SIGKILL, forked DataLoader workers keep the socket open for seconds. `process.py`
watches the process instead.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core import messages
from harness.core.messages import AnyMessage

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_FDS = 16  # 254 in one message fail; a node has few slots
_LENGTH = struct.Struct("<I")


class ChannelClosed(ConnectionError):
    """The other side is gone."""


@dataclass(frozen=True)
class Received:
    """One message, and the descriptors that came with it: the receiver owns them."""

    message: AnyMessage
    fds: tuple[int, ...] = ()


class Channel:
    """One connection. `send` may be called from several threads; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected stream socket."""
        self.socket = sock
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors; -1 once closed."""
        return self.socket.fileno()

    def send(self, message: AnyMessage, fds: Sequence[int] = ()) -> None:
        """Send one message. Blocks while the other side's buffer is full.

        Raises:
            ChannelClosed: the other side is gone.
            TimeoutError: it did not read within the timeout given to `connect`; the channel is unusable from then on.
            ValueError: there are more than MAX_FDS descriptors, of which the other side would get so many.
        """
        if len(fds) > MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors with one {type(message).__name__}")
        data = messages.encode(message)
        frame = memoryview(_LENGTH.pack(len(data)) + data)
        with self._send_lock:
            try:
                sent = socket.send_fds(self.socket, [frame], list(fds)) if fds else self.socket.send(frame)
                while sent < len(frame):
                    sent += self.socket.send(frame[sent:])
            except TimeoutError:
                raise
            except OSError as err:
                raise ChannelClosed(f"cannot send {type(message).__name__}: {err}") from err

    def receive(self) -> Received:
        """Return the next message. Blocks until it is complete.

        Raises:
            ChannelClosed: the other side is gone, or it sent something that is not a message.
            TimeoutError: nothing came within the timeout given to `connect`; the channel is unusable from then on.
        """
        fds: tuple[int, ...] = ()
        try:
            head, fds = self._receive_head()
            (length,) = _LENGTH.unpack(head)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            return Received(messages.decode(self._receive_exactly(length)), fds)
        except (OSError, ValueError, RecursionError) as err:
            for fd in fds:
                os.close(fd)
            if isinstance(err, TimeoutError):
                raise
            raise ChannelClosed(f"cannot receive: {err}") from err

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.socket.close()

    def _receive_head(self) -> tuple[bytes, tuple[int, ...]]:
        # Descriptors ride on the first byte of a frame, so they arrive with its head.
        data, fds, _flags, _address = socket.recv_fds(self.socket, _LENGTH.size, MAX_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)  # recv_fds ignores its flags, so MSG_CMSG_CLOEXEC cannot be asked for
        if not data:
            raise ChannelClosed("closed by the other side")
        try:
            return data + self._receive_exactly(_LENGTH.size - len(data)), tuple(fds)
        except OSError:
            for fd in fds:
                os.close(fd)
            raise

    def _receive_exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, filled = memoryview(data), 0
        while filled < count:
            got = self.socket.recv_into(view[filled:])
            if not got:
                raise ChannelClosed("closed in the middle of a message")
            filled += got
        return bytes(data)


def listen(path: Path) -> socket.socket:
    """Listen at `path`. The caller holds the run's lock, so a socket found there is a dead agent's: replace it."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(path))
        sock.listen(16)
    except OSError:
        sock.close()
        raise
    return sock


def connect(path: Path, timeout_s: float | None = None) -> Channel | None:
    """Connect to the agent at `path`; `None` if no agent listens there.

    Args:
        path: of the agent's socket.
        timeout_s: of this call and of each later call of the channel; `None` to wait without a limit.

    Raises:
        TimeoutError: an agent listens, but is too busy or frozen to answer.
        PermissionError: another user listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError:
        sock.close()
        raise
    channel = Channel(sock)
    if (uid := peer_uid(channel)) != os.geteuid():
        channel.close()
        raise PermissionError(f"another user (uid {uid}) listens at {path}")
    return channel


def peer_pid(channel: Channel) -> int:
    """Return the id of the process at the other end when it connected, or began to listen (SO_PEERCRED)."""
    return _credentials(channel)[0]


def peer_uid(channel: Channel) -> int:
    """Return the effective user id that the process at the other end had when it connected, or began to listen."""
    return _credentials(channel)[1]


def _credentials(channel: Channel) -> tuple[int, int, int]:
    """Return the ids of process, user and group at the other end."""
    pid, uid, gid = struct.unpack("3i", channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid
