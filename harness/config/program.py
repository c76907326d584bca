"""The program that trains: its command line, its script, and the mistakes that can be found before a start."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import ConfigError

_MOST_BYTES = 1_000_000  # of a file that is compared: data is not configuration


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


def digest_of(command: Sequence[str]) -> str:
    """Return a digest of the script that a command runs: of its text, or of the command's first words without one."""
    script = script_of(command)
    text = None if script is None else _text_of(script)
    return hashlib.blake2b(text or " ".join(command[:3]).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def words_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command's words for a comparison: whichever Python it is, and with a digest of each file it names."""
    words = []
    for number, word in enumerate(command):
        if number == 0 and os.path.basename(word).startswith("python"):  # noqa: PTH119
            words.append("python")
            continue
        text = _text_of(word.partition("=")[2] or word)
        words.append(word if text is None else f"{word}#{hashlib.blake2b(text, digest_size=8).hexdigest()}")
    return tuple(words)


def _text_of(name: str) -> bytes | None:
    """Return the content of a small file; `None` if there is none of that name."""
    try:
        path = Path(name)
        return path.read_bytes() if path.is_file() and path.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError):
        return None


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
