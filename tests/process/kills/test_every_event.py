"""SIGKILL of the trainer, of the agent, and of both at every event of the journal: nothing durable is ever lost.

Each case starts a run that meets its event (the trainer without torch holds where the event is due), kills at exactly
that line, lets whoever lives go on, and starts the same command again until the run is finished. Then every step of
every life must have been the unbroken run's, and nobody may be left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.core import events
from harness.core.snapshot import SnapshotId
from harness.ipc import channel as ipc
from tests.support.once import once
from tests.support.patience import HANG_S, telling
from tests.support.world import World, steps_said

STEPS = 20
ALL = ("trainer", "agent", "both")
AGENT = ("agent",)  # no trainer lives at that moment
BOTH = ("both",)

HOLD = ("--hold-at", "12")  # two snapshots are sealed by then, at 5 and at 10
FROZEN = (*HOLD, "--frozen-bytes", "100000")  # a shard beside it that the store copies from the second snapshot on
FAST = ("--back-off-s", "0.05", "--every-s", "1000", "--handover-s", "0.5", "--await-s", "0.1")
CRASH = "Published:1:kill-trainer"


@dataclass(frozen=True)
class Case:
    """How a run comes to an event, and who is killed there.

    Attributes:
        event: the event's name.
        nth: at which of them.
        who: who can be killed then.
        rig: options of `tests.support.harness_run`.
        trainer: options of the trainer.
        before: what is done first, as `--at` spells it.
        begun: whether the run has two durable snapshots of an earlier life.
        damaged: whether the newest one of them is damaged.
        local: whether there is a local tier too.
        daily: of whom the death is tried every day, and not only before a change lands.
    """

    event: str
    nth: int = 1
    who: Sequence[str] = ALL
    rig: tuple[str, ...] = ()
    trainer: tuple[str, ...] = HOLD
    before: str = ""
    begun: bool = False
    damaged: bool = False
    local: bool = False
    daily: Sequence[str] = ()

    @property
    def name(self) -> str:
        tiers = "-local" if self.local else ""
        return f"{self.event}-{self.nth}{tiers}"


CASES = [
    # ---- a start
    Case("AgentStarted", who=AGENT),
    Case("AgentStarted", who=AGENT, begun=True),
    Case("Claimed", who=AGENT),
    Case("Claimed", who=AGENT, begun=True, daily=AGENT),
    Case("StoreBlind", who=AGENT, rig=("--fail", "list:1-2")),
    Case("StoreBlind", who=AGENT, rig=("--fail", "list:1-2"), begun=True),
    Case("ClaimDeferred", who=AGENT, rig=("--fail", "list:1-2"), begun=True),
    Case("NothingToResume"),
    Case("Located", begun=True),
    Case("Located", who=AGENT, before=CRASH),
    Case("Fetched", begun=True),
    Case("Fetched", before=CRASH),
    Case("Rejected", begun=True, damaged=True),
    Case("Quarantined", begun=True, damaged=True),
    Case("TrainerStarted"),
    Case("TrainerConnected"),
    Case("Restored", begun=True, daily=BOTH),
    Case("Restored", before=CRASH),
    # ---- steps and snapshots
    Case("FirstStep"),
    Case("FirstStep", begun=True),
    Case("Restarted", begun=True),
    Case("Restarted", before=CRASH, daily=AGENT),
    Case("SlotsReady"),
    Case("Due", rig=("--every-s", "0.1")),
    Case("Sealed", nth=2),
    Case("ShardStored", nth=2),
    Case("ShardStored", nth=3, trainer=FROZEN, daily=AGENT),
    Case("NotCopied", rig=("--fail", "copy:1"), trainer=FROZEN),
    Case("PartStored", nth=2, daily=BOTH),
    Case("Published", nth=2, trainer=FROZEN),
    Case("Published", nth=2, daily=ALL),
    Case("Verified"),
    Case("Retired", rig=("--keep-last", "1")),
    Case("SaveFailed", rig=("--fail", "put:2-3")),
    Case("UpkeepFailed", rig=("--fail", "delete:1", "--keep-last", "1")),
    Case("Heartbeat", nth=2, rig=("--heartbeat-s", "0.1")),
    # ---- the same with a local tier: each comes once for each tier
    Case("Sealed", nth=2, local=True, daily=BOTH),
    *(Case(event, nth, local=True) for event in ("ShardStored", "PartStored", "Published") for nth in (1, 2, 3)),
    Case("ShardStored", nth=5, local=True, trainer=FROZEN),
    Case("Retired", rig=("--keep-last", "1", "--keep-local", "1"), local=True),
    Case("Retired", rig=("--keep-last", "1", "--keep-local", "1"), local=True, trainer=FROZEN),
    Case("Located", begun=True, local=True),
    Case("Restored", begun=True, local=True),
    Case("TrainerFinished", trainer=(), local=True),
    Case("Draining", before="Published:1:terminate", local=True),
    # ---- notices
    Case("NoticeSeen", before="Published:1:terminate"),
    Case("NoticeSeen", rig=("--notices", "rebalance")),
    Case("NoticeWithdrawn", rig=("--notices", "rebalance,nothing")),
    Case("SourceBlind", who=("trainer", "both"), rig=("--notices", "nothing,down", "--blind-after-s", "0")),
    Case("SourceBack", rig=("--notices", "nothing,down,nothing", "--blind-after-s", "0")),
    Case("SourceBlind", who=AGENT, rig=("--notices", "down", "--blind-after-s", "0")),
    Case("Draining", before="Published:1:terminate", daily=AGENT),
    Case("Drained", who=AGENT, before="Published:1:terminate"),
    Case("NeverFits", rig=("--grace-s", "1")),
    # ---- ends
    Case("TrainerFinished", trainer=(), daily=BOTH),
    Case("TrainerLeft", who=AGENT, trainer=()),
    Case("TrainerLeft", who=AGENT, before="Published:1:terminate", daily=AGENT),
    Case("TrainerLeft", who=AGENT, before=CRASH),
    Case("Restarting", who=AGENT, before=CRASH),
    Case("GaveUp", who=AGENT, rig=("--max-crashes", "0"), before=CRASH),
    Case("Ended", who=AGENT, trainer=()),
    Case("Ended", who=AGENT, before="Published:1:terminate"),
]

ELSEWHERE = {"AgentReplaced": "test_the_agent_that_replaced_a_dead_one_may_die_as_well"}
_DRILL = "takes somebody who asks for it: tests/process/test_drill.py kills there"
_WATCHED = "takes a program that saves by itself: tests/process/watch kills there"
_TWO_HOSTS = "takes two hosts: tests/process/handover/test_handover.py kills there"
CANNOT_HAPPEN = {
    "NodeBooted": "takes a node of a fleet, where it follows AgentStarted at once",
    "SetAside": _WATCHED,
    "Drilling": _DRILL,
    "Drilled": _DRILL,
    "HandoverAwaited": _TWO_HOSTS,
    "HandoverOver": _TWO_HOSTS,
    "SupersededBy": _TWO_HOSTS,
    "Behind": "takes a store that is slower than the interval: tests/unit/agent/save/test_tier.py",
    "StoreSilent": "takes a store that hangs: tests/process/faults/test_silence.py",
    "Agreed": "takes several ranks: tests/ranks/test_kills.py kills there",
    "RankLate": "takes several ranks: tests/ranks/test_faults.py",
    "RanksDiffer": "takes several ranks: tests/ranks/test_kills.py kills there",
    "GivenUp": "takes an upload of seconds: tests/unit/agent/save/test_tier.py",
}


def test_every_event_has_a_case_or_a_stated_reason_why_it_cannot_happen_here() -> None:
    known = {kind.__name__ for kind in events.Event.__subclasses__()}
    covered = {case.event for case in CASES}

    assert covered | set(ELSEWHERE) | set(CANNOT_HAPPEN) == known
    assert all(test in globals() for test in ELSEWHERE.values())


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of a world in which a run died, without warning, with two durable snapshots."""

    def train(folder: Path) -> None:
        with contextlib.closing(World(folder)) as world:
            process = world.run_rigged(*FAST, "--at", "Published:2:kill-both", command=world.tiny(*HOLD))
            process.wait()
            world.wait_gone()
            assert len(world.survey().commits) == 2
            world.released.unlink()

    return once(tmp_path_factory, worker_id, "begun", train)


