"""How a program may leave its loops, and what that makes of the run. The agent is played."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness import Checkpointer
from harness.config.settings import SOCKET_VARIABLE
from harness.core import messages
from harness.errors import ConfigError, StateError
from harness.ipc.control_page import Command
from harness.ipc.slots import Slot
from harness.trainer import saving
from harness.trainer.process import Process
from tests.support.played_agent import BATCHES, PlayedLink, Program, no_checkpointer

pytestmark = [
    pytest.mark.filterwarnings("ignore:a resume in the middle of"),
    pytest.mark.filterwarnings("ignore:.*random numbers were drawn between Checkpointer"),
]

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


@pytest.fixture
def program() -> Program:
    return Program()


# ---- the end of the training, and what is none ----------------------------------------------------------------------


def all_steps(program: Program) -> None:
    for _ in program.ckpt.steps(4):
        program.train()


def all_epochs(program: Program) -> None:
    for _ in program.ckpt.epochs(2):
        for _ in program.ckpt.batches(BATCHES):
            program.train()


def inner_loop_broken_off(program: Program) -> None:
    for _ in program.ckpt.epochs(2):
        for number, _ in enumerate(program.ckpt.batches(BATCHES)):
            program.train()
            if number == 1:
                break


def batches_broken_off_in_a_range(program: Program) -> None:
    for _ in range(2):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
            if program.ckpt.step_count == 3:
                break


def some_of_the_batches(program: Program) -> None:
    for _ in program.ckpt.epochs(2):
        for _ in islice(program.ckpt.batches(BATCHES), 2):
            program.train()


def some_of_the_steps(program: Program) -> None:
    for _ in islice(program.ckpt.steps(100), 3):
        program.train()


def as_many_steps_as_there_are_batches(program: Program) -> None:
    for _ in zip(
        program.ckpt.steps(100),
        BATCHES,
        strict=False,
    ):
        program.train()


def shown(numbers: Iterator[int]) -> Iterator[int]:
    """Hands them on, as tqdm does."""
    for number in numbers:  # noqa: UP028
        yield number


def epochs_through_something_of_the_programs(program: Program) -> None:
    for _ in shown(islice(program.ckpt.epochs(5), 2)):
        for _ in program.ckpt.batches(BATCHES):
            program.train()


RATES = (0.1, 0.2)


def a_zip_in_a_variable(program: Program) -> None:
    pairs = zip(RATES, program.ckpt.epochs(100), strict=False)
    for _ in pairs:
        for _ in program.ckpt.batches(BATCHES):
            program.train()


class Bar:
    """Hands on what it keeps, as tqdm does."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        numbers = self.numbers
        for number in numbers:  # noqa: UP028
            yield number


def a_zip_below_a_bar(program: Program) -> None:
    for _ in Bar(zip(RATES, program.ckpt.epochs(100), strict=False)):
        for _ in program.ckpt.batches(BATCHES):
            program.train()


KEPT: list[Any] = []


def a_zip_that_nobody_lets_go(program: Program) -> None:
    KEPT[:] = [zip(RATES, program.ckpt.epochs(100), strict=False)]
    for _ in KEPT[0]:
        for _ in program.ckpt.batches(BATCHES):
            program.train()


def an_exit_that_is_caught(program: Program) -> None:
    for number in range(program.ckpt.resume(), 4):
        program.train()
        if number == 1:
            with contextlib.suppress(SystemExit):
                _exit(program)
        program.ckpt.step()


def an_exit_that_is_caught_at_the_end(program: Program) -> None:
    by_hand(program)
    program.ckpt._training.process._exit_failed = program.ckpt._training.process.exiting = True


def epochs_and_then_batches(program: Program) -> None:
    all_epochs(program)
    for _ in program.ckpt.batches(BATCHES):
        program.train()


def by_hand(program: Program) -> None:
    for _ in range(program.ckpt.resume(), 4):
        program.train()
        program.ckpt.step()


def broken_off_by_hand(program: Program) -> None:
    for _ in range(program.ckpt.resume(), 100):
        program.train()
        program.ckpt.step()
        if program.ckpt.step_count == 3:
            break


def an_early_stop_and_another_stage(program: Program) -> None:
    for _ in program.ckpt.epochs(100):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
        break
    all_steps(program)


def an_early_stop_and_a_loop_of_batches(program: Program) -> None:
    for _ in program.ckpt.steps(100):
        program.train()
        break
    for _ in program.ckpt.batches(BATCHES):
        program.train()


