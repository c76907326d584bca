"""Exact position in a loader: an iteration that ended in the middle goes on with the very next batch.

Owns what is needed to replay an iteration up to a batch without reading data, and the random numbers of data workers.
Knows nothing of snapshots or the agent: it gives and takes a plain tree, the *position*.

    iterate()   record RNG ── iter() draws a base seed ── first draw shuffles ── batch 1 ── … ── batch k ── position()
    restore()   set it back ── iter() draws the same   ── draws k batches of indices, reads nothing
                                                       └─ RNG of the snapshot ── batch k + 1

What torch's DataLoader does, and this file relies on (2.6 to 2.13, torch/utils/data/dataloader.py):

- `iter(loader)` calls `iter(batch_sampler)`, then draws a base seed from `loader.generator` or the global RNG.
- A sampler draws its order at the first `next`: with 0 workers that is at the first batch, with workers inside
  `iter(loader)`, which prefetches. So a replay must skip at the first `next` too, or the two draws swap places.
- Persistent workers draw the base seed when they are started, never again.

Random numbers of workers are lost with the workers, and no snapshot can bring them back. So every batch seeds the
worker's own RNG from (epoch seed, batch number), in unbroken runs too. The epoch seed is a hash of the RNG state: it
draws nothing. With 0 workers the dataset draws from the trainer's RNG, in order, and nothing is seeded.

A position is exact for the same number of workers, or where the sampler draws its order all at once (torch's own do).
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import operator
import os
import random
import signal
import sys
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, MapDataPipe, get_worker_info

from harness.errors import StateError

Tree: TypeAlias = dict[str, Any]
"""Plain values that the tagged encoding of small state knows: numbers, str, bytes, None, tuples, lists, dicts."""

OnIter: TypeAlias = "Callable[[InstrumentedLoader], Iterator[Any]]"


class InstrumentedLoader(Protocol):
    """A loader whose iteration can be resumed exactly. Made by `instrument`; one thread.

    Attributes:
        name: how the loader is called in errors, and what its position is filed under.
    """

    name: str

    def iterate(self) -> Iterator[Any]:
        """Start an iteration; after `restore`, go on with the one that was under way at the snapshot.

        An iteration is under way until it is exhausted or its iterator is let go: do not hold on to it after the loop.
        When it goes on, the global RNG is left at the snapshot's state: fetch next, draw nothing in between.

        Raises:
            StateError: the order of batches is not what it was, or the sampler cannot be replayed.
        """
        ...

    def position(self) -> Tree:
        """Where the loader stands, between two batches. Draws no random number, reads no data.

        The batch that was handed out last counts as used.

        Raises:
            StateError: two iterations of the one loader are under way.
        """
        ...

    def restore(self, position: Tree, rng: Any) -> None:
        """Go back to `position`. Leaves the global RNG as it is; generators held by the loader are set.

        If an iteration was under way, the next `iterate` goes on with it (and not before: `set_epoch` comes first).

        Args:
            position: what `position` returned when the snapshot was taken.
            rng: what `capture_rng` returned when the snapshot was taken.

        Raises:
            StateError: the position is of another kind of loader.
        """
        ...

    def hook_iter(self, on_iter: OnIter) -> None:
        """Have a plain `for batch in loader` go through `on_iter(self)`, which returns the iterator.

        A bound method is held weakly. Without instruments, or its object, the loader iterates as it always did.

        Raises:
            StateError: the loader's `iter` cannot be hooked.
        """
        ...


def instrument(
    loader: Any,
    name: str,
    capture_rng: Callable[[], Any],
    restore_rng: Callable[[Any], None],
    seed_workers: bool = True,
) -> InstrumentedLoader:
    """Make the iteration of `loader` resumable. An instrumented loader is returned as it is.

    Args:
        loader: a map-style DataLoader; anything with `state_dict` and `load_state_dict`, such as torchdata's
            StatefulDataLoader, which is used as it is; or a sequence.
        name: see `InstrumentedLoader.name`.
        capture_rng: returns the state of every global RNG as a plain tree. Draws nothing.
        restore_rng: takes such a tree.
        seed_workers: seed the RNG of data workers for every batch. Without it random numbers drawn in workers are
            torch's, and differ after a resume.

    Raises:
        StateError: the loader cannot be resumed exactly; says why, and the remedy.
    """
    if (instrumented := _instruments_of(loader)) is not None:
        return instrumented
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _OwnStateLoader(loader, name, capture_rng, restore_rng)
    if isinstance(loader, DataLoader):
        _check(loader, name)
        return _TorchLoader(loader, name, capture_rng, restore_rng, seed_workers)
    if isinstance(loader, Sequence):
        return _SequenceLoader(loader, name, restore_rng)
    raise StateError(
        f"{name} is a {type(loader).__name__}: an exact position is known for a DataLoader, a sequence, and what has"
        " state_dict and load_state_dict; wrap it in one of them, or use ckpt.steps(n) if it draws its data from RNG"
    )


def _check(loader: DataLoader[Any], name: str) -> None:
    kind = type(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise StateError(
            f"{name} reads an IterableDataset, which cannot be skipped without reading it: use"
            " torchdata.stateful_dataloader.StatefulDataLoader and give the dataset a state_dict, or make it map-style"
        )
    if isinstance(loader.dataset, MapDataPipe):
        raise StateError(f"{name} reads a MapDataPipe, which is deprecated: give the DataLoader a map-style dataset")
    if loader.batch_sampler is None:
        raise StateError(
            f"{name} has batch_size=None, so nothing says what a batch is: give batch_size, or a batch_sampler"
        )
    if loader.num_workers > 0 and not loader.in_order:
        raise StateError(f"{name} has in_order=False, so the order of its batches is chance: remove in_order=False")
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        raise StateError(
            f"{name} is a {kind.__name__}, which iterates in its own way: give it state_dict and load_state_dict, or"
            " use a plain DataLoader and transform its batches in the training loop"
        )


# ------------------------------------------------------------------------------------------ torch.utils.data.DataLoader


class _TorchLoader:
    """A map-style DataLoader. Its class is switched to a subclass of its own; its attributes stay the user's."""

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        capture_rng: Callable[[], Any],
        restore_rng: Callable[[Any], None],
        seed_workers: bool,
    ) -> None:
        self.name = name
        self._loader = loader
        self._capture_rng = capture_rng
        self._restore_rng = restore_rng
        self._order = _Order(loader, name, capture_rng, restore_rng, seed_workers)
        self._on_iter: Callable[[], OnIter | None] = lambda: None
        self._started = 0
        self._live: weakref.WeakSet[_Iteration] = weakref.WeakSet()
        self._pending: tuple[Tree, Any] | None = None
        # Workers that an earlier look into the loader started know nothing of seeds: the next iteration starts others.
        loader._iterator = None
        _tap(loader, self, self._order, _Workers(seed_workers))

    def iterate(self) -> Iterator[Any]:
        if self._pending is None:
            epoch, batches = self._begin()
        else:
            epoch, batches = self._replay(*self._pending)
            self._pending = None
        self._started = epoch.number + 1
        iteration = _Iteration(batches, epoch, self._live)
        self._live.add(iteration)
        return iteration

    def position(self) -> Tree:
        if self._pending is not None:
            return self._pending[0]
        live = list(self._live)
        if len(live) > 1:
            raise StateError(
                f"{len(live)} iterations of {self.name} are under way at once: finish one before the next, let go of"
                " iterators that are not needed, or make a second DataLoader"
            )
        return {
            "kind": _TORCH,
            "started": self._started,
            "generators": self._order.states(),
            "workers_running": self._loader._iterator is not None,
            "epoch": live[0].epoch.to_tree() if live else None,
        }

    def restore(self, position: Tree, rng: Any) -> None:
        _check_kind(position, _TORCH, self.name)
        self._live.clear()
        if position["epoch"] is not None:
            self._pending = position, rng
            return
        self._pending = None
        now = self._capture_rng()
        self._match_workers(position["workers_running"])
        self._order.set_states(position["generators"])
        self._restore_rng(now)
        self._started = position["started"]

    def hook_iter(self, on_iter: OnIter) -> None:
        self._on_iter = _weakly(on_iter)

    def on_iter(self) -> Iterator[Any] | None:
        return _call(self._on_iter, self)

    def _begin(self) -> tuple[_Epoch, Iterator[Any]]:
        start = self._order.moment()
        epoch = _Epoch(
            number=self._started,
            seed=self._epoch_seed(),
            start=start,
            workers_running=self._loader._iterator is not None,
            recent=self._recent(),
        )
        return epoch, self._open(epoch)

    def _epoch_seed(self) -> int:
        """What the seeds of an epoch's batches come from. Draws nothing.

        Only the generator counts that torch would have drawn its workers' seeds from: a script that seeds torch, and
        not Python's `random`, has the same data in every run.
        """
        generator = self._loader.generator or torch.default_generator
        state = hashlib.blake2b(bytes(generator.get_state().tolist())).hexdigest()
        return _word(f"{self.name}/{self._started}/{state}")

    def _replay(self, position: Tree, rng: Any) -> tuple[_Epoch, Iterator[Any]]:
        epoch = _Epoch.from_tree(position["epoch"], self._recent())
        self._match_workers(epoch.workers_running)
        self._order.set_moment(epoch.start)
        batches = self._open(epoch)
        if epoch.drawn < epoch.skip:  # 0 workers: nothing was prefetched, so the sampler has not drawn its order yet
            if epoch.first_draw is not None:
                self._order.set_moment(epoch.first_draw)
            self._order.skip(epoch)
        self._order.set_states(position["generators"])
        self._restore_rng(rng)
        return epoch, batches

    def _open(self, epoch: _Epoch) -> Iterator[Any]:
        self._order.epoch = epoch
        try:
            batches = DataLoader.__iter__(self._loader)
        finally:
            self._order.epoch = None
        if self._loader.num_workers == 0:
            epoch.opened = self._order.moment()
        return batches

    def _match_workers(self, running: bool) -> None:
        """Have persistent workers running, or not, as they were. May draw from the global RNG."""
        if not running:
            self._loader._iterator = None
        elif self._loader._iterator is None and self._loader.persistent_workers:
            self._order.empty = True  # or they would prefetch, and read data
            try:
                DataLoader.__iter__(self._loader)
            finally:
                self._order.empty = False

    def _recent(self) -> deque[Any]:
        prefetched = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        return deque(maxlen=prefetched + 1)


