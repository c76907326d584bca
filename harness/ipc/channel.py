"""The Unix socket between trainer and agent: messages, descriptors, liveness, and starting an agent where none is.

Owns framing, the handshake's addresses and the runtime directory; knows nothing of what messages mean. A message is a
JSON object with a `type`, framed by its length, with file descriptors beside it. Payload never travels here: it lies in
slots. Liveness is a pidfd: after SIGKILL of a trainer its forked DataLoader workers keep its socket open for seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ConfigError

PROTOCOL = 2
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_FDS = 16  # 254 in one message fail; a node has few slots
_LENGTH = struct.Struct("<I")


class ChannelClosed(ConnectionError):
    """The other side is gone."""


@dataclass(frozen=True)
class Message:
    """One message: its type, its fields, and the descriptors that came with it (the receiver owns them)."""

    type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    fds: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class Channel:
    """One connection. `send` may be called from several threads; `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected stream socket."""
        self.socket = sock
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        """For selectors; -1 once closed."""
        return self.socket.fileno()

    def send(self, type: str, fds: Sequence[int] = (), /, **fields: Any) -> None:
        """Send one message. Blocks while the other side's buffer is full.

        Raises:
            ChannelClosed: the other side is gone.
            TimeoutError: it has not read for as long as `connect` was told to wait; the channel is of no use any more.
        """
        data = json.dumps({"type": type, **fields}).encode()
        frame = memoryview(_LENGTH.pack(len(data)) + data)
        with self._send_lock:
            try:
                sent = socket.send_fds(self.socket, [frame], list(fds)) if fds else self.socket.send(frame)
                while sent < len(frame):
                    sent += self.socket.send(frame[sent:])
            except TimeoutError:
                raise
            except OSError as err:
                raise ChannelClosed(f"cannot send {type}: {err}") from err

    def receive(self) -> Message:
        """The next message. Blocks until it is complete.

        Raises:
            ChannelClosed: the other side is gone, or what came is no message.
            TimeoutError: nothing came for as long as `connect` was told to wait; the channel is of no use any more.
        """
        fds: tuple[int, ...] = ()
        try:
            head, fds = self._receive_head()
            (length,) = _LENGTH.unpack(head)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            fields = json.loads(self._receive_exactly(length))
            return Message(fields.pop("type"), fields, fds)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
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


@dataclass(frozen=True)
class RuntimeDir:
    """Where the agent of one run lives on this host: a short private directory, since socket paths end at 107 bytes.

    Attributes:
        directory: 0700, one per (user, store, run, rank's node).
    """

    directory: Path

    @classmethod
    def of(cls, runtime_dir: Path, store_url: str, run: str) -> RuntimeDir:
        """The place of `run` in `store_url`; two stores may hold runs of one name."""
        name = hashlib.blake2b(os.fsencode(f"{store_url}\0{run}"), digest_size=6).hexdigest()
        return cls(runtime_dir / name)

    @property
    def socket(self) -> Path:
        """The agent's address."""
        return self.directory / "agent.sock"

    @property
    def log(self) -> Path:
        """What a detached agent prints."""
        return self.directory / "agent.log"

    @property
    def outcome(self) -> Path:
        """What the last agent that ended here has come to."""
        return self.directory / "outcome.json"

    def prepare(self) -> None:
        """Create the directory, private to this user, and see that nobody else can put another one in its place.

        Raises:
            PermissionError: it, or the one that it is in, is another user's, or a link, or others may write there.
            OSError: it cannot be made.
        """
        parent = self.directory.parent
        for missing in reversed([path for path in (parent, *parent.parents) if not path.exists()]):
            with contextlib.suppress(FileExistsError):
                missing.mkdir(mode=0o700)
        with _safe_directory(parent, shared=True) as above:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.directory.name, 0o700, dir_fd=above)
            with _safe_directory(self.directory, shared=False):
                pass

    def try_lock(self) -> int | None:
        """The run's lock on this host as a descriptor to keep open, or `None` if another agent holds it."""
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def holder(self) -> str:
        """Who has the lock, in words for an error; empty if that cannot be seen."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            found = (self.directory / "lock").stat()
            where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
            for line in Path("/proc/locks").read_text().splitlines():
                words = line.split()
                if words[1] == "FLOCK" and words[5] == where:
                    return f": process {words[4]}"
        return ""

    def identity(self, lock: int) -> str:
        """Names the lock that `try_lock` gave, on any host and boot: who holds it knows that no other holder lives."""
        found = os.fstat(lock)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{found.st_dev:x}-{found.st_ino:x}"


@contextlib.contextmanager
def _safe_directory(path: Path, *, shared: bool) -> Iterator[int]:
    """A directory, open, in which no other user can replace what is ours.

    Args:
        path: its name. It must be no link.
        shared: whether it may be the system's own, as /run is; or anybody's to make files in, as /tmp is, where the
            sticky bit keeps each user's from the others.

    Raises:
        PermissionError: it is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as err:
        raise PermissionError(f"{path} is a link, or no directory") from err
    try:
        found = os.fstat(fd)
        if found.st_uid not in ((os.geteuid(), 0) if shared else (os.geteuid(),)):
            raise PermissionError(f"{path} belongs to another user (uid {found.st_uid})")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (shared and found.st_mode & stat.S_ISVTX):
            raise PermissionError(f"others may write to {path}: make it yours alone with chmod go-w {path}")
        yield fd
    finally:
        os.close(fd)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`; the caller holds the run's lock, so a socket that is there is a dead agent's."""
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
    """Connect to the agent at `path`; `None` if nobody listens there.

    Args:
        path: its address.
        timeout_s: for this and for each later call of the channel; `None` for as long as it takes.

    Raises:
        TimeoutError: it listens, and is too busy or frozen to answer.
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
    """The process at the other end when it connected, or began to listen (SO_PEERCRED)."""
    return _credentials(channel)[0]


