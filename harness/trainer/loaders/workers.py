"""Workers: seeds a loader's data workers for each batch, has them ignore the first signal, ends them with the trainer.

Owns the code that seeds in a data worker beside the user's dataset, and how workers are started and ended. Knows
neither epochs nor positions: the caller that draws a batch passes its seed.

Random numbers of workers are lost with the workers, and no snapshot can bring them back. So every batch seeds the
worker's own RNG from (epoch seed, batch number), in unbroken runs too. With 0 workers the dataset draws from the
trainer's RNG, in order, and nothing is seeded.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import forkserver
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from harness.trainer.loaders.generators import generators_in, halves, reseed, word_of

_SEARCHES = 2
"""In each worker, at its first batches: what collates may make its generator at its first use."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Workers:
    """Starts data workers with a stand-in for the dataset and our own init function; ends them at exit."""

    def __init__(self, stand_in: Callable[[Any, Any], Any] | None) -> None:
        """Start none yet.

        Args:
            stand_in: returns what the workers get in place of the user's dataset, the first argument; the second one is
                the user's collate_fn. `None`: they get the user's dataset.
        """
        self._stand_in = stand_in
        self._iterators: weakref.WeakSet[Any] | None = None

    def start(self, loader: DataLoader[Any], make_iterator: Callable[[], Any]) -> Any:
        """Return torch's iterator for `loader`, made by `make_iterator`, which starts the workers."""
        if loader.num_workers == 0:
            return make_iterator()
        if self._iterators is None:
            self._iterators = weakref.WeakSet()
            # Runs before the hooks that torch and multiprocessing registered when they were imported (last in, first
            # out), so workers can still be told to end; _outlive_first_sigterm says why that is necessary.
            atexit.register(_end_workers, self._iterators, os.getpid())
        dataset, worker_init_fn = loader.dataset, loader.worker_init_fn
        if self._stand_in is not None:
            object.__setattr__(loader, "dataset", self._stand_in(dataset, loader.collate_fn))  # its own refuses
        context = loader.multiprocessing_context or multiprocessing.get_context()
        has_server = context.get_start_method() == "forkserver"
        loader.worker_init_fn = _WorkerStart(worker_init_fn, has_server)
        if has_server:
            forkserver.ensure_running()  # it keeps the mask that it begins with, and hands it to the user's processes
        # Workers inherit the mask, and lift it when they are ready for signals: before that, a signal would end them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            iterator = make_iterator()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            object.__setattr__(loader, "dataset", dataset)
            loader.worker_init_fn = worker_init_fn
        self._iterators.add(iterator)
        return iterator


class SeededBatch(NamedTuple):
    """The sampler's message to a worker: the indices of a batch, and the seed to set before they are fetched."""

    epoch_seed: int
    number: int
    indices: Any


# -------------------------------------------------------------------------------------------------- in the data workers


class StandIn:
    """What a worker gets in place of the user's dataset. Code of the user that asks for the dataset gets the user's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


class SeededDataset(StandIn):
    """Seeds, then fetches from the user's dataset. Takes each batch as a `SeededBatch`."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        super().__init__(dataset)
        self._roots = {"dataset": dataset, "collate_fn": collate_fn}  # torch collates behind `__getitems__`
        self._generators: dict[str, Any] = {}
        self._seen = 0

    def __getitems__(self, batch: Any) -> Any:
        if not isinstance(batch, SeededBatch):
            return self._fetch(batch)
        self._seen += 1
        if self._seen <= _SEARCHES:
            self._generators = generators_in(self._roots)
        _seed(batch, self._generators)
        fetched = self._fetch(batch.indices)
        if self._seen > 1:
            return fetched
        found = generators_in(self._roots)
        if found.keys() == self._generators.keys():
            return fetched
        # Made at its first use, and not seeded for it. In a worker that has made it before, it would have been.
        self._generators = found
        _seed(batch, self._generators)
        return self._fetch(batch.indices)

    def _fetch(self, indices: Any) -> Any:
        getitems = getattr(self.dataset, "__getitems__", None)
        return getitems(indices) if getitems else [self.dataset[index] for index in indices]


class _WorkerStart:
    """The worker_init_fn of every worker. Shows the user's dataset, sets signal handlers, calls the user's function."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, has_server: bool) -> None:
        """`has_server`: whether the workers are children of a fork server, and not of the trainer."""
        self.worker_init_fn, self.has_server = worker_init_fn, has_server
        self.trainer_pid = os.getpid()

    def __call__(self, worker_id: int) -> None:
        if self.has_server:
            threading.Thread(target=_end_with, args=(self.trainer_pid,), name="harness-trainer", daemon=True).start()
        self._end_without_trainer()
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, StandIn):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen
        _outlive_first_sigterm()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        self._end_without_trainer()

    def _end_without_trainer(self) -> None:
        """End, if the trainer was killed while this worker started: torch's watchdog would watch the new parent."""
        if not self.has_server and os.getppid() != self.trainer_pid:
            os._exit(1)


def _end_with(trainer_pid: int) -> None:
    """End a fork server's worker with the trainer. Runs in a thread of it.

    The server lives as long as one of its workers does, and torch's watchdog looks whether it lives: without this, the
    workers of a killed trainer would never end.
    """
    try:
        pidfd = os.pidfd_open(trainer_pid)
    except ProcessLookupError:
        os._exit(1)
    death = select.poll()
    death.register(pidfd, select.POLLIN)
    death.poll()
    os._exit(1)


def _outlive_first_sigterm() -> None:
    """Ignore the first signal to the process group or to a whole unit: the snapshot still needs the workers.

    The second SIGTERM ends the worker; SIGINT is handled by the trainer. torch ends workers by SIGTERM only if all else
    failed, and multiprocessing does at exit, after `_end_workers`, which ends them by SIGKILL. A worker whose trainer
    is gone notices that by itself within 5 s (torch's ManagerWatchdog).
    """
    signal.signal(signal.SIGINT, lambda signum, frame: None)  # not SIG_IGN: programs that it executes inherit that
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if ending == signal.SIGTERM or signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, lambda signum, frame: signal.signal(signum, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _seed(batch: SeededBatch, generators: Mapping[str, Any]) -> None:
    """Seed the process's RNG and `generators`, each with its own word."""

    def word(label: str) -> int:
        return word_of(f"{batch.epoch_seed}/{batch.number}/{label}")

    torch.default_generator.manual_seed(word("torch"))  # torch.manual_seed would queue a call for every device
    random.seed(word("python"))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(halves(word("numpy")))
    for path, generator in generators.items():
        reseed(generator, word(path))


# ------------------------------------------------------------------------------------------------------- at the exit


def _end_workers(iterators: Iterable[Any], pid: int) -> None:
    if os.getpid() != pid:  # a fork of the trainer that runs exit hooks
        return
    for iterator in list(iterators):
        iterator._shutdown_workers()
        for worker in iterator._workers:
            worker.kill()