class _Moment(NamedTuple):
    """Every random state that a loader's order can depend on, at one instant."""

    rng: Any
    generators: dict[str, Any]


@dataclass(eq=False)
class _Epoch:
    """One iteration of a DataLoader, and what it takes to replay it.

    Attributes:
        number: how many iterations of this loader were started before.
        seed: what the seeds of its batches come from.
        start: before `iter(loader)`.
        workers_running: persistent workers were running before `iter(loader)`.
        recent: the last indices drawn, back to those of the batch that was handed out last.
        first_draw: before the sampler's first draw, where something else drew since `iter(loader)`: zip does.
        skip: batches handed out before the snapshot that this iteration goes on from.
        expected: fingerprint of the last of them.
        handed: batches handed out, skipped ones included.
        drawn: batches of indices drawn; ahead of `handed` by what workers prefetch.
        opened: after `iter(loader)`, with 0 workers.
        indices: what is left of the batch sampler's order.
    """

    number: int
    seed: int
    start: _Moment
    workers_running: bool
    recent: deque[Any]
    first_draw: _Moment | None = None
    skip: int = 0
    expected: int | None = None
    handed: int = 0
    drawn: int = 0
    opened: _Moment | None = None
    indices: Iterator[Any] = field(default_factory=lambda: iter(()))

    def to_tree(self) -> Tree:
        return {
            "number": self.number,
            "seed": self.seed,
            "start": self.start._asdict(),
            "workers_running": self.workers_running,
            "first_draw": self.first_draw and self.first_draw._asdict(),
            "handed": self.handed,
            "last": _fingerprint(self.recent[self.handed - self.drawn - 1]) if self.handed else None,
        }

    @classmethod
    def from_tree(cls, tree: Tree, recent: deque[Any]) -> _Epoch:
        return cls(
            number=tree["number"],
            seed=tree["seed"],
            start=_Moment(**tree["start"]),
            workers_running=tree["workers_running"],
            recent=recent,
            first_draw=tree["first_draw"] and _Moment(**tree["first_draw"]),
            skip=tree["handed"],
            expected=tree["last"],
            handed=tree["handed"],
        )


