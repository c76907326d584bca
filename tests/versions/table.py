"""Writes the table of docs/versions.md: what each torch ships, and whether it goes on bit for bit after a resume.

    python -m tests.versions.table .venv-versions/*/kinds.xml

Each file is the report of `KINDS` in an environment of scripts/test-versions; versions.txt beside it has its torch.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/versions.md"
BEGIN, END = "<!-- begin: tests/versions/table.py -->", "<!-- end -->"
_CAPTURE, _LOADERS = "tests/unit/trainer/state/test_capture.py", "tests/unit/trainer/loaders/test_dataloader.py"
KINDS = (
    f"{_CAPTURE}::test_every_optimizer_of_torch_goes_on_bit_for_bit",
    f"{_CAPTURE}::test_every_scheduler_of_torch_goes_on_bit_for_bit",
    f"{_LOADERS}::test_a_resumed_iteration_goes_on_as_if_nothing_had_happened",
    f"{_LOADERS}::test_a_resumed_iteration_with_workers_goes_on_as_if_nothing_had_happened",
)
"""The tests, of which each case is one kind of object."""
_GROUPS = ("optimizer", "scheduler", "sampler", "loader with workers")
_ABSENT = "not there"


def read(report: Path) -> tuple[str, dict[tuple[str, str], str]]:
    """Return the torch of a report, and what became of each kind, by group and name."""
    (version,) = re.findall(r"^torch==([\d.]+)", report.with_name("versions.txt").read_text(), re.MULTILINE)
    found: dict[tuple[str, str], str] = {}
    for case in ET.parse(report).iter("testcase"):
        name, _, parameters = case.get("name", "").partition("[")
        (group,) = (group for group, test in zip(_GROUPS, KINDS, strict=True) if test.endswith(f"::{name}"))
        kind = re.sub(r"-(options|stops)\d+$", "", parameters.removesuffix("]")).replace("workers-", "workers, ")
        failed = case.find("failure") is not None or case.find("error") is not None
        if failed or (group, kind) not in found:
            found[group, kind] = "**not exact**" if failed else "exact"
    return version, found


def table(reports: Mapping[str, Mapping[tuple[str, str], str]]) -> Iterator[str]:
    """Yield the lines: a row for the kinds of a group to which the same became, in each torch."""
    versions = sorted(reports, key=lambda version: [int(part) for part in version.split(".")])
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for group, kind in sorted({kind for found in reports.values() for kind in found}):
        outcome = tuple(reports[version].get((group, kind), _ABSENT) for version in versions)
        rows.setdefault((group, outcome), []).append(kind)
    yield f"With torch {', '.join(versions)}:"
    yield ""
    yield "| what | which | result |"
    yield "| -- | -- | -- |"
    for (group, outcome), kinds in sorted(rows.items(), key=lambda row: (_GROUPS.index(row[0][0]), row[1])):
        yield f"| {group} | {'; '.join(kinds)} | {_in_words(versions, outcome)} |"


def _in_words(versions: Sequence[str], outcome: Sequence[str]) -> str:
    if len(set(outcome)) == 1:
        return f"{outcome[0]} in each"
    found = {what: [version for version, was in zip(versions, outcome, strict=True) if was == what] for what in outcome}
    return "; ".join(f"{what} in {', '.join(found[what])}" for what in sorted(found))


def written(text: str, lines: Iterable[str]) -> str:
    """Return a document with the table between its marks."""
    before, rest = text.split(BEGIN)
    return "\n".join([f"{before}{BEGIN}\n", *lines, f"\n{END}{rest.split(END, 1)[1]}"])


def main(reports: Iterable[Path]) -> None:
    """Write the document's table."""
    DOCUMENT.write_text(written(DOCUMENT.read_text(), table(dict(map(read, reports)))))


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]))
