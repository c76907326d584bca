"""Somebody who says nothing any more: a store in the middle of a call, an agent that was stopped.

Nothing fails for minutes then. Whoever asks is answered all the same, and whoever is told to leave leaves in time.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.s3_server import S3Server
from tests.support.world import World, nobody_left, steps_said

STEPS = 20
HOLD = ("--hold-at", "12", "--patient-until", "10")
STUCK = ("--stuck-at", "12", "--patient-until", "10")  # a step that is long
SLOW = ("--every-s", "1000", "--await-s", "0.1")


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(min_part_bytes=1) as made:
        yield made


@pytest.fixture
def bucket(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Iterator[World]:
    """A world whose store is S3."""
    with nobody_left(request, World(tmp_path, s3=server)) as made:
        yield made


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world whose store is a directory."""
    with nobody_left(request, World(tmp_path)) as made:
        yield made


def held(world: World, *options: str, trainer: tuple[str, ...] = HOLD) -> Process:
    """A run that waits at step 12, with everything of step 10 durable."""
    process = world.run_rigged(*SLOW, *options, command=world.tiny(*trainer))
    process.wait_for(r" Published tier=remote [^\n]*step=10 ")
    world.wait_until(lambda: world.curve.exists() and world.steps_of_curve()[-1:] == [12], "step 12")
    return process


# ---- a store --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_waits_for_a_store_leaves_at_once_when_it_is_told_to(
    bucket: World, server: S3Server, signum: int
) -> None:
    """The main thread was in that call: a notice, a signal and `harness status` waited until it came back."""
    stalled = server.fault("stall", times=None)
    process = bucket.run_rigged(*SLOW, "--first-answer-s", "1000", command=bucket.tiny())
    server.wait_struck(stalled)
    asked = bucket.start(*bucket.harness("status", *bucket.named(), "--json"))
    assert asked.wait() == 0, asked.stderr
    assert b'"state": "starting"' in asked.stdout

    process.signal(signum)

    assert process.wait() == (74 if signum == signal.SIGTERM else 130), "the store tells nobody what else it has"
    assert not bucket.curve.exists(), "no trainer was started"
    server.release()


def test_a_start_whose_directory_hangs_hears_and_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network mount whose server is gone: `harness run` hung in its first mkdir, before it could hear anything."""
    monkeypatch.setenv("HARNESS_TEST_DELAY", "open=1000")
    process = world.run_rigged(*SLOW, "--first-answer-s", "0.2", command=world.tiny())
    process.wait_for("StoreBlind")
    asked = world.start(*world.harness("status", *world.named(), "--json"))
    assert asked.wait() == 0, asked.stderr

    process.signal(signal.SIGTERM)

    assert process.wait() == 74, process.stderr
    assert not world.store.exists()


@pytest.mark.sample
@pytest.mark.parametrize("which", ["--store", "--local"])
def test_a_directory_that_cannot_be_used_starts_nothing(world: World, which: str) -> None:
    (world.root / "file").touch()
    process = world.run_harness(which, world.root / "file" / "store", command=world.tiny())

    assert process.wait() == 64
    assert "cannot be used: " in process.stderr
    assert "Not a directory" in process.stderr
    assert not world.curve.exists()


@pytest.mark.parametrize(
    "when", ["at the first call", pytest.param("later", marks=pytest.mark.long("a start waits 10 s for an answer"))]
)
def test_a_detached_start_that_waits_for_a_store_ends_with_its_program(
    bucket: World, server: S3Server, when: str
) -> None:
    """Its program took the agent's end for a crash, and started others, which had not heard of the signal."""
    stalled = server.fault("stall", times=None)
    settings = {
        "HARNESS_STORE": bucket.location, "HARNESS_RUN": bucket.run, "HARNESS_METADATA": "off",
        "HARNESS_S3_ENDPOINT": server.url,
    }  # fmt: skip
    program = bucket.start(*bucket.tiny(steps=30), env=settings)
    server.wait_struck(stalled)
    log = bucket.place.log
    if when == "later":
        bucket.wait_until(lambda: "StoreBlind" in log.read_text(), "the store to be called silent")
    agent = re.search(r"AgentStarted [^\n]*pid=(\d+)", log.read_text())
    assert agent is not None

    os.kill(int(agent[1]), signal.SIGTERM)

    assert program.wait() == 1
    assert "before the store answered; no training was done here" in program.stderr
    bucket.wait_gone()
    assert log.read_text().count("AgentStarted") == 1
    assert "Ended outcome=interrupted exit_code=74" in log.read_text()
    server.release()