class _Iteration:
    """What the training loop iterates: hands out torch's batches, and counts."""

    __slots__ = ("__weakref__", "_batches", "_live", "epoch")

    def __init__(self, batches: Iterator[Any], epoch: _Epoch, live: weakref.WeakSet[_Iteration]) -> None:
        self.epoch = epoch
        self._batches = batches
        self._live = live

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        self.epoch.handed += 1  # before, so that a batch which fails counts as well: its indices are used up
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch.handed -= 1
            self._live.discard(self)
            raise

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class _Order:
    """Stands between torch and the batch sampler; transparent while no epoch of ours is being opened.

    Holds nothing that leads back to the loader: torch's iterator holds this, and with persistent workers the loader
    holds the iterator. Such a ring would be left to the garbage collector, which closes queues before the iterator can
    tell its workers to end; they would be waited for in vain, 10 s each.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        capture_rng: Callable[[], Any],
        restore_rng: Callable[[Any], None],
        seed_workers: bool,
    ) -> None:
        self.batch_sampler: Any = loader.batch_sampler
        self.epoch: _Epoch | None = None
        self.empty = False
        self._name = name
        self._capture_rng = capture_rng
        self._restore_rng = restore_rng
        self._seeds = seed_workers and loader.num_workers > 0
        self._sampler_was_watched = False
        self._roots = {
            "generator": loader.generator,
            "sampler": loader.sampler,
            "batch_sampler": loader.batch_sampler,
            "dataset": loader.dataset,
            "collate_fn": loader.collate_fn,
        }

    def __iter__(self) -> Iterator[Any]:
        if self.empty:
            return iter(())
        indices = iter(self.batch_sampler)
        return indices if self.epoch is None else self._pass(self.epoch, indices)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def moment(self) -> _Moment:
        return _Moment(self._capture_rng(), self.states())

    def set_moment(self, moment: _Moment) -> None:
        self._restore_rng(moment.rng)
        self.set_states(moment.generators)

    def states(self) -> dict[str, Any]:
        return _states(_generators_in(self._roots))

    def set_states(self, states: Mapping[str, Any]) -> None:
        generators = _generators_in(self._roots)
        for path, state in states.items():
            if path not in generators:
                raise StateError(
                    f"the snapshot has the state of a generator at {self._name}.{path}, and there is none: make it"
                    " where the object that holds it is made, not later"
                )
            _set_state(generators[path], state)

    def _pass(self, epoch: _Epoch, indices: Iterator[Any]) -> Iterator[Any]:
        """One pass over the batch sampler as torch sees it. With workers torch starts two, and draws from the last."""
        epoch.indices = self._watch(indices)
        return self._draw(epoch)

    def _draw(self, epoch: _Epoch) -> Iterator[Any]:
        if epoch.drawn < epoch.skip:  # workers: torch prefetches, inside iter(loader)
            self.skip(epoch)
        elif epoch.drawn == 0 and epoch.opened is not None and (now := self.moment()) != epoch.opened:
            epoch.first_draw = now
        for indices in epoch.indices:
            epoch.recent.append(indices)
            epoch.drawn += 1
            yield _SeededBatch(epoch.seed, epoch.drawn, indices) if self._seeds else indices

    def skip(self, epoch: _Epoch) -> None:
        """Draw the indices of the batches that were handed out before the snapshot. Reads no data."""
        for indices in islice(epoch.indices, epoch.skip):
            epoch.recent.append(indices)
            epoch.drawn += 1
        if epoch.drawn < epoch.skip:
            raise StateError(
                f"{self._name} had given {epoch.skip} batches when the snapshot was taken, and has {epoch.drawn} now:"
                " the data, the sampler or the batch size has changed; resume with the old ones, or start a new run"
            )
        if _fingerprint(epoch.recent[-1]) != epoch.expected:
            raise StateError(
                f"{self._name} gives other batches than before the snapshot: the data, the sampler or the batch size"
                " has changed, or the sampler draws from a source that cannot be restored; resume with the old ones, or"
                " have the sampler draw from a generator that is an attribute of it"
            )

    def _watch(self, indices: Iterator[Any]) -> Iterator[Any]:
        """`indices`, unless the sampler goes on drawing from the global RNG: then a replay would draw other numbers.

        Compared around the second draw of the first iteration only; what begins later, a replay finds by fingerprint.
        """
        yield from islice(indices, 1)
        if not self._sampler_was_watched:
            before = self._capture_rng()
            second = list(islice(indices, 1))
            if self._capture_rng() != before:
                raise StateError(
                    f"the sampler of {self._name} ({self._sampler_type()}) draws from the global RNG at every batch, in"
                    " turns with the training loop, so its order cannot be replayed: give the sampler a generator of"
                    " its own as an attribute, or have it draw its whole order at once"
                )
            self._sampler_was_watched = True
            yield from second
        yield from indices

    def _sampler_type(self) -> str:
        sampler = self._roots["sampler" if type(self.batch_sampler) is BatchSampler else "batch_sampler"]
        return type(sampler).__name__


class _Workers:
    """Starts data workers with a dataset that seeds and a beginning of our own; ends them when the trainer exits."""

    def __init__(self, seed_workers: bool) -> None:
        self._seed_workers = seed_workers
        self._iterators: weakref.WeakSet[Any] | None = None

    def start(self, loader: DataLoader[Any], make_iterator: Callable[[], Any]) -> Any:
        """Torch's iterator for `loader`, made by `make_iterator`, which starts the workers."""
        if loader.num_workers == 0:
            return make_iterator()
        if self._iterators is None:
            self._iterators = weakref.WeakSet()
            # Runs before the hooks that torch and multiprocessing registered when they were imported (last in, first
            # out), and so while workers can still be told to end; see _outlive_first_sigterm for why they must be.
            atexit.register(_end_workers, self._iterators, os.getpid())
        dataset, worker_init_fn = loader.dataset, loader.worker_init_fn
        if self._seed_workers:
            object.__setattr__(loader, "dataset", _SeededDataset(dataset))  # DataLoader.__setattr__ refuses
        loader.worker_init_fn = _WorkerStart(worker_init_fn)
        # Workers inherit the mask, and lift it when they are ready for signals: until then one would end them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            iterator = make_iterator()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            object.__setattr__(loader, "dataset", dataset)
            loader.worker_init_fn = worker_init_fn
        self._iterators.add(iterator)
        return iterator


