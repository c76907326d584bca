"""What a restart took: told once in each life but the first, in parts that sum to the total, on every way to start."""

from __future__ import annotations

import json
import shlex
import signal
import sys

from harness.core import events
from harness.core.snapshot import RunKeys
from harness.snapshots.journal import read_journal
from tests.support.process import Process
from tests.support.torch_trainer import STEPS
from tests.support.world import World

FAST = ("--back-off-s", "0.3", "--every-s", "1000")
HOLD = ("--hold-at", "12")


def lines(world: World) -> list[events.Line]:
    """The journal, all generations."""
    return list(read_journal(world.opened(), RunKeys(world.run)))


def restarts(world: World) -> list[events.Restarted]:
    """What was told of restarts; the parts of each sum to its total, to the millisecond."""
    found = [line.body for line in lines(world) if isinstance(line.body, events.Restarted)]
    for told in found:
        parts = (told.detect_s or 0.0, told.start_s, told.wait_s, told.first_step_s)
        assert all(part >= 0 for part in parts), told
        assert sum(round(1000 * part) for part in parts) == round(1000 * told.total_s), told
        assert told.start_s > 0, told
    return found


def moments(world: World, kind: type[events.Event]) -> list[float]:
    """When each event of a kind was told: seconds of this host's monotonic clock, and in order with all else."""
    return [line.mono for line in lines(world) if isinstance(line.body, kind)]


def died(world: World) -> None:
    """A first life that is killed with a durable snapshot, agent and all."""
    process = world.run_rigged(*FAST, "--at", "Published:2:kill-both", command=world.tiny(*HOLD))
    process.wait()
    world.wait_gone()


def finish(world: World) -> Process:
    process = world.run_rigged(*FAST, command=world.tiny(*HOLD))
    assert process.wait() == 0, process.stderr
    world.check_tiny()
    return process


def test_a_restart_of_the_agent_counts_from_the_last_sign_of_the_life_before(world: World) -> None:
    died(world)
    finish(world)

    (told,) = restarts(world)
    assert told.detect_s is not None
    assert told.tier == "remote"
    assert told.snapshot == f"00000001-{told.step - 1:012d}"
    assert told.fetching_s > 0


def test_a_restart_in_place_counts_from_the_death_of_the_trainer_back_off_and_all(world: World) -> None:
    process = world.run_rigged(*FAST, "--at", "Published:2:kill-trainer", command=world.tiny(*HOLD))
    assert process.wait() == 0, process.stderr
    world.check_tiny()

    (told,) = restarts(world)
    assert told.detect_s is not None
    assert told.detect_s >= 0.3
    assert told.tier == "memory"
    alive = moments(world, events.Published)[1]  # it was killed at this line
    assert told.total_s <= moments(world, events.Restarted)[0] - alive, "not from before its death"
    assert told.detect_s <= moments(world, events.TrainerConnected)[1] - alive


def test_a_program_that_starts_its_own_agent_waits_for_it_and_that_is_told(world: World) -> None:
    env = {"HARNESS_STORE": str(world.store), "HARNESS_RUN": world.run, "HARNESS_METADATA": "off"}
    first = world.start(*world.tiny(*HOLD), env=env)
    world.wait_until_durable(10)
    first.signal(signal.SIGTERM)
    assert first.wait() == 75, first.stderr
    world.wait_gone()
    world.released.touch()
    again = world.start(*world.tiny(*HOLD), env=env)
    assert again.wait() == 0, again.stderr
    world.wait_gone()

    (told,) = restarts(world)
    started = [line for line in lines(world) if isinstance(line.body, events.AgentStarted)]
    assert all(line.body.detached for line in started if isinstance(line.body, events.AgentStarted))
    assert told.start_s > 0, "a Python process was started meanwhile"


def test_a_run_that_begins_anew_is_no_restart(world: World) -> None:
    died(world)
    process = world.run_rigged(*FAST, "--fresh", "yes", command=world.tiny())
    assert process.wait() == 0, process.stderr

    assert restarts(world) == []


def test_the_last_restart_is_a_line_of_status_while_the_run_lives_and_after(world: World) -> None:
    died(world)
    world.released.unlink()
    process = world.run_rigged(*FAST, command=world.tiny(*HOLD))
    process.wait_for(" Restarted ")

    live = world.start(*world.harness("status", *world.named(), "--json"))
    assert live.wait() == 0, live.stderr
    world.released.touch()
    assert process.wait() == 0, process.stderr
    after = world.start(*world.harness("status", *world.named()))
    assert after.wait() == 0, after.stderr

    (told,) = restarts(world)
    assert json.loads(live.stdout)["restart"] == told.fields()
    assert told.words() in " ".join(after.stdout.decode().split())


def test_the_fetch_is_under_way_before_torch_is_imported_and_costs_the_program_nothing(world: World) -> None:
    output = ["--curve", world.curve, "--final", world.final]
    command = [sys.executable, "-m", "tests.support.torch_trainer", *output]
    first = world.run_rigged("--every-steps", "4", "--at", "Published:1:terminate", command=command)
    assert first.wait() == 75, first.stderr
    fetched_first = 'while [ ! -e "$1" ]; do sleep 0.01; done; shift; exec "$@"'
    late = ["sh", "-c", fetched_first, "sh", world.released, *command]
    again = world.run_rigged("--at", "Fetched:1:release", command=late)
    assert again.wait() == 0, again.stderr
    assert world.steps_of_curve()[-1] == STEPS

    (told,) = restarts(world)
    told_at = {type(line.body).__name__: line.mono for line in lines(world) if line.generation == 2}
    assert told_at["Fetched"] < told_at["TrainerConnected"]
    assert told.fetching_s > 0
    agent_at = moments(world, events.AgentStarted)[-1]
    assert told.total_s - (told.detect_s or 0.0) <= told_at["Restarted"] - agent_at + told.start_s


def test_an_older_generation_that_is_waited_for_is_no_fetch(world: World) -> None:
    died(world)
    there = world.elsewhere()
    rigged = ("--handover-s", "5", "--await-s", "0.1", *FAST)
    process = there.run_rigged(*rigged, command=there.tiny())
    assert process.wait() == 0, process.stderr
    there.check_tiny(20, world)

    (told,) = restarts(world)
    assert told.wait_s > 0.3
    assert told.fetching_s < told.wait_s


def test_a_program_that_its_own_parent_starts_again_counts_from_the_death_of_the_one_before(world: World) -> None:
    tiny = shlex.join(map(str, world.tiny()))
    process = world.run_rigged(*FAST, command=["sh", "-c", f"{tiny} --raise-at 12; exec {tiny}"])
    assert process.wait() == 0, process.stderr
    world.check_tiny()

    (told,) = restarts(world)
    assert told.tier == "memory"
    assert told.detect_s is not None
    assert told.total_s <= moments(world, events.Restarted)[0] - moments(world, events.TrainerConnected)[0]
