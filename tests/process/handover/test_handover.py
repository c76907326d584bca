"""Two hosts and one run: the newcomer gets the older one's last step, whatever becomes of the older one.

A host is a runtime directory and a local disk of its own; what they share is the store, a directory or S3. Silence and
looks are shortened, the order of things is the real one. Under each generation one trainer trains: both curves together
are the unbroken run's, and where nobody dies without a word no step is made twice.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud.testing.metadata_sim import MetadataSimulator
from harness.config.settings import Settings
from harness.core.snapshot import SnapshotId
from tests.support.process import Process
from tests.support.s3_server import S3Server
from tests.support.torch_trainer import STEPS as TORCH_STEPS
from tests.support.world import World, nobody_left, steps_said, unbroken_curve

STEPS = 300
SLOW_S, QUICK_S = 0.03, 0.001  # of the older one, which trains until it is asked to leave; of the newcomer
FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--heartbeat-s", "0.2", "--await-s", "0.1")
LOOKING = (*FAST, "--look-s", "0.1")
BLIND = (*FAST, "--look-s", "1000")  # never sees that there is a newcomer
SILENCE_S = 2.0  # where nobody lives who could be taken for silent
NOT_SILENT_S = 5.0  # where somebody lives, and dies meanwhile
OUTLASTS = 290  # the older one stays there, listening: it leaves when it is asked to, and never ends before


@pytest.fixture(params=["directory"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """The first host. Nobody may be left on any host when the test ends."""
    with (
        S3Server() as server,
        nobody_left(request, World(tmp_path, s3=server if request.param == "s3" else None)) as made,
    ):
        yield made


on_s3 = pytest.mark.parametrize("world", ["s3"], indirect=True)


def train(host: World, *options: str | Path, step_s: float = SLOW_S, hold_at: int | None = None) -> Process:
    """Start the run on a host, with the trainer without torch."""
    hold = [] if hold_at is None else ["--hold-at", str(hold_at)]
    return host.run_rigged(
        *(options or LOOKING), command=host.tiny("--every-steps", "10", *hold, steps=STEPS, step_s=step_s)
    )


def under_load(host: World, *options: str | Path) -> Process:
    """The older one, which trains until it is asked to leave, and has a durable snapshot."""
    process = train(host, *options, hold_at=OUTLASTS)
    process.wait_for(r" Published tier=remote ")
    return process


def held(host: World, *options: str | Path) -> Process:
    """The older one, which waits at a boundary for `host.released`, and has a durable snapshot."""
    process = train(host, *options, step_s=QUICK_S, hold_at=105)
    process.wait_for(r" Published tier=remote ")
    return process


def newcomer(host: World, *options: str | Path) -> Process:
    """The one that comes second, at a point where it waits for the first."""
    process = train(host, *options, step_s=QUICK_S)
    process.wait_for(" HandoverAwaited generation=1 ")
    return process


def check_together(*hosts: World, twice: bool = False) -> None:
    """All curves are pieces of the unbroken one, and leave nothing out; no step is made `twice`."""
    unbroken, final = unbroken_curve(STEPS)
    trained = [line for host in hosts if host.curve.exists() for line in host.curve.read_text().splitlines()]
    assert set(trained) == set(unbroken)
    assert twice or trained == unbroken
    assert hosts[-1].final.read_text() == final
    assert hosts[-1].check_commits()[-1].step == STEPS


def check_refused(world: World) -> None:
    """Whoever starts the run now is told that it has finished."""
    late = train(world.elsewhere())
    assert late.wait() == 64, late.stderr
    assert f"finished at step {STEPS}" in late.stderr
    assert "TrainerConnected" not in late.stderr


def durable_of(process: Process) -> int:
    """The newest durable step, as a generation's last word has it."""
    said = re.search(r" Ended [^\n]* durable_step=(\d+)", process.stderr)
    assert said is not None, process.stderr
    return int(said[1])


def last_commit_of(world: World, generation: int) -> SnapshotId:
    return max(found for found in world.survey().commits if found.generation == generation)


# ---- nobody dies without a word -------------------------------------------------------------------------------------