def _end_workers(iterators: Iterable[Any], pid: int) -> None:
    if os.getpid() != pid:  # a fork of the trainer that runs exit hooks
        return
    for iterator in list(iterators):
        iterator._shutdown_workers()
        for worker in iterator._workers:
            worker.kill()


def _hook(loader: Any, instrumented: _TorchLoader | _OwnStateLoader) -> None:
    """Switch the class of `loader` to a subclass, so that a plain `for batch in loader` can be redirected.

    A subclass of the one class alone: with a mixin before it, Python sees another layout and refuses the switch. It
    knows `instrumented` weakly, for the reason that `_Order` gives; without it the loader is its old self.
    """
    owner = weakref.ref(instrumented)
    kind: Any = type(loader)

    class Hooked(kind):  # type: ignore[misc]
        def __iter__(self) -> Any:
            instrumented = owner()
            batches = instrumented.on_iter() if instrumented is not None else None
            return super().__iter__() if batches is None else batches

    _switch(loader, Hooked)
    setattr(loader, _HOOK, (owner, kind))


def _tap(loader: DataLoader[Any], instrumented: _TorchLoader, order: _Order, workers: _Workers) -> None:
    """Stand between torch and its sampler too. Its attributes stay the user's own: replacing them would show."""
    _hook(loader, instrumented)
    kind: Any = type(loader)

    class Tapped(kind):  # type: ignore[misc]
        @property
        def _index_sampler(self) -> _Order:
            return order

        def _get_iterator(self) -> Any:
            return workers.start(self, super()._get_iterator)

    _switch(loader, Tapped)


