from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from harness.ipc import process as module
from harness.ipc.process import began_at, open_pidfd, pidfd_dead, start_ticks
from tests.support.patience import HANG_S


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
    assert start_ticks(process.pid) is None
    os.close(pidfd)


def test_a_process_has_at_least_the_ticks_of_the_one_that_started_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine, ticks = start_ticks(os.getpid()), start_ticks(process.pid)
    assert mine is not None
    assert ticks is not None
    assert mine <= ticks
    process.kill()
    process.wait(HANG_S)
    process.communicate()


def test_a_pause_between_two_clocks_does_not_move_the_start_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine had other things to do for 20 ms, and a trainer counted as a left-over of an earlier start."""
    clock, pauses = time.clock_gettime, iter([5.0, 0.0, 7.0])
    began = began_at(os.getpid())

    monkeypatch.setattr(module.time, "clock_gettime", lambda which: clock(which) - next(pauses, 0.0))

    assert abs(began_at(os.getpid()) - began) < 1.0
