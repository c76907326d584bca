"""DataLoader: resumes the iteration of a map-style DataLoader in the middle, with the very next batch.

Owns the replay of an iteration up to a batch without reading data. Knows nothing of snapshots or the agent: it gives
and takes a plain tree, the *position*.

    iterate()   record RNG ── iter() draws a base seed ── first draw shuffles ── batch 1 ── … ── batch k ── position()
    restore()   set RNG back ─ iter() draws the same   ── draws k batches of indices, reads nothing
                                                       └─ RNG of the snapshot ── batch k + 1

This file relies on the following behaviour of torch's DataLoader (2.6 to 2.13, torch/utils/data/dataloader.py):

- `iter(loader)` calls `iter(batch_sampler)`, then draws a base seed from `loader.generator` or the global RNG.
- A sampler draws its order at the first `next`: with 0 workers that is at the first batch, with workers inside
  `iter(loader)`, which prefetches. So a replay must skip at the first `next` too, or the two draws swap places.
- Persistent workers draw the base seed when they are started, never again.

The epoch seed, with which workers are seeded, is a hash of the RNG state: it draws nothing.

A position is exact for the same number of workers, or if the sampler draws its order all at once (torch's own do).
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    MapDataPipe,
)

from harness.errors import StateError
from harness.trainer.loaders.generators import (
    generators_in,
    make_missing,
    roots_of,
    set_state,
    set_states,
    states,
    word_of,
)
from harness.trainer.loaders.hook import OnIter, Tree, call, check_kind, hook, switch, weakly
from harness.trainer.loaders.order import draws_at_once, draws_in_turns, ends_early, fingerprint, other_order, varies
from harness.trainer.loaders.sampler_values import SamplerValues
from harness.trainer.loaders.workers import SeededBatch, SeededDataset, Workers
from harness.trainer.state.random_states import global_ones

_KIND = "DataLoader"


class TorchLoader:
    """A map-style DataLoader, made resumable. Its class is switched to a subclass; its attributes stay the user's."""

    repeats = True

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        capture_rng: Callable[[], Any],
        restore_rng: Callable[[Any], None],
        seed_workers: bool,
    ) -> None:
        """See `loader.instrument`. Raises StateError if this loader cannot be resumed exactly."""
        _check(loader, name)
        self.name = name
        self.loader = loader
        self._capture_rng = capture_rng
        self._restore_rng = restore_rng
        self._order = _Order(loader, name, capture_rng, restore_rng, seed_workers)
        self._on_iter: Callable[[], OnIter | None] = lambda: None
        self._started = 0
        self._live: weakref.WeakSet[_Iteration] = weakref.WeakSet()
        self._pending: tuple[Tree, Any] | None = None
        self._repeating = False
        # Workers that were started before do not seed their batches: the next iteration starts new ones.
        loader._iterator = None
        _tap(loader, self, self._order, Workers(SeededDataset if seed_workers else None))

    def iterate(self, again: Any = None) -> _Iteration:
        """See `InstrumentedLoader.iterate`."""
        if self._pending is None:
            epoch, batches = self._begin()
        else:
            epoch, batches = self._replay(*self._pending, again)
            self._pending, self._repeating = None, again is not None
        self._started = epoch.number + 1
        iteration = _Iteration(batches, epoch, self._live)
        self._live.add(iteration)
        return iteration

    def moment(self) -> Tree:
        """See `InstrumentedLoader.moment`."""
        return self._order.moment()._asdict()

    def position(self) -> Tree:
        """See `InstrumentedLoader.position`."""
        if self._pending is not None:
            return self._pending[0]
        live = list(self._live)
        if len(live) > 1:
            raise StateError(
                f"{len(live)} iterations of {self.name} are under way at once: finish one before the next, delete"
                " iterators that are not needed, or make a second DataLoader"
            )
        return {
            "kind": _KIND,
            "started": self._started,
            "generators": self._order.states(),
            "values": self._order.kept_values(under_way=bool(live)),
            "workers_running": self.loader._iterator is not None,
            "epoch": live[0].epoch.to_tree() if live else None,
        }

    def restore(self, position: Tree, rng: Any) -> None:
        """See `InstrumentedLoader.restore`."""
        check_kind(position, _KIND, self.name)
        if self._repeating:
            self._repeating = False
            self._order.set_position(position)
            return
        begun = list(self._live)  # before the restore, by a script that keeps an iterator
        self._live.clear()
        if position["epoch"] is not None:
            self._pending = position, rng
            if len(begun) == 1:
                begun[0].continue_as(self.iterate())
            return
        for iteration in begun:
            iteration.end()
        self._pending = None
        now = self._capture_rng()
        self._match_workers(position["workers_running"])
        self._order.set_position(position)
        self._restore_rng(now)
        self._started = position["started"]

    def generators(self) -> dict[str, Any]:
        """See `InstrumentedLoader.generators`."""
        return self._order.generators()

    def changed_outside(self) -> str | None:
        """See `InstrumentedLoader.changed_outside`."""
        return self._order.values.changed_outside()

    def hook_iter(self, on_iter: OnIter) -> None:
        """See `InstrumentedLoader.hook_iter`."""
        self._on_iter = weakly(on_iter)

    def on_iter(self) -> Iterator[Any] | None:
        """See `Hookable.on_iter`."""
        return call(self._on_iter, self)

    def _begin(self) -> tuple[_Epoch, Iterator[Any]]:
        start = self._order.moment()
        self._order.values.begin()
        epoch = _Epoch(
            number=self._started,
            seed=self._epoch_seed(),
            start=start,
            workers_running=self.loader._iterator is not None,
            recent=self._recent(),
        )
        return epoch, self._open(epoch)

    def _epoch_seed(self) -> int:
        """Return the number from which the seeds of an epoch's batches are derived. Draws nothing.

        It depends only on the generator from which torch would have drawn its workers' seeds: a script that seeds
        torch, but not Python's `random`, has the same data in every run.
        """
        generator = self.loader.generator or torch.default_generator
        state = hashlib.blake2b(bytes(generator.get_state().tolist())).hexdigest()
        return word_of(f"{self.name}/{self._started}/{state}")

    def _replay(self, position: Tree, rng: Any, again: Any) -> tuple[_Epoch, Iterator[Any]]:
        epoch = _Epoch.from_tree(position["epoch"], self._recent())
        if again is not None:
            epoch.repeat_last()
        self._match_workers(epoch.workers_running)
        self._order.set_moment(epoch.start)
        self._order.values.begin()
        batches = self._open(epoch)
        if epoch.drawn < epoch.skip:  # 0 workers: nothing was prefetched, so the sampler has not drawn its order yet
            if epoch.first_draw is not None:
                self._order.set_moment(epoch.first_draw)
            self._order.skip(epoch)
        if again:
            first_draw = epoch.first_draw if not epoch.skip else None
            self._order.set_moment(first_draw or _Moment.of(again))
        else:
            self._order.set_position(position)
            self._restore_rng(rng)
        return epoch, batches

    def _open(self, epoch: _Epoch) -> Iterator[Any]:
        self._order.epoch = epoch
        try:
            batches = DataLoader.__iter__(self.loader)
        finally:
            self._order.epoch = None
        if self.loader.num_workers == 0:
            epoch.opened = self._order.moment()
        return batches

    def _match_workers(self, running: bool) -> None:
        """Start or drop persistent workers, so that they run if they were `running`. May draw from the global RNG."""
        if not running:
            self.loader._iterator = None
        elif self.loader._iterator is None and self.loader.persistent_workers:
            self._order.empty = True  # otherwise they would prefetch, and read data
            try:
                DataLoader.__iter__(self.loader)
            finally:
                self._order.empty = False

    def _recent(self) -> deque[Any]:
        prefetched = self.loader.num_workers * (self.loader.prefetch_factor or 0)
        return deque(maxlen=prefetched + 1)


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
            f"{name} has batch_size=None, so it is unknown what a batch is: give batch_size, or a batch_sampler"
        )
    if loader.num_workers > 0 and not loader.in_order:
        raise varies(name)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        raise StateError(
            f"{name} is a {kind.__name__}, which iterates in its own way: give it state_dict and load_state_dict, or"
            " use a plain DataLoader and transform its batches in the training loop"
        )