def _switch(loader: Any, subclass: Any) -> None:
    kind = type(loader)
    subclass.__module__, subclass.__name__, subclass.__qualname__ = kind.__module__, kind.__name__, kind.__qualname__
    loader.__class__ = subclass


def _instruments_of(loader: Any) -> InstrumentedLoader | None:
    """What was made for `loader` before. If that is gone, the loader gets back the class that its maker gave it."""
    if not hasattr(loader, _HOOK):
        return None
    owner, kind = getattr(loader, _HOOK)
    instrumented: InstrumentedLoader | None = owner()
    if instrumented is None:
        delattr(loader, _HOOK)
        loader.__class__ = kind
    return instrumented


def _weakly(on_iter: OnIter) -> Callable[[], OnIter | None]:
    """A method's object usually owns the loader's instruments: no ring."""
    return weakref.WeakMethod(on_iter) if isinstance(on_iter, types.MethodType) else lambda: on_iter


def _call(on_iter: Callable[[], OnIter | None], instrumented: InstrumentedLoader) -> Iterator[Any] | None:
    function = on_iter()
    return None if function is None else function(instrumented)


def _fingerprint(indices: Any) -> int | None:
    """Tells one batch of indices from another, in any process; `None` for indices that are neither numbers nor text.

    Only the last batch that was handed out is compared. A running checksum of all would cost 0.8 µs a batch of 32 (two
    cores, torch 2.13), and a shuffle that differs anywhere differs there.
    """
    if isinstance(indices, torch.Tensor):
        indices = indices.tolist()
    try:
        plain = [index if isinstance(index, str) else operator.index(index) for index in indices]
    except TypeError:
        return None
    return zlib.crc32(repr(plain).encode())


