"""Which outcome and which exit code a run ends with here: a table, without a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloud.notice import Deadline
from harness.agent.drain.speeds import Drain
from harness.agent.outcome import Outcome, of_attempt, of_interruption, read_outcome, write_outcome
from harness.agent.resume.startup import Finding
from harness.agent.save.pipeline import Steps
from harness.agent.trainers.attempt import TrainerAttempt
from harness.core.policy import Choice, Plan
from harness.errors import ConfigError, ExitCode
from harness.ipc.runtime_dir import RuntimeDir


@dataclass
class Saved:
    """What a run's saves tell of themselves."""

    everything_durable: bool = True
    sealed_step: int | None = 100
    steps: Steps = field(default_factory=lambda: Steps(None, 100))


@dataclass
class Began:
    """What a run's origin tells of itself."""

    awaiting: bool = False
    only_here: bool = False
    error: Exception | None = None
    point: Any = None
    finding: Finding = Finding.NOTHING


@dataclass
class Point:
    id: str = "g1-s100"


def ended(code: int | None = 0, *, finished: int | None = None, connected: bool = True, **how: bool) -> TrainerAttempt:
    return TrainerAttempt(0.0, 0.0, connected=connected, exit_code=code, over=True, finished_step=finished, **how)


def leaving(code: ExitCode = ExitCode.INTERRUPTED) -> Drain:
    return Drain(Deadline.never(), code, Plan(Choice.NEW, 1.0, None), Deadline.never())


def outcome(
    attempt: TrainerAttempt, drain: Drain | None = None, pipeline: Saved | None = None, startup: Began | None = None
) -> Outcome:
    return of_attempt(attempt, drain, pipeline or Saved(), startup or Began())  # type: ignore[arg-type]


def test_a_run_is_finished_only_when_its_last_snapshot_is_durable() -> None:
    done = ended(finished=100)
    assert outcome(done) == Outcome("finished", ExitCode.FINISHED)
    assert outcome(done, pipeline=Saved(everything_durable=False)) == Outcome("stopped", ExitCode.FINISHED)


def test_a_run_that_finishes_while_it_leaves_is_finished() -> None:
    assert outcome(ended(finished=100), leaving()).finished


def test_a_program_that_fails_after_its_last_loop_has_not_finished() -> None:
    assert outcome(ended(3, finished=100)) == Outcome("failed", 3)


def test_a_program_without_a_last_loop_has_stopped() -> None:
    assert outcome(ended()) == Outcome("stopped", ExitCode.FINISHED)


def test_a_program_that_left_its_loop_early_has_stopped_early_and_how_to_go_on_is_said() -> None:
    early = outcome(ended(stopped_early=True))
    assert (early.name, early.exit_code) == ("stopped early", ExitCode.FINISHED)
    assert "--continue goes on from step 100, --fresh" in str(early.why)
    assert outcome(ended(3, stopped_early=True)) == Outcome("failed", 3)


def test_an_early_stop_stays_one_if_a_notice_comes_after_it_and_it_is_durable() -> None:
    early = ended(stopped_early=True)
    assert outcome(early, leaving()).name == "stopped early"
    assert outcome(early, leaving(), Saved(everything_durable=False)).name == "interrupted"


def test_a_run_of_which_nothing_exists_yet_may_be_started_anywhere() -> None:
    nothing = Saved(False, None)
    assert outcome(ended(143, connected=False), leaving(), nothing).exit_code == ExitCode.INTERRUPTED
    assert outcome(ended(143), leaving(), nothing).exit_code == ExitCode.INTERRUPTED_LOCAL
    unknown = Began(finding=Finding.PENDING)
    assert outcome(ended(143, connected=False), leaving(), nothing, unknown).exit_code == ExitCode.INTERRUPTED_LOCAL


