"""Large objects of a DirectoryStore: past the page cache where that is let, the same bytes and promise where not."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cloud.directory import direct
from cloud.directory.direct import BLOCK, LEAST_BYTES, aligned_buffer
from cloud.directory.filesystem import FileSystem
from cloud.directory.store import DirectoryStore
from cloud.errors import CloudError, Full, OutcomeUnknown, SourceUnreadable, Truncated, Unavailable
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, Receipt
from tests.support.clock import FakeClock
from tests.support.patience import HANG_S

NEVER = Deadline.never()
SMALLEST = LEAST_BYTES + 7
PATTERN = random.Random(1).randbytes(1024 * 1024 + 7)


class Disk(FileSystem):
    """The real calls; what is opened with O_DIRECT is held to its rules, whatever file system the test runs on.

    Attributes:
        calls: of every verb that changes something, in the order in which they began.
        direct_bytes: written past the page cache.
        cached_bytes: written through it, large objects' only.
        directly_read: read past it.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.direct_bytes = self.cached_bytes = self.directly_read = 0
        self._direct: set[int] = set()
        self._lock = threading.Lock()

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:  # type: ignore[override]
        if flags & (os.O_CREAT | os.O_DIRECT):
            self.begin("open direct" if flags & os.O_DIRECT else "open")
        fd = os.open(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def close(self, fd: int) -> None:  # type: ignore[override]
        self._direct.discard(fd)
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:  # type: ignore[override]
        self.begin("pwrite direct" if fd in self._direct else "pwrite")
        count = self._pwrite(fd, data, offset)
        with self._lock:
            if fd in self._direct:
                check_aligned(data, offset)
                self.direct_bytes += count
            else:
                self.cached_bytes += count
        return count

    def _pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:  # type: ignore[override]
        if fd not in self._direct:
            return os.preadv(fd, into, offset)
        self.begin("preadv direct")
        check_aligned(into[0], offset)
        count = os.preadv(fd, into, offset)
        with self._lock:
            self.directly_read += count
        return count

    def fallocate(self, fd: int, size: int) -> None:  # type: ignore[override]
        self.begin("fallocate")
        os.ftruncate(fd, size)

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        self.begin("fdatasync")

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        self.begin("fsync")

    def rename(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.begin("rename")
        os.rename(*args, **kwargs)  # noqa: PTH104  relative to a directory

    def begin(self, verb: str) -> None:
        """Called before each call that changes something."""
        with self._lock:
            self.calls.append(verb)


class Failing(Disk):
    """Fails calls of `verb` with `number`, from the `nth` on, or only that one."""

    def __init__(self, verb: str, number: int, *, nth: int = 1, once: bool = False) -> None:
        super().__init__()
        self.verb, self.number, self.nth, self.once = verb, number, nth, once

    def begin(self, verb: str) -> None:
        super().begin(verb)
        if verb == self.verb:
            with self._lock:
                count = self.calls.count(verb)
            if count == self.nth or (count > self.nth and not self.once):
                raise OSError(self.number, os.strerror(self.number))


class Stutters(Disk):
    """Writes and reads at most `most` bytes at once, and is interrupted at every third call."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def begin(self, verb: str) -> None:
        super().begin(verb)
        if verb.startswith(("pwrite", "preadv")) and len(self.calls) % 3 == 0:
            raise InterruptedError

    def _pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data[: self.most], offset)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().preadv(fd, [into[0][: self.most]], offset)


def check_aligned(data: memoryview, offset: int) -> None:
    """What a kernel checks, at its strictest."""
    if ctypes.addressof(ctypes.c_char.from_buffer(data)) % BLOCK or len(data) % BLOCK or offset % BLOCK:
        raise OSError(errno.EINVAL, "not aligned")


def filled(size: int) -> memoryview:
    """An aligned buffer with something in it, different in each chunk."""
    buffer = aligned_buffer(size)
    for at in range(0, size, len(PATTERN)):
        buffer[at : at + len(PATTERN)] = PATTERN[: size - at]
    return buffer


def put(store: DirectoryStore, source: memoryview, key: str = "run/a") -> Receipt:
    return store.put(key, source, deadline=NEVER)


def receipt_of(tmp_path: Path, source: memoryview) -> Receipt:
    """What a buffered put says of the same bytes."""
    return DirectoryStore(tmp_path / "buffered").put("a", memoryview(bytes(source)), deadline=NEVER)


def keys(store: DirectoryStore) -> list[str]:
    return [info.key for info in store.list("", deadline=NEVER)]


def hidden(root: Path) -> list[Path]:
    return list(root.rglob(".*"))


# -------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("size", [LEAST_BYTES, SMALLEST, CHUNK_BYTES, CHUNK_BYTES + 1, 4 * CHUNK_BYTES + BLOCK + 9])
def test_all_but_the_last_bytes_go_past_the_page_cache_and_the_receipt_is_the_same(tmp_path: Path, size: int) -> None:
    disk, source, sent = Disk(), filled(size), []
    store = DirectoryStore(tmp_path / "store", fs=disk)

    receipt = store.put("run/a", source, deadline=NEVER, progress=lambda count, **_: sent.append(count))

    assert (disk.direct_bytes, disk.cached_bytes) == (size - size % BLOCK, size % BLOCK)
    assert (tmp_path / "store" / "run" / "a").read_bytes() == source
    assert receipt == receipt_of(tmp_path, source)
    assert sent == [min(CHUNK_BYTES, size - at) for at in range(0, size, CHUNK_BYTES)]


def test_room_comes_before_the_first_write_and_the_sync_after_the_last(tmp_path: Path) -> None:
    disk = Disk()
    store = DirectoryStore(tmp_path, fs=disk)
    disk.calls.clear()

    put(store, filled(SMALLEST))

    order = ["open", "open direct", "fallocate", "pwrite direct", "pwrite", "fdatasync", "rename", "fsync", "fsync"]
    assert disk.calls == order


@pytest.mark.parametrize(
    "source",
    [
        aligned_buffer(LEAST_BYTES - 1),
        aligned_buffer(LEAST_BYTES + 8)[8:],
        aligned_buffer(LEAST_BYTES).toreadonly(),
        memoryview(b"record"),
    ],
    ids=["small", "misaligned", "read-only", "a record"],
)
def test_what_is_small_or_not_aligned_stays_in_the_page_cache(tmp_path: Path, source: memoryview) -> None:
    disk = Disk()
    store = DirectoryStore(tmp_path, fs=disk)

    put(store, source)

    assert not {"open direct", "pwrite direct", "fallocate"} & set(disk.calls)
    assert (tmp_path / "run" / "a").read_bytes() == source


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize(("verb", "nth"), [("open direct", 1), ("pwrite direct", 1), ("pwrite direct", 2)])
def test_a_refusal_costs_nothing_but_the_way_past_the_page_cache(
    tmp_path: Path, verb: str, nth: int, number: int
) -> None:
    disk, source = Failing(verb, number, nth=nth), filled(2 * CHUNK_BYTES + 9)
    store = DirectoryStore(tmp_path / "store", fs=disk)

    receipt = put(store, source)

    assert receipt == receipt_of(tmp_path, source)
    assert (tmp_path / "store" / "run" / "a").read_bytes() == source
    assert disk.calls.count("fdatasync") == 1


def test_a_refusal_is_met_once(tmp_path: Path) -> None:
    disk, source = Failing("open direct", errno.EINVAL), filled(SMALLEST)
    store = DirectoryStore(tmp_path, fs=disk)

    for key in ("run/a", "run/b"):
        put(store, source, key)
        store.get(key, aligned_buffer(SMALLEST), deadline=NEVER)

    assert disk.calls.count("open direct") == 1
    assert disk.direct_bytes == disk.directly_read == 0


def test_a_draft_that_cannot_be_opened_again_is_no_refusal(tmp_path: Path) -> None:
    disk = Failing("open direct", errno.EMFILE)

    with pytest.raises(Unavailable, match="Too many open files"):
        put(DirectoryStore(tmp_path, fs=disk), filled(SMALLEST))

    assert hidden(tmp_path) == []


@pytest.mark.parametrize("most", [100_000, 24 * BLOCK, BLOCK - 1])
def test_short_and_interrupted_writes_are_continued(tmp_path: Path, most: int) -> None:
    source = filled(SMALLEST)
    store = DirectoryStore(tmp_path / "store", fs=Stutters(most))

    assert put(store, source) == receipt_of(tmp_path, source)
    assert (tmp_path / "store" / "run" / "a").read_bytes() == source


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_allocate_is_written_all_the_same(tmp_path: Path, number: int) -> None:
    disk, source = Failing("fallocate", number), filled(SMALLEST)

    put(DirectoryStore(tmp_path, fs=disk), source)

    assert disk.direct_bytes == LEAST_BYTES
    assert (tmp_path / "run" / "a").read_bytes() == source


@pytest.mark.parametrize("verb", ["fallocate", "pwrite direct", "pwrite"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(tmp_path: Path, verb: str, number: int) -> None:
    store = DirectoryStore(tmp_path, fs=Failing(verb, number))

    with pytest.raises(Full, match=f"{SMALLEST:,} bytes needed"):
        put(store, filled(SMALLEST))

    assert keys(store) == []
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("verb", ["fallocate", "pwrite direct", "pwrite"])
def test_what_is_missing_is_taken_from_the_reservation(tmp_path: Path, verb: str) -> None:
    disk, source = Failing(verb, errno.ENOSPC, nth=2 if verb == "fallocate" else 1, once=True), filled(SMALLEST)
    store = DirectoryStore(tmp_path, fs=disk)
    store.reserve(2 * SMALLEST)

    put(store, source)

    assert (tmp_path / "run" / "a").read_bytes() == source
    (reserve,) = tmp_path.glob(".reserve-*")
    assert SMALLEST <= reserve.stat().st_size < 2 * SMALLEST


@pytest.mark.parametrize("verb", ["open", "open direct", "fallocate", "pwrite direct", "pwrite", "fdatasync", "rename"])
def test_a_call_that_fails_leaves_nothing(tmp_path: Path, verb: str) -> None:
    store = DirectoryStore(tmp_path, fs=Failing(verb, errno.EIO))

    with pytest.raises(Unavailable, match=r"run/a in .*Input/output error"):
        put(store, filled(SMALLEST))

    assert keys(store) == []
    assert hidden(tmp_path) == []


def test_a_directory_that_cannot_be_synced_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    with pytest.raises(OutcomeUnknown):
        put(DirectoryStore(tmp_path, fs=Failing("fsync", errno.EIO)), filled(SMALLEST))

    assert hidden(tmp_path) == []


def test_a_write_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    class Stuck(Disk):
        def _pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return 0

    with pytest.raises(Unavailable, match="wrote nothing"):
        put(DirectoryStore(tmp_path, fs=Stuck()), filled(SMALLEST))


class Holding(Disk):
    """Holds each write but the first until `let_go`."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.writing = 0

    def _pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        with self._lock:
            self.writing += 1
        if offset:
            assert self.let_go.wait(HANG_S)
        count = os.pwrite(fd, data, offset)
        with self._lock:
            self.writing -= 1
        return count


def test_when_a_put_was_given_up_nobody_writes_the_file_or_reads_the_slot_any_more(tmp_path: Path) -> None:
    disk, cancelled, source = Holding(), threading.Event(), filled(4 * CHUNK_BYTES)
    store = DirectoryStore(tmp_path, fs=disk)
    ended: list[BaseException] = []

    def put_and_tell() -> None:
        try:
            store.put("run/a", source, deadline=NEVER.unless(cancelled), progress=lambda _, **__: cancelled.set())
        except Unavailable as err:
            ended.append(err)

    thread = threading.Thread(target=put_and_tell)
    thread.start()
    assert cancelled.wait(HANG_S)
    assert ended == []  # two writes are held, and it waits for them
    disk.let_go.set()
    thread.join(HANG_S)

    assert len(ended) == 1
    assert disk.writing == 0
    assert disk.calls.count("pwrite direct") <= direct.THREADS
    assert keys(store) == hidden(tmp_path) == []


def test_progress_is_told_in_the_thread_that_put(tmp_path: Path) -> None:
    heard: list[int] = []

    DirectoryStore(tmp_path, fs=Disk()).put(
        "run/a", filled(3 * CHUNK_BYTES), deadline=NEVER, progress=lambda _, **__: heard.append(threading.get_ident())
    )

    assert heard == 3 * [threading.get_ident()]


def test_progress_hears_whether_a_chunk_is_still_being_written(tmp_path: Path) -> None:
    disk, idle = Holding(), list[float]()

    def progress(_: int, *, idle_s: Callable[[], float]) -> None:
        if not idle:
            idle.append(idle_s())  # two writes are held
            disk.let_go.set()
            while not idle_s():
                os.sched_yield()

    DirectoryStore(tmp_path, fs=disk).put("run/a", filled(4 * CHUNK_BYTES), deadline=NEVER, progress=progress)

    assert idle == [0.0]


def test_a_deadline_ends_a_put_between_two_chunks(tmp_path: Path) -> None:
    clock, sent = FakeClock(), list[int]()
    store = DirectoryStore(tmp_path, fs=Disk())

    def progress(count: int, **_: Any) -> None:
        sent.append(count)
        clock.advance(10)

    with pytest.raises(Unavailable, match=f"no time left to write run/a: {CHUNK_BYTES} of"):
        store.put("run/a", filled(2 * CHUNK_BYTES), deadline=Deadline.after(5, clock), progress=progress)
    assert sent == [CHUNK_BYTES]
    assert keys(store) == hidden(tmp_path) == []


def test_the_real_file_system_takes_it_or_refuses_and_holds_the_bytes_in_either_case(tmp_path: Path) -> None:
    source = filled(CHUNK_BYTES + SMALLEST)
    store, into = DirectoryStore(tmp_path / "store"), aligned_buffer(CHUNK_BYTES + SMALLEST)

    assert put(store, source) == receipt_of(tmp_path, source)
    store.get("run/a", into, deadline=NEVER)

    assert into == source


# ---------------------------------------------------------------------------------------------------- files to send


@pytest.mark.parametrize("refused", ["", "open direct", "preadv direct", "pwrite direct"])
def test_a_large_file_goes_from_disk_to_disk_past_the_page_cache_where_that_is_let(
    tmp_path: Path, refused: str
) -> None:
    disk, source, size = Failing(refused, errno.EINVAL), tmp_path / "source", 2 * CHUNK_BYTES + SMALLEST
    source.write_bytes(filled(size))
    store, sent = DirectoryStore(tmp_path / "store", fs=disk), list[int]()

    receipt = store.put("run/a", source, deadline=NEVER, progress=lambda count, **_: sent.append(count))

    assert receipt == receipt_of(tmp_path, filled(size))
    assert (tmp_path / "store" / "run" / "a").read_bytes() == source.read_bytes()
    assert sum(sent) == size
    if not refused:
        assert (disk.direct_bytes, disk.directly_read) == (size - size % BLOCK, size)


def test_a_small_file_to_send_stays_in_the_page_cache(tmp_path: Path) -> None:
    disk, source = Disk(), tmp_path / "source"
    source.write_bytes(b"small")

    DirectoryStore(tmp_path / "store", fs=disk).put("run/a", source, deadline=NEVER)

    assert "open direct" not in disk.calls


def test_a_file_to_send_that_becomes_shorter_is_said_to_be_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(filled(CHUNK_BYTES + SMALLEST))

    class Shrinks(Disk):
        def fallocate(self, fd: int, size: int) -> None:  # type: ignore[override]
            os.truncate(source, CHUNK_BYTES + 9)

    store = DirectoryStore(tmp_path / "store", fs=Shrinks())
    with pytest.raises(SourceUnreadable, match=f"now ends after {CHUNK_BYTES + 9}"):
        store.put("run/a", source, deadline=NEVER)

    assert keys(store) == hidden(tmp_path / "store") == []


def test_a_file_to_send_that_reads_badly_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(filled(SMALLEST))
    store = DirectoryStore(tmp_path / "store", fs=Failing("preadv direct", errno.EIO))

    with pytest.raises(SourceUnreadable, match=r"cannot read the source .*/source: Input/output error"):
        store.put("run/a", source, deadline=NEVER)

    assert keys(store) == hidden(tmp_path / "store") == []


def test_a_file_to_send_that_tells_nothing_of_itself_is_named(tmp_path: Path) -> None:
    """A mount that went away between two calls is the world's fault, and no bug, which would end the agent."""
    source = tmp_path / "source"
    source.write_bytes(filled(SMALLEST))

    class Stale(Disk):
        def fstat(self, fd: int) -> os.stat_result:  # type: ignore[override]
            raise OSError(errno.ESTALE, "Stale file handle")

    with pytest.raises(SourceUnreadable, match=r"cannot read the source .*/source: Stale"):
        DirectoryStore(tmp_path / "store", fs=Stale()).put("run/a", source, deadline=NEVER)


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("size", [LEAST_BYTES, SMALLEST, CHUNK_BYTES + 1])
@pytest.mark.parametrize("offset", [0, 3 * BLOCK])
def test_a_large_range_is_read_past_the_page_cache_to_its_last_byte(tmp_path: Path, size: int, offset: int) -> None:
    disk, source, into = Disk(), filled(size + offset), aligned_buffer(size)
    store = DirectoryStore(tmp_path, fs=disk)
    put(store, source)

    store.get("run/a", into, offset=offset, deadline=NEVER)

    assert into == source[offset:]
    assert disk.directly_read == size


def test_a_range_that_ends_inside_the_file_leaves_the_rest_alone(tmp_path: Path) -> None:
    source, around = filled(3 * LEAST_BYTES), aligned_buffer(SMALLEST + 50)
    store = DirectoryStore(tmp_path, fs=Disk())
    put(store, source)

    store.get("run/a", around[:SMALLEST], deadline=NEVER)

    assert around[:SMALLEST] == source[:SMALLEST]
    assert around[SMALLEST:] == bytes(50)


@pytest.mark.parametrize(("start", "offset"), [(8, 0), (0, 8)], ids=["memory", "file"])
def test_a_range_that_is_not_aligned_is_read_through_the_page_cache(tmp_path: Path, start: int, offset: int) -> None:
    disk, source, into = Disk(), filled(2 * SMALLEST), aligned_buffer(SMALLEST + start)[start:]
    store = DirectoryStore(tmp_path, fs=disk)
    put(store, source)

    store.get("run/a", into, offset=offset, deadline=NEVER)

    assert into == source[offset : offset + SMALLEST]
    assert disk.directly_read == 0


@pytest.mark.parametrize(("verb", "nth"), [("open direct", 2), ("preadv direct", 1), ("preadv direct", 2)])
def test_a_refused_read_is_read_through_the_page_cache(tmp_path: Path, verb: str, nth: int) -> None:
    disk, source, into = Failing(verb, errno.EINVAL, nth=nth), filled(2 * CHUNK_BYTES), aligned_buffer(2 * CHUNK_BYTES)
    store = DirectoryStore(tmp_path, fs=disk)
    put(store, source)

    store.get("run/a", into, deadline=NEVER)

    assert into == source


@pytest.mark.parametrize("most", [100_000, 24 * BLOCK, BLOCK - 1])
def test_short_and_interrupted_reads_are_continued(tmp_path: Path, most: int) -> None:
    source, into = filled(SMALLEST), aligned_buffer(SMALLEST)
    put(DirectoryStore(tmp_path), source)

    DirectoryStore(tmp_path, fs=Stutters(most)).get("run/a", into, deadline=NEVER)

    assert into == source


@pytest.mark.parametrize("short_by", [1, BLOCK, LEAST_BYTES + 8])
def test_a_file_that_ends_too_early_is_truncated(tmp_path: Path, short_by: int) -> None:
    store = DirectoryStore(tmp_path, fs=Disk())
    put(store, filled(SMALLEST + LEAST_BYTES))

    with pytest.raises(Truncated, match=f"has {SMALLEST + LEAST_BYTES} bytes"):
        store.get("run/a", aligned_buffer(SMALLEST + LEAST_BYTES + short_by), deadline=NEVER)


def test_a_disk_that_reads_badly_is_unavailable(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, fs=Failing("preadv direct", errno.EIO))
    put(store, filled(SMALLEST))

    with pytest.raises(Unavailable, match="Input/output error"):
        store.get("run/a", aligned_buffer(SMALLEST), deadline=NEVER)


def test_a_read_ends_at_its_deadline(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, fs=Disk())
    put(store, filled(SMALLEST))

    with pytest.raises(Unavailable, match="no time left to read run/a"):
        store.get("run/a", aligned_buffer(SMALLEST), deadline=Deadline(0.0, lambda: 1.0))


def test_memory_for_reads_is_private_to_this_process_and_no_fork_shares_it() -> None:
    buffer = aligned_buffer(3 * BLOCK)
    buffer[0] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and len(words) >= 5:
            start, _, end = words[0].partition("-")
            ours = int(start, 16) <= address < int(end, 16)
            private = words[1].endswith("p")
        elif words[0] == "VmFlags:" and ours:
            assert private
            assert "dc" in words  # not copied on fork
            return
    raise AssertionError("it is mapped nowhere")


def test_several_may_write_and_read_at_once(tmp_path: Path) -> None:
    store, source, failed = DirectoryStore(tmp_path, fs=Disk()), filled(CHUNK_BYTES + 9), list[CloudError]()

    def there_and_back(name: str) -> None:
        into = aligned_buffer(len(source))
        try:
            put(store, source, name)
            store.get(name, into, deadline=NEVER)
            assert into == source
        except CloudError as err:
            failed.append(err)

    calls: list[Callable[[], None]] = [lambda name=name: there_and_back(f"run/{name}") for name in range(3)]  # type: ignore[misc]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)

    assert failed == []
    assert keys(store) == ["run/0", "run/1", "run/2"]
