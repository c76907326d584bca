"""Options that several commands share. The options of a run are made from `Settings`: name, type, help and heading.

Owns how a setting becomes an option; `Settings` owns the list of settings and their meaning.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from cloud.errors import Denied
from harness.config.settings import OPTIONS, Settings, here, resolve
from harness.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout")]

TO_FIND = ("store", "run", "s3_endpoint")
"""Settings that identify a run."""
TO_LOOK = ("store", "run", "local", "s3_endpoint")
"""Settings that identify a run and its local tier."""
TO_TRY = tuple(name for name in OPTIONS if name not in ("fresh", "continue_"))
"""Every setting of a run, except where to begin (`fresh`, `continue_`)."""
TO_RUN = tuple(OPTIONS)

Command = Callable[..., None]


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Give a command an option for each of these settings, in place of its parameter `flags`.

    The command is called with `flags`: a mapping from the name of each setting to its value on the command line, or to
    `None` if the option was not given.
    """

    def decorate(command: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            is_flags = parameter.name == "flags"
            parameters += map(_parameter, names) if is_flags else [parameter.replace(kind=_BY_NAME)]

        @functools.wraps(command)
        def with_flags(**given: Any) -> None:
            command(flags={name: given.pop(name) for name in names}, **given)

        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_flags

    return decorate


def settings_of(flags: Mapping[str, Any]) -> Settings:
    """Return the settings of the run that a command looks at. If the store holds only one run, it need not be named.

    Raises:
        ConfigError: a setting is invalid, or the run has to be named.
    """
    if flags["run"] is None and "HARNESS_RUN" not in os.environ:
        from harness.inspect.ls import runs

        try:
            names = runs(resolve({**flags, "run": "_"}, os.environ, here(), script=None))
        except Denied as err:  # the role may be allowed to list only below its own run
            raise ConfigError(f"name a run with --run; the runs of the store cannot be listed: {err}") from err
        if len(names) != 1:
            raise ConfigError(f"name a run with --run; the store holds {', '.join(names) or 'none'}")
        flags = {**flags, "run": names[0]}
    return resolve(flags, os.environ, here(), script=None)


def _parameter(name: str) -> inspect.Parameter:
    option = OPTIONS[name]
    shown = typer.Option(option.flag, help=option.help, rich_help_panel=option.heading)
    hint = option.kind | None  # `None`: the option was not given
    return inspect.Parameter(name, _BY_NAME, default=None, annotation=Annotated[hint, shown])


_BY_NAME = inspect.Parameter.KEYWORD_ONLY
