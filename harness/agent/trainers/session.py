"""The trainer as its agent sees it: its processes, one for each rank, and one attempt after the other.

Owns the child, the connections, and the current attempt: how a trainer starts, is recognized, learns what it resumes,
and is found to be dead. Knows no notices, and decides nothing about ends: it reports them to the agent.

    spawn ──▶ Hello ──▶ Welcome, resume point or none ──▶ Layout ──▶ Slots ──▶ messages ──▶ dead ──▶ left
              Hello of a trainer whose agent died ──▶ its generation, page and slots are adopted
              the first dead rank ──▶ the others hang in a collective: they are killed ──▶ left
              the launcher dies, ranks live ──▶ killed as well; while all leave, they leave by themselves ──▶ left
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.agent.context import Context
from harness.agent.generation import Generation
from harness.agent.resume.startup import Startup
from harness.agent.save.pipeline import SavePipeline
from harness.agent.server import Server
from harness.agent.trainers.attempt import TrainerAttempt
from harness.agent.trainers.child import Child
from harness.agent.trainers.ranks import Connection, Rank, Ranks
from harness.agent.trainers.siblings import Siblings
from harness.agent.trainers.telling import Telling
from harness.agent.watching import Watching
from harness.config.program import Program
from harness.config.settings import SOCKET_VARIABLE
from harness.core import events, messages
from harness.core.messages import FromTrainer, Hello, Layout, Refused
from harness.core.policy.meeting import Place, Where
from harness.errors import HarnessError
from harness.ipc.channel import Channel, ChannelClosed, peer_pid
from harness.ipc.process import began_at, open_pidfd, pidfd_dead, start_ticks
from harness.ipc.slots import Slot

ATTACH_S = 10.0  # how long it takes, at most, until the process that started an agent says hello
_KILL_AFTER_S = 3.0
_GONE_S = 2.0  # until a killed process is gone
_BUSY_S = 0.1
_ALONE_S = 30.0  # how long a detached agent waits for the trainer that started it


@dataclass(frozen=True)
class TrainerEvents:
    """Callbacks for the trainer's events. Each is called in the main thread.

    Attributes:
        last_word: one of its ranks sent this message before it died; it is read only now.
        began: another attempt has begun; the state of the one before is obsolete.
        joined: its Checkpointer has said hello.
        lost: the last connection is gone, and with it every request.
        left: the process has ended: its exit code as a shell shows it, `None` for a crash of one that is no child.
    """

    last_word: Callable[[Rank, FromTrainer], None]
    began: Callable[[], None]
    joined: Callable[[], None]
    lost: Callable[[], None]
    left: Callable[[int | None], None]


class Trainer:
    """The one trainer of a run on this host, and the only writer of its attempts. Main thread."""

    def __init__(
        self,
        context: Context,
        program: Program,
        server: Server,
        ranks: Ranks,
        pipeline: SavePipeline,
        startup: Startup,
        tell: TrainerEvents,
    ) -> None:
        """Prepare; no process is started.

        Args:
            context: of the agent.
            program: what trains.
            server: where it connects.
            ranks: connections of its processes, and commands to them.
            pipeline: takes what it seals.
            startup: its generation, and what it resumes.
            tell: callbacks for its events.
        """
        self._context, self._program, self._server, self._ranks = context, program, server, ranks
        self._pipeline, self._startup, self._tell = pipeline, startup, tell
        self._loop, self._emit = context.loop, context.emit
        self.telling = Telling(ranks, startup)
        self.siblings = Siblings(ranks, self._on_dead)
        self.child: Child | None = None
        self.attempt = TrainerAttempt(time.monotonic(), began_at(os.getpid()))
        self.restarts = 0
        """Number of attempts that were begun after the first one."""
        self.restarted: events.Restarted | None = None
        """How long the newest start took, in parts; `None` until that is known."""
        self.begins = False
        """Whether another generation is about to begin."""
        self.called_off = False
        """Whether a generation that was about to begin was given up."""
        self.attached = False
        """Whether a trainer has connected whose agent had died."""
        self._late: list[tuple[Channel, Hello]] = []
        """Hellos of ranks that wait for another generation to begin."""
        self._orphaned_by: int | None = None
        """Exit code of a launcher, our child, that has died before its ranks; `None` once they are gone, too."""

    @property
    def holder_pid(self) -> int | None:
        """Pid of the process that trains, or is about to: the one that started this agent and has yet to say hello."""
        if connections := self._ranks.connections:
            return connections[0].pid
        if self.child is not None:
            return self.child.pid
        starter = self._program.starter
        return starter if self._starter_comes and os.getppid() == starter else None  # else it is dead

    @property
    def listens(self) -> bool:
        """Whether it is no child, and is connected or about to connect, so that it can be told something."""
        return not self._program.is_child and (self.connected or self._starter_comes)

    @property
    def _starter_comes(self) -> bool:
        """Whether the process that started a detached agent may still say hello."""
        young = time.monotonic() - self.attempt.began_at < ATTACH_S
        return not self._program.is_child and not self.attempt.connected and young

    @property
    def trains(self) -> bool:
        """Whether a trainer is connected that can take one more snapshot."""
        return self.connected and self._ranks.complete and self.attempt.finished_step is None

    @property
    def connected(self) -> bool:
        """Whether a Checkpointer is connected."""
        return bool(self._ranks.connections)

    @property
    def orphaned(self) -> bool:
        """Whether several ranks live on whose launcher, our child, has died."""
        if self._orphaned_by is None and self._ranks.several and self.child is not None:
            return pidfd_dead(self.child.pidfd)
        return self._orphaned_by is not None

    # ---- start and connection ---------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start the trainer, if it runs as a child.

        Raises:
            ConfigError: there is no such command, or it cannot be executed.
        """
        if self._program.command is not None:
            self._spawn(self._program.command, {}, ())

    def spawn_watched(self, watching: Watching) -> None:
        """Start a program that saves by itself. Raises what `spawn` raises."""
        assert self._program.command is not None, "only a child is watched"
        self.attempt.saves_by_itself, self.attempt.restored = True, True
        if (point := self._startup.point) is not None:
            self.attempt.resumed_step = point.id.step
        self._spawn(watching.command(self._program.command), watching.environment(), watching.inherited)
        assert self.child is not None, "it was started"
        watching.started(self.child.pid)

    def _spawn(self, command: Sequence[str], added: Mapping[str, str], inherited: Sequence[int]) -> None:
        environment = {
            # For torchrun: with the first, ranks that it restarts find each other; and it does not kill a rank that
            # is leaving before the time is up.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(self._context.settings.grace_s)),
            **self._program.environ,
            SOCKET_VARIABLE: str(self._server.address),
            "HARNESS_RUN_ID": self._startup.generation.run_id,
            "HARNESS_RESTARTS": str(self.restarts),
            **added,
        }
        self.attempt.spawned_at = time.monotonic()
        self.child = Child(command, environment, inherited)
        self._loop.watch(self.child.pidfd, self._on_child_exit)
        self._emit(events.TrainerStarted(pid=self.child.pid, restarts=self.restarts))

    def begin(self, begun: Callable[[], None]) -> None:
        """Begin the first attempt, in the agent's first generation. Returns at once; `begun` is called afterwards."""
        self.begins = True

        def note() -> None:
            self.begins = False
            begun()

        self._startup.begin(note)

    def begin_again(self, begun: Callable[[], None], superseded: Callable[[], None] = lambda: None) -> None:
        """Begin another attempt, with another generation and another search for its resume point. Returns at once.

        Args:
            begun: called when it has begun, within seconds.
            superseded: called instead if a newer start has asked for the run.
        """
        self.begins = True
        self._pipeline.settle_held(counts=True)  # its own parent starts another one: it had ended well
        self._pipeline.give_up_incomplete()
        self._release_resume()  # a point that was found after its trainer had died

        def note(has_begun: bool) -> None:
            self.begins = False
            if not has_begun:
                return superseded()
            self.restarts += 1
            now = time.monotonic()
            self.attempt = TrainerAttempt(now, now, last_ended_at=self.attempt.ended_at)
            self._ranks.begin_again()
            self.siblings.begin_again()
            self._tell.began()
            return begun()

        self._startup.begin_again(note)

    def call_off(self) -> None:
        """Begin no generation, because the agent drains; existing snapshots are still saved."""
        self.begins, self.called_off = False, True
        self.attempt.over = self._program.is_child

    def await_attach(self) -> bool:
        """Block until all ranks of a dead agent connect, before anything is decided. Return whether one did."""
        if not self._await(lambda: self.attached and self._ranks.complete) and self.attached:
            self.siblings.note_missing()
        return self.attached

    def await_hello(self) -> bool:
        """Block until a trainer is connected, for `ATTACH_S` at most. Return whether one is."""
        return self._await(lambda: self.connected)

    def _await(self, condition: Callable[[], bool]) -> bool:
        give_up_at = time.monotonic() + ATTACH_S
        while not condition() and time.monotonic() < give_up_at:
            self._loop.wait(_BUSY_S)
        return condition()

    def greet(self, channel: Channel, hello: Hello, fds: Sequence[int], *, leaving: bool) -> None:
        """Answer the hello of a Checkpointer. A draining agent (`leaving`) begins no new generation for it.

        Raises:
            ChannelClosed: the Checkpointer is gone already.
        """
        if hello.protocol != messages.PROTOCOL:
            return channel.send(Refused("the agent and the trainer use different versions of the harness"))
        if not 0 <= hello.rank < hello.world_size:
            return channel.send(Refused(f"there is no rank {hello.rank} of {hello.world_size}"))
        if self._is_left_over(channel, hello):
            return channel.send(Refused("this process is of an earlier start of the training, which has ended"))
        if self._is_of_this_attempt(channel, hello):
            if not self.attempt.connected:
                self._ranks.expect(hello.world_size)
            return self._admit_or_refuse(channel, hello, fds)
        if self.siblings.broken_at is not None and self._began_before(self.siblings.broken_at, channel):
            return channel.send(Refused("another rank of this training has failed: all begin again"))
        if leaving or (self.begins and not self._late):
            return self._turn_away(channel)
        self._late.append((channel, hello))
        if len(self._late) > 1:
            return None  # another rank of the same training has come first
        # Its own parent (torchrun, a loop) has started it again.
        self.siblings.end()
        return self.begin_again(self._admit_late, self._turn_all_away)

    def _is_left_over(self, channel: Channel, hello: Hello) -> bool:
        """Whether a process outlives the launcher, our child, that has started it: it comes too late."""
        if not self._program.is_child or hello.generation is not None or not self._server.has(channel):
            return False
        # Not the time at which the attempt's first rank began: a launcher that starts its ranks again takes a while.
        ticks = start_ticks(peer_pid(channel))
        return self.child is None or (ticks is not None and ticks < self.child.start_ticks)

    def _is_of_this_attempt(self, channel: Channel, hello: Hello) -> bool:
        """Whether a process belongs to the present attempt, as opposed to one that its own parent has begun."""
        attempt, number = self.attempt, hello.rank
        if hello.generation is not None or not attempt.connected:
            return True
        if self.siblings.broken_at is not None:
            return False
        rank = self._ranks.of(number) if number < len(self._ranks) else None
        there = None if rank is None else rank.connection
        lives = there is not None and not pidfd_dead(there.pidfd)
        return lives or number not in attempt.greeted or hello.world_size != len(self._ranks)

    def _began_before(self, moment: float, channel: Channel) -> bool:
        return self._server.has(channel) and began_at(peer_pid(channel)) < moment

    def _admit_or_refuse(self, channel: Channel, hello: Hello, fds: Sequence[int] = ()) -> None:
        if hello.world_size != len(self._ranks):
            others = f"others of this training say that there are {len(self._ranks)}"
            return channel.send(Refused(f"this is rank {hello.rank} of {hello.world_size}, and {others}"))
        rank = self._ranks.of(hello.rank)
        if (there := rank.connection) is not None and not pidfd_dead(there.pidfd):
            which = "" if hello.world_size == 1 else f", as rank {hello.rank} of {hello.world_size}"
            return channel.send(
                Refused(
                    f"run {self._context.settings.run!r} is being trained by process {there.pid} already{which}; "
                    "a process has one Checkpointer, and a run has one trainer: give the other one a name with --run. "
                    "Several processes of one training have ranks: call init_process_group before Checkpointer, or "
                    "start them with torchrun"
                )
            )
        self._drop(rank)
        return self._admit(rank, channel, hello, fds)

    def _turn_away(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosed):
            channel.send(Refused("this agent is shutting down: it begins no new generation"))

    def _turn_all_away(self) -> None:
        late, self._late = self._late, []
        for channel, _ in late:
            self._turn_away(channel)

    def _admit_late(self) -> None:
        late, self._late = self._late, []
        self._ranks.expect(late[0][1].world_size)
        for channel, hello in late:
            with contextlib.suppress(ChannelClosed):  # the trainer died while its generation was begun
                self._admit_or_refuse(channel, hello)

    def _admit(self, rank: Rank, channel: Channel, hello: Hello, fds: Sequence[int]) -> None:
        pidfd = None
        if self._server.has(channel):
            pid = peer_pid(channel)
            pidfd = open_pidfd(pid)
        if pidfd is None:
            return  # the trainer has died already
        rank.connection = Connection(channel, pid, pidfd)
        self._loop.watch(pidfd, lambda: self._on_dead(rank))
        self.attempt.greeted.add(rank.number)
        self.attempt.greeted_at = self.attempt.greeted_at or time.monotonic()
        if hello.generation is None and self.attempt.spawned_at is None:
            self.attempt.spawned_at = began_at(pid)
        if hello.generation is not None:
            known = self._startup.generation if self.attached else Generation.of(hello.generation)  # of all its ranks
            self._attach(rank, known, hello.indexes, fds)
        self._emit(events.TrainerConnected(pid=pid, rank=hello.rank))
        self._tell.joined()
        sequence = self._pipeline.sequence(rank.number)
        if hello.generation is None:
            rank.control.take_note(sequence)
        welcome = messages.Welcome(
            generation=self._startup.generation.info,
            restarts=self.restarts,
            settings=self._context.settings.to_json(),
            detached=not self._program.is_child,
            command=self._program.remembered,
            sequence=sequence,
        )
        channel.send(welcome, [rank.control.page_fd])
        if hello.generation is None:
            self.telling.resume()

    def _attach(self, rank: Rank, generation: Generation, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """Adopt the generation, control page and slots of a live trainer whose agent died, and continue."""
        page, *slots = fds
        rank.control.adopt(page)
        for index, fd in zip(indexes, slots, strict=True):
            self._pipeline.adopt(index, Slot(fd), generation, rank=rank.number)
        if indexes:
            rank.control.begin_layout(self._pipeline.pool[indexes[0]].size)
            rank.control.end_layout()
        self._emit(events.AgentReplaced(slots=len(indexes)))
        if not self.attached:  # of several ranks, the first one
            self._startup.adopt(generation)
        self.attached = True
        self._take_what_was_not_told(rank)

    def _take_what_was_not_told(self, rank: Rank) -> None:
        """Take what a rank sealed while it had no agent. It may have been saved already: twice is harmless."""
        for slot in self._pipeline.take_left_over(self._startup.generation, rank.number):
            self._ranks.note_untold(rank.number, slot)
            rank.control.acknowledge(slot.slot.sequence)
            if self._pipeline.sealed_step is not None:
                self._ranks.tell_set(self._pipeline.sealed_step)
        self._ranks.drop(self._pipeline.take_mixed())

    def signal(self, signum: int) -> None:
        """Pass a signal on to the child, if there is one."""
        if self.child is not None:
            self.child.signal(signum)

    def announces(self, signum: int) -> bool:
        """Whether a signal that has reached one of its processes announces an interruption."""
        if signum == signal.SIGINT:
            # `torch.multiprocessing.spawn` has it sent once the launcher dies; a real one reaches the agent as well.
            return not self.orphaned
        if self.attempt.stopped or self.siblings.broken:
            return False  # the last SIGTERM is our own; and a launcher ends the others of a rank that has failed
        if len(self.attempt.greeted) < len(self._ranks):
            self.siblings.note_missing()  # it has failed as well, before it had a Checkpointer
            return False
        return True

    # ---- messages from the trainer ----------------------------------------------------------------------------------

    def on_message(self, rank: Rank, message: FromTrainer) -> None:
        """Handle a message of a rank about itself. What all ranks do counts once the last has done it."""
        attempt, is_last = self.attempt, partial(self.attempt.is_last, rank=rank.number, of=len(self._ranks))
        match message:
            case messages.Attached():
                self._take_what_was_not_told(rank)
            case messages.Holds():
                self._ranks.holdings.tell(rank.number, message)
                self.telling.stores()
            case Layout():
                rank.control.begin_layout(message.bytes)
                rank.supply.want(message, partial(self._deliver, rank))
                self._ranks.make_slots()
            case messages.Restored(snapshot, step, seconds) if is_last(messages.Restored):
                self._emit(events.Restored(snapshot=snapshot, step=step, seconds=seconds))
                attempt.resumed_step, attempt.restored = step, True
                self._release_resume()
            case messages.FirstStep(step) if is_last(messages.FirstStep):
                attempt.first_step_at, attempt.stepped = time.monotonic(), message
                self._emit(events.FirstStep(step=step, seconds=attempt.first_step_at - attempt.began_at))
            case messages.Evaluates(step, passed):
                rank.control.evaluates = Place(step, Where.AFTER, passed)
            case messages.SaveWanted():
                self._ranks.want("save", rank)
                self._pipeline.save_newest_now()
            case messages.Training():
                attempt.finished_step, rank.control.at_end = None, False
                for kind in (messages.AtEnd, messages.Finished):
                    attempt.told.pop(kind, None)
                attempt.left_loop.discard(rank.number)
                self._pipeline.set_urgent(False)
            case messages.Leaving():
                self._pipeline.save_newest_now()
            case messages.AtEnd(step):
                rank.control.at_end = True
                if is_last(messages.AtEnd) and self._ranks.set_step != step:
                    self._ranks.reasons.add("end")
                self.telling.left(attempt.left_loop)
            case messages.LeftLoop():
                attempt.left_loop.add(rank.number)
                self.telling.left(attempt.left_loop)
            case messages.Finished(step) if is_last(messages.Finished):
                attempt.finished_step = step
                self._emit(events.TrainerFinished(step=step))
                self._pipeline.save_newest_now()
            case messages.Bye(exception, early, hopeless, process_lives) if rank.connection is not None:
                rank.connection.said_bye, rank.connection.exception = True, exception
                attempt.raised, attempt.stopped_early = attempt.raised or exception, attempt.stopped_early or early
                attempt.hopeless = attempt.hopeless or hopeless
                if process_lives and not self._program.is_child:
                    self._on_dead(rank)  # for this agent it is

    def _deliver(self, rank: Rank, layout: Layout, made: list[int] | HarnessError) -> None:
        """Send a rank its slots, or why there are none."""
        assert rank.connection is not None, "a layout is forgotten with the connection"
        channel = rank.connection.channel
        with contextlib.suppress(ChannelClosed):  # it has died; its pidfd is about to report that
            if isinstance(made, HarnessError):
                return channel.send(messages.NoSlots(type(made).__name__, str(made)))
            fds = [self._pipeline.pool[index].fd for index in made]
            channel.send(messages.Slots(tuple(made), layout.number), fds)
            rank.control.end_layout()
            rank.supply.tell(layout, made)
        return None

    def end_siblings_in_time(self, *, leaving: bool) -> None:
        """End ranks that others have left alone, in time; `leaving`: all are told to leave."""
        attempt, there = self.attempt, {rank.number for rank in self._ranks if rank.connection is not None}
        finished = attempt.finished_step is not None or there <= attempt.left_loop
        self.siblings.end_in_time(leaving=leaving, saved=self._pipeline.idle, finished=finished)

    def tell_restarted(self) -> None:
        """Emit how long its start took, once its first step is made and the end of the previous attempt is known."""
        attempt, startup = self.attempt, self._startup
        if attempt.stepped is None or not (attempt.last_ended_at is not None or startup.looked_back or attempt.over):
            return
        begins = self.restarts == 0 and (self._context.settings.fresh or startup.generation.number == 1)
        event = None if begins else attempt.restarted(startup.last_ended_at, startup.point)
        attempt.stepped = None
        if event is not None:
            self.restarted = event
            self._emit(event)

    # ---- end --------------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Close all of its connections, and take slots that it sealed and did not report."""
        for rank in self._ranks:
            self._drop(rank)

    def _drop(self, rank: Rank) -> None:
        if (connection := rank.connection) is None:
            return
        self._loop.forget(connection.pidfd)
        os.close(connection.pidfd)
        self._server.hang_up(connection.channel)
        rank.forget()
        self.siblings.note_ended(connection)
        if self.connected:
            return
        self.attempt.ended_at = time.monotonic()
        self._release_resume()
        self._ranks.reasons.clear()
        self._tell.lost()
        self._pipeline.take_left_over(self._startup.generation)

    def stop(self, within_s: float = math.inf) -> None:
        """As the last resort, send SIGTERM to the child alone, then SIGKILL; and SIGKILL to ranks that outlive it.

        Blocks for a few seconds, or for `within_s` if that is less, and after SIGKILL for two more at most: a process
        that waits for a dead disk or GPU ends only once the kernel lets it, and is waited for no longer.
        """
        if (child := self.child) is not None:
            self.attempt.stopped = True
            child.signal(signal.SIGTERM)
            if not _ends(child, min(_KILL_AFTER_S, within_s)):
                child.signal(signal.SIGKILL)
                self.siblings.end()
                if not _ends(child, _GONE_S):
                    self._context.say(f"process {child.pid} was killed, and the kernel has not ended it: left alone")
                    self.give_up()
            self._on_child_exit()
        if self.orphaned:
            self.siblings.end()
            for rank in self._ranks:
                self._on_dead(rank)

    def give_up(self) -> None:
        """Stop waiting for a trainer."""
        self.attempt.over = True

    def left_as_told(self) -> None:
        """Note that the trainer exited because it was told to, in its own way: it did not stop early by itself."""
        self.attempt.stopped_early = False

    def note_if_gone(self) -> None:
        """Note the end of a trainer that is no child, even if it died before its hello: no daemon is left behind."""
        attempt = self.attempt
        if not self._program.is_child and not self.connected and not attempt.over:
            attempt.over = attempt.connected or time.monotonic() - attempt.began_at > _ALONE_S

    def _left(self, code: int | None) -> None:
        attempt, self._orphaned_by = self.attempt, None
        attempt.over, attempt.exit_code = True, code
        attempt.ended_at = attempt.ended_at or time.monotonic()
        self._tell.left(code)

    def _on_dead(self, rank: Rank) -> None:
        """Handle the death of a connected trainer, as its pidfd reports it; first read the messages that it sent."""
        connection = rank.connection
        if connection is None:
            return
        if self._server.has(connection.channel):
            connection.channel.socket.setblocking(False)
            with contextlib.suppress(ChannelClosed):
                while True:
                    message = connection.channel.receive().message
                    if isinstance(message, FromTrainer):
                        self._tell.last_word(rank, message)
        self._drop(rank)
        if self.connected:
            return
        if self._orphaned_by is not None:
            self._left(self._orphaned_by)
        elif not self._program.is_child:
            well = connection.said_bye and not connection.exception and self.siblings.broken_at is None
            self._left(0 if well else None)

    def _on_child_exit(self) -> None:
        child = self.child
        if child is None or (code := child.reap()) is None:
            return
        self._loop.forget(child.pidfd)
        child.close()
        self.child = None
        for rank in self._ranks:
            if rank.connection is not None and (not self._ranks.several or pidfd_dead(rank.connection.pidfd)):
                self._on_dead(rank)
        if self.connected:
            self._orphaned_by = code
            self._ranks.reasons.add("orphaned")  # they can still seal a step together
            self.siblings.note_orphaned()
        else:
            self._left(code)

    def _release_resume(self) -> None:
        """Release the slots of the resume point: all ranks have restored it, or none will."""
        point, pool = self._startup.point, self._pipeline.pool
        for index in point.indexes if point is not None else ():
            if index in pool:
                pool.release(index, "resume")


def _ends(child: Child, within_s: float) -> bool:
    """Whether a child ends within this time. Blocks until it has, or the time is over."""
    give_up_at = time.monotonic() + within_s
    while child.reap() is None:
        if time.monotonic() > give_up_at:
            return False
        threading.Event().wait(0.02)
    return True