@pytest.mark.parametrize(
    "train",
    [
        all_steps, all_epochs, inner_loop_broken_off, batches_broken_off_in_a_range, some_of_the_batches,
        some_of_the_steps, as_many_steps_as_there_are_batches, epochs_through_something_of_the_programs, by_hand,
        broken_off_by_hand, an_early_stop_and_another_stage, an_early_stop_and_a_loop_of_batches, a_zip_in_a_variable,
        a_zip_below_a_bar, a_zip_that_nobody_lets_go, an_exit_that_is_caught, epochs_and_then_batches,
        an_exit_that_is_caught_at_the_end,
    ],
)  # fmt: skip
def test_a_training_that_came_to_its_end_is_finished(program: Program, train: Callable[[Program], None]) -> None:
    train(program)
    assert program.end() == "finished"
    assert program.ckpt._training.stager.sealed_step == program.ckpt.step_count, "the final state is saved"


def epochs_broken_off(program: Program) -> None:
    for _ in program.ckpt.epochs(100):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
        with program.ckpt.evaluating():
            break


def steps_broken_off(program: Program) -> None:
    for step in program.ckpt.steps(100):
        program.train()
        if step == 2:
            break


def steps_returned_from(program: Program) -> None:
    for step in program.ckpt.steps(100):
        program.train()
        if step == 2:
            return


def steps_exited_from(program: Program) -> None:
    for step in program.ckpt.steps(100):
        program.train()
        if step == 2:
            _exit(program)


def inner_loop_exited_from(program: Program) -> None:
    for _ in program.ckpt.epochs(100):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
            _exit(program)


def batches_exited_from_in_a_range(program: Program) -> None:
    for _ in range(100):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
            if program.ckpt.step_count == 3:
                _exit(program)


def epochs_broken_off_through_a_bar(program: Program) -> None:
    for _ in Bar(program.ckpt.epochs(5)):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
        break


def epochs_broken_off_through_something_of_the_programs(program: Program) -> None:
    for _ in shown(program.ckpt.epochs(5)):
        for _ in program.ckpt.batches(BATCHES):
            program.train()
        break


def a_second_stage_broken_off(program: Program) -> None:
    all_epochs(program)
    for step in program.ckpt.steps(100):
        program.train()
        if step == 2:
            break


def _exit(program: Program) -> None:
    """`sys.exit()`, as our hook sees it."""
    program.ckpt._training.process.exiting = True
    program.ckpt._training.process._on_sys_exit()
    sys.exit(0)


EARLY = [
    epochs_broken_off, steps_broken_off, steps_returned_from, steps_exited_from, inner_loop_exited_from,
    batches_exited_from_in_a_range, epochs_broken_off_through_a_bar,
    epochs_broken_off_through_something_of_the_programs, a_second_stage_broken_off,
]  # fmt: skip


def ends(program: Program, train: Callable[[Program], None]) -> str:
    """Run to the end of the process."""
    with contextlib.suppress(SystemExit):
        train(program)
    return program.end()


@pytest.mark.parametrize("train", EARLY)
def test_a_training_that_leaves_its_outermost_loop_early_is_not(
    program: Program, train: Callable[[Program], None]
) -> None:
    assert ends(program, train) == "stopped early"


Seen = list[tuple[int, torch.Tensor]]
"""Each iteration of a loop, and the weights as it began."""


def weights(program: Program) -> torch.Tensor:
    return program.model.weight.detach().clone()


def some_steps(program: Program, leave_at: int | None, seen: Seen) -> None:
    for step in program.ckpt.steps(6):
        seen.append((step, weights(program)))
        if step == leave_at:
            program.ckpt.save()
        program.train()
        if step == leave_at:
            break


def some_epochs(program: Program, leave_at: int | None, seen: Seen) -> None:
    for epoch in program.ckpt.epochs(6):
        seen.append((epoch, weights(program)))
        for _ in program.ckpt.batches(BATCHES):
            program.train()
        if epoch == leave_at:
            program.ckpt.save(wait=True)
            break


def steps_left_at_the_top(program: Program, leave_at: int | None, seen: Seen) -> None:
    for step in program.ckpt.steps(6):
        if step == leave_at:
            program.ckpt.save()
            break
        seen.append((step, weights(program)))
        program.train()


