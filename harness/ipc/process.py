"""Processes of this host, as agent and trainer see each other: whether one lives, since when, how to start an agent.

Owns pidfds, which report a death at once, and the command line of the harness's own processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import ConfigError
from harness.ipc.channel import Channel, connect, peer_pid
from harness.ipc.runtime_dir import RuntimeDir


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when `pid` dies; `None` if it is gone already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def check_kernel() -> None:
    """Raise ConfigError if the kernel, or a seccomp profile, allows no memfd or no pidfd."""
    try:
        os.close(os.memfd_create("harness-check", os.MFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as err:
        raise ConfigError(
            f"{err.strerror}: memfd_create and pidfd_open are needed: Linux 5.3 or newer, and a seccomp profile that "
            "allows them"
        ) from err


def is_ignored(signum: int) -> bool:
    """Return whether this process was started with a signal ignored, as by nohup. Call it before installing a handler.

    Only SIGHUP and SIGINT count: no program starts another one with SIGTERM ignored on purpose.
    """
    return signum in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(signum) is signal.SIG_IGN


def heed_children() -> None:
    """Have the kernel keep the exit codes of our children. Main thread only; before the first child.

    A launcher that ignores SIGCHLD, so as not to reap its children, hands that down: a killed program would count as
    one that has ended well.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def is_in_foreground() -> bool:
    """Return whether this process has a terminal whose Ctrl-C reaches it, and what it has started as well."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)


def pidfd_dead(pidfd: int) -> bool:
    """Return whether the process behind `pidfd` has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill(pidfd: int) -> None:
    """Kill the process behind `pidfd`, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def start_ticks(pid: int) -> int | None:
    """Return when the kernel started a process of this host, in its ticks since boot; `None` if it is gone already.

    A process never has fewer ticks than the one that started it, so ticks can be compared with each other exactly.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def began_at(pid: int) -> float:
    """Return when a process of this host was started, in monotonic seconds, to 10 ms; now if it is gone already."""
    ticks = start_ticks(pid)
    if ticks is None:
        return time.monotonic()
    since_boot = ticks / os.sysconf("SC_CLK_TCK")  # sleep included
    # The difference of the clocks: a pause between the two readings makes it larger, hence the smallest of some.
    offset = min(-time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic() for _ in range(5))
    return min(since_boot + offset, time.monotonic())


def safe_python(module: str) -> list[str]:
    """Return the command line that runs a module of the harness, of the same installation as this process.

    IMPORTANT: without -P the current directory comes first, and a file there that happens to be called harness.py or
    queue.py, or that another user has put there, would be run instead.
    """
    return [sys.executable, "-P", "-m", module]


def start_agent(
    place: RuntimeDir, arguments: Sequence[str], environment: Mapping[str, str], *, wait_s: float = 10.0
) -> Channel:
    """Start a detached agent for `place` and connect to it.

    Another process may start one at the same moment. The lock decides which agent stays; both callers connect to it.
    One that listens there still, and is ending, is not taken for it.

    Args:
        place: the directory in which it has to listen.
        arguments: passed to `python -P -m harness.agent`, followed by our pid.
        environment: the agent's whole environment.
        wait_s: how long it may take until it listens.

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
            if peer_pid(channel) == process.pid or process.poll() is not None:
                threading.Thread(target=process.wait, name="harness-agent-reaper", daemon=True).start()
                return channel
            channel.close()
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        if process.returncode != 0 and connect(place.socket) is None:
            break
    raise ConnectionError(f"the agent did not start: {_tail(place.log)}")


def _tail(path: Path, count: int = 2000) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-count:].decode(errors="replace").strip() or f"{path} is empty"
    return f"cannot read {path}"
