"""Finding: what one check of `harness doctor` has to say, and the rule that no check ends in a traceback.

Owns the value and its words on the screen; knows nothing of what is checked.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cloud.errors import CloudError
from harness.errors import HarnessError

_LEVEL_WIDTH, _NAME_WIDTH = 9, 16


class Level(enum.Enum):
    """How bad it is, mildest first."""

    OK = "ok"
    WARNING = "warning"
    """A run works, with less than it could have; or this could not be checked."""
    FAILURE = "FAIL"
    """A run would lose work, or not start."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: what was checked, in one or two words.
        level: how bad it is.
        what: what was found, in one line, with the numbers.
        remedy: what to do about it; empty where there is nothing to do.
    """

    name: str
    level: Level
    what: str
    remedy: str = ""

    def lines(self) -> list[str]:
        """For people: the finding, and its remedy below it."""
        lines = [f"{self.level.value:<{_LEVEL_WIDTH}}{self.name:<{_NAME_WIDTH}}{self.what}"]
        if self.remedy:
            lines.append(f"{'':<{_LEVEL_WIDTH + _NAME_WIDTH}}{self.remedy}")
        return lines

    def to_json(self) -> dict[str, str]:
        """For machines."""
        level = "failure" if self.level is Level.FAILURE else self.level.value
        return {"check": self.name, "level": level, "what": self.what, "remedy": self.remedy}


def ok(name: str, what: str) -> Finding:
    """Nothing is wrong."""
    return Finding(name, Level.OK, what)


def warning(name: str, what: str, remedy: str = "") -> Finding:
    """It works, with less than it could; or it could not be found out."""
    return Finding(name, Level.WARNING, what, remedy)


def failure(name: str, what: str, remedy: str) -> Finding:
    """This costs a night."""
    return Finding(name, Level.FAILURE, what, remedy)


def examined(name: str, check: Callable[[], Finding]) -> Finding:
    """What `check` finds. One that cannot be made is a warning that says why: the others still have their turn."""
    try:
        return check()
    except (CloudError, HarnessError, OSError) as err:
        return warning(name, f"could not be checked: {one_line(err)}")


def one_line(err: object) -> str:
    """An error's words, without the line breaks that some libraries put into them."""
    return " ".join(str(err).split())


def all_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed; warnings are allowed."""
    return all(finding.level is not Level.FAILURE for finding in findings)