def peer_uid(channel: Channel) -> int:
    """The user of that process, by the effective id that it had then."""
    return _credentials(channel)[1]


def _credentials(channel: Channel) -> tuple[int, int, int]:
    """Process, user and group."""
    pid, uid, gid = struct.unpack("3i", channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when `pid` dies; `None` if it is gone already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def check_kernel() -> None:
    """Raises ConfigError: the kernel, or a seccomp profile, lets us have no memfd or no pidfd."""
    try:
        os.close(os.memfd_create("harness-check", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as err:
        raise ConfigError(
            f"{err.strerror}: memfd_create and pidfd_open are needed: Linux 5.3 or newer, and a seccomp profile that "
            "allows them"
        ) from err


def is_ignored(signum: int) -> bool:
    """Whether whoever started this process wants it to ignore a signal, as nohup does. Before a handler is installed.

    Nobody ignores SIGTERM for others.
    """
    return signum in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(signum) is signal.SIG_IGN


def pidfd_dead(pidfd: int) -> bool:
    """Whether the process behind `pidfd` has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def began_at(pid: int) -> float:
    """When a process of this host was started, monotonic, to 10 ms; now if it is gone already."""
    now = time.monotonic()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return now
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot, sleep included
    return min(now, now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started))


def safe_python(module: str) -> list[str]:
    """The command line that runs a module of the harness as this process has it.

    IMPORTANT: without -P the current directory comes first, and a file there that happens to be called harness.py or
    queue.py, or that another user has put there, would be run instead.
    """
    return [sys.executable, "-P", "-m", module]


def start_agent(
    place: RuntimeDir, arguments: Sequence[str], environment: Mapping[str, str], *, wait_s: float = 10.0
) -> Channel:
    """Start a detached agent for `place` and connect to it.

    Another process may start one at the same moment: the lock decides, and whoever lost connects to the winner.

    Args:
        place: where it shall listen.
        arguments: passed to `python -P -m harness.agent`, and our pid after them.
        environment: the agent's whole environment.
        wait_s: how long it may take to listen.

    Raises:
        ConnectionError: no agent listens; the message holds the end of its log.
    """
    place.prepare()
    with open(place.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        process = subprocess.Popen(
            [*safe_python("harness.agent"), *arguments, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
        )
    give_up_at = time.monotonic() + wait_s
    while time.monotonic() < give_up_at:
        channel = connect(place.socket)
        if channel is not None:
            threading.Thread(target=process.wait, name="harness-agent-reaper", daemon=True).start()
            return channel
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        if process.returncode != 0 and connect(place.socket) is None:
            break
    raise ConnectionError(f"no agent came up: {_tail(place.log)}")


def _tail(path: Path, count: int = 2000) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-count:].decode(errors="replace").strip()
    return f"nothing in {path}"
