"""The program that trains: its command line, its script, and the mistakes that can be found before a start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.errors import ConfigError


@dataclass(frozen=True)
class Program:
    """The program that trains: a child of the agent, or a trainer that connects by itself.

    Attributes:
        command: the command line of a child; `None` for a trainer that connects by itself.
        environ: the environment that a child gets.
        script: the command line of a trainer that is not a child, for the run's records.
        starter: pid of the trainer that started this agent and is about to connect.
    """

    command: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    script: Sequence[str] = ()
    starter: int | None = None

    @property
    def is_child(self) -> bool:
        """Whether the agent starts the program."""
        return self.command is not None

    @property
    def remembered(self) -> tuple[str, ...]:
        """The command line of the program, for a child and for other trainers; empty if unknown."""
        return tuple(self.command or self.script)


def check_command(command: Sequence[str]) -> None:
    """Raise if the command is certain to fail, before anything is started.

    A start that is certain to fail must not claim a run that another host is training.

    Raises:
        ConfigError: nothing to run, a program that cannot be executed, or a Python script that does not exist.
    """
    if not command:
        raise ConfigError("nothing to run: harness run -- python train.py")
    program = command[0]
    if shutil.which(program) is None:
        if os.sep not in program:
            raise ConfigError(f"{program}: command not found")
        if not os.path.exists(program):  # noqa: PTH110
            raise ConfigError(f"{program}: command not found (looked in {os.getcwd()})")  # noqa: PTH109
        raise ConfigError(f"{program} cannot be executed: it is a directory, or not executable (chmod +x)")
    script = script_of(command)
    if script is not None and not os.path.exists(script):  # noqa: PTH110  shown as the user gave it
        raise ConfigError(f"{script}: no such script (looked in {os.getcwd()})")  # noqa: PTH109


def script_of(command: Sequence[str]) -> str | None:
    """Return the Python script that a command runs, as it was given; `None` for `-m`, `-c` and other programs."""
    if not os.path.basename(command[0]).startswith("python"):  # noqa: PTH119
        return command[0] if command[0].endswith(".py") else None
    words = iter(command[1:])
    for word in words:
        if word in ("-c", "-m"):
            return None
        if word in ("-W", "-X"):
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None
