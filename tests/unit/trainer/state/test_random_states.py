"""Code that runs again draws from generators given by name what it has drawn before. The agent is played."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

from harness.errors import StateError
from harness.trainer.state.random_states import RandomStates
from harness.trainer.state.rng import capture_moment
from tests.support.broken_off import Life, check_goes_on, rows
from tests.support.played_agent import no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


def numpy_generator() -> tuple[Any, Callable[[], Tensor]]:
    rng = np.random.default_rng(1)
    return rng, lambda: torch.tensor(rng.permutation(12))


def old_numpy_generator() -> tuple[Any, Callable[[], Tensor]]:
    rng = np.random.Generator(np.random.MT19937(1))
    return rng, lambda: torch.tensor(rng.permutation(12))


def torch_generator() -> tuple[Any, Callable[[], Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return rng, lambda: torch.randperm(12, generator=rng)


def python_generator() -> tuple[Any, Callable[[], Tensor]]:
    rng = random.Random(1)
    return rng, lambda: torch.tensor(rng.sample(range(12), 12))


def at_the_top_of_an_epoch(life: Life, rng: Any, draw: Callable[[], Tensor]) -> None:
    ckpt, data = life.begin(rng=rng), rows(12).tensors[0]
    for _ in ckpt.epochs(3):
        order = draw()
        for step in ckpt.steps(3):
            life.step(data[order[4 * step : 4 * step + 4]])


def at_the_top_of_an_epoch_with_a_loader(life: Life, rng: Any, draw: Callable[[], Tensor]) -> None:
    ckpt, data = life.begin(rng=rng), rows(12).tensors[0]
    for _ in ckpt.epochs(3):
        for (index,) in ckpt.batches(DataLoader(TensorDataset(draw()), batch_size=4, shuffle=True)):
            life.step(data[index])


def between_two_loops(life: Life, rng: Any, draw: Callable[[], Tensor]) -> None:
    ckpt = life.begin(rng=rng)
    for _ in ckpt.epochs(2):
        for _ in ckpt.steps(3):
            life.step(draw().float().view(3, 4) / 12)
        noise = draw().float().view(3, 4) / 12
        for _ in ckpt.steps(3):
            life.step(torch.randn(3, 4) + noise)


def between_two_stages(life: Life, rng: Any, draw: Callable[[], Tensor]) -> None:
    ckpt = life.begin(rng=rng)
    for _ in range(2):
        order = draw()
        for step in ckpt.steps(3):
            life.step(order[4 * step : 4 * step + 4].float().view(1, 4) / 12)
    life.step(draw().float().view(3, 4) / 12)


def at_the_top_of_a_step(life: Life, rng: Any, draw: Callable[[], Tensor]) -> None:
    ckpt = life.begin(rng=rng)
    for _ in ckpt.steps(4):
        order = draw().float() / 12
        for step in ckpt.steps(2):
            life.step(order[4 * step : 4 * step + 4].view(1, 4))


def at_the_top_of_a_batch(life: Life, rng: Any, draw: Callable[[], Tensor]) -> None:
    ckpt, batches = life.begin(rng=rng), DataLoader(rows(12), batch_size=4, shuffle=True)
    for _ in ckpt.epochs(2):
        for (x,) in ckpt.batches(batches):
            noise = draw().float() / 12
            for step in ckpt.steps(2):
                life.step(x + noise[4 * step : 4 * step + 4])


STYLES = [
    (at_the_top_of_an_epoch, (1, 4, 5, 8)),
    (at_the_top_of_an_epoch_with_a_loader, (1, 4, 5, 8)),
    (between_two_loops, (2, 4, 5, 10)),
    (between_two_stages, (2, 4, 5)),
    (at_the_top_of_a_step, (1, 3, 4, 7)),
    (at_the_top_of_a_batch, (1, 3, 7, 9)),
]
OTHERS = [old_numpy_generator, torch_generator, python_generator]


@pytest.mark.filterwarnings("ignore:.*random numbers were drawn between Checkpointer")
@pytest.mark.parametrize(("style", "stops"), STYLES, ids=lambda each: getattr(each, "__name__", ""))
def test_what_was_drawn_from_a_given_generator_is_drawn_again(
    style: Callable[..., None], stops: tuple[int, ...]
) -> None:
    def program(life: Life) -> Any:
        style(life, *numpy_generator())
        return life.outcome

    check_goes_on(program, stops)


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: str(make.__name__))
def test_it_is_so_for_every_kind_of_generator(make: Callable[[], tuple[Any, Callable[[], Tensor]]]) -> None:
    def program(life: Life) -> Any:
        between_two_loops(life, *make())
        return life.outcome

    check_goes_on(program, (4, 10))


def test_a_sampler_may_draw_from_a_given_generator_in_turns() -> None:
    class Drawn(Sampler[int]):
        def __init__(self, rng: np.random.Generator) -> None:
            self.rng = rng

        def __len__(self) -> int:
            return 12

        def __iter__(self) -> Iterator[int]:
            return (int(self.rng.integers(12)) for _ in range(12))

    def program(life: Life) -> Any:
        rng = np.random.default_rng(1)
        batches = DataLoader(rows(12), batch_size=4, sampler=Drawn(rng))
        ckpt = life.begin(rng=rng)
        for _ in ckpt.epochs(3):
            for (x,) in ckpt.batches(batches):
                life.step(x)
        return life.outcome

    check_goes_on(program, (2, 4))


def test_a_moment_of_an_older_version_sets_the_global_states_alone() -> None:
    rng = random.Random(1)
    states = RandomStates({"rng": rng})
    old = capture_moment()
    first = rng.random(), random.random()

    states.set(old)

    assert rng.random() != first[0]
    assert random.random() == first[1]


def test_a_generator_that_refuses_its_state_is_named() -> None:
    moment = RandomStates({"rng": np.random.default_rng(1)}).take()

    with pytest.raises(StateError, match=r"^rng: it refused its stored state"):
        RandomStates({"rng": random.Random(1)}).set(moment)