# -------------------------------------------------------------------------------------------------- in the data workers


class _SeededBatch(NamedTuple):
    """What the sampler sends to a worker: the indices of a batch, and what to seed with before they are fetched."""

    epoch_seed: int
    number: int
    indices: Any


class _SeededDataset:
    """What a worker fetches from: seeds, then asks the user's dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._generators: dict[str, Any] | None = None  # found once in each worker

    def __getitems__(self, batch: Any) -> Any:
        if isinstance(batch, _SeededBatch):
            if self._generators is None:
                self._generators = _generators_in({"dataset": self.dataset})
            _seed(batch, self._generators)
            batch = batch.indices
        getitems = getattr(self.dataset, "__getitems__", None)
        return getitems(batch) if getitems else [self.dataset[index] for index in batch]


class _WorkerStart:
    """The worker_init_fn of every worker: shows the user's dataset, settles signals, then calls the user's own."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self.worker_init_fn = worker_init_fn
        self.trainer_pid = os.getpid()

    def __call__(self, worker_id: int) -> None:
        _end_without(self.trainer_pid)
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, _SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # frozen
        _outlive_first_sigterm()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        _end_without(self.trainer_pid)


def _end_without(trainer_pid: int) -> None:
    """End a worker whose trainer was killed while it started: torch's watchdog would take the new parent for it.

    A fork server's workers are not the trainer's children; those are left to torch.
    """
    forked = getattr(multiprocessing.current_process(), "_start_method", None) in ("fork", "spawn")
    if forked and os.getppid() != trainer_pid:
        os._exit(1)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _outlive_first_sigterm() -> None:
    """A signal to the process group or to all of a unit must not take the workers before the snapshot is taken.

    The second SIGTERM ends the worker, and SIGINT is the trainer's business. torch ends workers by SIGTERM only where
    all else failed, and multiprocessing at exit, after `_end_workers`, which ends by SIGKILL. A worker whose trainer is
    gone notices that by itself within 5 s (torch's ManagerWatchdog).
    """
    signal.signal(signal.SIGINT, lambda signum, frame: None)  # not SIG_IGN, which a program that is executed inherits
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _seed(batch: _SeededBatch, generators: Mapping[str, Any]) -> None:
    """Seed the process's RNG, and `generators`, each with a word of its own."""

    def word(label: str) -> int:
        return _word(f"{batch.epoch_seed}/{batch.number}/{label}")

    torch.default_generator.manual_seed(word("torch"))  # torch.manual_seed would queue a call for every device
    random.seed(word("python"))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_halves(word("numpy")))
    for path, generator in generators.items():
        _reseed(generator, word(path))


