"""What every benchmark prints around its numbers: command, machine, versions, a table, and what it comes to."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, object]


def circumstances(libraries: Sequence[str]) -> dict[str, str]:
    """The three lines without which a number is a rumour."""
    options = [option for option in sys.argv[1:] if option != "--json"]
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *options]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = [f"{name} {version}" for name in libraries if (version := version_of(name))]
    return {
        "command": shlex.join(command),
        "machine": f"{os.cpu_count()} × {_processor()}, {memory:.0f} GiB, Linux {platform.release().split('-')[0]}",
        "versions": ", ".join(
            [
                f"harness at commit {_commit()}",
                f"{platform.python_implementation()} {platform.python_version()}",
                *versions,
            ]
        ),
    }


def environment(**more: str) -> dict[str, str]:
    """For a process of the harness: this tree, and none of the caller's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HARNESS", "AWS_"))}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@dataclass(frozen=True)
class Verdict:
    """What a benchmark was asked, and what came of it."""

    question: str
    bar: str
    measured: str
    met: bool


def at_most(question: str, bar: float, figure: float, unit: str = "") -> Verdict:
    """Good enough is `bar` or less."""
    return Verdict(question, f"at most {bar:g}{unit}", f"{figure:.3g}{unit}", figure <= bar)


def at_least(question: str, bar: float, figure: float, unit: str = "") -> Verdict:
    """Good enough is `bar` or more."""
    return Verdict(question, f"at least {bar:g}{unit}", f"{figure:.3g}{unit}", figure >= bar)


def spread(figures: Sequence[float]) -> str:
    """The median, and how far they lie apart."""
    return f"{statistics.median(figures):.3g} ({min(figures):.3g} to {max(figures):.3g})"


def show(around: dict[str, str], rows: Sequence[Row], verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    """Print the circumstances, the figures, and what they come to; or all of it as one JSON document."""
    document = {**around, "rows": rows, "verdicts": [asdict(verdict) for verdict in verdicts]}
    print(json.dumps(document, indent=2, ensure_ascii=False) if as_json else render(document))


def render(document: dict[str, Any]) -> str:
    """One benchmark's document for people, in Markdown."""
    around = {name: value for name, value in document.items() if isinstance(value, str)}
    parts = ["\n".join(f"    {name:<10} {value}" for name, value in around.items()), table(document["rows"])]
    if document["verdicts"]:
        parts.append(table([{**verdict, "met": _met(verdict)} for verdict in document["verdicts"]]))
    return "\n\n".join(parts)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table; its first row's keys are the head."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in padded)
    return "\n".join([head, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rest])


def version_of(library: str) -> str | None:
    """The version that is installed, or `None`."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _met(verdict: dict[str, Any]) -> str:
    return "yes" if verdict["met"] else "NO"


def _commit() -> str:
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        ).stdout
        changed = subprocess.run([*git, "status", "--porcelain", "harness", "cloud"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + (" and changes" if changed.stdout else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