def parameters() -> list[object]:
    names: dict[str, int] = {}
    found = []
    for case in CASES:
        for who in case.who:
            name = f"{case.name}-{who}"
            names[name] = names.get(name, 0) + 1
            marks = [pytest.mark.sample] if who in case.daily else []
            found.append(pytest.param(case, who, id=f"{name}-{names[name]}" if names[name] > 1 else name, marks=marks))
    return found


@pytest.mark.parametrize(("case", "who"), parameters())
def test_a_kill_at_any_event_loses_nothing_durable(case: Case, who: str, world: World, begun: Path) -> None:
    world.has_local = case.local
    if case.begun:
        prepare(world, begun, damaged=case.damaged)
    at = [f"{case.event}:{case.nth}:kill-{who}", *([case.before] if case.before else [])]
    rig = [*FAST, *case.rig, "--at", ",".join(reversed(at))]
    options = {rig[i]: rig[i + 1] for i in range(0, len(rig), 2)}  # the last one of a name counts

    process = world.run_rigged(*(word for pair in options.items() for word in pair), command=world.tiny(*case.trainer))
    process.wait()
    world.wait_gone()

    assert f"test: kill-{who} at {case.event} {case.nth}" in process.stderr, process.stderr
    check_never_back(process.stderr)
    finish(world, case)
    world.check_tiny(STEPS)