class _Moment(NamedTuple):
    """Every random state that a loader's order can depend on, at one instant."""

    rng: Any
    generators: dict[str, Any]
    values: dict[str, Any]

    @classmethod
    def of(cls, tree: Tree) -> _Moment:
        """Return the moment that `_asdict` has described; one of an older version has no values."""
        return cls(tree["rng"], tree["generators"], tree.get("values", {}))


@dataclass(eq=False)
class _Epoch:
    """One iteration of a DataLoader, with everything that is needed to replay it.

    Attributes:
        number: how many iterations of this loader were started before.
        seed: the number from which the seeds of its batches are derived.
        start: the random states before `iter(loader)`.
        workers_running: whether persistent workers were running before `iter(loader)`.
        recent: the last indices drawn, back to those of the batch that was handed out last.
        first_draw: the random states before the sampler's first draw, if something else drew since `iter(loader)`, as
            `zip` does.
        skip: batches handed out before the snapshot that this iteration resumes.
        expected: fingerprint of the last of those batches.
        repeats: whether the last of them is handed out again: then `skip` is one less.
        handed: batches handed out, skipped ones included.
        drawn: batches of indices drawn; ahead of `handed` by the batches that workers prefetch.
        opened: the random states after `iter(loader)`, with 0 workers.
        indices: the rest of the batch sampler's order.
    """

    number: int
    seed: int
    start: _Moment
    workers_running: bool
    recent: deque[Any]
    first_draw: _Moment | None = None
    skip: int = 0
    expected: int | None = None
    repeats: bool = False
    handed: int = 0
    drawn: int = 0
    opened: _Moment | None = None
    indices: Iterator[Any] = field(default_factory=lambda: iter(()))

    def repeat_last(self) -> None:
        self.repeats = True
        self.skip = self.handed = self.skip - 1

    def to_tree(self) -> Tree:
        return {
            "number": self.number,
            "seed": self.seed,
            "start": self.start._asdict(),
            "workers_running": self.workers_running,
            "first_draw": self.first_draw and self.first_draw._asdict(),
            "handed": self.handed,
            "last": fingerprint(self.recent[self.handed - self.drawn - 1]) if self.handed else None,
        }

    @classmethod
    def from_tree(cls, tree: Tree, recent: deque[Any]) -> _Epoch:
        return cls(
            number=tree["number"],
            seed=tree["seed"],
            start=_Moment.of(tree["start"]),
            workers_running=tree["workers_running"],
            recent=recent,
            first_draw=tree["first_draw"] and _Moment.of(tree["first_draw"]),
            skip=tree["handed"],
            expected=tree["last"],
            handed=tree["handed"],
        )


