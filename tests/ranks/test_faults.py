"""Several ranks that are not alike, late, uneven, stopped or twice there: a named error, or a recovery."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.process.kills.test_every_event import heard
from tests.ranks.test_kills import FAST, NOTICE, RANKS, STEPS, check_unbroken, finish, ranks
from tests.support import tiny_rank
from tests.support.process import Process
from tests.support.world import World, steps_said

pytestmark = pytest.mark.long("lives of several ranks")


def pids(process: Process) -> list[int]:
    """Pids of the ranks that have connected last, in rank order."""
    found = dict(re.findall(r" TrainerConnected pid=(\d+) rank=(\d+)", process.stderr))
    by_rank = {int(rank): int(pid) for pid, rank in found.items()}
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_a_signal_to_any_of_them_is_one_notice_and_all_leave_with_one_step(world: World) -> None:
    for number, whom in enumerate(("rank", "all", "launcher", "agent")):
        world.released.unlink(missing_ok=True)
        process = world.run_rigged(*FAST, command=ranks(world, "--hold-at", str(6 + 3 * number)))
        process.wait_for(r" Published [^\n]*step=5 " if not number else r" FirstStep ")
        launcher = int(re.findall(r" TrainerStarted pid=(\d+)", process.stderr)[-1])
        ranks_of = {"rank": pids(process)[1:2], "all": pids(process), "launcher": [launcher], "agent": [process.pid]}
        for pid in ranks_of[whom]:
            os.kill(pid, signal.SIGTERM)
        if whom == "agent":  # its whole group got it, and the launcher does not catch it: `torch.multiprocessing.spawn`
            os.kill(launcher, signal.SIGKILL)

        assert process.wait() == 75, process.stderr
        last = steps_said(process.stderr, "Sealed")[-RANKS:]
        assert len(set(last)) == 1, process.stderr
        assert steps_said(process.stderr, "NoticeSeen") == []
        world.wait_gone()
    world.released.touch()
    process = world.run_rigged(*FAST, command=ranks(world))
    assert process.wait() == 0, process.stderr
    check_unbroken(world)


def test_ranks_whose_launcher_dies_seal_a_last_step_together_and_begin_again(world: World) -> None:
    process = world.run_rigged(*FAST, "--failed-s", "8", command=ranks(world, "--hold-at", "8", "--up-to", "9"))
    process.wait_for(r" Published [^\n]*step=5 ")
    os.kill(int(re.findall(r" TrainerStarted pid=(\d+)", process.stderr)[-1]), signal.SIGKILL)

    process.wait_for(r" Published [^\n]*step=[6789] ")
    process.wait_for(" TrainerLeft ")
    world.released.touch()
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Restored")[0] in (6, 7, 8, 9), process.stderr
    check_unbroken(world)


def test_uneven_ends_are_an_error_that_names_the_steps(world: World) -> None:
    process = world.run_rigged(*FAST, command=ranks(world, "--uneven", together=False))
    assert process.wait() == 1, process.stderr
    assert re.search(r"the loops of the ranks end at different steps: .*20.*21", process.stderr), process.stderr
    assert "drop_last" in process.stderr


def test_a_rank_that_fails_before_its_checkpointer_is_a_crash_and_no_notice(world: World) -> None:
    """Its launcher ends the others by SIGTERM: as a notice it would have the run started again, without end."""
    process = world.run_rigged(*FAST, "--max-crashes", "0", command=ranks(world, "--fails-early", together=False))
    process.wait_for(r"(?: TrainerConnected [^\0]*){2}")
    world.released.touch()

    assert process.wait() == 1, process.stderr
    assert "NoticeSeen" not in process.stderr
    assert "injected before the first step" in process.stderr


def test_a_rank_that_differs_is_named_and_the_snapshot_is_not_used(world: World) -> None:
    process = world.run_rigged(*FAST, command=ranks(world, "--differs-at", "3"))
    assert process.wait() == 0, process.stderr

    found = re.search(r" RanksDiffer step=(\d+) tensor=common ranks=\"?\(2,\)", process.stderr)
    assert found is not None, process.stderr
    assert int(found[1]) not in [snapshot.step for snapshot in world.check_commits()]
    assert world.survey().finished_at == STEPS


@pytest.mark.sample
@pytest.mark.parametrize("how", [("--maybe",), ()])
def test_what_is_not_equal_any_more_is_each_rank_s_own_in_the_very_snapshot_that_all_leave_with(
    how: tuple[str, ...], world: World
) -> None:
    """Nothing compares later: one rank would go on with rows of another."""
    options = (*how, "--differs-at", "7")
    process = world.run_rigged(*FAST, command=ranks(world, *options, "--hold-at", "8"))
    process.wait_for(r" Published [^\n]*step=5 ")
    world.wait_until(lambda: farthest(world) == [8] * RANKS, "step 8 of all")
    os.kill(process.pid, signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    (differs,) = steps_said(process.stderr, "RanksDiffer")
    assert world.check_commits()[-1].step == differs, process.stderr
    world.wait_gone()
    process = world.run_rigged(*FAST, command=ranks(world, *options))
    assert process.wait() == 0, process.stderr
    assert steps_said(process.stderr, "Restored") == [differs]
    check_differing(world, 7)


@pytest.mark.parametrize(
    "options", [("--maybe", "--steps", "20", "--differs-at", "19"), ("--steps", "18", "--differs-at", "17")]
)
def test_what_is_not_equal_any_more_is_each_rank_s_own_in_the_last_snapshot(
    options: tuple[str, ...], world: World
) -> None:
    process = world.run_rigged(*FAST, command=ranks(world, *options))
    assert process.wait() == 0, process.stderr
    (differs,) = steps_said(process.stderr, "RanksDiffer")
    assert world.check_commits()[-1].step == differs
    assert world.survey().finished_at == differs


def check_differing(world: World, differs_at: int) -> None:
    """Each rank's steps are the unbroken run's, in which the last rank's common chain becomes another one."""
    for rank in range(RANKS):
        at = differs_at if rank == RANKS - 1 else None
        lines = set(Path(f"{world.curve}.{rank}").read_text().splitlines())
        assert lines == set(tiny_rank.unbroken(rank, STEPS, at))


