"""What the harness needs of other packages: which of them are missing, or older than its own metadata asks for.

Owns the words for that: without them a user would meet an AttributeError from below. Imports none of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
import sysconfig
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

DISTRIBUTION = "harness-spot"
FREE_THREADED = (
    "this Python was built to run without the global interpreter lock, with which the harness was never tried: use the "
    "usual build"
)
_LINE = re.compile(r"(?P<name>[\w.-]+)(\[[\w,]*\])?>=(?P<least>[\d.]+)(; extra == ['\"](?P<extra>[\w-]+)['\"])?")
_RELEASE = re.compile(r"(?:\d+!)?(\d+(?:\.\d+)*)")


@dataclass(frozen=True)
class Unmet:
    """Packages that are missing or too old.

    Attributes:
        what: which, in one line.
        remedy: the command that installs them.
    """

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def unmet(
    extra: str | None = None,
    *,
    without: Container[str] = (),
    version: Callable[[str], str] = importlib.metadata.version,
) -> Unmet | None:
    """Return what is missing or too old; `None` if nothing is.

    Reads the metadata of each package, a millisecond or two, and imports nothing.

    Args:
        extra: of pyproject.toml, whose packages are meant; `None` for those that are always needed.
        without: packages that may be missing.
        version: returns the version of a package; raises PackageNotFoundError.
    """
    found, least = list[str](), list[str]()
    for name, oldest in _needed(extra):
        try:
            installed = version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in without:
                continue
            found.append(f"{name} is not installed")
        else:
            if _release(installed) >= _release(oldest):
                continue
            found.append(f"{name} {installed} is too old, {oldest} is the oldest that works")
        least.append(f"'{name}>={oldest}'")
    return Unmet("; ".join(found), f"pip install {' '.join(least)}") if found else None


@functools.cache
def check(extra: str | None = None) -> None:
    """Raise ImportError if packages are missing or too old; see `unmet`."""
    if (problem := unmet(extra)) is not None:
        raise ImportError(str(problem))


@contextlib.contextmanager
def needed(extra: str) -> Iterator[None]:
    """Context manager around the imports of an integration.

    Args:
        extra: of pyproject.toml, which has its packages.

    Raises:
        ImportError: one is missing or too old, with the remedy; or one is too new, and has no such name any more.
    """
    check(extra)
    try:
        yield
    except ImportError as err:
        if isinstance(err, ModuleNotFoundError) and not (err.name or "").startswith(extra.replace("-", "_")):
            raise  # another package, which this one needs
        raise ImportError(f"this version of {extra} may be too new for the harness: {err}") from err


def is_free_threaded() -> bool:
    """Whether this Python was built to run without the global interpreter lock."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def _needed(extra: str | None) -> Iterator[tuple[str, str]]:
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        return
    for line in lines:
        if (match := _LINE.fullmatch(line)) and match["extra"] == extra:
            yield match["name"], match["least"]


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version. What else it says, `+cpu`, `rc1` or a vendor's mark, changes nothing here."""
    match = _RELEASE.match(version)
    numbers = [int(number) for number in match[1].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
