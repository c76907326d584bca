"""Training: one program's training as a whole: what happens at a boundary, on leaving, on a resume, and at the end.

Owns the parts that a Checkpointer consists of, and every step that involves the agent. `loops.py` tells when there is
a boundary, `boundary.py` whether there is anything to do at it; `saving.py` and `staging/` take snapshots;
`resuming.py` restores one; `link.py` talks to the agent; `process.py` handles signals and the end of the process.

    snapshot:     the word has changed ─▶ capture ─▶ copy into the granted slot ─▶ seal     (the only stall)
    leaving:      ... ─▶ wait until it is durable, or the deadline has passed ─▶ SystemExit(75)
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from harness.core import messages, tree
from harness.errors import ExitCode, HarnessError, StateError
from harness.ipc.control_page import Command, TrainerSide
from harness.trainer.boundary import Boundary
from harness.trainer.distributed import gathered
from harness.trainer.distributed.claims import LocalSteps
from harness.trainer.hazards import Hazards
from harness.trainer.link import Link
from harness.trainer.loaders.known import Loaders
from harness.trainer.meeting import Meeting
from harness.trainer.process import Process
from harness.trainer.replay import Loop, Replay
from harness.trainer.resuming import (
    BEHIND_A_LOOP,
    ResumedFrom,
    Resumption,
    SmallState,
    misses_iterations,
    refill,
)
from harness.trainer.saving import Saving
from harness.trainer.staging.overlap import Overlap, before_updates
from harness.trainer.staging.stager import Stager
from harness.trainer.state.capture import EXTRA, Captured, capture
from harness.trainer.state.environment import settle_threads
from harness.trainer.state.extra import Extra, shared_in
from harness.trainer.state.kinds import optimizers_in
from harness.trainer.state.random_states import RandomStates
from harness.trainer.state.rng import capture_moment, capture_rng
from harness.trainer.state.unlisted import Unlisted
from harness.trainer.variables import Variables
from harness.trainer.voice import say, warn
from harness.trainer.witness import Witness

EXTRA_WARN_BYTES = 1_000_000
_unanswered: list[int] = []
"""A signal that announced an interruption to a training of this process which ended before it was answered."""


class Training:
    """The training of one program. Used from the thread that trains; signals and forks only set flags.

    Attributes:
        inert: whether it does nothing at all: switched off, closed, or in a forked child.
        closed: whether it has parted from the agent.
        interrupted: whether an interruption has ended the loop.
        signalled: whether a signal has announced an interruption.
        extra: the user's plain values.
        resumed_from: the snapshot that this start resumes; `None` for a new run.
        page: the control page, as the trainer sees it.
        witness: writes down what the program computes; `None` outside of a rehearsal.
        led_back: whether a body runs again that is to lead to the place of the snapshot.
    """

    def __init__(
        self,
        states: Mapping[str, Any],
        *,
        accumulate: int | None,
        on_interrupt: str,
        seed_workers: bool,
        inert: bool,
    ) -> None:
        """Begin at step 0, without an agent.

        Args:
            states: the states to capture, by name.
            accumulate: see `Checkpointer`.
            on_interrupt: see `Checkpointer`.
            seed_workers: see `Checkpointer`.
            inert: do nothing, ever.
        """
        if not inert:
            settle_threads()
        self.states = states
        self.inert = inert
        self._on_interrupt = on_interrupt
        self.interrupted = self.signalled = self.closed = self.led_back = False
        self.extra: dict[str, Any] = Extra()
        self._extra: dict[str, Any] | None = None
        self.resumed_from: ResumedFrom | None = None
        self.random = RandomStates(states)
        self.replay = Replay() if inert else Replay(self.random.take, self.random.set)
        self.hazards = Hazards(capture_moment, states, warn)
        self._refused: StateError | None = None
        self.sees_optimizers = bool(optimizers_in(states.values()))
        self.boundary = Boundary(accumulate=accumulate, sees_optimizers=self.sees_optimizers)
        self.loaders = Loaders(states, self.random, warn, seed_workers=seed_workers)
        self.unlisted = Unlisted(states, warn)
        self._finished = self._left_loop = self._stepped_told = self._told_shared = False
        self._wanted_at = 0.0
        self.page = TrainerSide(None)
        self.witness: Witness | None = None
        self._meeting: Meeting | None = None
        self._sharded: tuple[Any, ...] = ()
        self._local_steps = LocalSteps()
        self._hooks = [self._watch_optimizers()]

    def connect(self, link: Link, overlap: bool | None) -> None:
        """Learn from the agent which snapshot is resumed, and hook into the process. Blocks until that is known.

        Args:
            link: the connection to the agent.
            overlap: see `Checkpointer`.

        Raises:
            HarnessError: the run is over, or cannot be resumed. Nothing is left of this Training then.
        """
        try:
            self._connect(link, overlap)
        except HarnessError:
            self._unhook()
            link.close()
            raise

    def _connect(self, link: Link, overlap: bool | None) -> None:
        self.link, self.page = link, link.page
        self.stager = Stager(link, self.states, self._capture, self._small_state, Overlap(say))
        self.saving = Saving(link, self.stager, self.boundary, say)
        if link.rank.is_alone:
            self.boundary.every_steps = link.settings.every_steps
        else:  # the agent counts for all
            self._meeting = Meeting(link, self.saving, self.stager, self.boundary, say)
            link.when_told = self.boundary.look_soon
        self._overlaps = link.settings.overlap if overlap is None else overlap
        if self._overlaps:
            self._hooks.append(before_updates(lambda: self.settle(updating=True)))
        self._resumption = Resumption(link, self.states, self.unlisted, self.loaders, self.random, say)
        self._adopt(self._resumption.learn())
        os.environ["HARNESS_RUN_ID"] = link.generation.run_id
        os.environ["HARNESS_RESTARTS"] = str(link.restarts)
        self.process = Process(self.takes_signal, self._become_inert, self.at_exit, self.boundary.look_soon)
        self.process.attach()
        variables = Variables(self.states, self.loaders.given)
        self.witness = Witness.of(os.environ, variables, self._announce, link.rank.number)
        self.replay.begin()
        if self.replay.target is None:
            self.hazards.begin()
        if _unanswered:
            self.takes_signal(_unanswered.pop())

    def take_others(self) -> None:
        """Go on with other objects than before: `states` has got them under the same names."""
        self.unlisted.remove()
        self.unlisted = Unlisted(self.states, warn)
        self.unlisted.begin()
        self._resumption.take_others(self.unlisted)
        self._hooks[0].remove()
        self._hooks[0] = self._watch_optimizers()
        self.sees_optimizers = bool(optimizers_in(self.states.values()))
        self._look_for_sharded()

    # ---- boundaries -------------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Have FSDP2 give back what it keeps gathered. Each boundary begins with it: see `distributed/gathered.py`."""
        for module in self._sharded:
            module.reshard()

    def _look_for_sharded(self) -> None:
        if self._meeting is not None:
            self._sharded = gathered.sharded(self.states.values())
            self._local_steps.watch(self.states.values())

    def at_boundary(self, kind: str, *, entering: bool = False) -> None:
        """Act at a boundary where the control page has news or something is due: plan, take a snapshot, or leave.

        Args:
            kind: see `Position`.
            entering: whether this is the entry of a validation, and not the boundary that completes a step.
        """
        if self.inert:
            self.boundary.rest()
            return
        self._check_thread()
        self.process.go_on()
        self.process.keep_hold()
        self.settle()
        self.replay.place.kind = kind
        if self.witness is not None and kind != "evaluating":
            captured, have_stepped = self._capture(False), self.unlisted.gradients.have_stepped(self.states)
            self.witness.stepped(self.boundary.step, self.replay.place.epoch, capture_moment(), captured, have_stepped)
        if self.boundary.step and not self._stepped_told:
            self._stepped_told = True
            self.link.stepped(self.boundary.step, self._wanted_at)
            self.hazards.look_for_forgotten()
            self.hazards.look_for_inner()
        if not self.replay.leads_back(kind, counted=self.boundary.counted):
            self.leave_if_it_presses()  # the next boundary may be a place that the program can come back to
            return
        if self.signalled and self.process.has_handler(signal.SIGTERM):
            self.saving.wait_answer()  # the program's own handler may end it: this may be the last boundary
        overlap = self._overlaps and kind != "evaluating"
        if self._meeting is not None:
            may_take_long = kind == "evaluating" and self.boundary.overdue
            if self._meeting.attend(overlap=overlap, entering=entering, may_take_long=may_take_long):
                self.leave()
            return
        news = self.page.news
        decision = self.boundary.decide(news, self.stager.sealed_step)
        if decision.leaves:
            if decision.saves:
                self.saving.take_waiting()
            self.leave()
        else:
            # Not before a validation, which may swap weights and takes long: the snapshot is sealed first.
            self.saving.carry_out(decision, news, overlap=overlap)

    @property
    def has_news(self) -> bool:
        """Whether there is a command that was not acted upon yet, or, of several ranks, one for this very step."""
        boundary = self.boundary
        due = self._meeting is not None and boundary.step == boundary.next_due
        return due or self.page.news != boundary.seen

    @property
    def has_unsealed_steps(self) -> bool:
        """Whether a step was made in this process that no snapshot has yet."""
        begun = 0 if self.resumed_from is None else self.resumed_from.step
        return self.boundary.step > max(begun, self.stager.sealed_step or 0)

    def settle(self, *, updating: bool = False) -> None:
        """Finish the snapshot that a thread still copies. See `Saving.settle`."""
        if not self.inert:
            self.saving.settle(updating=updating)

    def leave_if_told(self) -> None:
        """Leave the loop if an interruption notice demands it. See `Checkpointer.safe_point`."""
        self.settle()
        if self._meeting is not None:
            self.leave_if_it_presses()
        elif not self.inert and self.page.news != self.boundary.seen and self.page.command.leaves:
            self.leave()

    def leave_if_it_presses(self) -> None:
        """Leave the loop from within a validation if the next boundary cannot save more than is sealed already.

        That is so if the newest sealed snapshot is of this very step, or if the agent does not want another one.
        """
        if self.inert or self.interrupted or self.page.news == self.boundary.seen:
            return None
        command = self.page.command
        self.settle()
        if self._meeting is not None and command is not Command.LEAVE:
            return self._meeting.stand()
        current = self.stager.sealed_step == self.boundary.step
        if command is Command.LEAVE or (command is Command.SNAPSHOT_AND_LEAVE and current):
            self.leave()
        return None

    def _check_thread(self) -> None:
        """Refuse a loop in another thread than the training. The thread that trains may wait for it: it is woken."""
        try:
            self.hazards.check_thread()
        except StateError as err:
            say(str(err))
            self._refused = err
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # its handler raises it
            raise

    def _announce(self, signum: int) -> None:
        self.takes_signal(signum)
        self.saving.wait_answer()

    def _capture(self, sure: bool, found: Callable[[Mapping[str, Tensor]], None] | None = None) -> Captured:
        alone, self.unlisted.gradients.completed = self.link.rank.is_alone, self.boundary.step
        return capture(
            self.states, self.unlisted, self.extra, sure=sure, alone=alone, local_steps=self._local_steps, found=found
        )

    def _small_state(self, step: int, captured: Captured) -> dict[str, Any]:
        self.hazards.look_for_unsaved(captured, self.unlisted.gradients)
        self._look_for_shared(captured)
        size = len(tree.dumps(captured.extra))
        if size > EXTRA_WARN_BYTES:
            warn(
                f"ckpt.extra is {size / 1e6:.1f} MB without its tensors, and is written as JSON with every snapshot: "
                "keep long lists of numbers in a tensor"
            )
        return {
            "step": step,
            "place": self.replay.position(self.replay.place.kind, counted=self.boundary.counted).to_tree(),
            "states": captured.tree,
            "rng": capture_rng(),
            **self.loaders.store().to_tree(),
            "extra": captured.extra,
            "extra_devices": captured.devices,
        }

    def _look_for_shared(self, captured: Captured) -> None:
        """Warn, once, if something in `extra` shares memory with a state, or with something else in it."""
        if self._told_shared or not self.extra:
            return
        of_states = {name: each for name, each in captured.tensors.items() if not name.startswith(EXTRA)}
        if (found := shared_in(self.extra, of_states)) is not None:
            self._told_shared = True
            warn(found)

    def request(self, *, wait: bool) -> None:
        """Request a snapshot at the next boundary. See `Checkpointer.save`."""
        if self.inert:
            return None
        if self._meeting is not None:
            return self._meeting.want(wait=wait)
        self.boundary.want(wait=wait, by_program=True)
        return self.link.send(messages.SaveWanted())

    def save_as_it_leaves(self, completed: int) -> None:
        """Take the snapshot that was requested in the iteration in which the program leaves an outermost loop.

        Its place is after that iteration. Nothing is raised: the loop's iterator is being closed.

        Args:
            completed: iterations of the loop, this one included.
        """
        self.page.completed(self.boundary.step)
        self.replay.leave_stage(completed)
        try:
            self._take_last()
            if self.boundary.take_up():
                self.saving.wait_durable()
        except StateError as err:
            self.boundary.take_up()
            self.link.forget(messages.SaveWanted)
            say(f"no snapshot was taken as the loop was left: {err}")

    def note_left(self) -> None:
        """Note that the program has left an outermost loop before its end: other ranks wait for this one in vain."""
        if self._meeting is not None:
            self._left_loop = True
            self.link.send(messages.LeftLoop(), repeat=True)

    # ---- beginning and leaving --------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Note that the program trains: an end that was announced before does not count."""
        if self.inert:
            return
        self.hazards.loop_begins()
        self.keep_extra()
        self.loaders.persistent.follow()
        self.process.hook()
        self.process.go_on()
        self.process.keep_hold()
        if self._left_loop:
            self._left_loop = False
            self.link.forget(messages.LeftLoop)
            self.link.send(messages.Training())
        if self._finished:
            self._finished = False
            self.link.forget(messages.Finished)
            self.link.send(messages.Training())

    def leave(self) -> None:
        """Wait until the newest snapshot is durable or the time is up, then leave the loop as `on_interrupt` says."""
        self.link.send(messages.Leaving(), repeat=True)
        self.saving.wait_durable()
        self.interrupted = True
        if self._on_interrupt == "return":
            return
        if not (self.link.rank.is_alone or self.link.detached):
            raise SystemExit(0)  # else torchrun would take it for a failure; `harness run` knows how the run ends
        asked = ExitCode.SUPERSEDED if self.link.superseded else ExitCode.INTERRUPTED
        raise SystemExit(int(ExitCode.CTRL_C if self.process.ctrl_c else asked))

    def finish(self, *, hold: bool = False) -> None:
        """Finish the run: take a final snapshot, and wait until it is durable.

        With `hold`, do not wait: the agent keeps the snapshot until it knows the exit code, and drops it if that is a
        failure. Only the end of the process showed that the loop was over, so a program that starts again could not
        reach that place.
        """
        self.boundary.overdue = False
        self.stager.holds = hold
        self.replay.place.kind = "end"
        if not self._take_last():
            if not self.link.gone:
                self.leave()  # the time was up, or the agent wants the loop left with the newest sealed snapshot
            return
        self._finished = True
        if self.witness is not None:
            self.witness.finished(self.boundary.step)
        self.link.send(messages.Finished(self.boundary.step), repeat=True)
        if not hold:
            self.saving.wait_durable()

    def _take_last(self) -> bool:
        """Take a snapshot where there is no later boundary; of several ranks, together with the others.

        Returns:
            Whether this step is sealed: false if the time was up, or if the agent wants the loop left without it.
        """
        self.reshard()
        if self._meeting is None:
            self.saving.take_waiting()
        elif self._meeting.attend_last():
            return False
        return self.stager.sealed_step == self.boundary.step

    def at_exit(self) -> None:
        """Part from the agent as the process ends.

        A loop without an end of its own gets its final snapshot here, at its last boundary.
        """
        if not self.inert:
            self._explain_failure()
            self._part(process_lives=False)

    def _explain_failure(self) -> None:
        """Say why a start may have failed that resumed behind a loop, and has made no step."""
        made = self.resumed_from is None or self.boundary.step > self.resumed_from.step
        if not made and self.replay.yielded_nothing and any(map(misses_iterations, self.process.errors)):
            say(BEHIND_A_LOOP)

    def close(self) -> None:
        """Part from the agent while the process continues. See `Checkpointer.close`."""
        if self.inert or self.closed:
            return
        if self.replay.in_epochs or self.replay.hands_out:
            raise StateError(
                "the Checkpointer is inside one of its loops: leave that loop before you close it or create another"
            )
        self._part(process_lives=True)
        self.process.detach()
        self._sharded = ()
        if self.signalled and not self.interrupted:
            _unanswered[:] = [signal.SIGTERM]
        self.inert = True
        self.page = TrainerSide(None)

    def _part(self, *, process_lives: bool) -> None:
        self.closed = True
        self.settle()
        crashed, failed, early = self.process.crashed, self.process.failed, False
        if process_lives:  # earlier errors of the process do not count
            crashed = failed = False
        trained = self.replay.restored and self.boundary.step > 0 and not self.interrupted and not self._finished
        held = not self.link.detached  # by the agent, which will know the exit code
        if trained and not self.link.gone and not (crashed if held else failed):
            if self._told_to_leave():
                if not failed:
                    self._leave_at_exit()
            elif self.replay.left_early(exiting=self.process.exiting):
                early = True
            else:
                self.finish(hold=held)
        self._unhook()
        self.loaders.persistent.leave()
        self.link.part(exception=failed, early=early, hopeless=self.process.hopeless, process_lives=process_lives)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.unlisted.remove()

    def _told_to_leave(self) -> bool:
        """Whether an interruption notice is in force, as far as this process knows. After a signal, ask the agent."""
        if self.signalled:
            self.saving.wait_answer()
        return self.signalled or self.page.command.leaves

    def _leave_at_exit(self) -> None:
        """End a program that exits by itself while a notice is in force: save, if at a boundary, and wait for it."""
        between_steps = not (self.boundary.optimizer_stepped or self.boundary.counted)
        at_boundary = self.replay.hand is not None and self.sees_optimizers and between_steps
        if at_boundary and self.page.command is Command.SNAPSHOT_AND_LEAVE:
            self.replay.place.kind = "step"
            self._take_last()
        self.link.send(messages.Leaving(), repeat=True)
        self.saving.wait_durable()

    # ---- restoring --------------------------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        """Whether the program is still on its way to the place of the snapshot that it resumes."""
        return self.replay.target is not None and not self.replay.restored

    def confirm(self) -> None:
        """Block until the tensors are here. If the snapshot was damaged, take over the one that is used instead."""
        if not self.inert and not self.replay.restored:
            self._adopt(self._resumption.confirm())

    def _adopt(self, small: SmallState | None) -> None:
        """Take over a snapshot's small state, before any tensor is here: `extra`, `resumed_from`, step and place."""
        if small is None:
            return
        self.resumed_from, self.boundary.step = small.resumed_from, small.step
        self.replay.aim(small.place)
        self.loaders.aim(small.loaders)
        refill(self.extra, self._resumption.extra_of(small))
        self._extra = None

    def keep_extra(self) -> None:
        """Note `extra` as the first loop begins: what is changed on the way to the place is dropped there."""
        if self.replaying and self._extra is None:
            self._extra = copy.deepcopy(self.extra)

    def lead_back(self, loop: Loop | None) -> None:
        """Prepare for a body that runs again up to the place of the snapshot. Blocks until all tensors are restored.

        The states are those of the snapshot already, so that what the body computes is near to what it was; at the
        place they are restored again.
        """
        body = self.replay.body_ahead(loop)
        if not self.led_back:
            ready = self._resumption.wait()
            if ready is not None:
                self._resumption.lead_back(ready)
            self.led_back = True
        self.boundary.step, self.replay.place.calls = body.step, body.calls
        if body.kind in ("steps", "hand") and body.moment is not None:
            self.random.set(body.moment)

    def miss(self) -> None:
        """Continue after a body that was to lead to the place of the snapshot, and did not."""
        say(
            "the snapshot was taken in the middle of a step, and the program has not come back to that place: it "
            "continues with the next step. This is not bit-identical if anything between that place and the end of the "
            "step mattered. A counter in a local variable may be the cause: see ckpt.enumerate and ckpt.step_count"
        )
        self.loaders.forget_inner()
        self.restore()

    def restore(self) -> None:
        """Restore the live state from the snapshot; without a snapshot, just begin. Blocks until it is restored."""
        if self.inert:
            self.replay.arrive(None)
            return
        self.process.hook()
        ready = self._resumption.wait()
        self._wanted_at = time.monotonic()
        small = None
        if ready is not None:
            self._adopt(self._resumption.confirm())
            small = self._resumption.make_live(ready)
            self.boundary.step = small.step
        self.unlisted.begin()
        self.boundary.counted = self.boundary.optimizer_stepped = False
        if small is not None and small.place.counted:
            self.boundary.resume_counted()
        if self._extra is not None:
            refill(self.extra, self._extra)
            self._extra = None
        self.replay.arrive(None if small is None else small.place)
        if ready is not None:
            seconds = time.monotonic() - self._wanted_at
            self.link.send(messages.Restored(ready.snapshot, self.boundary.step, seconds))
            self.link.drop_ready()
        self.page = self.link.page  # of the agent that found the snapshot; the first one may have died
        self.stager.begin()
        self._look_for_sharded()
        self.page.completed(self.boundary.step)
        self.boundary.look_soon()  # the first step plans the layout
        if self.witness is not None:
            self.boundary.always = True
            self.witness.resumed(self.boundary.step)

    # ---- the process ------------------------------------------------------------------------------------------------

    def _watch_optimizers(self) -> RemovableHandle:
        """Hook every optimizer's step, to note it: the end of its batch is a boundary."""
        boundary, hazards, gradients, inert = self.boundary, self.hazards, self.unlisted.gradients, self.inert
        local_steps = self._local_steps

        def stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            boundary.optimizer_stepped = True
            local_steps.note()
            if not (gradients.stepped(optimizer, boundary.step) or inert):
                hazards.note_stranger(optimizer, boundary.step)
            if hazards.stepped_in is None:
                hazards.note_step()

        return register_optimizer_step_post_hook(stepped)

    def takes_signal(self, signum: int) -> bool:
        """Return whether a signal is answered at the next boundary. Sets flags only: the agent decides what follows."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        if self.inert or self.link.gone or (signum == signal.SIGINT and not self.replay.loops):
            return False
        self.link.poke(signum)
        self.signalled |= signum != signal.SIGINT
        self.boundary.hurry()
        return True

    def _become_inert(self) -> None:
        """Switch this Checkpointer off in a forked child: no snapshots, no descriptors, no messages to the agent."""
        if not self.inert:
            self.inert = True
            self.page, self.boundary.seen = TrainerSide(None), 0
            self._sharded = ()
            self.link.close_in_child()