def test_a_rank_that_has_more_to_store_than_before_does_not_keep_the_others_waiting(world: World) -> None:
    process = world.run_rigged(*FAST, command=ranks(world, "--grows-at", "7"))
    assert process.wait() == 0, process.stderr
    published = steps_said(process.stderr, "Published")
    assert any(step < 7 for step in published), process.stderr
    assert any(7 <= step < STEPS for step in published), process.stderr
    check_unbroken(world)


def test_a_rank_that_has_more_to_store_under_a_notice_leaves_with_the_others(world: World) -> None:
    """It waits for slots at the step that was agreed; they may be asked for a later one meanwhile."""
    process = world.run_rigged(*FAST, "--at", NOTICE, command=ranks(world, "--grows-at", "1", "--hold-at", "3"))
    assert process.wait() == 75, process.stderr
    assert "nothing is lost" in process.stderr, process.stderr
    world.wait_gone()
    world.released.touch()
    assert world.run_rigged(*FAST, command=ranks(world, "--grows-at", "1")).wait() == 0
    check_unbroken(world)


def test_what_a_rank_has_more_to_store_at_the_last_step_is_in_the_last_snapshot(world: World) -> None:
    """The others have sealed that step by then, as it was assigned before: they seal it again."""
    process = world.run_rigged(*FAST, command=ranks(world, "--grows-at", str(STEPS)))
    assert process.wait() == 0, process.stderr
    assert world.check_commits()[-1].step == STEPS, process.stderr
    assert world.survey().finished_at == STEPS
    check_unbroken(world)


