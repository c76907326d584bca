"""The trainer as its agent sees it, without one: what it tells, and what it is told."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloud.testing.memory import MemoryStore
from harness.agent.generation import Generation
from harness.agent.journal import Journal
from harness.agent.resume.search import Header
from harness.agent.resume.startup import Finding, Startup, StartupEvents
from harness.agent.save import slot_pool
from harness.agent.save.pipeline import SavePipeline
from harness.agent.save.slot_pool import SlotRequest
from harness.agent.save.snapshot_set import Dropped
from harness.agent.server import Server
from harness.agent.trainers import session
from harness.agent.trainers.ranks import Connection, Ranks, Taken
from harness.agent.trainers.session import Trainer, TrainerEvents
from harness.config.program import Program
from harness.config.settings import Settings
from harness.core import events, messages
from harness.core.snapshot import SnapshotId
from harness.errors import NoSpace
from harness.ipc.control_page import Command, TrainerSide
from harness.ipc.slots import Slot
from harness.snapshots.candidates import StoredCopy
from tests.support.context import Posts, a_context
from tests.support.patience import HANG_S
from tests.support.protocol import KEYS, RUN_ID, SLOT_BYTES, Content
from tests.support.slots import fetched


class Scene:
    """A trainer with all that it needs, and with nobody at the other end but the test."""

    def __init__(self, directory: Path) -> None:
        settings = Settings(store="memory", run="run", slots=2, runtime_dir=str(directory))
        self.posts = Posts()
        self._pidfds: list[int] = []
        context = a_context(settings, self.posts)
        self.pipeline = SavePipeline(context, lambda _: MemoryStore(), lambda steps: None)
        self.ranks = Ranks(context, self.pipeline.pool)
        journal = Journal(KEYS, "host", listeners=[], heartbeat=events.Heartbeat)
        nobody: Any = lambda *_: None  # noqa: E731
        self.startup = Startup(context, (), self.pipeline, journal, StartupEvents(nobody, nobody, nobody))
        self.trainer = Trainer(
            context,
            Program(),
            Server(context, self.pipeline, nobody),
            self.ranks,
            self.pipeline,
            self.startup,
            TrainerEvents(nobody, nobody, nobody, nobody, nobody),
        )

    def connect(self, rank: int = 0) -> Told:
        told = Told()
        pidfd = os.pidfd_open(os.getpid())
        self._pidfds.append(pidfd)
        self.ranks.of(rank).connection = Connection(told, os.getpid(), pidfd)  # type: ignore[arg-type]
        self.trainer.attempt.greeted.add(rank)
        return told

    def connect_two(self) -> list[Told]:
        self.ranks.expect(2)
        return [self.connect(rank) for rank in range(2)]

    def lay_out(self, number: int, size: int = SLOT_BYTES, rank: int = 0) -> None:
        self.trainer.on_message(self.ranks.of(rank), messages.Layout(size, number))

    def until(self, told: Told, count: int) -> None:
        """As the main loop does, until so many messages were sent."""
        while len(told.messages) < count:
            self.posts.run_one(HANG_S)

    def close(self) -> None:
        self.startup.close()
        self.pipeline.close(HANG_S)
        self.pipeline.close_stores()
        for pidfd in self._pidfds:
            os.close(pidfd)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


class Told:
    """A trainer's end of the channel."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: messages.AnyMessage, fds: Sequence[int] = ()) -> None:
        self.messages.append(message)