def test_a_last_snapshot_does_not_wait_behind_the_upkeep_after_the_one_before(bucket: World, server: S3Server) -> None:
    """A call that gets no answer lasts 15 s: longer than many a notice. Here it lasts longer than any."""
    stalled = server.fault("stall", "DeleteObject", key="0005", times=None)
    process = held(bucket, "--grace-s", "100", "--read-s", "1000", "--keep-last", "1")
    server.wait_struck(stalled)

    process.signal(signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert " Drained durable_step=12 " in process.stderr, process.stderr
    server.release()


@pytest.mark.long("a run that is waited for until its grace is over")
def test_a_run_whose_store_takes_no_bytes_ends_in_its_grace_and_says_that_it_has(
    bucket: World, server: S3Server
) -> None:
    """Its end was never recorded: whoever came next waited until its journal counted as silent."""
    process = held(bucket, "--grace-s", "8", "--silent-s", "3")
    stalled = server.fault("stall", key="safetensors", times=None)

    process.signal(signal.SIGTERM)
    server.wait_struck(stalled)

    assert process.wait() == 74, process.stderr
    assert steps_said(process.stderr, "StoreSilent") == [12]
    assert bucket.survey().done is not None, "nobody waits for it"
    server.clear()
    host = bucket.elsewhere()
    host.released.touch()
    again = host.run_rigged(*SLOW, "--handover-s", "1000", command=host.tiny(*HOLD))
    assert again.wait() == 0, again.stderr
    assert steps_said(again.stderr, "Restored") == [10]
    host.check_tiny(STEPS, bucket)


# ---- an agent -------------------------------------------------------------------------------------------------------


def test_an_agent_that_was_stopped_is_named_to_whoever_asks_for_its_run(world: World) -> None:
    """They waited for its answer, without a word, for as long as it was stopped."""
    process = held(world)
    process.signal(signal.SIGSTOP)

    status = world.start(*world.harness("status", *world.named()))
    removing = world.start(*world.harness("rm", *world.named(), "all", "--yes"))
    drill = world.start(*world.harness("drill", *world.named()))
    second = world.run_rigged(*SLOW, "--take-over-s", "0.5", command=world.tiny())

    assert status.wait() == 0, status.stderr
    assert b"does not answer here" in status.stdout
    for refused in (removing, drill, second):
        assert refused.wait() == 64, refused.stderr
        assert f"process {process.pid}" in refused.stderr
    assert "kill -CONT" in second.stderr
    assert f"does not answer: process {process.pid}: waiting up to" in second.stderr
    process.signal(signal.SIGCONT)
    world.released.touch()
    assert process.wait() == 0, process.stderr
    world.check_tiny(STEPS)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_waits_for_a_stopped_agent_leaves_when_it_is_told_to(world: World, signum: int) -> None:
    process = held(world)
    process.signal(signal.SIGSTOP)
    second = world.run_rigged(*SLOW, "--notices", "down", "--blind-after-s", "0",
                              command=world.tiny())  # fmt: skip
    second.wait_for(" SourceBlind ")

    second.signal(signum)

    assert second.wait() == (74 if signum == signal.SIGTERM else 130), second.stderr
    process.signal(signal.SIGCONT)
    world.released.touch()
    assert process.wait() == 0, process.stderr


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.sample
def test_a_second_sigterm_takes_nothing_away(world: World) -> None:
    """Two of them come at a shutdown, one from the unit and one from its process group: the second one left at once."""
    process = held(world, trainer=STUCK)
    process.signal(signal.SIGTERM)
    process.wait_for(" Draining ")
    process.signal(signal.SIGTERM)
    asked = world.start(*world.harness("status", *world.named()))
    assert asked.wait() == 0, "it has heard the signal by the time that it answers"
    world.released.touch()

    assert process.wait() == 75, process.stderr
    assert world.check_commits()[-1].step == 13, "the step that it was in"


def test_a_second_ctrl_c_leaves_at_once(world: World) -> None:
    """Whoever sits there knows what he does; what is durable stays so."""
    process = held(world, trainer=STUCK)
    process.signal(signal.SIGINT)
    process.wait_for(" Draining ")
    process.signal(signal.SIGINT)

    assert process.wait() == 130, process.stderr
    assert "second Ctrl-C: exiting now" in process.stderr
    assert world.check_commits()[-1].step == 10
