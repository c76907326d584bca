"""The trainer as its agent sees it: a process, the connection of its Checkpointer, and one life after the other.

Owns the child, the connected Checkpointer and the current life: how a trainer comes, is recognized and told what it
resumes, and how it is found to have gone. Knows no notices, and decides nothing about ends: who has gone is told.

    spawn ──▶ Hello ──▶ Welcome, what there is to resume ──▶ Layout ──▶ Slots ──▶ messages ──▶ dead ──▶ left
              Hello of a trainer whose agent died ──▶ its generation, page and slots are adopted
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.agent.context import Context
from harness.agent.generation import Generation
from harness.agent.resume.startup import Finding, Startup
from harness.agent.save.pipeline import SavePipeline
from harness.agent.server import Server
from harness.agent.trainers.attempt import TrainerAttempt
from harness.agent.trainers.child import Child
from harness.agent.trainers.control import TrainerControl
from harness.agent.trainers.slots import SlotSupply
from harness.config.program import Program
from harness.config.settings import SOCKET_VARIABLE
from harness.core import events, messages
from harness.core.messages import FromTrainer, Hello, Layout, Refused, Sealed, SignalReceived
from harness.errors import HarnessError
from harness.ipc.channel import Channel, ChannelClosed, peer_pid
from harness.ipc.process import began_at, open_pidfd, pidfd_dead
from harness.ipc.slots import Slot

ATTACH_S = 10.0  # how long it takes, at most, until whoever started an agent says hello
MOST_OF_HEADER = 1 << 20  # characters of small state that go ahead of the tensors; more of it lies in the slot only
_KILL_AFTER_S = 3.0
_BUSY_S = 0.1
_ALONE_S = 30.0  # how long a detached agent waits for the trainer that started it


@dataclass
class Connection:
    """A connected Checkpointer.

    Attributes:
        channel: to it.
        pid: of its process.
        pidfd: readable once that is dead.
        exception: whether it said goodbye because of one.
        said_bye: whether it said goodbye.
    """

    channel: Channel
    pid: int
    pidfd: int
    exception: bool = False
    said_bye: bool = False


@dataclass(frozen=True)
class TrainerEvents:
    """Whom the trainer's doings are told to. Each is called in the main thread.

    Attributes:
        message: what it says that is not about itself: of snapshots, and of signals.
        began: another of its lives has begun: what was known of the one before is past.
        joined: its Checkpointer has said hello.
        lost: the connection is gone, and with it every wish.
        left: the process has ended: its exit code as a shell shows it, `None` for a crash of one that is no child.
    """

    message: Callable[[Sealed | SignalReceived], None]
    began: Callable[[], None]
    joined: Callable[[], None]
    lost: Callable[[], None]
    left: Callable[[int | None], None]


class Trainer:
    """The one trainer of a run on this host, and the only writer of what is known of its lives. Main thread."""

    def __init__(
        self,
        context: Context,
        program: Program,
        server: Server,
        control: TrainerControl,
        pipeline: SavePipeline,
        startup: Startup,
        tell: TrainerEvents,
    ) -> None:
        """Starts nothing.

        Args:
            context: of the agent.
            program: what trains.
            server: where it connects.
            control: the control page.
            pipeline: takes what it seals.
            startup: its generation, and what it resumes.
            tell: whom its doings are told to.
        """
        self._context, self._program, self._server, self._control = context, program, server, control
        self._pipeline, self._startup, self._tell = pipeline, startup, tell
        self._loop, self._emit = context.loop, context.emit
        self._supply = SlotSupply(context, pipeline.pool, self._deliver)
        self.child: Child | None = None
        self.connection: Connection | None = None
        self.attempt = TrainerAttempt(time.monotonic(), began_at(os.getpid()))
        self.restarts = 0
        """Lives that were begun after the first one."""
        self.restarted: events.Restarted | None = None
        """What the newest start took, once that is known."""
        self.begins = False
        """Whether another generation is about to begin."""
        self.called_off = False
        """Whether a generation that was about to begin was given up."""
        self.attached = False
        """Whether a trainer has come whose agent had died."""

    @property
    def holder_pid(self) -> int | None:
        """The process that trains, or is about to: whoever started this agent has yet to say hello."""
        if self.connection is not None:
            return self.connection.pid
        if self.child is not None:
            return self.child.pid
        starter = self._program.starter
        return starter if self._starter_comes and os.getppid() == starter else None  # else it is dead

    @property
    def listens(self) -> bool:
        """Whether it is no child, and is there to be told something, or about to be."""
        return not self._program.is_child and (self.connection is not None or self._starter_comes)

    @property
    def _starter_comes(self) -> bool:
        """Whether whoever started a detached agent may still say hello."""
        young = time.monotonic() - self.attempt.began_at < ATTACH_S
        return not self._program.is_child and not self.attempt.connected and young

    @property
    def trains(self) -> bool:
        """Whether it is there to take one more snapshot."""
        return self.connection is not None and self.attempt.finished_step is None

    # ---- how it comes -----------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start the child, if it is to be one.

        Raises:
            ConfigError: there is no such command, or it cannot be executed.
        """
        command = self._program.command
        if command is None:
            return
        environment = {
            **self._program.environ,
            SOCKET_VARIABLE: str(self._server.address),
            "HARNESS_RUN_ID": self._startup.generation.run_id,
            "HARNESS_RESTARTS": str(self.restarts),
        }
        self.attempt.spawned_at = time.monotonic()
        self.child = Child(command, environment)
        self._loop.watch(self.child.pidfd, self._on_child_exit)
        self._emit(events.TrainerStarted(pid=self.child.pid, restarts=self.restarts))

    def begin(self, begun: Callable[[], None]) -> None:
        """Its first life, in the agent's first generation. Returns at once; `begun` is called when that has begun."""
        self.begins = True

        def note() -> None:
            self.begins = False
            begun()

        self._startup.begin(note)

    def begin_again(self, begun: Callable[[], None], superseded: Callable[[], None] = lambda: None) -> None:
        """Another life: another generation, and another search for what it resumes. Returns at once.

        Args:
            begun: called when it has begun, within seconds.
            superseded: called instead where a newer start has asked for the run.
        """
        self.begins = True
        self._pipeline.settle_held(counts=True)  # its own parent starts another: it had ended well
        self._release_resume()  # found after its trainer had died

        def note(has_begun: bool) -> None:
            self.begins = False
            if not has_begun:
                return superseded()
            self.restarts += 1
            now = time.monotonic()
            self.attempt = TrainerAttempt(now, now, last_ended_at=self.attempt.ended_at)
            self._control.begin_again()
            self._tell.began()
            return begun()

        self._startup.begin_again(note)

    def call_off(self) -> None:
        """The run is to be left: what was about to begin does not; what there is is saved."""
        self.begins, self.called_off = False, True
        self.attempt.over = self._program.is_child

    def await_attach(self) -> bool:
        """An agent that replaces a dead one hears its trainer before it decides anything. Whether it came. Blocks."""
        return self._await(lambda: self.attached)

    def await_hello(self) -> bool:
        """Block until a trainer is connected, for some seconds at most. Whether one is."""
        return self._await(lambda: self.connection is not None)

    def _await(self, condition: Callable[[], bool]) -> bool:
        give_up_at = time.monotonic() + ATTACH_S
        while not condition() and time.monotonic() < give_up_at:
            self._loop.wait(_BUSY_S)
        return condition()

    def greet(self, channel: Channel, hello: Hello, fds: Sequence[int], *, leaving: bool) -> None:
        """A Checkpointer says hello. One that comes anew is not begun with by an agent that is leaving.

        Raises:
            ChannelClosed: it is gone already.
        """
        if hello.protocol != messages.PROTOCOL:
            return channel.send(Refused("the agent and the trainer use different versions of the harness"))
        if self.connection is not None and not pidfd_dead(self.connection.pidfd):
            return channel.send(
                Refused(
                    f"run {self._context.settings.run!r} is being trained by process {self.connection.pid} already; "
                    "a process has one Checkpointer, and a run has one trainer: name the other one with --run"
                )
            )
        self.drop()
        if not (self.attempt.connected and hello.generation is None):
            return self._admit(channel, hello, fds)
        if leaving or self.begins:
            return self._turn_away(channel)
        # Its own parent (torchrun, a loop) has started it again.
        return self.begin_again(lambda: self._admit_late(channel, hello), lambda: self._turn_away(channel))

    def _turn_away(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosed):
            channel.send(Refused("this agent is leaving: no other generation is begun here"))

    def _admit_late(self, channel: Channel, hello: Hello) -> None:
        with contextlib.suppress(ChannelClosed):  # it has died while its generation was begun
            self._admit(channel, hello, ())

    def _admit(self, channel: Channel, hello: Hello, fds: Sequence[int]) -> None:
        pidfd = None
        if self._server.has(channel):
            pid = peer_pid(channel)
            pidfd = open_pidfd(pid)
        if pidfd is None:
            return  # it has died already
        self.connection = Connection(channel, pid, pidfd)
        self._loop.watch(pidfd, self._on_dead)
        self.attempt.connected = True
        if hello.generation is None and self.attempt.spawned_at is None:
            self.attempt.spawned_at = began_at(pid)
        if hello.generation is not None:
            self._attach(Generation.of(hello.generation), hello.indexes, fds)
        self._emit(events.TrainerConnected(pid=pid, rank=hello.rank))
        self._tell.joined()
        if hello.generation is None:
            self._control.take_note(self._pipeline.sequence)
        welcome = messages.Welcome(
            generation=self._startup.generation.info,
            restarts=self.restarts,
            settings=self._context.settings.to_json(),
            detached=not self._program.is_child,
            command=self._program.remembered,
            sequence=self._pipeline.sequence,
        )
        channel.send(welcome, [self._control.page_fd])
        if hello.generation is None:
            self.tell_resume()

    def _attach(self, generation: Generation, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """A live trainer whose agent died: adopt its generation, control page and slots, and go on."""
        page, *slots = fds
        self._control.adopt(page)
        for index, fd in zip(indexes, slots, strict=True):
            self._pipeline.pool.put(index, Slot(fd))
            self._pipeline.adopt(index, generation)
        if indexes:
            self._control.begin_layout(self._pipeline.pool[indexes[0]].size)
            self._control.end_layout()
        self.attached = True
        self._emit(events.AgentReplaced(slots=len(indexes)))
        self._startup.adopt(generation)
        self.take_what_was_not_told()

    def take_what_was_not_told(self) -> None:
        """What was sealed while there was no agent to tell. It may have been saved as well: twice is harmless."""
        if self.attached and self.connection is not None and self._pipeline.take_left_over(self._startup.generation):
            self._control.acknowledge(self._pipeline.sequence)

    # ---- what it is told --------------------------------------------------------------------------------------------

    def tell_resume(self) -> None:
        """Tell it what there is to resume, as far as that is known."""
        if self.connection is None:
            return
        channel, startup = self.connection.channel, self._startup
        generation = startup.generation.info  # it may not have been known yet when the trainer said hello
        with contextlib.suppress(ChannelClosed):
            if startup.finding is Finding.NOTHING:
                channel.send(messages.ResumeNone(generation))
            elif startup.finding is Finding.FAILED:
                channel.send(messages.ResumeFailed(type(startup.error).__name__, str(startup.error)))
            elif startup.finding is Finding.READY and (point := startup.point) is not None:
                ready = messages.ResumeReady(str(point.id), point.tier, point.verified, generation)
                channel.send(ready, [point.slot.fd])
            elif startup.header is not None and len(startup.header[2].state) <= MOST_OF_HEADER:
                snapshot, tier, record = startup.header
                channel.send(messages.ResumeHeader(snapshot, tier, record.encode().decode(), generation))

    def tell_superseded(self) -> None:
        """Who started it may have nothing but its own exit code."""
        if self.connection is not None:
            with contextlib.suppress(ChannelClosed):
                self.connection.channel.send(messages.Superseded())

    def signal(self, signum: int) -> None:
        """Pass a signal on to the child, if there is one."""
        if self.child is not None:
            self.child.signal(signum)

    # ---- what it tells ----------------------------------------------------------------------------------------------

    def is_at(self, channel: Channel) -> bool:
        """Whether it is the trainer that is at the other end: nobody else's word of it counts."""
        return self.connection is not None and channel is self.connection.channel

    def on_message(self, message: FromTrainer) -> None:
        """Whatever it says comes by here, also what is read after its death. What is not about itself is passed on."""
        attempt = self.attempt
        match message:
            case Sealed() | SignalReceived():
                self._tell.message(message)
            case Layout():
                self._control.begin_layout(message.bytes)
                self._supply.want(message)
            case messages.Restored(snapshot, step, seconds):
                self._emit(events.Restored(snapshot=snapshot, step=step, seconds=seconds))
                attempt.resumed_step, attempt.restored = step, True
                self._release_resume()
            case messages.FirstStep(step):
                attempt.first_step_at, attempt.stepped = time.monotonic(), message
                self._emit(events.FirstStep(step=step, seconds=attempt.first_step_at - attempt.began_at))
            case messages.SaveWanted():
                self._control.reasons.add("save")
                self._pipeline.save_newest_now()
            case messages.Training():
                attempt.finished_step = None
                self._pipeline.set_urgent(False)
            case messages.Leaving():
                self._pipeline.save_newest_now()
            case messages.Finished(step):
                attempt.finished_step = step
                self._emit(events.TrainerFinished(step=step))
                self._pipeline.save_newest_now()
            case messages.Bye(exception, early, hopeless, process_lives) if self.connection is not None:
                self.connection.said_bye, self.connection.exception = True, exception
                attempt.raised, attempt.stopped_early, attempt.hopeless = exception, early, hopeless
                if process_lives and not self._program.is_child:
                    self._on_dead()  # to us it is

    def _deliver(self, layout: Layout, made: list[int] | HarnessError) -> None:
        """Its slots are there, or there is no room for them."""
        assert self.connection is not None, "a layout is forgotten with the connection"
        channel = self.connection.channel
        with contextlib.suppress(ChannelClosed):  # it has died, which its pidfd is about to tell
            if isinstance(made, HarnessError):
                return channel.send(messages.NoSlots(type(made).__name__, str(made)))
            fds = [self._pipeline.pool[index].fd for index in made]
            channel.send(messages.Slots(tuple(made), layout.number), fds)
            self._control.end_layout()
            self._supply.tell(layout, made)
        return None

    def tell_restarted(self) -> None:
        """Emit what its start took, once the first step is made and it is known when the life before it ended."""
        attempt, startup = self.attempt, self._startup
        if attempt.stepped is None or not (attempt.last_ended_at is not None or startup.looked_back or attempt.over):
            return
        begins = self.restarts == 0 and (self._context.settings.fresh or startup.generation.number == 1)
        event = None if begins else attempt.restarted(startup.last_ended_at, startup.point)
        attempt.stepped = None
        if event is not None:
            self.restarted = event
            self._emit(event)

    # ---- how it goes ------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Its connection is of no use any more: take what it sealed and did not tell."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        self.attempt.ended_at = time.monotonic()
        self._loop.forget(connection.pidfd)
        os.close(connection.pidfd)
        self._server.hang_up(connection.channel)
        self._release_resume()
        self._supply.forget()
        self._control.forget()
        self._tell.lost()
        self._pipeline.take_left_over(self._startup.generation)

    def stop(self, within_s: float = math.inf) -> None:
        """The last resort: SIGTERM to the child alone, then SIGKILL. Blocks for seconds, or `within_s` of them."""
        child = self.child
        if child is None:
            return
        child.signal(signal.SIGTERM)
        give_up_at = time.monotonic() + min(_KILL_AFTER_S, within_s)
        while child.reap() is None:
            if time.monotonic() > give_up_at:
                child.signal(signal.SIGKILL)
            threading.Event().wait(0.02)
        self._on_child_exit()

    def give_up(self) -> None:
        """It is waited for no longer."""
        self.attempt.over = True

    def left_as_told(self) -> None:
        """It was told to leave, and has left in its own way: that is no end of its own."""
        self.attempt.stopped_early = False

    def note_if_gone(self) -> None:
        """No daemon is left behind by a trainer that is no child, not even by one that died before it said hello."""
        attempt = self.attempt
        if not self._program.is_child and self.connection is None and not attempt.over:
            attempt.over = attempt.connected or time.monotonic() - attempt.began_at > _ALONE_S

    def _left(self, code: int | None) -> None:
        attempt = self.attempt
        attempt.over, attempt.exit_code = True, code
        attempt.ended_at = attempt.ended_at or time.monotonic()
        self._tell.left(code)

    def _on_dead(self) -> None:
        """The pidfd of the connected trainer says that it is dead: read what it still said first."""
        connection = self.connection
        if connection is None:
            return
        if self._server.has(connection.channel):
            connection.channel.socket.setblocking(False)
            with contextlib.suppress(ChannelClosed):
                while True:
                    message = connection.channel.receive().message
                    if isinstance(message, FromTrainer):
                        self.on_message(message)
        self.drop()
        if not self._program.is_child:
            self._left(0 if connection.said_bye and not connection.exception else None)

    def _on_child_exit(self) -> None:
        child = self.child
        if child is None or (code := child.reap()) is None:
            return
        self._on_dead()
        self._loop.forget(child.pidfd)
        child.close()
        self.child = None
        self._left(code)

    def _release_resume(self) -> None:
        point = self._startup.point
        if point is not None and point.index is not None:
            self._pipeline.pool.release(point.index, "resume")
