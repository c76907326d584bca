"""What to run: options come first, then environment, then the instance's tags, then harness.toml and defaults.

Owns that order, and how the settings reach `harness run` unchanged: by the same options, and by an environment in which
tags fill in for missing variables. So it resolves exactly the same settings, even those that this module does not know.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.program import script_of
from harness.config.settings import OPTIONS, Settings, resolve
from harness.errors import ConfigError
from harness.ipc.process import safe_python

COMMAND_VARIABLE = "HARNESS_COMMAND"
_FIRST = ("fresh", "continue_", "from_")
_TAGS = {"HARNESS_RUN": "harness-run", "HARNESS_STORE": "harness-store", COMMAND_VARIABLE: "harness-command"}


@dataclass(frozen=True)
class Request:
    """What the user asked `harness resume` for, before anything is resolved.

    Attributes:
        flags: options of `harness run`, by the names of settings; `None` values count as not given.
        words: the program, as given after `--`; may be empty.
        line: the program as one line, of --command; `None` if it was not given.
        environ: the environment.
        cwd: where harness.toml and relative directories are looked up.
    """

    flags: Mapping[str, Any]
    words: Sequence[str]
    line: str | None
    environ: Mapping[str, str]
    cwd: Path


@dataclass(frozen=True)
class Job:
    """One run, as it is handed to `harness run`.

    Attributes:
        settings: as `harness run` will resolve them.
        command: the program.
        options: of `harness run`, without those of a first start.
        environ: of `harness run`.
    """

    settings: Settings
    command: tuple[str, ...]
    options: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def anew(self) -> bool:
        """Whether the first start has an option of its own: --fresh, --continue or --from."""
        return any(getattr(self.settings, name) for name in _FIRST)

    def arguments(self, *, anew: bool) -> list[str]:
        """Return the command line of `harness run`.

        Args:
            anew: whether this is the first start of the job. Only then are --fresh, --continue and --from passed on.
        """
        given = {name: value for name in _FIRST if anew and (value := getattr(self.settings, name))}
        first = [word for name, value in given.items() for word in _option(name, value)]
        return [*safe_python("harness"), "run", *self.options, *first, "--", *self.command]


def resolve_job(request: Request, tag: Callable[[str], str | None]) -> Job:
    """Find out what to run.

    Args:
        request: what the user asked for.
        tag: returns a tag of the instance, or `None`; called only for what is still missing.

    Raises:
        ConfigError: nothing to run, two programs to run, or invalid settings.
    """
    flags, words, line, environ = request.flags, request.words, request.line, request.environ
    if words and line is not None:
        raise ConfigError("the program is given twice: after -- and as --command")
    known = {"HARNESS_RUN": flags.get("run"), "HARNESS_STORE": flags.get("store"), COMMAND_VARIABLE: words or line}
    found = dict(environ)
    for variable, name in _TAGS.items():
        if not known[variable] and not found.get(variable):
            found.pop(variable, None)  # an empty one counts as missing
            if value := tag(name):
                found[variable] = value
    command = tuple(words) or _split(line if line is not None else found.get(COMMAND_VARIABLE))
    given = {name: value for name, value in flags.items() if value is not None}
    settings = resolve(given, found, request.cwd, script=script_of(command))
    options = [word for name, value in given.items() if name not in _FIRST for word in _option(name, value)]
    return Job(settings, command, tuple(options), found)


def metadata_url(request: Request) -> str:
    """Return where the metadata service is, before anything else is known; even if the settings cannot be resolved."""
    try:
        return resolve({**request.flags, "run": "_"}, request.environ, request.cwd, script=None).metadata
    except ConfigError:
        about_it = {name: value for name, value in request.environ.items() if "METADATA" in name}
        flag = {"run": "_", "metadata": request.flags.get("metadata")}
        return resolve(flag, about_it, Path("/"), script=None).metadata


def _split(line: str | None) -> tuple[str, ...]:
    if not (line or "").strip():
        raise ConfigError(
            "nothing to run: harness resume -- python train.py, or --command, HARNESS_COMMAND, or the instance's tag "
            "harness-command"
        )
    try:
        return tuple(shlex.split(line or ""))
    except ValueError as err:
        raise ConfigError(f"the command cannot be read ({err}): {line}") from err


def _option(name: str, value: object) -> list[str]:
    if value is True:
        return [OPTIONS[name].flag]
    return [OPTIONS[name].flag, format(value, ".17g") if isinstance(value, float) else str(value)]
