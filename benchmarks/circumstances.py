"""What every benchmark prints before its numbers, and how it prints them: command, machine, versions, a table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, object]


def circumstances(libraries: Sequence[str]) -> dict[str, str]:
    """The three lines without which a number is a rumour."""
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = [f"{name} {importlib.metadata.version(name)}" for name in libraries]
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


def show(around: dict[str, str], rows: Sequence[Row], *, as_json: bool) -> None:
    """Print a Markdown table below its circumstances, or all of it as one JSON document."""
    if as_json:
        print(json.dumps({**around, "rows": rows}, indent=2, ensure_ascii=False))
        return
    for name, value in around.items():
        print(f"    {name:<10} {value}")
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print()
    for number, line in enumerate(lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


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
