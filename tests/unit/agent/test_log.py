from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.agent import log as module
from harness.agent.log import Log
from tests.support.patience import HANG_S


class Pipe:
    """A pipe of one page, whose reader reads when it is told to."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()

    def fill(self) -> None:
        """Until not one more byte goes into it."""
        os.set_blocking(self.write, False)
        try:
            while True:
                os.write(self.write, b"x" * 4096)
        except BlockingIOError:
            pass
        os.set_blocking(self.write, True)

    def until(self, last: bytes) -> list[bytes]:
        """The lines up to one that begins with `last`, read as they come."""
        data = b""
        while not (data.endswith(b"\n") and data.splitlines()[-1].startswith(last)):
            data += os.read(self.read, 1 << 20)
        return data.lstrip(b"x").splitlines()

    def close(self) -> None:
        os.close(self.write)
        os.close(self.read)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_a_line_is_there_when_the_call_is_over(pipe: Pipe) -> None:
    Log(pipe.write).say("one\x1b[2J")

    os.set_blocking(pipe.read, False)
    assert os.read(pipe.read, 100) == b"harness: one\\x1b[2J\n"


def test_a_reader_that_has_stopped_holds_up_nobody_and_gets_every_line_later(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent heard nothing any more, SIGTERM neither, and saved nothing, while a pager showed its first page."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    pipe.fill()
    log = Log(pipe.write)
    for number in range(100):
        log.say(str(number))
    log.close(0.0)

    assert pipe.until(b"harness: 99") == [f"harness: {number}".encode() for number in range(100)]


def test_what_nobody_reads_for_long_is_dropped_and_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    monkeypatch.setattr(module, "MOST_LINES", 3)
    pipe.fill()
    log = Log(pipe.write)
    log.say("on its way")
    for number in range(5):
        log.say(str(number))

    told = b"harness: 2 lines were dropped because stderr was blocked"
    assert pipe.until(told)[-1] == told


def test_a_descriptor_that_takes_nothing_is_no_error() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        log = Log(full)
        log.say("one")
        log.close(HANG_S)
    finally:
        os.close(full)