class _Iteration:
    """The iterator of the training loop: hands out torch's batches, and counts them."""

    __slots__ = ("__weakref__", "_batches", "_live", "epoch")

    def __init__(self, batches: Iterator[Any], epoch: _Epoch, live: weakref.WeakSet[_Iteration]) -> None:
        self.epoch = epoch
        self._batches = batches
        self._live = live

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        self.epoch.handed += 1  # counted before, so that a batch that fails counts too: its indices are used up
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch.handed -= 1
            self._live.discard(self)
            raise

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def continue_as(self, other: _Iteration) -> None:
        """Continue where another iteration of the same loader begins, which is not used itself."""
        self.epoch, self._batches = other.epoch, other._batches
        self._live.discard(other)
        self._live.add(self)

    def end(self) -> None:
        """Hand out nothing more."""
        self._batches = iter(())


class _Order:
    """Stands between torch and the batch sampler. Changes nothing unless `TorchLoader` is opening an epoch.

    Holds no reference that leads back to the loader: torch's iterator holds this object, and with persistent workers
    the loader holds the iterator. The garbage collector would have to break such a cycle, and it closes queues before
    the iterator can tell its workers to end; torch would wait for them in vain, 10 s each.
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
        self._roots = roots_of(loader)
        self.values = SamplerValues(self._roots)
        self._draws_at_once = draws_at_once(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self.empty:
            return iter(())
        indices = iter(self.batch_sampler)
        return indices if self.epoch is None else self._pass(self.epoch, indices)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def moment(self) -> _Moment:
        return _Moment(self._capture_rng(), self.states(), self.values.kept())

    def set_moment(self, moment: _Moment) -> None:
        self._restore_rng(moment.rng)
        self.set_states(moment.generators)
        self.values.set(moment.values)

    def set_position(self, position: Tree) -> None:
        """Set what the loader's parts had when `position` was taken; one of an older version has no values."""
        self.set_states(position["generators"])
        self.values.set(position.get("values", {}))

    def kept_values(self, *, under_way: bool) -> dict[str, Any]:
        """Return the values that samplers have counted. `under_way`: whether an iteration is, which may count too."""
        if under_way:
            self.values.note()
        return self.values.kept()

    def generators(self) -> dict[str, Any]:
        return generators_in(self._roots)

    def states(self) -> dict[str, Any]:
        return states(self.generators())

    def set_states(self, states: Mapping[str, Any]) -> None:
        generators = self.generators()
        if not states.keys() <= generators.keys():
            self._draw_once()
            make_missing(self._roots, states)
            generators = self.generators()
        set_states(generators, states, self._name)

    def _draw_once(self) -> None:
        """Draw a batch of indices for nothing: some samplers create their generator when they are first drawn from."""
        now, values = self.moment(), self.values.everything()
        next(iter(self.batch_sampler), None)
        self._restore_rng(now.rng)
        self.values.set_back(values)
        generators = self.generators()
        for path, state in now.generators.items():
            set_state(generators[path], state)

    def _pass(self, epoch: _Epoch, indices: Iterator[Any]) -> Iterator[Any]:
        """Return one pass over the batch sampler. With workers torch starts two passes, and draws from the last."""
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
            if epoch.drawn == 1:
                self.values.note()
            if epoch.repeats and epoch.drawn == epoch.skip + 1:
                self._check_same(epoch)
            yield SeededBatch(epoch.seed, epoch.drawn, indices) if self._seeds else indices
        self.values.note()

    def skip(self, epoch: _Epoch) -> None:
        """Draw the indices of the batches that were handed out before the snapshot. Reads no data."""
        for indices in islice(epoch.indices, epoch.skip):
            epoch.recent.append(indices)
            epoch.drawn += 1
        if epoch.drawn < epoch.skip:
            raise ends_early(self._name, "batches", epoch.skip, epoch.drawn)
        if not epoch.repeats:
            self._check_same(epoch)

    def _check_same(self, epoch: _Epoch) -> None:
        if fingerprint(epoch.recent[-1]) != epoch.expected:
            raise other_order(self._name)

    def _watch(self, indices: Iterator[Any]) -> Iterator[Any]:
        """Yield `indices`; raise StateError if the sampler draws from the global RNG after its first batch.

        A replay would then draw other numbers. torch's own samplers draw their whole order at the first batch. Of
        others each draw is watched, which takes some 20 µs.
        """
        yield from islice(indices, 1)
        while not self._draws_at_once:
            before = global_ones(self._capture_rng())
            following = list(islice(indices, 1))
            if global_ones(self._capture_rng()) != before:
                raise draws_in_turns(self._name, self._sampler)
            if not following:
                return
            yield from following
        yield from indices

    @property
    def _sampler(self) -> Any:
        return self._roots["sampler" if type(self.batch_sampler) is BatchSampler else "batch_sampler"]


def _tap(loader: DataLoader[Any], instrumented: TorchLoader, order: _Order, workers: Workers) -> None:
    """Hook the loader, its sampler too. Its attributes stay the user's own: a replacement would be visible."""
    hook(loader, instrumented)
    kind: Any = type(loader)

    class Tapped(kind):  # type: ignore[misc]
        @property
        def _index_sampler(self) -> _Order:
            return order

        def _get_iterator(self) -> Any:
            return workers.start(self, super()._get_iterator)

    switch(loader, Tapped)
