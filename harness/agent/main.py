"""The agent: composition root and state machine.

Owns the main loop, every thread's start and end, and the one place where what happened is turned into what is done next.
All state below is changed by the main thread only; other threads `post` to it.

    poller ──notice──▶ ┌──────────────┐ ◀──messages── trainer (ipc.channel)
    tiers ──published─▶│  Agent.run   │ ──ask word──▶ control page
    finder ──resume───▶│  (main loop) │ ──jobs──────▶ tier local, tier remote
    child ──exit──────▶└──────────────┘ ──events────▶ journal
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import queue
import re
import secrets
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloud.errors import CloudError
from cloud.notice import Deadline, Notice, NoticeKind, NoticeSource
from cloud.signals import DrainFileSource, SignalSource
from cloud.store import ObjectStore
from harness.agent import commit
from harness.agent.child import Child, script_of
from harness.agent.journal import Journal, Listener
from harness.agent.memory import TWO_SLOTS_FROM_BYTES, SlotPool, total_bytes
from harness.agent.poller import Poller
from harness.agent.resume import Copy, Finder, MemoryCopy, ResumePoint, stored_copies
from harness.agent.stores import open_store
from harness.agent.tier import Generation, Job, LocalSnapshot, Retention, SealedSlot, Tier, TierEvents
from harness.config import SOCKET_VARIABLE, Settings
from harness.core import events
from harness.core.manifest import FORMAT, Claim, Manifest
from harness.core.policy import Cadence, Choice, GiveUp, Plan, Rates, after_crash, plan_drain
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import ConfigError, ExitCode, HarnessError, SnapshotCorrupt
from harness.ipc import channel as ipc
from harness.ipc.channel import Channel, ChannelClosed, Message, RunPlace
from harness.ipc.slots import Ask, ControlPage, Request, Slot, SlotRecord, Word

_FIRST_ANSWER_S = 10.0  # how long a start waits for the store before it goes on without
_CALL_S = 60.0
_ASK_STORE_AGAIN_S = 2.0
_KILL_AFTER_S = 3.0


class State(enum.Enum):
    """STARTING → RUNNING → DRAINING → DONE; every state may go to DONE.

    STARTING: no trainer has connected yet in this generation. RUNNING: one has. DRAINING: the instance is going away, or
    the user wants to stop: nothing new is begun after the last snapshot. DONE: the outcome is recorded.
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
    finished_step: int | None = None
    exception: bool = False
    left: bool = False


@dataclass
class Drain:
    """Why and until when the agent drains."""

    reason: str
    deadline: Deadline
    exit_code: ExitCode
    plan: Plan | None = None


