from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.ipc.channel import listen
from harness.ipc.runtime_dir import RuntimeDir
from tests.support.needs import lacking
from tests.support.open_files import open_files

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path) -> RuntimeDir:
    place = RuntimeDir.of(tmp_path, "/mnt/store", "run")
    place.prepare()
    return place


def test_a_run_has_one_place_on_a_host(tmp_path: Path) -> None:
    def of(store: str, run: str) -> Path:
        return RuntimeDir.of(tmp_path, store, run).directory

    assert of("/a", "run") == of("/a", "run")
    assert len({of("/a", "run"), of("/b", "run"), of("/a", "other"), of("/a\0run", "")}) == 4


def test_the_place_is_private(place: RuntimeDir) -> None:
    assert place.directory.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a name that leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="harness-") as directory:
        yield Path(directory)


@pytest.mark.parametrize("umask", [0o002, 0o077], ids=oct)
def test_what_is_made_for_it_is_this_users_alone_whatever_the_umask(short: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        place = RuntimeDir.of(short / "above" / "parent", "/mnt/store", "run")
        place.prepare()
        listen(place.socket).close()
    finally:
        os.umask(before)

    modes = [path.stat().st_mode & 0o777 for path in (place.directory.parent.parent, place.directory.parent)]
    assert modes == [0o700, 0o700]
    assert place.directory.stat().st_mode & 0o777 == 0o700
    assert place.socket.stat().st_mode & 0o777 == 0o600


def linked(path: Path) -> None:
    path.with_name("elsewhere").mkdir(0o700)
    path.symlink_to("elsewhere")


def writable(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def writable_by_the_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def no_directory(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("which", ["parent", "leaf"])
@pytest.mark.parametrize("unsafe", [linked, writable, writable_by_the_group, no_directory])
def test_a_place_that_another_user_could_put_something_into_is_refused(
    tmp_path: Path, which: str, unsafe: Callable[[Path], None]
) -> None:
    """Whoever made the parent first took the agent's place, and was given every snapshot."""
    place = RuntimeDir.of(tmp_path / "parent", "/mnt/store", "run")
    if which == "leaf":
        place.directory.parent.mkdir(0o700)
    unsafe(place.directory.parent if which == "parent" else place.directory)
    before = open_files()

    with pytest.raises(PermissionError, match=r"is a link, or not a directory|others may write to .* chmod go-w"):
        place.prepare()

    assert open_files() <= before


def test_a_place_below_a_directory_for_everybody_is_safe_where_each_may_rename_only_their_own(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)

    RuntimeDir.of(tmp_path / "tmp", "/mnt/store", "run").prepare()


@pytest.mark.root
@pytest.mark.parametrize("which", ["parent", "leaf"])
def test_a_place_that_another_user_has_made_is_refused(tmp_path: Path, which: str) -> None:
    if os.geteuid() != 0:
        lacking("root", "to become somebody else")
    place = RuntimeDir.of(tmp_path / "parent", "/mnt/store", "run")
    place.directory.mkdir(0o700, parents=True)
    os.chown(place.directory.parent if which == "parent" else place.directory, NOBODY, NOBODY)

    with pytest.raises(PermissionError, match=f"belongs to another user \\(uid {NOBODY}\\)"):
        place.prepare()


def test_the_lock_is_had_by_one_and_goes_with_its_descriptor(place: RuntimeDir) -> None:
    first = place.try_lock()
    assert first is not None
    assert place.try_lock() is None

    os.close(first)
    second = place.try_lock()

    assert second is not None
    os.close(second)


def test_whoever_has_the_lock_is_named(place: RuntimeDir) -> None:
    place.prepare()
    assert place.holder() == ""
    lock = place.try_lock()
    assert lock is not None

    assert place.holder() == f": process {os.getpid()}"
    os.close(lock)


def test_the_lock_dies_with_its_process(place: RuntimeDir) -> None:
    program = (
        "import pathlib, sys; from harness.ipc.runtime_dir import RuntimeDir; "
        f"assert RuntimeDir(pathlib.Path({str(place.directory)!r})).try_lock() is not None; "
        "print('locked', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert place.try_lock() is None
        process.kill()

    lock = place.try_lock()
    assert lock is not None
    os.close(lock)


def test_the_socket_of_a_usual_place_is_short_enough(tmp_path: Path) -> None:
    usual = RuntimeDir.of(Path("/run/user/1234567890/harness"), "s3://bucket/prefix", "x" * 100)

    assert len(str(usual.socket)) <= 107
