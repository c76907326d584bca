from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest

from cloud.pool import Pool
from cloud.priority import NICE, Background
from tests.support.needs import lacking
from tests.support.patience import HANG_S
from tests.support.priority import LAST, ORDINARY, priority


def made_in(background: Background, size: int = 1) -> Pool:
    """A pool that a thread made which works in the background."""

    def make() -> Pool:
        background.begin()
        return Pool(size, "test")

    return contextvars.copy_context().run(make)


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """Set at the end, so that no thread hangs."""
    event = threading.Event()
    yield event
    event.set()


def test_as_many_calls_as_there_are_threads_run_at_once() -> None:
    pool, together = Pool(3, "test"), threading.Barrier(3)

    futures = [pool.submit(together.wait, HANG_S) for _ in range(6)]

    assert sorted(future.result(HANG_S) for future in futures) == [0, 0, 1, 1, 2, 2]
    pool.shutdown()


def test_what_a_call_raises_is_told_to_who_asks() -> None:
    pool = Pool(1, "test")

    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result(HANG_S)

    assert pool.submit(int, "7").result(HANG_S) == 7
    pool.shutdown()


def test_shutting_down_cancels_what_waits_and_ends_the_threads() -> None:
    pool, begun, let_go = Pool(1, "test-ends"), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        let_go.wait(HANG_S)

    running, waiting = pool.submit(hang), pool.submit(hang)
    assert begun.wait(HANG_S)
    pool.shutdown()

    assert wait([waiting], HANG_S).done == {waiting}
    with pytest.raises(CancelledError):
        waiting.result()
    assert not running.done()
    thread = next(thread for thread in threading.enumerate() if thread.name == "test-ends_0")
    let_go.set()
    running.result(HANG_S)
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_call_that_nobody_can_be_started_for_is_not_made_by_somebody_else(
    monkeypatch: pytest.MonkeyPatch, let_go: threading.Event
) -> None:
    """Who submitted it has been told that it failed, and closes what the call would use."""
    pool, made = Pool(2, "test"), list[int]()
    running = pool.submit(let_go.wait, HANG_S)

    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not thread.name.startswith("test_"):  # one of an earlier test, which is none of ours
            return start(thread)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(made.append, 1)
    let_go.set()
    running.result(HANG_S)
    pool.submit(made.append, 2).result(HANG_S)

    assert made == [2]
    pool.shutdown()


def test_a_thread_that_hangs_does_not_hold_the_process() -> None:
    """An agent's exit code must not wait for a store that does not answer."""
    program = "import threading\nfrom cloud.pool import Pool\nPool(1, 'test').submit(threading.Event().wait)"

    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=False)

    assert done.returncode == 0


# ------------------------------------------------------------------------------------------------------------- priority


def test_a_pool_works_at_the_priority_of_its_maker_unless_that_works_in_the_background() -> None:
    pool = Pool(1, "test")

    assert pool.submit(priority).result(HANG_S) == priority() == ORDINARY
    pool.shutdown()


def test_a_pool_that_is_made_in_the_background_has_the_last_turn_at_cpu_and_disk() -> None:
    pool = made_in(Background())

    assert pool.submit(priority).result(HANG_S) == LAST
    assert priority() == ORDINARY  # who made it is not lowered: it could not be raised again
    pool.shutdown()


def test_threads_that_a_lowered_one_makes_are_low_as_well() -> None:
    pool = made_in(Background())

    assert pool.submit(lambda: Pool(1, "test").submit(priority).result(HANG_S)).result(HANG_S) == LAST
    pool.shutdown()


def test_what_has_become_urgent_is_done_by_new_threads_and_later_work_by_low_ones_again() -> None:
    background = Background()
    pool = made_in(background)
    found = [pool.submit(priority).result(HANG_S)]

    for background.urgent in (True, True, False, True):
        found.append(pool.submit(priority).result(HANG_S))

    assert found == [LAST, ORDINARY, ORDINARY, LAST, ORDINARY]
    pool.shutdown()


def test_what_becomes_urgent_does_not_wait_for_what_runs(let_go: threading.Event) -> None:
    background = Background()
    pool, begun = made_in(background), threading.Event()

    def hang() -> str:
        begun.set()
        let_go.wait(HANG_S)
        return "done"

    running = pool.submit(hang)
    assert begun.wait(HANG_S)
    background.urgent = True

    assert pool.submit(priority).result(HANG_S) == ORDINARY
    let_go.set()
    assert running.result(HANG_S) == "done"
    pool.shutdown()


def test_shutting_down_cancels_what_waits_for_low_threads_too(let_go: threading.Event) -> None:
    background = Background()
    pool, begun = made_in(background), threading.Event()

    def hang() -> None:
        begun.set()
        let_go.wait(HANG_S)

    running, waiting = pool.submit(hang), pool.submit(hang)
    assert begun.wait(HANG_S)
    background.urgent = True
    assert pool.submit(int, "7").result(HANG_S) == 7
    pool.shutdown()

    assert wait([waiting], HANG_S).done == {waiting}
    assert waiting.cancelled()
    let_go.set()
    running.result(HANG_S)


@pytest.mark.parametrize(("nice", "lowered"), [(3, 13), (15, 19)])
def test_a_run_that_is_nice_itself_saves_no_less_nicely_than_it_trains(nice: int, lowered: int) -> None:
    """Root may set any value: a fixed one put what saves before a trainer that was started under `nice`."""
    program = f"""
import os
from cloud.pool import Pool
from cloud.priority import Background
from tests.support.priority import priority
os.setpriority(os.PRIO_PROCESS, 0, {max(nice, ORDINARY[0])})
background = Background()
background.begin()
print(Pool(1, "test").submit(priority).result({HANG_S})[0])
"""
    assert _run(program) == [str(max(lowered, LAST[0]))]


def test_a_run_that_has_the_idle_disk_only_does_not_take_more_of_it_to_save() -> None:
    program = f"""
import ctypes
from cloud.pool import Pool
from cloud.priority import _IOPRIO, Background
import platform
ctypes.CDLL(None).syscall(_IOPRIO[platform.machine()][1], 1, 0, 3 << 13)
from tests.support.priority import priority
background = Background()
background.begin()
print(Pool(1, "test").submit(priority).result({HANG_S})[1] >> 13)
"""
    assert _run(program) == ["3"]


@pytest.mark.root
def test_nobody_needs_privileges_for_that() -> None:
    if os.geteuid() != 0:
        lacking("root", "to become somebody without privileges")
    program = f"""
import ctypes, os
from cloud.pool import Pool
from cloud.priority import Background
from tests.support.priority import priority
os.setuid(65534)
background = Background()
background.begin()
pool = Pool(1, "test")
print(*pool.submit(priority).result({HANG_S}))
background.urgent = True
print(*pool.submit(priority).result({HANG_S}))
try:
    os.setpriority(os.PRIO_PROCESS, 0, {NICE})
    os.setpriority(os.PRIO_PROCESS, 0, 0)
except PermissionError:
    print("a thread that was lowered stays low")
"""
    low, ordinary = " ".join(map(str, LAST)), " ".join(map(str, ORDINARY))
    assert _run(program) == [low, ordinary, "a thread that was lowered stays low"]


def _run(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()
