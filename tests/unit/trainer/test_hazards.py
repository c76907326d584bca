"""What a resume could not repeat is told in the first life. The agent is played."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from harness import Checkpointer
from harness.errors import StateError
from tests.support.played_agent import BATCHES, PlayedLink, Program, no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


@pytest.fixture
def program() -> Program:
    return Program()


def told(train: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(warning.message) for warning in caught]


# ---- something counts the iterations --------------------------------------------------------------------------------


def enumerated(program: Program) -> None:
    for _ in enumerate(program.ckpt.batches(BATCHES)):
        program.train()


def zipped(program: Program) -> None:
    for _ in zip(program.ckpt.batches(BATCHES), "abcd", strict=True):
        program.train()


def sliced(program: Program) -> None:
    for _ in itertools.islice(program.ckpt.batches(BATCHES), 3):
        program.train()


def steps_enumerated(program: Program) -> None:
    for _ in enumerate(program.ckpt.steps(4)):
        program.train()


def epochs_zipped(program: Program) -> None:
    for _ in zip("ab", program.ckpt.epochs(2), strict=True):
        for _ in program.ckpt.batches(BATCHES):
            program.train()


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (enumerated, "enumerate() begins at 0 again: use ckpt.enumerate(loader)"),
        (zipped, "what zip() pairs with it begins again"),
        (sliced, "islice() counts from 0 again"),
        (steps_enumerated, "ckpt.steps() is not exact here: enumerate() begins"),
        (epochs_zipped, "ckpt.epochs() is not exact here: what zip() pairs"),
    ],
)
def test_what_counts_anew_after_a_resume_is_told(
    program: Program, train: Callable[[Program], None], words: str
) -> None:
    (said,) = told(lambda: train(program))
    assert words in said


def through_a_generator(program: Program) -> None:
    for _ in (batch * 2 for batch in program.ckpt.batches(BATCHES)):
        program.train()


def mapped(program: Program) -> None:
    for _ in map(torch.neg, program.ckpt.batches(BATCHES)):
        program.train()


def numbered(program: Program) -> None:
    for _ in program.ckpt.enumerate(BATCHES):
        program.train()


def others_enumerated(program: Program) -> None:
    for _ in program.ckpt.steps(2):
        for _ in enumerate(BATCHES):
            program.train()


@pytest.mark.parametrize("train", [through_a_generator, mapped, numbered, others_enumerated])
def test_what_counts_nothing_is_not(program: Program, train: Callable[[Program], None]) -> None:
    assert told(lambda: train(program)) == []


# ---- one batch ahead ------------------------------------------------------------------------------------------------


def epochs_alone(program: Program) -> None:
    for _ in program.ckpt.epochs(1, 4):
        for _ in range(2):
            program.train()


def epochs_over_a_plain_loader(program: Program) -> None:
    for _ in program.ckpt.epochs(2):
        for _ in DataLoader(TensorDataset(torch.ones(4)), batch_size=2):
            program.train()
        with program.ckpt.evaluating():
            pass


@pytest.mark.parametrize("train", [epochs_alone, epochs_over_a_plain_loader])
def test_epochs_without_steps_in_them_are_told(program: Program, train: Callable[[Program], None]) -> None:
    (said,) = told(lambda: train(program))
    assert "nothing is saved before the last epoch is over" in said


def test_epochs_of_fewer_batches_than_a_step_has_are_not_told() -> None:
    program = Program(accumulate=5)

    def train() -> None:
        for _ in program.ckpt.epochs(3):
            for _ in program.ckpt.batches(BATCHES[:2]):
                program.train()

    assert told(train) == []


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    following = next(batches, None)
    while following is not None:
        now, following = following, next(batches, None)
        yield now


def test_a_wrapper_that_reads_ahead_is_told(program: Program) -> None:
    def train() -> None:
        for _ in ahead(iter(program.ckpt.batches(BATCHES))):
            program.train()

    (said,) = told(train)
    assert "reads ahead, the batch that it holds is lost" in said


def in_steps(program: Program, wrapper: Callable[[Any], Any], loader: Any) -> None:
    batches = None
    for _ in program.ckpt.steps(5):
        batches = batches or wrapper(iter(loader))
        next(batches)
        program.train()


def begun_before(program: Program, wrapper: Callable[[Any], Any], loader: Any) -> None:
    batches = wrapper(iter(loader))
    for _ in program.ckpt.steps(5):
        next(batches), next(batches)
        program.train()


def plainly(program: Program, wrapper: Callable[[Any], Any], loader: Any) -> None:
    for _ in wrapper(iter(loader)):
        program.train()
        program.ckpt.step()


@pytest.mark.parametrize("loop", [in_steps, begun_before, plainly])
@pytest.mark.parametrize("wrapper", [ahead, iter])
def test_a_wrapper_of_a_given_loader_that_reads_ahead_is_told(wrapper: Any, loop: Any) -> None:
    """As Accelerate's prepared loaders do, around the loader that the Checkpointer knows."""
    loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=1)
    program = Program(loader=loader)

    said = told(lambda: loop(program, wrapper, loader))

    assert len(said) == (wrapper is ahead)
    assert all("reads ahead, the batch that it holds is lost" in each for each in said)