@pytest.mark.sample
def test_the_newcomer_resumes_the_last_step_of_one_that_trains_until_then_whatever_their_clocks_say(
    world: World,
) -> None:
    first = under_load(world, *LOOKING, "--clock-offset-s", "3600")
    host = world.elsewhere()
    second = train(host, *LOOKING, "--clock-offset-s", "-3600", step_s=QUICK_S)

    assert first.wait() == 73, first.stderr
    last = world.steps_of_curve()[-1]
    assert 0 < last < STEPS
    assert f"Ended outcome=superseded exit_code=73 local_step={last} durable_step={last}" in first.stderr
    assert "nothing is lost" in first.stderr
    assert second.wait() == 0, second.stderr
    assert steps_said(second.stderr, "Restored") == [last]
    assert f"Restored snapshot={SnapshotId(1, last)}" in second.stderr, "the very last one, not the prefetched"
    waited_s = re.search(r" HandoverOver seconds=([\d.]+)", second.stderr)
    assert waited_s is not None
    assert float(waited_s[1]) < Settings.handover_s, "it was told, and did not wait for silence"
    check_together(world, host)


@pytest.mark.parametrize(
    ("world", "sees"),
    [pytest.param("directory", True, id="it-sees-both"), pytest.param("s3", False, id="it-sees-the-notice-alone")],
    indirect=["world"],
)
def test_a_recommendation_a_newcomer_and_then_the_notice_lose_no_step(world: World, sees: bool) -> None:
    host = world.elsewhere()
    with MetadataSimulator() as metadata:
        first = under_load(world, *(LOOKING if sees else BLIND), "--metadata", metadata.url, "--every-steps", "1000")
        metadata.rebalance()
        first.wait_for(r" NoticeSeen kind=rebalance [^\0]* Sealed [^\0]* Published tier=remote ")
        second = train(host, step_s=QUICK_S)
        second.wait_for(" Claimed generation=2 ")
        metadata.notice(lead_s=60.0)

        assert first.wait() == (73 if sees else 75), first.stderr
    last = world.steps_of_curve()[-1]
    assert durable_of(first) == last
    assert second.wait() == 0, second.stderr
    assert steps_said(second.stderr, "Restored") == [last]
    check_together(world, host)


def torch(host: World, *hold: str) -> Process:
    output = ["--curve", host.curve, "--final", host.final, "--hold-until", host.released]
    trainer = [sys.executable, "-m", "tests.support.torch_trainer", *output, *hold]
    return host.run_rigged(*LOOKING, "--every-steps", "2", command=trainer)


@pytest.mark.long("several lives of a training with torch")
@on_s3
def test_real_torch_goes_on_elsewhere_as_if_nothing_had_been(world: World) -> None:
    reference = World(world.root / "reference")
    reference.root.mkdir()
    unbroken = torch(reference)
    host = world.elsewhere()
    first = torch(world, "--hold-at", str(TORCH_STEPS - 3))
    first.wait_for(r" Published tier=remote ")
    second = torch(host)

    assert first.wait() == 73, first.stderr
    assert second.wait() == 0, second.stderr
    assert unbroken.wait() == 0, unbroken.stderr
    last = world.steps_of_curve()[-1]
    assert last < TORCH_STEPS
    assert steps_said(second.stderr, "Restored") == [last]
    assert world.curve.read_text() + host.curve.read_text() == reference.curve.read_text()
    assert host.final.read_text() == reference.final.read_text()


def test_of_three_the_last_one_goes_on(world: World) -> None:
    first = held(world, *BLIND)
    host, another = world.elsewhere(), world.elsewhere()
    second = newcomer(host, *LOOKING)
    third = train(another, *LOOKING, step_s=QUICK_S)

    assert second.wait() == 73, second.stderr
    assert "TrainerConnected" not in second.stderr or not host.curve.exists(), "it has not trained"
    third.wait_for(" HandoverAwaited generation=1 ")
    first.signal(signal.SIGTERM)
    assert first.wait() == 75, first.stderr
    assert third.wait() == 0, third.stderr
    check_together(world, host, another)


