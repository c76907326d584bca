"""What is said about a program that fails in a rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.rehearsal import AnyLine, Resumed, Stepped
from harness.rehearse.passes import ProgramFailed, _check

FAILED = "NameError: name 'loss' is not defined\n"
HINT = "the loop yields nothing"


def said(lines: list[AnyLine], text: str, tmp_path: Path) -> str:
    output = tmp_path / "output"
    output.write_text(text)
    with pytest.raises(ProgramFailed) as failed:
        _check(1, lines, output)
    return str(failed.value)


def test_a_variable_that_is_missing_behind_a_loop_that_yielded_nothing_is_explained(tmp_path: Path) -> None:
    assert HINT in said([Resumed(8)], FAILED, tmp_path)


@pytest.mark.parametrize(
    ("lines", "text"), [([Resumed(8), Stepped(9, None, {}, {})], FAILED), ([Resumed(8)], "KeyError: 'loss'\n")]
)
def test_other_failures_are_not(lines: list[AnyLine], text: str, tmp_path: Path) -> None:
    assert HINT not in said(lines, text, tmp_path)
