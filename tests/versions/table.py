"""Writes the table of docs/versions.md: what each torch ships, and whether it goes on bit for bit after a resume.

    python -m tests.versions.table .venv-versions/*/kinds.xml

Each file is the report of `KINDS` in an environment of scripts/test-versions; versions.txt beside it has its torch.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
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


def read(report: Path) -> tuple[str, dict[tuple[str, str], str]]:
    """Return the torch of a report, and what became of each kind, by group and name."""
    (version,) = re.findall(r"^torch==([\d.]+)", report.with_name("versions.txt").read_text(), re.MULTILINE)
    found: dict[tuple[str, str], str] = {}
    for case in ET.parse(report).iter("testcase"):
        name, _, parameters = case.get("name", "").partition("[")
        (group,) = (group for group, test in zip(_GROUPS, KINDS, strict=True) if test.endswith(f"::{name}"))
        kind = re.sub(r"-(options|stops)\d+$", "", parameters.removesuffix("]"))
        failed = case.find("failure") is not None or case.find("error") is not None
        if failed or (group, kind) not in found:
            found[group, kind] = "**not exact**" if failed else "exact"
    return version, found


def table(reports: Mapping[str, Mapping[tuple[str, str], str]]) -> Iterator[str]:
    """Yield the lines: a row for each kind, a column for each torch."""
    versions = sorted(reports, key=lambda version: [int(part) for part in re.findall(r"\d+", version)[:3]])
    yield f"| | | {' | '.join(versions)} |"
    yield f"| -- | -- |{' -- |' * len(versions)}"
    rows = {row for found in reports.values() for row in found}
    for group, kind in sorted(rows, key=lambda row: (_GROUPS.index(row[0]), row[1])):
        cells = (reports[version].get((group, kind), "–") for version in versions)
        yield f"| {group} | {kind} | {' | '.join(cells)} |"


def written(text: str, lines: Iterable[str]) -> str:
    """Return a document with the table between its marks."""
    before, rest = text.split(BEGIN)
    return "\n".join([f"{before}{BEGIN}\n", *lines, f"\n{END}{rest.split(END, 1)[1]}"])


def main(reports: Iterable[Path]) -> None:
    """Write the document's table."""
    DOCUMENT.write_text(written(DOCUMENT.read_text(), table(dict(map(read, reports)))))


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]))
