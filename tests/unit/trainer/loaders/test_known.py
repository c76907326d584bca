"""Several loaders, and several loops over one: each goes on where it was. The agent is played."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from harness.trainer.loaders.known import StoredLoaders
from tests.support.broken_off import Life, check_goes_on, live, rows
from tests.support.played_agent import no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


def loader(seed: int | None = None, size: int = 12, **options: Any) -> DataLoader[Any]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(rows(size), batch_size=4, shuffle=True, generator=generator, **options)


class Noisy(Dataset[tuple[Tensor]]):
    """Draws from a generator that others may have too."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.rows = rng, rows(12).tensors[0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.rows[index] + float(self.rng.normal()),)


# ---- one loader in several loops ------------------------------------------------------------------------------------


def twice_an_epoch(life: Life) -> Any:
    batches = loader()
    ckpt = life.begin()
    for _ in ckpt.epochs(3):
        for _ in range(2):
            for (x,) in ckpt.batches(batches):
                life.step(x)
    return life.outcome


def in_two_stages(life: Life) -> Any:
    batches = loader(num_workers=1)
    ckpt = life.begin()
    for _ in range(2):
        for _ in ckpt.epochs(2):
            for (x,) in ckpt.batches(batches):
                life.step(x)
    return life.outcome


@pytest.mark.parametrize(
    ("program", "stops"), [(twice_an_epoch, (4, 7, 8, 10, 13, 14)), (in_two_stages, (8,))], ids=["epoch", "stages"]
)
def test_a_loader_in_two_loops_is_one_loader(program: Callable[[Life], Any], stops: tuple[int, ...]) -> None:
    check_goes_on(program, stops)


def test_a_list_can_be_in_a_loop_and_in_a_loop_inside_of_that() -> None:
    def program(life: Life) -> Any:
        batches = list(rows(12).tensors[0].split(4))
        ckpt = life.begin()
        for x in ckpt.batches(batches):
            for y in ckpt.batches(batches):
                life.step(x + y)
        return life.outcome

    check_goes_on(program, (2, 4, 7))


# ---- several loaders in one loop ------------------------------------------------------------------------------------


def in_turns(*seeds: int | None, **options: Any) -> Callable[[Life], Any]:
    def program(life: Life) -> Any:
        loaders = [loader(seed, **options) for seed in seeds]
        ckpt = life.begin()
        for epoch in ckpt.epochs(2 * len(seeds) + 1):
            with ckpt.evaluating():
                pass
            for (x,) in ckpt.batches(loaders[epoch % len(seeds)]):
                life.step(x)
        return life.outcome

    return program


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 3), (None, None)])
def test_loaders_that_one_loop_has_in_turns_go_on_each_where_it_was(seeds: tuple[int | None, ...]) -> None:
    check_goes_on(in_turns(*seeds), (1, 4, 6, 8, 9, 11))


def test_loaders_that_are_frozen_go_on_each_where_it_was(request: pytest.FixtureRequest) -> None:
    """As in a program that calls `gc.freeze` after its set-up: `gc.get_objects` does not have them."""
    request.addfinalizer(gc.unfreeze)

    def program(life: Life) -> Any:
        loaders = [loader(1), loader(2)]
        gc.freeze()
        ckpt = life.begin()
        for epoch in ckpt.epochs(5):
            for (x,) in ckpt.batches(loaders[epoch % 2]):
                life.step(x)
        return life.outcome

    check_goes_on(program, (4, 8))


def test_a_loader_that_a_resumed_program_has_not_met_yet_keeps_its_position() -> None:
    check_goes_on(in_turns(1, 2), ((4, 5), (7, 8, 10)))


def test_a_loop_that_ends_with_another_loader_than_it_began_with() -> None:
    """The second one is not taken for the first one, which is not used any more."""

    def program(life: Life) -> Any:
        easy, hard = loader(1), loader(2, 24)
        ckpt = life.begin()
        for epoch in ckpt.epochs(3):
            with ckpt.evaluating():
                pass
            for (x,) in ckpt.batches(easy if epoch < 2 else hard):
                life.step(x)
        return life.outcome

    check_goes_on(program, (2, 5, 6, 7))


def test_a_loader_that_is_made_for_each_epoch_begins_anew() -> None:
    def program(life: Life) -> Any:
        ckpt = life.begin()
        for _ in ckpt.epochs(4):
            for (x,) in ckpt.batches(loader()):
                life.step(x)
            for (x,) in ckpt.batches(loader(3)):
                life.step(x)
        return life.outcome

    check_goes_on(program, (4, 7, 8, 10, 13))


def test_a_loader_that_the_program_has_let_go_of_is_not_kept() -> None:
    def program(life: Life) -> Any:
        made = []
        ckpt = life.begin()
        for _ in ckpt.epochs(3):
            batches = loader()
            made.append(weakref.ref(batches))
            for (x,) in ckpt.batches(batches):
                life.step(x)
        return [each() is not None for each in made]

    assert live(program) == [False, False, True]


@pytest.mark.parametrize("seeds", [(None, None), (1, 1)])
def test_loaders_in_turns_that_look_alike_are_told_of(seeds: tuple[int | None, ...]) -> None:
    with pytest.warns(UserWarning, match="one loop iterates over several loaders in turns, which look alike"):
        live(in_turns(*seeds, num_workers=1))


def test_loaders_that_the_program_holds_in_a_cycle_alone_are_not_told_of() -> None:
    def program(life: Life) -> Any:
        ckpt = life.begin()
        gc.disable()
        try:
            for _ in ckpt.epochs(3):
                batches: Any = loader(1)
                batches.itself = [batches]
                for (x,) in ckpt.batches(batches):
                    life.step(x)
        finally:
            gc.enable()

    live(program)


# ---- a generator of several loaders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_a_generator_of_two_loaders_is_not_set_back_by_the_second_one(given: bool) -> None:
    def program(life: Life) -> Any:
        rng = np.random.default_rng(1)
        loaders = [DataLoader(Noisy(rng), batch_size=4, shuffle=True) for _ in range(2)]
        ckpt = life.begin(**({"rng": rng} if given else {}))
        for _ in ckpt.epochs(3):
            for each in loaders:
                for (x,) in ckpt.batches(each):
                    life.step(x)
        return life.outcome

    check_goes_on(program, (3, 7, 8, 10, 13))


# ---- snapshots of older versions ------------------------------------------------------------------------------------


def test_a_snapshot_that_names_positions_by_loops_alone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(life: Life) -> Any:
        first, second = loader(1), loader(2)
        ckpt = life.begin()
        for _ in ckpt.epochs(3):
            for each in (first, second):
                for (x,) in ckpt.batches(each):
                    life.step(x)
        return life.outcome

    def of_old(small: dict[str, Any]) -> StoredLoaders:
        return of({key: value for key, value in small.items() if key not in ("loader_loops", "loader_forms")})

    of = StoredLoaders.of
    monkeypatch.setattr(StoredLoaders, "of", of_old)
    check_goes_on(program, (2, 8, 10))
