"""A loader that knows its own position resumes exactly, with what its workers draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from harness.core import tree
from harness.errors import StateError
from harness.trainer.loaders.instrument import instrument
from tests.support.loaders import (
    BATCH,
    SIZE,
    Augmented,
    Batched,
    Eager,
    Lazy,
    Stretches,
    capture_rng,
    restore_rng,
    seed_all,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

END = 0
"""In a stop: after the epoch, in place of a number of batches."""

LENGTH = 24  # of a stream. Each worker's last batch is whole: torchdata asks one that has ended again

Drawn = tuple[int, float, float, float]


def drawn(number: int) -> Drawn:
    return number, torch.rand(()).item(), random.random(), np.random.rand()


class Stream(IterableDataset[Drawn]):
    """Has no state: it is read again from its beginning. Draws as it begins, and for each item."""

    def __iter__(self) -> Iterator[Drawn]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        offset = random.randrange(1000)
        for number in range(first, LENGTH, every):
            yield drawn(number + offset)


class Known(Stream):
    """Knows its position, and its iterator is another object, which does not."""

    def __init__(self) -> None:
        self.at = 0
        self.own = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Drawn]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while (number := first + every * self.at) < LENGTH:
            self.at += 1
            yield drawn(number + self.own.integers(1000))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Position:
    """An iterator that knows its position, over a dataset that does not."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Drawn]:
        return self

    def __next__(self) -> Drawn:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if (number := first + every * self.at) >= LENGTH:
            raise StopIteration
        self.at += 1
        return self.item(number)

    def item(self, number: int) -> Drawn:
        return drawn(number)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Itself(Position, Known):
    """Is its own iterator."""

    def __init__(self) -> None:
        Known.__init__(self)

    def __iter__(self) -> Iterator[Drawn]:
        self.at = 0
        return self

    def item(self, number: int) -> Drawn:
        return drawn(number + self.own.integers(1000))


class KnownByItsIterator(IterableDataset[Drawn]):
    def __iter__(self) -> Iterator[Drawn]:
        return Position()


class Counting(Augmented):
    """Is indexed, and has a state of its own."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        return super().__getitem__(index), self.fetched

    def state_dict(self) -> dict[str, Any]:
        return {"fetched": self.fetched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fetched = state["fetched"]


def plain(batch: list[Any]) -> list[Any]:
    return batch


def trained(
    make: Callable[[], Any], stop: tuple[int, int] | None = None, resume: Any = None, epochs: int = 3
) -> tuple[list[Any], Any]:
    """Every batch, and a number that the training itself draws, up to `stop`; and where to go on from there."""
    seed_all(3 if resume is None else 4)
    loader = make()
    instrumented = instrument(loader, "loader", capture_rng, restore_rng)
    first, handed = 0, 0
    if resume is not None:
        first, handed, position, rng = resume
        assert tree.same(tree.loads(tree.dumps(position)), position), "it survives being stored"
        instrumented.restore(position, rng)
        restore_rng(rng)
    records: list[Any] = []
    for epoch in range(first, epochs):
        iterator = instrumented.iterate()
        for batch in iterator:
            handed += 1
            records.append((epoch, batch, torch.rand(()).item()))
            if (epoch, handed) == stop:
                return records, (epoch, handed, instrumented.position(), capture_rng())
        del iterator
        handed = 0
        if stop == (epoch, END):
            return records, (epoch + 1, 0, instrumented.position(), capture_rng())
    return records, None


def check(make: Callable[[], Any], stops: list[tuple[int, int]]) -> None:
    unbroken, _ = trained(make)
    assert len({repr(batch) for _, batch, _ in unbroken}) == len(unbroken)
    for stop in stops:
        before, snapshot = trained(make, stop)
        after, _ = trained(make, resume=snapshot)
        assert before + after == unbroken, stop


READ: dict[str, Callable[[], Any]] = {
    "samples": lambda: Augmented(SIZE),
    "whole batches": lambda: Batched(SIZE),
    "samples with a state": Counting,
    "a stream": Stream,
    "a stream that knows its position": Known,
    "a stream that is its iterator": Itself,
    "an iterator that knows its position": KnownByItsIterator,
}


@pytest.mark.parametrize("reads", READ)
def test_what_workers_draw_is_drawn_again(reads: str) -> None:
    def make() -> Any:
        return StatefulDataLoader(READ[reads](), batch_size=BATCH, num_workers=2, collate_fn=plain)

    check(make, [(0, 1), (0, 5), (1, 2), (0, END)])


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_shuffled_loader_with_workers(seeded: bool, persistent: bool) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(5) if seeded else None
        return StatefulDataLoader(
            Augmented(SIZE),
            batch_size=BATCH,
            shuffle=True,
            num_workers=2,
            collate_fn=plain,
            generator=generator,
            persistent_workers=persistent,
        )

    check(make, [(0, 3), (1, 2), (0, END)])


class Turns(Sampler[int]):
    """Draws from the global generator again and again."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, ()))


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "eager": lambda: {"sampler": Eager()},
    "lazy": lambda: {"sampler": Lazy()},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(SIZE))},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)},
    "batches": lambda: {"batch_sampler": Stretches()},
    "plain batches": lambda: {"batch_sampler": BatchSampler(Eager(), BATCH, drop_last=False)},
    "no batches": lambda: {"sampler": Eager(), "batch_size": None},
    "shuffle": lambda: {"shuffle": True},
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_without_a_state_draws_its_order_again(sampler: str, workers: int) -> None:
    def make() -> Any:
        given = {"batch_size": BATCH, "collate_fn": plain} | SAMPLERS[sampler]()
        if "batch_sampler" in given:
            del given["batch_size"]
        return StatefulDataLoader(Augmented(SIZE), num_workers=workers, **given)

    check(make, [(0, 1), (0, 3), (1, 2), (0, END)])


