"""Checkpointer: what the training loop sees.

Owns the public calls and what is done at each of them: the loops, the boundary between two steps, the way out. Where
the program is in its loops is `replay.py`; whether there is anything to do at a boundary `boundary.py`; a snapshot is
taken by `saving.py` and `staging/`, and made live again by `resuming.py`; the agent is behind `link.py`, signals and
the end of the process behind `process.py`.

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
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from harness.config.settings import SOCKET_VARIABLE, check_alone, here, is_off, resolve
from harness.core import messages, tree
from harness.core.words import printable
from harness.errors import ConfigError, ExitCode, StateError
from harness.ipc.control_page import Command, TrainerSide
from harness.trainer.boundary import Boundary
from harness.trainer.link import Link
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.process import CallStack, Process, script
from harness.trainer.replay import Replay, Way
from harness.trainer.resuming import Loaders, ResumedFrom, Resumption, SmallState, refill
from harness.trainer.saving import Saving
from harness.trainer.staging.overlap import Overlap, before_updates
from harness.trainer.staging.stager import Stager
from harness.trainer.state import capture
from harness.trainer.state.kinds import flatten
from harness.trainer.state.rng import capture_rng

EXTRA_WARN_BYTES = 1_000_000


class Checkpointer:
    """Makes a training loop survive its instance. One at a time in a process; used from the thread that trains.

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
        link: Link | None = None,
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
            link: to an agent, where another is wanted than the run's own (tests).
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
        if on_interrupt not in ("exit", "return"):
            raise ValueError('on_interrupt is "exit" or "return"')
        self._inert = is_off(os.environ)
        if not self._inert:
            check_alone(os.environ)
        self._states = flatten(_merged(states_by_name or {}, states))
        self._on_interrupt = on_interrupt
        self.interrupted = False
        self.extra: dict[str, Any] = {}
        self.resumed_from: ResumedFrom | None = None
        self._replay = Replay()
        self._sees_optimizers = any(_holds_optimizer(value) for value in self._states.values())
        self._boundary = Boundary(accumulate=accumulate, sees_optimizers=self._sees_optimizers)
        self._loaders = Loaders(seed_workers=seed_workers)
        self._evaluating = 0
        self._finished = self._signalled = self._closed = self._stepped_told = False
        self._wanted_at = 0.0
        self._page = TrainerSide(None)
        self._loader = None
        if loader is not None:
            self._loader = self._loaders.instrumented(loader, "loader")
            self._loader.hook_iter(self._iterate_hooked)
        self._hooks = [self._watch_optimizers()]
        if self._inert:
            return
        capture.check_encoding(capture.capture(self._states).tree)  # tell now what cannot be stored, not at a step
        _close_the_one_before(anywhere=link is not None)
        if link is None:
            options = {"run": run, "store": store, "local": local, "every_s": every_s, "every_steps": every_steps}
            link = _open_link(options | {"fresh": fresh or None, "continue_": continue_ or None})
        self._connect(link, overlap)
        _newest[:] = [weakref.ref(self)]

    def _connect(self, link: Link, overlap: bool | None) -> None:
        self._link, self._page = link, link.page
        self._boundary.every_steps = link.settings.every_steps
        self._stager = Stager(link, self._states, self._small_state, Overlap(_say))
        self._saving = Saving(link, self._stager, self._boundary, _say)
        self._overlaps = link.settings.overlap if overlap is None else overlap
        if self._overlaps:
            self._hooks.append(before_updates(lambda: self._settle(updating=True)))
        self._resumption = Resumption(link, self._states, self._loaders, _say)
        self._adopt(self._resumption.learn())
        os.environ["HARNESS_RUN_ID"] = link.generation.run_id
        os.environ["HARNESS_RESTARTS"] = str(link.restarts)
        self._process = Process(self._takes_signal, self._become_inert, self._at_exit, self._boundary.look_soon)
        self._process.attach()

    # ---- loops ------------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers 0 .. count-1, from where the run stopped. The end takes a final snapshot and waits for it."""
        way, replay = self._enter_stage(), self._replay
        if way is Way.SKIP:
            return
        first = replay.first_epoch
        if way is Way.RESTORE:
            self._restore()
            first = replay.place.iteration
        replay.early, asked_from = True, CallStack.now()
        worked = False
        for epoch in range(first, count):
            with replay.epoch(epoch):
                try:
                    yield epoch
                except GeneratorExit:
                    if not self._closed:
                        replay.early = asked_from.is_left(CallStack.now())
                    raise
            if self.interrupted:
                return
            replay.check_reached(f"epoch {epoch}")
            worked |= replay.worked or self._boundary.optimizer_stepped
        if first < count and not worked and not self._inert:
            raise StateError(
                f"ckpt.epochs({count}) is over, and nothing was done in any epoch: were they drawn before the "
                "training, as list(ckpt.epochs(…)) does? Iterate over it while you train"
            )
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
        way = self._enter_loop("batches")
        instrumented = self._loaders.instrumented(loader, f"loop-{self._replay.place.stage}-{self._replay.place.loop}")
        if way is Way.SKIP:
            return
        if way is Way.RESTORE:
            self._restore()
        yield from self._guarded(instrumented.iterate(), "batches")

    def steps(self, count: int) -> Iterator[int]:
        """Iteration numbers 0 .. count-1, from where the run stopped: for loops that draw their own data from RNG.

        Each iteration counts as one step.
        """
        replay = self._replay
        outermost = not replay.in_epochs
        way = self._enter_stage() if outermost else Way.RUN
        if way is Way.SKIP:
            return
        inner = self._enter_loop("steps", at_its_end=way is Way.RESTORE)
        if inner is Way.SKIP:
            return
        first = 0
        if inner is Way.RESTORE:
            self._restore()
            first = replay.place.iteration if replay.target is not None else 0
        replay.early, asked_from = outermost or replay.early, CallStack.now()
        with replay.handing_out():
            for iteration in range(first, count):
                try:
                    yield iteration
                except GeneratorExit:
                    if outermost and not self._closed:
                        replay.early = asked_from.is_left(CallStack.now())
                    raise
                replay.place.iteration = iteration + 1
                self._boundary.optimizer_stepped = False
                self._count_step("steps")
                if self.interrupted:
                    return
        if outermost:
            self._end_stage(max(first, count))

    def resume(self) -> int:
        """Restore everything now, for a hand-written loop; the number of completed steps, 0 for a new run.

        The loop then calls `step()` after each of its steps.
        """
        if self._replay.begin_by_hand() is Way.RESTORE:
            self._restore()
        return self.step_count

    def step(self) -> None:
        """A boundary in a hand-written loop, after each step (or each batch: see `accumulate`). May leave the loop."""
        if self._inert:
            self._after_batch("step")
            return
        if self._replay.in_epochs and self._loader is None:
            raise StateError(
                "ckpt.step() in ckpt.epochs() without loader=: the position within the epoch is not known. "
                "Use ckpt.batches(loader) or ckpt.steps(n), or pass Checkpointer(loader=loader)"
            )
        if not self._replay.restored:
            if self._replay.target is not None:
                raise StateError("call ckpt.resume() before the loop: there is a snapshot to go on from")
            self._restore()
        self._after_batch("step")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a validation phase. Inside, `batches` only hands out, and nothing is captured.

        Entering is a boundary between loops, as at the end of an epoch. Inside a loop it is none: that has its own.
        """
        self._settle()
        if self._replay.hands_out or (self._replay.by_hand and self._loader is None):
            self._leave_if_it_presses()
        elif not self._inert and not self._evaluating and not self.interrupted:
            if self._replay.enter_evaluation() is Way.RESTORE:
                self._restore()
            if self._replay.restored and (self._page.news != self._boundary.seen or self._boundary.overdue):
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
        if not self._inert and self._page.news != self._boundary.seen and self._page.command.leaves:
            self._leave()

    def save(self, *, wait: bool = False) -> None:
        """Take a snapshot at the next boundary and make it durable; with `wait`, the loop waits for that there."""
        if self._inert:
            return
        self._boundary.want(wait=wait)
        self._link.send(messages.SaveWanted())

    def close(self) -> None:
        """End it before its process does, once its newest snapshot is durable: another Checkpointer can be made then.

        A loop by hand ends with this. Signals, `sys.exit` and optimizers are as they were before. Idempotent.

        Raises:
            StateError: it is inside one of its loops.
        """
        if self._inert or self._closed:
            return
        if self._replay.in_epochs or self._replay.hands_out:
            raise StateError("a Checkpointer is in the middle of its loop: leave that first")
        self._part(process_lives=True)
        self._process.detach()
        self._inert = True
        self._page = TrainerSide(None)

    @property
    def step_count(self) -> int:
        """Completed optimizer steps."""
        return self._boundary.step

    @property
    def local_step(self) -> int | None:
        """The newest step that is committed on this machine; it dies with it."""
        return self._page.local_step

    @property
    def durable_step(self) -> int | None:
        """The newest step that is committed in the store; it survives."""
        return self._page.durable_step

    # ---- loops begin and end ----------------------------------------------------------------------------------------

    def _enter_stage(self) -> Way:
        """A new outermost loop begins. SKIP where the program was to leave, too."""
        if not self._inert and not self._replay.restored:
            # The loops are passed over up to the place of what is restored, not of a newer snapshot that is damaged.
            self._adopt(self._resumption.confirm())
        way = self._replay.enter_stage()
        self._go_on()
        return Way.SKIP if self.interrupted else way

    def _enter_loop(self, kind: str, *, at_its_end: bool = False) -> Way:
        """A loop begins, whose end is where the snapshot was taken if `at_its_end`."""
        self._go_on()
        self._boundary.optimizer_stepped = False  # between loops, that is: no sign for the first batch of this one
        return self._replay.enter_loop(kind, at_its_end=at_its_end)

    def _go_on(self) -> None:
        """A loop begins: whatever was called the end was none."""
        if self._inert:
            return
        self._process.hook()
        self._process.go_on()
        self._process.keep_hold()
        if self._finished:
            self._finished = False
            self._link.forget(messages.Finished)
            self._link.send(messages.Training())

    def _end_stage(self, completed: int) -> None:
        """The last loop is over: a final snapshot, and nothing is left to do until it is durable."""
        self._replay.end_stage(completed)
        if self._inert or self.interrupted:
            return
        self._replay.check_reached("the loop")
        if not self._replay.restored:
            self._restore()
        self._finish()

    def _guarded(self, batches: Iterator[Any], kind: str) -> Iterator[Any]:
        """Hand out batches with a boundary after each. A `break` counts the batch, but is no boundary."""
        with self._replay.handing_out():
            for batch in batches:
                try:
                    yield batch
                except GeneratorExit:
                    self._boundary.broken_off(self._replay.place)
                    self._replay.early |= self._process.exiting
                    raise
                self._after_batch(kind)
                if self.interrupted:
                    return

    def _iterate_hooked(self, instrumented: InstrumentedLoader) -> Iterator[Any]:
        """A plain `for batch in loader` of the loader that was given to the constructor."""
        if self._inert or self._evaluating:
            return instrumented.iterate()
        if self.interrupted:
            return iter(())
        if not self._replay.restored:
            self._adopt(self._resumption.confirm())
        self._replay.by_hand = not self._replay.in_epochs
        way = self._enter_loop("step")
        if way is Way.SKIP:
            return iter(())
        if way is Way.RESTORE:
            self._restore()
        return self._handed_out(instrumented.iterate())

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same, until we leave: while they last, we are inside a loop."""
        with self._replay.handing_out():
            for batch in batches:
                try:
                    yield batch
                except GeneratorExit:
                    self._replay.early |= self._process.exiting
                    raise
                if self.interrupted:
                    return

    # ---- boundaries -------------------------------------------------------------------------------------------------

    def _after_batch(self, kind: str) -> None:
        """One batch is done. The hot path: no system call, no lock, no clock."""
        if self._boundary.ends_step(self._replay.place):
            self._count_step(kind)

    def _count_step(self, kind: str) -> None:
        boundary = self._boundary
        boundary.step = step = boundary.step + 1
        if self._page.completed(step) != boundary.seen or step == boundary.next_due:
            self._at_boundary(kind)

    def _at_boundary(self, kind: str) -> None:
        """Something is wanted, or it is time to look: plan, snapshot, leave."""
        if self._inert:
            self._boundary.rest()
            return
        self._process.go_on()
        self._process.keep_hold()
        self._settle()
        self._replay.place.kind = kind
        if self.step_count and not self._stepped_told:
            self._stepped_told = True
            self._link.stepped(self.step_count, self._wanted_at)
        if self._signalled and self._process.has_handler(signal.SIGTERM):
            self._saving.wait_answer()  # the program may leave by itself now: there need not be another boundary
        news = self._page.news
        decision = self._boundary.decide(news, self._stager.sealed_step)
        if decision.leaves:
            if decision.saves:
                self._saving.take_waiting()
            self._leave()
        else:
            # Not on the way into a validation, which may swap weights and lasts long: it is to be sealed first.
            self._saving.carry_out(decision, news, overlap=self._overlaps and kind != "evaluating")

    def _settle(self, *, updating: bool = False) -> None:
        if not self._inert:
            self._saving.settle(updating=updating)

    def _leave_if_it_presses(self) -> None:
        """In a validation: leave once there is nothing to gain by going on to the next boundary.

        That is when the newest sealed snapshot is of this very step, or when the agent does not want another any more.
        """
        if self._inert or self.interrupted or self._page.news == self._boundary.seen:
            return
        command = self._page.command
        self._settle()
        current = self._stager.sealed_step == self.step_count
        if command is Command.LEAVE or (command is Command.SNAPSHOT_AND_LEAVE and current):
            self._leave()

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
            "place": self._replay.place.to_tree(),
            "states": states,
            "rng": capture_rng(),
            "loaders": self._loaders.positions(),
            "extra": self.extra,
        }

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The instance is going away: wait until the newest snapshot is durable or time is up, then leave the loop."""
        self._link.send(messages.Leaving(), repeat=True)
        self._saving.wait_durable()
        self.interrupted = True
        if self._on_interrupt == "return":
            return
        asked = ExitCode.SUPERSEDED if self._link.superseded else ExitCode.INTERRUPTED
        raise SystemExit(int(ExitCode.CTRL_C if self._process.ctrl_c else asked))

    def _finish(self, *, hold: bool = False) -> None:
        """The end of the last loop: a final snapshot, made durable before anything else happens.

        With `hold`, the agent keeps it until it knows the exit code, and drops it where that is a failure: a program
        that begins again could not come to an end that only the end of its process has told.
        """
        self._boundary.overdue = False
        self._stager.holds = hold
        self._replay.place.kind = "end"
        self._saving.take_waiting()
        if self._stager.sealed_step != self.step_count:
            if not self._link.gone:
                self._leave()  # time was up, or the agent wants us out with what there is
            return
        self._finished = True
        self._link.send(messages.Finished(self.step_count), repeat=True)
        if not hold:
            self._saving.wait_durable()

    def _at_exit(self) -> None:
        """The process ends: a loop without an end of its own gets its final snapshot here, at its last boundary."""
        if not self._inert:
            self._part(process_lives=False)

    def _part(self, *, process_lives: bool) -> None:
        self._closed = True
        self._settle()
        crashed, failed, early = self._process.crashed, self._process.failed, False
        if process_lives:  # whatever came before in it
            crashed = failed = False
        trained = self._replay.restored and self.step_count > 0 and not self.interrupted and not self._finished
        held = not self._link.detached  # by the agent, which will know the exit code
        if trained and not self._link.gone and not (crashed if held else failed):
            if self._told_to_leave():
                if not failed:
                    self._leave_at_exit()
            elif self._replay.left_early(exiting=self._process.exiting):
                early = True
            else:
                self._finish(hold=held)
        for hook in self._hooks:
            hook.remove()
        self._link.part(exception=failed, early=early, hopeless=self._process.hopeless, process_lives=process_lives)

    def _told_to_leave(self) -> bool:
        """Whether a notice is in force, as far as it is known here."""
        if self._signalled:
            self._saving.wait_answer()
        return self._signalled or self._page.command.leaves

    def _leave_at_exit(self) -> None:
        """The program ends by itself while a notice is in force: save what is at a boundary, and wait for it."""
        by_hand = self._replay.by_hand and self._loader is None
        at_boundary = by_hand and self._sees_optimizers and not self._boundary.optimizer_stepped
        if at_boundary and self._page.command is Command.SNAPSHOT_AND_LEAVE:
            self._replay.place.kind = "step"
            self._saving.take_waiting()
        self._link.send(messages.Leaving(), repeat=True)
        self._saving.wait_durable()

    # ---- restoring --------------------------------------------------------------------------------------------------

    def _adopt(self, small: SmallState | None) -> None:
        """Small state comes first: `extra`, `resumed_from` and the place are known before any tensor is here."""
        if small is None:
            return
        self.resumed_from, self._boundary.step = small.resumed_from, small.step
        self._replay.aim(small.place)
        refill(self.extra, small.extra)

    def _restore(self) -> None:
        """Make the live state the snapshot's; without a snapshot, just begin."""
        if self._inert:
            self._replay.arrive(None)
            return
        self._process.hook()
        ready = self._resumption.wait()
        self._wanted_at = time.monotonic()
        small = None
        if ready is not None:
            self._adopt(self._resumption.confirm())
            small = self._resumption.make_live(ready)
            self._boundary.step = small.step
        self._replay.arrive(None if small is None else small.place)
        if ready is not None:
            seconds = time.monotonic() - self._wanted_at
            self._link.send(messages.Restored(ready.snapshot, self.step_count, seconds))
            self._link.drop_ready()
        self._page = self._link.page  # of the agent that found it, which need not be the first
        self._stager.begin()
        self._page.completed(self.step_count)
        self._boundary.look_soon()  # the first step plans the layout

    # ---- the process ------------------------------------------------------------------------------------------------

    def _watch_optimizers(self) -> RemovableHandle:
        """Note every optimizer's step: it makes the end of its batch a boundary."""
        boundary = self._boundary

        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            boundary.optimizer_stepped = True

        return register_optimizer_step_post_hook(stepped)

    def _takes_signal(self, signum: int) -> bool:
        """Flag only: the agent decides what follows, at the next boundary."""
        if self._inert or self._link.gone or (signum == signal.SIGINT and not self._replay.loops):
            return False
        self._link.poke(signum)
        self._signalled |= signum != signal.SIGINT
        self._boundary.hurry()
        return True

    def _become_inert(self) -> None:
        """In a forked child: no snapshots, no descriptors, no word to the agent."""
        if not self._inert:
            self._inert = True
            self._page, self._boundary.seen = TrainerSide(None), 0
            self._link.close_in_child()


_newest: list[weakref.ref[Checkpointer]] = []
"""The Checkpointer of this process that was made last."""


def _close_the_one_before(*, anywhere: bool) -> None:
    """A process has one at a time; `anywhere`: whatever started the process.

    Raises:
        ConfigError: there was one, and `harness run` has started this process: its run has one training.
        StateError: it is inside one of its loops.
    """
    before = _newest[0]() if _newest else None
    if before is None:
        return
    if os.environ.get(SOCKET_VARIABLE) and not anywhere:
        raise ConfigError(
            "`harness run` runs one training, and this program has had its Checkpointer: use that one for all loops, "
            "or start the program without `harness run` and name each training with Checkpointer(run=…)"
        )
    before.close()


def _open_link(options: Mapping[str, Any]) -> Link:
    """To the agent of `harness run`, or to one that is started with these options."""
    settings = None
    if not os.environ.get(SOCKET_VARIABLE):
        settings = resolve(options, os.environ, here(), script=script())
    link = Link(settings, [sys.executable, *sys.argv], os.environ)
    if link.detached:
        _say(
            f"run {link.settings.run!r} in {link.settings.store}, without `harness run`: "
            "no restart in place, no early fetch, no exit-code mapping"
        )
    return link


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
