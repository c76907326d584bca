"""Aside: what is kept is what was judged, whatever the program does meanwhile."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cloud.digest import crc64nvme, format_crc
from harness.watch import aside
from harness.watch.aside import Changed, set_aside, sweep
from harness.watch.look import Look, Seen
from harness.watch.ours import ASIDE, folder_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "out" / "checkpoint-1"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"a" * 1000)
    (folder / "deep" / "b.bin").write_bytes(b"b" * 10)
    (folder / "empty").touch()
    return tmp_path / "out"


def files(root: Path) -> dict[str, Seen]:
    return dict(Look.at(root).files)


@pytest.mark.parametrize("may_link", [True, False])
def test_each_file_is_kept_with_its_sums(root: Path, may_link: bool) -> None:
    kept = set_aside(root, files(root), "1", may_link=may_link)

    assert [file.path for file in kept.files] == ["checkpoint-1/a.bin", "checkpoint-1/deep/b.bin", "checkpoint-1/empty"]
    for file in kept.files:
        data = (root / file.path).read_bytes()
        assert file.source.read_bytes() == data
        assert (file.entry.size, file.entry.crc64nvme) == (len(data), format_crc(crc64nvme(data)))
    assert kept.bytes == 1010
    assert kept.how in ("reflink", "link" if may_link else "copy")


def test_what_the_program_deletes_or_writes_anew_is_kept(root: Path) -> None:
    kept = set_aside(root, files(root), "1", may_link=False)
    (root / "checkpoint-1" / "a.bin").write_bytes(b"x" * 1000)
    (root / "checkpoint-1" / "deep" / "b.bin").unlink()
    assert [len(file.source.read_bytes()) for file in kept.files] == [1000, 10, 0]
    assert kept.files[0].source.read_bytes() == b"a" * 1000
    kept.let_go()
    assert not kept.folder.exists()
    assert (root / "checkpoint-1" / "a.bin").exists()


def test_what_a_link_leads_to_is_kept_and_gets_no_second_name(root: Path, tmp_path: Path) -> None:
    """It is not the program's checkpoint alone: another one may write there."""
    (tmp_path / "base").write_bytes(b"base")
    (root / "link").symlink_to(tmp_path / "base")
    seen = {"link": Seen.of((tmp_path / "base").stat())}
    (kept,) = set_aside(root, seen, "1", may_link=True).files
    assert kept.source.read_bytes() == b"base"
    assert not kept.source.samefile(tmp_path / "base")


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(root: Path) -> None:
    seen = files(root)
    path = root / next(iter(seen))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Changed):
        set_aside(root, seen, "1", may_link=False)


@pytest.mark.parametrize("what", ["grown", "written", "replaced", "gone", "link"])
def test_what_has_changed_since_it_was_judged_is_not_kept(root: Path, what: str) -> None:
    seen, path = files(root), root / "checkpoint-1" / "a.bin"
    if what == "grown":
        with path.open("ab") as file:
            file.write(b"more")
    elif what == "written":
        path.write_bytes(b"y" * 1000)
    elif what == "replaced":
        (root / "other").write_bytes(b"a" * 1000)
        (root / "other").replace(path)
    else:
        path.unlink()
        if what == "link":
            path.symlink_to("/etc/hostname")
    with pytest.raises((Changed, OSError)):
        set_aside(root, seen, "1", may_link=False)
    assert list((folder_of(root) / ASIDE).iterdir()) == []


@pytest.mark.parametrize("goes", [False, True])
@pytest.mark.parametrize("may_link", [True, False])
def test_what_changes_while_it_is_read_is_not_kept(
    root: Path, may_link: bool, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes as well has no name by which to see, once all are kept, that it has changed."""
    monkeypatch.setattr(aside, "_clone", lambda source, target: False)
    real = aside._read

    def read(source: int, *rest: object) -> object:
        found, path = real(source, *rest), root / "checkpoint-1" / "a.bin"  # type: ignore[arg-type]
        if path.exists():
            with path.open("r+b") as file:
                file.write(b"z")
            if goes:
                path.unlink()
        return found

    monkeypatch.setattr(aside, "_read", read)
    seen = files(root)
    with pytest.raises(Changed):
        set_aside(root, seen, "1", may_link=may_link)
    assert list((folder_of(root) / ASIDE).iterdir()) == []


def test_without_room_nothing_is_left_of_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(aside, "_clone", lambda source, target: False)
    monkeypatch.setattr(aside, "_write", full)
    with pytest.raises(OSError, match="No space"):
        set_aside(root, files(root), "1", may_link=False)
    assert list((folder_of(root) / ASIDE).iterdir()) == []


def test_it_is_given_up_between_two_pieces(root: Path) -> None:
    with pytest.raises(InterruptedError):
        set_aside(root, files(root), "1", may_link=False, given_up=lambda: True)
    assert list((folder_of(root) / ASIDE).iterdir()) == []


def test_what_an_earlier_agent_kept_is_swept(root: Path) -> None:
    set_aside(root, files(root), "1", may_link=False)
    before = files(root)
    sweep(root)
    assert not (folder_of(root) / ASIDE).exists()
    assert files(root) == before, "a look does not see our own folder"
