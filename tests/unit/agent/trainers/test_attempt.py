from __future__ import annotations

import dataclasses

import pytest

from harness.agent.resume_point import ResumePoint
from harness.agent.trainers.attempt import TrainerAttempt
from harness.core.messages import FirstStep
from harness.core.snapshot import SnapshotId
from harness.ipc.slots import SlotRecord

RECORD = SlotRecord(
    step=12, rank=0, world_size=1, generation=2, shards=(), state="{}", environment={}, sealed_at=""
)  # fmt: skip
TOLD = FirstStep(13, 112.0, ((107.6, 107.6), (109.0, 110.0)), 110.0)


@pytest.fixture
def point() -> ResumePoint:
    return ResumePoint(SnapshotId(2, 12), "remote", (), (), (), True, 6.3)


def attempt() -> TrainerAttempt:
    return TrainerAttempt(103.2, 103.0, spawned_at=103.4, restored=True, stepped=TOLD)


def test_what_a_start_took_is_put_together_from_both_processes(point: ResumePoint) -> None:
    told = attempt().restarted(100.0, point)

    assert told is not None
    assert (told.snapshot, told.tier, told.step) == ("00000002-000000000012", "remote", 13)
    assert (told.total_s, told.detect_s, told.start_s, told.wait_s, told.first_step_s) == (12.0, 3.0, 6.0, 1.0, 2.0)
    assert told.fetching_s == 6.3


def test_what_this_agent_saw_end_counts_before_what_a_journal_says(point: ResumePoint) -> None:
    told = dataclasses.replace(attempt(), last_ended_at=102.0).restarted(0.0, point)

    assert told is not None
    assert told.detect_s == 1.0


def test_a_start_that_resumed_nothing_fetched_nothing(point: ResumePoint) -> None:
    told = dataclasses.replace(attempt(), restored=False).restarted(None, point)

    assert told is not None
    assert (told.snapshot, told.tier, told.detect_s) == (None, None, None)
    assert told.fetching_s == 0.0
    assert told.total_s == 9.0


def test_an_agent_that_took_over_in_the_middle_tells_nothing(point: ResumePoint) -> None:
    assert dataclasses.replace(attempt(), spawned_at=None).restarted(None, point) is None
    assert dataclasses.replace(attempt(), stepped=None).restarted(None, point) is None
