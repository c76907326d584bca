"""DirectoryStore where a directory differs from other stores: faults, power, links, other processes, room."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud.digest import crc64nvme
from cloud.directory.filesystem import FileSystem
from cloud.directory.store import DirectoryStore
from cloud.errors import (
    AlreadyExists,
    CannotCopy,
    CloudError,
    Denied,
    Full,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.store import CHUNK_BYTES, Receipt
from tests.support.clock import FakeClock
from tests.support.failing_disk import failing_disk
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[4]
NEVER = Deadline.never()


class FaultyFileSystem(FileSystem):
    """Writes down every call; makes calls of `verb` fail, all of them or those from the `nth` on."""

    def __init__(self, verb: str = "", number: int = 0, *, nth: int = 1, once: bool = False) -> None:
        self.verb, self.number, self.nth, self.once = verb, number, nth, once
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in FileSystem.__dict__ or name.startswith("_"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            count = self.calls.count(name)
            if name == self.verb and (count == self.nth if self.once else count >= self.nth):
                raise OSError(self.number, os.strerror(self.number))
            return found(*args, **kwargs)

        return call

    def during(self, act: Callable[[], object]) -> list[str]:
        """The calls that change something which `act` makes, in order."""
        self.calls.clear()
        act()
        changing = {
            "write",
            "pwrite",
            "fdatasync",
            "fsync",
            "rename",
            "link",
            "unlink",
            "mkdir",
            "rmdir",
            "ftruncate",
            "fallocate",
        }
        return [name for name in self.calls if name in changing]


class TinyDisk(FileSystem):
    """Has room for `room` bytes, written or reserved."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.reserved = 0

    def write(self, fd: int, data: memoryview) -> int:  # type: ignore[override]
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.write(fd, data[: self.room])
        self.room -= count
        return count

    def fallocate(self, fd: int, size: int) -> None:  # type: ignore[override]
        if size - self.reserved > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size - self.reserved
        self.reserved = size

    def ftruncate(self, fd: int, size: int) -> None:  # type: ignore[override]
        self.room += self.reserved - size
        self.reserved = size


def put(store: DirectoryStore, key: str, data: bytes = b"x") -> Receipt:
    return store.put(key, memoryview(data), deadline=NEVER)


def put_if_absent(store: DirectoryStore, key: str, data: bytes = b"x") -> None:
    store.put_if_absent(key, data, deadline=NEVER)


def keys(store: DirectoryStore) -> list[str]:
    return [info.key for info in store.list("", deadline=NEVER)]


def hidden(root: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in root.rglob(".*"))


# ---------------------------------------------------------------------------------------------------- order, durability


