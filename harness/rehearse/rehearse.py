"""`harness rehearse`: run the user's program unbroken, then interrupted, compare, and keep the result with the run.

Owns the order of the passes. A third, unbroken one runs only after a difference: it tells whether the resume is the
cause, or the program itself.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.config.program import digest_of, words_of
from harness.config.settings import Settings
from harness.core.rehearsal import AnyLine, EpochEnded, Interruption, Record
from harness.core.snapshot import RunKeys
from harness.core.words import duration, without_secrets
from harness.errors import HarnessError
from harness.rehearse.compare import (
    first_of_ranks,
    observed,
    other_objects,
    other_variables,
    random_in_words,
    unused,
)
from harness.rehearse.itself import Itself, of_itself
from harness.rehearse.passes import Pass, Rehearsal
from harness.rehearse.points import Plan, choose, in_words
from harness.rehearse.verdict import Verdict
from harness.rehearse.watched import WatchedVerdict
from harness.snapshots.open import open_store

_LONG_S = 60.0
_SAY_S = 15.0
_CALL_S = 30.0

Say = Callable[[str], None]


def rehearse(
    command: Sequence[str], environ: Mapping[str, str], say: Say, *, steps: int, at: Sequence[int] = ()
) -> Verdict:
    """Run all passes of a program, and return the verdict. Blocks for about twice the time of so many steps.

    Args:
        command: the program.
        environ: its environment.
        say: prints a line for people.
        steps: the step at which every pass ends at the latest.
        at: steps at which to interrupt it; empty for a choice.

    Raises:
        ConfigError: the program made no Checkpointer.
        HarnessError: it failed by itself.
    """
    # At a second signal, a trainer may outlive its agent for a moment, and write: no reason for a traceback.
    with tempfile.TemporaryDirectory(prefix="harness-rehearsal-", ignore_cleanup_errors=True) as name:
        rehearsal = Rehearsal(command, environ, Path(name), _Progress(say, steps))
        say(
            f"rehearsing up to step {steps}, twice, in about 7 starts of the program. Everything that the harness "
            f"writes goes to {name}: room for a few snapshots is needed there"
        )
        unbroken = rehearsal.run("unbroken", steps)
        seen = observed(unbroken.lines)
        plan = choose(unbroken.lines, seen.step, at)
        places = _in_words(plan.interruptions, unbroken.lines)
        if not plan.interruptions:
            return Verdict((), seen, missing=plan.missing, unseen=_unseen(unbroken), files=tuple(unbroken.files))
        expected_s = unbroken.seconds + len(plan.interruptions) * unbroken.first_step_s
        say(
            f"unbroken: {seen.step} steps in {duration(unbroken.seconds)}. Now with interruptions at "
            f"{', '.join(places)}: about {duration(expected_s)}"
        )
        interrupted = rehearsal.run("interrupted", steps, plan.interruptions)
        passed_over = unused(unbroken.lines)
        difference = first_of_ranks(unbroken.ranks, interrupted.ranks, passed_over)
        files = {*unbroken.files, *interrupted.files}
        itself, again = Itself(), Pass()
        if difference is not None:
            say("they differ. Once more unbroken, to see whether the program differs from itself")
            again = rehearsal.run("again", steps)
            files |= {*again.files}
            itself = of_itself(unbroken.ranks, again.ranks, passed_over)
            passed_over |= itself.passed_over
            difference = first_of_ranks(unbroken.ranks, interrupted.ranks, passed_over, itself.loose)
        return Verdict(
            _in_words(interrupted.reached, unbroken.lines),
            seen,
            difference,
            itself.difference,
            (*plan.missing, *_not_reached(plan, interrupted, unbroken.lines)),
            _unseen(unbroken),
            tuple(random_in_words(name) for name in sorted(itself.unseeded)),
            tuple(other_variables(unbroken.lines, interrupted.lines, again.lines)),
            tuple(other_objects(unbroken.lines, interrupted.lines, again.lines)),
            tuple(sorted(files)),
            itself.loose,
        )


def keep(verdict: Verdict | WatchedVerdict, settings: Settings, command: Sequence[str]) -> None:
    """Keep the result with the run, under the digest of the program. Raises HarnessError, CloudError."""
    command = without_secrets(command)
    record = Record(verdict.identical, verdict.places, verdict.step, words_of(command))
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    store = open_store(settings.store, settings)
    try:
        key = RunKeys(settings.run).rehearsal(digest_of(command), now)
        store.put_if_absent(key, msgspec.json.encode(record), deadline=Deadline.after(_CALL_S))
    finally:
        store.close()


def keep_if_possible(verdict: Verdict | WatchedVerdict, settings: Settings, command: Sequence[str], say: Say) -> None:
    """Keep the result with the run, or say why that is not possible."""
    try:
        keep(verdict, settings, command)
    except (HarnessError, CloudError) as err:
        say(f"the result could not be kept in {settings.store}, so harness run will say `not rehearsed`: {err}")


def _in_words(places: Sequence[Interruption], lines: Sequence[AnyLine]) -> tuple[str, ...]:
    ends = [line.step for line in lines if isinstance(line, EpochEnded)]
    return tuple(in_words(place, ends) for place in places)


def _not_reached(plan: Plan, interrupted: Pass, lines: Sequence[AnyLine]) -> list[str]:
    left_out = [place for place in plan.interruptions if place not in interrupted.reached]
    return [f"the interruption at step {words}" for words in _in_words(left_out, lines)]


def _unseen(unbroken: Pass) -> tuple[str, ...]:
    if observed(unbroken.lines).batches:
        return ()
    return ("batches: none came from ckpt.batches(loader), or from Checkpointer(loader=…)",)


class _Progress:
    """Says how far a pass is, now and then, and how a slow one becomes shorter."""

    def __init__(self, say: Say, stop: int) -> None:
        self._say, self._stop = say, stop
        self._said_at_s = 0.0
        self._advised = False

    def __call__(self, step: int, seconds: float) -> None:
        if seconds < self._said_at_s:  # another start
            self._said_at_s = 0.0
        if seconds < self._said_at_s + _SAY_S:
            return
        self._said_at_s = seconds
        self._say(f"step {step} of {self._stop}, {duration(seconds)} after the start")
        if seconds > _LONG_S and step < self._stop / 2 and not self._advised:
            self._advised = True
            self._say(
                "this takes long: --steps makes it shorter, and so does a smaller model or dataset, for which the "
                "program can look at HARNESS_REHEARSAL in its environment"
            )
