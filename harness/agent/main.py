"""The agent: composition root and state machine.

Owns the main loop, the start and end of every thread, and the decision what to do next after each event.
Only the main thread changes state; other threads `post` to it. Each kind of work has its own owner, and none of them
knows this file: `resume/` finds what a start resumes, `trainers/` runs the trainer, `trainers/ranks.py` sends it
commands, `save/` stores sealed slots, `drain/` responds to a notice.

    poller ──notice──▶ ┌──────────────┐ ◀──messages── trainer (ipc.channel, by way of the server)
    tiers ──commit───▶ │  Agent.run   │ ──ask, grant─▶ control page
    startup ──resume─▶ │  (main loop) │ ──slots─────▶ tiers
    child ──exit─────▶ └──────────────┘ ──events────▶ journal
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cloud.errors import CloudError
from cloud.notice import Deadline, Notice, NoticeKind, NoticeSource
from cloud.store import ObjectStore
from harness.agent import signals
from harness.agent.context import CalledOff, Context
from harness.agent.drain.controller import DrainController
from harness.agent.drain.speeds import Speeds
from harness.agent.journal import Journal, Listener
from harness.agent.lines import lines_of
from harness.agent.log import Log
from harness.agent.loop import Loop
from harness.agent.notices.registry import Notices
from harness.agent.requests import Requests
from harness.agent.resume.startup import Finding, Startup, StartupEvents
from harness.agent.run_state import State
from harness.agent.save.pipeline import SavePipeline, Steps
from harness.agent.server import Server
from harness.agent.trainers.lateness import Lateness
from harness.agent.trainers.ranks import Rank, Ranks, Taken
from harness.agent.trainers.restarts import Restarts
from harness.agent.trainers.session import Trainer, TrainerEvents
from harness.agent.watching import Watching, WatchingEvents
from harness.config.program import Program
from harness.config.settings import SOCKET_VARIABLE, Settings
from harness.core import events, messages
from harness.core.manifest import Claim
from harness.core.messages import FromTrainer, RunState, Sealed, SignalReceived, Status
from harness.core.policy.end import (
    EndTimes,
    Facts,
    Next,
    Outcome,
    Standing,
    decide_end,
    interrupted,
    outcome_of,
)
from harness.core.policy.meeting import Uneven
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError, DeadlineExceeded, ExitCode, Superseded
from harness.ipc.channel import Channel, Received
from harness.ipc.process import check_kernel
from harness.snapshots.open import open_soon
from harness.watch.watcher import Checkpoint

_IDLE_S, _BUSY_S = 0.5, 0.1  # how long the loop sleeps when nothing happens: long to save CPU, short near an end
_IN_TIME = EndTimes()
_AT_ONCE = EndTimes(calls_s=1.0, journal_s=2.0)
_PATIENT = EndTimes(calls_s=60.0)  # no deadline: record that a run finished, else it is resumed once more
_LOG_S = 1.0  # at the end, to write the lines that wait for a blocked stderr
_CLOSE_S = 2.0  # a hung disk does not release its reservation; a later sweep does


class Agent:
    """The agent of one run on one node. `run` returns when every sealed snapshot is stored where it has to be."""

    def __init__(
        self,
        settings: Settings,
        program: Program,
        *,
        sources: Sequence[NoticeSource] | None = None,
        listeners: Sequence[Listener] = (),
        stores: Callable[[str], ObjectStore] | None = None,
    ) -> None:
        """Prepare; nothing is read, written or started before `run`.

        Args:
            settings: of the run.
            program: what trains.
            sources: of notices, beside signals and the drain file; `None` for the instance metadata service.
            listeners: each is called with every line of the journal, in the emitting thread (tests).
            stores: opens a store by its location; `None` for what the settings say.

        Raises:
            ConfigError: a store cannot be used.
        """
        check_kernel()
        self._log = Log()
        self._say = self._log.say
        stores = stores or (lambda location: open_soon(location, settings, self._say))
        self.settings, self._program = settings, program
        self._state = State()
        self._outcome: Outcome | None = None
        self._refusal: ConfigError | None = None
        self._interrupts = 0
        self._at_once = False
        self._told_to_leave = False
        self._bug: BaseException | None = None
        host = re.sub(r"[^A-Za-z0-9_.=+-]", "-", socket.gethostname())[:60] or "localhost"
        keys = RunKeys(settings.run)
        self._loop = Loop()
        lines = lines_of(settings, self._log, program.environ)
        self._journal = Journal(keys, host, listeners=(lines, *listeners), heartbeat=self._heartbeat)
        self._context = Context(settings, keys, host, self._loop, self._journal.emit, self._say, self._on_bug)
        self._pipeline = SavePipeline(self._context, stores, self._on_commit)
        self._ranks = Ranks(self._context, self._pipeline.pool)
        self._speeds = Speeds(self._pipeline)
        self._drain = DrainController(self._context, self._pipeline, self._speeds, self._ranks)
        self._lateness = Lateness(self._context, self._ranks)
        self._requests = Requests(self._context, self._ranks, self._pipeline, self._drain, self._lateness)
        self._restarts = Restarts(self._context, self._pipeline)
        self._server = Server(self._context, self._pipeline, self._on_message)
        self._watching = self._watch()
        changes = StartupEvents(self._on_resume_known, self._refuse, self._on_superseded)
        finder = None if self._watching is None else self._watching.finder
        self._startup = Startup(self._context, program.remembered, self._pipeline, self._journal, changes, finder)
        doings = TrainerEvents(
            last_word=self._on_message_of_trainer,
            began=self._on_began_again,
            joined=lambda: self._state.move(RunState.RUNNING),
            lost=self._on_trainer_lost,
            left=self._on_trainer_left,
        )
        self.trainer = Trainer(self._context, program, self._server, self._ranks, self._pipeline, self._startup, doings)
        self._notices = Notices(self._context, sources, self._on_notice)

    # ---- life of the agent ------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the outcome is recorded; return the exit code. Main thread only (signals).

        Raises:
            ConfigError: the run cannot be started. Nothing was changed, and no trainer runs.
        """
        signals.install(self._loop.post, self._on_signal, self.trainer.signal)
        self._notices.start()  # before anything slow: a notice may be in force already
        try:
            self._begin()
            while self._outcome is None:
                self._turn()
                if self._refusal is not None:
                    self._turn_away(self._refusal)
                    raise self._refusal
        except ConfigError:
            self.trainer.stop()
            raise
        finally:
            self._shut()
            signals.ignore()
            self._log.close(_LOG_S)
        return int(self._outcome.exit_code)

    def status(self) -> Status:
        """Return what `harness status` shows of a live run. Main thread."""
        remote, steps, generation = self._pipeline.remote, self._pipeline.steps, self._startup.generation
        left, rate, durable_at = remote.bytes_left, remote.bytes_s, self._pipeline.durable_at
        return Status(
            run=self.settings.run,
            store=self.settings.store,
            local=self.settings.local,
            state=self._state.now,
            generation=generation.number,
            run_id=generation.run_id,
            claimed=generation.claimed.is_set(),
            step=self._step,
            step_age_s=self._speeds.step_age_s(time.monotonic()),
            local_step=steps.local,
            durable_step=steps.durable,
            durable_age_s=None if durable_at is None else round(time.monotonic() - durable_at, 1),
            bytes_copied=remote.copied.bytes,
            bytes_pending=left or 0,
            estimate_s=round(left / rate, 1) if left and rate else None,
            deadline_s=None if math.isinf(self._left_s) else round(self._left_s, 1),
            notice=self._drain.forecast(self._notices.window_s, trains=self._saves),
            finished_step=self.trainer.attempt.finished_step,
            everything_durable=self._pipeline.everything_durable,
            restarts=self.trainer.restarts,
            restart=self.trainer.restarted,
            unreachable=self._notices.unreachable,
            agent_pid=os.getpid(),
            trainer_pid=next((connection.pid for connection in self._ranks.connections), None),
            ranks=self._lateness.status(),
            unsaved="" if self._watching is None else self._watching.why_not(),
        )

    def _begin(self) -> None:
        settings, program = self.settings, self._program
        try:
            self._startup.claims.lock_id = self._server.open(lambda: self._drain.current is not None)
            if self._watching is not None:
                mark = SOCKET_VARIABLE, str(self._server.address)
                self._watching.open(mark, lambda: self._drain.current is not None)
        except CalledOff:
            stopped, interrupted = ("stopped", ExitCode.CTRL_C), ("interrupted", ExitCode.INTERRUPTED_LOCAL)
            return self._end(Outcome(*stopped if self._interrupts else interrupted))  # an earlier start goes on
        self._journal.emit(
            events.AgentStarted(
                run=settings.run,
                store=settings.store,
                local=settings.local,
                host=self._context.host,
                pid=os.getpid(),
                detached=not program.is_child,
            )
        )
        if (node := events.decode_node(program.environ.get(events.NODE_VARIABLE, ""))) is not None:
            self._journal.emit(node)
        self._pipeline.start()
        self._journal.start(self._pipeline.remote.store)
        if "HARNESS_ATTACH" not in program.environ or program.is_child:
            return self.trainer.begin(self._on_begun)
        if not self.trainer.await_attach():
            self._end(Outcome("stopped", ExitCode.FINISHED))  # the trainer died as well, and its slots with it
        return None

    def _on_begun(self) -> None:
        """Start the trainer, since its generation has begun; give up if it is a child and the agent drains already."""
        if self._drain.current is not None and self._program.is_child:
            self.trainer.give_up()
        elif self._watching is None:
            self.trainer.spawn()
        else:
            self._watching.awaits_start = True
            self._start_watched()

    def _on_resume_known(self) -> None:
        """Tell the trainer, or start a program that can only look for its checkpoint when it starts."""
        if self._watching is None:
            self.trainer.telling.resume()
        else:
            self._start_watched()

    def _start_watched(self) -> None:
        watching, startup = self._watching, self._startup
        if watching is None or not watching.awaits_start or startup.finding is Finding.PENDING:
            return
        watching.awaits_start = False
        if startup.finding is Finding.FAILED or self._drain.current is not None:
            self.trainer.give_up()
            return
        if self.settings.fresh and self.trainer.restarts == 0:
            watching.begin_at_zero()
        if startup.point is not None:
            self._journal.emit(watching.restored(startup.point))
        self.trainer.spawn_watched(watching)
        self._state.move(RunState.RUNNING)

    def _turn(self) -> None:
        """Run one turn of the main loop: wait for an event, then apply every rule."""
        ending = self._drain.current is not None or self._restarts.pending or self.trainer.attempt.over
        patience_s = self._ranks.meeting.patience_s
        self._loop.wait((_BUSY_S if ending else _IDLE_S) if patience_s is None else patience_s)
        self._loop.run_posts()
        if self._outcome is not None:
            return
        if self._bug is not None:
            self._say("".join(traceback.format_exception(self._bug)))
            self._end(Outcome("failed", ExitCode.BUG))
            return
        self._watch_step()
        self._pipeline.tell_silence()
        self._notices.tell_silence()
        if self._watching is not None:
            self._watching.pass_on_in_time()
        self._drain.save_what_there_is_in_time()
        self._drain.conclude_drill()
        self.trainer.tell_restarted()
        self.trainer.end_siblings_in_time(leaving=self._drain.current is not None)
        self._request_if_due()
        self._restart_if_due()
        self._name_late_ranks()
        self._finish_if_done()

    def _shut(self) -> None:
        """Stop all work. No tier may publish once the end is recorded (I5); no thread may write once stores close."""
        told = self._told_to_leave or self._interrupts > 0
        patient = self._outcome is not None and self._outcome.finished and not told
        times = _AT_ONCE if self._at_once else _PATIENT if patient else _IN_TIME
        self._startup.close()
        if self._watching is not None:
            self._watching.close()
        self._notices.close()
        quiet = self._pipeline.close(times.quiet_s(self._left_s))
        self._loop.run_posts()  # a commit that was made a moment ago counts; a new request does not
        if self._outcome is not None:
            self._outcome = self._outcome.confirmed(everything_durable=self._pipeline.everything_durable)
            self._server.leave_word(self._outcome)
            self._record(self._outcome, quiet=quiet, in_s=times.record_s(self._left_s))
        self._journal.close(times.rest_s(self._left_s))
        self._pipeline.close_stores(min(_CLOSE_S, times.rest_s(self._left_s)))
        self._server.close()

    def _watch(self) -> Watching | None:
        """Return the owner of the directory that is watched, if one is. Raises ConfigError."""
        if self.settings.watch is None:
            return None
        if not self._program.is_child:
            raise ConfigError("a directory is watched for a program that harness run starts: harness run --watch DIR")
        tell = WatchingEvents(self._on_checkpoint, lambda signum: self.trainer.signal(signum))
        return Watching(self._context, Path(self.settings.watch), self.settings.watch_as, tell)

    @property
    def _step(self) -> int | None:
        """Steps that the trainer has completed; of a watched program, those of its newest checkpoint."""
        return self._ranks.trainer_step if self._watching is None else self._watching.step

    @property
    def _saves(self) -> bool:
        """Whether a trainer is there that can take a snapshot, or a program that can be asked to save."""
        return self.trainer.trains if self._watching is None else self._watching.answers

    @property
    def _is_looked_at(self) -> bool:
        """Whether nothing that a watched program has left is still to be looked at."""
        return self._watching is None or self._watching.settled

    @property
    def _left_s(self) -> float:
        """Seconds until the agent must have ended; infinite while there is no deadline."""
        return math.inf if self._drain.current is None else self._drain.current.ends_at.remaining_s

    def _record(self, end: Outcome, *, quiet: bool, in_s: float) -> None:
        self._drain.tell_outcome()
        if quiet:
            try:
                self._startup.end(end.name, Deadline.after(in_s))
            except CloudError as err:
                self._say(f"the outcome could not be recorded in the store: {err}")
        else:
            self._say("the outcome is not recorded in the store: a call to a store has not ended yet")
        steps = self._pipeline.steps
        self._journal.emit(
            events.Ended(
                outcome=end.name, exit_code=int(end.exit_code), local_step=steps.local, durable_step=steps.durable
            )
        )

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _on_message(self, channel: Channel, received: Received) -> None:
        """Handle a message from any connection of this agent. Raises ChannelClosed."""
        match received.message:
            case messages.AskStatus():
                channel.send(self.status())
            case messages.AskDrill(in_s, end):
                self._on_drill(channel, in_s, end=end)
            case messages.Takeover():
                self._on_takeover(channel)
            case messages.Hello() if self._watching is not None:
                channel.send(messages.Refused("its checkpoints are watched (--watch): a Checkpointer is one too many"))
            case messages.Hello(generation=messages.GenerationInfo()) if self._outcome is not None:
                self._server.hang_up(channel)  # this agent is ending: a live trainer continues with another one
            case messages.Hello() as hello:
                self.trainer.greet(channel, hello, received.fds, leaving=self._drain.current is not None)
            case message if isinstance(message, messages.FromTrainer) and (rank := self._ranks.at(channel)) is not None:
                self._on_message_of_trainer(rank, message)  # from other connections it does not count

    def _on_message_of_trainer(self, rank: Rank, message: FromTrainer) -> None:
        """Handle a message from a trainer, including one that is read after its death."""
        match message:
            case Sealed():
                self._on_sealed(rank, message)
            case SignalReceived(signum):
                self._on_signal_of_trainer(signum)
            case _:
                self.trainer.on_message(rank, message)

    def _on_takeover(self, channel: Channel) -> None:
        """Hand the slots to another agent on this host, unless a trainer of ours is alive or about to start."""
        alive = self.trainer.holder_pid
        if alive is not None or self._restarts.pending or self.trainer.begins:
            self._server.refuse_takeover(channel, alive or os.getpid())
        elif self._outcome is None:  # else this agent is ending: the caller waits for the lock
            self._server.hand_over(channel)
            self._end(Outcome("superseded", ExitCode.SUPERSEDED))

    def _on_drill(self, channel: Channel, in_s: float, *, end: bool) -> None:
        over = self._outcome is not None
        saves_itself = self._watching is not None and self.trainer.child is not None
        notice = self._drain.rehearse(channel, in_s, trains=self._saves, saves_itself=saves_itself, over=over, end=end)
        if notice is not None:
            self._on_notice(notice)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def _request_if_due(self) -> None:
        try:
            self._requests.turn(self.trainer.attempt, attached=self.trainer.attached)
        except Uneven as err:
            self.trainer.telling.uneven(err)

    def _name_late_ranks(self) -> None:
        """Name ranks that do not come; without a notice, take back what is asked of all because of one of them."""
        trainer = self.trainer
        spawned = self._watching is None and trainer.child is not None and trainer.restarts == 0
        if self._lateness.turn(trainer.attempt, self._speeds.rates.step_s, spawned=spawned):
            self._requests.take_back()

    def _on_sealed(self, rank: Rank, sealed: Sealed) -> None:
        if sealed.index not in self._pipeline.pool:
            return
        self._journal.emit(
            events.Sealed(
                step=sealed.step,
                bytes=sealed.bytes,
                stall_s=sealed.stall_s,
                rank=rank.number if self._ranks.several else None,
            )
        )
        obsolete = self._ranks.is_obsolete(sealed)
        taken = None if obsolete else self._ranks.sealed(rank, sealed)
        if obsolete:
            self._ranks.drop(self._pipeline.refuse(sealed.index))
        elif taken is not None and taken.differences:
            self._void(sealed.index, taken)
        elif sealed.held:
            self._pipeline.hold_back(sealed.index, self._startup.generation)
        else:
            self._pipeline.take(sealed.index, self._startup.generation)
        rank.control.acknowledge(self._pipeline.sequence(rank.number))
        if taken is not None:
            self._speeds.sealed(taken.bytes, taken.copy_s)
            self._requests.taken(taken)
            if not taken.differences:
                self._drain.sealed(taken.step)
            if taken.changed:
                self.trainer.telling.stores()

    def _void(self, index: int, taken: Taken) -> None:
        """Drop a snapshot in which one rank's share stands for others that are not equal."""
        for difference in taken.differences:
            self._journal.emit(events.RanksDiffer(step=taken.step, tensor=difference.tensor, ranks=difference.ranks))
        self._ranks.drop(self._pipeline.void(index))

    def _on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint of a watched program, which was set aside."""
        if self._outcome is not None:
            return checkpoint.kept.let_go()
        record, kept = checkpoint.record, checkpoint.kept
        self._journal.emit(
            events.SetAside(
                step=record.step, name=record.name, bytes=kept.bytes, how=kept.how, seconds=checkpoint.seconds
            )
        )
        self._pipeline.take_files(checkpoint, self._startup.generation)
        self._restarts.reached(record.step)
        return None

    def _on_commit(self, steps: Steps) -> None:
        self._ranks.tell_steps(steps)
        drain, durable_at = self._drain.current, self._pipeline.durable_at
        wanted = bool(self._ranks.reasons)  # a requested snapshot is still to come, and has to become durable at once
        if drain is not None and durable_at is not None:
            drain.durable_at = max(drain.began_at, durable_at)
        elif self.trainer.attempt.finished_step is None and not wanted and self._pipeline.everything_durable:
            self._pipeline.set_urgent(False)
        self._warn_if_it_never_fits()
        self._journal.flush()

    def _warn_if_it_never_fits(self) -> None:
        if (warning := self._speeds.never_fits(self._notices.window_s)) is not None:
            self._journal.emit(warning)

    def _watch_step(self) -> None:
        """Measure how long a step takes, from the step number that the trainer writes."""
        step, now = self._ranks.trainer_step, time.monotonic()
        if step is None:
            return
        self._restarts.reached(step)
        self._speeds.reached(step, now)

    # ---- notices ----------------------------------------------------------------------------------------------------

    def _on_signal(self, signum: int) -> None:
        if self._outcome is not None:
            return
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            self._say("second Ctrl-C: exiting now")
            self._at_once = True
            self._stop_trainer()
            drain = self._drain.current
            superseded = drain is not None and drain.exit_code is ExitCode.SUPERSEDED
            code = ExitCode.SUPERSEDED if superseded else ExitCode.CTRL_C
            self._end(interrupted(code, self._facts()))
        elif signum == signal.SIGINT:
            self._begin_drain(Deadline.never(), ExitCode.CTRL_C)
        else:
            self._told_to_leave = True
            self._notices.received(signum)
            if not self.trainer.attempt.connected:
                self.trainer.signal(signum)  # a program without a Checkpointer gets the signal as usual

    def _on_signal_of_trainer(self, signum: int) -> None:
        """Handle a signal that reached the trainer, alone or together with the agent; it counts once."""
        if self._outcome is not None or not self.trainer.announces(signum):
            return
        if signum == signal.SIGINT:
            self._begin_drain(Deadline.never(), ExitCode.CTRL_C)
        else:
            self._told_to_leave = True
            self._notices.received(signum)

    def _on_notice(self, notice: Notice) -> None:
        if self._outcome is not None:
            return
        deadline = notice.deadline
        in_s = deadline.remaining_s if deadline is not None else None
        self._journal.emit(
            events.NoticeSeen(kind=notice.kind.value, source=notice.source, in_s=in_s, detail=notice.detail)
        )
        self._journal.flush()
        if notice.kind is NoticeKind.REBALANCE:
            self._ranks.reasons.add("rebalance")
            self._pipeline.save_newest_now()
        else:
            self._begin_drain(deadline or Deadline.after(self.settings.grace_s), ExitCode.INTERRUPTED)

    def _on_superseded(self, claim: Claim) -> None:
        """Drain as after a notice, without a restart: a newer generation waits for this one's last snapshot."""
        if self._outcome is not None or claim.generation <= self._startup.generation.number:
            return
        self._journal.emit(events.SupersededBy(generation=claim.generation, host=claim.host))
        self.trainer.telling.superseded()
        # No instance ends: the newer start waits as long as our journal shows that we live. Only a hang must not last.
        needs_s = self._drain.plan(Deadline.never(), trains=self._saves).needs_s
        self._begin_drain(Deadline.after(max(self.settings.handover_s, 2 * needs_s)), ExitCode.SUPERSEDED)

    def _begin_drain(self, deadline: Deadline, code: ExitCode) -> None:
        self._restarts.call_off()
        began = self._drain.current is None
        self._state.move(RunState.DRAINING)
        self._drain.begin(deadline, code, trains=self._saves)
        if began and self._watching is not None and code is ExitCode.CTRL_C:
            self._watching.interrupted()
        elif began and self._watching is not None:
            if self._watching.awaits_start:
                self.trainer.give_up()
            self._watching.leave(by_signal=self._told_to_leave or code is ExitCode.SUPERSEDED)
        elif began and code is not ExitCode.CTRL_C and not self._told_to_leave and not self.trainer.attempt.connected:
            self.trainer.signal(signal.SIGTERM)  # a program without a Checkpointer learns of it by the signal

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _on_began_again(self) -> None:
        self._state.move(RunState.STARTING)
        self._lateness.begin_again()

    def _on_trainer_lost(self) -> None:
        self._requests.forget()
        self._drain.call_off_drill("the program has ended")

    def _on_trainer_left(self, code: int | None) -> None:
        """Decide what follows the end of the trainer's process.

        Args:
            code: its exit code as a shell shows it; `None` for a crash of a trainer that is no child.
        """
        attempt = self.trainer.attempt
        self._pipeline.settle_held(counts=code == 0)
        self._watch_step()  # how far it got decides whether it is worth a restart
        self._journal.emit(events.TrainerLeft(code=code, step=self._step))
        if self._watching is not None:
            leaves = self._drain.current is not None or self._told_to_leave
            leaves_s = min(self._left_s, self.settings.grace_s) / 2 if leaves else None
            self._watching.ended(well=code == 0 and not leaves, is_last=code == 0 or leaves, leaves_s=leaves_s)
        if code == 0 and not attempt.connected:
            self._say("the program ended without ever creating a Checkpointer: nothing was saved")
        if self._drain.current is not None:
            self.trainer.left_as_told()
        elif self._told_to_leave:
            # The trainer got the signal as well, and ended before the poller reported what the signal means.
            self._begin_drain(Deadline.after(self.settings.grace_s), ExitCode.INTERRUPTED)
        if self._drain.current is not None or code in (0, ExitCode.CTRL_C) or not self._program.is_child:
            self._pipeline.save_newest_now()
        elif self._startup.finding is not Finding.FAILED:  # else the agent has told it why it cannot begin
            new = self._startup.finding is Finding.NOTHING and self._pipeline.sealed_step is None
            again = attempt.hopeless or (attempt.raised and new and attempt.first_step_at is None)
            self._restarts.after_crash(attempt, would_be_the_same=again)

    def _restart_if_due(self) -> None:
        """Restart the trainer in place: in a new generation, from the nearest copy of the newest snapshot."""
        if not self._restarts.due or not self._program.is_child or not self._is_looked_at:
            return
        self._restarts.call_off()
        self.trainer.begin_again(self._on_begun)

    def _finish_if_done(self) -> None:
        """Decide the outcome once no trainer runs and every sealed snapshot is stored, or the time is up."""
        self.trainer.note_if_gone()
        if self._drain.current is not None and self.trainer.begins:
            self.trainer.call_off()
        what = decide_end(self._standing())
        if what is Next.DISMISS:
            self._dismiss()
        elif what is Next.STOP:
            self._stop_trainer(self._left_s / 3)
            if self.trainer.child is None and not self._program.is_child:
                self.trainer.drop()
                self.trainer.give_up()
            what = decide_end(self._standing())
        if what is Next.END and self._outcome is None:
            end = outcome_of(self._facts())
            if end.why is not None:
                self._say(end.why)
            if self._watching is not None and (why := self._watching.why_not()):
                self._say(why)
            self._end(end)

    def _standing(self) -> Standing:
        drain, trainer, startup = self._drain.current, self.trainer, self._startup
        return Standing(
            over=trainer.attempt.over,
            begins=self._restarts.pending or trainer.begins,
            leaving=drain is not None,
            expired=drain is not None and drain.deadline.expired,
            in_vain=startup.awaiting or startup.unreachable or trainer.called_off,
            listens=trainer.listens,
            settled=self._is_looked_at and self._pipeline.idle and self._loop.nothing_posted,
        )

    def _facts(self) -> Facts:
        drain, attempt, startup, pipeline = self._drain.current, self.trainer.attempt, self._startup, self._pipeline
        return Facts(
            leaving=None if drain is None else drain.exit_code,
            exit_code=attempt.exit_code,
            connected=attempt.connected,
            finished=attempt.finished_step is not None or (self._watching is not None and drain is None),
            stopped_early=attempt.stopped_early,
            raised=attempt.raised,
            restored=attempt.restored or self._watching is not None,
            resumes=None if startup.point is None else str(startup.point.id),
            older=tuple(map(str, startup.older)),
            hopeless=attempt.hopeless,
            nothing_to_resume=startup.finding is Finding.NOTHING,
            refused=None if startup.error is None else startup.error.exit_code,
            durable_step=pipeline.steps.durable,
            everything_durable=pipeline.everything_durable,
            sealed=pipeline.sealed_step is not None,
            awaiting=startup.awaiting,
            only_here=startup.only_here,
        )

    def _dismiss(self) -> None:
        """Tell a trainer that is no child that there will be no resume point."""
        drain, startup = self._drain.current, self._startup
        if startup.error is None and self._ranks.connections and drain is not None:
            superseded = drain.exit_code is ExitCode.SUPERSEDED
            why = "a newer start has asked for the run" if superseded else "this host is shutting down"
            what = "the previous start handed over" if startup.awaiting else "the store answered"
            kind = Superseded if superseded else DeadlineExceeded
            startup.leave(kind(f"{why} before {what}; no training was done here"))

    def _stop_trainer(self, within_s: float = math.inf) -> None:
        """Stop the child, and start no other. Blocks for a few seconds, or for `within_s` if that is less."""
        self.trainer.stop(within_s)
        self._restarts.call_off()

    def _end(self, end: Outcome) -> None:
        """Set the outcome, unless it is set already. It is recorded in the store once no tier can commit any more."""
        self._outcome = self._outcome or end
        self._state.move(RunState.DONE)

    def _refuse(self, err: ConfigError) -> None:
        """Refuse the run because of what the store shows; if it has started already, stop the trainer and fail."""
        if not self._startup.generation.number:
            self._refusal = err
            return
        self._say(f"error: {err}")
        self._stop_trainer()
        self._end(Outcome("failed", err.exit_code))

    def _turn_away(self, why: ConfigError) -> None:
        """Tell a trainer that started this agent by itself why the run is refused. It may not have said hello yet."""
        if not self._program.is_child:
            self._startup.leave(why)
            self.trainer.await_hello()

    def _on_bug(self, err: BaseException) -> None:
        """Note an unexpected exception, from a thread's root. The agent ends; a live trainer starts another agent."""

        def note() -> None:
            self._bug = err

        self._loop.post(note)

    def _heartbeat(self) -> events.Heartbeat:
        return events.Heartbeat(step=self._step, durable_step=self._pipeline.steps.durable)
