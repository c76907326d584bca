"""Checkpointer: what the training loop sees.

Owns boundaries, the way through the program, and the way out. Which objects hold state and how is `state/`; where a
loader stands is `loaders/`; a snapshot is taken by `staging/` and made live again by `resuming.py`; the agent is
behind `link.py`, signals and the end of the process behind `process.py`.

    normal step:  the optimizer stepped ─▶ step += 1 ─▶ one word of the control page is as before ─▶ go on
    snapshot:     the word is new ─▶ capture ─▶ copy into the granted slot ─▶ seal          (the only stall)
    leaving:      ... ─▶ wait until it is durable, or the deadline has passed ─▶ SystemExit(75)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.config.settings import SOCKET_VARIABLE, check_alone, here, is_off, resolve
from harness.core import messages, tree
from harness.core.words import printable
from harness.errors import ExitCode, SnapshotCorrupt, StateError
from harness.ipc.control_page import Command, TrainerSide
from harness.ipc.slots import SlotRecord
from harness.trainer.link import Link, Ready
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.position import Position
from harness.trainer.process import CallStack, Process, script
from harness.trainer.resuming import Loaders, ResumedFrom, SmallState, make_live, record_of, refill
from harness.trainer.staging.overlap import Overlap, before_updates
from harness.trainer.staging.stager import Stager
from harness.trainer.state import capture
from harness.trainer.state.kinds import flatten
from harness.trainer.state.rng import capture_rng

EXTRA_WARN_BYTES = 1_000_000
_POLL_S = 0.02
_PROGRESS_S = 1.0
_ANSWER_S = 2.0  # from a signal to what the agent makes of it
_NEVER = -1


class Checkpointer:
    """Makes a training loop survive its instance. One per process; used from the thread that trains.

    Example:
        ckpt = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
        for epoch in ckpt.epochs(10):
            for batch in ckpt.batches(loader):
                train_one_step(batch)
    """

    def __init__(
        self,
        states_by_name: Mapping[str, Any] | None = None,
        /,
        *,
        loader: Any = None,
        accumulate: int | None = None,
        on_interrupt: Literal["exit", "return"] = "exit",
        seed_workers: bool = True,
        overlap: bool | None = None,
        run: str | None = None,
        store: str | None = None,
        local: str | None = None,
        every_s: float | None = None,
        every_steps: int | None = None,
        fresh: bool = False,
        continue_: bool = False,
        **states: Any,
    ) -> None:
        """Connect to the agent (or start one) and find out what is resumed. Blocks until that is known.

        Tensors are restored later, when the loop starts; `resumed_from` and `extra` are ready when this returns.

        Args:
            states_by_name: like `states`, for names that are taken by an argument: `Checkpointer({"store": …})`.
            loader: a DataLoader that the loop iterates over by itself, with `ckpt.step()` after each batch.
            accumulate: batches per optimizer step, where the optimizer's own steps are no sign (a GradScaler skips
                some).
            on_interrupt: "exit" leaves the loop by SystemExit(75); "return" ends it, with `interrupted` set.
            seed_workers: seed the RNG of DataLoader workers for each batch; without it, random numbers drawn in workers
                differ after a resume.
            overlap: copy what a torch optimizer owns while the next forward and backward run, and not at the boundary.
                For loops in which nothing but `optimizer.step()` changes those tensors; the first snapshots are
                compared, and it is switched off where that is not so. Without it, as the run's settings say.
            run: name of the run; without it the script's name. Only without `harness run`, as the next six.
            store: durable store; without it ./.harness.
            local: directory of the local tier.
            every_s: seconds between snapshots.
            every_steps: a snapshot each time the step is a multiple of this.
            fresh: start at step 0 although the run has snapshots.
            continue_: go on although the script stopped this run early, by leaving its outermost loop before its end.
            **states: what to capture, by name: anything with `state_dict` and `load_state_dict`, a torch.Generator, a
                numpy Generator or a random.Random.

        Raises:
            StateError: one of `states` cannot be captured; names it, and the remedy.
            ConfigError: no name for the run, a run that is finished, was stopped early or is being trained already; or
                more than one process (WORLD_SIZE).
            SnapshotCorrupt: the run has snapshots, and none can be used.
        """
        if accumulate is not None and accumulate < 1:
            raise ValueError("accumulate must be at least 1")
        self._inert = is_off(os.environ)
        if not self._inert:
            check_alone(os.environ)
        if on_interrupt not in ("exit", "return"):
            raise ValueError('on_interrupt is "exit" or "return"')
        self._states = flatten(_merged(states_by_name or {}, states))
        self._accumulate, self._on_interrupt = accumulate, on_interrupt
        self.step_count = 0
        self.interrupted = False
        self.extra: dict[str, Any] = {}
        self.resumed_from: ResumedFrom | None = None
        self._place = Position()
        self._target: Position | None = None
        self._restored = False
        self._loaders = Loaders(seed_workers=seed_workers)
        self._head_snapshot = ""
        self._every_steps: int | None = None
        self._evaluating = 0
        self._in_epochs = False
        self._handing_out = 0  # loops of ours inside those of epochs
        self._by_hand = False  # whether the outermost loop is one whose end nobody tells us
        self._optimizer_stepped = False
        self._sees_optimizers = any(_holds_optimizer(value) for value in self._states.values())
        self._overdue = False
        self._wait_after = False
        self._finished = False
        self._early = False  # whether the program is out of a loop of ours before its end, as far as that is known
        self._signalled = False
        self._seen = 0
        self._next_due = 0
        self._stepped_told = False
        self._wanted_at = 0.0
        self._page = TrainerSide(None)
        self._watch_optimizers()
        self._loader = None
        if loader is not None:
            self._loader = self._loaders.instrumented(loader, "loader")
            self._loader.hook_iter(self._iterate_hooked)
        if self._inert:
            return
        capture.check_encoding(
            capture.capture(self._states).tree
        )  # what cannot be stored is told now, not at the first step
        self._link = self._open_link(run, store, local, every_s, every_steps, fresh, continue_)
        self._stager = Stager(self._link, self._states, self._small_state, Overlap(_say))
        self._overlaps = self._link.settings.overlap if overlap is None else overlap
        if self._overlaps:
            before_updates(lambda: self._settle(updating=True))
        self._every_steps = self._link.settings.every_steps
        self._page = self._link.page
        self._learn_head()
        os.environ["HARNESS_RUN_ID"] = self._link.generation.run_id
        os.environ["HARNESS_RESTARTS"] = str(self._link.restarts)
        self._process = Process(self._takes_signal, self._become_inert, self._at_exit)
        self._process.on_sys_exit = self._look_soon
        self._process.hook()

    # ---- loops ------------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers 0 .. count-1, from where the run stopped. The end takes a final snapshot and waits for it."""
        stage = self._enter_stage()
        if self._over(stage):
            return
        first = 0
        if (target := self._target) is not None and not self._restored and target.stage == stage:
            if target.kind == "end":
                self._restore()
                first = self._place.iteration
            elif target.epoch is not None:
                first = target.epoch
        self._early, asked_from = True, CallStack.now()
        worked = False
        for epoch in range(first, count):
            place = self._place
            place.enter_epoch(epoch)
            self._in_epochs = True
            try:
                yield epoch
            except GeneratorExit:
                self._early = asked_from.is_left(CallStack.now())
                raise
            finally:
                self._in_epochs = False
            if self.interrupted:
                return
            self._check_reached(f"epoch {epoch}")
            worked |= bool(place.loop or place.evaluation or self._optimizer_stepped)
        if first < count and not worked and not self._inert:
            raise StateError(
                f"ckpt.epochs({count}) is over, and nothing was done in any epoch: were they drawn before the "
                "training, as list(ckpt.epochs(…)) does? Iterate over it while you train"
            )
        self._place.epoch = None
        self._end_stage(max(first, count))

    def batches(self, loader: Any) -> Iterator[Any]:
        """The loader's batches, from where the run stopped in this epoch; a boundary between any two of them.

        Inside `evaluating()`, and on a Checkpointer that is off, just the loader's batches.

        Raises:
            StateError: the loader's position cannot be restored exactly; says why, and the remedy.
        """
        if self._evaluating or self._inert:
            for batch in loader:
                self._leave_if_it_presses()
                yield batch
                if not self._evaluating:
                    self._after_batch("batches")
            return
        if self.interrupted:
            return
        loop = self._enter_loop()
        instrumented = self._loaders.instrumented(loader, f"loop-{self._place.stage}-{loop}")
        if self._skips(loop, "batches"):
            return
        yield from self._guarded(instrumented.iterate(), "batches")

    def steps(self, count: int) -> Iterator[int]:
        """Iteration numbers 0 .. count-1, from where the run stopped: for loops that draw their own data from RNG.

        Each iteration counts as one step.
        """
        outermost = not self._in_epochs
        stage = self._enter_stage() if outermost else self._place.stage
        if outermost and self._over(stage):
            return
        loop = self._enter_loop()
        first = 0
        if not self._restored and self._target is not None:
            target = self._target
            if outermost and target.kind == "end" and target.stage == stage:
                self._restore()
                first = self._place.iteration
            elif self._skips(loop, "steps"):
                return
            else:
                first = self._place.iteration
        self._restore_if_nothing_to()
        self._early, asked_from = outermost or self._early, CallStack.now()
        with self._hands_out():
            for iteration in range(first, count):
                try:
                    yield iteration
                except GeneratorExit:
                    now = CallStack.now()
                    self._early = asked_from.is_left(now) if outermost else self._early
                    raise
                self._place.iteration = iteration + 1
                self._optimizer_stepped = False
                self._count_step("steps")
                if self.interrupted:
                    return
        if outermost:
            self._end_stage(max(first, count))

    def resume(self) -> int:
        """Restore everything now, for a hand-written loop; the number of completed steps, 0 for a new run.

        The loop then calls `step()` after each of its steps.
        """
        if not self._inert and not self._restored:
            if self._target is not None and self._target.kind not in ("step", "end"):
                raise StateError(
                    f"the snapshot was taken in a loop of ckpt.{self._target.kind}; ckpt.resume() cannot go on there: "
                    "use the same loops as before, or --fresh"
                )
            self._restore()
        self._by_hand, self._early = True, False
        return self.step_count

    def step(self) -> None:
        """A boundary in a hand-written loop, after each step (or each batch: see `accumulate`). May leave the loop."""
        if self._inert:
            self._after_batch("step")
            return
        if self._in_epochs and self._loader is None:
            raise StateError(
                "ckpt.step() in ckpt.epochs() without loader=: the position within the epoch is not known. "
                "Use ckpt.batches(loader) or ckpt.steps(n), or pass Checkpointer(loader=loader)"
            )
        if not self._restored:
            if self._target is not None:
                raise StateError("call ckpt.resume() before the loop: there is a snapshot to go on from")
            self._restore()
        self._after_batch("step")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a validation phase. Inside, `batches` only hands out, and nothing is captured.

        Entering is a boundary between loops, as at the end of an epoch. Inside a loop it is none: that has its own.
        """
        place = self._place
        self._settle()
        if self._inside_a_loop:
            self._leave_if_it_presses()
        elif not self._inert and not self._evaluating and not self.interrupted:
            ordinal = place.evaluation
            place.evaluation += 1
            target = self._target
            here = (place.stage, place.epoch, ordinal + 1)
            if not self._restored and target is not None and target.in_evaluation(*here):
                self._restore()
            if self._restored and (self._page.news != self._seen or self._overdue):
                self._at_boundary("evaluating")
        self._evaluating += 1
        try:
            yield
        finally:
            self._evaluating -= 1

    def safe_point(self) -> None:
        """In a long phase without boundaries: leave, with the newest sealed snapshot, if a notice demands it.

        Never captures.
        """
        self._settle()
        if not self._inert and self._page.news != self._seen and self._page.command.leaves:
            self._leave()

    def _leave_if_it_presses(self) -> None:
        """In a validation: leave once there is nothing to gain by going on to the next boundary.

        That is when the newest sealed snapshot is of this very step, or when the agent does not want another any more.
        """
        if self._inert or self.interrupted or self._page.news == self._seen:
            return
        command = self._page.command
        self._settle()
        current = self._stager.sealed_step == self.step_count
        if command is Command.LEAVE or (command is Command.SNAPSHOT_AND_LEAVE and current):
            self._leave()

    def save(self, *, wait: bool = False) -> None:
        """Take a snapshot at the next boundary and make it durable; with `wait`, the loop waits for that there."""
        if self._inert:
            return
        self._overdue, self._next_due = True, self.step_count + 1
        self._wait_after |= wait
        self._link.send(messages.SaveWanted())

    @property
    def local_step(self) -> int | None:
        """The newest step that is committed on this machine; it dies with it."""
        return self._page.local_step

    @property
    def durable_step(self) -> int | None:
        """The newest step that is committed in the store; it survives."""
        return self._page.durable_step

    # ---- places -----------------------------------------------------------------------------------------------------

    def _enter_stage(self) -> int:
        """A new outermost loop begins."""
        self._confirm_target()
        place = self._place
        if self._in_epochs:
            raise StateError(
                "ckpt.epochs() inside ckpt.epochs(): put the inner loop into ckpt.batches() or ckpt.steps()"
            )
        place.enter_stage()
        self._by_hand = False
        self._go_on()
        return place.stage

    def _enter_loop(self) -> int:
        if not self._in_epochs:
            self._early = False  # whatever was left before: the program goes on
        self._go_on()
        self._optimizer_stepped = False  # between loops, that is: no sign for the first batch of this one
        self._place.loop += 1
        return self._place.loop

    def _go_on(self) -> None:
        """A loop begins: whatever was called the end was none."""
        if self._inert:
            return
        self._process.go_on()
        self._process.keep_hold()
        if self._finished:
            self._finished = False
            self._link.forget(messages.Finished)
            self._link.send(messages.Training())

    def _over(self, stage: int) -> bool:
        """Whether this outermost loop lies wholly before the place to resume."""
        target = self._target
        return self.interrupted or (not self._restored and target is not None and target.stage > stage)

    def _skips(self, loop: int, kind: str) -> bool:
        """Whether the loop that begins lies before the place to resume; restores everything if it *is* that place."""
        target = self._target
        if self._restored:
            return False
        if target is None:
            self._restore()
            return False
        if target.in_loop(self._place.stage, self._place.epoch, loop):
            if target.kind != kind:
                raise StateError(
                    f"the snapshot was taken in a loop of ckpt.{target.kind}, and this is ckpt.{kind}: the script's "
                    "loops differ from those that made it. Use the script as it was, or --fresh"
                )
            self._restore()
            return False
        if not self._in_epochs and (target.stage, target.loop) < (self._place.stage, loop):
            # A loop of the program's own has no end that would tell: it would run on, and train nothing.
            raise StateError(
                f"loop {loop} begins, and the place of the snapshot ({target.kind} {target.loop}) was not met: the "
                "script's loops differ from those that made it. Use the script as it was, or --fresh"
            )
        return True

    def _check_reached(self, where: str) -> None:
        if not self._restored and self._target is not None and not self._inert:
            raise StateError(
                f"{where} ended without reaching the place of the snapshot ({self._target.kind} {self._target.loop}): "
                "the script's loops differ from those that made it. Use the script as it was, or --fresh"
            )

    def _restore_if_nothing_to(self) -> None:
        if not self._restored and not self._inert and self._target is None:
            self._restore()

    def _end_stage(self, completed: int) -> None:
        """The last loop is over: a final snapshot, and nothing is left to do until it is durable."""
        self._place.iteration = completed
        self._early = False
        if self._inert or self.interrupted:
            return
        self._check_reached("the loop")
        self._restore_if_nothing_to()
        self._finish()

    # ---- boundaries -------------------------------------------------------------------------------------------------

    def _guarded(self, batches: Iterator[Any], kind: str) -> Iterator[Any]:
        """Hand out batches with a boundary after each. A `break` counts the batch, but is no boundary."""
        with self._hands_out():
            for batch in batches:
                try:
                    yield batch
                except GeneratorExit:
                    self._count_without_boundary()
                    self._early |= self._process.exiting
                    raise
                self._after_batch(kind)
                if self.interrupted:
                    return

    @contextlib.contextmanager
    def _hands_out(self) -> Iterator[None]:
        """Around the iterations of a loop of ours."""
        self._handing_out += 1
        try:
            yield
        finally:
            self._handing_out -= 1

    @property
    def _inside_a_loop(self) -> bool:
        """Whether what the program does now is part of an iteration, whose boundary is still to come or just over."""
        return bool(self._handing_out) or (self._by_hand and self._loader is None)

    def _iterate_hooked(self, instrumented: InstrumentedLoader) -> Iterator[Any]:
        """A plain `for batch in loader` of the loader that was given to the constructor."""
        if self._inert or self._evaluating:
            return instrumented.iterate()
        if self.interrupted:
            return iter(())
        self._confirm_target()
        self._by_hand = not self._in_epochs
        if self._skips(self._enter_loop(), "step"):
            return iter(())
        return self._handed_out(instrumented.iterate())

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same, until we leave: while they last, we are inside a loop."""
        with self._hands_out():
            for batch in batches:
                try:
                    yield batch
                except GeneratorExit:
                    self._early |= self._process.exiting
                    raise
                if self.interrupted:
                    return

    def _after_batch(self, kind: str) -> None:
        """One batch is done. The hot path: no system call, no lock, no clock."""
        if self._accumulate is not None:
            self._place.calls += 1
            if self._place.calls % self._accumulate:
                return
        elif self._sees_optimizers and not self._optimizer_stepped:
            return
        self._optimizer_stepped = False
        self._count_step(kind)

    def _count_step(self, kind: str) -> None:
        step = self.step_count = self.step_count + 1
        if self._page.completed(step) != self._seen or step == self._next_due:
            self._at_boundary(kind)

    def _count_without_boundary(self) -> None:
        if self._optimizer_stepped or (
            self._accumulate is not None and (self._place.calls + 1) % self._accumulate == 0
        ):
            self._optimizer_stepped = False
            self._place.calls += self._accumulate is not None
            self.step_count += 1

    def _at_boundary(self, kind: str) -> None:
        """Something is wanted, or it is time to look: plan, snapshot, leave."""
        if self._inert:
            self._next_due = _NEVER
            return
        self._process.go_on()
        self._process.keep_hold()
        self._settle()
        self._place.kind = kind
        if self.step_count and not self._stepped_told:
            self._stepped_told = True
            self._link.stepped(self.step_count, self._wanted_at)
        if self._signalled and self._process.has_handler(signal.SIGTERM):
            self._await_answer()  # the program may leave by itself now: there need not be another boundary
        news = self._page.news
        command = Command.of(news)
        if command.leaves:
            if command is Command.SNAPSHOT_AND_LEAVE:
                self._take_waiting(kind)
            self._leave()
            return
        if self._every_steps is not None and self.step_count % self._every_steps == 0:
            self._overdue |= self._stager.sealed_step != self.step_count
        if not self._stager.planned:
            self._stager.plan(self.step_count)
        sealed_before = self._stager.sealed_step == self.step_count
        # Not on the way into a validation, which may swap weights and lasts long: the snapshot is to be sealed first.
        overlap = self._overlaps and not self._wait_after and kind != "evaluating"
        asked = command is Command.SNAPSHOT and news != self._seen  # what is asked still was taken up before
        if self._wait_after:
            self._take_waiting(kind)
        if (asked or self._overdue) and self._take(kind, overlap=overlap):
            # The agent asks again only after a new seal: what this step has already is taken at the next one.
            self._overdue = asked and sealed_before
            if self._wait_after:
                self._wait_after = False
                self._wait_durable()
        elif asked:
            self._overdue = True
        self._seen = news
        self._next_due = self._following_due()

    def _following_due(self) -> int:
        if self._overdue or self._stager.unsettled:
            return self.step_count + 1
        if self._every_steps is not None:
            return (self.step_count // self._every_steps + 1) * self._every_steps
        return _NEVER

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def _take(self, kind: str, *, overlap: bool = False) -> bool:
        """Seal a snapshot of this place, if a slot is free. See `Stager.stage`."""
        self._place.kind = kind
        return self._stager.stage(self.step_count, overlap=overlap)

    def _settle(self, *, updating: bool = False) -> None:
        """See to the snapshot that a thread still copies, if there is one; take another if it has come to nothing."""
        if self._inert:
            return
        settled = False
        try:
            settled = self._stager.settle(self.step_count, updating=updating)
        finally:
            if not settled:  # by an error, too: the agent has asked, and asks again only after a seal
                self._overdue, self._next_due = True, self.step_count + 1

    def _small_state(self, step: int, states: dict[str, Any]) -> dict[str, Any]:
        try:
            extra = tree.dumps(self.extra)
        except StateError as err:
            raise StateError(f"ckpt.extra: {err}") from err
        if len(extra) > EXTRA_WARN_BYTES:
            warnings.warn(
                f"ckpt.extra is {len(extra) / 1e6:.1f} MB, and is written as JSON with every snapshot: "
                "put tensors into a state",
                stacklevel=2,
            )
        return {
            "step": step,
            "place": self._place.to_tree(),
            "states": states,
            "rng": capture_rng(),
            "loaders": self._loaders.positions(),
            "extra": self.extra,
        }

    def _take_waiting(self, kind: str) -> None:
        """Take a snapshot and wait for its slot: the loop is over, or the program waits for this snapshot anyway."""
        if not self._stager.planned:
            self._stager.plan(self.step_count)
        while not self._take(kind):
            if self._page.command is Command.LEAVE or self._link.gone or self._page.time_is_up:
                return
            time.sleep(_POLL_S)

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The instance is going away: wait until the newest snapshot is durable or time is up, then leave the loop."""
        self._link.send(messages.Leaving(), repeat=True)
        self._wait_durable()
        self.interrupted = True
        if self._on_interrupt == "return":
            return
        asked = ExitCode.SUPERSEDED if self._link.superseded else ExitCode.INTERRUPTED
        raise SystemExit(int(ExitCode.CTRL_C if self._process.ctrl_c else asked))

    def _told_to_leave(self) -> bool:
        """Whether a notice is in force, as far as it is known here."""
        if self._signalled:
            self._await_answer()
        return self._signalled or self._page.command.leaves

    def _await_answer(self) -> None:
        """Block until the agent has said what a signal means, for a moment at most."""
        give_up_at = time.monotonic() + _ANSWER_S
        while not self._page.command.leaves:
            if self._link.gone or time.monotonic() >= give_up_at:
                return
            time.sleep(_POLL_S)

    def _leave_at_exit(self) -> None:
        """The program ends by itself while a notice is in force: save what is at a boundary, and wait for it."""
        at_boundary = self._by_hand and self._loader is None and self._sees_optimizers and not self._optimizer_stepped
        if at_boundary and self._page.command is Command.SNAPSHOT_AND_LEAVE:
            self._take_waiting("step")
        self._link.send(messages.Leaving(), repeat=True)
        self._wait_durable()

    def _finish(self, *, hold: bool = False) -> None:
        """The end of the last loop: a final snapshot, made durable before anything else happens.

        With `hold`, the agent keeps it until it knows the exit code, and drops it where that is a failure: a program
        that begins again could not come to an end that only the end of its process has told.
        """
        self._overdue = False
        self._stager.holds = hold
        self._take_waiting("end")
        if self._stager.sealed_step != self.step_count:
            if not self._link.gone:
                self._leave()  # time was up, or the agent wants us out with what there is
            return
        self._finished = True
        self._link.send(messages.Finished(self.step_count), repeat=True)
        if not hold:
            self._wait_durable()

    def _wait_durable(self) -> None:
        """Block until the newest sealed snapshot is durable, the deadline has passed, or nobody can do it."""
        self._settle()
        step = self._stager.sealed_step
        if step is None:
            return
        say_at = time.monotonic() + _PROGRESS_S
        while not self._link.gone and not self._page.time_is_up:
            durable = self.durable_step
            if durable is not None and durable >= step:
                return
            if self._link.detached and time.monotonic() >= say_at:
                _say(f"step {step} is sealed, durable step is {durable}; waiting")
                say_at = time.monotonic() + 5 * _PROGRESS_S
            time.sleep(_POLL_S)

    # ---- restoring --------------------------------------------------------------------------------------------------

    def _learn_head(self) -> None:
        """Small state comes first: `extra`, `resumed_from` and the place are known before any tensor is here."""
        head = self._link.wait_head()
        if head is not None:
            self._adopt_head(head.snapshot, head.tier, head.record)

    def _adopt_head(self, snapshot: str, tier: str, record: SlotRecord) -> None:
        small = SmallState.of(snapshot, tier, record)
        self.resumed_from, self._target, self.step_count = small.resumed_from, small.place, small.step
        refill(self.extra, small.extra)
        self._head_snapshot = snapshot

    def _confirm_target(self) -> None:
        """Before a loop skips to a place: it must be that of what is restored, not of a newer one that is damaged."""
        if self._inert or self._restored or self._target is None:
            return
        ready = self._link.wait_ready()
        if ready is not None and ready.snapshot != self._head_snapshot and (record := ready.slot.record()) is not None:
            _say(f"snapshot {self._head_snapshot} turned out to be damaged; going on from {ready.snapshot} instead")
            self._adopt_head(ready.snapshot, ready.tier, record)

    def _restore(self) -> None:
        """Make the live state the snapshot's; without a snapshot, just begin."""
        self._restored = True
        if self._inert:
            return
        ready = self._link.wait_ready()
        self._wanted_at = time.monotonic()
        if ready is not None:
            self._restore_from(ready)
            seconds = time.monotonic() - self._wanted_at
            self._link.send(messages.Restored(ready.snapshot, self.step_count, seconds))
            self._link.drop_ready()
        elif self._head_snapshot:
            raise SnapshotCorrupt(
                f"snapshot {self._head_snapshot} was there when this program began, and now there is none: its `extra` "
                "and its place in the program are in use already, so nothing is trained. Start it again"
            )
        self._page = self._link.page  # of the agent that found it, which need not be the first
        self._stager.begin()
        self._page.completed(self.step_count)
        self._next_due = self.step_count + 1  # the first step plans the layout

    def _restore_from(self, ready: Ready) -> None:
        record = record_of(ready)
        if ready.snapshot != self._head_snapshot:
            _say(f"snapshot {self._head_snapshot} turned out to be damaged; going on from {ready.snapshot} instead")
            self._adopt_head(ready.snapshot, ready.tier, record)
        small = make_live(ready, record, self._states, _say)
        self._place, self.step_count = small.place, small.step
        self._loaders.restore(small.loaders, small.rng)

    # ---- the process ------------------------------------------------------------------------------------------------

    def _open_link(
        self,
        run: str | None,
        store: str | None,
        local: str | None,
        every_s: float | None,
        every_steps: int | None,
        fresh: bool,
        continue_: bool,
    ) -> Link:
        settings = None
        if not os.environ.get(SOCKET_VARIABLE):
            flags: dict[str, Any] = {
                "run": run,
                "store": store,
                "local": local,
                "every_s": every_s,
                "every_steps": every_steps,
                "fresh": fresh or None,
                "continue_": continue_ or None,
            }
            settings = resolve(flags, os.environ, here(), script=script())
        link = Link(settings, [sys.executable, *sys.argv], os.environ)
        if link.detached:
            _say(
                f"run {link.settings.run!r} in {link.settings.store}, without `harness run`: "
                "no restart in place, no early fetch, no exit-code mapping"
            )
        return link

    def _watch_optimizers(self) -> None:
        """Note every optimizer's step: it makes the end of its batch a boundary."""

        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            self._optimizer_stepped = True

        register_optimizer_step_post_hook(stepped)

    @property
    def _looping(self) -> bool:
        """Whether a boundary is still to come, as far as we know."""
        return self._in_epochs or bool(self._handing_out) or self._by_hand

    def _takes_signal(self, signum: int) -> bool:
        """Flag only: the agent decides what follows, at the next boundary."""
        if self._inert or self._link.gone or (signum == signal.SIGINT and not self._looping):
            return False
        self._link.poke(signum)
        self._signalled |= signum != signal.SIGINT
        self._seen = _NEVER
        return True

    def _become_inert(self) -> None:
        """In a forked child: no snapshots, no descriptors, no word to the agent."""
        if not self._inert:
            self._inert = True
            self._page, self._seen = TrainerSide(None), 0
            self._link.close_in_child()

    def _at_exit(self) -> None:
        """The process ends: a loop without an end of its own gets its final snapshot here, at its last boundary."""
        if self._inert:
            return
        self._settle()
        failed, early = self._process.failed, False
        trained = self._restored and self.step_count > 0 and not self.interrupted and not self._finished
        held = not self._link.detached  # by the agent, which will know the exit code
        if trained and not self._link.gone and not (self._process.crashed if held else failed):
            if self._told_to_leave():
                if not failed:
                    self._leave_at_exit()
            elif self._left_early:
                early = True
            else:
                self._finish(hold=held)
        self._link.part(exception=failed, early=early, hopeless=self._process.hopeless)

    @property
    def _left_early(self) -> bool:
        """Whether the program has left its outermost loop before its end.

        An iterator of epochs that nobody has closed between two epochs was kept by something that is through.
        """
        kept = self._in_epochs and not self._handing_out and not self._process.exiting
        return self._early and not kept

    def _look_soon(self) -> None:
        """The program calls sys.exit: should it make another step, it has caught that."""
        self._next_due = self.step_count + 1


def _merged(by_name: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    if twice := sorted(by_name.keys() & states.keys()):
        raise StateError(f"two states are named {twice[0]}: give one of them another name")
    return {**by_name, **states}


def _holds_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) or any(
        isinstance(inner, torch.optim.Optimizer) for inner in getattr(value, "__dict__", {}).values()
    )


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone: that is when saving matters most
        sys.stderr.write(f"harness: {printable(text)}\n")
        sys.stderr.flush()
