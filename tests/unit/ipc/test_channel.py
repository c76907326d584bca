from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.ipc.channel import (
    MAX_FDS,
    MAX_MESSAGE_BYTES,
    Channel,
    ChannelClosed,
    RuntimeDir,
    connect,
    listen,
    open_pidfd,
    peer_pid,
    pidfd_dead,
)
from tests.support.needs import lacking
from tests.support.open_files import open_files
from tests.support.patience import HANG_S

NOBODY = 65534


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    yield one, other
    one.close()
    other.close()


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


# ---- messages -------------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_message_are_pinned(pair: tuple[Channel, Channel]) -> None:
    pair[0].send("sealed", index=3, step=12)

    assert pair[1].socket.recv(1000) == b'\x2a\0\0\0{"type": "sealed", "index": 3, "step": 12}'


def test_a_message_arrives_as_it_was_sent(pair: tuple[Channel, Channel]) -> None:
    pair[0].send("sealed", index=3, words=["é", None, 1.5])

    message = pair[1].receive()
    assert (message.type, message["index"], message["words"], message.fds) == ("sealed", 3, ["é", None, 1.5], ())


def test_messages_keep_their_order_and_their_borders(pair: tuple[Channel, Channel]) -> None:
    for number in range(50):
        pair[0].send("step", number=number, padding="x" * number)

    assert [pair[1].receive()["number"] for _ in range(50)] == list(range(50))


def test_descriptors_arrive_with_their_own_message(pair: tuple[Channel, Channel]) -> None:
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(first, b"first")
    os.write(second, b"second")
    pair[0].send("before")
    pair[0].send("one", [first])
    pair[0].send("between")
    pair[0].send("two", [second, first])

    messages = [pair[1].receive() for _ in range(4)]

    assert [len(message.fds) for message in messages] == [0, 1, 0, 2]
    assert [os.pread(fd, 10, 0) for message in messages for fd in message.fds] == [b"first", b"second", b"first"]
    for fd in [first, second, *(fd for message in messages for fd in message.fds)]:
        os.close(fd)


def test_received_descriptors_are_not_inherited(pair: tuple[Channel, Channel]) -> None:
    fd = os.memfd_create("x")
    pair[0].send("one", [fd])

    (got,) = pair[1].receive().fds

    assert not os.get_inheritable(got)
    os.close(fd)
    os.close(got)


def test_as_many_descriptors_as_allowed_arrive(pair: tuple[Channel, Channel]) -> None:
    fd = os.memfd_create("x")
    pair[0].send("many", [fd] * MAX_FDS)

    got = pair[1].receive().fds

    assert len(got) == MAX_FDS
    for each in (fd, *got):
        os.close(each)


def test_two_threads_that_send_do_not_interleave(pair: tuple[Channel, Channel]) -> None:
    big = "x" * 300_000  # larger than the socket's buffer: every message is sent in several pieces

    def send(name: str) -> None:
        for number in range(10):
            pair[0].send(name, number=number, padding=big)

    threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    got = [pair[1].receive() for _ in range(20)]
    for thread in threads:
        thread.join(HANG_S)

    for name in "ab":
        assert [message["number"] for message in got if message.type == name] == list(range(10))
    assert {message["padding"] for message in got} == {big}


# ---- peers that are gone or mad -------------------------------------------------------------------------------------


def test_receiving_from_a_closed_peer_says_so(pair: tuple[Channel, Channel]) -> None:
    pair[0].close()

    with pytest.raises(ChannelClosed):
        pair[1].receive()


def test_sending_to_a_closed_peer_says_so(pair: tuple[Channel, Channel]) -> None:
    pair[0].close()

    with pytest.raises(ChannelClosed, match="sealed"):
        pair[1].send("sealed")


@pytest.mark.parametrize("data", [b"\x05", b"\x05\0\0", framed(b'{"type": "x"}')[:-1]])
def test_a_peer_that_dies_in_the_middle_of_a_message_says_nothing(pair: tuple[Channel, Channel], data: bytes) -> None:
    pair[0].socket.sendall(data)
    pair[0].close()

    with pytest.raises(ChannelClosed):
        pair[1].receive()


