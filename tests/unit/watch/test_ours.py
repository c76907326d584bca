"""Ours: beside the watched directory, so that a program finds nothing in it that it has not written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.watch.ours import folder_of, is_ours


def test_it_lies_beside_the_directory_whether_that_is_there_or_not(tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / ".harness-out"
    assert folder_of(tmp_path / "deep" / "out") == wanted
    (tmp_path / "deep" / "out").mkdir(parents=True)
    assert folder_of(tmp_path / "deep" / "out") == wanted


def test_a_link_to_a_directory_has_the_folder_of_that(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert folder_of(tmp_path / "link") == folder_of(tmp_path / "real") == tmp_path / ".harness-real"


@pytest.mark.parametrize("mount", ["/", "/proc"])
def test_in_a_mount_it_lies_inside(mount: str) -> None:
    assert folder_of(Path(mount)) == Path(mount) / ".harness"
    assert is_ours(".harness")
    assert not is_ours(".harnessed")


def test_where_nothing_can_be_made_beside_it_it_lies_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert folder_of(tmp_path / "out") == tmp_path / "out" / ".harness"