@pytest.mark.parametrize("local", [pytest.param(False, marks=pytest.mark.sample), True], ids=["remote", "both-tiers"])
def test_the_agent_that_replaced_a_dead_one_may_die_as_well(world: World, local: bool) -> None:
    world.has_local = local
    with heard(world.place) as log:
        hold_on = world.root / "on"
        process = world.run_rigged(
            *FAST, "--at", "Published:1:kill-agent", command=[*world.tiny(*HOLD), "--hold-until", hold_on]
        )
        replaced = log.wait_for(r"AgentStarted [^\n]*pid=(\d+)[^\0]*AgentReplaced")
        os.kill(int(replaced[1]), signal.SIGKILL)
        log.wait_for(r"AgentReplaced[^\0]*AgentReplaced")
        hold_on.touch()
        process.wait()
        world.wait_gone()

    assert "the agent died; a new one has taken over" in process.stderr
    assert world.survey().finished_at == STEPS, f"{process.stderr}\nThe agents:\n{log.text}"
    world.check_tiny(STEPS)
    assert sorted(world.steps_of_curve()) == list(range(1, STEPS + 1)), "no step was made twice: the trainer never died"


def prepare(world: World, begun: Path, *, damaged: bool) -> None:
    """Begin with what an earlier life left."""
    shutil.copytree(begun / "store", world.store)
    shutil.copy(begun / "curve", world.curve)
    if damaged:
        newest = world.newest()
        assert newest is not None
        (shard,) = world.shards(newest)
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)


def check_never_back(said: str) -> None:
    """Within one agent's words: each later life begins no earlier than what was durable, and never at 0 after that."""
    durable = 0
    for line in said.splitlines():
        if " Published tier=remote " in line:
            durable = max(durable, *steps_said(line, "Published"))
        elif " Restored snapshot=" in line:
            assert steps_said(line, "Restored")[0] >= durable, said
        elif " NothingToResume " in line:
            assert durable == 0, said


def finish(world: World, case: Case) -> None:
    """Start the same command again until the run is finished; each start goes on from the newest snapshot there is."""
    ended_itself = False
    for _ in range(3):
        if world.store.is_dir() and world.survey().finished_at is not None:
            break
        floor: SnapshotId | None = world.newest() if world.store.is_dir() else None
        again = world.run_rigged(*FAST, command=world.tiny(*case.trainer))
        assert again.wait() == 0, again.stderr
        begins_at_0, restored = " NothingToResume " in again.stderr, steps_said(again.stderr, "Restored")
        assert begins_at_0 == (not restored), again.stderr
        if floor is not None:
            lost_on_purpose = case.damaged and " Rejected " in again.stderr
            assert not begins_at_0, again.stderr
            assert restored[0] >= floor.step or lost_on_purpose, again.stderr
        ended_itself = True
    assert world.survey().finished_at == STEPS
    world.wait_gone()
    assert ipc.connect(world.place.socket) is None
    if ended_itself:
        assert not world.place.socket.exists()


class Heard:
    """The log of detached agents as a live stream: a pipe where the file would be."""

    def __init__(self, place: ipc.RuntimeDir) -> None:
        place.prepare()
        os.mkfifo(place.log)
        self._fd = os.open(place.log, os.O_RDWR)  # a writer of our own: the stream does not end with an agent
        self._text, self._changed = "", threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of `pattern`, now or later."""
        with self._changed, telling(lambda: self._text):
            self._changed.wait_for(lambda: re.search(pattern, self._text))
            found = re.search(pattern, self._text)
            assert found is not None
            return found

    @property
    def text(self) -> str:
        """All that was heard."""
        with self._changed:
            return self._text

    def close(self) -> None:
        os.write(self._fd, b"\0")
        self._thread.join(HANG_S)
        os.close(self._fd)

    def _read(self) -> None:
        while b"\0" not in (data := os.read(self._fd, 65536)):  # an agent that is ending may write behind it
            with self._changed:
                self._text += data.decode()
                self._changed.notify_all()


@contextlib.contextmanager
def heard(place: ipc.RuntimeDir) -> Iterator[Heard]:
    """Listen to the detached agents of a place."""
    log = Heard(place)
    try:
        yield log
    finally:
        log.close()
