from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest

from cloud.pool import Pool

WAIT_S = 30.0


def test_as_many_calls_as_there_are_threads_run_at_once() -> None:
    pool, together = Pool(3, "test"), threading.Barrier(3)

    futures = [pool.submit(together.wait, WAIT_S) for _ in range(6)]

    assert sorted(future.result(WAIT_S) for future in futures) == [0, 0, 1, 1, 2, 2]
    pool.shutdown()


def test_what_a_call_raises_is_told_to_who_asks() -> None:
    pool = Pool(1, "test")

    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result(WAIT_S)

    assert pool.submit(int, "7").result(WAIT_S) == 7
    pool.shutdown()


def test_shutting_down_cancels_what_waits_and_ends_the_threads() -> None:
    pool, begun, let_go = Pool(1, "test-ends"), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        let_go.wait(WAIT_S)

    running, waiting = pool.submit(hang), pool.submit(hang)
    assert begun.wait(WAIT_S)
    pool.shutdown()

    assert wait([waiting], WAIT_S).done == {waiting}
    with pytest.raises(CancelledError):
        waiting.result()
    assert not running.done()
    thread = next(thread for thread in threading.enumerate() if thread.name == "test-ends_0")
    let_go.set()
    running.result(WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_thread_that_hangs_does_not_hold_the_process() -> None:
    """An agent's exit code must not wait for a store that does not answer."""
    program = "import threading\nfrom cloud.pool import Pool\nPool(1, 'test').submit(threading.Event().wait)"

    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], timeout=WAIT_S, check=False)

    assert done.returncode == 0
