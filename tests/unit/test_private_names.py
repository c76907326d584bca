"""docs/versions.md lists every private name of another library that the harness uses, and no other."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.world import ROOT

PRIVATE = re.compile(r"_[a-z]\w*")
DOCUMENTED = {"_asdict", "_exit", "_getframe"}
"""Python's own, which only look private."""
OURS = {"_harness_completed", "_harness_hook", "_override", "_s"}
"""What the harness sets at objects of others, and ends of words."""


def words(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each private name in a file, and whether the file makes it."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, True
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, True
            case ast.Attribute(attr=name, value=ast.Name(id=owner), ctx=ast.Store()):
                yield name, owner in ("self", "cls")
            case ast.Attribute(attr=name):
                yield name, False
            case ast.Constant(value=str(name)) | ast.alias(name=name):
                for part in name.split("."):
                    yield part, False


@functools.cache
def found() -> set[tuple[str, bool]]:
    """All of them in all files, and whether one makes it."""
    paths = [path for folder in ("harness", "cloud") for path in (ROOT / folder).rglob("*.py")]
    return {name for path in paths for name in words(ast.parse(path.read_text()))}


def used() -> set[str]:
    return {name for name, _ in found() if PRIVATE.fullmatch(name)}


TABLE = (ROOT / "docs/versions.md").read_text().partition("## Private names")[2]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| ")][2:]
LISTED = {
    part
    for row in ROWS
    for name in re.findall(r"`([\w.]+)`", row[1])
    for part in name.split(".")
    if PRIVATE.fullmatch(part)
}


def test_every_private_name_of_a_library_is_listed() -> None:
    """But for one that the harness has, too: those are listed by hand."""
    made = {name for name, is_made in found() if is_made}
    assert used() - made - DOCUMENTED - OURS <= LISTED


def test_no_name_is_listed_that_is_not_used() -> None:
    assert used() >= LISTED


def test_each_is_noticed_by_tests_that_are_there() -> None:
    assert len(ROWS) > 10
    for row in ROWS:
        (where,) = re.findall(r"`(tests/[\w/.]+)`", row[4])
        assert Path(ROOT / where).exists(), where
