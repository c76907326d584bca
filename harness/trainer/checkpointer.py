"""Checkpointer: the public API that a training loop calls.

Owns the public calls and their documentation; everything they do is elsewhere. `loops.py` has the loops, and
`training.py` what happens at a boundary, on leaving and on a resume.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from harness.config.settings import is_off
from harness.errors import StateError
from harness.trainer import opening
from harness.trainer.batches import Batches
from harness.trainer.distributed import buckets
from harness.trainer.link import Link
from harness.trainer.loops import Loops
from harness.trainer.ranks import find_rank
from harness.trainer.resuming import ResumedFrom
from harness.trainer.state import capture
from harness.trainer.state.extra import check as check_extra
from harness.trainer.state.kinds import flatten
from harness.trainer.state.prepared import expanded
from harness.trainer.training import Training
from harness.trainer.voice import say


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
        extra: a dict for the user's plain values, tensors and arrays, saved with every snapshot. It has the resumed
            snapshot's values when the constructor returns, which waits for tensors only if there are any in it. They
            are restored in place: dicts, lists and tensors stay the same objects. Assigning what cannot be stored
            raises `StateError`.
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
        settle_ddp: bool = True,
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
            settle_ddp: of several ranks: give each DistributedDataParallel its final gradient buckets now, by one
                backward pass of zeros, a collective call. Without it, with three ranks or more, a resumed run differs
                from an unbroken one in the last bits.
            run: name of the run; by default the script's name. Used only without `harness run`, like the next six.
            store: the durable store; by default ./.harness.
            local: directory of the local tier.
            every_s: seconds between snapshots.
            every_steps: take a snapshot each time the step is a multiple of this.
            fresh: start at step 0 although the run has snapshots.
            continue_: resume a run that the script stopped early, by leaving its outermost loop before its end.
            link: the connection to use instead of the run's own agent (tests).
            **states: the objects to capture, by name: anything with `state_dict` and `load_state_dict`, a
                torch.Generator, a numpy Generator, a random.Random, or an Accelerator, for all that it has prepared.

        Raises:
            StateError: one of `states` cannot be captured, `loader` cannot be resumed exactly, or the previous
                Checkpointer is inside one of its loops; names it, and the remedy.
            RunFinished: the run is finished, or was stopped early.
            ConfigError: the run has no name or is being trained already; ranks are on several machines, or do not agree
                how many they are; or `harness run` started this process and it has a Checkpointer already.
            SnapshotCorrupt: the run has snapshots, and none can be used.
            AgentGone: no agent answers.
            ValueError: `accumulate` is less than 1, or `on_interrupt` is another word.
        """
        if accumulate is not None and accumulate < 1:
            raise ValueError("accumulate must be at least 1")
        if on_interrupt not in ("exit", "return"):
            raise ValueError('on_interrupt is "exit" or "return"')
        inert = is_off(os.environ)
        flat = flatten(expanded(_merged(states_by_name or {}, states)))
        if not inert and settle_ddp and not find_rank(os.environ).is_alone:
            for line in buckets.settle(flat.values()):  # before anything of ours is hooked to a gradient
                say(line)
        self._training = Training(
            flat,
            accumulate=accumulate,
            on_interrupt=on_interrupt,
            seed_workers=seed_workers,
            inert=inert,
        )
        self._loops = Loops(self._training, loader)
        if inert:
            return
        capture.check_encoding(capture.capture(self._training.states).tree)  # raise now, not at a step
        opening.take_turn(self, anywhere=link is not None)
        if link is None:
            options = {"run": run, "store": store, "local": local, "every_s": every_s, "every_steps": every_steps}
            link = opening.open_link(options | {"fresh": fresh or None, "continue_": continue_ or None})
        self._training.connect(link, overlap)
        opening.has_begun(self)

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
        return self._loops.epochs(_numbers(start, stop))

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
        return self._loops.batches(loader)

    def enumerate(self, loader: Any, start: int = 0) -> Batches:
        """Return an iterable over `(number, batch)`: `batches` with the batches' numbers in this epoch.

        After a resume the numbers continue where they were. Raises what `batches` raises.

        Args:
            loader: see `batches`.
            start: the number of the first batch.
        """
        return self._loops.enumerate(loader, start)

    def steps(self, count: int | range | None = None, stop: int | None = None) -> Iterator[int]:
        """Yield the numbers 0 .. count-1, from where the run stopped: for loops that draw their own data from RNG.

        If the snapshot was taken in this loop, restore it first: see `Checkpointer`. Each iteration counts as one step,
        and a boundary follows it. Outside of all other loops, the end of this one takes a final snapshot and blocks
        until it is durable.

        Args:
            count: the number of steps; a range of their numbers; or, with `stop`, the first number. `None` for as many
                as the script wants: leaving the loop stops the run early.
            stop: the end of the numbers, as in `range`.

        Raises:
            StateError: the script's loops differ from those that made the snapshot.
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        return self._loops.steps(None if count is None else _numbers(count, stop))

    def resume(self) -> int:
        """Restore everything now, for a hand-written loop; return the number of completed steps, 0 for a new run.

        Blocks until all tensors are restored. The loop then calls `step()` after each of its steps.

        Raises:
            StateError: the snapshot was taken in `batches`, `steps` or `evaluating`, or the states differ from it.
            SnapshotCorrupt: no snapshot can be used any more.
            AgentGone: the agent died and cannot be replaced.
        """
        return self._loops.resume()

    def step(self) -> None:
        """Mark the end of a step in a hand-written loop (or of a batch: see `accumulate`). A boundary follows a step.

        Raises:
            StateError: `resume` was not called, and there is no `loader`; this is inside `epochs`, without `loader`; or
                inside `batches` or `steps`.
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        self._loops.step()

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for a validation phase. Inside it, `batches` only yields batches, and nothing is captured.

        Entering is a boundary, and a validation that may take long begins with a snapshot, so that a notice in it costs
        no step: the first one of a process, and each one after one that took 10 s or more. Inside a loop, entering is a
        boundary after a notice, for a snapshot that `save` has requested, and for a validation after a long one; other
        snapshots are taken at the end of the step. A run that resumes there runs the step's own code again first, up to
        here, and drops what it has computed: meanwhile, `replaying` is true. In a hand-written loop, enter before
        `step`, not after it.

        After an interruption notice, `batches` inside it leaves the loop if the newest sealed snapshot is of this very
        step, or if the agent does not want another one.

        Raises:
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        return self._loops.evaluating()

    def safe_point(self) -> None:
        """Leave the loop if an interruption notice demands it. For long phases without boundaries.

        Never captures state: before leaving, it blocks until the newest sealed snapshot is durable or the time is up.

        Raises:
            SystemExit: an interruption ends the loop; see `Checkpointer`.
        """
        self._training.leave_if_told()

    def save(self, *, wait: bool = False) -> None:
        """Request a snapshot at the next boundary, to be made durable. Returns at once.

        If the program leaves `epochs` or `steps` with a `break` or `return` before that, the snapshot is taken there,
        as at the end of that iteration. With `wait`, the boundary blocks until the snapshot is durable. It gives up if
        a notice's deadline has passed, or if the agent died and cannot be replaced.
        """
        self._training.request(wait=wait)

    def close(self) -> None:
        """Part from the agent while the process continues, so that another Checkpointer can be created. Idempotent.

        A hand-written loop ends with this: a final snapshot is taken, and without `harness run` the call blocks until
        it is durable. Signals, `sys.exit` and optimizers are again as they were before, and this object is off, as
        with `HARNESS=off`.

        Raises:
            StateError: it is inside one of its loops.
        """
        self._training.close()
        opening.has_ended(self)

    # ---- what a script reads ----------------------------------------------------------------------------------------

    @property
    def extra(self) -> dict[str, Any]:
        """The user's plain values, tensors and arrays, saved with every snapshot."""
        return self._training.extra

    @extra.setter
    def extra(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            check_extra(key, value)
        self._training.extra = values

    @property
    def resumed_from(self) -> ResumedFrom | None:
        """The snapshot that this start resumes; `None` for a new run."""
        return self._training.resumed_from

    @property
    def interrupted(self) -> bool:
        """Whether an interruption has ended the loop."""
        return self._training.interrupted

    @property
    def epoch(self) -> int | None:
        """The number of the epoch that `epochs` has yielded last; `None` outside of it."""
        return self._training.replay.place.epoch if self._training.replay.in_epochs else None

    @property
    def batch(self) -> int | None:
        """The number of the batch or step that the innermost loop has yielded last, from 0; `None` outside of all.

        It counts all batches of the epoch, those before a resume included.
        """
        stack = self._training.replay.stack
        return stack[-1].number - 1 if stack else None

    @property
    def replaying(self) -> bool:
        """Whether the program is still on its way to the place of the snapshot that it resumes.

        A validation before that place runs again, and so does a step in whose middle the place is. What they compute
        is dropped, and differs from the first time: do not log it.
        """
        return self._training.replaying

    @property
    def step_count(self) -> int:
        """Number of completed optimizer steps, those before a resume included."""
        return self._training.boundary.step

    @property
    def local_step(self) -> int | None:
        """The newest step that is committed on this machine; it is lost with the machine. `None` before the first."""
        return self._training.page.local_step

    @property
    def durable_step(self) -> int | None:
        """The newest step that is committed in the store; it survives the machine. `None` before the first."""
        return self._training.page.durable_step


def _numbers(start: int | range, stop: int | None) -> range:
    return start if isinstance(start, range) else range(start) if stop is None else range(start, stop)


def _merged(by_name: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    if twice := sorted(by_name.keys() & states.keys()):
        raise StateError(f"two states are named {twice[0]}: give one of them another name")
    return {**by_name, **states}