@pytest.mark.parametrize(
    ("found", "connected", "code"),
    [
        (Finding.NOTHING, False, 0),
        (Finding.NOTHING, True, 75),
        (Finding.READY, False, 75),
        (Finding.PENDING, False, 75),
    ],
)
def test_a_notice_lets_only_a_program_that_is_not_ours_keep_its_0(found: Finding, connected: bool, code: int) -> None:
    attempt = ended(connected=connected)
    assert outcome(attempt, leaving(), startup=Began(finding=found)).exit_code == code
    killed = ended(143, connected=connected)
    assert outcome(killed, leaving(), startup=Began(finding=found)).exit_code == ExitCode.INTERRUPTED


def test_a_program_that_never_restored_its_snapshot_is_told_so() -> None:
    startup = Began(point=Point())
    untouched = outcome(ended(), startup=startup)
    assert (untouched.name, untouched.exit_code) == ("failed", ExitCode.BUG)
    assert "without restoring snapshot g1-s100" in str(untouched.why)
    assert outcome(ended(restored=True), startup=startup) == Outcome("stopped", ExitCode.FINISHED)
    assert outcome(ended(connected=False), startup=startup) == Outcome("stopped", ExitCode.FINISHED)  # none of ours


def test_a_crash_of_one_that_is_no_child_counts_as_one() -> None:
    assert outcome(ended(None)) == Outcome("failed", 1)


def test_a_start_that_could_not_begin_fails_with_the_reason_and_not_with_the_programs_code() -> None:
    assert outcome(ended(1), startup=Began(error=ConfigError("no"))) == Outcome("failed", ConfigError("no").exit_code)


@pytest.mark.parametrize(
    ("pipeline", "startup", "code"),
    [
        (Saved(), Began(), ExitCode.INTERRUPTED),
        (Saved(everything_durable=False), Began(), ExitCode.INTERRUPTED_LOCAL),
        (Saved(False, None), Began(), ExitCode.INTERRUPTED_LOCAL),  # whether the store has anything is not known
        (Saved(False, None), Began(awaiting=True), ExitCode.INTERRUPTED),  # nothing of ours existed yet
        (Saved(False, None), Began(awaiting=True, only_here=True), ExitCode.INTERRUPTED_LOCAL),
        (Saved(False, 100), Began(awaiting=True), ExitCode.INTERRUPTED_LOCAL),
    ],
)
def test_75_is_said_only_where_this_machine_holds_nothing_newer(
    pipeline: Saved, startup: Began, code: ExitCode
) -> None:
    assert of_interruption(ExitCode.INTERRUPTED, pipeline, startup) == Outcome("interrupted", code)  # type: ignore[arg-type]
    assert outcome(ended(143), leaving(), pipeline, startup) == Outcome("interrupted", code)


@pytest.mark.parametrize(
    ("code", "name"), [(ExitCode.CTRL_C, "stopped"), (ExitCode.SUPERSEDED, "superseded")], ids=["ctrl-c", "superseded"]
)
def test_who_asked_to_leave_is_told_apart_whatever_became_durable(code: ExitCode, name: str) -> None:
    nothing = Saved(everything_durable=False)
    assert outcome(ended(1), leaving(code), nothing) == Outcome(name, code)


def test_a_commit_that_came_while_the_tiers_were_closing_makes_74_a_75() -> None:
    local = Outcome("interrupted", ExitCode.INTERRUPTED_LOCAL)
    assert local.confirmed(Saved()) == Outcome("interrupted", ExitCode.INTERRUPTED)  # type: ignore[arg-type]
    assert local.confirmed(Saved(everything_durable=False)) is local  # type: ignore[arg-type]
    failed = Outcome("failed", 1)
    assert failed.confirmed(Saved()) is failed  # type: ignore[arg-type]


def test_an_outcome_is_recorded_for_one_process(tmp_path: Path) -> None:
    place = RuntimeDir(tmp_path)
    assert read_outcome(place, 7) is None
    write_outcome(place, 7, Outcome("failed", 75))
    assert (read_outcome(place, 7), read_outcome(place, 8)) == ("failed", None)
    place.outcome.write_text("[]")
    assert read_outcome(place, 7) is None
