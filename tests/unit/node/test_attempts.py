"""Real processes of a few lines: whose end is waited for, and who is nobody's to wait for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from harness.core.messages import Status
from harness.errors import ConfigError
from harness.node.attempts import Ended, FoundAttempt, RunAttempt, StartedAttempt, left_behind
from tests.support.node import RUNNING

ROOT = Path(__file__).parents[3]


def wait_for(attempt: RunAttempt) -> Ended:
    while (ended := attempt.ended()) is None:
        threading.Event().wait(0.01)
    return ended


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else's: it is reaped by its own parent."""
    outer = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    yield outer
    outer.kill()
    assert outer.stdout is not None
    outer.stdout.close()
    outer.wait()


@pytest.fixture
def pid(sleeper: subprocess.Popen[bytes]) -> Iterator[int]:
    assert sleeper.stdout is not None
    number = int(sleeper.stdout.readline())
    yield number
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def said_nothing(pid: int) -> None:
    """An agent that recorded no outcome."""


@pytest.mark.parametrize(
    ("script", "ended"),
    [("exit 75", Ended(75)), ("exit 137", Ended(137)), ("kill -9 $$", Ended(137, 9))],
)
def test_a_code_is_told_from_a_signal(script: str, ended: Ended) -> None:
    attempt = StartedAttempt(["sh", "-c", script], os.environ, said_nothing)

    assert wait_for(attempt) == ended
    attempt.close()


def test_an_end_has_the_outcome_that_the_process_itself_recorded() -> None:
    asked: list[int] = []
    attempt = StartedAttempt(["sh", "-c", "exit 75"], os.environ, lambda pid: asked.append(pid) or "failed")
    pid = attempt._process.pid

    assert wait_for(attempt) == Ended(75, outcome="failed")
    assert asked == [pid]
    attempt.close()


def test_a_started_run_hears_signals() -> None:
    attempt = StartedAttempt(["sleep", "60"], os.environ, said_nothing)
    attempt.signal(signal.SIGTERM)

    assert wait_for(attempt) == Ended(143, 15)
    attempt.signal(signal.SIGTERM)
    attempt.close()


def test_what_cannot_be_started_is_said() -> None:
    with pytest.raises(ConfigError, match="/no/such: No such file"):
        StartedAttempt(["/no/such"], os.environ, said_nothing)


def test_a_found_run_is_over_once_nobody_is_left_and_nobody_answers(pid: int) -> None:
    answers: list[Status | None] = [replace(RUNNING, generation=7, agent_pid=pid, trainer_pid=None)]
    asked: list[int | None] = []
    attempt = FoundAttempt(lambda: answers[0], lambda generation: asked.append(generation) or 75)
    assert attempt.ended() is None

    answers[0] = None
    assert attempt.ended() is None, "its agent lives"

    os.kill(pid, signal.SIGKILL)
    assert wait_for(attempt) == Ended(75)
    assert asked == [7]


def test_a_found_run_whose_agent_still_answers_is_not_over() -> None:
    attempt = FoundAttempt(lambda: replace(RUNNING, agent_pid=2**22 + 1, trainer_pid=None), lambda generation: 0)

    assert attempt.ended() is None


def test_a_found_run_hears_only_what_ends_a_service(pid: int) -> None:
    attempt = FoundAttempt(lambda: None, lambda generation: None, [pid])
    attempt.signal(signal.SIGINT)
    attempt.signal(signal.SIGUSR1)
    assert attempt.ended() is None

    attempt.signal(signal.SIGTERM)
    assert wait_for(attempt) == Ended(None)


FAMILY = """
import os, signal, subprocess, sys
from harness.node.attempts import adopt_orphans, left_behind, reap_strangers
adopt_orphans()
tell = "sh -c 'echo {} $$; exec sleep 60'"  # says who it is, once it is that
families = tell.format("trainer") + " & setsid " + tell.format("daemon") + " & wait"
agent = subprocess.Popen(["sh", "-c", families], stdout=subprocess.PIPE, text=True)
pids = dict(agent.stdout.readline().split() for _ in range(2))
trainer = int(pids["trainer"])
agent.kill()
agent.wait()
left = left_behind()
for pid in left:
    print("the trainer" if pid == trainer else pid, os.getpgid(pid) == os.getpgrp())
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(left_behind())
reap_strangers()
try:
    os.waitpid(left[0], os.WNOHANG)
except ChildProcessError:
    print("reaped")
os.system("pkill -KILL -P %d" % os.getpid())
"""


def a_child(proc: Path, pid: int, *, name: bytes = b"python", state: bytes = b"S", pgrp: int = 0, flags: int = 0x400000,
            pending: int = 0) -> None:  # fmt: skip
    """Make the entry in /proc of a child of ours, of our group if no other is named."""
    (proc / str(pid)).mkdir()
    ids = b"%d %d" % (os.getpid(), pgrp or os.getpgrp())
    stat = b"%d (%b) %b %b 0 0 -1 %d %b%d 0" % (pid, name, state, ids, flags, b"0 " * 21, pending)
    (proc / str(pid) / "stat").write_bytes(stat)


def test_a_program_of_any_name_is_no_hindrance(tmp_path: Path) -> None:
    """The kernel cuts names off at 15 bytes: here in the middle of a character."""
    for pid, pgrp in ((11, os.getpgrp()), (12, 1)):
        a_child(tmp_path, pid, name="обучение) S 1 1".encode()[:15], pgrp=pgrp)

    assert left_behind(tmp_path) == [11]


def test_a_program_that_is_being_killed_is_not_left_behind(tmp_path: Path) -> None:
    """Whoever kills it and its agent at one moment would be told that it lives on, and no crash would count."""
    a_child(tmp_path, 11, pending=1 << signal.SIGTERM - 1)  # it may do something about that one
    a_child(tmp_path, 12, pending=1 << signal.SIGKILL - 1)
    a_child(tmp_path, 13, state=b"R", flags=0x400000 | 0x400)  # it has taken the signal
    a_child(tmp_path, 14, state=b"R", flags=0x400000 | 0x4)  # it gives its memory back: seconds, where that is a lot
    a_child(tmp_path, 15, state=b"Z")

    assert left_behind(tmp_path) == [11]


def test_the_kernel_says_so_of_a_process_that_was_just_killed() -> None:
    program = "import signal; b = bytearray(2**28); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        assert child.pid in left_behind()
        child.kill()
        assert child.pid not in left_behind()


def test_the_trainer_of_a_dead_agent_is_found_and_reaped_and_its_daemons_are_not_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAMILY],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        start_new_session=True,
    )

    assert done.stdout.splitlines() == ["the trainer True", "[]", "reaped"], done.stderr
