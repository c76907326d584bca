"""Samplers that count, and generators that are made at their first use, go on where they were. The agent is played."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from harness.trainer.loaders.known import StoredLoaders
from tests.support.broken_off import Life, Program, check_goes_on, live, rows
from tests.support.played_agent import no_checkpointer

# The loaders of torchdata and torch are used as they are, and so are their warnings.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


class Counting(Sampler[int]):
    """Derives each order from the number of orders before it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(12).tolist())


class CountingLazily(Counting):
    """The same, as a function that yields."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


class MakesItsGenerator(Counting):
    """The same, and has a generator only from its first order on."""

    rng: np.random.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.rng = self.rng or np.random.default_rng(1)
        return iter((self.rng.permutation(12) + self.epoch) % 12)


def over(make: Callable[[], Any], epochs: int = 3) -> Program:
    def program(life: Life) -> Any:
        loader = make()
        ckpt = life.begin()
        for _ in ckpt.epochs(epochs):
            with ckpt.evaluating():
                pass
            for (x,) in ckpt.batches(loader):
                life.step(x)
        return life.outcome

    return program


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [Counting, CountingLazily, MakesItsGenerator])
def test_an_order_that_comes_from_a_count_is_drawn_again(sampler: Callable[[], Counting], workers: int) -> None:
    make = lambda: DataLoader(rows(12), batch_size=4, sampler=sampler(), num_workers=workers)  # noqa: E731

    check_goes_on(over(make), (1, 3, 4, (5, 8)) if not workers else ((2, 5),))


def test_the_same_of_a_sampler_of_whole_batches() -> None:
    class Batches(Counting):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            order = list(super().__iter__())
            yield from (order[:4], order[4:8], order[8:])

    check_goes_on(over(lambda: DataLoader(rows(12), batch_sampler=Batches())), (2, 4, 7))


def test_the_same_of_a_loader_that_knows_its_position() -> None:
    check_goes_on(over(lambda: StatefulDataLoader(rows(12), batch_size=4, sampler=CountingLazily())), (2, 4, 7))


def test_what_the_program_sets_between_two_iterations_stays_as_the_program_sets_it() -> None:
    def program(life: Life) -> Any:
        samplers = [DistributedSampler(rows(12), 1, 0, seed=seed) for seed in range(2)]
        loaders = [DataLoader(rows(12), batch_size=4, sampler=sampler) for sampler in samplers]
        ckpt = life.begin()
        for epoch in ckpt.epochs(3):
            for sampler, loader in zip(samplers, loaders, strict=True):
                sampler.set_epoch(epoch)
                for (x,) in ckpt.batches(loader):
                    life.step(x)
        return life.outcome

    check_goes_on(program, (2, 4, 7, 11))


def test_weights_that_the_program_changes_are_told_of_and_go_on_if_it_keeps_them() -> None:
    def program(life: Life) -> Any:
        sampler = WeightedRandomSampler(torch.ones(12).tolist(), 12)
        loader = DataLoader(rows(12), batch_size=4, sampler=sampler)
        ckpt = life.begin()
        ckpt.extra.setdefault("weights", sampler.weights)
        for _ in ckpt.epochs(3):
            sampler.weights = ckpt.extra["weights"]
            for (x,) in ckpt.batches(loader):
                life.step(x)
            ckpt.extra["weights"] = sampler.weights * torch.rand(12)
        return life.outcome

    with pytest.warns(UserWarning, match=r"^sampler\.weights of the loader of loop-1-1 has been changed"):
        live(program)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"sampler\.weights of the loader")
        check_goes_on(program, (2, 4, 8))


def test_a_position_of_an_older_version_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_old(small: dict[str, Any]) -> StoredLoaders:
        stored = of(small)
        for position in stored.positions.values():
            del position["values"]
            for moment in (position["epoch"]["start"], position["epoch"]["first_draw"]):
                if moment:
                    del moment["values"]
        return stored

    of = StoredLoaders.of
    monkeypatch.setattr(StoredLoaders, "of", of_old)
    check_goes_on(over(lambda: DataLoader(rows(12), batch_size=4, shuffle=True)), (2, 4))


class Late(Dataset[tuple[Tensor]]):
    """Makes its generator when it is first read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.rng, self.rows = make, None, rows(12).tensors[0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if self.rng is None:
            self.rng = self.make()
        draw = self.rng.random if hasattr(self.rng, "random") else lambda: torch.rand((), generator=self.rng)
        return (self.rows[index] + float(draw()),)


MAKERS: list[Callable[[], Any]] = [
    lambda: np.random.default_rng(1),
    lambda: np.random.Generator(np.random.Philox(1)),
    lambda: np.random.RandomState(1),
    lambda: random.Random(1),
    lambda: torch.Generator().manual_seed(1),
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: type(make()).__name__)
def test_a_generator_that_a_dataset_makes_at_its_first_use_goes_on(make: Callable[[], Any]) -> None:
    check_goes_on(over(lambda: DataLoader(Late(make), batch_size=4, shuffle=True)), (2, 4))