def test_an_oversize_frame_is_refused_before_its_bytes_are_waited_for(pair: tuple[Channel, Channel]) -> None:
    pair[0].socket.sendall(struct.pack("<I", MAX_MESSAGE_BYTES + 1))

    with pytest.raises(ChannelClosed, match=str(MAX_MESSAGE_BYTES + 1)):
        pair[1].receive()


GARBAGE = {
    "empty": b"",
    "not JSON": b"\x00\x01",
    "not UTF-8": b'{"type": "\xff"}',
    "a number": b"1",
    "null": b"null",
    "a text": b'"type"',
    "a list": b'["type"]',
    "no type": b'{"index": 1}',
    "brackets without end": b"[" * 1_000_000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_a_closed_channel_and_no_crash(pair: tuple[Channel, Channel], data: bytes) -> None:
    sender = threading.Thread(target=pair[0].socket.sendall, args=(framed(data),))
    sender.start()

    with pytest.raises(ChannelClosed):
        pair[1].receive()

    sender.join(HANG_S)


def test_descriptors_of_a_message_that_is_refused_are_closed(pair: tuple[Channel, Channel]) -> None:
    fd = os.memfd_create("x")
    before = open_files()
    socket.send_fds(pair[0].socket, [framed(b"not JSON")], [fd])

    with pytest.raises(ChannelClosed):
        pair[1].receive()

    assert open_files() <= before
    os.close(fd)


# ---- the place ------------------------------------------------------------------------------------------------------


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

    with pytest.raises(PermissionError, match=r"is a link, or no directory|others may write to .* chmod go-w"):
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


@pytest.mark.root
def test_whoever_listens_as_another_user_is_not_connected_to(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        lacking("root", "to become somebody else")
    path = tmp_path / "agent.sock"
    program = (
        "import os, pathlib, sys; from harness.ipc.channel import listen; os.chdir(sys.argv[1]); "
        f"os.setuid({NOBODY}); listener = listen(pathlib.Path('agent.sock')); print('listening', flush=True); "
        "sys.stdin.read()"
    )
    tmp_path.chmod(0o777)
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        before = open_files()
        with pytest.raises(PermissionError, match=f"another user \\(uid {NOBODY}\\) listens"):
            connect(path)
        assert open_files() <= before
        process.kill()


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


def test_somebody_who_listens_and_never_answers_is_told_from_somebody_who_left(tmp_path: Path) -> None:
    """A stopped process: its kernel takes connections, and bytes, on its behalf."""
    listener = listen(tmp_path / "socket")
    asking = connect(tmp_path / "socket", 0.05)
    assert asking is not None
    asking.send("status")

    with pytest.raises(TimeoutError):
        asking.receive()
    listener.close()
    with pytest.raises(ChannelClosed):
        asking.receive()
    asking.close()


def test_the_lock_dies_with_its_process(place: RuntimeDir) -> None:
    program = (
        "import pathlib, sys; from harness.ipc.channel import RuntimeDir; "
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


def test_nobody_listening_is_no_channel(place: RuntimeDir) -> None:
    assert connect(place.socket) is None


def test_a_dead_agents_socket_is_no_channel_and_is_replaced(place: RuntimeDir) -> None:
    listen(place.socket).close()
    assert connect(place.socket) is None

    with listen(place.socket):
        channel = connect(place.socket)
        assert channel is not None
        assert peer_pid(channel) == os.getpid()
        channel.close()


def test_the_socket_of_a_usual_place_is_short_enough(tmp_path: Path) -> None:
    usual = RuntimeDir.of(Path("/run/user/1234567890/harness"), "s3://bucket/prefix", "x" * 100)

    assert len(str(usual.socket)) <= 107


def test_a_socket_path_that_is_too_long_is_an_oserror_that_leaks_nothing(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100) / "agent.sock"
    long.parent.mkdir()
    before = open_files()

    with pytest.raises(OSError, match="too long"):
        connect(long)
    with pytest.raises(OSError, match="too long"):
        listen(long)

    assert open_files() <= before


def test_a_pidfd_tells_a_live_process_from_a_dead_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = open_pidfd(process.pid)
    assert pidfd is not None
    assert not pidfd_dead(pidfd)

    process.kill()
    process.wait(HANG_S)
    process.communicate()

    assert pidfd_dead(pidfd)
    assert open_pidfd(process.pid) is None
    os.close(pidfd)
