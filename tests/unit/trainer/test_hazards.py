"""What a resume could not repeat is told in the first life. The agent is played."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from harness.errors import StateError
from tests.support.played_agent import BATCHES, Program, no_checkpointer

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