def test_a_put_syncs_the_file_before_and_every_directory_after_the_rename(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = DirectoryStore(tmp_path, fs=fs)

    calls = fs.during(lambda: put(store, "run/snapshots/shard"))

    assert calls[:5] == ["mkdir", "mkdir", "write", "fdatasync", "rename"]
    assert calls[5:] == ["fsync", "fsync", "fsync", "unlink"]  # snapshots, run, root; then the draft's name, gone


def test_a_commit_is_a_link_and_never_a_rename(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = DirectoryStore(tmp_path, fs=fs)

    calls = fs.during(lambda: put_if_absent(store, "run/commit"))

    assert calls == ["mkdir", "write", "fdatasync", "link", "unlink", "fsync", "fsync", "unlink"]


def test_who_is_told_that_a_key_is_taken_has_waited_until_that_is_durable(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = DirectoryStore(tmp_path, fs=fs)
    put_if_absent(store, "run/commit")

    fs.calls.clear()
    with pytest.raises(AlreadyExists):
        put_if_absent(store, "run/commit")

    assert fs.calls[fs.calls.index("link") :].count("fsync") == 2


def test_a_delete_syncs_the_directory_that_remains(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = DirectoryStore(tmp_path, fs=fs)
    put(store, "run/a/1")
    put(store, "run/b")

    assert fs.during(lambda: store.delete("run/a/1", deadline=NEVER)) == ["unlink", "rmdir", "rmdir", "fsync"]
    assert not (tmp_path / "run" / "a").exists()
    assert (tmp_path / "run").exists()


def test_an_emptied_store_keeps_its_root(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    put(store, "run/a/1")

    store.delete("run/a/1", deadline=NEVER)

    assert list((tmp_path / "store").iterdir()) == []


# --------------------------------------------------------------------------------------------------------------- faults


FAULTS = [
    ("write", errno.EIO, Unavailable),
    ("write", errno.ENOSPC, Full),
    ("write", errno.EDQUOT, Full),
    ("fdatasync", errno.EIO, Unavailable),
    ("fdatasync", errno.ENOSPC, Full),
    ("mkdir", errno.EACCES, Denied),
    ("mkdir", errno.EROFS, Denied),
    ("mkdir", errno.ENOSPC, Full),
]


@pytest.mark.parametrize(
    ("write", "verb", "number", "kind"),
    [
        *((put, *fault) for fault in [*FAULTS, ("rename", errno.EIO, Unavailable)]),
        *((put_if_absent, *fault) for fault in [*FAULTS, ("link", errno.EPERM, Denied)]),
    ],
)
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, write: Callable[..., object], verb: str, number: int, kind: type[CloudError]
) -> None:
    fs = FaultyFileSystem(verb, number)
    store = DirectoryStore(tmp_path, fs=fs)

    with pytest.raises(kind, match="run/a") as caught:
        write(store, "run/a", b"bytes")

    assert type(caught.value) is kind
    assert str(tmp_path) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert keys(store) == []
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("write", [put, put_if_absent], ids=["put", "put_if_absent"])
def test_a_directory_that_cannot_be_synced_leaves_the_outcome_unknown(
    tmp_path: Path, write: Callable[..., object]
) -> None:
    store = DirectoryStore(tmp_path, fs=FaultyFileSystem("fsync", errno.EIO))

    with pytest.raises(OutcomeUnknown, match="may not be durable"):
        write(store, "run/a", b"bytes")

    assert hidden(tmp_path) == []


def test_an_unknown_outcome_becomes_success_only_when_the_directory_is_synced(tmp_path: Path) -> None:
    fs = FaultyFileSystem("fsync", errno.EIO, once=True)
    store = RetryingStore(DirectoryStore(tmp_path, fs=fs), sleep=FakeClock().sleep)

    store.put_if_absent("run/commit", b"mine", deadline=NEVER)

    assert fs.calls.count("link") == 2  # asked again, told AlreadyExists after a sync, and found its own bytes
    assert fs.calls.count("fsync") == 1 + 2


def test_short_and_interrupted_writes_are_continued(tmp_path: Path) -> None:
    class Stutters(FileSystem):
        calls = 0

        def write(self, fd: int, data: memoryview) -> int:  # type: ignore[override]
            self.calls += 1
            if self.calls % 3 == 0:
                raise InterruptedError
            return os.write(fd, data[:7])

    store = DirectoryStore(tmp_path, fs=Stutters())
    data = bytes(range(100))

    assert put(store, "run/a", data).crc64nvme == crc64nvme(data)
    assert (tmp_path / "run" / "a").read_bytes() == data


def test_a_file_of_the_wrong_size_is_never_published(tmp_path: Path) -> None:
    class Lies(FileSystem):
        def write(self, fd: int, data: memoryview) -> int:  # type: ignore[override]
            os.write(fd, data[:3])
            return len(data)

    store = DirectoryStore(tmp_path, fs=Lies())

    with pytest.raises(Unavailable, match="5 bytes were to be written, and the file has 3"):
        put(store, "run/a", b"bytes")
    assert keys(store) == []


def test_a_disk_that_reads_badly_is_unavailable(tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path), "run/a")
    store = DirectoryStore(tmp_path, fs=FaultyFileSystem("preadv", errno.EIO))

    with pytest.raises(Unavailable, match="Input/output error"):
        store.read("run/a", limit_bytes=10, deadline=NEVER)


def test_a_deadline_ends_a_put_between_two_chunks(tmp_path: Path) -> None:
    clock = FakeClock()
    store = DirectoryStore(tmp_path)
    sent: list[int] = []

    def progress(count: int, **_: Any) -> None:
        sent.append(count)
        clock.advance(10)

    with pytest.raises(Unavailable, match="no time left"):
        store.put("run/a", memoryview(bytes(CHUNK_BYTES + 1)), deadline=Deadline.after(5, clock), progress=progress)
    assert sent == [CHUNK_BYTES]
    assert keys(store) == hidden(tmp_path) == []


# --------------------------------------------------------------------------------------------------- what may lie in it


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "link"])
def test_what_is_no_file_is_not_there_and_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    """A named pipe in the place of a shard: every verification, and every start, waited for its other end."""
    store = DirectoryStore(tmp_path / "store")
    put(store, "run/real")
    path = tmp_path / "store" / "run" / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("real")

    for call in (
        lambda: store.read("run/odd", limit_bytes=100, deadline=NEVER),
        lambda: store.get("run/odd", memoryview(bytearray(1)), deadline=NEVER),
        lambda: store.stat("run/odd", deadline=NEVER),
    ):
        with pytest.raises(NotFound):
            call()
    assert keys(store) == ["run/real"]


def test_a_link_out_of_the_store_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    store = DirectoryStore(tmp_path / "store")
    put(store, "run/real")
    (tmp_path / "store" / "run" / "directory").symlink_to(outside)
    (tmp_path / "store" / "run" / "file").symlink_to(outside / "secret")

    with pytest.raises(CloudError):
        store.read("run/directory/secret", limit_bytes=100, deadline=NEVER)
    with pytest.raises(NotFound, match="not a file"):
        store.read("run/file", limit_bytes=100, deadline=NEVER)
    with pytest.raises(Denied):
        put(store, "run/directory/new")
    store.delete("run/directory/secret", deadline=NEVER)
    put(store, "run/file", b"ours")

    assert keys(store) == ["run/file", "run/real"]
    assert (outside / "secret").read_text() == "secret"
    assert [path.name for path in outside.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("shared", "directories", "files"), [(False, 0o700, 0o600), (True, 0o755, 0o644)], ids=["ours alone", "shared"]
)
def test_what_a_store_makes_is_its_users_alone_unless_it_was_asked_otherwise(
    tmp_path: Path, *, shared: bool, directories: int, files: int
) -> None:
    """Weights below a directory that everybody may look into could be read by all."""
    before = os.umask(0o022)
    try:
        store = DirectoryStore(tmp_path / "above" / "root", shared=shared)
        receipt = put(store, "run/snapshots/a")
        put_if_absent(store, "run/commits/a")
        store.reserve(100_000)
        store.copy("run/snapshots/a", "run/snapshots/b", receipt, deadline=NEVER)
    finally:
        os.umask(before)

    found = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "above").rglob("*")}
    assert {mode for path, mode in found.items() if path.is_dir()} == {directories}
    assert {mode for path, mode in found.items() if path.is_file()} == {files}
    assert (tmp_path / "above").stat().st_mode & 0o777 == directories


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    """Set-group-id and a group that may write: how a team shares a disk."""
    tmp_path.chmod(0o2775)
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2775)

    put(DirectoryStore(tmp_path), "run/commits/a")

    assert tmp_path.stat().st_mode & 0o7777 == 0o2775
    assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o2775


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")

    put(DirectoryStore(tmp_path / "store"), "run/a")

    assert (tmp_path / "disk" / "run" / "a").read_bytes() == b"x"


