"""The trainer as a child: spawn, watch, signal, reap. A transparent parent: the child shares terminal and group.

Owns the process; decides nothing. The child inherits stdin, stdout, stderr and the process group, so that Ctrl-C,
window size and job control reach it as if it had been started by the shell.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from harness.errors import ConfigError
from harness.ipc.process import open_pidfd, start_ticks


class Child:
    """One attempt of the trainer, as a child process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int] = ()) -> None:
        """Spawn `command`.

        Args:
            command: its words.
            environment: all of it.
            inherited: descriptors that it gets, beside the standard ones.

        Raises:
            ConfigError: there is no such command, or it cannot be executed.
        """
        try:
            self._process = subprocess.Popen(list(command), env=dict(environment), pass_fds=inherited)
        except FileNotFoundError as err:
            raise ConfigError(f"{command[0]}: command not found") from err
        except OSError as err:
            raise ConfigError(f"{command[0]}: {err.strerror}") from err
        self.pid = self._process.pid
        pidfd = open_pidfd(self.pid)
        assert pidfd is not None, "a child that is not reaped has a pidfd"
        self.pidfd = pidfd
        ticks = start_ticks(self.pid)
        assert ticks is not None, "nor has it left /proc"
        self.start_ticks = ticks
        """When it was started, by the kernel's count: no process that it starts has fewer."""

    def reap(self) -> int | None:
        """Return the exit status as a shell shows it (128 + signal), or `None` while the child runs."""
        code = self._process.poll()
        if code is None:
            return None
        return 128 - code if code < 0 else code

    def signal(self, signum: int) -> None:
        """Signal the trainer alone, never its group: DataLoader workers would die first."""
        if self._process.poll() is None:
            signal.pidfd_send_signal(self.pidfd, signum)

    def close(self) -> None:
        """Close the descriptor of a child that was reaped."""
        os.close(self.pidfd)