@on_s3
def test_started_twice_at_once_one_goes_on_and_the_other_leaves(world: World) -> None:
    host = world.elsewhere()
    both = [train(each, step_s=QUICK_S, hold_at=OUTLASTS) for each in (world, host)]
    for process in both:
        process.wait_for(" Claimed ")
    for each in (world, host):
        each.released.touch()

    codes = [process.wait() for process in both]

    assert sorted(codes) == [0, 73], "\n".join(process.stderr for process in both)
    hosts = [world, host] if codes[1] == 0 else [host, world]
    check_together(*hosts, twice=True)  # the first step of one that hears of the other before it has a slot is lost


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["notice", "ctrl-c"])
@pytest.mark.parametrize("is_connected", [False, True], ids=["at the begin", "connected"])
def test_a_newcomer_that_is_told_to_leave_does_so_at_once_and_harms_nothing(
    world: World, signum: int, code: int, is_connected: bool
) -> None:
    first = held(world, *BLIND)
    host = world.elsewhere()
    second = newcomer(host)
    if is_connected:
        second.wait_for("waiting for the agent to decide")
    second.signal(signum)

    assert second.wait() == code, second.stderr
    assert f"signal {signal.SIGTERM.name}" not in second.stderr or signum == signal.SIGTERM
    assert not host.curve.exists()
    world.released.touch()
    assert first.wait() == 0, first.stderr
    assert {found.generation for found in world.survey().commits} == {1}
    check_together(host, world)
    check_refused(world)


def test_one_that_finishes_while_a_newcomer_waits_has_finished_the_run(world: World) -> None:
    first = held(world, *BLIND)
    host = world.elsewhere()
    second = newcomer(host)
    world.released.touch()

    assert first.wait() == 0, first.stderr
    assert second.wait() == 64, second.stderr
    assert f"finished at step {STEPS}" in second.stderr
    assert not host.curve.exists()
    check_together(host, world)
    check_refused(world)


def test_no_generation_is_begun_in_place_while_a_newcomer_waits(world: World) -> None:
    first = under_load(world, *BLIND)
    trainer = int(first.wait_for(r" TrainerStarted pid=(\d+)")[1])
    host = world.elsewhere()
    second = newcomer(host)
    os.kill(trainer, signal.SIGKILL)

    assert first.wait() == 73, first.stderr
    assert first.stderr.count(" Claimed ") == 1
    assert "SupersededBy generation=2" in first.stderr
    assert second.wait() == 0, second.stderr
    assert steps_said(second.stderr, "Restored") == [durable_of(first)]
    check_together(world, host, twice=True)


@on_s3
def test_a_store_that_is_down_for_a_while_delays_the_handover_and_loses_nothing(world: World) -> None:
    assert world.s3 is not None
    quick = ("--attempts", "2", "--handover-s", "60")
    first = under_load(world, *LOOKING, *quick)
    host = world.elsewhere()
    second = train(host, *LOOKING, *quick, step_s=QUICK_S)
    first.wait_for(" SupersededBy ")
    world.s3.down()
    second.wait_for(" StoreBlind ")
    world.s3.up()

    assert first.wait() == 73, first.stderr
    last = world.steps_of_curve()[-1]
    assert durable_of(first) == last
    assert second.wait() == 0, second.stderr
    assert steps_said(second.stderr, "Restored") == [last]
    check_together(world, host)


def test_one_whose_trainer_is_deaf_leaves_in_time_with_what_is_sealed(world: World) -> None:
    deaf = world.tiny("--every-steps", "10", "--stuck-at", "105", steps=STEPS, step_s=QUICK_S)
    first = world.run_rigged(*LOOKING, "--handover-s", str(NOT_SILENT_S), command=deaf)
    first.wait_for(r" Published tier=remote ")
    host = world.elsewhere()
    second = train(host, *LOOKING, step_s=QUICK_S)

    assert first.wait() == 73, first.stderr
    sealed = steps_said(first.stderr, "Sealed")[-1]
    assert durable_of(first) == sealed
    assert second.wait() == 0, second.stderr
    assert steps_said(second.stderr, "Restored") == [sealed]
    check_together(world, host, twice=True)


