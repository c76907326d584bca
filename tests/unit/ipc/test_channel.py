from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.core.messages import AskStatus, Finished, Layout, Refused
from harness.ipc.channel import MAX_FDS, MAX_MESSAGE_BYTES, Channel, ChannelClosed, connect, listen, peer_pid
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
    pair[0].send(Layout(3, 12))

    assert pair[1].socket.recv(1000) == b'\x27\0\0\0{"type":"layout","bytes":3,"number":12}'


def test_a_message_arrives_as_it_was_sent(pair: tuple[Channel, Channel]) -> None:
    pair[0].send(Refused("é"))

    received = pair[1].receive()
    assert (received.message, received.fds) == (Refused("é"), ())


def test_messages_keep_their_order_and_their_borders(pair: tuple[Channel, Channel]) -> None:
    for number in range(50):
        pair[0].send(Refused("x" * number))

    assert [pair[1].receive().message for _ in range(50)] == [Refused("x" * number) for number in range(50)]


def test_descriptors_arrive_with_their_own_message(pair: tuple[Channel, Channel]) -> None:
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(first, b"first")
    os.write(second, b"second")
    pair[0].send(AskStatus())
    pair[0].send(Finished(1), [first])
    pair[0].send(AskStatus())
    pair[0].send(Finished(2), [second, first])

    messages = [pair[1].receive() for _ in range(4)]

    assert [len(message.fds) for message in messages] == [0, 1, 0, 2]
    assert [os.pread(fd, 10, 0) for message in messages for fd in message.fds] == [b"first", b"second", b"first"]
    for fd in [first, second, *(fd for message in messages for fd in message.fds)]:
        os.close(fd)


def test_received_descriptors_are_not_inherited(pair: tuple[Channel, Channel]) -> None:
    fd = os.memfd_create("x")
    pair[0].send(AskStatus(), [fd])

    (got,) = pair[1].receive().fds

    assert not os.get_inheritable(got)
    os.close(fd)
    os.close(got)


def test_as_many_descriptors_as_allowed_arrive(pair: tuple[Channel, Channel]) -> None:
    fd = os.memfd_create("x")
    pair[0].send(AskStatus(), [fd] * MAX_FDS)

    got = pair[1].receive().fds

    assert len(got) == MAX_FDS
    for each in (fd, *got):
        os.close(each)


def test_more_of_them_are_refused_where_they_are_sent(pair: tuple[Channel, Channel]) -> None:
    """The other side got so many, and took the rest for closed."""
    with pytest.raises(ValueError, match=f"{MAX_FDS + 1} descriptors with one AskStatus"):
        pair[0].send(AskStatus(), [0] * (MAX_FDS + 1))


def test_two_threads_that_send_do_not_interleave(pair: tuple[Channel, Channel]) -> None:
    big = "x" * 300_000  # larger than the socket's buffer: every message is sent in several pieces

    def send(name: str) -> None:
        for number in range(10):
            pair[0].send(Refused(f"{name}{number}{big}"))

    threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    got = [pair[1].receive().message for _ in range(20)]
    for thread in threads:
        thread.join(HANG_S)

    for name in "ab":
        expected = [Refused(f"{name}{number}{big}") for number in range(10)]
        assert [message for message in got if message in expected] == expected


# ---- peers that are gone or mad -------------------------------------------------------------------------------------


def test_receiving_from_a_closed_peer_says_so(pair: tuple[Channel, Channel]) -> None:
    pair[0].close()

    with pytest.raises(ChannelClosed):
        pair[1].receive()


def test_sending_to_a_closed_peer_says_so(pair: tuple[Channel, Channel]) -> None:
    pair[0].close()

    with pytest.raises(ChannelClosed, match="Finished"):
        pair[1].send(Finished(1))


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
    "no type": b'{"step": 1}',
    "a type of another version": b'{"type": "unheard-of"}',
    "a field of another type": b'{"type": "finished", "step": "1"}',
    "a field that is missing": b'{"type": "finished"}',
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


# ---- connecting -----------------------------------------------------------------------------------------------------


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


def test_somebody_who_listens_and_never_answers_is_told_from_somebody_who_left(tmp_path: Path) -> None:
    """A stopped process: its kernel takes connections, and bytes, on its behalf."""
    listener = listen(tmp_path / "socket")
    asking = connect(tmp_path / "socket", 0.05)
    assert asking is not None
    asking.send(AskStatus())

    with pytest.raises(TimeoutError):
        asking.receive()
    listener.close()
    with pytest.raises(ChannelClosed):
        asking.receive()
    asking.close()


def test_nobody_listening_is_no_channel(tmp_path: Path) -> None:
    assert connect(tmp_path / "socket") is None


def test_a_dead_agents_socket_is_no_channel_and_is_replaced(tmp_path: Path) -> None:
    address = tmp_path / "socket"
    listen(address).close()
    assert connect(address) is None

    with listen(address):
        channel = connect(address)
        assert channel is not None
        assert peer_pid(channel) == os.getpid()
        channel.close()


def test_a_socket_path_that_is_too_long_is_an_oserror_that_leaks_nothing(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100) / "agent.sock"
    long.parent.mkdir()
    before = open_files()

    with pytest.raises(OSError, match="too long"):
        connect(long)
    with pytest.raises(OSError, match="too long"):
        listen(long)

    assert open_files() <= before
