"""Output of the commands: lines for people on stderr; data, tables and JSON on stdout.

Owns how a text from elsewhere (a store, a notice, a host) is made harmless, and what happens if the output cannot be
written.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from harness.core.words import printable
from harness.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

_SILENCE_S = 2.0
_IN_A_PIPE = 10_000


def say(text: str) -> None:
    """Print one line for people."""
    with contextlib.suppress(OSError):  # the reader is gone, or the disk is full
        os.write(2, f"harness: {printable(text)}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def patience(store: str | None) -> Generator[threading.Timer]:
    """After two seconds, print once that the command is still at work on `store`. Cancel the timer to print nothing."""
    waiting = threading.Timer(_SILENCE_S, say, [f"still at work on {store or 'the store'} …"])
    waiting.daemon = True
    waiting.start()
    try:
        yield waiting
    finally:
        waiting.cancel()


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of data. Raises ConfigError if stdout cannot be written, as do the other `print_…` functions."""
    with _output():
        typer.echo("\n".join(map(printable, lines)))


def print_json(value: object) -> None:
    """Print one JSON document."""
    with _output():
        typer.echo(json.dumps(value, indent=2))


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print one name and value per line, folded on a terminal; "-" stands for `None`."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), _cell(value))
    console = Console()
    console.width = console.width if console.is_terminal else _IN_A_PIPE
    with _output():
        console.print(table)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print one line for each row, below the names of the columns. The last column is prose.

    Only the last column is folded, and only on a terminal: output in a pipe is searched line by line.
    """
    from rich.console import Console
    from rich.table import Table

    if not rows:
        say("nothing there")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    *_, prose = rows[0]
    for name in rows[0]:
        table.add_column(name.replace("_", " "), overflow="fold", no_wrap=name != prose)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console = Console()
    unfolded = console.options.update(max_width=_IN_A_PIPE)
    narrowest = console.measure(table, options=unfolded).minimum
    console.width = max(console.width, narrowest) if console.is_terminal else _IN_A_PIPE
    with _output():
        console.print(table)


@contextlib.contextmanager
def _output() -> Generator[None]:
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has closed the pipe: `harness ls | head`
    except OSError as err:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise Python writes again when it exits
        raise ConfigError(f"the output could not be written: {err.strerror}") from err


def _cell(value: object) -> Text:
    """Make a cell that shows the text itself: terminal escapes and rich markup in it have no effect."""
    from rich.text import Text

    return Text("-" if value is None else printable(str(value)))