@dataclass
class Wants:
    """Reasons to take a snapshot soon."""

    reasons: set[str] = field(default_factory=set)
    asked: Ask = Ask.NOTHING
    granted: int | None = None
    durable_now: bool = False


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
        stores: Callable[[str], ObjectStore] = open_store,
    ) -> None:
        """Start polling for notices at once; everything else waits for `run`.

        Args:
            settings: of the run.
            command: the trainer's command line; `None` for a detached agent, whose trainer connects by itself.
            environ: the environment that a child gets.
            script: the command line of a trainer that is not our child, to be remembered.
            sources: of notices, beside signals and the drain file; `None` for the instance metadata service.
            listeners: called with every line of the journal, in the emitting thread (status, tests).
            stores: opens a store by its location.

        Raises:
            ConfigError: a store cannot be used, or another agent with a live trainer has this run on this host.
        """
        self.settings, self.command, self._environ = settings, command, environ
        self._remembered = tuple(command or script)
        self.host = socket.gethostname() or "localhost"
        self.keys = RunKeys(settings.run)
        self.place = RunPlace.of(Path(settings.runtime_dir), settings.store, settings.run)
        self.place.prepare()
        self._started_at = time.monotonic()
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.state = State.STARTING
        self.journal = Journal(self.keys, _host_key(self.host), listeners=listeners, heartbeat=self._heartbeat)
        self._signals = SignalSource(settings.grace_s)
        everything: list[NoticeSource] = [self._signals]
        if settings.drain_file:
            everything.append(DrainFileSource(Path(settings.drain_file), settings.grace_s))
        everything += _metadata_sources(settings.metadata) if sources is None else list(sources)
        self.poller = Poller(
            everything,
            self.journal.emit,
            lambda notice: self.post(lambda: self._on_notice(notice)),
            lambda notice: self.post(lambda: self.journal.emit(events.NoticeWithdrawn(source=notice.source))),
            self._fatal,
        )
        self.pool = SlotPool()
        self.generation = Generation(0, "", secrets.token_hex(8))
        self.trainer: Trainer | None = None
        self.child: Child | None = None
        self.page = ControlPage.create()
        self._selector = selectors.DefaultSelector()
        self._lock_fd: int | None = None
        self._listener: socket.socket | None = None
        self._clients: dict[int, Channel] = {}
        self._drain: Drain | None = None
        self._wants = Wants()
        self._jobs_of: dict[int, Generation] = {}
        self._manifests: dict[tuple[int, int], Manifest] = {}
        self._resume: ResumePoint | None = None
        self._resume_head: tuple[str, str, SlotRecord] | None = None
        self._resume_state = "pending"  # pending | ready | none | failed
        self._resume_error: HarnessError | None = None
        self._resume_run = 0
        self._layout: tuple[int, list[int]] | None = None
        self._sealed_step: int | None = None
        self._sealed_at: float | None = None
        self._first_step_at: float | None = None
        self._durable_started_at: float | None = None
        self._local_step: int | None = None
        self._durable_step: int | None = None
        self._furthest = 0
        self._life_start_step = 0
        self._connected_this_life = False
        self._crashes = 0
        self._restarts = 0
        self._restart_at: float | None = None
        self._life_began_at = self._started_at
        self._copy_s: float | None = None
        self._step_s: float | None = None
        self._last_step: tuple[int, float] | None = None
        self._outcome: tuple[str, int] | None = None
        self._trainer_code: int | None = None
        self._finished_step: int | None = None
        self._urgent_signals = 0
        self._kill_at: float | None = None
        self._crash: BaseException | None = None
        self._closing = threading.Event()
        self._crashed_at = 0
        self._attached = False
        self._open_stores(stores)

    # ---- life -------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run to the recorded outcome. Main thread only (signals). Returns the exit code."""
        self.poller.start()  # before anything slow: a notice may be in force already
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
        assert self._outcome is not None
        return self._outcome[1]

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the main thread soon. From any thread, and from signal handlers."""
        self._posts.put(action)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def status(self) -> dict[str, object]:
        """What `harness status` shows of a live run."""
        now = time.monotonic()
        left = self.remote.bytes_left
        deadline = self._drain.deadline.remaining_s if self._drain else None
        rate = self.remote.bytes_s
        return {
            "run": self.settings.run,
            "store": self.settings.store,
            "local": self.settings.local,
            "state": self.state.value,
            "generation": self.generation.number,
            "run_id": self.generation.run_id,
            "claimed": self.generation.claimed.is_set(),
            "step": self._trainer_step(),
            "local_step": self._local_step,
            "durable_step": self._durable_step,
            "durable_age_s": None if self._durable_started_at is None else now - self._durable_started_at,
            "bytes_pending": left or 0,
            "estimate_s": None if not left or not rate else left / rate,
            "deadline_s": None if deadline is None or math.isinf(deadline) else deadline,
            "restarts": self._restarts,
            "blind": self.poller.blind,
            "agent_pid": os.getpid(),
            "trainer_pid": self.trainer.pid if self.trainer else None,
        }

    def _open_stores(self, stores: Callable[[str], ObjectStore]) -> None:
        tell = TierEvents(
            published=lambda tier, job, manifest: self.post(lambda: self._on_published(tier, job, manifest)),
            failed=lambda tier, job, err, final: self.post(lambda: self._on_failed(tier, job, final)),
            released=lambda tier, job: self.post(lambda: self._on_released(tier, job)),
            fatal=self._fatal,
        )
        settings = self.settings
        self.remote = Tier(
            "remote",
            stores(settings.store),
            self.keys,
            Retention(settings.keep_last, settings.keep_every),
            self.journal.emit,
            tell,
            host=self.host,
        )
        self.local: Tier | None = None
        if settings.local is not None:
            self.local = Tier(
                "local",
                stores(settings.local),
                self.keys,
                Retention(settings.keep_local),
                self.journal.emit,
                tell,
                host=self.host,
                pinned=lambda: [job.manifest.id for job in self.remote.jobs if isinstance(job, LocalSnapshot)],
            )

    def _begin(self) -> None:
        self._take_lock()
        self._listener = ipc.listen(self.place.socket)
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connection)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake_pipe)
        self.journal.emit(
            events.AgentStarted(
                run=self.settings.run,
                store=self.settings.store,
                local=self.settings.local,
                host=self.host,
                pid=os.getpid(),
                detached=self.command is None,
            )
        )
        self.page.words[Word.AGENT_PID] = os.getpid()
        self.remote.start()
        if self.local is not None:
            self.local.start()
        self.journal.start(self.remote.store)
        if self._attach_first():
            return
        known = self._first_survey()
        self._new_generation(known)
        self._find_resume(known)
        if self.command is not None:
            self._spawn()

    def _turn(self) -> None:
        """One turn of the main loop: wait for anything, then let every rule look."""
        for key, _mask in self._selector.select(self._patience()):
            key.data()
        while True:
            try:
                action = self._posts.get_nowait()
            except queue.Empty:
                break
            action()
        if self._crash is not None:
            self._die()
            return
        self._watch_step()
        self._check_fallback()
        self._ask_if_due()
        self._restart_if_time()
        self._finish_if_done()

    def _patience(self) -> float:
        """Seconds until some rule has to look again though nothing happened: idle CPU counts."""
        if self._drain is not None or self._restart_at is not None or self._trainer_gone:
            return 0.1
        return 0.5

    def _shut(self) -> None:
        # The order matters: nothing may publish or emit any more when the journal closes.
        self.poller.close()
        urgent = self._urgent_signals > 1
        self.remote.close(0.0 if urgent else 5.0)
        if self.local is not None:
            self.local.close(0.0 if urgent else 5.0)
        self.journal.close(1.0 if urgent else 10.0)
        for tier in (self.local, self.remote):
            if tier is not None:
                tier.store.close()
        for client in list(self._clients.values()):
            client.close()
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                self.place.socket.unlink()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
        self.pool.close()

    # ---- one agent for a run on a host ------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        give_up_at = time.monotonic() + 30.0
        while (lock := self.place.try_lock()) is None:
            other = ipc.connect(self.place.socket)
            if other is not None:
                with contextlib.closing(other), contextlib.suppress(ChannelClosed):
                    other.send("takeover")
                    answer = other.receive()
                    if answer.type == "busy":
                        raise ConfigError(
                            f"run {self.settings.run!r} is being trained on this host already (process "
                            f"{answer['trainer_pid']}); stop that one, or choose another --run"
                        )
                    self._adopt_slots(answer)
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"another agent of run {self.settings.run!r} does not let go of {self.place.directory}"
                )
            threading.Event().wait(0.05)
        self._lock_fd = lock

    def _adopt_slots(self, answer: Message) -> None:
        """Take over sealed slots that another agent of this host hands over: memory copies for the resume."""
        for fd, index, life in zip(answer.fds, answer["indexes"], answer["lives"], strict=True):
            if index not in self.pool:
                self.pool.put(index, Slot(fd))
                self._jobs_of[index] = Generation(life["number"], life["run_id"], life["nonce"], life["parent"])
        if len(self.pool):
            self.journal.emit(events.AgentReplaced(slots=len(self.pool)))

    def _hand_over(self, channel: Channel) -> None:
        """A newcomer on this host wants the run: give it the slots, unless a trainer of ours is alive."""
        if self.trainer is not None or (self.child is not None and self.child.reap() is None):
            alive = self.trainer.pid if self.trainer else self.child.pid if self.child else 0
            channel.send("busy", trainer_pid=alive)
            return
        sealed = [index for index in self.pool.sealed() if index in self._jobs_of]
        lives = [_life(self._jobs_of[index]) for index in sealed]
        channel.send("handed-over", [self.pool[index].fd for index in sealed], indexes=sealed, lives=lives)
        self._end("superseded", ExitCode.SUPERSEDED)

    def _attach_first(self) -> bool:
        """A detached agent that replaces a dead one waits for its trainer's hello before it decides anything."""
        if self.command is not None or "HARNESS_ATTACH" not in self._environ:
            return False
        give_up_at = time.monotonic() + 10.0
        while not self._attached and time.monotonic() < give_up_at:
            for key, _mask in self._selector.select(0.1):
                key.data()
        return self._attached

    # ---- start and resume -------------------------------------------------------------------------------------------

    def _first_survey(self) -> commit.Survey | None:
        """What the store knows of the run; `None` if it does not answer in time (we go on asking, and say so)."""
        deadline = Deadline.after(_FIRST_ANSWER_S)
        try:
            known = commit.survey(self.remote.store, self.keys, deadline)
        except SnapshotCorrupt as err:
            raise ConfigError(f"run {self.settings.run!r} in {self.settings.store}: {err}") from err
        except CloudError as err:
            if not err.retryable:
                raise ConfigError(f"the store {self.settings.store} cannot be used: {err}") from err
            self.journal.emit(events.SourceBlind(source=self.settings.store, reason=str(err)))
            return None
        self._check_identity(known)
        return known

    def _check_identity(self, known: commit.Survey) -> None:
        claim = known.last_claim
        if claim is None or self.settings.fresh:
            return
        if known.finished_at is not None:
            raise ConfigError(
                f"run {self.settings.run!r} finished at step {known.finished_at}: "
                "--fresh starts it again at step 0, another --run starts another"
            )
        mine = self._remembered
        if not self.settings.run_named and not claim.named and _scripts_differ(claim.command, mine):
            raise ConfigError(
                f"run {self.settings.run!r} belongs to another script: {' '.join(claim.command)}. "
                "Name this one with --run NAME"
            )
        if mine and claim.command and mine != claim.command:
            self._tell(f"the command differs from the last start's: it was {' '.join(claim.command)!r}")
        for name, value in self.settings.remembered().items():
            before = claim.settings.get(name)
            if before is not None and before != value:
                self._tell(f"{name} differs from the last start's: it was {before}, now {value}")

    def _new_generation(self, known: commit.Survey | None) -> None:
        """Begin a generation: claimed now if the store answers, later if it does not."""
        previous = self.generation
        if known is not None:
            number = max(known.next_generation, previous.number + 1)
            claimed_id = known.last_claim.run_id if known.last_claim is not None and not self._starts_anew else ""
            run_id = previous.run_id or claimed_id or secrets.token_hex(16)
        else:
            number, run_id = previous.number + 1, previous.run_id
        self.generation = Generation(number, run_id, secrets.token_hex(8))
        self._life_began_at = time.monotonic() if previous.number else self._started_at
        if known is not None and run_id:
            try:
                self._claim(self.generation, Deadline.after(_FIRST_ANSWER_S))
            except CloudError as err:
                if not err.retryable:
                    raise ConfigError(f"the store {self.settings.store} cannot be written: {err}") from err
                self._claim_later(self.generation, str(err))
        elif run_id:
            self._claim_later(self.generation, "the store has not answered")
        self.journal.generation = self.generation.number

    @property
    def _starts_anew(self) -> bool:
        """Whether --fresh still has to be honoured: only the first generation of this agent does."""
        return self.settings.fresh and not self.generation.number

    def _claim(self, generation: Generation, deadline: Deadline) -> None:
        wanted = Claim(
            format=FORMAT,
            run_id=generation.run_id,
            generation=generation.number,
            nonce=generation.nonce,
            claimed_at=commit.utc_now(),
            host=self.host,
            pid=os.getpid(),
            fresh=self.settings.fresh and self._restarts == 0,
            parent=generation.parent,
            command=self._remembered,
            named=self.settings.run_named,
            settings=self.settings.remembered(),
        )
        generation.number = commit.claim(self.remote.store, self.keys, wanted, deadline).generation
        self.journal.generation = generation.number
        self.journal.emit(events.Claimed(generation=generation.number, run_id=generation.run_id))
        generation.claimed.set()

    def _claim_later(self, generation: Generation, reason: str) -> None:
        self.journal.emit(events.ClaimDeferred(generation=generation.number, reason=reason))

        def attempt() -> None:
            while self.state is not State.DONE and not generation.claimed.is_set():
                with contextlib.suppress(CloudError):
                    self._claim(generation, Deadline.after(_CALL_S))
                    return
                generation.claimed.wait(_ASK_STORE_AGAIN_S)

        self._thread("harness-claim", attempt)

    def _find_resume(self, known: commit.Survey | None) -> None:
        """Locate, fetch and verify in a thread, while the trainer imports torch."""
        self._resume_run += 1
        run = self._resume_run
        self._resume, self._resume_head, self._resume_state, self._resume_error = None, None, "pending", None
        generation, memory = self.generation, self._memory_copies()

        def head(copy: Copy, record: SlotRecord) -> None:
            self.post(lambda: self._on_head(run, copy, record))

        def work() -> None:
            survey = known
            while True:
                try:
                    if self._starts_anew_now(generation):
                        self.post(lambda: self._on_resume(run, None, "--fresh"))
                        return
                    if survey is None and not memory:
                        survey = commit.survey(self.remote.store, self.keys, Deadline.after(_CALL_S))
                        self.post(lambda s=survey: self._late_survey(generation, s))  # type: ignore[misc]
                    point = self._search(survey, memory, generation, head)
                    self.post(lambda p=point: self._on_resume(run, p, "no snapshot of this run anywhere"))  # type: ignore[misc]
                    return
                except CloudError as err:
                    if not err.retryable:
                        failure = SnapshotCorrupt(f"the store {self.settings.store} cannot be read: {err}")
                        self.post(lambda f=failure: self._on_resume_failed(run, f))  # type: ignore[misc]
                        return
                    self.journal.emit(events.SourceBlind(source=self.settings.store, reason=str(err)))
                    if self._closing.wait(_ASK_STORE_AGAIN_S):
                        return
                except HarnessError as err:
                    self.post(lambda e=err: self._on_resume_failed(run, e))  # type: ignore[misc]
                    return

        self._thread("harness-resume", work)

    def _starts_anew_now(self, generation: Generation) -> bool:
        return self.settings.fresh and self._restarts == 0 and generation is self.generation

    def _search(
        self,
        survey: commit.Survey | None,
        memory: Sequence[MemoryCopy],
        generation: Generation,
        head: Callable[[Copy, SlotRecord], None],
    ) -> ResumePoint | None:
        """All tiers' copies, newest first; what somebody died over is committed before looking. Resume thread."""
        run_id = generation.run_id or (survey.last_claim.run_id if survey and survey.last_claim else "")
        copies: list[Copy] = list(memory)
        if survey is not None:
            finished = commit.finish_complete(self.remote.store, self.keys, run_id, Deadline.after(_CALL_S))
            copies += stored_copies(self.remote.store, self.keys, "remote", [*survey.commits, *finished])
        if self.local is not None:
            commit.finish_complete(self.local.store, self.keys, run_id, Deadline.after(_CALL_S))
            at_hand = commit.survey(self.local.store, self.keys, Deadline.after(_CALL_S))
            copies += stored_copies(self.local.store, self.keys, "local", at_hand.commits)
        return Finder(self.keys, run_id, self.host, self.journal.emit).find(copies, head)

    def _memory_copies(self) -> list[MemoryCopy]:
        copies = []
        for index in self.pool.sealed():
            record, life = self.pool[index].record(), self._jobs_of.get(index)
            if record is None or life is None:
                continue
            if self.generation.run_id and life.run_id != self.generation.run_id:
                continue
            manifest = self._manifests.get((index, self.pool[index].sequence))
            copies.append(MemoryCopy(SnapshotId(life.number, record.step), index, self.pool[index], record, manifest))
        return copies

    def _late_survey(self, generation: Generation, known: commit.Survey) -> None:
        """The store answers at last: now the run has an identity, and the generation its number."""
        if generation is not self.generation or generation.run_id:
            return
        try:
            self._check_identity(known)
        except ConfigError as err:
            self._tell(str(err))
            self._stop_child()
            self._end("failed", err.exit_code)
            return
        claimed = known.last_claim.run_id if known.last_claim is not None and not self.settings.fresh else ""
        generation.run_id = claimed or secrets.token_hex(16)
        generation.number = max(known.next_generation, generation.number)
        self.journal.generation = generation.number
        self._claim_later(generation, "the store had not answered")

    def _on_head(self, run: int, copy: Copy, record: SlotRecord) -> None:
        if run == self._resume_run:
            self._resume_head = (str(copy.id), copy.tier, record)
            self._tell_resume()

    def _on_resume(self, run: int, point: ResumePoint | None, why_none: str) -> None:
        if run != self._resume_run:
            return
        if point is None:
            self._resume_state = "none"
            self.journal.emit(events.NothingToResume(reason=why_none))
        else:
            self._resume_state, self._resume = "ready", point
            self.generation.parent = str(point.id)
            if point.tier != "memory" and point.verified:
                tier = self.remote if point.tier == "remote" else self.local
                if tier is not None:
                    tier.trust(point.id)
            index = point.index if point.index is not None else self.pool.add(point.slot)
            self.pool.hold(index, "resume")
            self._resume = ResumePoint(point.id, point.tier, index, point.slot, point.record, point.verified)
            self._life_start_step = point.record.step
            self._note_steps(point)
        self._tell_resume()

    def _note_steps(self, point: ResumePoint) -> None:
        if point.tier == "remote":
            self._set_durable(point.record.step)
        elif point.tier == "local":
            self._set_local(point.record.step)
            self._upload_behind(point)

    def _upload_behind(self, point: ResumePoint) -> None:
        """A newer snapshot that is only local is resumed, and uploaded behind."""
        if self.local is None:
            return
        try:
            manifest = commit.read_manifest(self.local.store, self.keys, point.id, Deadline.after(_CALL_S))
        except (CloudError, SnapshotCorrupt):
            return  # it has just been verified; the next snapshot is uploaded in any case
        # Published under its own id, by the generation that is ours now.
        self.remote.submit(LocalSnapshot(self.local.store, self.keys, manifest, self.generation, time.monotonic()))

    def _on_resume_failed(self, run: int, err: HarnessError) -> None:
        if run == self._resume_run:
            self._resume_state, self._resume_error = "failed", err
            self._tell(str(err))
            self._tell_resume()

    def _tell_resume(self) -> None:
        """Tell the trainer what there is to resume, as far as it is known."""
        if self.trainer is None:
            return
        with contextlib.suppress(ChannelClosed):
            if self._resume_state == "none":
                self.trainer.channel.send("resume-none")
            elif self._resume_state == "failed":
                err = self._resume_error
                self.trainer.channel.send("resume-failed", error=type(err).__name__, message=str(err))
            elif self._resume_head is not None and self._resume_state == "pending":
                snapshot, tier, record = self._resume_head
                self.trainer.channel.send("resume-head", snapshot=snapshot, tier=tier, record=record.encode().decode())
            elif self._resume_state == "ready" and self._resume is not None:
                point = self._resume
                self.trainer.channel.send(
                    "resume-ready",
                    [point.slot.fd],
                    snapshot=str(point.id),
                    tier=point.tier,
                    verified=point.verified,
                    index=point.index,
                )

    def _spawn(self) -> None:
        assert self.command is not None
        environment = {
            **self._environ,
            SOCKET_VARIABLE: str(self.place.socket),
            "HARNESS_RUN_ID": self.generation.run_id,
            "HARNESS_RESTARTS": str(self._restarts),
        }
        self._connected_this_life = False
        self._trainer_code = None
        self.child = Child(self.command, environment)
        self._selector.register(self.child.pidfd, selectors.EVENT_READ, self._on_child_exit)
        self.journal.emit(events.TrainerStarted(pid=self.child.pid, restarts=self._restarts))

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _on_connection(self) -> None:
        assert self._listener is not None
        sock, _address = self._listener.accept()
        channel = Channel(sock)
        self._clients[sock.fileno()] = channel
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._on_readable(channel))

    def _on_readable(self, channel: Channel) -> None:
        try:
            message = channel.receive()
            self._on_message(channel, message)
        except ChannelClosed:
            self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.socket)
        self._clients.pop(channel.fileno(), None)
        channel.close()

    def _on_message(self, channel: Channel, message: Message) -> None:
        if message.type == "status":
            channel.send("status", status=self.status())
        elif message.type == "takeover":
            self._hand_over(channel)
        elif message.type == "hello":
            self._on_hello(channel, message)
        elif self.trainer is not None and channel is self.trainer.channel:
            self._on_trainer_message(message)

    def _on_hello(self, channel: Channel, message: Message) -> None:
        if message["protocol"] != ipc.PROTOCOL:
            channel.send("refused", message="the agent and the harness in the trainer are of different versions")
            return
        if self.trainer is not None and not ipc.pidfd_dead(self.trainer.pidfd):
            channel.send(
                "refused",
                message=f"run {self.settings.run!r} is being trained by process {self.trainer.pid} already: "
                "two Checkpointers in one process, or a trainer that is still alive; name the other with --run",
            )
            return
        pid = ipc.peer_pid(channel)
        pidfd = ipc.open_pidfd(pid)
        if pidfd is None:
            return
        if self.trainer is not None:
            self._drop_trainer()
        self.trainer = Trainer(channel, pid, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, self._on_trainer_dead)
        self._connected_this_life = True
        if message["life"] is not None:
            self._attach(message)
        self.journal.emit(events.TrainerConnected(pid=pid, rank=message["rank"]))
        if self.state is State.STARTING:
            self.state = State.RUNNING
        channel.send(
            "welcome",
            [self.page.fd],
            life=_life(self.generation),
            restarts=self._restarts,
            settings=self.settings.to_json(),
            detached=self.command is None,
        )
        if message["life"] is None:
            self._tell_resume()

    def _attach(self, message: Message) -> None:
        """A live trainer whose agent died: adopt its generation, control page and slots, and go on."""
        life = message["life"]
        control, *slots = message.fds
        self.page = ControlPage(control)
        self.page.words[Word.AGENT_PID] = os.getpid()
        self.generation = Generation(life["number"], life["run_id"], life["nonce"], life["parent"])
        self.journal.generation = self.generation.number
        indexes = message["indexes"]
        for index, fd in zip(indexes, slots, strict=True):
            self.pool.put(index, Slot(fd))
        self._layout = (0, indexes) if indexes else None
        self._local_step = self.page.step_or_none(Word.LOCAL_STEP)
        self._durable_step = self.page.step_or_none(Word.DURABLE_STEP)
        self._resume_state = "attached"
        self._attached = True
        self._write(Word.ASK, Ask.NOTHING)
        self._wants = Wants()
        self.journal.emit(events.AgentReplaced(slots=len(indexes)))
        self._claim_later(self.generation, "the agent was replaced")
        newest = self.pool.newest_sealed()
        if newest is not None:  # whether it was saved already is not known: saving it twice is harmless
            self._take_sealed(newest)

    def _on_trainer_message(self, message: Message) -> None:
        assert self.trainer is not None
        if message.type == "layout":
            self._on_layout(message["bytes"])
        elif message.type == "sealed":
            self._on_sealed(message)
        elif message.type == "restored":
            self.journal.emit(
                events.Restored(snapshot=message["snapshot"], step=message["step"], seconds=message["seconds"])
            )
            self._release_resume()
        elif message.type == "stepped":
            self._on_first_step(message["step"])
        elif message.type == "want":
            self._wants.reasons.add(message["reason"])
            self._wants.durable_now |= bool(message["durable"])
        elif message.type == "signal":
            self._on_signal(message["signum"], from_trainer=True)
        elif message.type == "training":
            self.trainer.finished_step = self._finished_step = None
        elif message.type == "leaving":
            self._hurry()
        elif message.type == "finished":
            self.trainer.finished_step = self._finished_step = message["step"]
            self.journal.emit(events.TrainerFinished(step=message["step"]))
            self._hurry()
        elif message.type == "bye":
            self.trainer.exception = message["exception"]
            self.trainer.left = True

    def _release_resume(self) -> None:
        if self._resume is not None and self._resume.index is not None:
            self._jobs_of.setdefault(self._resume.index, self.generation)
            self.pool.release(self._resume.index, "resume")

    def _on_first_step(self, step: int) -> None:
        self._first_step_at = time.monotonic()
        self.journal.emit(events.FirstStep(step=step, seconds=self._first_step_at - self._life_began_at))

    def _on_layout(self, size: int) -> None:
        """Allocate slots for a layout of `size` bytes each, in a thread: it takes half a second per GiB."""
        assert self.trainer is not None
        trainer = self.trainer
        count = self.settings.slots or (2 if total_bytes() >= TWO_SLOTS_FROM_BYTES else 1)
        try:
            indexes = self.pool.allocate(size, count)
        except HarnessError as err:
            trainer.channel.send("no-slots", error=type(err).__name__, message=str(err))
            return
        self._layout = (size, indexes)
        self._wants.granted = None
        trainer.channel.send("slots", [self.pool[index].fd for index in indexes], indexes=indexes)
        self.journal.emit(events.SlotsReady(slots=len(indexes), bytes=size))

    def _on_sealed(self, message: Message) -> None:
        index = message["index"]
        if index not in self.pool:
            return
        self._wants.granted = None
        if self._wants.asked is Ask.SNAPSHOT:
            self._ask(Ask.NOTHING)
        self._wants.reasons.clear()
        self._copy_s = message["stall_s"]
        self.journal.emit(events.Sealed(step=message["step"], bytes=message["bytes"], stall_s=message["stall_s"]))
        self._take_sealed(index)

    def _take_sealed(self, index: int) -> None:
        """A slot is sealed: it is the tiers' turn."""
        slot = self.pool[index]
        record = slot.record()
        if record is None:
            return
        self._jobs_of[index] = self.generation
        self._sealed_step, self._sealed_at = record.step, time.monotonic()
        self.pool.collect()
        job = SealedSlot(index, slot, record, self.generation, self._sealed_at)
        urgent = self._drain is not None or self._finished_step is not None or self._wants.durable_now
        if self.local is not None:
            self._give(self.local, job)
        if self.local is None or urgent:
            self._give(self.remote, job)

    def _give(self, tier: Tier, job: SealedSlot) -> None:
        self.pool.hold(job.index, tier.name)
        tier.submit(job)

    def _hurry(self) -> None:
        """The newest snapshot has to become durable now, not at the remote tier's next turn."""
        newest = self.pool.newest_sealed()
        if newest is None or newest not in self._jobs_of:
            return
        step = self.pool[newest].step
        if self._durable_step == step or any(job.step == step for job in self.remote.jobs):
            return
        record = self.pool[newest].record()
        if record is not None and self._sealed_step == step:
            life = self._jobs_of[newest]
            self._give(
                self.remote, SealedSlot(newest, self.pool[newest], record, life, self._sealed_at or time.monotonic())
            )

    # ---- tiers ------------------------------------------------------------------------------------------------------

    def _on_published(self, tier: Tier, job: Job, manifest: Manifest) -> None:
        if isinstance(job, SealedSlot):
            self._manifests[job.index, job.slot.sequence] = manifest
            while len(self._manifests) > 16:
                self._manifests.pop(next(iter(self._manifests)))
        if tier is self.remote:
            self._set_durable(manifest.step)
            self._wants.durable_now = False
        else:
            self._set_local(manifest.step)
            self._upload_if_due(manifest, job)
        if self.local is None:
            self._set_local(manifest.step)
        self.journal.flush()

    def _upload_if_due(self, manifest: Manifest, job: Job) -> None:
        assert self.local is not None
        if any(waiting.step >= manifest.step for waiting in self.remote.jobs):
            return
        now = time.monotonic()
        cadence = Cadence(self.settings.durable_every_s)
        urgent = self._drain is not None or self._finished_step is not None or self._durable_step is None
        if urgent or self._wants.durable_now or cadence.due(now, self._durable_started_at, self._started_at):
            self._durable_started_at = now
            self.remote.submit(LocalSnapshot(self.local.store, self.keys, manifest, job.generation, job.sealed_at))

    def _on_failed(self, tier: Tier, job: Job, final: bool) -> None:
        """The local disk cannot take it: the store gets it straight from the slot."""
        if tier is self.local and isinstance(job, SealedSlot) and not any(j.step >= job.step for j in self.remote.jobs):
            self._give(self.remote, job)

    def _on_released(self, tier: Tier, job: Job) -> None:
        if isinstance(job, SealedSlot):
            newer = [j for j in tier.jobs if isinstance(j, SealedSlot) and j.index == job.index]
            if not newer:
                self.pool.release(job.index, tier.name)

    def _set_local(self, step: int) -> None:
        self._local_step = max(step, self._local_step or 0)
        self.page.put_step(Word.LOCAL_STEP, self._local_step)

    def _set_durable(self, step: int) -> None:
        self._durable_step = max(step, self._durable_step or 0)
        self._durable_started_at = time.monotonic()
        self.page.put_step(Word.DURABLE_STEP, self._durable_step)

    # ---- asking -----------------------------------------------------------------------------------------------------

    def _watch_step(self) -> None:
        """Measure how long a step takes, from the word that the trainer writes."""
        step, now = self._trainer_step(), time.monotonic()
        if step is None:
            return
        self._furthest = max(self._furthest, step)
        if self._last_step is None or step < self._last_step[0]:
            self._last_step = (step, now)
        elif step > self._last_step[0]:
            self._step_s = (now - self._last_step[1]) / (step - self._last_step[0])
            self._last_step = (step, now)

    def _trainer_step(self) -> int | None:
        return self.page.step_or_none(Word.TRAINER_STEP)

    def _ask_if_due(self) -> None:
        """Keep a free slot granted, and write the ask word when there is a reason."""
        if self.trainer is None or self.state is State.DONE:
            return
        wants = self._wants
        if wants.granted is None and self._layout is not None and (index := self.pool.grant()) is not None:
            wants.granted = index
            self._write(Word.GRANT, index)
        if self._drain is not None:
            plan = self._drain.plan
            new = plan is None or plan.choice is Choice.NEW
            self._ask(Ask.SNAPSHOT_AND_LEAVE if new else Ask.LEAVE)
        elif wants.granted is not None and wants.asked is Ask.NOTHING and (reason := self._reason()) is not None:
            self._ask(Ask.SNAPSHOT)
            self.journal.emit(events.Due(reason=reason))

    def _reason(self) -> str | None:
        if self._wants.reasons:
            return min(self._wants.reasons)
        if self._first_step_at is None and not self._attached:
            return None
        settings = self.settings
        every_s = settings.every_s if self.local is not None else min(settings.every_s, settings.durable_every_s)
        since = self._first_step_at or self._started_at
        return "interval" if Cadence(every_s).due(time.monotonic(), self._sealed_at, since) else None

    def _ask(self, ask: Ask) -> None:
        if self._wants.asked is not ask:
            self._wants.asked = ask
            self._write(Word.ASK, ask)

    def _write(self, word: Word, value: int) -> None:
        """A new sequence number each time, so that the trainer sees that it is news."""
        self.page.words[word] = Request(value, Request.decode(self.page.words[word]).sequence + 1).encode()

    # ---- notices ----------------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda number, _frame: self.post(lambda: self._on_signal(number)))
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda number, _frame: self.post(lambda: self._forward(number)))
        # The main loop waits in select: a signal must wake it at once.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _on_signal(self, signum: int, *, from_trainer: bool = False) -> None:
        if not from_trainer:
            self._urgent_signals += 1
            if self._urgent_signals > 1:
                self._tell("second signal: leaving now")
                self._stop_child()
                self._end("stopped" if signum == signal.SIGINT else "interrupted", self._left_code(signum))
                return
        if signum == signal.SIGINT:
            self._begin_drain("Ctrl-C", Deadline.never(), ExitCode.CTRL_C)
        else:
            self._signals.received(signum)
            self.poller.wake()
        if not self._connected_this_life and not from_trainer and signum != signal.SIGINT:
            self._forward(signum)  # a program that does not know us gets its signal as ever

    def _left_code(self, signum: int) -> ExitCode:
        if signum == signal.SIGINT:
            return ExitCode.CTRL_C
        return ExitCode.INTERRUPTED if self._everything_durable else ExitCode.INTERRUPTED_LOCAL

    def _forward(self, signum: int) -> None:
        if self.child is not None:
            self.child.signal(signum)

    def _on_notice(self, notice: Notice) -> None:
        left = notice.deadline.remaining_s if notice.deadline is not None else None
        self.journal.emit(
            events.NoticeSeen(kind=notice.kind.value, source=notice.source, in_s=left, detail=notice.detail)
        )
        self.journal.flush()
        if notice.kind is NoticeKind.REBALANCE:
            self._wants.reasons.add("rebalance")
            self._wants.durable_now = True
            return
        self._begin_drain(notice.source, notice.deadline or Deadline.after(self.settings.grace_s), ExitCode.INTERRUPTED)

    def _begin_drain(self, reason: str, deadline: Deadline, code: ExitCode) -> None:
        if self._drain is not None:
            if deadline.at < self._drain.deadline.at:
                self._drain.deadline = deadline
                self._push_deadline(deadline)
            if code is ExitCode.INTERRUPTED:
                self._drain.exit_code = code
            return
        self._drain = Drain(reason, deadline, code)
        self.state = State.DRAINING
        self._push_deadline(deadline)
        self._restart_at = None
        step = self._trainer_step()
        plan = plan_drain(
            None if math.isinf(deadline.at) else deadline.remaining_s,
            self._state_bytes(),
            Rates(self._copy_bytes_s(), self.remote.bytes_s, self._step_s),
            trainer_alive=self._trainer_is_training,
            sealed_is_current=self._sealed_step is not None and self._sealed_step == step,
            in_flight_bytes=self.remote.bytes_left,
            sealed=self.pool.newest_sealed() is not None,
        )
        self._drain.plan = plan
        self.journal.emit(events.Draining(choice=plan.choice.value, step=step, needs_s=plan.needs_s, has_s=plan.has_s))
        if plan.choice is Choice.NEWEST:
            self._hurry()

    def _push_deadline(self, deadline: Deadline) -> None:
        if math.isinf(deadline.at):
            return
        self.page.words[Word.DEADLINE_NS] = int(deadline.at * 1e9)
        for tier in (self.local, self.remote):
            if tier is not None:
                tier.drain(deadline)

    def _check_fallback(self) -> None:
        """No boundary in time: the newest sealed snapshot is made durable while that still fits."""
        drain = self._drain
        if drain is None or self._sealed_step is None or math.isinf(drain.deadline.at):
            return
        if drain.plan is None or drain.plan.choice is not Choice.NEW:
            return
        size, rate = self._state_bytes() or 0, self.remote.bytes_s or 50e6
        if drain.deadline.remaining_s < 2.0 * size / rate + 3.0:
            self._hurry()

    def _state_bytes(self) -> int | None:
        newest = self.pool.newest_sealed()
        if newest is not None:
            return self.pool[newest].payload_bytes
        return self._layout[0] if self._layout else None

    def _copy_bytes_s(self) -> float | None:
        size = self._state_bytes()
        return size / self._copy_s if size and self._copy_s else None

    # ---- ends -------------------------------------------------------------------------------------------------------

    @property
    def _trainer_is_training(self) -> bool:
        return self.trainer is not None and not self.trainer.left and self.trainer.finished_step is None

    @property
    def _trainer_gone(self) -> bool:
        """Whether nobody trains and nobody will be started."""
        if self._restart_at is not None:
            return False
        if self.command is not None:
            return self.child is None and self._trainer_code is not None
        return self._connected_this_life and self.trainer is None

    @property
    def _everything_durable(self) -> bool:
        """Whether the newest snapshot there is survives this instance (nothing newer than the resume point counts too)."""
        if self._durable_step is None:
            return False
        return self._sealed_step is None or self._durable_step >= self._sealed_step

    def _on_trainer_dead(self) -> None:
        """The pidfd of the connected trainer says that it is dead: read what it still said first."""
        trainer = self.trainer
        if trainer is None:
            return
        if trainer.channel.fileno() >= 0:
            trainer.channel.socket.setblocking(False)
            with contextlib.suppress(ChannelClosed):
                while self.trainer is trainer:
                    self._on_trainer_message(trainer.channel.receive())
        finished = trainer.finished_step is not None and not trainer.exception
        self._drop_trainer()
        if self.command is None:
            self._on_trainer_exit(0 if trainer.left and not trainer.exception else None, finished=finished)

    def _drop_trainer(self) -> None:
        trainer, self.trainer = self.trainer, None
        if trainer is None:
            return
        self._selector.unregister(trainer.pidfd)
        os.close(trainer.pidfd)
        self._forget(trainer.channel)
        self._release_resume()
        self._wants = Wants()
        self._layout = None
        newest = self.pool.newest_sealed()
        if newest is not None and newest in self._jobs_of and self._sealed_step != self.pool[newest].step:
            self._take_sealed(newest)  # sealed, but its message never came

    def _on_child_exit(self) -> None:
        child = self.child
        if child is None or (code := child.reap()) is None:
            return
        self._on_trainer_dead()
        self._selector.unregister(child.pidfd)
        child.close()
        self.child = None
        self._on_trainer_exit(code, finished=self._finished_step is not None)

    def _on_trainer_exit(self, code: int | None, *, finished: bool) -> None:
        self._trainer_code = code if code is not None else 1
        self.journal.emit(events.TrainerLeft(code=code, step=self._trainer_step()))
        if self._drain is not None:
            self._hurry()
            return
        if code == 0:
            if not self._connected_this_life:
                self._tell("the program ended without ever creating a Checkpointer: nothing was saved")
            if finished:
                self._hurry()
            return
        if self.command is None or code == ExitCode.CTRL_C:
            return
        decision = after_crash(
            crashes=self._crashes,
            progressed=self._furthest > self._life_start_step and self._furthest > self._crashed_at,
            connected=self._connected_this_life,
            max_crashes=self.settings.max_crashes,
        )
        self._crashed_at = max(self._furthest, self._crashed_at)
        if isinstance(decision, GiveUp):
            if self._connected_this_life:
                self.journal.emit(events.GaveUp(crashes=decision.crashes))
            self._hurry()
            return
        self._crashes = decision.crashes
        self._restart_at = time.monotonic() + decision.in_s
        self.journal.emit(events.Restarting(in_s=decision.in_s, crashes=decision.crashes))

    def _restart_if_time(self) -> None:
        """Start the trainer again in place: a new generation, resumed from the nearest copy of the newest snapshot."""
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return
        self._restart_at = None
        self._restarts += 1
        self._finished_step = None
        self._first_step_at = None
        self.page.words[Word.TRAINER_STEP] = 0
        self._write(Word.ASK, Ask.NOTHING)
        old, known = self.generation, None
        with contextlib.suppress(CloudError, SnapshotCorrupt):
            commit.end(
                self.remote.store, self.keys, old.number, old.nonce, "failed", self._durable_step, Deadline.after(5.0)
            )
            known = commit.survey(self.remote.store, self.keys, Deadline.after(5.0))
        self._new_generation(known)
        self.state = State.STARTING
        self._find_resume(known)
        self._spawn()

    def _finish_if_done(self) -> None:
        """Record the outcome once nobody trains and everything sealed is where it has to be, or time is up."""
        if self.state is State.DONE:
            return
        drain = self._drain
        if drain is not None and drain.deadline.expired and not self._trainer_gone:
            self._stop_child()
            if self.trainer is not None and self.command is None:
                self._drop_trainer()
                self._trainer_code = 1
        if not self._trainer_gone:
            return
        out_of_time = drain is not None and drain.deadline.expired
        idle = self.remote.idle and (self.local is None or self.local.idle) and self._posts.empty()
        if not idle and not out_of_time:
            return
        if self._finished_step is not None and self._trainer_code == 0 and self._everything_durable:
            self._end("finished", ExitCode.FINISHED)
        elif drain is not None:
            durable = self._everything_durable
            code = drain.exit_code
            if code is ExitCode.INTERRUPTED and not durable:
                code = ExitCode.INTERRUPTED_LOCAL
            self._end("stopped" if code is ExitCode.CTRL_C else "interrupted", code)
        elif self._trainer_code == 0:
            self._end("stopped", ExitCode.FINISHED)
        else:
            self._end("failed", self._trainer_code or 0)

    def _end(self, outcome: str, code: int) -> None:
        """Record the outcome, whatever it is. The last event of the journal."""
        if self.state is State.DONE:
            return
        self.state = State.DONE
        self._closing.set()
        if self.generation.claimed.is_set():
            try:
                commit.end(
                    self.remote.store,
                    self.keys,
                    self.generation.number,
                    self.generation.nonce,
                    outcome,
                    self._durable_step,
                    Deadline.after(5.0),
                )
            except CloudError as err:
                self._tell(f"the outcome could not be recorded in the store: {err}")
        self._outcome = (outcome, int(code))
        self.journal.emit(
            events.Ended(
                outcome=outcome, exit_code=int(code), local_step=self._local_step, durable_step=self._durable_step
            )
        )

    def _stop_child(self) -> None:
        """The last resort: SIGTERM to the trainer alone, then SIGKILL. Blocks at most a few seconds."""
        child = self.child
        if child is None:
            return
        child.signal(signal.SIGTERM)
        give_up_at = time.monotonic() + _KILL_AFTER_S
        while child.reap() is None and time.monotonic() < give_up_at:
            threading.Event().wait(0.02)
        child.signal(signal.SIGKILL)
        while (code := child.reap()) is None:
            threading.Event().wait(0.01)
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.pidfd)
        self._on_trainer_dead()
        child.close()
        self.child = None
        self._trainer_code = code
        self.journal.emit(events.TrainerLeft(code=code, step=self._trainer_step()))

    def _die(self) -> None:
        """A bug in one of our threads: say everything, leave the trainer alone, and let it start another agent."""
        err = self._crash
        assert err is not None
        self._tell("".join(traceback.format_exception(err)))
        self._end("failed", ExitCode.BUG)

    def _fatal(self, err: BaseException) -> None:
        def crash() -> None:
            self._crash = err

        self.post(crash)

    # ---- small things -----------------------------------------------------------------------------------------------

    def _heartbeat(self) -> events.Heartbeat:
        return events.Heartbeat(step=self._trainer_step(), durable_step=self._durable_step)

    def _drain_wake_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        def root() -> None:
            try:
                work()
            except Exception as err:  # noqa: BLE001  the thread's root
                self._fatal(err)

        threading.Thread(target=root, name=name, daemon=True).start()

    def _tell(self, text: str) -> None:
        """A word to the user that is no event."""
        os.write(2, f"harness: {text}\n".encode())


def _metadata_sources(url: str) -> list[NoticeSource]:
    """The instance's metadata service; nothing when it is switched off."""
    if url == "off":
        return []
    from cloud.ec2 import Ec2Source
    from cloud.metadata import MetadataSession

    return [Ec2Source(MetadataSession(url))]


def _life(generation: Generation) -> dict[str, object]:
    """A generation as it travels to a trainer and to another agent of this host."""
    return {
        "number": generation.number,
        "run_id": generation.run_id,
        "nonce": generation.nonce,
        "parent": generation.parent,
    }


def _host_key(host: str) -> str:
    """A host's name as part of a key."""
    return re.sub(r"[^A-Za-z0-9_.=+-]", "-", host)[:60]


def _scripts_differ(before: Sequence[str], now: Sequence[str]) -> bool:
    first, second = (script_of(command) if command else None for command in (before, now))
    return first is not None and second is not None and os.path.normpath(first) != os.path.normpath(second)