def test_strangers_files_are_not_listed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    put(store, "run/a")
    for name in (".hidden", "with space", "lost+found~", "-dash"):
        (tmp_path / "run" / name).write_text("x")
    os.mkfifo(tmp_path / "run" / "pipe")

    assert keys(store) == ["run/a"]


@pytest.mark.parametrize("key", ["run/a/below", "run"])
def test_a_key_cannot_be_both_an_object_and_a_directory(tmp_path: Path, key: str) -> None:
    store = DirectoryStore(tmp_path)
    put(store, "run/a")

    with pytest.raises(Denied):
        put(store, key)
    assert keys(store) == ["run/a"]


def test_a_name_too_long_for_the_file_system_is_denied(tmp_path: Path) -> None:
    with pytest.raises(Denied, match="File name too long"):
        put(DirectoryStore(tmp_path), "run/" + "a" * 300)


def test_a_root_that_vanished_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    (tmp_path / "store").rmdir()

    with pytest.raises(Unavailable, match="removed or unmounted"):
        keys(store)
    with pytest.raises(Unavailable):
        store.stat("run/a", deadline=NEVER)
    with pytest.raises(Unavailable):
        put(store, "run/a")
    assert not (tmp_path / "store").exists()


def test_a_file_cannot_be_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(Denied, match="Not a directory"):
        DirectoryStore(tmp_path / "file")


