"""Text for people: names, reasons and commands from stores, notices and hosts, as a terminal may show them.

Owns how such text is made harmless, which arguments of a command are secret, and how numbers are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

HIDDEN = "***"
"""Stands in place of a secret."""

_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and newline, DEL, C1: a terminal obeys them
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the order in which text is read
    "\ud800-\udfff]"
)
_NAME = (  # the last words of an option; --max-tokens and --tokenizer do not match
    r"(?:[\w.+-]*[-_.])?(?:secret|token|passw(?:or)?d|passphrase|credentials?"
    r"|(?:(?:secret|api|access|private|auth|account)[-_]?)+key)"
)
_NAMED = re.compile(rf"(?i)^(-{{0,2}}{_NAME}=)(.+)", re.DOTALL)  # --api-key=…, WANDB_API_KEY=…, a hydra key
_NAMES_NEXT = re.compile(rf"(?i)--?{_NAME}")
_IN_URL = re.compile(r"(\w+://[^/@\s:]*:)[^/@\s]+(@)")
_KNOWN = re.compile(  # as their issuers write them
    r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|xox[abprs]-[\w-]{10,}|glpat-[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)


def printable(text: str) -> str:
    """Return `text` safe for a terminal: what would move the cursor, colour or hide something becomes an escape."""
    return _HARMFUL.sub(lambda found: ascii(found[0])[1:-1], text)


def listed(words: Sequence[str]) -> str:
    """Return words as a sentence has them: a, b and c."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def count(number: int | None) -> str:
    """Return a number for people: 12 034; "?" for `None`."""
    return "?" if number is None else f"{number:,}".replace(",", " ")


def size(number_of_bytes: float) -> str:
    """Return a number of bytes for people: 1.5 GB, 340 MB, 12 kB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number_of_bytes >= unit:
            return f"{number_of_bytes / unit:.3g} {name}"
    return f"{number_of_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Return a duration for people: 30 ms, 4.0 s, 41 s, 5.0 min, 3.2 h, 4.1 days."""
    for unit, name in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds > 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with the values of options hidden whose names say that they are secret.

    Passwords in URLs and tokens of a known form are hidden too. Other secrets cannot be recognised.
    """
    return tuple(_text(word) for word in _hidden(command))


def _text(word: str) -> str:
    """Return `word` with escapes for bytes that are not UTF-8: a record is text."""
    return word.encode(errors="backslashreplace").decode()


def _hidden(command: Sequence[str]) -> Iterator[str]:
    hides = False
    for argument in command:
        if hides and not argument.startswith("-"):
            yield HIDDEN
            hides = False
            continue
        hides = _NAMES_NEXT.fullmatch(argument) is not None
        argument = _NAMED.sub(rf"\g<1>{HIDDEN}", argument)
        argument = _IN_URL.sub(rf"\g<1>{HIDDEN}\g<2>", argument)
        yield _KNOWN.sub(HIDDEN, argument)
