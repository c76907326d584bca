"""Every planted defect fits the code as it is: a table that has grown old would plant nothing."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.planted.defects import DEFECTS, ROOT, Defect


@pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name for defect in DEFECTS])
def test_a_defect_can_be_planted_and_python_reads_the_file_all_the_same(defect: Defect, tmp_path: Path) -> None:
    copy = tmp_path / defect.path
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / defect.path, copy)
    before = ast.dump(ast.parse(copy.read_text()))

    defect.plant(tmp_path)

    assert ast.dump(ast.parse(copy.read_text())) != before
    assert (ROOT / defect.near).is_dir()


def test_there_are_thirty_at_least_and_some_in_every_room() -> None:
    assert len(DEFECTS) >= 30
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    harness = ("agent", "core", "ipc", "node", "snapshots", "trainer", "watch")
    rooms = {f"harness/{name}" for name in harness}
    assert {room(Path(defect.path)) for defect in DEFECTS} == {"cloud", *rooms}


def room(path: Path) -> str:
    return "cloud" if path.parts[0] == "cloud" else "/".join(path.parts[:2])


def test_a_defect_that_does_not_fit_is_told() -> None:
    defect = Defect("a defect", "pyproject.toml", (("this stands nowhere", ""),), "tests/unit")

    with pytest.raises(ValueError, match="0 times"):
        defect.plant(ROOT)
