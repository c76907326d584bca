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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from harness.agent.generation import Generation
from harness.agent.journal import Emit
from harness.agent.loop import Loop
from harness.agent.resume.startup import Finding, Startup
from harness.agent.save.pipeline import SavePipeline
from harness.agent.save.slot_pool import TWO_SLOTS_FROM_BYTES, Wanted, total_bytes
from harness.agent.server import Server
from harness.agent.trainers.attempt import TrainerAttempt
from harness.agent.trainers.child import Child
from harness.agent.trainers.control import TrainerControl
from harness.agent.trainers.restarts import Restarts
from harness.config.settings import SOCKET_VARIABLE, Settings
from harness.core import events, messages
from harness.core.messages import FromTrainer, Hello, Layout, Refused
from harness.errors import HarnessError
from harness.ipc.channel import Channel, ChannelClosed, peer_pid
from harness.ipc.process import began_at, open_pidfd, pidfd_dead
from harness.ipc.slots import Slot

ATTACH_S = 10.0  # how long it takes, at most, until whoever started an agent says hello
MOST_OF_HEADER = 1 << 20  # characters of small state that go ahead of the tensors; more of it lies in the slot only
_KILL_AFTER_S = 3.0
_BUSY_S = 0.1


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
    """Whom the trainer's doings are told to.

    Attributes:
        message: one that it said before it died, and that was not read yet.
        lost: the connection is gone, and with it every wish.
        left: the process has ended: its exit code as a shell shows it, `None` for a crash of one that is no child.
    """

    message: Callable[[FromTrainer], None]
    lost: Callable[[], None]
    left: Callable[[int | None], None]


