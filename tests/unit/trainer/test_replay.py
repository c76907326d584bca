"""The way back to a snapshot's place, call by call: no agent, no tensor, no loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.errors import StateError
from harness.trainer.position import Position
from harness.trainer.replay import Loop, Replay, Way

RUN, SKIP, RESTORE = Way.RUN, Way.SKIP, Way.RESTORE


def at(kind: str, *, stage: int = 1, epoch: int | None = None, loop: int = 1, **more: int) -> Replay:
    """A program that starts again, with a snapshot that was taken there."""
    replay = Replay()
    replay.aim(Position(stage=stage, epoch=epoch, loop=loop, kind=kind, **more))
    return replay


def test_without_a_snapshot_the_first_loop_begins_and_the_others_run() -> None:
    replay = Replay()

    assert replay.enter_stage() is RUN
    with replay.epoch(0):
        assert replay.enter_loop("batches") is RESTORE
        replay.arrive(None)
        assert replay.enter_loop("batches") is RUN
    assert replay.enter_stage() is RUN


def test_epochs_before_the_snapshot_s_are_not_begun_and_its_loop_restores() -> None:
    replay = at("batches", epoch=3)

    assert replay.enter_stage() is RUN
    assert replay.first_epoch == 3
    with replay.epoch(3):
        assert replay.enter_loop("batches") is RESTORE
        replay.arrive(Position(stage=1, epoch=3, loop=1, kind="batches"))
    assert replay.first_epoch is None, "the next stage begins at its beginning"


def test_inner_loops_before_the_snapshot_s_are_passed_over() -> None:
    replay = at("batches", epoch=0, loop=3)
    replay.enter_stage()

    with replay.epoch(0):
        assert [replay.enter_loop("batches") for _ in range(3)] == [SKIP, SKIP, RESTORE]


def test_outermost_loops_before_the_snapshot_s_are_passed_over() -> None:
    replay = at("steps", stage=3)

    assert [replay.enter_stage() for _ in range(3)] == [SKIP, SKIP, RUN]
    assert replay.enter_loop("steps") is RESTORE


def test_a_stage_that_was_over_restores_at_once_and_hands_out_nothing() -> None:
    replay = at("end", iteration=10)

    assert replay.enter_stage() is RESTORE
    replay.arrive(Position(stage=1, kind="end", iteration=10))
    assert replay.place.iteration == 10


def test_steps_that_were_over_restore_whatever_loop_they_are() -> None:
    replay = at("end", loop=1, iteration=10)

    assert replay.enter_stage() is RESTORE
    assert replay.enter_loop("steps", at_its_end=True) is RESTORE


def test_a_validation_that_was_about_to_begin_restores() -> None:
    replay = at("evaluating", epoch=0, evaluation=2)
    replay.enter_stage()

    with replay.epoch(0):
        assert replay.enter_loop("batches") is SKIP
        assert [replay.enter_evaluation() for _ in range(2)] == [RUN, RESTORE]


def test_loops_by_hand_restore_at_once() -> None:
    assert at("step").begin_by_hand() is RESTORE
    assert at("end").begin_by_hand() is RESTORE
    again = Replay()
    assert again.begin_by_hand() is RESTORE
    again.arrive(None)
    assert again.begin_by_hand() is RUN


def epochs_in_epochs(replay: Replay) -> None:
    replay.enter_stage()
    with replay.epoch(0):
        replay.enter_stage()


def another_kind_of_loop(replay: Replay) -> None:
    replay.enter_stage()
    with replay.epoch(0):
        replay.enter_loop("steps")


def an_epoch_without_its_loop(replay: Replay) -> None:
    replay.enter_stage()
    with replay.epoch(0):
        pass
    replay.check_reached("epoch 0")


def a_loop_by_hand(replay: Replay) -> None:
    replay.begin_by_hand()


def loops_outside_of_epochs(replay: Replay) -> None:
    replay.enter_loop("batches")
    replay.enter_stage()
    replay.enter_stage()
    replay.enter_loop("batches")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (epochs_in_epochs, r"ckpt.epochs\(\) inside ckpt.epochs"),
        (another_kind_of_loop, r"taken in a loop of ckpt.batches\(\), and this is ckpt.steps\(\)"),
        (an_epoch_without_its_loop, "epoch 0 ended without reaching the place of the snapshot"),
        (a_loop_by_hand, r"ckpt.resume\(\) cannot continue there"),
        (loops_outside_of_epochs, r"loop 1 begins, but the place of the snapshot \(batches 1\) was not reached"),
    ],
)
def test_a_program_with_other_loops_is_refused(program: Callable[[Replay], None], words: str) -> None:
    with pytest.raises(StateError, match=words):
        program(at("batches", epoch=0))


# ---- how a loop is left ---------------------------------------------------------------------------------------------


def test_a_loop_of_ours_that_begins_takes_an_early_end_back() -> None:
    replay = Replay()
    replay.enter_stage()
    replay.early = True
    assert replay.left_early(exiting=False)

    replay.enter_loop("batches")
    assert not replay.left_early(exiting=False)


def test_an_inner_loop_takes_nothing_back() -> None:
    replay = Replay()
    replay.enter_stage()
    replay.early = True
    with replay.epoch(0):
        replay.enter_loop("batches")
    assert replay.left_early(exiting=False)


def test_epochs_that_something_has_kept_between_two_of_them_were_not_left() -> None:
    replay = Replay()
    replay.enter_stage()
    replay.early = True
    with replay.epoch(0):
        assert not replay.left_early(exiting=False)
        assert replay.left_early(exiting=True)
        with replay.handing_out(Loop("batches", 1)):
            assert replay.left_early(exiting=False)


def test_the_end_of_a_stage_is_no_early_one() -> None:
    replay = Replay()
    replay.enter_stage()
    replay.early = True
    replay.end_stage(10)

    assert not replay.left_early(exiting=False)
    assert (replay.place.epoch, replay.place.iteration) == (None, 10)


def test_whether_a_boundary_is_still_to_come() -> None:
    replay = Replay()
    assert not replay.loops
    with replay.epoch(0):
        assert replay.loops
    with replay.handing_out(Loop("batches", 1)):
        assert replay.loops
    replay.begin_by_hand()
    assert replay.loops
