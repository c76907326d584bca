"""Where a program is in its loops: what it is told of that, and which loops are refused. The agent is played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from harness import Checkpointer
from harness.errors import StateError
from harness.ipc.control_page import Command
from harness.trainer import driven, validation
from harness.trainer.driven import Driven
from harness.trainer.training import Training
from tests.support.played_agent import BATCHES, PlayedLink, Program, no_checkpointer

pytestmark = pytest.mark.filterwarnings("ignore:a resume in the middle of")

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.fixture
def resharded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """At which steps FSDP2 was to give back what it holds."""
    steps: list[int] = []
    monkeypatch.setattr(Training, "reshard", lambda training: steps.append(training.boundary.step))
    return steps


# ---- what the program is told ---------------------------------------------------------------------------------------


def test_a_loop_tells_its_epoch_and_its_batch(program: Program) -> None:
    told = []
    for epoch in program.ckpt.epochs(range(3, 7, 2)):
        for number, _ in program.ckpt.enumerate(BATCHES[:2], start=10):
            program.train()
            told.append((epoch, program.ckpt.epoch, number, program.ckpt.batch))

    assert told == [(3, 3, 10, 0), (3, 3, 11, 1), (5, 5, 10, 0), (5, 5, 11, 1)]
    assert (program.ckpt.epoch, program.ckpt.batch) == (None, None)


@pytest.mark.parametrize("numbers", [(1, 7), (range(1, 7),), (range(10, 70, 10),), (6,)])
def test_steps_have_the_numbers_that_the_program_wants(numbers: tuple[Any, ...]) -> None:
    expected = list(range(*numbers) if isinstance(numbers[0], int) else numbers[0])
    seen: list[int] = []

    def train(program: Program, notice_at: int | None = None) -> None:
        for step in program.ckpt.steps(*numbers):
            seen.append(step)
            program.train()
            if len(seen) == notice_at:
                program.link.agent.command(Command.SNAPSHOT_AND_LEAVE)

    first = Program()
    with pytest.raises(SystemExit):
        train(first, notice_at=3)
    assert first.ckpt.step_count == 3
    again = Program(PlayedLink(first.link.slot, generation=2))
    train(again)

    assert seen == expected
    assert again.ckpt.step_count == 6


def test_an_inner_loop_tells_its_own_number(program: Program) -> None:
    told = []
    for _ in program.ckpt.batches(BATCHES[:2]):
        for _ in program.ckpt.steps(2):
            program.train()
            told.append(program.ckpt.batch)
        told.append(program.ckpt.batch)

    assert told == [0, 1, 0, 0, 1, 1]


def test_batches_are_as_long_as_their_loader(program: Program) -> None:
    assert len(program.ckpt.batches(BATCHES)) == len(program.ckpt.enumerate(BATCHES)) == 4


def test_in_a_validation_batches_are_numbered_for_themselves(program: Program) -> None:
    for _ in program.ckpt.batches(BATCHES[:3]):
        program.train()
    with program.ckpt.evaluating():
        assert [number for number, _ in program.ckpt.enumerate(BATCHES)] == [0, 1, 2, 3]


def test_one_that_is_off_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS", "off")
    ckpt = Program().ckpt

    told = [(ckpt.epoch, ckpt.batch, number) for _ in ckpt.epochs(2) for number, _ in ckpt.enumerate(BATCHES[:2])]

    assert told == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    assert not ckpt.replaying


def test_the_step_before_a_validation_is_counted_when_that_begins(program: Program) -> None:
    counts = []
    for _ in program.ckpt.batches(BATCHES[:2]):
        counts.append(program.ckpt.step_count)
        program.train()
        with program.ckpt.evaluating():
            counts.append(program.ckpt.step_count)

    assert counts == [0, 1, 1, 2]
    assert program.ckpt.step_count == 2


def test_a_step_after_the_validation_is_another_one(program: Program) -> None:
    for _ in program.ckpt.batches(BATCHES[:2]):
        program.train()
        with program.ckpt.evaluating():
            pass
        program.train()

    assert program.ckpt.step_count == 4


def test_a_validation_after_the_step_of_a_loop_by_hand_is_warned_of(program: Program) -> None:
    program.ckpt.resume()
    program.train()
    program.ckpt.step()
    with program.ckpt.evaluating():
        pass
    program.train()

    with pytest.warns(UserWarning, match=r"comes after ckpt\.step\(\)"):
        program.ckpt.step()


# ---- loops that are refused -----------------------------------------------------------------------------------------


def epochs_in_steps(program: Program) -> None:
    for _ in program.ckpt.steps(2):
        next(iter(program.ckpt.epochs(2)))


def epochs_in_a_loop_by_hand(program: Program) -> None:
    for _ in range(program.ckpt.resume(), 2):
        for _ in program.ckpt.epochs(1):
            for _ in program.ckpt.batches(BATCHES):
                program.train()
        program.ckpt.step()


def step_in_batches(program: Program) -> None:
    for _ in program.ckpt.batches(BATCHES):
        program.train()
        program.ckpt.step()


def step_without_resume(program: Program) -> None:
    program.train()
    program.ckpt.step()


def two_loops_at_once(program: Program) -> None:
    for _ in zip(program.ckpt.batches(BATCHES), program.ckpt.batches(BATCHES), strict=True):
        program.train()


def an_inner_loop_that_stays_open(program: Program) -> None:
    others = iter(program.ckpt.batches(BATCHES))
    for _ in program.ckpt.batches(BATCHES):
        next(others)
        program.train()


def a_loop_in_one_whose_loader_keeps_its_position(program: Program) -> None:
    loader: Any = StatefulDataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1)
    for _ in program.ckpt.batches(loader):
        for _ in program.ckpt.steps(2):
            program.train()


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (epochs_in_steps, r"ckpt\.epochs\(\) inside ckpt\.steps\(\)"),
        (epochs_in_a_loop_by_hand, r"ckpt\.epochs\(\) or ckpt\.steps\(\) cannot be inside"),
        (step_in_batches, r"ckpt\.step\(\) inside ckpt\.batches\(\): .* Leave it out"),
        (step_without_resume, r"range\(ckpt\.resume\(\), n\)"),
        (two_loops_at_once, r"continues while a loop that began after it \(batches\)"),
        (an_inner_loop_that_stays_open, "continues while a loop that began after it"),
        (a_loop_in_one_whose_loader_keeps_its_position, "keeps its own position"),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loop_to_whose_place_no_way_leads_is_refused(
    program: Program, train: Callable[[Program], None], words: str
) -> None:
    with pytest.raises(StateError, match=words):
        train(program)


def test_epochs_with_other_numbers_are_refused() -> None:
    first = left_in(lambda program: program.ckpt.epochs(3, 6))
    again = Program(PlayedLink(first.link.slot, generation=2))

    with pytest.raises(StateError, match=r"taken in epoch 3, and these are range\(0, 3\)"):
        next(again.ckpt.epochs(3))


def left_in(loop: Callable[[Program], Iterator[int]]) -> Program:
    """A program that was left after the second batch of its first epoch."""

    def train() -> None:
        for _ in loop(program):
            for number, _ in program.ckpt.enumerate(BATCHES):
                program.train()
                if number == 1:
                    program.link.agent.command(Command.SNAPSHOT_AND_LEAVE)

    program = Program()
    with pytest.raises(SystemExit):
        train()
    return program


# ---- validations that take long -------------------------------------------------------------------------------------


def sealed_at(program: Program, *, inside: bool, validations: int = 2) -> list[int]:
    """After each validation: the step that is sealed, 0 before the first."""
    sealed = []

    def validate() -> None:
        with program.ckpt.evaluating():
            pass
        sealed.append(program.ckpt.durable_step or 0)

    for _ in program.ckpt.epochs(validations):
        for _ in program.ckpt.batches(BATCHES[:2]):
            program.train()
        if not inside:
            validate()
        for _ in program.ckpt.batches(BATCHES[:1]):
            program.train()
            if inside:
                validate()
    return sealed


def test_the_first_validation_begins_with_a_snapshot_since_it_may_take_long(program: Program) -> None:
    assert sealed_at(program, inside=False) == [2, 2]


@pytest.mark.parametrize("inside", [False, True])
def test_a_validation_after_a_long_one_begins_with_a_snapshot(
    program: Program, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "LONG_S", 0.0)

    assert sealed_at(program, inside=inside) == ([0, 6] if inside else [2, 5])


def test_in_a_loop_a_validation_that_is_not_known_to_take_long_waits_for_the_end_of_the_step(program: Program) -> None:
    assert sealed_at(program, inside=True) == [0, 0]


def test_nothing_is_saved_twice_for_a_validation(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "LONG_S", 0.0)
    for _ in program.ckpt.epochs(1):
        for _ in program.ckpt.batches(BATCHES[:2]):
            program.train()
        for _ in range(3):
            with program.ckpt.evaluating():
                pass

    assert program.link.seals == 1


def test_a_validation_for_which_there_is_no_slot_begins_without_a_snapshot(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the next step would come after the validation, and save what needs no saving."""
    monkeypatch.setattr(program.link, "granted", lambda *_: None)
    for number, _ in enumerate(program.ckpt.epochs(2)):
        for _ in program.ckpt.batches(BATCHES[:2]):
            program.train()
        if number == 0:
            with program.ckpt.evaluating():
                pass
            monkeypatch.undo()
        else:
            assert program.ckpt.durable_step is None


