"""One real process of a test: started, heard line by line, waited for, and gone at the end.

No wait has a limit of its own: it ends with what is waited for, with the death of who would do it, or with pytest's
limit for the test (`tests/conftest.py`), which is then red and shows what every process had said.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support import fork_server

STARTED: list[Process] = []
"""What this test has started, for the report of its failure; emptied before each test."""


class Process:
    """One command, with what it prints so far. Its output ends when everybody who inherited it has ended."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: int | IO[bytes] | None = None,
    ) -> None:
        """Start it, in a session of its own."""
        self.command = " ".join(str(argument) for argument in arguments)
        self._changed = threading.Condition()
        self._text: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._process = fork_server.Popen(
            list(arguments),
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._deaf, self._let_go = os.pipe()
        self._readers = [
            threading.Thread(target=self._read, args=(name, pipe), daemon=True)
            for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()
        STARTED.append(self)

    @property
    def stdout(self) -> bytes:
        """What it wrote so far."""
        with self._changed:
            return bytes(self._text["stdout"])

    @property
    def stderr(self) -> str:
        """What it, and the harness, wrote so far."""
        with self._changed:
            return self._text["stderr"].decode(errors="replace")

    @property
    def input(self) -> IO[bytes]:
        """Its stdin, where that is a pipe."""
        assert self._process.stdin is not None
        return self._process.stdin

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of `pattern` in stderr, now or later. Fails when everybody who could write it has ended."""
        with self._changed:
            while True:
                ended = not any(reader.is_alive() for reader in self._readers)
                text = self._text["stderr"].decode(errors="replace")
                if (found := re.search(pattern, text)) is not None:
                    return found
                assert not ended, f"never said: {pattern}\n{text}"
                self._changed.wait(0.5)  # a reader ends a moment after it has said so

    def signal(self, signum: int) -> None:
        """Signal this process alone."""
        os.kill(self.pid, signum)

    def signal_group(self, signum: int) -> None:
        """Signal everybody in its process group, as a terminal, a shell or a container does."""
        os.killpg(self.pid, signum)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait_exit(self) -> int:
        """Its own exit code."""
        return self._process.wait()

    def wait(self) -> int:
        """Its exit code, once everybody who inherited its output has ended as well."""
        code = self.wait_exit()
        for reader in self._readers:
            reader.join()
        return code

    def reap(self) -> None:
        """Kill it if it lives, and leave nothing of it in this process: no zombie, thread or descriptor. Idempotent.

        Whoever else holds its output is no longer heard.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what was not sent is nobody's any more
                self._process.stdin.close()
        if self._let_go >= 0:
            os.close(self._let_go)
            for reader in self._readers:
                reader.join()
            os.close(self._deaf)
            self._deaf = self._let_go = -1

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            heard = select.poll()
            heard.register(pipe, select.POLLIN)
            heard.register(self._deaf, select.POLLIN)
            while True:
                ready = [fd for fd, _ in heard.poll()]
                data = os.read(pipe.fileno(), 65536) if pipe.fileno() in ready else b""
                if not data:
                    break
                with self._changed:
                    self._text[name] += data
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def kill(pid: int) -> None:
    """Kill a process of any parent and wait until it has ended; one that has already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)


def wait_ended(pid: int) -> None:
    """Wait until a process of any parent has ended, though nobody may have waited for it yet."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            select.select([fd], [], [])
        finally:
            os.close(fd)
