"""A validation's loader with persistent workers draws when it does in the unbroken run, and not at a resume."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer.loaders.persistent import PersistentLoaders
from harness.trainer.state.rng import capture_rng, restore_rng


def loader(size: int = 4, *, persistent: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(size)), num_workers=1, persistent_workers=persistent)


@contextlib.contextmanager
def following(started: list[str] | None = None) -> Iterator[PersistentLoaders]:
    loaders = PersistentLoaders(capture_rng, restore_rng)
    loaders.follow()
    if started is not None:
        loaders.restore(started)
    try:
        yield loaders
    finally:
        loaders.leave()


def draws(validation: DataLoader[Any]) -> bool:
    """Whether an iteration moves the global random numbers."""
    before = torch.get_rng_state()
    list(validation)
    return not torch.equal(before, torch.get_rng_state())


def test_in_an_unbroken_run_the_first_iteration_draws_and_no_later_one() -> None:
    validation = loader()
    with following() as loaders:
        assert loaders.started() == []
        assert [draws(validation) for _ in range(3)] == [True, False, False]
        assert loaders.started() == ["TensorDataset 4/1 1"]


def test_after_a_resume_no_iteration_draws() -> None:
    validation = loader()
    with following(["TensorDataset 4/1 1"]) as loaders:
        assert [draws(validation) for _ in range(2)] == [False, False]
        assert loaders.started() == ["TensorDataset 4/1 1"]


@pytest.fixture
def frozen() -> Iterator[None]:
    """What there is by now is hidden from `gc.get_objects`, as by a program that freezes after its set-up."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def made() -> DataLoader[Any]:
    return loader()


def test_after_a_resume_no_iteration_of_a_frozen_one_draws(made: DataLoader[Any], frozen: None) -> None:
    with following(["TensorDataset 4/1 1"]):
        assert [draws(made) for _ in range(2)] == [False, False]


@pytest.mark.usefixtures("frozen")
def test_one_that_is_made_anew_behind_a_freeze_draws() -> None:
    with following(["TensorDataset 4/1 1"]):
        assert draws(loader())


def test_one_that_was_not_started_before_the_snapshot_draws() -> None:
    started, other = loader(), loader(5)
    with following(["TensorDataset 4/1 1"]) as loaders:
        assert [draws(other), draws(started)] == [True, False]
        assert loaders.started() == ["TensorDataset 4/1 1", "TensorDataset 5/1 1"]


def test_one_that_is_made_anew_for_each_epoch_draws_each_time() -> None:
    with following(["TensorDataset 4/1 1"]):
        assert draws(loader())


def test_without_persistent_workers_each_iteration_draws() -> None:
    validation = loader(persistent=False)
    with following() as loaders:
        assert [draws(validation) for _ in range(2)] == [True, True]
        assert loaders.started() == []


@pytest.mark.parametrize("times", [1, 2])
def test_dataloaders_are_as_before_afterwards(times: int) -> None:
    before = DataLoader._get_iterator
    with following() as loaders:
        for _ in range(times):
            loaders.follow()
        assert DataLoader._get_iterator is not before
    assert DataLoader._get_iterator is before
