"""A test that fails leaves nobody and nothing behind, and its report shows what everybody had said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import with_parent
from tests.support.process import Process, wait_ended
from tests.support.world import ROOT, World

SUITE = """
import os, signal, socket, sys
import pytest
from tests.support.world import World, nobody_left

FAMILY = '''
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("child", child.pid, file=sys.stderr, flush=True)
time.sleep(1000)
'''

@pytest.fixture
def world(request, tmp_path):
    with nobody_left(request, World(tmp_path)) as made:
        yield made

def test_that_fails(world):
    connection = socket.socket()  # forgotten: its frame holds it
    family = world.start(sys.executable, "-c", FAMILY, stdin=-1)
    family.wait_for("child [0-9]+")
    print("family", family.pid)
    assert False, "on purpose"

def test_that_comes_next(world):
    assert world.start("true").wait() == 0
"""


def run_suite(world: World, text: str) -> str:
    """What pytest says of a suite of one file, with our plugin."""
    (world.root / "test_it.py").write_text(text)
    (world.root / "conftest.py").write_text('pytest_plugins = ["tests.support.failed_tests"]\n')
    (world.root / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    run = world.start(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_it.py")
    run.wait()
    return run.stdout.decode()


def command_line(pid: int) -> bytes:
    """Empty if it has ended, and also if its parent has not asked how."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_nothing_of_a_failed_test_is_met_by_the_next_one(world: World) -> None:
    out = run_suite(world, SUITE)

    assert "FAILED test_it.py::test_that_fails - AssertionError: on purpose" in out
    assert "PASSED test_it.py::test_that_comes_next" in out
    assert "ERROR test_it.py::test_that_comes_next" not in out
    assert re.search(r"ERROR test_it.py::test_that_fails - .*ResourceWarning|unclosed <socket", out), out


def test_the_report_of_a_failed_test_shows_what_every_process_has_said(world: World) -> None:
    out = run_suite(world, SUITE)

    assert re.search(r"-+ stderr of \d+: \S*python\S* -c", out), out
    child = re.search(r"^child (\d+)$", out, re.MULTILINE)
    assert child
    assert not command_line(int(child[1])), "in a session of its own, and killed all the same"


def test_a_world_that_is_closed_has_nobody_left_and_no_thread_waits(world: World) -> None:
    ignores = "trap '' TERM INT HUP; setsid sleep 1000 & echo ready >&2; wait; wait; sleep 1000"
    process = world.start("sh", "-c", ignores, stdin=subprocess.PIPE)
    process.wait_for("ready")

    world.close()

    assert world.running() == {}
    assert process.wait() == -signal.SIGKILL
    assert process.stderr == "ready\n"


def test_somebody_who_is_not_in_the_world_any_more_keeps_nobody_waiting(world: World) -> None:
    process = world.start("sh", "-c", "env -i sleep 1000 & echo $! >&2; wait")
    stranger = int(process.wait_for(r"^\d+\n").group())
    try:
        world.close()
        assert process.wait() == -signal.SIGKILL
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_a_server_ends_with_the_process_that_started_it_however_that_ends(world: World) -> None:
    program = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.support import with_parent
server = subprocess.Popen(with_parent.command("sh", "-c", "echo $$ >&2; exec sleep 1000"))
time.sleep(1000)
"""
    parent = world.start(sys.executable, "-c", program)
    server = int(parent.wait_for(r"^\d+\n").group())

    parent.signal(signal.SIGKILL)

    wait_ended(server)


def test_a_server_whose_parent_has_ended_already_does_not_begin(world: World) -> None:
    gone = world.start("true")
    gone.wait()
    words = with_parent.command("sh", "-c", "echo begun")
    words[3] = str(gone.pid)

    late = world.start(*words)

    late.wait()
    assert late.stdout == b""


def test_a_wait_for_words_fails_when_nobody_is_left_to_say_them(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo something else >&2"], cwd=tmp_path, env=dict(os.environ))

    with pytest.raises(AssertionError, match="never said: the words\nsomething else"):
        process.wait_for("the words")
    process.reap()


def test_a_wait_for_a_file_fails_when_nobody_is_left_to_write_it(world: World) -> None:
    assert world.start("true").wait() == 0

    with pytest.raises(AssertionError, match="never came: the file"):
        world.wait_until((world.root / "file").exists, "the file")
