"""The agent: composition root and state machine.

Owns the main loop, every thread's start and end, and the place where what happened becomes what is done next.
All state is changed by the main thread only; other threads `post` to it. What a start begins with is `origin.py`, what
becomes of sealed slots is `saves.py`; this file is about the trainer, notices, and ends.

    poller ──notice──▶ ┌──────────────┐ ◀──messages── trainer (ipc.channel)
    saves ──commit───▶ │  Agent.run   │ ──ask, grant─▶ control page
    origin ──resume──▶ │  (main loop) │ ──slots─────▶ saves
    child ──exit─────▶ └──────────────┘ ──events────▶ journal
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import queue
import re
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cloud.errors import CloudError
from cloud.notice import Deadline, Notice, NoticeKind, NoticeSource
from cloud.signals import DrainFileSource, SignalSource
from cloud.store import ObjectStore
from harness.agent import drain as drains
from harness.agent import drill as drills
from harness.agent.child import Child
from harness.agent.drain import SPOT_WINDOW_S, Drain, Speeds
from harness.agent.drill import Drill
from harness.agent.generation import Generation
from harness.agent.journal import Journal, Listener
from harness.agent.life import Life
from harness.agent.memory import TRAINER, TWO_SLOTS_FROM_BYTES, oom_kills, total_bytes
from harness.agent.origin import Finding, Origin
from harness.agent.poller import Poller
from harness.agent.saves import Saves, Steps
from harness.agent.stores import open_store
from harness.config import SOCKET_VARIABLE, Settings
from harness.core import events
from harness.core.manifest import Claim
from harness.core.policy import Cadence, Choice, GiveUp, Plan, after_crash, still_fits
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError, DeadlineExceeded, ExitCode, HarnessError, NoSpace, Superseded
from harness.ipc import channel as ipc
from harness.ipc.channel import Channel, ChannelClosed, Message, RunPlace
from harness.ipc.slots import NO_SLOT, Ask, ControlPage, Request, Slot, Word

_IDLE_S, _BUSY_S = 0.5, 0.1  # how long the loop sleeps when nothing happens: idle CPU counts, and so does an end
_END_S, _END_AT_ONCE_S = 5.0, 1.0
_FINISH_S = 60.0  # nothing urges: a finished run should be known as such, or it is resumed once more
_KILL_AFTER_S = 3.0
_TAKE_OVER_S = 30.0
_ATTACH_S = 10.0
_ALONE_S = 30.0  # how long a detached agent waits for the trainer that started it


class State(enum.Enum):
    """STARTING → RUNNING → DRAINING → DONE; RUNNING → STARTING on a restart in place; every state may go to DONE.

    STARTING: no trainer has connected in this generation yet. RUNNING: one has. DRAINING: the instance is going away,
    or the user wants to stop: nothing new is begun after the last snapshot. DONE: the outcome is recorded.
    """

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"


@dataclass
class Trainer:
    """A connected Checkpointer."""

    channel: Channel
    pid: int
    pidfd: int
    exception: bool = False
    said_bye: bool = False


@dataclass
class Wants:
    """What is being asked of the trainer, and why."""

    reasons: set[str] = field(default_factory=set)
    asked: Ask = Ask.NOTHING
    granted: int | None = None
    layout_bytes: int | None = None


class Agent:
    """One run on one node. `run` returns when everything that was sealed is where it has to be."""

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str] | None,
        *,
        environ: Mapping[str, str],
        script: Sequence[str] = (),
        sources: Sequence[NoticeSource] | None = None,
        listeners: Sequence[Listener] = (),
        stores: Callable[[str], ObjectStore] | None = None,
    ) -> None:
        """Prepare; nothing is asked, written or started before `run`.

        Args:
            settings: of the run.
            command: the trainer's command line; `None` for a detached agent, whose trainer connects by itself.
            environ: the environment that a child gets.
            script: the command line of a trainer that is not our child, to be remembered.
            sources: of notices, beside signals and the drain file; `None` for the instance metadata service.
            listeners: called with every line of the journal, in the emitting thread (tests).
            stores: opens a store by its location; `None` for what the settings say.

        Raises:
            ConfigError: a store cannot be used.
        """
        stores = stores or (lambda location: open_store(location, settings, _say))
        self.settings, self.command, self._environ = settings, command, environ
        self._remembered = tuple(command or script)
        self.state = State.STARTING
        self.child: Child | None = None
        self.trainer: Trainer | None = None
        self._host = re.sub(r"[^A-Za-z0-9_.=+-]", "-", socket.gethostname())[:60] or "localhost"
        self._place = RunPlace.of(Path(settings.runtime_dir), settings.store_identity, settings.run)
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._lock_fd: int | None = None
        self._listener: socket.socket | None = None
        self._clients: set[Channel] = set()
        self._page = ControlPage.create()
        self._life = Life(time.monotonic(), ipc.began_at(os.getpid()))
        self._restarted: events.Restarted | None = None
        self._wants = Wants()
        self._drain: Drain | None = None
        self._drill: Drill | None = None
        self._drilled_for: Channel | None = None
        self._attached = False
        self._restarts = self._crashes = self._signals_seen = 0
        self._oom_kills = oom_kills()
        self._furthest = self._furthest_crashed = 0
        self._restart_at: float | None = None
        self._outcome: tuple[str, int] | None = None
        self._bug: BaseException | None = None
        keys = RunKeys(settings.run)
        self._journal = Journal(keys, self._host, listeners=listeners, heartbeat=self._heartbeat)
        self._saves = Saves(
            settings, keys, self._host, self._journal.emit, self.post, self._on_commit, self._on_bug, stores
        )
        self._speeds = Speeds(self._saves)
        self._origin = Origin(
            settings,
            keys,
            self._host,
            self._remembered,
            self._saves,
            self._journal,
            self.post,
            self._tell_resume,
            self._refuse,
            self._on_superseded,
            self._on_bug,
            _say,
        )
        self._signals = SignalSource(settings.grace_s)
        heard: list[NoticeSource] = [self._signals]
        if settings.drain_file:
            heard.append(DrainFileSource(Path(settings.drain_file), settings.grace_s))
        heard += _metadata_sources(settings.metadata) if sources is None else sources
        self._poller = Poller(
            heard,
            self._journal.emit,
            lambda notice: self.post(lambda: self._on_notice(notice)),
            lambda notice: self._journal.emit(events.NoticeWithdrawn(source=notice.source)),
            self._on_bug,
        )

    # ---- life of the agent ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run to the recorded outcome; the exit code. Main thread only (signals).

        Raises:
            ConfigError: the run cannot be started: nothing was changed, no trainer runs.
        """
        self._poller.start()  # before anything slow: a notice may be in force already
        self._install_signals()
        try:
            self._begin()
            while self.state is not State.DONE:
                self._turn()
        except ConfigError:
            self._stop_child()
            raise
        finally:
            self._shut()
        assert self._outcome is not None, "DONE is reached by recording an outcome"
        return self._outcome[1]

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the main thread soon. From any thread, and from signal handlers."""
        self._posts.put(action)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def status(self) -> dict[str, object]:
        """What `harness status` shows of a live run. Main thread."""
        remote, steps = self._saves.remote, self._saves.steps
        left, rate = remote.bytes_left, remote.bytes_s
        left_s = self._drain.deadline.remaining_s if self._drain else math.inf
        durable_at = self._saves.durable_at
        return {
            "run": self.settings.run,
            "store": self.settings.store,
            "local": self.settings.local,
            "state": self.state.value,
            "generation": self._origin.generation.number,
            "run_id": self._origin.generation.run_id,
            "claimed": self._origin.generation.claimed.is_set(),
            "step": self._trainer_step(),
            "local_step": steps.local,
            "durable_step": steps.durable,
            "durable_age_s": None if durable_at is None else round(time.monotonic() - durable_at, 1),
            "bytes_copied": remote.copied.bytes,
            "bytes_pending": left or 0,
            "estimate_s": round(left / rate, 1) if left and rate else None,
            "deadline_s": None if math.isinf(left_s) else round(left_s, 1),
            "finished_step": self._life.finished_step,
            "everything_durable": self._saves.everything_durable,
            "restarts": self._restarts,
            "restart": None if self._restarted is None else self._restarted.fields(),
            "blind": self._poller.blind,
            "agent_pid": os.getpid(),
            "trainer_pid": self.trainer.pid if self.trainer else None,
        }

    def _begin(self) -> None:
        try:
            self._place.prepare()
            self._take_lock()
            self._listener = ipc.listen(self._place.socket)
        except OSError as err:
            raise ConfigError(
                f"no agent can listen in {self._place.directory}: {err}; see --help on runtime_dir"
            ) from err
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        settings = self.settings
        self._journal.emit(
            events.AgentStarted(
                run=settings.run,
                store=settings.store,
                local=settings.local,
                host=self._host,
                pid=os.getpid(),
                detached=self.command is None,
            )
        )
        self._page.words[Word.AGENT_PID] = os.getpid()
        self._saves.start()
        self._journal.start(self._saves.remote.store)
        if "HARNESS_ATTACH" in self._environ and self.command is None:
            if not self._wait_for_trainer():
                self._end("stopped", ExitCode.FINISHED)  # it died as well; what it sealed went with it
            return
        self._origin.begin()
        if self.command is not None:
            self._spawn(self.command)

    def _turn(self) -> None:
        """One turn of the main loop: wait for anything, then let every rule look."""
        ending = self._drain is not None or self._restart_at is not None or self._life.over
        for key, _mask in self._selector.select(_BUSY_S if ending else _IDLE_S):
            key.data()
        self._run_posts()
        if self.state is State.DONE:
            return
        if self._bug is not None:
            _say("".join(traceback.format_exception(self._bug)))
            self._end("failed", ExitCode.BUG)
            return
        self._watch_step()
        self._take_what_was_not_told()
        self._save_what_there_is_in_time()
        self._conclude_drill()
        self._tell_restarted()
        self._ask_if_due()
        self._restart_if_time()
        self._finish_if_done()

    def _run_posts(self) -> None:
        """What other threads have told. After the end only facts still count: a commit, not a wish."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._posts.get_nowait()()

    def _shut(self) -> None:
        """Nothing may publish any more when the end is recorded (I5); nobody may write when the stores close."""
        wait_s = _END_AT_ONCE_S if self._signals_seen > 1 else _END_S
        patient = self._outcome is not None and self._outcome[0] == "finished" and not self._signals_seen
        self._origin.close()
        self._poller.close()
        quiet = self._saves.close(_FINISH_S if patient else wait_s)
        self._run_posts()  # a commit that was made a moment ago counts
        if self._outcome is not None:
            self._record_end(*self._outcome, quiet=quiet, in_s=_FINISH_S if patient else _END_S)
        self._journal.close(max(1.0, 2 * wait_s))
        self._saves.close_stores()
        for channel in self._clients:
            channel.close()
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                self._place.socket.unlink()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def _record_end(self, outcome: str, code: int, *, quiet: bool, in_s: float) -> None:
        if code == ExitCode.INTERRUPTED_LOCAL and self._saves.everything_durable:
            code = int(ExitCode.INTERRUPTED)
            self._outcome = (outcome, code)
        steps = self._saves.steps
        if self._drain is not None:
            drained = self._drain.outcome(steps.durable, self._trainer_step())
            self._journal.emit(drained)
            _say(drains.words(drained))
            if self._drilled_for is not None:
                drills.tell(self._drilled_for, self._drain.drilled(drained))
        if quiet:
            try:
                self._origin.end(outcome, Deadline.after(in_s))
            except CloudError as err:
                _say(f"the outcome could not be recorded in the store: {err}")
        else:
            _say("the outcome is not recorded in the store: a call to a store has not ended yet")
        self._journal.emit(
            events.Ended(outcome=outcome, exit_code=code, local_step=steps.local, durable_step=steps.durable)
        )

    # ---- one agent for a run on a host ------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        """Become this host's agent of the run; one whose trainer is dead hands its slots over."""
        give_up_at = time.monotonic() + _TAKE_OVER_S
        while (lock := self._place.try_lock()) is None:
            if (other := ipc.connect(self._place.socket)) is not None:
                with contextlib.closing(other), contextlib.suppress(ChannelClosed):
                    other.send("takeover")
                    self._on_takeover_answer(other.receive())
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"another agent of run {self.settings.run!r} does not let go of {self._place.directory}"
                )
            threading.Event().wait(0.05)
        self._lock_fd = lock
        self._origin.place = self._place.identity(lock)

    def _on_takeover_answer(self, answer: Message) -> None:
        if answer.type == "busy":
            raise ConfigError(
                f"run {self.settings.run!r} is being trained on this host already, by process {answer['trainer_pid']}: "
                "stop that one, or choose another --run"
            )
        for fd, index, life in zip(answer.fds, answer["indexes"], answer["lives"], strict=True):
            self._saves.pool.put(index, Slot(fd))
            self._saves.adopt(index, Generation.of(life))
        self._saves.note_all_taken()
        if answer.fds:
            self._journal.emit(events.AgentReplaced(slots=len(answer.fds)))

    def _hand_over(self, channel: Channel) -> None:
        """A newcomer on this host wants the run: give it the slots, unless a trainer of ours is alive."""
        alive = self.trainer.pid if self.trainer else self.child.pid if self.child else None
        if alive is not None or self._restart_at is not None:
            channel.send("busy", trainer_pid=alive or os.getpid())
            return
        if self.state is State.DONE:
            return  # ending already: whoever asks waits for the lock
        sealed = self._saves.handed_over()
        channel.send(
            "handed-over",
            [self._saves.pool[index].fd for index, _ in sealed],
            indexes=[index for index, _ in sealed],
            lives=[generation.fields() for _, generation in sealed],
        )
        self._end("superseded", ExitCode.SUPERSEDED)

    def _wait_for_trainer(self) -> bool:
        """An agent that replaces a dead one hears its trainer before it decides anything. Whether it came."""
        give_up_at = time.monotonic() + _ATTACH_S
        while not self._attached and time.monotonic() < give_up_at:
            for key, _mask in self._selector.select(_BUSY_S):
                key.data()
        return self._attached

    # ---- the trainer ------------------------------------------------------------------------------------------------

    def _spawn(self, command: Sequence[str]) -> None:
        environment = {
            **self._environ,
            SOCKET_VARIABLE: str(self._place.socket),
            "HARNESS_RUN_ID": self._origin.generation.run_id,
            "HARNESS_RESTARTS": str(self._restarts),
        }
        self._life.spawned_at = time.monotonic()
        self.child = Child(command, environment)
        self._selector.register(self.child.pidfd, selectors.EVENT_READ, self._on_child_exit)
        self._journal.emit(events.TrainerStarted(pid=self.child.pid, restarts=self._restarts))

    def _on_connection(self) -> None:
        assert self._listener is not None, "registered with the selector"
        sock, _address = self._listener.accept()
        channel = Channel(sock)
        self._clients.add(channel)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._on_readable(channel))

    def _on_readable(self, channel: Channel) -> None:
        try:
            self._on_message(channel, channel.receive())
        except ChannelClosed:
            self._hang_up(channel)

    def _hang_up(self, channel: Channel) -> None:
        if channel in self._clients:
            self._clients.discard(channel)
            self._selector.unregister(channel.socket)
            channel.close()

    def _on_message(self, channel: Channel, message: Message) -> None:
        if message.type == "status":
            channel.send("status", status=self.status())
        elif message.type == "takeover":
            self._hand_over(channel)
        elif message.type == "drill":
            self._on_drill(channel, float(message["in_s"]), end=bool(message["end"]))
        elif message.type == "hello":
            self._on_hello(channel, message)
        elif self.trainer is not None and channel is self.trainer.channel:
            self._on_trainer_message(self.trainer, message)

    def _on_hello(self, channel: Channel, message: Message) -> None:
        if message["protocol"] != ipc.PROTOCOL:
            channel.send("refused", message="the agent and the trainer use different versions of the harness")
            return
        if self.trainer is not None and not ipc.pidfd_dead(self.trainer.pidfd):
            channel.send(
                "refused",
                message=f"run {self.settings.run!r} is being trained by process {self.trainer.pid} already; "
                "a process has one Checkpointer, and a run has one trainer: name the other one with --run",
            )
            return
        pid = ipc.peer_pid(channel)
        pidfd = ipc.open_pidfd(pid)
        if pidfd is None:
            return  # it has died already
        self._drop_trainer()
        again = self._life.connected and message["life"] is None  # its own parent (torchrun, a loop) started it again
        if again and (self._drain is not None or not self._begin_again()):
            channel.send("refused", message="this agent is leaving: no other generation is begun here")
            return
        self.trainer = Trainer(channel, pid, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, self._on_trainer_dead)
        self._life.connected = True
        if message["life"] is None and self._life.spawned_at is None:
            self._life.spawned_at = ipc.began_at(pid)
        if message["life"] is not None:
            self._attach(message)
        self._journal.emit(events.TrainerConnected(pid=pid, rank=message["rank"]))
        if self.state is State.STARTING:
            self.state = State.RUNNING
        if message["life"] is None:
            self._page.words[Word.TAKEN] = self._saves.sequence
        channel.send(
            "welcome",
            [self._page.fd],
            life=self._origin.generation.fields(),
            restarts=self._restarts,
            settings=self.settings.to_json(),
            detached=self.command is None,
            command=self._remembered,
            sequence=self._saves.sequence,
        )
        if message["life"] is None:
            self._tell_resume()

    def _attach(self, message: Message) -> None:
        """A live trainer whose agent died: adopt its generation, control page and slots, and go on."""
        control, *slots = message.fds
        indexes: list[int] = message["indexes"]
        generation = Generation.of(message["life"])
        self._page.close()
        self._page = ControlPage(control)
        self._page.words[Word.AGENT_PID] = os.getpid()
        self._write(Word.ASK, Ask.NOTHING)
        self._write(Word.GRANT, NO_SLOT)
        for index, fd in zip(indexes, slots, strict=True):
            self._saves.pool.put(index, Slot(fd))
            self._saves.adopt(index, generation)
        self._wants = Wants(layout_bytes=self._saves.pool[indexes[0]].size if indexes else None)
        self._attached = True
        self._journal.emit(events.AgentReplaced(slots=len(indexes)))
        self._origin.adopt(generation)
        self._take_what_was_not_told()

    def _take_what_was_not_told(self) -> None:
        """What was sealed while there was no agent to tell. It may have been saved as well: twice is harmless."""
        if self._attached and self.trainer is not None and self._saves.take_left_over(self._origin.generation):
            self._acknowledge()

    def _on_trainer_message(self, trainer: Trainer, message: Message) -> None:
        if message.type == "layout":
            self._on_layout(trainer, message)
        elif message.type == "sealed":
            self._on_sealed(message)
        elif message.type == "restored":
            self._journal.emit(
                events.Restored(snapshot=message["snapshot"], step=message["step"], seconds=message["seconds"])
            )
            self._life.resumed_step, self._life.restored = message["step"], True
            self._release_resume()
        elif message.type == "stepped":
            self._life.first_step_at, self._life.stepped = time.monotonic(), message.fields
            seconds = self._life.first_step_at - self._life.began_at
            self._journal.emit(events.FirstStep(step=message["step"], seconds=seconds))
        elif message.type == "want":
            self._wants.reasons.add(message["reason"])
            if message["durable"]:
                self._saves.press()
        elif message.type == "signal":
            self._on_signal_of_trainer(message["signum"])
        elif message.type == "training":
            self._life.finished_step = None
            self._saves.relax()
        elif message.type == "leaving":
            self._saves.press()
        elif message.type == "finished":
            self._life.finished_step = message["step"]
            self._journal.emit(events.TrainerFinished(step=message["step"]))
            self._saves.press()
        elif message.type == "bye":
            trainer.said_bye, trainer.exception = True, message["exception"]

    def _tell_resume(self) -> None:
        """Tell the trainer what there is to resume, as far as it is known."""
        if self.trainer is None:
            return
        channel, origin = self.trainer.channel, self._origin
        life = origin.generation.fields()  # its identity may not have been known yet when the trainer said hello
        with contextlib.suppress(ChannelClosed):
            if origin.finding is Finding.NOTHING:
                channel.send("resume-none", life=life)
            elif origin.finding is Finding.FAILED:
                channel.send("resume-failed", error=type(origin.error).__name__, message=str(origin.error))
            elif origin.finding is Finding.READY and (point := origin.point) is not None:
                channel.send(
                    "resume-ready",
                    [point.slot.fd],
                    snapshot=str(point.id),
                    tier=point.tier,
                    verified=point.verified,
                    life=life,
                )
            elif origin.head is not None:
                snapshot, tier, record = origin.head
                channel.send("resume-head", snapshot=snapshot, tier=tier, record=record.encode().decode(), life=life)

    def _tell_restarted(self) -> None:
        """What this start took, once the first step is made and it is known when the life before it ended."""
        life, origin = self._life, self._origin
        if life.stepped is None or not (life.last_ended_at is not None or origin.looked_back or life.over):
            return
        begins = self._restarts == 0 and (self.settings.fresh or origin.generation.number == 1)
        event = None if begins else life.restarted(origin.last_ended_at, origin.point)
        life.stepped = None
        if event is not None:
            self._restarted = event
            self._journal.emit(event)

    def _release_resume(self) -> None:
        point = self._origin.point
        if point is not None and point.index is not None:
            self._saves.pool.release(point.index, "resume")

    def _on_layout(self, trainer: Trainer, message: Message) -> None:
        """Allocate slots for a layout. Takes about half a second per GiB, once."""
        size = int(message["bytes"])
        count = self.settings.slots or (2 if total_bytes() >= TWO_SLOTS_FROM_BYTES else 1)
        pool = self._saves.pool
        try:
            indexes = pool.allocate(size, count)
        except HarnessError as err:
            trainer.channel.send("no-slots", error=type(err).__name__, message=str(err))
            return
        self._wants.layout_bytes = size
        self._revoke()  # what was granted before was a slot of the old layout
        fds = [pool[index].fd for index in indexes]
        trainer.channel.send("slots", fds, indexes=indexes, number=message["number"])
        on_disk = pool[indexes[0]].on_disk
        self._journal.emit(events.SlotsReady(slots=len(indexes), bytes=size, on_disk=on_disk))
        if on_disk:
            _say(
                f"there is no memory for a snapshot of {size / 1e9:.2f} GB: each one goes through a window to "
                f"{self.settings.slot_disk}, and training waits for that disk meanwhile"
            )
        elif len(indexes) < count:
            _say(f"there is memory for {len(indexes)} of {count} slots of {size / 1e9:.2f} GB")

    def _on_sealed(self, message: Message) -> None:
        if message["index"] not in self._saves.pool:
            return
        self._speeds.sealed(message["bytes"], message["copy_s"])
        self._wants.reasons.clear()
        if self._wants.asked is Ask.SNAPSHOT:
            self._ask(Ask.NOTHING)
        self._journal.emit(events.Sealed(step=message["step"], bytes=message["bytes"], stall_s=message["stall_s"]))
        if self._drill is not None:
            self._drill.sealed(message["step"])
        self._saves.take(message["index"], self._origin.generation)
        self._acknowledge()

    def _acknowledge(self) -> None:
        """The newest seal is noticed and its slot is held: from now on grants count again."""
        self._revoke()
        self._page.words[Word.TAKEN] = self._saves.sequence

    def _revoke(self) -> None:
        """No slot is granted: the trainer has used the grant, waits for another layout, or is dead."""
        if self._wants.granted is not None:
            self._saves.pool.release(self._wants.granted, TRAINER)
        self._wants.granted = None
        self._write(Word.GRANT, NO_SLOT)

    def _on_commit(self, steps: Steps) -> None:
        self._page.put_step(Word.LOCAL_STEP, steps.local)
        self._page.put_step(Word.DURABLE_STEP, steps.durable)
        wanted = bool(self._wants.reasons)  # a snapshot is still to come, and has to become durable at once
        if self._drain is not None and self._saves.durable_at is not None:
            self._drain.durable_at = max(self._drain.began_at, self._saves.durable_at)
        elif self._life.finished_step is None and not wanted and self._saves.everything_durable:
            self._saves.relax()
        self._warn_if_it_never_fits()
        self._journal.flush()

    def _warn_if_it_never_fits(self) -> None:
        window_s = SPOT_WINDOW_S if self._poller.answers("ec2") else self.settings.grace_s
        if (warning := self._speeds.never_fits(window_s)) is not None:
            self._journal.emit(warning)

    # ---- asking -----------------------------------------------------------------------------------------------------

    def _ask_if_due(self) -> None:
        """Keep a free slot granted, and write the ask word when there is a reason."""
        if self.trainer is None:
            return
        wants, pool = self._wants, self._saves.pool
        if wants.granted is None and wants.layout_bytes is not None and (index := pool.grant()) is not None:
            wants.granted = index
            pool.hold(index, TRAINER)
            self._write(Word.GRANT, index)
        if self._drain is not None:
            self._ask(Ask.SNAPSHOT_AND_LEAVE if self._drain.plan.choice is Choice.NEW else Ask.LEAVE)
        elif wants.granted is not None and wants.asked is Ask.NOTHING and (reason := self._reason()) is not None:
            self._ask(Ask.SNAPSHOT)
            self._journal.emit(events.Due(reason=reason))

    def _reason(self) -> str | None:
        if self._wants.reasons:
            return min(self._wants.reasons)
        if self._life.first_step_at is None and not self._attached:
            return None
        settings = self.settings
        every_s = settings.every_s if settings.local else min(settings.every_s, settings.durable_every_s)
        since = self._life.first_step_at or self._life.began_at
        return "interval" if Cadence(every_s).due(time.monotonic(), self._saves.sealed_at, since) else None

    def _ask(self, ask: Ask) -> None:
        if self._wants.asked is not ask:
            self._wants.asked = ask
            self._write(Word.ASK, ask)

    def _write(self, word: Word, value: int) -> None:
        """Under a new sequence number, so that the trainer sees that it is news."""
        self._page.words[word] = Request(value, Request.decode(self._page.words[word]).sequence + 1).encode()

    def _trainer_step(self) -> int | None:
        return self._page.step_or_none(Word.TRAINER_STEP)

    def _watch_step(self) -> None:
        """Measure how long a step takes, from the word that the trainer writes."""
        step, now = self._trainer_step(), time.monotonic()
        if step is None:
            return
        self._furthest = max(self._furthest, step)
        self._speeds.reached(step, now)

    # ---- notices ----------------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda number, _frame: self.post(lambda: self._on_signal(number)))
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda number, _frame: self.post(lambda: self._forward(number)))

    def _on_signal(self, signum: int) -> None:
        if self.state is State.DONE:
            return
        self._signals_seen += 1
        if self._signals_seen > 1:
            _say("second signal: leaving now")
            self._stop_child()
            superseded = self._drain is not None and self._drain.exit_code is ExitCode.SUPERSEDED
            asked = ExitCode.CTRL_C if signum == signal.SIGINT else ExitCode.INTERRUPTED
            self._end_interrupted(ExitCode.SUPERSEDED if superseded else asked)
        elif signum == signal.SIGINT:
            self._begin_drain(Deadline.never(), ExitCode.CTRL_C)
        else:
            self._signals.received(signum)
            self._poller.wake()
            if not self._life.connected:
                self._forward(signum)  # a program that does not know us gets its signal as ever

    def _on_signal_of_trainer(self, signum: int) -> None:
        """A signal that reached the trainer alone, or with us: it counts once."""
        if self.state is State.DONE:
            return
        if signum == signal.SIGINT:
            self._begin_drain(Deadline.never(), ExitCode.CTRL_C)
        else:
            self._signals.received(signum)
            self._poller.wake()

    def _forward(self, signum: int) -> None:
        if self.child is not None:
            self.child.signal(signum)

    def _on_notice(self, notice: Notice) -> None:
        if self.state is State.DONE:
            return
        deadline = notice.deadline
        in_s = deadline.remaining_s if deadline is not None else None
        self._journal.emit(
            events.NoticeSeen(kind=notice.kind.value, source=notice.source, in_s=in_s, detail=notice.detail)
        )
        self._journal.flush()
        if notice.kind is NoticeKind.REBALANCE:
            self._wants.reasons.add("rebalance")
            self._saves.press()
        else:
            self._begin_drain(deadline or Deadline.after(self.settings.grace_s), ExitCode.INTERRUPTED)

    def _begin_drain(self, deadline: Deadline, code: ExitCode) -> None:
        """Choose what the time that is left is used for, and say so before it starts."""
        if (drain := self._drain) is not None:
            if drain.join(deadline, code):
                self._push_deadline(deadline)
            return
        self._call_off_drill("the instance really goes away")
        step, plan = self._trainer_step(), self._plan(deadline)
        self._drain = Drain(deadline, code, plan)
        self.state = State.DRAINING
        self._restart_at = None
        self._journal.emit(
            events.Draining(
                choice=plan.choice.value, step=step, needs_s=plan.needs_s, has_s=plan.has_s, replaces=plan.replaces
            )
        )
        _say(plan.words(self._speeds.step_of(plan, step)))
        self._push_deadline(deadline)
        self._hurry(plan)

    def _hurry(self, plan: Plan) -> None:
        if plan.choice is Choice.NEW:
            self._saves.pressing = True  # the new one goes to both tiers at once; what is sealed now need not
        else:
            self._saves.press()

    def _plan(self, deadline: Deadline) -> Plan:
        trains = self.trainer is not None and self._life.finished_step is None
        return self._speeds.plan(deadline, trainer_alive=trains, layout_bytes=self._wants.layout_bytes)

    def _on_superseded(self, claim: Claim) -> None:
        """A newer generation waits for this one's last snapshot: leave as on a notice, and never come back."""
        if self.state is State.DONE or claim.generation <= self._origin.generation.number:
            return
        self._journal.emit(events.SupersededBy(generation=claim.generation, host=claim.host))
        if self.trainer is not None:  # who started it may have nothing but its own exit code
            with contextlib.suppress(ChannelClosed):
                self.trainer.channel.send("superseded")
        # Nobody's instance ends: the newcomer waits for as long as our journal is heard. Only a hang must not last.
        needs_s = self._plan(Deadline.never()).needs_s
        self._begin_drain(Deadline.after(max(self.settings.handover_s, 2 * needs_s)), ExitCode.SUPERSEDED)

    def _push_deadline(self, deadline: Deadline) -> None:
        if not math.isinf(deadline.at):
            self._page.words[Word.DEADLINE_NS] = int(deadline.at * 1e9)
            self._saves.drain(deadline)

    def _save_what_there_is_in_time(self) -> None:
        """No boundary in time for a new one: the newest sealed snapshot is made durable, while that still fits."""
        drain, saves = self._drain, self._saves
        if drain is None or drain.plan.choice is not Choice.NEW or math.isinf(drain.deadline.at):
            return
        if saves.sealed_step is None or saves.everything_durable:
            return  # nothing else is left to save
        if not still_fits(drain.deadline.remaining_s, saves.state_bytes or 0, self._speeds.rates):
            drain.plan = replace(drain.plan, choice=Choice.NEWEST)  # a trainer that still comes by leaves without
            saves.press()

    # ---- drills -----------------------------------------------------------------------------------------------------

    def _on_drill(self, channel: Channel, in_s: float, *, end: bool) -> None:
        """Somebody wants to see what a notice comes to: `end` for the real thing, else training goes on."""
        if self._drain is not None or self._drill is not None or self.state is State.DONE:
            return drills.refuse(channel, "a drill is under way" if self._drill else "this run is leaving already")
        step, deadline = self._trainer_step(), Deadline.after(in_s)
        if self.trainer is None or self._life.finished_step is not None or step is None:
            return drills.refuse(channel, "nothing is being trained at the moment: no snapshot can be taken")
        plan = self._plan(deadline)
        with contextlib.suppress(ChannelClosed):
            channel.send("drilling", words=plan.words(self._speeds.step_of(plan, step)))
        if end:
            self._drilled_for = channel
            return self._on_notice(Notice("drill", NoticeKind.INTERRUPT, "drill", deadline, "harness drill --end"))
        self._journal.emit(events.Drilling(choice=plan.choice.value, step=step, needs_s=plan.needs_s, has_s=plan.has_s))
        self._drill = Drill(channel, in_s, plan, step, self._saves.sealed_step)
        if plan.choice is Choice.NEW:
            self._wants.reasons.add("drill")
        return self._hurry(plan)

    def _conclude_drill(self) -> None:
        if self._drill is None:
            return
        drilled = self._drill.outcome(self._saves.steps.durable, self._saves.durable_at)
        if drilled is not None:
            self._journal.emit(drilled)
            self._drill.answer(drilled)
            self._drill = None

    def _call_off_drill(self, why: str) -> None:
        if self._drill is not None:
            self._drill.call_off(why)
            self._drill = None

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _on_trainer_dead(self) -> None:
        """The pidfd of the connected trainer says that it is dead: read what it still said first."""
        trainer = self.trainer
        if trainer is None:
            return
        if trainer.channel in self._clients:
            trainer.channel.socket.setblocking(False)
            with contextlib.suppress(ChannelClosed):
                while True:
                    self._on_trainer_message(trainer, trainer.channel.receive())
        self._drop_trainer()
        if self.command is None:
            self._on_exit(0 if trainer.said_bye and not trainer.exception else None)

    def _drop_trainer(self) -> None:
        trainer, self.trainer = self.trainer, None
        if trainer is None:
            return
        self._life.ended_at = time.monotonic()
        self._selector.unregister(trainer.pidfd)
        os.close(trainer.pidfd)
        self._hang_up(trainer.channel)
        self._release_resume()
        self._revoke()
        self._call_off_drill("the program has ended")
        self._wants = Wants()
        self._saves.take_left_over(self._origin.generation)

    def _on_child_exit(self) -> None:
        child = self.child
        if child is None or (code := child.reap()) is None:
            return
        self._on_trainer_dead()
        self._selector.unregister(child.pidfd)
        child.close()
        self.child = None
        self._on_exit(code)

    def _on_exit(self, code: int | None) -> None:
        """The trainer's process has ended: `code` as a shell shows it, `None` for a crash of one that is no child."""
        life = self._life
        self._watch_step()  # how far it came decides whether it is worth starting again
        life.over, life.exit_code = True, code
        life.ended_at = life.ended_at or time.monotonic()
        self._journal.emit(events.TrainerLeft(code=code, step=self._trainer_step()))
        if code == 0 and not life.connected:
            _say("the program ended without ever creating a Checkpointer: nothing was saved")
        if self._signals_seen and self._drain is None and not life.connected:
            # It had the signal from us, and ended before the poller has told us what that means.
            self._begin_drain(Deadline.after(self.settings.grace_s), ExitCode.INTERRUPTED)
        if self._drain is not None or code == 0 or self.command is None or code == ExitCode.CTRL_C:
            self._saves.press()
            return
        if self._origin.finding is Finding.FAILED:  # the trainer was told why it cannot begin: again would be the same
            return
        decision = after_crash(
            crashes=self._crashes,
            progressed=self._furthest > max(life.resumed_step, self._furthest_crashed),
            connected=life.connected,
            max_crashes=self.settings.max_crashes,
        )
        self._furthest_crashed = max(self._furthest, self._furthest_crashed)
        if isinstance(decision, GiveUp):
            if life.connected:
                self._journal.emit(events.GaveUp(crashes=decision.crashes))
            self._saves.press()
            return
        self._crashes = decision.crashes
        if code == 128 + signal.SIGKILL and oom_kills() > self._oom_kills:
            self._leave_memory()
        self._restart_at = time.monotonic() + decision.in_s
        self._journal.emit(events.Restarting(in_s=decision.in_s, crashes=decision.crashes))

    def _leave_memory(self) -> None:
        """The kernel has killed the trainer, or somebody, for memory: the next one gets that of the slots."""
        self._oom_kills = oom_kills()
        try:
            self._saves.leave_memory()
        except NoSpace as err:
            _say(f"the kernel has killed the program for want of memory, and the slots stay where they are: {err}")
        else:
            _say("the kernel has killed the program for want of memory: from now on the disk takes the snapshots")

    def _restart_if_time(self) -> None:
        """Start the trainer again in place: a new generation, resumed from the nearest copy of the newest snapshot."""
        if self._restart_at is None or time.monotonic() < self._restart_at or self.command is None:
            return
        self._restart_at = None
        if self._begin_again():
            self._spawn(self.command)

    def _begin_again(self) -> bool:
        """Trainers start anew: another generation, and another search for what it resumes. Not if we are superseded."""
        if not self._origin.begin_again():
            return False
        self._restarts += 1
        now = time.monotonic()
        self._life = Life(now, now, last_ended_at=self._life.ended_at)
        self._page.words[Word.TRAINER_STEP] = 0
        self._write(Word.ASK, Ask.NOTHING)
        self.state = State.STARTING
        return True

    def _finish_if_done(self) -> None:
        """Record the outcome once nobody trains and everything sealed is where it has to be, or time is up."""
        drain, life = self._drain, self._life
        if self.command is None and self.trainer is None and not life.over:
            # No daemon is left behind, not even by a trainer that died before it said hello.
            life.over = life.connected or time.monotonic() - life.began_at > _ALONE_S
        out_of_time = drain is not None and (drain.deadline.expired or self._origin.awaiting)
        if out_of_time and not life.over:
            if self._dismiss_waiting():
                return
            self._stop_child()
            if self.child is None and self.command is None:
                self._drop_trainer()
                life.over = True
        if self.state is State.DONE or not life.over or self._restart_at is not None:
            return
        if not out_of_time and not (self._saves.idle and self._posts.empty()):
            return
        finished = life.finished_step is not None and life.exit_code == 0 and self._saves.everything_durable
        if finished:
            self._end("finished", ExitCode.FINISHED)
        elif drain is not None:
            self._end_interrupted(drain.exit_code)
        elif self._origin.error is not None:
            self._end("failed", self._origin.error.exit_code)
        elif life.exit_code == 0 and life.connected and self._origin.point is not None and not life.restored:
            _say(
                f"the program ended without restoring snapshot {self._origin.point.id}: its loops are not those that "
                "made it, or none ran. What it printed or saved was not trained; --fresh starts at step 0"
            )
            self._end("failed", ExitCode.BUG)
        elif life.exit_code == 0:
            self._end("stopped", ExitCode.FINISHED)
        else:
            self._end("failed", life.exit_code if life.exit_code is not None else 1)

    def _dismiss_waiting(self) -> bool:
        """A trainer that is no child of ours waits for a resume point that will not come: tell it, and let it end.

        Otherwise it would take us for dead, start another agent, and ask for the run again.
        """
        drain, origin, life = self._drain, self._origin, self._life
        comes = not life.connected and time.monotonic() - life.began_at < _ATTACH_S  # whoever started us says hello yet
        waits = self.command is None and origin.awaiting and (self.trainer is not None or comes)
        if drain is None or not waits or drain.deadline.expired:
            return False
        if origin.error is None and self.trainer is not None:
            superseded = drain.exit_code is ExitCode.SUPERSEDED
            why = "a newer start has asked for the run" if superseded else "this host is to be left"
            kind = Superseded if superseded else DeadlineExceeded
            origin.leave(kind(f"{why}, before the start before this one had handed over: nothing was trained here"))
        return True

    def _end_interrupted(self, code: ExitCode) -> None:
        """75 is said only after the remote commit was read back (I13); 74 if the newest snapshot is not durable."""
        if code is ExitCode.CTRL_C:
            self._end("stopped", code)
        elif code is ExitCode.SUPERSEDED:
            self._end("superseded", code)
        else:
            durable = self._nothing_here_is_newer()
            self._end("interrupted", ExitCode.INTERRUPTED if durable else ExitCode.INTERRUPTED_LOCAL)

    def _nothing_here_is_newer(self) -> bool:
        """Whether this machine holds nothing that the store does not."""
        saves, origin = self._saves, self._origin
        return saves.everything_durable or (origin.awaiting and saves.sealed_step is None and not origin.only_here)

    def _end(self, outcome: str, code: int) -> None:
        """Decide the outcome, whatever it is. It is recorded in the store once nobody can commit any more."""
        if self.state is not State.DONE:
            self.state, self._outcome = State.DONE, (outcome, int(code))

    def _stop_child(self) -> None:
        """The last resort: SIGTERM to the trainer alone, then SIGKILL. Blocks at most a few seconds."""
        child = self.child
        if child is None:
            return
        child.signal(signal.SIGTERM)
        give_up_at = time.monotonic() + _KILL_AFTER_S
        while child.reap() is None:
            if time.monotonic() > give_up_at:
                child.signal(signal.SIGKILL)
            threading.Event().wait(0.02)
        self._on_child_exit()
        self._restart_at = None

    def _refuse(self, err: ConfigError) -> None:
        """The store, answering late, shows that the run must not start."""
        _say(f"error: {err}")
        self._stop_child()
        self._end("failed", err.exit_code)

    def _on_bug(self, err: BaseException) -> None:
        """From a thread's root. The agent ends; a live trainer starts another."""

        def note() -> None:
            self._bug = err

        self.post(note)

    def _heartbeat(self) -> events.Heartbeat:
        return events.Heartbeat(step=self._trainer_step(), durable_step=self._saves.steps.durable)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)


def _metadata_sources(url: str) -> list[NoticeSource]:
    """The instance's metadata service; nothing when it is switched off."""
    if url == "off":
        return []
    from cloud.ec2 import Ec2Source
    from cloud.metadata import MetadataSession

    return [Ec2Source(MetadataSession(url))]


def _say(text: str) -> None:
    """A word to the user that is no event."""
    with contextlib.suppress(OSError):  # the terminal is gone: that is when saving matters most
        os.write(2, f"harness: {text}\n".encode())