def test_a_sampler_that_draws_in_turns_with_the_training_is_refused() -> None:
    loader = StatefulDataLoader(Augmented(SIZE), batch_size=BATCH, sampler=Turns())

    with pytest.raises(StateError, match=r"Turns.* draws from the global RNG between batches"):
        list(instrument(loader, "loader", capture_rng, restore_rng).iterate())


def test_a_sampler_that_gives_another_order_is_refused() -> None:
    sampler = list(range(SIZE))
    loader = StatefulDataLoader(Augmented(SIZE), batch_size=BATCH, sampler=sampler)
    instrumented = instrument(loader, "loader", capture_rng, restore_rng)
    iteration = instrumented.iterate()
    next(iteration)
    position, rng = instrumented.position(), capture_rng()

    for changed, message in (
        ([*range(1, SIZE)], "other batches than before"),
        ([0], "given 4 indices when .*, and has 1 now"),
    ):
        sampler[:] = changed
        instrumented.restore(position, rng)
        with pytest.raises(StateError, match=message):
            instrumented.iterate()


def test_a_position_without_random_states_is_refused() -> None:
    """An older version recorded it. The sampler would begin again, and nothing would say so."""
    instrumented = instrument(StatefulDataLoader(Augmented(SIZE)), "loader", capture_rng, restore_rng)
    iteration = instrumented.iterate()
    next(iteration)
    position = {key: part for key, part in instrumented.position().items() if key not in ("start", "generators")}

    with pytest.raises(StateError, match="an older version of the harness"):
        instrumented.restore(position, capture_rng())


def test_an_order_that_varies_is_refused() -> None:
    loader = StatefulDataLoader(Augmented(SIZE), num_workers=2, in_order=False)

    with pytest.raises(StateError, match="in_order=False"):
        instrument(loader, "loader", capture_rng, restore_rng)


def test_without_workers_the_datasets_own_generator_goes_on() -> None:
    def make() -> Any:
        return StatefulDataLoader(Augmented(SIZE), batch_size=BATCH, shuffle=True, collate_fn=plain)

    check(make, [(0, 3), (1, 2), (0, END)])


def test_a_loader_that_asks_its_workers_now_and_then() -> None:
    def make() -> Any:
        return StatefulDataLoader(
            Augmented(SIZE), batch_size=BATCH, num_workers=2, collate_fn=plain, snapshot_every_n_steps=3
        )

    check(make, [(0, 4), (1, 2)])


def test_the_users_code_in_a_worker_sees_the_users_dataset() -> None:
    class Asked(Augmented):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            return type(info.dataset).__name__ if info is not None else ""

    loader = StatefulDataLoader(Asked(4), batch_size=2, num_workers=1, collate_fn=plain)
    instrumented = instrument(loader, "loader", capture_rng, restore_rng)

    assert list(instrumented.iterate()) == [["Asked", "Asked"]] * 2
    assert type(loader.dataset) is Asked