def test_small_state_that_is_large_is_told_with_the_tensors_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the slot as well: 200 MB of it, ahead of the tensors, took longer than they do."""
    told, content = scene.connect(), Content(SnapshotId(1, 10))
    scene.startup.header = Header(StoredCopy(content.id, "remote", MemoryStore()), (content.record(),))

    scene.trainer.telling.resume()
    assert [type(message) for message in told.messages] == [messages.ResumeHeader]
    monkeypatch.setattr("harness.agent.trainers.telling.MOST_OF_HEADER", len(content.state) - 1)
    scene.trainer.telling.resume()

    assert len(told.messages) == 1


class Memory:
    """Gives slots when it is let to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = threading.Event()
        self.may = threading.Semaphore(0)
        self.sizes: list[int] = []
        self._real = SlotRequest.make
        monkeypatch.setattr(SlotRequest, "make", lambda request: self._make(request))

    def _make(self, request: SlotRequest) -> list[Slot]:
        self.sizes.append(request.bytes)
        self.asked.set()
        if not self.may.acquire(timeout=HANG_S):
            raise NoSpace("nobody let it")
        return self._real(request)


def making(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[Memory, Told]:
    """A trainer has told a layout, and its slots are being made."""
    slow, told = Memory(monkeypatch), scene.connect()
    scene.lay_out(1)
    assert slow.asked.wait(HANG_S)
    return slow, told


def test_while_slots_are_made_the_agent_listens_and_grants_none(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, told = making(scene, monkeypatch)
    heard: list[str] = []
    scene.posts.post(lambda: heard.append("a notice"))
    scene.posts.run_one(HANG_S)
    scene.ranks.grant()
    assert heard == ["a notice"]
    assert not scene.ranks.may_ask
    assert scene.ranks.layout_bytes == SLOT_BYTES, "how long a snapshot takes can be told already"
    slow.may.release()
    scene.until(told, 1)

    (slots,) = told.messages
    assert (type(slots), slots.number, len(slots.indexes)) == (messages.Slots, 1, 2)
    scene.ranks.grant()
    assert scene.ranks.may_ask


def test_a_layout_that_was_given_up_meanwhile_gets_no_slots_and_the_newest_does(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = making(scene, monkeypatch)

    scene.lay_out(2, 2 * SLOT_BYTES)
    scene.lay_out(3, 3 * SLOT_BYTES)
    slow.may.release(2)
    scene.until(told, 1)

    (slots,) = told.messages
    assert (type(slots), slots.number) == (messages.Slots, 3)
    assert slow.sizes == [SLOT_BYTES, 3 * SLOT_BYTES]
    assert [scene.pipeline.pool[index].size for index in scene.pipeline.pool.usable] == [3 * SLOT_BYTES] * 2


def test_slots_that_come_after_their_trainer_has_gone_are_the_next_ones(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = making(scene, monkeypatch)
    scene.ranks.of(0).forget()

    again = scene.connect()
    scene.lay_out(1)
    slow.may.release()
    scene.until(again, 1)

    assert not told.messages
    (slots,) = again.messages
    assert (type(slots), len(slots.indexes)) == (messages.Slots, 2)
    assert slow.sizes == [SLOT_BYTES]


def test_what_a_dead_trainer_was_to_resume_is_held_for_it_no_more(scene: Scene) -> None:
    """It was found after it had died, and nobody restores it."""
    point = scene.pipeline.note_resumed(fetched(Content(SnapshotId(1, 10))), Generation(2, RUN_ID, "b" * 16))
    scene.startup.point, (index,) = point, point.indexes
    pool = scene.pipeline.pool
    assert pool.grant() is None

    scene.trainer.begin_again(lambda: None)

    assert pool.grant() == index


def test_too_little_memory_is_told_to_the_trainer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_pool, "available_bytes", lambda: 0)
    told = scene.connect()

    scene.lay_out(1)
    scene.until(told, 1)

    (refusal,) = told.messages
    assert (type(refusal), refusal.error) == (messages.NoSlots, "NoSpace")
    scene.ranks.grant()
    assert not scene.ranks.may_ask


# ---- several ranks --------------------------------------------------------------------------------------------------


def test_each_rank_has_a_page_slots_and_a_count_of_seals_of_its_own(scene: Scene) -> None:
    told = scene.connect_two()
    for rank, size in enumerate((SLOT_BYTES, 3 * SLOT_BYTES)):
        scene.lay_out(1, size, rank)
    for one in told:
        scene.until(one, 1)
    scene.ranks.grant()

    indexes = [told[rank].messages[0].indexes for rank in range(2)]
    assert [[scene.pipeline.pool[i].size for i in its] for its in indexes] == [[SLOT_BYTES] * 2, [3 * SLOT_BYTES] * 2]
    assert not set(indexes[0]) & set(indexes[1])
    assert scene.ranks.layout_bytes == 4 * SLOT_BYTES
    assert scene.ranks.of(0).control.page_fd != scene.ranks.of(1).control.page_fd
    Content(SnapshotId(1, 10), world_size=2).seal(scene.pipeline.pool[indexes[1][0]], 5, rank=1)
    assert [scene.pipeline.sequence(rank) for rank in range(2)] == [0, 5]


def test_a_snapshot_is_asked_of_all_ranks_once_each_has_a_slot(scene: Scene) -> None:
    told = scene.connect_two()
    scene.lay_out(1)
    assert not scene.ranks.may_ask, "what one gets depends on what the others need"

    scene.lay_out(1, rank=1)
    for one in told:
        scene.until(one, 1)
    scene.ranks.grant()
    assert not scene.ranks.may_ask, "one is before its loop, and the other would wait for it"
    pages = [TrainerSide(os.dup(rank.control.page_fd)) for rank in scene.ranks]
    pages[0].completed(7)
    assert (scene.ranks.trainer_step, scene.ranks.farthest_step) == (None, None)
    pages[1].completed(6)
    assert (scene.ranks.trainer_step, scene.ranks.farthest_step) == (6, 7)
    assert scene.ranks.may_ask
    scene.ranks.command(Command.SNAPSHOT)

    assert [page.command for page in pages] == [Command.SNAPSHOT] * 2
    assert scene.ranks.sealed(scene.ranks.of(1), sealed(8)) is None
    assert [page.command for page in pages] == [Command.SNAPSHOT] * 2, "the other one has yet to seal"
    assert scene.ranks.sealed(scene.ranks.of(0), sealed(8)) == Taken(8, 2 * 100, 0.1)
    assert [page.command for page in pages] == [Command.NOTHING] * 2
    for page in pages:
        page.close()


@pytest.mark.parametrize(("ticks", "is_one"), [(10, False), (9, False), (8, True), (None, False)])
def test_only_a_process_from_before_the_launcher_is_left_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, ticks: int | None, is_one: bool
) -> None:
    """Ranks that a launcher starts again begin one after the other, and come in any order."""
    monkeypatch.setattr(session, "start_ticks", lambda pid: ticks)
    monkeypatch.setattr(session, "peer_pid", lambda channel: 1)
    monkeypatch.setattr(scene.trainer._server, "has", lambda channel: True)
    monkeypatch.setattr(Program, "is_child", True)
    trainer: Any = scene.trainer
    trainer.child = SimpleNamespace(start_ticks=9)

    assert trainer._is_left_over(None, messages.Hello(messages.PROTOCOL, 0, 2)) is is_one
    trainer.child = None


def sealed(step: int, assignment: str = "") -> messages.Sealed:
    return messages.Sealed(index=0, step=step, bytes=100, stall_s=0.1, copy_s=0.1, assignment=assignment)


def test_seals_of_two_assignments_are_no_set_and_the_dropped_one_is_told_to_its_rank(scene: Scene) -> None:
    scene.connect_two()
    pages = [TrainerSide(os.dup(rank.control.page_fd)) for rank in scene.ranks]
    assert scene.ranks.sealed(scene.ranks.of(0), sealed(8, "before")) is None
    assert scene.ranks.sealed(scene.ranks.of(1), sealed(8, "after")) is None
    scene.ranks.drop([Dropped(0, 5)])
    assert [page.is_void(5) for page in pages] == [True, False]
    assert [page.set_step for page in pages] == [None, None]

    assert scene.ranks.sealed(scene.ranks.of(0), sealed(8, "after")) is not None
    assert [page.set_step for page in pages] == [8, 8]
    assert not pages[0].is_void(6), "what it has sealed since then counts"
    for page in pages:
        page.close()


def test_what_a_rank_sealed_without_an_agent_counts_with_what_the_others_seal_now(scene: Scene) -> None:
    scene.connect_two()
    indexes = [scene.pipeline.pool.add(Slot.create(SLOT_BYTES), rank) for rank in range(2)]
    content = Content(SnapshotId(1, 8), world_size=2)
    content.seal(scene.pipeline.pool[indexes[0]], 3, 0, assignment="one")
    scene.trainer.on_message(scene.ranks.of(0), messages.Attached())
    assert scene.ranks.set_step is None

    assert scene.ranks.sealed(scene.ranks.of(1), sealed(8, "one")) is not None

    assert scene.ranks.set_step == 8


def test_ranks_at_an_end_that_all_have_sealed_are_asked_for_nothing(scene: Scene) -> None:
    scene.connect_two()
    for rank in scene.ranks:
        scene.ranks.sealed(rank, sealed(8))
    for rank in scene.ranks:
        scene.trainer.on_message(rank, messages.AtEnd(8))
    assert scene.ranks.reasons == set()

    for rank in scene.ranks:
        scene.trainer.on_message(rank, messages.AtEnd(9))
    assert scene.ranks.reasons == {"end"}


def test_each_rank_is_told_the_shares_of_all_of_what_it_resumes(scene: Scene) -> None:
    """A tensor that all of them have may lie in the share of any."""
    content = Content(SnapshotId(1, 10), world_size=2)
    handed: list[list[Slot]] = []
    for end in scene.connect_two():
        end.send = lambda message, fds=(): handed.append([Slot(os.dup(fd)) for fd in fds])  # type: ignore[method-assign]
    scene.startup.finding = Finding.READY
    scene.startup.point = scene.pipeline.note_resumed(fetched(content), Generation(2, RUN_ID, "b" * 16))

    scene.trainer.telling.resume()

    assert [[content.is_in(slot, rank) for rank, slot in enumerate(slots)] for slots in handed] == [[True, True]] * 2
    for slot in [*handed[0], *handed[1]]:
        slot.close()


def test_more_slots_than_one_message_can_carry_come_in_several(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.agent.trainers.telling.MAX_FDS", 1)
    sent: list[tuple[type, int]] = []
    for end in scene.connect_two():
        end.send = lambda message, fds=(): sent.append((type(message), len(fds)))  # type: ignore[method-assign]
    scene.startup.finding = Finding.READY
    content = Content(SnapshotId(1, 10), world_size=2)
    scene.startup.point = scene.pipeline.note_resumed(fetched(content), Generation(2, RUN_ID, "b" * 16))

    scene.trainer.telling.resume()

    assert sent == [(messages.ResumeSlots, 1), (messages.ResumeReady, 1)] * 2


def test_what_is_resumed_is_granted_again_once_all_ranks_have_restored_it(scene: Scene) -> None:
    """Each reads the slots of all."""
    scene.connect_two()
    point = scene.pipeline.note_resumed(fetched(Content(SnapshotId(1, 10), world_size=2)), Generation(2, RUN_ID, "b"))
    scene.startup.point = point
    pool, restored = scene.pipeline.pool, messages.Restored(str(point.id), 10, 0.1)

    scene.trainer.on_message(scene.ranks.of(1), restored)
    assert [pool.grant(rank) for rank in range(2)] == [None, None]
    scene.trainer.on_message(scene.ranks.of(0), restored)

    assert [pool.grant(rank) for rank in range(2)] == list(point.indexes)


@pytest.mark.parametrize(
    ("rank", "world_size", "why"),
    [(1, 2, "there are 1"), (0, 2, "there are 1"), (7, 1, "no rank 7 of 1"), (-1, 1, "no rank -1"), (0, 1, "already")],
)
def test_a_rank_of_another_training_is_turned_away_and_does_not_keep_the_first_from_its_snapshots(
    scene: Scene, rank: int, world_size: int, why: str
) -> None:
    scene.connect()
    scene.lay_out(1)
    scene.until(scene.ranks.of(0).connection.channel, 1)  # type: ignore[union-attr,arg-type]
    scene.ranks.grant()
    stranger = Told()

    hello = messages.Hello(messages.PROTOCOL, rank=rank, world_size=world_size)
    scene.trainer.greet(stranger, hello, (), leaving=False)  # type: ignore[arg-type]

    assert [type(message) for message in stranger.messages] == [messages.Refused]
    assert why in stranger.messages[0].message
    assert scene.ranks.may_ask


def test_a_snapshot_of_two_ranks_is_not_resumed_by_one(scene: Scene) -> None:
    told = scene.connect()
    scene.startup.finding = Finding.READY
    content = Content(SnapshotId(1, 10), world_size=2)
    scene.startup.point = scene.pipeline.note_resumed(fetched(content), Generation(2, RUN_ID, "b" * 16))

    scene.trainer.telling.resume()

    (refusal,) = told.messages
    assert (type(refusal), refusal.error) == (messages.ResumeFailed, "StateError")
    assert "is of 2 ranks, and this run has 1" in refusal.message


def test_a_signal_announces_nothing_while_a_rank_has_yet_to_come(scene: Scene) -> None:
    """That rank has failed, and its launcher ends the others."""
    scene.ranks.expect(2)
    scene.connect(0)

    assert not scene.trainer.announces(signal.SIGTERM)

    assert scene.trainer.siblings.broken_at is not None, "all begin again"


@pytest.mark.parametrize(
    ("signum", "stopped", "announces"),
    [(signal.SIGTERM, False, True), (signal.SIGTERM, True, False), (signal.SIGINT, True, True)],
)
def test_a_signal_to_a_rank_announces_an_interruption_but_for_our_own(
    scene: Scene, signum: int, stopped: bool, announces: bool
) -> None:
    scene.connect_two()
    scene.trainer.attempt.stopped = stopped
    assert scene.trainer.announces(signum) is announces


def test_a_signal_after_a_rank_has_ended_well_announces_an_interruption(scene: Scene) -> None:
    scene.connect_two()
    scene.ranks.of(1).connection = None
    assert scene.trainer.announces(signal.SIGTERM)


@pytest.mark.parametrize("leaves_first", [True, False])
def test_a_rank_that_waits_for_one_that_has_left_its_loop_is_told_so_once(scene: Scene, leaves_first: bool) -> None:
    """It saves before a break, and the other one only breaks: it waited until it was killed."""
    told = scene.connect_two()
    waits, leaves = [(0, messages.SaveWanted()), (0, messages.AtEnd(8))], [(1, messages.LeftLoop())]
    for rank, message in leaves + waits if leaves_first else waits + leaves:
        scene.trainer.on_message(scene.ranks.of(rank), message)

    (refusal,) = told[0].messages
    assert type(refusal) is messages.NoMeeting
    assert "rank 1 has left its loop" in refusal.message
    assert "ckpt.save() on all ranks" in refusal.message
    assert told[1].messages == []
    assert scene.ranks.reasons == set(), "nothing is wanted of all of them any more"

    scene.trainer.on_message(scene.ranks.of(1), messages.LeftLoop())
    assert len(told[0].messages) == 1


def test_a_rank_that_has_left_one_loop_and_begun_another_is_waited_for(scene: Scene) -> None:
    told = scene.connect_two()
    for rank, message in ((1, messages.LeftLoop()), (1, messages.Training()), (0, messages.AtEnd(8))):
        scene.trainer.on_message(scene.ranks.of(rank), message)
    assert told[0].messages == []
