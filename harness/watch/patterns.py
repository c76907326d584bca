"""Patterns: the names of checkpoints and of their files, with numbers in them: `checkpoint-{step}`.

Owns what may stand in a pattern. Knows no file system.

    {step} {epoch} {batch} {rank}   a number, with all of its digits
    {time}                          a date, a time or a fraction: numbers that tell no step
    {name}                          any text without a `/`
    {root}                          the watched directory, as a path
    *                               the same, without a name
    a|b                             one or the other
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

NUMBERS = ("step", "epoch", "batch", "rank")
_TIMES = (
    r"[0-9]{4}[-_.][0-9]{1,2}[-_.][0-9]{1,2}(?:T[0-9]{4,6}|[-_][0-9]{6})?",  # 2026-11-29, 2026-11-29T1403
    r"[0-9]{1,2}[-_.][0-9]{1,2}[-_.][0-9]{4}",  # 29.11.2026
    r"[0-9]{1,2}[-_.:][0-9]{2}[-_.:][0-9]{2}",  # 14-03-23, behind a date or alone
    r"[0-9]{8}[-_.T][0-9]{4,6}",  # 20261129_140323
    r"[0-9]+\.[0-9]+",  # 0.25, a loss
)
_TEXTS = {"name": "[^/]+", "root": ".+", "time": "|".join(_TIMES)}
_ANY, _ANY_ENDS = (None, "name"), ("*", "{name}")
_FIELD = re.compile(r"\{([a-z]+)\}|\*")


class BadPattern(ValueError):
    """A pattern has a field that there is not."""


@dataclass(frozen=True)
class Match:
    """What a name says.

    Attributes:
        numbers: the numbers in it, by their field.
        texts: the texts of fields in it, as they stand there, numbers with their leading zeros.
    """

    numbers: Mapping[str, int]
    texts: Mapping[str, str]


class Pattern:
    """One pattern, or several of which one has to fit."""

    def __init__(self, text: str) -> None:
        """Compile it. Raises BadPattern."""
        self.text = text
        self._ways = [re.compile(_expression(way)) for way in text.split("|")]

    def match(self, name: str) -> Match | None:
        """Return what a path or name says; `None` if the pattern does not fit all of it."""
        for way in self._ways:
            if (found := way.fullmatch(name)) is not None:
                texts = {field: text for field, text in found.groupdict().items() if text is not None}
                return Match({field: int(text) for field, text in texts.items() if field in NUMBERS}, texts)
        return None

    def fill(self, texts: Mapping[str, str]) -> str:
        """Return the name that says this, by the first way. Raises BadPattern if a field is missing."""

        def put(field: re.Match[str]) -> str:
            if field[1] is None or field[1] not in texts:
                raise BadPattern(f"{self.text!r}: nothing is known that could stand for {field[0]}")
            return texts[field[1]]

        return _FIELD.sub(put, self.text.split("|")[0])


@functools.lru_cache(maxsize=1024)
def pattern(text: str) -> Pattern:
    """Return the pattern that a text describes. Raises BadPattern."""
    return Pattern(text)


def _expression(way: str) -> str:
    seen: set[str] = set()
    parts, end = [], 0
    for found in _FIELD.finditer(way):
        group = _group(found[1], seen)
        if found[1] not in _ANY:  # a text beside it would take some of its digits: `epoch10` would be `epoch1` and 0
            group = f"(?<![0-9]){group}" if way[: found.start()].endswith(_ANY_ENDS) else group
            group = f"{group}(?![0-9])" if way[found.end() :].startswith(_ANY_ENDS) else group
        parts += [re.escape(way[end : found.start()]), group]
        end = found.end()
    return "".join([*parts, re.escape(way[end:])])


def _group(field: str | None, seen: set[str]) -> str:
    if field is None:
        return "[^/]*"
    if field not in (*NUMBERS, *_TEXTS):
        raise BadPattern(f"{{{field}}}: there are {', '.join(f'{{{each}}}' for each in (*NUMBERS, *_TEXTS))}")
    if field in seen:
        return f"(?P={field})"
    seen.add(field)
    return f"(?P<{field}>{_TEXTS.get(field, '[0-9]+')})"
