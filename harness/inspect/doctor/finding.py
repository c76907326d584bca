"""Finding: the result of one check of `harness doctor`, and the rule that no check ends in a traceback.

Owns the value and its text on the screen; knows nothing about the things that are checked.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cloud.errors import CloudError
from harness.errors import HarnessError

_LEVEL_WIDTH, _NAME_WIDTH = 9, 16


class Level(enum.Enum):
    """Severity of a finding, mildest first."""

    OK = "ok"
    WARNING = "warning"
    """A run works, but not as well as it could; or the check could not be made."""
    FAILURE = "FAIL"
    """A run would lose work, or not start."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: what was checked, in one or two words.
        level: its severity.
        what: what was found, in one line, with the numbers.
        remedy: what the user can do about it; empty if nothing needs to be done.
    """

    name: str
    level: Level
    what: str
    remedy: str = ""

    def lines(self) -> list[str]:
        """Return the lines for people: the finding, and its remedy below it."""
        lines = [f"{self.level.value:<{_LEVEL_WIDTH}}{self.name:<{_NAME_WIDTH}}{self.what}"]
        if self.remedy:
            lines.append(f"{'':<{_LEVEL_WIDTH + _NAME_WIDTH}}{self.remedy}")
        return lines

    def to_json(self) -> dict[str, str]:
        """Return the fields for `--json`."""
        level = "failure" if self.level is Level.FAILURE else self.level.value
        return {"check": self.name, "level": level, "what": self.what, "remedy": self.remedy}


def ok(name: str, what: str) -> Finding:
    """Make a finding that says that nothing is wrong."""
    return Finding(name, Level.OK, what)


def warning(name: str, what: str, remedy: str = "") -> Finding:
    """Make a finding for something that works, but not as well as it could, or that could not be checked."""
    return Finding(name, Level.WARNING, what, remedy)


def failure(name: str, what: str, remedy: str) -> Finding:
    """Make a finding for something that would lose work or stop a run from starting."""
    return Finding(name, Level.FAILURE, what, remedy)


def examined(name: str, check: Callable[[], Finding]) -> Finding:
    """Return what `check` finds. If the check itself fails, return a warning with the reason: the others still run."""
    try:
        return check()
    except (CloudError, HarnessError, OSError) as err:
        return warning(name, f"could not be checked: {one_line(err)}")


def one_line(err: object) -> str:
    """Return an error's text without the line breaks that some libraries put into it."""
    return " ".join(str(err).split())


def all_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed; warnings are allowed."""
    return all(finding.level is not Level.FAILURE for finding in findings)