class WithoutDefaults(torch.optim.Optimizer):
    """As Muon is often written. Loading a state gives it the default `differentiable`, which its groups lack."""

    def __init__(self, params: Any) -> None:
        super().__init__([{"params": list(params), "lr": 0.1}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["momentum"] = self.state[param].get("momentum", 0.0) + param.grad
                    param -= group["lr"] * self.state[param]["momentum"]


def test_an_optimizer_without_defaults_is_led_back_and_restored_in_one_start() -> None:
    """The way back to a validation inside a step loads its state twice."""

    def train(link: PlayedLink, notice_at: int | None = None) -> torch.Tensor:
        model = torch.nn.Linear(2, 1)
        optimizer = WithoutDefaults(model.parameters())
        ckpt = Checkpointer(model=model, optimizer=optimizer, link=link)  # type: ignore[arg-type]
        torch.nn.init.ones_(model.weight)
        for step in ckpt.steps(6):
            if step == notice_at:
                link.agent.command(Command.SNAPSHOT_AND_LEAVE)
            if step % 2 == 0:
                with ckpt.evaluating():
                    pass
            optimizer.zero_grad()
            model(BATCHES[step % 2]).sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    unbroken = train(PlayedLink())
    first = PlayedLink()
    with pytest.raises(SystemExit):
        train(first, notice_at=2)

    assert torch.equal(train(PlayedLink(first.slot, generation=2)), unbroken)


def test_after_a_resume_a_validation_before_a_step_is_a_place_again() -> None:
    """The random states before the iteration lead there. The life before knew that they are needed."""

    def train(program: Program, notice_at: int) -> None:
        for step in program.ckpt.steps(8):
            if step % 2 == 0:
                if step == notice_at:
                    program.link.agent.command(Command.SNAPSHOT_AND_LEAVE)
                with program.ckpt.evaluating():
                    pass
            program.train()
            if step == notice_at:
                program.link.agent.command(Command.SNAPSHOT_AND_LEAVE)

    first = Program()
    with pytest.raises(SystemExit):
        train(first, notice_at=3)
    again = Program(PlayedLink(first.link.slot, generation=2))
    with pytest.raises(SystemExit):
        train(again, notice_at=4)

    assert (first.ckpt.step_count, again.ckpt.step_count) == (4, 4)


# ---- a place that the program does not come back to -----------------------------------------------------------------


def test_a_validation_that_is_not_reached_again_costs_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A counter that begins anew decides about it: the snapshot before it can be resumed all the same."""

    def train(program: Program, *, notice_at: int | None = None) -> int:
        for trained, _ in enumerate(program.ckpt.batches(loader), 1):
            program.train()
            if trained == notice_at:
                program.link.agent.command(Command.SNAPSHOT_AND_LEAVE)
            if trained % 3 == 0:
                with program.ckpt.evaluating():
                    pass
        return program.ckpt.step_count

    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1)
    first = Program()
    with pytest.raises(SystemExit):
        train(first, notice_at=6)
    weights = first.model.weight.clone()
    assert first.ckpt.step_count == 6

    again = Program(PlayedLink(first.link.slot, generation=2))
    assert train(again) == 8
    assert "has not come back to that place" in capsys.readouterr().err
    assert not torch.equal(again.model.weight, weights)


# ---- every boundary, whatever is due --------------------------------------------------------------------------------


def test_every_boundary_of_a_script_has_fsdp2_give_back_what_it_holds(program: Program, resharded: list[int]) -> None:
    """On another rank a snapshot may be laid out there, which has it do so on that rank: they have to stay alike."""
    for _ in program.ckpt.epochs(1):
        for number, _ in program.ckpt.enumerate(BATCHES[:2]):
            program.train()
            if number:
                with program.ckpt.evaluating():
                    pass
    del resharded[-1:]  # of the end, which is the place of the last snapshot

    # The end of the first step, which is counted behind it; the second one's validation, and its end
    assert resharded == [0, 1, 2]


def test_every_step_of_a_loop_by_hand_is_one(resharded: list[int]) -> None:
    program = Program()
    for _ in range(program.ckpt.resume(), 3):
        program.train()
        program.ckpt.step()

    assert resharded == [0, 1, 2]


def test_every_boundary_of_a_framework_is_one(monkeypatch: pytest.MonkeyPatch, resharded: list[int]) -> None:
    program = Program()
    monkeypatch.setattr(driven.opening, "open_link", lambda _: PlayedLink())
    framework = Driven({}, dict)
    framework.begin({"model": program.model, "optimizer": program.optimizer})
    framework.begin_call()
    framework.restore()
    for step in (1, 2):
        program.train()
        framework.boundary(step)
    with framework.validation(2, resumable=True):
        pass
    framework.finish(2)
    framework.close()

    assert resharded == [0, 1, 2, 2]
