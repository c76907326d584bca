"""Lineage: what is newer than a snapshot, told by what lay there then, and by no clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.watch.lineage import Lineage
from harness.watch.look import Seen
from harness.watch.ours import LINEAGE, folder_of


def seen(number: int) -> Seen:
    return Seen(1, number, (0, number))


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    folder_of(tmp_path / "out").mkdir()
    made = Lineage(tmp_path / "out")
    made.begin(100, [seen(2)], [seen(1)])
    made.add(101, [seen(3)], [])
    return made


def ages(lineage: Lineage, order: int) -> list[int]:
    standing = lineage.standing(order)
    assert standing is not None
    return [standing.age([seen(number)]) for number in (1, 2, 3, 4)]


def test_what_was_there_is_older_and_what_was_not_is_newer(lineage: Lineage) -> None:
    assert ages(lineage, 100) == [-1, 0, 1, 1]
    assert ages(lineage, 101) == [-1, -1, 0, 1]


def test_a_snapshot_that_was_taken_elsewhere_is_newer_than_all(lineage: Lineage) -> None:
    assert ages(lineage, 102) == [-1, -1, -1, -1]


def test_one_that_is_older_than_what_the_directory_began_with_is_older_than_all(lineage: Lineage) -> None:
    assert ages(lineage, 99) == [1, 1, 1, 1]


def test_a_file_with_another_one_that_is_new_is_newer(lineage: Lineage) -> None:
    standing = lineage.standing(101)
    assert standing is not None
    assert standing.age([seen(3), seen(4)]) == 1


def test_what_came_before_a_beginning_is_forgotten(lineage: Lineage) -> None:
    lineage.begin(200, [seen(4)], [])
    assert ages(lineage, 200) == [1, 1, 1, 0]


def test_a_line_that_was_cut_off_does_not_hide_the_others(lineage: Lineage, tmp_path: Path) -> None:
    path = folder_of(tmp_path / "out") / LINEAGE
    path.write_bytes(path.read_bytes()[:-5])
    assert ages(lineage, 100) == [-1, 0, 1, 1]


def test_where_it_cannot_be_written_nothing_is_known(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path / "out")  # the folder is not there
    lineage.add(1, [seen(1)], [])
    assert lineage.standing(1) is None
