"""Generators of a loader's parts, wherever a part keeps them, go on where they were. The agent is played."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from harness.trainer.loaders.generators import generators_in
from tests.support.broken_off import Life, Program, check_goes_on, rows
from tests.support.played_agent import no_checkpointer

# The loaders of torchdata and torch are used as they are, and so are their warnings.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)

OF_THE_MODULE = np.random.default_rng(1)


def masked(batch: list[Tensor], rng: np.random.Generator) -> Tensor:
    x = torch.stack(batch)
    return x * torch.tensor(rng.random(x.shape) > 0.3)


class Masking:
    """Collates, with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __call__(self, batch: list[Tensor]) -> Tensor:
        return masked(batch, self.rng)

    def collate(self, batch: list[Tensor]) -> Tensor:
        return masked(batch, self.rng)


def closing_over_one() -> Callable[[list[Tensor]], Tensor]:
    rng = np.random.default_rng(1)
    return lambda batch: masked(batch, rng)


def with_that_of_the_module(batch: list[Tensor]) -> Tensor:
    return masked(batch, OF_THE_MODULE)


class Rows:
    """The rows themselves."""

    def __init__(self) -> None:
        self.rows = rows(24).tensors[0]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class InSlots:
    """Has no attributes but these."""

    __slots__ = ("rng", "rows")

    def __init__(self) -> None:
        self.rows, self.rng = rows(24).tensors[0], np.random.default_rng(1)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + float(self.rng.normal())


class OfTheModule(Rows):
    """Draws from a generator of its module."""

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + float(OF_THE_MODULE.normal())


class Late(Rows):
    """Makes its generator at its first use, from a seed that no other worker has."""

    rng: np.random.Generator | None = None

    def __getitem__(self, index: int) -> Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed() % 2**32)
        return self.rows[index] + float(self.rng.normal())


COLLATING: dict[str, Callable[[], Any]] = {
    "an object": Masking,
    "a method": lambda: Masking().collate,
    "a partial": lambda: functools.partial(masked, rng=np.random.default_rng(1)),
    "a closure": closing_over_one,
    "a module": lambda: with_that_of_the_module,
}
PARTS = [
    *[pytest.param(Rows, collate, id=name) for name, collate in COLLATING.items()],
    *[pytest.param(dataset, lambda: None, id=dataset.__name__) for dataset in (InSlots, OfTheModule, Late)],
]


def over(make: Callable[[], Any]) -> Program:
    def program(life: Life) -> Any:
        OF_THE_MODULE.bit_generator.state = np.random.default_rng(1).bit_generator.state
        loader = make()
        ckpt = life.begin()
        for _ in ckpt.epochs(2):
            for x in ckpt.batches(loader):
                life.step(x)
        return life.outcome

    return program


@pytest.mark.parametrize(("dataset", "collate"), PARTS)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_part_of_a_loader_draws_is_drawn_as_before(
    dataset: Callable[[], Any], collate: Callable[[], Any], workers: int
) -> None:
    options = {"batch_size": 8, "shuffle": True, "num_workers": workers}
    check_goes_on(over(lambda: DataLoader(dataset(), collate_fn=collate(), **options)), (2, 5) if not workers else (2,))


@pytest.mark.parametrize(("dataset", "collate"), [(Rows, Masking), (Late, lambda: None)])
def test_what_a_worker_of_a_stateful_loader_draws_is_drawn_as_before(
    dataset: Callable[[], Any], collate: Callable[[], Any]
) -> None:
    options = {"batch_size": 8, "shuffle": True, "num_workers": 1}
    check_goes_on(over(lambda: StatefulDataLoader(dataset(), collate_fn=collate(), **options)), (2,))


def test_the_global_generator_of_torch_is_none_of_a_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "OF_THE_MODULE", torch.default_generator)

    assert generators_in({"collate_fn": with_that_of_the_module}) == {}


def test_a_function_whose_variable_is_not_set_yet_has_none() -> None:
    def collate() -> Any:
        return later

    found = generators_in({"collate_fn": collate})
    later = random.Random(1)

    assert found == {}
    assert generators_in({"collate_fn": collate}) == {"collate_fn.later": later}