@pytest.mark.parametrize(
    ("train", "leave_at", "steps"), [(some_steps, 2, 3), (some_epochs, 1, 8), (steps_left_at_the_top, 3, 3)]
)
def test_a_snapshot_that_is_wanted_just_before_a_break_is_taken_there(
    program: Program, train: Callable[[Program, int | None, Seen], None], leave_at: int, steps: int
) -> None:
    seen: Seen = []
    train(program, leave_at, seen)
    at_the_break = weights(program)
    with torch.no_grad():
        program.model.weight.zero_()  # what comes after the loop is not in it

    assert program.end() == "stopped early"
    assert program.ckpt._training.stager.sealed_step == program.ckpt.step_count == steps
    again = Program(PlayedLink(program.link.sealed, generation=2))
    train(again, None, later := [])
    assert [number for number, _ in seen + later] == list(range(6)), "--continue goes on with the next iteration"
    assert torch.equal(later[0][1], at_the_break)
    assert again.end() == "finished"


def raises(program: Program) -> None:
    with contextlib.suppress(OSError):
        for _ in program.ckpt.steps(6):
            program.ckpt.save()
            program.train()
            raise OSError


def raises_in_an_epoch(program: Program) -> None:
    with contextlib.suppress(OSError):
        for _ in program.ckpt.epochs(6):
            for _ in program.ckpt.batches(BATCHES):
                program.train()
            program.ckpt.save()
            raise OSError


def raises_below_a_generator(program: Program) -> None:
    with contextlib.suppress(OSError):
        for _ in shown(program.ckpt.steps(6)):
            program.ckpt.save()
            program.train()
            raise OSError


def leaves_without_a_word(program: Program) -> None:
    for _ in program.ckpt.steps(6):
        program.ckpt._training.boundary.want()  # as when the agent has asked, and there was no slot
        program.train()
        break


@pytest.mark.parametrize("train", [raises, raises_in_an_epoch, raises_below_a_generator, leaves_without_a_word])
def test_an_exception_that_leaves_a_loop_saves_nothing_of_the_step_that_it_breaks(
    program: Program, train: Callable[[Program], None]
) -> None:
    train(program)

    assert program.end() == "stopped early"
    assert program.ckpt._training.stager.sealed_step is None


def broken_off_below_a_generator(program: Program) -> None:
    for _ in shown(program.ckpt.steps(6)):
        program.ckpt.save()
        program.train()
        break


def returned_from(program: Program) -> int:
    for step in program.ckpt.steps(6):
        try:
            program.ckpt.save()
            program.train()
            return step
        finally:
            program.ckpt.extra["a"] = 1
    return 0


def broken_off_after_an_error(program: Program) -> None:
    for _ in program.ckpt.steps(6):
        program.ckpt.save()
        program.train()
        try:
            raise OSError
        except OSError:
            break


@pytest.mark.parametrize("train", [broken_off_below_a_generator, returned_from, broken_off_after_an_error])
def test_a_break_and_a_return_are_told_from_an_exception(program: Program, train: Callable[[Program], None]) -> None:
    train(program)

    assert program.end() == "stopped early"
    assert program.ckpt._training.stager.sealed_step == program.ckpt.step_count == 1


def test_an_iteration_that_a_zip_has_not_begun_is_no_step() -> None:
    program = Program()
    ckpt = Checkpointer(model=program.model, link=PlayedLink())
    for _ in zip(ckpt.steps(100), BATCHES, strict=False):
        pass

    assert ckpt.step_count == len(BATCHES)