def test_a_rank_that_does_not_come_is_named_and_the_others_are_not_kept_from_training(world: World) -> None:
    command = ranks(world, "--late", "1:7", "--careless", together=False)
    process = world.run_rigged(*FAST, "--late-s", "0.3", command=command)
    process.wait_for(r" RankLate rank=1 [^\n]*step=7")
    world.released.touch()
    assert process.wait() == 0, process.stderr
    check_unbroken(world)


def test_a_rank_that_stays_away_under_a_notice_costs_what_is_newer_than_the_newest_set(world: World) -> None:
    command = ranks(world, "--late", "1:7")
    process = world.run_rigged(*FAST, "--grace-s", "8", command=command)
    process.wait_for("rank 1 stays away")
    os.kill(process.pid, signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert world.check_commits()[-1].step == 5
    world.wait_gone()
    world.released.touch()
    process = world.run_rigged(*FAST, command=command)
    assert process.wait() == 0, process.stderr
    check_unbroken(world)


def test_a_stopped_rank_that_goes_on_loses_nothing(world: World) -> None:
    process = world.run_rigged(*FAST, command=ranks(world, "--hold-at", "6"))
    process.wait_for(r" Published [^\n]*step=5 ")
    stopped = pids(process)[2]
    os.kill(stopped, signal.SIGSTOP)
    os.kill(process.pid, signal.SIGTERM)
    process.wait_for(r" Draining ")
    os.kill(stopped, signal.SIGCONT)

    assert process.wait() == 75, process.stderr
    assert "nothing is lost" in process.stderr, process.stderr
    world.wait_gone()
    world.released.touch()
    assert world.run_rigged(*FAST, command=ranks(world)).wait() == 0
    check_unbroken(world)


def test_a_launcher_that_starts_ranks_again_by_itself_goes_on_from_memory(world: World) -> None:
    command = ranks(world, "--hold-at", "12", launch=("--max-restarts", "2"))
    process = world.run_rigged(*FAST, "--at", "Published:2:kill-rank", command=command)
    assert process.wait() == 0, process.stderr
    assert process.stderr.count(" TrainerStarted ") == 1, "the launcher has not ended"
    assert steps_said(process.stderr, "Restored") == [10], process.stderr
    assert "tier=memory" in process.stderr
    check_unbroken(world)


def farthest(world: World) -> list[int]:
    """The last step that each rank has made."""
    return [int(Path(f"{world.curve}.{rank}").read_text().splitlines()[-1].split()[0]) for rank in range(RANKS)]


def alone(world: World) -> dict[str, str]:
    """The environment of a launcher without `harness run`."""
    env = {"HARNESS_STORE": str(world.store), "HARNESS_RUN": world.run, "HARNESS_METADATA": "off"}
    return env | {"HARNESS_EVERY_STEPS": "5", "HARNESS_EVERY_S": "1000"}


def test_ranks_without_harness_run_have_one_agent(world: World) -> None:
    """The first rank starts it; the others wait for it."""
    process = world.start(*ranks(world), env=alone(world))
    assert process.wait() == 0, process.stderr
    world.wait_gone()
    assert world.survey().finished_at == STEPS
    check_unbroken(world)


def test_ranks_without_harness_run_whose_agent_dies_have_another_one(world: World) -> None:
    with heard(world.place) as log:
        process = world.start(*ranks(world, "--hold-at", "6"), env=alone(world))
        world.wait_until_durable(5)
        os.kill(int(log.wait_for(r"AgentStarted [^\n]*pid=(\d+)")[1]), signal.SIGKILL)
        log.wait_for(r"(?:AgentReplaced[^\0]*){3}")  # before a rank goes on to what the dead one has agreed
        world.released.touch()

        assert process.wait() == 0, process.stderr
    assert "a new one has taken over" in process.stderr
    world.wait_gone()
    assert world.survey().finished_at == STEPS
    check_unbroken(world)


@pytest.mark.sample
def test_a_set_that_is_half_sealed_as_the_agent_dies_keeps_no_rank_waiting(world: World) -> None:
    """Two ranks wait for theirs to become durable in their only slots. The third one, in lockstep, is never asked."""
    with heard(world.place) as log:
        command = ranks(world, "--pauses", "1:5")
        process = world.start(*command, env=alone(world) | {"HARNESS_SLOTS": "1"})
        log.wait_for(r"(?: Sealed step=5 [^\0]*){2}")
        os.kill(int(log.wait_for(r"AgentStarted [^\n]*pid=(\d+)")[1]), signal.SIGKILL)
        log.wait_for(r"(?:AgentReplaced[^\0]*){3}")
        world.released.touch()

        assert process.wait() == 0, process.stderr
    world.wait_gone()
    assert world.survey().finished_at == STEPS
    check_unbroken(world)


def test_what_is_sealed_late_for_an_agent_that_is_dead_keeps_no_rank_waiting(world: World) -> None:
    """By then, all ranks are asked for a later step, and the third one, in lockstep, is on its way to that."""
    with heard(world.place) as log:
        process = world.start(*ranks(world, "--save-at", "3", "--half-sealed"), env=alone(world))
        process.wait_for(r"(?:test: rank \d is about to seal[^\0]*){3}")
        os.kill(int(log.wait_for(r"AgentStarted [^\n]*pid=(\d+)")[1]), signal.SIGKILL)
        process.wait_for("test: rank 0 goes on")
        world.released.touch()

        assert process.wait() == 0, process.stderr
    world.wait_gone()
    assert world.survey().finished_at == STEPS
    check_unbroken(world)


def test_ranks_without_harness_run_leave_at_a_signal_and_go_on(world: World) -> None:
    process = world.start(*ranks(world, "--hold-at", "6"), env=alone(world))
    world.wait_until_durable(5)
    world.wait_until(lambda: farthest(world) == [6] * RANKS, "step 6 of all")  # else they leave with what is durable
    process.signal(signal.SIGTERM)
    assert process.wait() == 1, process.stderr
    world.wait_gone()
    assert (newest := world.newest()) is not None
    assert farthest(world) == [newest.step] * RANKS, "no step is lost"

    world.released.touch()
    assert world.start(*ranks(world), env=alone(world)).wait() == 0
    check_unbroken(world)


def test_two_processes_of_one_rank_are_told_so(world: World) -> None:
    process = world.run_rigged(*FAST, command=ranks(world, "--hold-at", "6"))
    process.wait_for(r" FirstStep ")
    pairs = Path(f"/proc/{pids(process)[1]}/environ").read_text().split("\0")
    environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    names = ("HARNESS_SOCKET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    twin = world.start(*ranks(world)[5:], env={name: environ[name] for name in names})
    assert twin.wait() != 0
    assert "already, as rank 1 of 3" in twin.stderr, twin.stderr
    world.released.touch()
    assert process.wait() == 0, process.stderr
    check_unbroken(world)


def test_a_save_on_one_rank_is_taken_by_all_and_waited_for(world: World) -> None:
    process = world.run_rigged(*FAST[:-6], "--every-steps", "1000", command=ranks(world, "--save-at", "6"))
    assert process.wait() == 0, process.stderr
    saved = sorted(set(steps_said(process.stderr, "Sealed")))
    assert len(saved) == 2, process.stderr
    assert 7 <= saved[0] <= 9
    assert process.stderr.count(f" Sealed step={saved[0]} ") == RANKS
    check_unbroken(world)


def test_nobody_is_left_in_the_end(world: World) -> None:
    """Both the agent and the launcher die while the ranks hang: a new agent ends the ranks that cannot go on."""
    process = world.run_rigged(*FAST, "--at", "Published:1:kill-both", command=ranks(world, "--hold-at", "6"))
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids(process)[1], signal.SIGKILL)
    world.wait_gone()
    world.released.touch()
    finish(world)
    check_unbroken(world)
