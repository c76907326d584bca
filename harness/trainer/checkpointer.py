"""Checkpointer: the public API that a training loop calls.

Owns the public calls and what each of them does: the loops, the boundary between two steps, and leaving the loop.
`replay.py` knows where the program is in its loops; `boundary.py` decides whether there is anything to do at a
boundary; `saving.py` and `staging/` take snapshots; `resuming.py` restores one; `link.py` talks to the agent;
`process.py` handles signals and the end of the process.

    normal step:  the optimizer stepped ─▶ step += 1 ─▶ one word of the control page is unchanged ─▶ continue
    snapshot:     the word has changed ─▶ capture ─▶ copy into the granted slot ─▶ seal     (the only stall)
    leaving:      ... ─▶ wait until it is durable, or the deadline has passed ─▶ SystemExit(75)
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import signal
import sys
import threading
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
from harness.trainer.batches import Batches
from harness.trainer.boundary import Boundary
from harness.trainer.hazards import Hazards
from harness.trainer.link import Link
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.process import CallStack, Process, script
from harness.trainer.replay import Loop, Replay, Way
from harness.trainer.resuming import Loaders, ResumedFrom, Resumption, SmallState, refill
from harness.trainer.saving import Saving
from harness.trainer.staging.overlap import Overlap, before_updates
from harness.trainer.staging.stager import Stager
from harness.trainer.state import capture
from harness.trainer.state.kinds import flatten
from harness.trainer.state.rng import capture_moment, capture_rng, restore_rng

EXTRA_WARN_BYTES = 1_000_000
_WATCHED_FETCHES = 2  # of the first batch a sampler draws the order of all
_LATE_VALIDATION = (
    "ckpt.evaluating() comes after ckpt.step() here: a run that is interrupted between the two continues with the next "
    "step, without that validation. Validate before ckpt.step()"
)


class Checkpointer:
    """Saves the state of a training loop, and resumes the loop after an interruption, on any machine.

    A process has one Checkpointer at a time; call it only from the thread that trains. Another process, the agent,
    writes snapshots to disk and to the store. The loop normally waits only while its state is copied into shared
    memory, and for durability before it leaves or ends. With `HARNESS=off` in the environment nothing is saved or
    restored, and the loops only iterate.

    A boundary is the point after a step where a snapshot may be taken. After an interruption notice, the loop is left
    at a boundary, once its newest snapshot is durable or the deadline has passed: by `SystemExit` with code 75 (130
    after Ctrl-C, 73 if a newer start of the run took over), or as `on_interrupt` says. A boundary raises `NoSpace` if
    there is no room for a snapshot, and `StateError` if something in the states or in `extra` cannot be stored.

    A resumed script runs again from the top. Loops before the place of the snapshot yield nothing; the loop in which
    the snapshot was taken restores it when it begins, and continues there. Restoring blocks until all tensors are read
    and copied. It raises `StateError` if the states or the loops differ from those of the snapshot, `SnapshotCorrupt`
    if no snapshot can be used any more, and `AgentGone` if the agent died and cannot be replaced.

    Attributes:
        resumed_from: `generation`, `step` and `tier` of the snapshot that this start resumes; `None` for a new run. It
            changes when the loop begins, if that snapshot turns out to be damaged and another one is used.
        extra: a dict for the user's plain values, saved as JSON with every snapshot. It has the resumed snapshot's
            values when the constructor returns. They are restored in place: dicts and lists stay the same objects.
        interrupted: whether an interruption has ended the loop. Check it after the loop with `on_interrupt="return"`.

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
        """Connect to the agent (or start one) and find out which snapshot is resumed. Blocks until that is known.

        Tensors are restored later, when the loop starts; `resumed_from` and `extra` are ready when this returns. Sets
        `HARNESS_RUN_ID` and `HARNESS_RESTARTS` in `os.environ`. Closes the previous Checkpointer of this process first.

        Args:
            states_by_name: like `states`, for a name that is also an argument here: `Checkpointer({"store": …})`.
            loader: a DataLoader that the loop iterates over directly, with `ckpt.step()` after each batch.
            accumulate: batches per step, if the steps of the optimizer cannot be counted (a GradScaler skips some).
                Without it, a step ends with each batch in which an optimizer stepped, or, if the states hold no
                torch optimizer, with each batch.
            on_interrupt: "exit" leaves the loop by SystemExit(75); "return" ends the loop and sets `interrupted`.
            seed_workers: seed the RNG of DataLoader workers for each batch. Without it, random numbers that workers
                draw differ after a resume.
            overlap: copy the tensors that a torch optimizer owns during the next forward and backward, instead of at
                the boundary. Only for loops in which nothing but `optimizer.step()` changes those tensors: the first
                snapshots are compared, and overlap is switched off if something else does. `None`: the run's setting.
            run: name of the run; by default the script's name. Used only without `harness run`, like the next six.
            store: the durable store; by default ./.harness.
            local: directory of the local tier.
            every_s: seconds between snapshots.
            every_steps: take a snapshot each time the step is a multiple of this.
            fresh: start at step 0 although the run has snapshots.
            continue_: resume a run that the script stopped early, by leaving its outermost loop before its end.
            link: the connection to use instead of the run's own agent (tests).
            **states: the objects to capture, by name: anything with `state_dict` and `load_state_dict`, a
                torch.Generator, a numpy Generator or a random.Random.

        Raises:
            StateError: one of `states` cannot be captured, `loader` cannot be resumed exactly, or the previous
                Checkpointer is inside one of its loops; names it, and the remedy.
            ConfigError: the run has no name, is finished, was stopped early or is being trained already; there is more
                than one process (WORLD_SIZE); or `harness run` started this process and it has a Checkpointer already.
            SnapshotCorrupt: the run has snapshots, and none can be used.
            AgentGone: no agent answers.
            ValueError: `accumulate` is less than 1, or `on_interrupt` is another word.
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
        self._extra: dict[str, Any] | None = None
        self.resumed_from: ResumedFrom | None = None
        self._replay = Replay() if self._inert else Replay(capture_moment, restore_rng)
        self._hazards = Hazards(capture_moment, self._states, _warn)
        self._led_back = self._validates_late = False
        self._refused: StateError | None = None
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
        capture.check_encoding(capture.capture(self._states).tree)  # raise now, not at a step
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
        self._replay.begin()
        if self._replay.target is None:
            self._hazards.begin()

    # ---- loops ------------------------------------------------------------------------------------------------------

    def epochs(self, start: int | range, stop: int | None = None, /) -> Iterator[int]:
        """Yield the epoch numbers, from where the run stopped: `epochs(n)` yields 0 .. n-1.

        After the last epoch, take a final snapshot and block until it is durable.

        Args:
            start: the number of epochs; a range of their numbers; or, with `stop`, the first number.
            stop: the end of the numbers, as in `range`.

        Raises:
            StateError: it is inside another loop of this Checkpointer; it was consumed before the training, as
                `list(ckpt.epochs(n))` does; or the script's loops differ from those that made the snapshot.
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        numbers = start if isinstance(start, range) else range(start) if stop is None else range(start, stop)
        return self._hazards.follow("epochs", self._epochs(numbers))  # type: ignore[no-any-return]

    def _epochs(self, numbers: range) -> Iterator[int]:
        way, replay = self._enter_stage(), self._replay
        if way is Way.SKIP:
            return
        first = _index_of(replay.first_epoch, numbers)
        if way is Way.RESTORE:
            self._restore()
            first = replay.place.iteration
        replay.early, asked_from = True, CallStack.now()
        worked = False
        for epoch in numbers[first:]:
            with replay.epoch(epoch):
                try:
                    yield epoch
                except GeneratorExit:
                    if not self._closed:
                        replay.early = asked_from.is_left(CallStack.now())
                    raise
            if self.interrupted:
                return
            self._look_at_first("epochs", epoch == numbers[first])
            replay.check_reached(f"epoch {epoch}")
            worked |= replay.worked or self._boundary.optimizer_stepped
        if first < len(numbers) and not worked and not self._inert:
            raise StateError(
                f"ckpt.epochs({len(numbers)}) is over, and no epoch did any work: was it used up before the training, "
                "as list(ckpt.epochs(…)) does? Iterate over it while you train"
            )
        self._end_stage(max(first, len(numbers)))

    def batches(self, loader: Any) -> Batches:
        """Return an iterable over the loader's batches, from where the run stopped in this epoch.

        A boundary follows each step. If the snapshot was taken in this loop, restore it first: see `Checkpointer`.
        Inside `evaluating()`, and with `HARNESS=off`, yield just the loader's batches. To count the batches, use
        `enumerate`: Python's own would begin at 0 in the middle of an epoch. `len` is the loader's.

        Raises:
            StateError: when the loop begins: the loader's position cannot be restored exactly; says why, and the
                remedy. Or the script's loops differ from those that made the snapshot.
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        return Batches(loader, lambda: self._hazards.follow("batches", self._batches(loader)))

    def enumerate(self, loader: Any, start: int = 0) -> Batches:
        """Return an iterable over `(number, batch)`: `batches` with the batches' numbers in this epoch.

        After a resume the numbers continue where they were. Raises what `batches` raises.

        Args:
            loader: see `batches`.
            start: the number of the first batch.
        """
        return Batches(loader, lambda: self._numbered(loader, start))

    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers 0 .. count-1, from where the run stopped: for loops that draw their own data from RNG.

        If the snapshot was taken in this loop, restore it first: see `Checkpointer`. Each iteration counts as one step,
        and a boundary follows it. Outside of all other loops, the end of this one takes a final snapshot and blocks
        until it is durable.

        Args:
            count: the number of steps; `None` for as many as the script wants: leaving the loop stops the run early.

        Raises:
            StateError: the script's loops differ from those that made the snapshot.
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        return self._hazards.follow("steps", self._steps(count))  # type: ignore[no-any-return]

    def _steps(self, count: int | None) -> Iterator[int]:
        replay, boundary = self._replay, self._boundary
        outermost = not (replay.in_epochs or replay.innermost)
        way = self._enter_stage() if outermost else Way.RUN
        if way is Way.SKIP:
            return
        inner = self._enter_loop("steps", at_its_end=way is Way.RESTORE)
        if inner is Way.SKIP:
            return
        loop = replay.begun
        self._come_to(inner, loop)
        first = replay.place.iteration if way is Way.RESTORE else loop.number
        replay.early, asked_from = outermost or replay.early, CallStack.now()
        with replay.handing_out(loop):
            loop.keep(replay.capture_rng)
            for iteration in itertools.count(first) if count is None else range(first, count):
                loop.number = iteration + 1
                try:
                    yield iteration
                except GeneratorExit:
                    if outermost and not self._closed:
                        replay.early = asked_from.is_left(CallStack.now())
                    raise
                self._check_innermost(loop)
                if inner is Way.AGAIN and not replay.restored:
                    self._miss()
                elif boundary.counted:
                    self._end_counted("steps")
                else:
                    boundary.optimizer_stepped = False
                    self._count_step("steps")
                if self.interrupted:
                    return
                if iteration == first:
                    self._look_at_first("steps")
                if loop.keeps_moments:
                    loop.keep(replay.capture_rng)
        if outermost and count is not None:
            self._end_stage(max(first, count))

    def resume(self) -> int:
        """Restore everything now, for a hand-written loop; return the number of completed steps, 0 for a new run.

        Blocks until all tensors are restored. The loop then calls `step()` after each of its steps.

        Raises:
            StateError: the snapshot was taken in `batches`, `steps` or `evaluating`, or the states differ from it.
            SnapshotCorrupt: no snapshot can be used any more.
            AgentGone: the agent died and cannot be replaced.
        """
        self._hazards.loop_begins()
        self._keep_extra()
        way = self._replay.begin_by_hand(steps_only=self._loader is None)
        self._come_to(way, self._replay.hand)
        self._replay.next_by_hand()
        return self.step_count

    def step(self) -> None:
        """Mark the end of a step in a hand-written loop (or of a batch: see `accumulate`). A boundary follows a step.

        Raises:
            StateError: `resume` was not called, and there is no `loader`; this is inside `epochs`, without `loader`; or
                inside `batches` or `steps`.
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        if self._inert:
            self._after_batch("step")
            return
        replay = self._replay
        if replay.stack and replay.stack[-1].kind != "step":
            raise StateError(
                f"ckpt.step() inside ckpt.{replay.stack[-1].kind}(): that loop counts its steps itself. Leave it out"
            )
        if replay.in_epochs and self._loader is None:
            raise StateError(
                "ckpt.step() in ckpt.epochs() without loader=: the position within the epoch is not known. "
                "Use ckpt.batches(loader) or ckpt.steps(n), or pass Checkpointer(loader=loader)"
            )
        if replay.hand is None and self._loader is None:
            raise StateError(
                "ckpt.step() without ckpt.resume(): begin the hand-written loop with it, as in "
                "`for step in range(ckpt.resume(), n)`. A loop of ckpt.epochs() or ckpt.steps() cannot be inside it"
            )
        if self._validates_late:
            self._validates_late = False
            warnings.warn(_LATE_VALIDATION, stacklevel=2)
        if self._led_back and not replay.restored:
            self._miss()
        elif not replay.restored:
            self._restore()
        self._after_batch("step")
        replay.next_by_hand()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager for a validation phase. Inside it, `batches` only yields batches, and nothing is captured.

        Entering is a boundary. Inside a loop that is so after a notice, and for a snapshot that `save` has requested;
        others are taken at the end of the step. A run that resumes there runs the step's own code again first, up to
        here, and drops what it has computed: meanwhile, `replaying` is true. In a hand-written loop, enter before
        `step`, not after it.

        After an interruption notice, `batches` inside it leaves the loop if the newest sealed snapshot is of this very
        step, or if the agent does not want another one.

        Raises:
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        self._settle()
        if not self._inert and not self._evaluating and not self.interrupted:
            self._before_evaluation()
        self._evaluating += 1
        try:
            with self._hazards.exempt():
                yield
        finally:
            self._evaluating -= 1

    def safe_point(self) -> None:
        """Leave the loop if an interruption notice demands it. For long phases without boundaries.

        Never captures state: before leaving, it blocks until the newest sealed snapshot is durable or the time is up.

        Raises:
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        self._settle()
        if not self._inert and self._page.news != self._boundary.seen and self._page.command.leaves:
            self._leave()

    def save(self, *, wait: bool = False) -> None:
        """Request a snapshot at the next boundary, to be made durable. Returns at once.

        With `wait`, that boundary blocks until the snapshot is durable. It gives up if a notice's deadline has passed,
        or if the agent died and cannot be replaced.
        """
        if self._inert:
            return
        self._boundary.want(wait=wait)
        self._link.send(messages.SaveWanted())

    def close(self) -> None:
        """Part from the agent while the process continues, so that another Checkpointer can be created. Idempotent.

        A hand-written loop ends with this: a final snapshot is taken, and without `harness run` the call blocks until
        it is durable. Signals, `sys.exit` and optimizers are again as they were before, and this object is off, as
        with `HARNESS=off`.

        Raises:
            StateError: it is inside one of its loops.
        """
        if self._inert or self._closed:
            return
        if self._replay.in_epochs or self._replay.hands_out:
            raise StateError(
                "the Checkpointer is inside one of its loops: leave that loop before you close it or create another"
            )
        self._part(process_lives=True)
        self._process.detach()
        self._inert = True
        self._page = TrainerSide(None)

    @property
    def epoch(self) -> int | None:
        """The number of the epoch that `epochs` has yielded last; `None` outside of it."""
        return self._replay.place.epoch if self._replay.in_epochs else None

    @property
    def batch(self) -> int | None:
        """The number of the batch or step that the innermost loop has yielded last, from 0; `None` outside of all.

        It counts all batches of the epoch, those before a resume included.
        """
        stack = self._replay.stack
        return stack[-1].number - 1 if stack else None

    @property
    def replaying(self) -> bool:
        """Whether the program is still on its way to the place of the snapshot that it resumes.

        A validation before that place runs again, and so does a step in whose middle the place is. What they compute
        is dropped, and differs from the first time: do not log it.
        """
        return self._replay.target is not None and not self._replay.restored

    @property
    def step_count(self) -> int:
        """Number of completed optimizer steps, those before a resume included."""
        return self._boundary.step

    @property
    def local_step(self) -> int | None:
        """The newest step that is committed on this machine; it is lost with the machine. `None` before the first."""
        return self._page.local_step

    @property
    def durable_step(self) -> int | None:
        """The newest step that is committed in the store; it survives the machine. `None` before the first."""
        return self._page.durable_step

    # ---- loops begin and end ----------------------------------------------------------------------------------------

    def _enter_stage(self) -> Way:
        """Begin an outermost loop; return what it has to do. After an interruption that is SKIP."""
        if not self._inert and not self._replay.restored:
            # Loops are skipped up to the place of the snapshot that is restored, not of a newer one that is damaged.
            self._adopt(self._resumption.confirm())
        way = self._replay.enter_stage()
        self._go_on()
        return Way.SKIP if self.interrupted else way

    def _enter_loop(self, kind: str, *, at_its_end: bool = False) -> Way:
        """Begin a loop; return what it has to do. `at_its_end`: the snapshot was taken at the end of this loop."""
        self._go_on()
        way = self._replay.enter_loop(kind, at_its_end=at_its_end, step=self.step_count)
        self._boundary.optimizer_stepped = False  # a step between loops does not count for this loop's first batch
        return way

    def _come_to(self, way: Way, loop: Loop | None) -> None:
        """Restore what a loop that begins needs: the snapshot, or what leads back to its place in the loop's body."""
        if way is Way.RESTORE:
            self._restore()
        elif way is Way.AGAIN:
            self._lead_back(loop)

    def _go_on(self) -> None:
        """Note that the program trains: an end that was announced before does not count."""
        if self._inert:
            return
        self._hazards.loop_begins()
        self._keep_extra()
        self._loaders.persistent.follow()
        self._process.hook()
        self._process.go_on()
        self._process.keep_hold()
        if self._finished:
            self._finished = False
            self._link.forget(messages.Finished)
            self._link.send(messages.Training())

    def _end_stage(self, completed: int) -> None:
        """End an outermost loop: take a final snapshot and wait until it is durable."""
        self._replay.end_stage(completed)
        if self._inert or self.interrupted:
            return
        self._replay.check_reached("the loop")
        if not self._replay.restored:
            self._restore()
        self._finish()

    def _batches(self, loader: Any) -> Iterator[Any]:
        """Yield a loader's batches, with a boundary after each. After a `break` the batch counts, but no boundary."""
        if self._inert or self._evaluating:
            yield from self._only_batches(loader)
            return
        if self.interrupted:
            return
        replay = self._replay
        way = self._enter_loop("batches")
        loop = replay.begun
        instrumented = self._loaders.instrumented(loader, replay.name_of(loop))
        if way is Way.SKIP:
            return
        loop.repeats = instrumented.repeats
        self._come_to(way, loop)
        yield from self._with_boundaries(instrumented, loop, again=way is Way.AGAIN)

    def _with_boundaries(self, instrumented: InstrumentedLoader, loop: Loop, *, again: bool) -> Iterator[Any]:
        replay, boundary = self._replay, self._boundary
        batches = instrumented.iterate(replay.moment_again(loop) if again else None)
        watched, step = loop.number + _WATCHED_FETCHES, boundary.step
        with replay.handing_out(loop):
            loop.keep(instrumented.moment)
            for batch in batches:
                loop.number += 1
                if loop.number == watched:
                    loop.fetched(instrumented.moment())
                try:
                    yield batch
                except GeneratorExit:
                    boundary.broken_off(replay.place)
                    replay.early |= self._process.exiting
                    raise
                self._check_innermost(loop)
                if again and not replay.restored:
                    self._miss()
                else:
                    if loop.number < watched and boundary.step == step and not boundary.optimizer_stepped:
                        self._hazards.look_ahead()
                    self._after_batch("batches")
                if self.interrupted:
                    return
                if loop.number < watched:
                    self._look_at_first("batches")
                if loop.keeps_moments or loop.number < watched:
                    loop.keep(instrumented.moment)

    def _only_batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a validation, or of a Checkpointer that is off."""
        loop = Loop("batches", 0)
        with contextlib.nullcontext() if self._evaluating else self._replay.handing_out(loop):
            for batch in loader:
                self._leave_if_it_presses()
                loop.number += 1
                yield batch
                if not self._evaluating:
                    self._after_batch("batches")

    def _numbered(self, loader: Any, start: int) -> Iterator[tuple[int, Any]]:
        """Yield a loader's batches with their numbers."""
        if self._evaluating:
            yield from enumerate(self._batches(loader), start)
            return
        for batch in self._batches(loader):
            yield start + self._replay.stack[-1].number - 1, batch

    def _iterate_hooked(self, instrumented: InstrumentedLoader) -> Iterator[Any]:
        """Return the iterator of a plain `for batch in loader` over the loader that the constructor got."""
        replay = self._replay
        if self._inert or self._evaluating or any(loop.kind != "step" for loop in replay.stack):
            return instrumented.iterate()  # in a loop of ours, the loader's own position is all that there is to know
        if self.interrupted:
            return iter(())
        if not replay.restored:
            self._adopt(self._resumption.confirm())
            if replay.target is not None and replay.target.outermost[0] in ("steps", "batches"):
                return instrumented.iterate()  # it is set to where it was as soon as that loop restores the snapshot
        replay.by_hand = not replay.in_epochs
        way = self._enter_loop("step")
        loop = replay.begun
        if way is Way.SKIP:
            return iter(())
        loop.repeats = instrumented.repeats
        self._come_to(way, loop)
        batches = instrumented.iterate(replay.moment_again(loop) if way is Way.AGAIN else None)
        return self._handed_out(instrumented, batches, loop)

    def _handed_out(self, instrumented: InstrumentedLoader, batches: Iterator[Any], loop: Loop) -> Iterator[Any]:
        """Yield batches until the loop is left. Meanwhile the program is inside a loop, as `Replay.hands_out` tells."""
        replay = self._replay
        if any(around.kind != "step" for around in replay.stack):  # begun before a loop of ours, and used in it
            yield from batches
            return
        watched = loop.number + _WATCHED_FETCHES
        with replay.handing_out(loop):
            loop.keep(instrumented.moment)
            for batch in batches:
                loop.number += 1
                if loop.number == watched:
                    loop.fetched(instrumented.moment())
                try:
                    yield batch
                except GeneratorExit:
                    replay.early |= self._process.exiting
                    raise
                self._check_innermost(loop)
                if self.interrupted:
                    return
                if loop.keeps_moments or loop.number < watched:
                    loop.keep(instrumented.moment)

    # ---- boundaries -------------------------------------------------------------------------------------------------

    def _after_batch(self, kind: str) -> None:
        """Count a batch that has just ended. The hot path: no system call, no lock, no clock."""
        if self._boundary.counted:
            self._end_counted(kind)
        elif self._boundary.ends_step(self._replay.place):
            self._count_step(kind)

    def _count_step(self, kind: str) -> None:
        boundary = self._boundary
        boundary.step = step = boundary.step + 1
        if self._page.completed(step) != boundary.seen or step == boundary.next_due:
            self._at_boundary(kind)

    def _check_thread(self) -> None:
        """Refuse a loop in another thread than the training. The thread that trains may wait for it: it is woken."""
        try:
            self._hazards.check_thread()
        except StateError as err:
            _say(str(err))
            self._refused = err
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # its handler raises it
            raise

    def _look_at_first(self, kind: str, is_first: bool = True) -> None:
        """After a loop's first iteration in this process, look for what could not be resumed exactly."""
        if is_first and not self._inert:
            self._hazards.look_at(kind)

    def _end_counted(self, kind: str) -> None:
        """End a batch whose step was counted at a validation in it. Its end is a boundary all the same."""
        boundary, page = self._boundary, self._page
        if not boundary.ends_counted(self._replay.place):
            boundary.optimizer_stepped = False
            self._count_step(kind)
        elif page.news != boundary.seen or boundary.step == boundary.next_due:
            self._at_boundary(kind)

    def _before_evaluation(self) -> None:
        """Enter a validation: a boundary, if the program can come back to this place."""
        replay, boundary = self._replay, self._boundary
        loop = replay.innermost
        if replay.enter_evaluation(self.step_count) is Way.RESTORE:
            self._restore()
        if not replay.restored:
            return
        due = self._page.news != boundary.seen or boundary.overdue
        if loop is None:
            kind = "evaluating"
        else:
            if boundary.is_complete(replay.place) and not boundary.counted:
                boundary.count_early()
                self._page.completed(boundary.step)
            due = boundary.overdue or (due and self._page.command.leaves)
            kind = self._kind_inside(loop)
        if due and replay.leads_back(kind, counted=boundary.counted):
            self._at_boundary(kind)
        else:
            self._leave_if_it_presses()

    def _kind_inside(self, loop: Loop) -> str:
        """Return the kind of a boundary on the way into a validation in the body of `loop`."""
        after_step = loop.stepped == loop.number if loop.kind == "step" else loop.kind == "hand"
        if after_step and not self._boundary.counted:
            self._validates_late = True
            return "step"
        return "evaluating"

    def _check_innermost(self, loop: Loop) -> None:
        """Refuse a loop that continues while another one, which began after it, is still inside an iteration."""
        stack = self._replay.stack
        if stack[-1] is not loop:
            raise StateError(
                f"ckpt.{loop.kind}() continues while a loop that began after it ({stack[-1].kind}) is not over, so a "
                "place in them cannot be reached again. Nest the loops; or give the loader of one of them as "
                "Checkpointer(loader=…), and draw from iter(loader) in the other loop"
            )

    def _at_boundary(self, kind: str) -> None:
        """Act at a boundary where the control page has news or something is due: plan, take a snapshot, or leave."""
        if self._inert:
            self._boundary.rest()
            return
        self._check_thread()
        self._process.go_on()
        self._process.keep_hold()
        self._settle()
        self._replay.place.kind = kind
        if self.step_count and not self._stepped_told:
            self._stepped_told = True
            self._link.stepped(self.step_count, self._wanted_at)
        if not self._replay.leads_back(kind, counted=self._boundary.counted):
            self._leave_if_it_presses()  # the next boundary may be a place that the program can come back to
            return
        if self._signalled and self._process.has_handler(signal.SIGTERM):
            self._saving.wait_answer()  # the program's own handler may end it: this may be the last boundary
        news = self._page.news
        decision = self._boundary.decide(news, self._stager.sealed_step)
        if decision.leaves:
            if decision.saves:
                self._saving.take_waiting()
            self._leave()
        else:
            # Not before a validation, which may swap weights and takes long: the snapshot is sealed first.
            self._saving.carry_out(decision, news, overlap=self._overlaps and kind != "evaluating")

    def _settle(self, *, updating: bool = False) -> None:
        if not self._inert:
            self._saving.settle(updating=updating)

    def _leave_if_it_presses(self) -> None:
        """Leave the loop from within a validation if the next boundary cannot save more than is sealed already.

        That is so if the newest sealed snapshot is of this very step, or if the agent does not want another one.
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
            "place": self._replay.position(self._replay.place.kind, counted=self._boundary.counted).to_tree(),
            "states": states,
            "rng": capture_rng(),
            "loaders": self._loaders.positions(),
            "persistent": self._loaders.persistent.started(),
            "extra": self.extra,
        }

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Wait until the newest snapshot is durable or the time is up, then leave the loop as `on_interrupt` says."""
        self._link.send(messages.Leaving(), repeat=True)
        self._saving.wait_durable()
        self.interrupted = True
        if self._on_interrupt == "return":
            return
        asked = ExitCode.SUPERSEDED if self._link.superseded else ExitCode.INTERRUPTED
        raise SystemExit(int(ExitCode.CTRL_C if self._process.ctrl_c else asked))

    def _finish(self, *, hold: bool = False) -> None:
        """Finish the run: take a final snapshot, and wait until it is durable.

        With `hold`, do not wait: the agent keeps the snapshot until it knows the exit code, and drops it if that is a
        failure. Only the end of the process showed that the loop was over, so a program that starts again could not
        reach that place.
        """
        self._boundary.overdue = False
        self._stager.holds = hold
        self._replay.place.kind = "end"
        self._saving.take_waiting()
        if self._stager.sealed_step != self.step_count:
            if not self._link.gone:
                self._leave()  # the time was up, or the agent wants the loop left with the newest sealed snapshot
            return
        self._finished = True
        self._link.send(messages.Finished(self.step_count), repeat=True)
        if not hold:
            self._saving.wait_durable()

    def _at_exit(self) -> None:
        """Part from the agent as the process ends.

        A loop without an end of its own gets its final snapshot here, at its last boundary.
        """
        if not self._inert:
            self._part(process_lives=False)

    def _part(self, *, process_lives: bool) -> None:
        self._closed = True
        self._settle()
        crashed, failed, early = self._process.crashed, self._process.failed, False
        if process_lives:  # earlier errors of the process do not count
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
        self._loaders.persistent.leave()
        self._link.part(exception=failed, early=early, hopeless=self._process.hopeless, process_lives=process_lives)

    def _told_to_leave(self) -> bool:
        """Whether an interruption notice is in force, as far as this process knows. After a signal, ask the agent."""
        if self._signalled:
            self._saving.wait_answer()
        return self._signalled or self._page.command.leaves

    def _leave_at_exit(self) -> None:
        """End a program that exits by itself while a notice is in force: save, if at a boundary, and wait for it."""
        by_hand = self._replay.by_hand and self._loader is None
        between_steps = not (self._boundary.optimizer_stepped or self._boundary.counted)
        at_boundary = by_hand and self._sees_optimizers and between_steps
        if at_boundary and self._page.command is Command.SNAPSHOT_AND_LEAVE:
            self._replay.place.kind = "step"
            self._saving.take_waiting()
        self._link.send(messages.Leaving(), repeat=True)
        self._saving.wait_durable()

    # ---- restoring --------------------------------------------------------------------------------------------------

    def _adopt(self, small: SmallState | None) -> None:
        """Take over a snapshot's small state, before any tensor is here: `extra`, `resumed_from`, step and place."""
        if small is None:
            return
        self.resumed_from, self._boundary.step = small.resumed_from, small.step
        self._replay.aim(small.place)
        refill(self.extra, small.extra)
        self._extra = None

    def _keep_extra(self) -> None:
        """Note `extra` as the first loop begins: what is changed on the way to the place is dropped there."""
        if self.replaying and self._extra is None:
            self._extra = copy.deepcopy(self.extra)

    def _lead_back(self, loop: Loop | None) -> None:
        """Prepare for a body that runs again up to the place of the snapshot. Blocks until all tensors are restored.

        The states are those of the snapshot already, so that what the body computes is near to what it was; at the
        place they are restored again.
        """
        body = self._replay.body_ahead(loop)
        if not self._led_back:
            ready = self._resumption.wait()
            if ready is not None:
                self._resumption.lead_back(ready)
            self._led_back = True
        self._boundary.step, self._replay.place.calls = body.step, body.calls
        if body.kind in ("steps", "hand") and body.moment is not None:
            restore_rng(body.moment)

    def _miss(self) -> None:
        """Continue after a body that was to lead to the place of the snapshot, and did not."""
        _say(
            "the snapshot was taken in the middle of a step, and the program has not come back to that place: it "
            "continues with the next step. This is not bit-identical if anything between that place and the end of the "
            "step mattered. A counter in a local variable may be the cause: see ckpt.enumerate and ckpt.step_count"
        )
        self._loaders.forget_inner()
        self._restore()

    def _restore(self) -> None:
        """Restore the live state from the snapshot; without a snapshot, just begin. Blocks until it is restored."""
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
        self._boundary.counted = self._boundary.optimizer_stepped = False
        if small is not None and small.place.counted:
            self._boundary.resume_counted()
        if self._extra is not None:
            refill(self.extra, self._extra)
            self._extra = None
        self._replay.arrive(None if small is None else small.place)
        if ready is not None:
            seconds = time.monotonic() - self._wanted_at
            self._link.send(messages.Restored(ready.snapshot, self.step_count, seconds))
            self._link.drop_ready()
        self._page = self._link.page  # of the agent that found the snapshot; the first one may have died
        self._stager.begin()
        self._page.completed(self.step_count)
        self._boundary.look_soon()  # the first step plans the layout

    # ---- the process ------------------------------------------------------------------------------------------------

    def _watch_optimizers(self) -> RemovableHandle:
        """Hook every optimizer's step, to note it: the end of its batch is a boundary."""
        boundary, hazards = self._boundary, self._hazards

        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            boundary.optimizer_stepped = True
            if hazards.stepped_in is None:
                hazards.stepped_in = threading.get_ident()

        return register_optimizer_step_post_hook(stepped)

    def _takes_signal(self, signum: int) -> bool:
        """Return whether a signal is answered at the next boundary. Sets flags only: the agent decides what follows."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        if self._inert or self._link.gone or (signum == signal.SIGINT and not self._replay.loops):
            return False
        self._link.poke(signum)
        self._signalled |= signum != signal.SIGINT
        self._boundary.hurry()
        return True

    def _become_inert(self) -> None:
        """Switch this Checkpointer off in a forked child: no snapshots, no descriptors, no messages to the agent."""
        if not self._inert:
            self._inert = True
            self._page, self._boundary.seen = TrainerSide(None), 0
            self._link.close_in_child()


_newest: list[weakref.ref[Checkpointer]] = []
"""The Checkpointer that this process created last."""


def _close_the_one_before(*, anywhere: bool) -> None:
    """Close the previous Checkpointer of this process, if there is one. `anywhere`: under `harness run` too.

    Raises:
        ConfigError: there is one, and `harness run` started this process: it runs one training.
        StateError: it is inside one of its loops.
    """
    before = _newest[0]() if _newest else None
    if before is None:
        return
    if os.environ.get(SOCKET_VARIABLE) and not anywhere:
        raise ConfigError(
            "`harness run` runs one training, and this program has a Checkpointer already: use that one for all loops, "
            "or start the program without `harness run` and name each training with Checkpointer(run=…)"
        )
    before.close()


def _open_link(options: Mapping[str, Any]) -> Link:
    """Connect to the agent of `harness run`, or start one with these options."""
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


def _index_of(epoch: int | None, numbers: range) -> int:
    """Return where an epoch is among the epochs' numbers; 0 for `None`."""
    if epoch is None:
        return 0
    if epoch not in numbers:
        raise StateError(f"the snapshot was taken in epoch {epoch}, and these are {numbers}: use the same numbers")
    return numbers.index(epoch)


def _merged(by_name: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    if twice := sorted(by_name.keys() & states.keys()):
        raise StateError(f"two states are named {twice[0]}: give one of them another name")
    return {**by_name, **states}


def _holds_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) or any(
        isinstance(inner, torch.optim.Optimizer) for inner in getattr(value, "__dict__", {}).values()
    )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone: that is when saving matters most
        sys.stderr.write(f"harness: {printable(text)}\n")
        sys.stderr.flush()
