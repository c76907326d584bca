"""What is said about a program that fails in a rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.rehearsal import Resumed
from harness.rehearse.passes import ProgramFailed, _check


def test_the_last_lines_of_a_program_that_fails_are_shown(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text("Traceback\nNameError: name 'loss' is not defined\nharness: why\n")

    with pytest.raises(ProgramFailed, match=r"exit code 1.*\n.*Traceback\n.*NameError.*\n.*harness: why"):
        _check(1, [Resumed(8)], output)