class Trainer:
    """The one trainer of a run on this host. Main thread of the agent."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] | None,
        remembered: Sequence[str],
        environ: Mapping[str, str],
        loop: Loop,
        server: Server,
        control: TrainerControl,
        pipeline: SavePipeline,
        startup: Startup,
        restarts: Restarts,
        emit: Emit,
        tell: TrainerEvents,
        say: Callable[[str], None],
    ) -> None:
        """Starts nothing.

        Args:
            settings: of the run.
            command: its command line; `None` for one that connects by itself and is not our child.
            remembered: the command line in any case, if it is known.
            environ: the environment that a child gets.
            loop: watches the process.
            server: where it connects.
            control: the control page.
            pipeline: takes what it seals.
            startup: its generation, and what it resumes.
            restarts: how often it was started again.
            emit: the journal.
            tell: whom its doings are told to.
            say: a word to the user.
        """
        self._settings, self._command, self._remembered = settings, command, tuple(remembered)
        self._environ, self._loop, self._server, self._control = environ, loop, server, control
        self._pipeline, self._startup, self._restarts = pipeline, startup, restarts
        self._emit, self._tell, self._say = emit, tell, say
        self.child: Child | None = None
        self.connection: Connection | None = None
        self.attempt = TrainerAttempt(time.monotonic(), began_at(os.getpid()))
        self.restarted: events.Restarted | None = None
        """What the newest start took, once that is known."""
        self.begins = False
        """Whether another generation is about to begin."""
        self.attached = False
        """Whether a trainer has come whose agent had died."""
        self._layout: Layout | None = None
        self._making = False

    @property
    def alive_pid(self) -> int | None:
        """The process that trains, or is about to."""
        return self.connection.pid if self.connection else self.child.pid if self.child else None

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
        if self._command is None:
            return
        environment = {
            **self._environ,
            SOCKET_VARIABLE: str(self._server.address),
            "HARNESS_RUN_ID": self._startup.generation.run_id,
            "HARNESS_RESTARTS": str(self._restarts.count),
        }
        self.attempt.spawned_at = time.monotonic()
        self.child = Child(self._command, environment)
        self._loop.watch(self.child.pidfd, self._on_child_exit)
        self._emit(events.TrainerStarted(pid=self.child.pid, restarts=self._restarts.count))

    def begin_again(self, begun: Callable[[], None], superseded: Callable[[], None] = lambda: None) -> None:
        """Trainers start anew: another generation, and another search for what it resumes. Returns at once.

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
            self._restarts.count += 1
            now = time.monotonic()
            self.attempt = TrainerAttempt(now, now, last_ended_at=self.attempt.ended_at)
            self._control.begin_again()
            return begun()

        self._startup.begin_again(note)

    def await_attach(self) -> bool:
        """An agent that replaces a dead one hears its trainer before it decides anything. Whether it came. Blocks."""
        give_up_at = time.monotonic() + ATTACH_S
        while not self.attached and time.monotonic() < give_up_at:
            self._loop.wait(_BUSY_S)
        return self.attached

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
                    f"run {self._settings.run!r} is being trained by process {self.connection.pid} already; "
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
        if hello.generation is None:
            self._control.take_note(self._pipeline.sequence)
        welcome = messages.Welcome(
            generation=self._startup.generation.info,
            restarts=self._restarts.count,
            settings=self._settings.to_json(),
            detached=self._command is None,
            command=self._remembered,
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
            elif startup.head is not None and len(startup.head[2].state) <= MOST_OF_HEADER:
                snapshot, tier, record = startup.head
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
        """What it tells of itself."""
        attempt = self.attempt
        match message:
            case Layout():
                self._layout = message
                self._control.begin_layout(message.bytes)
                self._make_slots()
            case messages.Restored(snapshot, step, seconds):
                self._emit(events.Restored(snapshot=snapshot, step=step, seconds=seconds))
                attempt.resumed_step, attempt.restored = step, True
                self._release_resume()
            case messages.FirstStep(step):
                attempt.first_step_at, attempt.stepped = time.monotonic(), message
                self._emit(events.FirstStep(step=step, seconds=attempt.first_step_at - attempt.began_at))
            case messages.SaveWanted():
                self._control.reasons.add("save")
                self._pipeline.press()
            case messages.Training():
                attempt.finished_step = None
                self._pipeline.relax()
            case messages.Leaving():
                self._pipeline.press()
            case messages.Finished(step):
                attempt.finished_step = step
                self._emit(events.TrainerFinished(step=step))
                self._pipeline.press()
            case messages.Bye(exception, early, hopeless) if self.connection is not None:
                self.connection.said_bye, self.connection.exception = True, exception
                attempt.raised, attempt.stopped_early, attempt.hopeless = exception, early, hopeless

    # ---- its slots --------------------------------------------------------------------------------------------------

    def _make_slots(self) -> None:
        """For the newest layout: half a second per GiB, in a thread, while notices are heard. One layout at a time."""
        if self._making or self._layout is None:
            return
        layout, self._making = self._layout, True
        count = self._settings.slots or (2 if total_bytes() >= TWO_SLOTS_FROM_BYTES else 1)
        wanted = self._pipeline.pool.begin(layout.bytes, count)

        def make() -> None:
            made: list[Slot] | Exception
            try:
                made = wanted.make()
            except Exception as err:  # noqa: BLE001  the thread's root; the main thread tells them apart
                made = err
            self._loop.post(partial(self._made, layout, wanted, count, made))

        threading.Thread(target=make, name="harness-slots", daemon=True).start()

    def _made(self, layout: Layout, wanted: Wanted, count: int, made: list[Slot] | Exception) -> None:
        self._making = False
        if isinstance(made, Exception) and not isinstance(made, HarnessError):
            raise made
        indexes = [] if isinstance(made, Exception) else self._pipeline.pool.finish(wanted, made)
        if layout is not self._layout or self.connection is None:  # another one has come, or the trainer has gone
            return self._make_slots()
        self._layout = None
        with contextlib.suppress(ChannelClosed):  # it has died, which its pidfd is about to tell
            if isinstance(made, Exception):
                self.connection.channel.send(messages.NoSlots(type(made).__name__, str(made)))
            else:
                self._tell_slots(self.connection.channel, layout, indexes, count)
        return None

    def _tell_slots(self, channel: Channel, layout: Layout, indexes: Sequence[int], count: int) -> None:
        size = layout.bytes
        slots = [self._pipeline.pool[index] for index in indexes]
        channel.send(messages.Slots(tuple(indexes), layout.number), [slot.fd for slot in slots])
        self._control.end_layout()
        on_disk = slots[0].on_disk
        self._emit(events.SlotsReady(slots=len(slots), bytes=size, on_disk=on_disk))
        if on_disk:
            self._say(
                f"there is no memory for a snapshot of {size / 1e9:.2f} GB: each one goes through a window to "
                f"{self._settings.slot_disk}, and training waits for that disk meanwhile"
            )
        elif len(slots) < count:
            self._say(f"there is memory for {len(slots)} of {count} slots of {size / 1e9:.2f} GB")

    def tell_restarted(self) -> None:
        """Emit what its start took, once the first step is made and it is known when the life before it ended."""
        attempt, startup = self.attempt, self._startup
        if attempt.stepped is None or not (attempt.last_ended_at is not None or startup.looked_back or attempt.over):
            return
        begins = self._restarts.count == 0 and (self._settings.fresh or startup.generation.number == 1)
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
        self._layout = None
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
        self._restarts.call_off()

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
                        self._tell.message(message)
        self.drop()
        if self._command is None:
            self._tell.left(0 if connection.said_bye and not connection.exception else None)

    def _on_child_exit(self) -> None:
        child = self.child
        if child is None or (code := child.reap()) is None:
            return
        self._on_dead()
        self._loop.forget(child.pidfd)
        child.close()
        self.child = None
        self._tell.left(code)

    def _release_resume(self) -> None:
        point = self._startup.point
        if point is not None and point.index is not None:
            self._pipeline.pool.release(point.index, "resume")
