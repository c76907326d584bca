"""Datasets, samplers and a training loop for the tests of harness.trainer.loaders. Importable in spawned workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from harness.core import tree
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.loaders.instrument import instrument

SIZE = 22
BATCH = 4
BATCHES = 6


def capture_rng() -> Any:
    return {
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": bytes(torch.get_rng_state().tolist()),
    }


def restore_rng(tree: Any) -> None:
    random.setstate(tree["python"])
    np.random.set_state(tuple(tree["numpy"]))
    torch.set_rng_state(torch.tensor(list(tree["torch"]), dtype=torch.uint8))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Augmented(Dataset[Any]):
    """Every item carries one random number of each library, as an augmentation would."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.reads: list[int] = []
        self.own = np.random.default_rng(5)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float, float]:
        self.reads.append(index)
        return index, torch.rand(()).item(), random.random(), np.random.rand(), self.own.random()


class Batched(Augmented):
    """Fetches whole batches."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float, float]]:
        return [self[index] for index in indices]


class Stretches(Sampler[list[int]]):
    """A batch sampler whose batches differ in size, drawn from the global RNG all at once."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE).tolist()
        for start, end in ((0, 2), (2, 7), (7, 8), (8, 15), (15, 20), (20, SIZE)):
            yield order[start:end]

    def __len__(self) -> int:
        return BATCHES


class Lazy(Sampler[int]):
    """Draws index by index from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.Generator(np.random.MT19937(3))

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(self.rng.integers(SIZE))

    def __len__(self) -> int:
        return SIZE


class Eager(Sampler[int]):
    """Draws in `__iter__` itself, so before torch draws the base seed."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(SIZE).tolist())

    def __len__(self) -> int:
        return SIZE


class Late(Sampler[int]):
    """Draws index by index from a generator that it creates at its first iteration."""

    def __init__(self) -> None:
        self.rng: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        self.rng = self.rng or torch.Generator().manual_seed(3)
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, (), generator=self.rng))

    def __len__(self) -> int:
        return SIZE


class Chunked(Sampler[int]):
    """Draws two batches at a time from the global RNG: cannot be replayed."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(2 * BATCH).tolist()

    def __len__(self) -> int:
        return SIZE


class Meddling(Sampler[int]):
    """Draws index by index from the global RNG: cannot be replayed."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield random.randrange(SIZE)

    def __len__(self) -> int:
        return SIZE


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"batch_size": BATCH, "shuffle": True},
    "generator": lambda: {"batch_size": BATCH, "shuffle": True, "generator": torch.Generator().manual_seed(7)},
    "weighted": lambda: {"batch_size": BATCH, "sampler": WeightedRandomSampler([1.0, 2.0] * (SIZE // 2), SIZE)},
    "subset": lambda: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(SIZE))},
    "distributed": lambda: {
        "batch_size": BATCH,
        "sampler": DistributedSampler(range(SIZE), num_replicas=1, rank=0, seed=11),  # type: ignore[arg-type]
    },
    "batch sampler": lambda: {"batch_sampler": Stretches()},
    "lazy": lambda: {"batch_size": BATCH, "sampler": Lazy()},
    "late": lambda: {"batch_size": BATCH, "sampler": Late()},
    "eager": lambda: {"batch_size": BATCH, "sampler": Eager()},
    "sequential": lambda: {"batch_size": BATCH},
}

WORKERS: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def make_loader(sampler: str, workers: str = "0 workers", dataset: Any = None, **options: Any) -> DataLoader[Any]:
    options = {"collate_fn": list} | SAMPLERS[sampler]() | WORKERS[workers] | options
    return DataLoader(Augmented() if dataset is None else dataset, **options)


@dataclass
class Snapshot:
    """What a Checkpointer would store, after it was stored."""

    epoch: int
    handed: int
    position: Any
    rng: Any


Record = tuple[int, Any, float]
"""Epoch, batch, a number that the training loop drew."""


def train(
    make: Callable[[], Any],
    epochs: int,
    stop: tuple[int, int] | None = None,
    resume: Snapshot | None = None,
    leave_after: int | None = None,
) -> tuple[list[Record], Snapshot | None]:
    """A training loop in fresh objects; what it saw, and its snapshot where it stopped.

    Args:
        make: makes the loader.
        epochs: how many.
        stop: (epoch, batches handed out in it) to take a snapshot at, and end; one past the last batch: between epochs.
        resume: where to go on from.
        leave_after: break out of every epoch after so many batches.
    """
    seed_all(1 if resume is None else 99)
    loader = make()
    instrumented = instrument(loader, "loader", capture_rng, restore_rng)
    first = 0
    if resume is not None:
        instrumented.restore(resume.position, resume.rng)
        restore_rng(resume.rng)
        first = resume.epoch
    records: list[Record] = []
    for epoch in range(first, epochs):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        iterator = instrumented.iterate()
        handed = resume.handed if resume and epoch == first else 0
        if stop == (epoch, 0):
            return records, _snapshot(epoch, 0, instrumented)
        for batch in iterator:
            handed += 1
            records.append((epoch, batch, torch.rand(()).item() + random.random()))
            if stop == (epoch, handed):
                return records, _snapshot(epoch, handed, instrumented)
            if handed == leave_after:
                break
        del iterator
        if stop == (epoch, BATCHES + 1):
            return records, _snapshot(epoch + 1, 0, instrumented)
    return records, None


def _snapshot(epoch: int, handed: int, instrumented: InstrumentedLoader) -> Snapshot:
    stored = tree.dumps({"position": instrumented.position(), "rng": capture_rng()})
    return Snapshot(epoch, handed, **tree.loads(stored))


class Reporting(Dataset[Any]):
    """Says what a worker is shown."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        info = get_worker_info()
        assert info is not None
        return f"{type(info.dataset).__name__} {info.dataset is self} {getattr(self, 'started', None)}"


def mark_dataset(worker_id: int) -> None:
    """A worker_init_fn of the user's."""
    info = get_worker_info()
    assert info is not None
    info.dataset.started = worker_id  # type: ignore[attr-defined]