def test_one_that_is_superseded_and_told_to_leave_twice_does_not_ask_to_be_started_again(world: World) -> None:
    deaf = world.tiny("--every-steps", "10", "--stuck-at", "105", steps=STEPS, step_s=QUICK_S)
    first = world.run_rigged(*LOOKING, command=deaf)
    first.wait_for(r" Published tier=remote ")
    host = world.elsewhere()
    second = train(host, step_s=QUICK_S)
    first.wait_for(" SupersededBy ")
    first.signal(signal.SIGTERM)
    first.wait_for(" NoticeSeen ")
    first.signal(signal.SIGTERM)

    assert first.wait() == 73, first.stderr
    assert "Ended outcome=superseded" in first.stderr
    assert second.wait() == 0, second.stderr
    check_together(world, host, twice=True)


# ---- without a word -------------------------------------------------------------------------------------------------


@on_s3
def test_a_host_that_is_gone_is_waited_for_as_long_as_its_silence_counts_and_no_longer(world: World) -> None:
    silence = ("--handover-s", str(SILENCE_S))
    first = under_load(world, *LOOKING, *silence)
    world.lose_host()
    assert first.wait() == -signal.SIGKILL
    durable = last_commit_of(world, 1).step
    host = world.elsewhere()
    second = train(host, *LOOKING, *silence, step_s=QUICK_S)

    assert second.wait() == 0, second.stderr
    waited_s = re.search(r" HandoverOver seconds=([\d.]+)", second.stderr)
    assert waited_s is not None, second.stderr
    assert SILENCE_S <= float(waited_s[1]) < Settings.handover_s
    assert steps_said(second.stderr, "Restored") == [durable]
    check_together(world, host, twice=True)


@on_s3
def test_one_that_was_frozen_for_longer_than_silence_wakes_leaves_and_damages_nothing(world: World) -> None:
    silence = ("--handover-s", str(SILENCE_S))
    first = under_load(world, *LOOKING, *silence)
    world.signal_host(signal.SIGSTOP)
    host = world.elsewhere()
    second = train(host, *LOOKING, *silence, step_s=QUICK_S, hold_at=200)
    second.wait_for(r" Published tier=remote snapshot=00000002-")
    world.signal_host(signal.SIGCONT)

    assert first.wait() == 73, first.stderr
    assert "SupersededBy generation=2" in first.stderr
    usable = world.check_commits()
    assert usable[-1].generation == 2, "the newest is the newcomer's"
    host.released.touch()
    assert second.wait() == 0, second.stderr
    assert "Quarantined" not in first.stderr + second.stderr
    check_together(world, host, twice=True)


# ---- and every new moment at which one may die ----------------------------------------------------------------------


def test_the_older_one_dies_as_it_hears_of_the_newcomer(world: World) -> None:
    host = world.elsewhere()
    first = under_load(world, *LOOKING, "--at", "SupersededBy:1:kill-both")
    second = train(host, *LOOKING, "--handover-s", str(NOT_SILENT_S), step_s=QUICK_S)

    assert first.wait() == -signal.SIGKILL
    assert second.wait() == 0, second.stderr
    (restored,) = steps_said(second.stderr, "Restored")
    assert restored >= max(steps_said(first.stderr, "Published"))
    check_together(world, host, twice=True)


@pytest.mark.parametrize("event", ["HandoverAwaited", "HandoverOver"])
def test_the_newcomer_dies_in_the_handover_and_the_next_start_there_waits_for_nobody(world: World, event: str) -> None:
    host = world.elsewhere()
    first = under_load(world)
    second = train(host, step_s=SLOW_S)
    second.wait_for(f" {event} ")
    host.lose_host()
    assert second.wait() == -signal.SIGKILL
    assert first.wait() == 73, first.stderr
    again = train(host, step_s=QUICK_S)

    assert again.wait() == 0, again.stderr
    assert "HandoverAwaited" not in again.stderr
    assert steps_said(again.stderr, "Restored")[0] >= durable_of(first)
    check_together(world, host, twice=True)