def test_accumulating_is_not_reading_ahead(program: Program) -> None:
    def train() -> None:
        for number, batch in program.ckpt.enumerate(BATCHES):
            program.model(batch).sum().backward()
            if number % 2:
                program.optimizer.step()
                program.optimizer.zero_grad()

    assert told(train) == []


# ---- drawn before the loop ------------------------------------------------------------------------------------------


def test_numbers_drawn_before_the_loop_are_told_by_their_library(program: Program) -> None:
    def train() -> None:
        torch.rand(1)
        for _ in program.ckpt.steps(2):
            program.train()
        torch.rand(1)
        for _ in program.ckpt.steps(2):
            program.train()

    (said,) = told(train)
    assert said.startswith("torch's random numbers were drawn between Checkpointer(...) and the loop")


def test_a_validation_before_the_loop_may_draw(program: Program) -> None:
    def train() -> None:
        with program.ckpt.evaluating():
            torch.rand(1)
        for _ in program.ckpt.steps(2):
            program.train()

    assert told(train) == []


def test_the_iterator_of_the_given_loader_may_be_made_before_the_loop() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=1, shuffle=True)
    program = Program(loader=loader)

    def train() -> None:
        batches = iter(loader)
        for _ in program.ckpt.steps(2):
            next(batches)
            program.train()

    assert told(train) == []


# ---- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the second batch is fetched")
def test_a_loop_in_another_thread_than_the_training_is_refused_there_and_here(program: Program) -> None:
    batches: Queue[Any] = Queue(maxsize=2)
    refused: list[BaseException] = []

    def fetch() -> None:
        try:
            for batch in program.ckpt.batches(BATCHES):
                batches.put(batch)
        except StateError as err:
            refused.append(err)

    def train() -> None:
        while True:
            batches.get()
            program.train()

    thread = threading.Thread(target=fetch, name="prefetch")
    thread.start()
    with pytest.raises(StateError, match="runs in the thread 'prefetch', and the training in another one"):
        train()
    thread.join()
    assert len(refused) == 1


# ---- something was not given ----------------------------------------------------------------------------------------


def schedule(program: Program) -> Any:
    return torch.optim.lr_scheduler.StepLR(program.optimizer, 10)


def chain(program: Program) -> Any:
    return torch.optim.lr_scheduler.SequentialLR(program.optimizer, [schedule(program), schedule(program)], [5])


def scale(_: Program) -> Any:
    return torch.amp.GradScaler("cpu")


class Trainer:
    """Holds what it needs, and knows its state."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])


def trained_with(make: Callable[[Program], Any], given: Callable[[Any], Any], *, frozen: bool = False) -> list[str]:
    """What is told of a training with what `make` returns, of which `given` is given to the Checkpointer."""
    gc.collect()  # what other tests have left
    program = Program()
    made = make(program)
    if frozen:
        gc.freeze()
    state = given(made)
    program.ckpt.close()
    states = {} if state is None else {"given": state}
    ckpt = Checkpointer(model=program.model, optimizer=program.optimizer, link=PlayedLink(), **states)  # type: ignore[arg-type]

    def train() -> None:
        for _ in ckpt.steps(3):
            if isinstance(made, torch.amp.GradScaler):
                made.scale(program.model(BATCHES[0]).sum()).backward()
                made.step(program.optimizer)
                made.update()
            else:
                program.train()

    try:
        return [text for text in told(train) if "was not given" in text]
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("make", "kind"), [(schedule, "StepLR"), (chain, "SequentialLR"), (scale, "GradScaler")])
def test_a_scheduler_or_scaler_that_was_not_given_is_told(make: Callable[[Program], Any], kind: str) -> None:
    (text,) = trained_with(make, lambda _: None)

    assert f"a {kind} that was not given" in text


@pytest.mark.parametrize("make", [schedule, chain])
def test_one_that_is_frozen_and_was_not_given_is_told(make: Callable[[Program], Any]) -> None:
    (text,) = trained_with(make, lambda _: None, frozen=True)

    assert "optimizer has a scheduler that gc.freeze() hides from the harness. If it was not given" in text


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (schedule, lambda made: made),
        (chain, lambda made: made),
        (scale, lambda made: made),
        (schedule, Trainer),
        (lambda _: torch.amp.GradScaler("cpu", enabled=False), lambda _: None),
        (lambda program: schedule(Program()), lambda _: None),
    ],
    ids=["given", "chained", "scaler", "in a trainer", "a scaler that is off", "of another optimizer"],
)
def test_what_was_given_or_does_not_matter_is_not_told(
    make: Callable[[Program], Any], given: Callable[[Any], Any], frozen: bool
) -> None:
    assert trained_with(make, given, frozen=frozen) == []