def _word(text: str) -> int:
    """64 bits that depend on `text` alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


# ----------------------------------------------------------------------------------------------------------- generators

_MOST_OBJECTS = 2000
_MOST_DEPTH = 6  # dataset → .dataset (Subset) → .transform → .transforms (Compose) → [0] → .generator
_MOST_ITEMS = 64  # a list of transforms has fewer, a list of samples has more
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Tensor)


def _generators_in(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Every generator that `roots` hold as attributes and items, nearest first, by the path to it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue = deque((path, root, 0) for path, root in roots.items())
    while queue and len(seen) < _MOST_OBJECTS:
        path, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_generator(value):
            found[path] = value
        elif depth < _MOST_DEPTH:
            queue.extend((path + step, part, depth + 1) for step, part in _parts(value))
    return found


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, _OPAQUE):
        return []
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, list | tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)] if len(value) <= _MOST_ITEMS else []
    return [(f".{key}", part) for key, part in getattr(value, "__dict__", {}).items()]


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    return _is_numpy(value, "Generator") or _is_numpy(value, "RandomState")


def _is_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy.random, kind))


def _states(generators: Mapping[str, Any]) -> dict[str, Any]:
    return {path: _state(generator) for path, generator in generators.items()}


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return generator.getstate()
    if _is_numpy(generator, "Generator"):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif _is_numpy(generator, "Generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _reseed(generator: Any, word: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(word)
    elif isinstance(generator, random.Random):
        generator.seed(word)
    elif _is_numpy(generator, "Generator"):
        generator.bit_generator.state = type(generator.bit_generator)(word).state
    else:
        generator.seed(_halves(word))


def _halves(word: int) -> list[int]:
    """A word as the two of 32 bits that numpy's legacy generator takes."""
    return [word & 0xFFFFFFFF, word >> 32]


def _without_arrays(value: Any) -> Any:
    """A state of numpy's with lists for arrays; numpy takes it back."""
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


# ----------------------------------------------------------------------------------------- loaders with their own state


