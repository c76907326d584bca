"""SIGKILL of one rank, of all, of the launcher, of the agent, or of several, at every event: nothing durable is lost.

Ranks without torch, in lockstep: each hangs, deaf, once another is dead. Whoever lives goes on, and the same command is
started again until the run is finished. Then every step of every rank in every life was the unbroken run's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import tiny_rank
from tests.support.process import Process
from tests.support.world import World, steps_said

pytestmark = pytest.mark.long("several lives of several ranks")

RANKS, STEPS = 3, 20
ALL = ("rank", "ranks", "trainer", "agent", "both")
AGENT = ("agent",)
FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--every-steps", "5", "--handover-s", "0.5", "--await-s", "0.1")
CRASH = "Published:1:kill-rank"
NOTICE = "FirstStep:1:terminate"
UNSEALED = ("--hold-at", "3")  # where all ranks leave with a new snapshot, whenever the notice reaches them


def ranks(
    world: World, *options: str, count: int = RANKS, launch: Sequence[str] = (), together: bool = True
) -> list[str | Path]:
    """The command of a training on several ranks, with a launcher. `together`: they are in lockstep."""
    output = ["--curve", world.curve, "--final", world.final, "--hold-until", world.released]
    in_step = ["--together", world.root / "together"] if together else []
    launcher = [sys.executable, "-m", "tests.support.launcher", str(count), *launch, "--"]
    return [*launcher, sys.executable, "-m", "tests.support.tiny_rank", *output, *in_step, *options]


def check_unbroken(world: World, count: int = RANKS, steps: int = STEPS) -> None:
    """Each rank's steps in all lives are the unbroken run's, none is missing, and so is its end."""
    for rank in range(count):
        expected = tiny_rank.unbroken(rank, steps)
        assert set(Path(f"{world.curve}.{rank}").read_text().splitlines()) == set(expected)
        assert f"{steps} {Path(f'{world.final}.{rank}').read_text()}" == expected[-1]
    world.check_commits()


def check_never_back(said: str) -> None:
    """Within one agent's words: each later life begins no earlier than what was durable."""
    durable = 0
    for line in said.splitlines():
        if " Published tier=remote " in line:
            durable = max(durable, *steps_said(line, "Published"))
        elif " Restored snapshot=" in line:
            assert steps_said(line, "Restored")[0] >= durable, said
        elif " NothingToResume " in line:
            assert durable == 0, said


def finish(world: World, *options: str) -> Process | None:
    """Start the same command again until the run is finished."""
    for _ in range(3):
        if world.store.is_dir() and world.survey().finished_at is not None:
            return None
        floor = world.newest() if world.store.is_dir() else None
        again = world.run_rigged(*FAST, command=ranks(world, *options))
        assert again.wait() == 0, again.stderr
        restored = steps_said(again.stderr, "Restored")
        assert floor is None or restored[0] >= floor.step, again.stderr
    return again


@dataclass(frozen=True)
class Case:
    """At which event, who is killed, and how the run comes to it. See `tests/process/kills`."""

    event: str
    nth: int = 1
    who: Sequence[str] = ALL
    rig: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ("--hold-at", "12")
    before: str = ""
    daily: Sequence[str] = ()
    nightly: bool = False


CASES = [
    Case("Claimed", who=AGENT),
    Case("TrainerStarted", who=("trainer", "agent", "both")),
    *(Case("TrainerConnected", nth, nightly=nth != 2) for nth in (1, 2, 3)),
    Case("FirstStep"),
    Case("SlotsReady", 2),
    Case("Due"),
    Case("Agreed", before=NOTICE, trainer=UNSEALED),
    *(Case("Sealed", nth, daily=("rank",) if nth == 2 else ()) for nth in (1, 2, 3)),
    *(Case("Sealed", nth, nightly=nth != 5) for nth in (4, 5, 6)),
    Case("ShardStored", 2),
    Case("PartStored", 2),
    Case("Published", daily=("agent", "both")),
    Case("Published", 2, nightly=True),
    Case("Located", before=CRASH),
    Case("Restored", before=CRASH),
    Case("Restarted", before=CRASH),
    Case("Restarting", who=AGENT, before=CRASH),
    Case("NoticeSeen", before="Published:1:terminate"),
    Case("Draining", before="Published:1:terminate", daily=("rank",)),
    *(Case("Sealed", nth, before=NOTICE, trainer=UNSEALED) for nth in (1, 2, 3)),
    Case("TrainerLeft", who=AGENT, before="Published:1:terminate"),
    Case("RanksDiffer", trainer=("--hold-at", "12", "--differs-at", "4", "--careless")),
    Case("TrainerFinished", trainer=()),
    Case("Ended", who=AGENT, trainer=()),
]


def parameters() -> list[object]:
    found, names = [], dict[str, int]()
    for case in CASES:
        for who in case.who:
            name = f"{case.event}-{case.nth}-{who}"
            names[name] = names.get(name, 0) + 1
            marks = [pytest.mark.sample] if who in case.daily else [pytest.mark.nightly] if case.nightly else []
            found.append(pytest.param(case, who, id=f"{name}-{names[name]}" if names[name] > 1 else name, marks=marks))
    return found


@pytest.mark.parametrize(("case", "who"), parameters())
def test_a_kill_at_any_event_loses_nothing_durable(case: Case, who: str, world: World) -> None:
    at = [*([case.before] if case.before else []), f"{case.event}:{case.nth}:kill-{who}"]

    process = world.run_rigged(*FAST, *case.rig, "--at", ",".join(at), command=ranks(world, *case.trainer))
    process.wait()
    world.wait_gone()

    assert f"test: kill-{who} at {case.event} {case.nth}" in process.stderr, process.stderr
    check_never_back(process.stderr)
    finish(world, *case.trainer)
    if "--differs-at" not in case.trainer:
        check_unbroken(world)