def test_a_listing_opens_only_what_can_match(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = DirectoryStore(tmp_path, fs=fs)
    for run in range(10):
        put(store, f"run{run}/commits/1.json")

    fs.calls.clear()
    assert len(list(store.list("run7/commits/", deadline=NEVER))) == 1
    assert fs.calls.count("scandir") == 1
    assert len(list(store.list("", after="run7/commits/0", deadline=NEVER))) == 3  # run7, run8, run9
    assert fs.calls.count("scandir") == 1 + 1 + 2 * 3


# ------------------------------------------------------------------------------------------------------ other processes


CLAIM = """
import sys
from pathlib import Path
from cloud.directory.store import DirectoryStore
from cloud.errors import AlreadyExists
from cloud.notice import Deadline

store = DirectoryStore(Path(sys.argv[1]))
sys.stdin.readline()
for race in range(50):
    try:
        store.put_if_absent(f"run/{race}", sys.argv[2].encode(), deadline=Deadline.never())
        print(race)
    except AlreadyExists:
        pass
"""

HOLD = """
import os, sys
from pathlib import Path
from cloud.directory.store import DirectoryStore
from cloud.directory.filesystem import FileSystem
from cloud.notice import Deadline

class Stops(FileSystem):
    def fdatasync(self, fd):
        if self.armed:
            print("writing", flush=True)
            sys.stdin.readline()

fs = Stops()
fs.armed = False
store = DirectoryStore(Path(sys.argv[1]), fs=fs)
store.reserve(1 << 20)
fs.armed = True
store.put("run/deep/shard", memoryview(b"bytes"), deadline=Deadline.never())
"""


def start(program: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *args], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_one_of_many_processes_wins_a_key(tmp_path: Path) -> None:
    racers = [start(CLAIM, str(tmp_path), str(number)) for number in range(4)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [{int(line) for line in racer.communicate()[0].split()} for racer in racers]

    assert sorted(race for races in won for race in races) == list(range(50))
    for number, races in enumerate(won):
        assert all((tmp_path / "run" / str(race)).read_text() == str(number) for race in races)


def test_what_a_killed_writer_left_is_invisible_and_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    writer = start(HOLD, str(tmp_path))
    assert writer.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout.readline() == "writing\n"
    store = DirectoryStore(tmp_path)

    assert keys(store) == []
    assert hidden(tmp_path) == [".reserve", ".tmp"]
    assert store.sweep() == 0
    assert hidden(tmp_path) == [".reserve", ".tmp"]

    writer.send_signal(signal.SIGKILL)
    writer.wait(timeout=HANG_S)
    writer.stdin.close()
    writer.stdout.close()

    later = DirectoryStore(tmp_path)
    assert hidden(tmp_path) == [".tmp"]  # opening a store gives a dead process's reservation back
    assert later.sweep() == 1
    assert list(tmp_path.iterdir()) == []  # and the directories that held only the draft are gone


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_sweep_passes_over_a_directory_that_it_cannot_read(tmp_path: Path, number: int) -> None:
    """Another user's run in a common store, or a bad block, ended every start of every run in it."""

    class Unreadable(FileSystem):
        def open(self, path: Any, *args: Any, **kwargs: Any) -> int:  # type: ignore[override]
            if path == "theirs":
                raise OSError(number, os.strerror(number))
            return os.open(path, *args, **kwargs)

    for directory in ("ours", "theirs"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / ".tmp-of-a-dead-writer").touch()

    assert DirectoryStore(tmp_path, fs=Unreadable()).sweep() == 1

    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    assert hidden(tmp_path) == [".tmp"]


# ----------------------------------------------------------------------------------------------------------------- room


def test_a_full_disk_is_told_with_numbers(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, fs=TinyDisk(1000))

    with pytest.raises(Full, match=r"run/a in .*No space left on device; 2,000 bytes needed, [\d,]+ free"):
        put(store, "run/a", bytes(2000))
    assert keys(store) == hidden(tmp_path) == []


def test_a_put_takes_from_the_reservation_what_it_cannot_get_otherwise(tmp_path: Path) -> None:
    disk = TinyDisk(1000)
    store = DirectoryStore(tmp_path, fs=disk)
    store.reserve(700)

    put(store, "run/small", bytes(100))
    assert disk.reserved == 700
    put(store, "run/large", bytes(800))  # 200 were free

    assert disk.reserved == 100
    with pytest.raises(Full):
        put(store, "run/too-large", bytes(200))
    assert keys(store) == ["run/large", "run/small"]


def test_a_reservation_that_cannot_be_had_is_full_and_keeps_what_there_was(tmp_path: Path) -> None:
    disk = TinyDisk(1000)
    store = DirectoryStore(tmp_path, fs=disk)
    store.reserve(600)

    with pytest.raises(Full, match="2,000 bytes needed"):
        store.reserve(2000)

    assert disk.reserved == 600
    store.close()
    assert disk.reserved == 0
    assert hidden(tmp_path) == []


def test_where_room_cannot_be_held_it_is_looked_at(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, fs=FaultyFileSystem("fallocate", errno.EOPNOTSUPP))

    store.reserve(1000)
    with pytest.raises(Full):
        store.reserve(1 << 60)
    assert hidden(tmp_path) == []


class OwnDisk(FileSystem):
    """A disk of so many bytes, of which nothing else takes any but the files of one store."""

    def __init__(self, size: int) -> None:
        self.size = size

    def statvfs(self, path: Any) -> Any:
        taken = sum(file.stat().st_blocks * 512 for file in Path(path).rglob("*") if file.is_file())
        return SimpleNamespace(f_fsid=os.statvfs(path).f_fsid, f_frsize=1, f_bavail=self.size - taken)


def test_a_reservation_is_room_that_others_do_not_see_and_its_owner_does(tmp_path: Path) -> None:
    size = 8 << 20
    free = 100 * size
    store = DirectoryStore(tmp_path, fs=OwnDisk(free))
    assert store.free_bytes() == free

    store.reserve(size)

    reserve = next(tmp_path.glob(".reserve-*"))
    assert reserve.stat().st_blocks * 512 >= size
    assert store.free_bytes() == free
    assert keys(store) == []
    store.reserve(size // 2)
    assert reserve.stat().st_size == size // 2
    store.close()
    assert hidden(tmp_path) == []


def test_a_missing_object_names_the_store(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"run/a is not in {tmp_path}"):
        DirectoryStore(tmp_path).read("run/a", limit_bytes=1, deadline=NEVER)


# ---------------------------------------------------------------------------------------------------------- copying


def test_a_copy_is_a_second_name_and_is_durable_when_it_returns(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = DirectoryStore(tmp_path, fs=fs)
    receipt = put(store, "run/a/1", b"bytes")
    store.put("run/b/0", memoryview(b"there"), deadline=NEVER)

    done = fs.during(lambda: store.copy("run/a/1", "run/b/1", receipt, deadline=NEVER))

    assert done == ["link", "fsync", "fsync", "fsync"]  # the file itself was synced when it was put
    assert (tmp_path / "run/a/1").samefile(tmp_path / "run/b/1")
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_a_file_can_have_no_second_name_a_copy_is_refused(tmp_path: Path, number: int) -> None:
    store = DirectoryStore(tmp_path, fs=FaultyFileSystem("link", number))
    receipt = put(store, "run/a", b"bytes")

    with pytest.raises(CannotCopy, match=os.strerror(number)):
        store.copy("run/a", "run/b", receipt, deadline=NEVER)

    assert keys(store) == ["run/a"]
    assert store.put("run/b", memoryview(b"bytes"), deadline=NEVER) == receipt


def test_a_copy_whose_name_may_not_be_durable_is_known_when_it_is_asked_for_again(tmp_path: Path) -> None:
    fs = FaultyFileSystem("fsync", errno.EIO, nth=4, once=True)
    store = RetryingStore(DirectoryStore(tmp_path, fs=fs), sleep=FakeClock().sleep)
    receipt = put(store, "run/a", b"bytes")  # two of them: the directories

    store.copy("run/a", "run/b", receipt, deadline=NEVER)

    assert fs.calls.count("link") == 2
    assert fs.calls.count("fsync") == 2 + 2 + 2
    assert hidden(tmp_path) == []


def test_a_failed_fsync_is_not_made_good_by_one_that_has_nothing_to_write(tmp_path: Path) -> None:
    """Between the two the directory is changed, as by a put's next attempt."""
    fs = FaultyFileSystem("fsync", errno.EIO, nth=3, once=True)
    store = DirectoryStore(tmp_path, fs=fs)
    receipt = put(store, "run/a", b"bytes")
    with pytest.raises(OutcomeUnknown):
        store.copy("run/a", "run/b", receipt, deadline=NEVER)

    done = fs.during(lambda: store.copy("run/a", "run/b", receipt, deadline=NEVER))

    assert done == ["link", "unlink", "fsync", "fsync"]  # the unlinked is a draft
    assert keys(store) == ["run/a", "run/b"]


@pytest.mark.root
def test_a_copy_that_a_disk_did_not_keep_is_never_told_durable(tmp_path: Path) -> None:
    """ext4 gives up its journal, says so once, and says yes to every later fsync of what has not changed since."""
    with failing_disk(tmp_path, 16 * 1024 * 1024) as disk:
        store = RetryingStore(DirectoryStore(disk.root / "store"), sleep=FakeClock().sleep)
        receipt = store.put("run/a/1", memoryview(b"bytes"), deadline=NEVER)
        disk.fail()

        with pytest.raises((OutcomeUnknown, Denied, Unavailable)):
            store.copy("run/a/1", "run/b/1", receipt, deadline=NEVER)


def test_a_source_that_is_deleted_while_it_is_copied_is_not_found(tmp_path: Path) -> None:
    class Deletes(FileSystem):
        def link(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            (tmp_path / "run/a").unlink()
            os.link(*args, **kwargs)

    store = DirectoryStore(tmp_path, fs=Deletes())
    receipt = put(store, "run/a", b"bytes")

    with pytest.raises(NotFound, match="deleted"):
        store.copy("run/a", "run/b", receipt, deadline=NEVER)

    assert keys(store) == []
    assert hidden(tmp_path) == []


def test_a_directory_that_a_delete_takes_before_the_copy_has_its_name_is_made_again(tmp_path: Path) -> None:
    class Prunes(FileSystem):
        pruned = False

        def link(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            if not self.pruned:
                self.pruned = True
                (tmp_path / "run/b").rmdir()
            os.link(*args, **kwargs)

    store = DirectoryStore(tmp_path, fs=Prunes())
    receipt = put(store, "run/a/1", b"bytes")

    store.copy("run/a/1", "run/b/1", receipt, deadline=NEVER)

    assert keys(store) == ["run/a/1", "run/b/1"]


def test_another_directory_in_the_store_s_place_is_no_store(tmp_path: Path) -> None:
    """A disk that was unmounted leaves an empty directory: what was written there, and called durable, was not."""
    store = DirectoryStore(tmp_path / "store")
    store.put_if_absent("a", b"b", deadline=NEVER)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()

    with pytest.raises(Unavailable, match="another directory is at"):
        store.put_if_absent("b", b"b", deadline=NEVER)
    with pytest.raises(Unavailable, match="another directory is at"):
        list(store.list("", deadline=NEVER))
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert store.read("a", limit_bytes=1, deadline=NEVER) == b"b"


def test_a_file_system_that_was_mounted_again_is_the_same_store(tmp_path: Path) -> None:
    class Mounted(FileSystem):
        device = 7

        def stat(self, fd: int, **options: Any) -> os.stat_result:
            found = list(os.stat(fd, **options))
            found[2] = self.device  # st_dev
            return os.stat_result(found)

    fs = Mounted()
    store = DirectoryStore(tmp_path, fs=fs)
    fs.device = 8
    store.put_if_absent("a", b"b", deadline=NEVER)
    assert store.read("a", limit_bytes=1, deadline=NEVER) == b"b"