class _OwnStateLoader:
    """A loader that knows its position itself, such as torchdata's StatefulDataLoader. Exact as far as it is."""

    def __init__(
        self, loader: Any, name: str, capture_rng: Callable[[], Any], restore_rng: Callable[[Any], None]
    ) -> None:
        self.name = name
        self._loader = loader
        self._iter = type(loader).__iter__
        self._on_iter: Callable[[], OnIter | None] = lambda: None
        self._capture_rng = capture_rng
        self._restore_rng = restore_rng
        self._pending: tuple[Tree, Any] | None = None
        self._iteration: Callable[[], Iterator[Any] | None] = lambda: None
        self._exhausted = False

    def iterate(self) -> Iterator[Any]:
        self._exhausted = False
        if self._pending is None:
            batches = self._iter(self._loader)
        else:
            position, rng = self._pending
            self._loader.load_state_dict(_with_tensors(position["state"]))
            batches = self._iter(self._loader)
            self._restore_rng(rng)
            self._pending = None
        iteration = self._hand_out(batches)
        self._iteration = weakref.ref(iteration)
        return iteration

    def position(self) -> Tree:
        if self._pending is not None:
            return self._pending[0]
        under_way = self._iteration() is not None and not self._exhausted
        # Not before the first iteration: StatefulDataLoader would start one, which draws. Not after a break: its state
        # says the middle, where the next iteration starts afresh.
        state = _without_tensors(self._loader.state_dict()) if under_way or self._exhausted else None
        return {"kind": _OWN_STATE, "under_way": under_way, "state": state}

    def restore(self, position: Tree, rng: Any) -> None:
        _check_kind(position, _OWN_STATE, self.name)
        self._pending = None
        if position["under_way"]:
            self._pending = position, rng
        elif position["state"] is not None:
            now = self._capture_rng()
            self._loader.load_state_dict(_with_tensors(position["state"]))
            self._loader.state_dict()  # has StatefulDataLoader start, and draw, now and not in the next iteration
            self._restore_rng(now)
            self._exhausted = True

    def hook_iter(self, on_iter: OnIter) -> None:
        self._on_iter = _weakly(on_iter)
        if not hasattr(self._loader, _HOOK):
            _hook(self._loader, self)

    def on_iter(self) -> Iterator[Any] | None:
        return _call(self._on_iter, self)

    def _hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        self._exhausted = True


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {_TENSOR: (str(value.dtype).removeprefix("torch."), tuple(value.shape), bytes(flat.tolist()))}
    if type(value) is dict:
        return {key: _without_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(part) for part in value)
    return value


def _with_tensors(value: Any) -> Any:
    if type(value) is dict:
        if value.keys() == {_TENSOR}:
            dtype, shape, data = value[_TENSOR]
            flat = torch.tensor(list(data), dtype=torch.uint8).view(getattr(torch, dtype))
            return flat.reshape(shape)
        return {key: _with_tensors(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(part) for part in value)
    return value


# ------------------------------------------------------------------------------------------------------------ sequences


class _SequenceLoader:
    """A list, tuple or range of batches: the position is an index."""

    def __init__(self, batches: Sequence[Any], name: str, restore_rng: Callable[[Any], None]) -> None:
        self.name = name
        self._batches = batches
        self._restore_rng = restore_rng
        self._pending: tuple[Tree, Any] | None = None
        self._iteration: Callable[[], Iterator[Any] | None] = lambda: None
        self._handed = 0

    def iterate(self) -> Iterator[Any]:
        self._handed = 0
        if self._pending is not None:
            position, rng = self._pending
            self._handed = position["handed"]
            if self._handed > len(self._batches):
                raise StateError(
                    f"{self.name} had given {self._handed} batches when the snapshot was taken, and has"
                    f" {len(self._batches)} now: resume with the old ones, or start a new run"
                )
            self._restore_rng(rng)
            self._pending = None
        iteration = self._hand_out()
        self._iteration = weakref.ref(iteration)
        return iteration

    def position(self) -> Tree:
        if self._pending is not None:
            return self._pending[0]
        return {"kind": _SEQUENCE, "handed": None if self._iteration() is None else self._handed}

    def restore(self, position: Tree, rng: Any) -> None:
        _check_kind(position, _SEQUENCE, self.name)
        self._pending = None if position["handed"] is None else (position, rng)

    def hook_iter(self, on_iter: OnIter) -> None:
        raise StateError(f"{self.name} is a sequence, whose iteration nobody can follow: use ckpt.batches({self.name})")

    def _hand_out(self) -> Iterator[Any]:
        for index in range(self._handed, len(self._batches)):  # not by iter(), which would read what is skipped
            self._handed += 1
            yield self._batches[index]


# ------------------------------------------------------------------------------------------------------ kinds, in trees

_TORCH = "DataLoader"
_OWN_STATE = "own state"
_SEQUENCE = "sequence"
_TENSOR = "\u0000tensor"
_HOOK = "_harness_hook"


def _check_kind(position: Tree, kind: str, name: str) -> None:
    if position["kind"] != kind:
        raise StateError(
            f"{name} was another kind of loader when the snapshot was taken ({position['kind']}; {kind} now):"
            " resume with the old one, or start a new run"
        )
