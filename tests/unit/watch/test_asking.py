"""Asking: only a program that would hear is asked, and none is ended by it."""

from __future__ import annotations

import http.server
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.watch.adapter import Save
from harness.watch.asking import ask, listens
from tests.support.process import Process

LISTENS = """
import os, signal, sys
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)  # a handler would not run for a signal that comes just before the read
signal.signal(signal.{name}, lambda *_: None)
print("ready", file=sys.stderr, flush=True)
os.read(read, 1)
print("saved", file=sys.stderr, flush=True)
"""
DEAF = """
import sys
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
"""
RANKS = """
import os, subprocess, sys
code = {code!r}
children = [subprocess.Popen([sys.executable, "-c", code], env={{**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}})
            for rank in range(2)]
for child in children:
    child.wait()
"""


@pytest.fixture
def start(python: Callable[..., Process]) -> Callable[..., Process]:
    """Start some code; return once it has said "ready" so many times."""

    def start(code: str, ready: int = 1) -> Process:
        process = python(code)
        process.wait_for(rf"(?s)(ready\n.*?){{{ready}}}")
        return process

    return start


def test_a_program_with_a_handler_gets_its_signal(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(LISTENS.format(name="SIGTERM"))
    assert listens(Save(), process.pid)
    assert ask(Save(), tmp_path, process.pid) == "SIGTERM to 1 process"
    assert process.wait() == 0
    assert "saved" in process.stderr


def test_one_without_a_handler_is_left_alone(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(DEAF)
    for save in (Save(), Save(signal="SIGUSR1"), Save(signal="SIGTERM", to="ranks")):
        assert not listens(save, process.pid)
        assert ask(save, tmp_path, process.pid) is None
    process.input.close()
    assert process.wait() == 0


def test_the_signal_of_the_table_is_sent_and_no_other(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(LISTENS.format(name="SIGUSR1"))
    assert ask(Save(signal="SIGUSR2"), tmp_path, process.pid) is None
    assert ask(Save(signal="SIGUSR1"), tmp_path, process.pid) == "SIGUSR1 to 1 process"
    assert process.wait() == 0


def test_every_rank_is_asked(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(RANKS.format(code=LISTENS.format(name="SIGTERM")), ready=2)
    assert ask(Save(signal="SIGTERM", to="ranks"), tmp_path, process.pid) == "SIGTERM to 2 processes"
    assert process.wait() == 0
    assert process.stderr.count("saved") == 2


def test_a_file_is_made(tmp_path: Path) -> None:
    assert ask(Save(touch="control/save"), tmp_path, 1) == "control/save was made"
    assert (tmp_path / "control" / "save").exists()


def test_a_command_is_run(tmp_path: Path) -> None:
    save = Save(
        command=("/bin/sh", "-c", f"echo asked > {tmp_path}/told.tmp && mv {tmp_path}/told.tmp {tmp_path}/told")
    )
    assert ask(save, tmp_path, 1) == "/bin/sh"
    while not (tmp_path / "told").exists():
        threading.Event().wait(0.01)
    assert ask(Save(command=("/no/such/command",)), tmp_path, 1) is None


def test_a_url_gets_a_post_and_a_dead_one_is_no_error(tmp_path: Path) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.put(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/save"
        assert ask(Save(http=url), tmp_path, 1) == f"a POST to {url}"
        server.handle_request()
        assert heard.get_nowait() == "/save"
    ask(Save(http=url), tmp_path, 1)
    ask(Save(http="no url"), tmp_path, 1)