def test_a_snapshot_that_cannot_be_taken_as_the_loop_is_left_is_said(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in program.ckpt.steps(6):
        program.train()
        program.ckpt.extra.setdefault("list", []).append(object())
        program.ckpt.save()
        break

    assert program.end() == "stopped early"
    assert "no snapshot was taken as the loop was left: " in capsys.readouterr().err


@pytest.mark.parametrize("train", [*EARLY, by_hand, broken_off_by_hand])
def test_with_a_notice_in_force_no_way_out_is_an_end(program: Program, train: Callable[[Program], None]) -> None:
    program.ckpt._training.at_boundary = lambda kind, entering=False: None  # type: ignore[method-assign]  # none before the program leaves
    program.link.agent.command(Command.SNAPSHOT_AND_LEAVE)

    assert ends(program, train) == "left"
    assert messages.Leaving in program.link.told


def test_epochs_that_are_drawn_before_the_training_are_refused(program: Program) -> None:
    """The run was finished at step 0 before anything was trained; the next start trained nothing at all."""
    with pytest.raises(StateError, match=r"used up before the training"):
        list(program.ckpt.epochs(5))
    assert messages.Finished not in program.link.told


@pytest.mark.parametrize(("train", "held"), [(by_hand, True), (all_steps, False), (all_epochs, False)])
def test_an_end_that_only_the_process_tells_is_held_until_its_exit_code_is_known(
    program: Program, train: Callable[[Program], None], held: bool
) -> None:
    train(program)
    assert program.end() == "finished"
    assert program.link.held is held


def test_without_an_agent_that_is_its_parent_nobody_knows_the_exit_code(program: Program) -> None:
    program.link.detached = True
    by_hand(program)
    assert program.end() == "finished"
    assert program.link.held is False


def test_an_exit_before_any_step_is_not_the_end_of_a_training(program: Program) -> None:
    program.ckpt.resume()
    assert program.end() == "left"


# ---- signals --------------------------------------------------------------------------------------------------------


def test_a_program_with_a_handler_of_its_own_leaves_with_what_it_has_trained_by_hand(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves at its own flag, right after the boundary at which the agent has not answered yet."""
    monkeypatch.setattr(Process, "has_handler", lambda self, signum: True)
    monkeypatch.setattr(program.link, "poke", lambda signum: program.link.agent.command(Command.SNAPSHOT_AND_LEAVE))

    def train() -> None:
        for _ in range(program.ckpt.resume(), 100):
            program.train()
            if program.ckpt.step_count == 2:
                assert program.ckpt._training.takes_signal(signal.SIGTERM)
            program.ckpt.step()

    with pytest.raises(SystemExit, match="75"):
        train()

    assert program.ckpt._training.stager.sealed_step == 3


def test_a_signal_that_nobody_has_answered_yet_is_a_notice(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_ANSWER_S", 0.0)
    by_hand(program)
    program.ckpt._training.takes_signal(signal.SIGTERM)

    assert program.end() == "left"


# ---- snapshots that the program waits for ---------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [all_steps, all_epochs])
def test_a_loop_ends_once_its_last_snapshot_is_durable(
    loop: Callable[[Program], None], program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = program.link.agent.tell_steps
    looks: list[int] = []

    def look_again(_: float) -> None:
        looks.append(program.ckpt.step_count)
        if len(looks) == 3:
            tell(local=None, durable=looks[-1])

    monkeypatch.setattr(program.link.agent, "tell_steps", lambda **_: None)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=look_again))
    loop(program)

    assert looks == [program.ckpt.step_count] * 3
    assert program.ckpt.durable_step == program.ckpt.step_count


@pytest.mark.parametrize("steps", [1, 3])
def test_save_and_wait_waits_for_a_slot_too(program: Program, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """As it is in the first seconds of a training, and while earlier snapshots are on their way."""
    ready = program.link.granted
    looks: list[int] = []

    def granted_late(used: int, sealed: int) -> tuple[int, Slot] | None:
        looks.append(sealed)
        return ready(used, sealed) if len(looks) > 3 else None

    monkeypatch.setattr(program.link, "granted", granted_late)
    for _ in program.ckpt.epochs(1):
        for _ in islice(program.ckpt.batches(BATCHES), steps):
            program.train()
        program.ckpt.save(wait=True)
        with program.ckpt.evaluating():
            assert program.ckpt.durable_step == steps


def test_save_and_wait_ends_where_the_agent_is_gone(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.link, "granted", lambda used, sealed: None)
    monkeypatch.setattr(program.link, "gone", True)
    for _ in program.ckpt.steps(2):
        program.train()
        program.ckpt.save(wait=True)
    assert program.ckpt.durable_step is None


# ---- one after the other --------------------------------------------------------------------------------------------


def test_one_that_is_closed_is_out_of_the_way_of_the_next(program: Program) -> None:
    for _ in program.ckpt.steps(3):
        program.train()
    program.ckpt.close()
    another = Program()
    for _ in another.ckpt.steps(2):
        another.train()

    assert program.link.parted == {"exception": False, "early": False, "hopeless": False, "process_lives": True}
    assert messages.Finished in program.link.told
    assert (program.ckpt.step_count, another.ckpt.step_count) == (3, 2), "optimizers are told to one alone"
    assert another.ckpt._training.stager.sealed_step == 2


def test_a_variable_of_the_program_does_not_outlive_its_step(program: Program) -> None:
    """The outputs of the first step had stayed in memory until the function that trains returned."""
    kept = None
    for _ in program.ckpt.steps(2):
        assert kept is None or kept() is None
        outputs = torch.ones(3)
        kept = weakref.ref(outputs)
        program.train()
        del outputs


@pytest.mark.parametrize("kind", ["steps", "batches", "epochs"])
def test_a_loop_that_the_garbage_collector_ends_asks_for_no_random_state(
    program: Program, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection may have begun in torch.get_rng_state, which holds a lock: a training stood still for ever."""
    loop = iter(getattr(program.ckpt, kind)(BATCHES if kind == "batches" else 3))
    next(loop)
    program.train()
    cycle: list[Any] = [loop]
    cycle.append(cycle)
    del loop, cycle
    asked: list[str] = []
    monkeypatch.setattr(program.ckpt._training.replay, "capture_rng", lambda: asked.append("asked"))

    gc.collect()

    assert not asked
    assert not program.ckpt._training.replay.stack


def test_a_notice_at_the_end_of_one_is_told_to_the_next(program: Program) -> None:
    for _ in program.ckpt.steps(3):
        program.train()
    program.ckpt._training.takes_signal(signal.SIGTERM)
    again, third = Program(), Program()

    assert program.link.signals == again.link.signals == [signal.SIGTERM]
    assert third.link.signals == [signal.SIGTERM], "the one before it has not answered either"


def test_a_notice_that_was_answered_is_not_told_again(program: Program) -> None:
    program.link.agent.command(Command.SNAPSHOT_AND_LEAVE)
    program.ckpt._training.takes_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        by_hand(program)

    assert Program().link.signals == []


def test_the_next_one_closes_the_one_before(program: Program) -> None:
    by_hand(program)
    Program()

    assert messages.Finished in program.link.told, "a loop by hand ends with it"
    assert program.link.parted["process_lives"]


def test_an_error_that_was_caught_in_between_does_not_fail_what_comes_after(program: Program) -> None:
    for _ in program.ckpt.steps(3):
        program.train()
    program.ckpt._training.process._thread_failed = True
    program.ckpt.close()

    assert not program.link.parted["exception"]


def test_a_loop_that_was_broken_off_is_stopped_early_when_it_is_closed(program: Program) -> None:
    steps_broken_off(program)
    program.ckpt.close()

    assert program.link.parted["early"]


def test_none_is_made_in_the_middle_of_another_s_loop(program: Program) -> None:
    for _ in program.ckpt.steps(3):
        with pytest.raises(StateError, match="inside one of its loops"):
            Program()
        with pytest.raises(StateError, match="inside one of its loops"):
            program.ckpt.close()
        program.train()

    assert program.end() == "finished"


def test_a_closed_one_lets_loops_run_and_saves_nothing(program: Program) -> None:
    program.ckpt.close()
    program.ckpt.close()
    for _ in program.ckpt.steps(2):
        program.train()

    assert program.link.seals == 0


def test_under_harness_run_there_is_one_and_the_second_is_refused(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "played")

    with pytest.raises(ConfigError, match="`harness run` runs one training"):
        Checkpointer(model=nn.Linear(2, 2))
    for _ in program.ckpt.steps(2):
        program.train()
    assert program.end() == "finished", "the first one goes on"


# ---- refused --------------------------------------------------------------------------------------------------------


def test_a_state_can_have_any_name_in_a_mapping() -> None:
    """`store`, `run`, `local` and `loader` are arguments."""
    model, teacher = nn.Linear(2, 2), nn.Linear(2, 2)

    link: Any = PlayedLink()
    ckpt = Checkpointer({"store": model, "loader": teacher}, ema=nn.Linear(2, 2), link=link)

    assert list(ckpt._training.states) == ["store", "loader", "ema"]
    with pytest.raises(StateError, match="two states are named ema"):
        Checkpointer({"ema": model}, ema=teacher)


def test_our_own_errors_are_hopeless_also_inside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(lambda signum: True, lambda: None, lambda: None)
    assert not process.hopeless
    wrapped = RuntimeError("of a framework")
    wrapped.__cause__ = StateError("other loops")
    for error, hopeless in ((wrapped, True), (ConfigError("x"), True), (RuntimeError("x"), False)):
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        assert (process.failed, process.hopeless) == (True, hopeless)
