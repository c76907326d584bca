"""Resuming: reads a snapshot's small state, and restores the live state from the snapshot.

Owns how a snapshot becomes live: its environment is compared, its tensors, loaders and random numbers are restored.
The Checkpointer decides when that happens; the agent decides which snapshot it is, and where to read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import Tensor

from harness.core import tree
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt, StateError
from harness.ipc.slots import SlotRecord
from harness.trainer.link import Link, Ready
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.loaders.instrument import instrument
from harness.trainer.loaders.persistent import PersistentLoaders
from harness.trainer.position import Position
from harness.trainer.staging.stager import read_snapshot
from harness.trainer.state.compare import references
from harness.trainer.state.environment import environment
from harness.trainer.state.kinds import is_array, is_tensor
from harness.trainer.state.restore import restore, restore_values
from harness.trainer.state.rng import capture_moment, restore_rng
from harness.trainer.state.stored import Pieces
from harness.trainer.state.unlisted import Unlisted


@dataclass(frozen=True)
class ResumedFrom:
    """The snapshot that this start resumes.

    Attributes:
        generation: number of the start of the trainers that made the snapshot.
        step: completed optimizer steps.
        tier: where the snapshot was found: "memory", "local" or "remote".
    """

    generation: int
    step: int
    tier: str


@dataclass(frozen=True)
class SmallState:
    """Everything of a snapshot but its tensors; known before any tensor is here.

    Attributes:
        resumed_from: which snapshot it is.
        place: where in the program the snapshot was taken.
        step: completed optimizer steps.
        extra: the user's plain values, with a `TensorRef` in place of each tensor and array.
        states: every state by name, with a `TensorRef` in place of each tensor.
        devices: where tensors of `extra` were that were not on the CPU, by name.
        loaders: the loaders' positions, by name.
        rng: the random state of every library.
        persistent: names of the other loaders whose persistent workers were started.
    """

    resumed_from: ResumedFrom
    place: Position
    step: int
    extra: dict[str, Any]
    states: dict[str, Any]
    devices: dict[str, str]
    loaders: dict[str, Any]
    rng: Any
    persistent: tuple[str, ...]

    @classmethod
    def of(cls, snapshot: str, tier: str, record: SlotRecord) -> SmallState:
        """Read the small state from the record of the slot in which `snapshot` was found."""
        small, identity = tree.loads(record.state.encode()), SnapshotId.parse(snapshot)
        return cls(
            resumed_from=ResumedFrom(identity.generation, identity.step, tier),
            place=Position.from_tree(small["place"]),
            step=small["step"],
            extra=small["extra"],
            states=small["states"],
            devices=small.get("extra_devices", {}),
            loaders=small["loaders"],
            rng=small["rng"],
            persistent=tuple(small.get("persistent", ())),
        )


class Loaders:
    """The loaders of the program's loops, by name, as the loops begin; and restored positions without a loader yet."""

    def __init__(self, *, seed_workers: bool) -> None:
        """Begin without loaders. See `instrument` for `seed_workers`."""
        self._seed_workers = seed_workers
        self._known: dict[str, tuple[Any, InstrumentedLoader]] = {}
        self._pending: dict[str, Any] = {}
        self._pending_rng: Any = None
        self._missed = False
        self.persistent = PersistentLoaders(capture_moment, restore_rng)
        """Loaders that the Checkpointer does not know."""

    def instrumented(self, loader: Any, name: str) -> InstrumentedLoader:
        """Return the loader of the loop called `name`, made resumable. A restored position that waits for it is set.

        A loop may bring a new object each epoch: under one name it counts as the same loader.

        Raises:
            StateError: the loader's position cannot be restored exactly; says why, and the remedy.
        """
        known = self._known.get(name)
        if known is not None and known[0] is loader:
            return known[1]
        made = instrument(loader, name, capture_moment, restore_rng, self._seed_workers)
        self._known[name] = (loader, made)
        if name in self._pending:
            made.restore(self._pending.pop(name), self._pending_rng)
        return made

    def forget_inner(self) -> None:
        """Drop the positions of loaders whose loops have not begun: the place in those loops was not reached."""
        self._missed = True

    def positions(self) -> dict[str, Any]:
        """Return the position of each loader, by name."""
        return {name: loader.position() for name, (_, loader) in self._known.items()}

    def restore(self, positions: dict[str, Any], rng: Any, persistent: Iterable[str]) -> None:
        """Restore the loaders that are known now, and the others when their loops begin. Sets the global RNG, last."""
        self._pending = dict(positions)
        for name, (_, loader) in self._known.items():
            if name in self._pending:
                loader.restore(self._pending.pop(name), rng)
        if self._missed:
            self._pending = {}
        self.persistent.restore(persistent)
        restore_rng(rng)
        self._pending_rng = rng


class Resumption:
    """The snapshot that one start resumes. The agent sends its small state first, then its tensors."""

    def __init__(
        self,
        link: Link,
        states: Mapping[str, Any],
        unlisted: Unlisted,
        loaders: Loaders,
        say: Callable[[str], None],
    ) -> None:
        """Begin without a snapshot.

        Args:
            link: the connection to the agent.
            states: the Checkpointer's states, by name.
            unlisted: what they have besides their state_dicts.
            loaders: the loaders of the program.
            say: shows a line to the user.
        """
        self._link, self._states, self._unlisted = link, states, unlisted
        self._loaders, self._say = loaders, say
        self._snapshot = ""

    def take_others(self, unlisted: Unlisted) -> None:
        """Go on with other states, which `unlisted` knows."""
        self._unlisted = unlisted

    def learn(self) -> SmallState | None:
        """Block until the agent has told which snapshot is resumed; `None` if none. Raises what the agent reported."""
        head = self._link.wait_head()
        if head is None:
            return None
        small = self._read(head.snapshot, head.tier, head.record)
        return (self.confirm() or small) if _has_tensors(small.extra) else small

    def extra_of(self, small: SmallState) -> dict[str, Any]:
        """Return the user's plain values in a small state. Blocks until the tensors are here, if there are any in it.

        Raises:
            SnapshotCorrupt: the snapshot is gone.
        """
        if not _has_tensors(small.extra):
            return small.extra
        ready = self.wait()
        assert ready is not None
        values: dict[str, Any] = restore_values(small.extra, tensors_of(ready), small.devices)
        return values

    def confirm(self) -> SmallState | None:
        """Block until the tensors are here. Return the small state of another snapshot if the first one was damaged."""
        ready = self._link.wait_ready() if self._snapshot else None
        if ready is None or ready.snapshot == self._snapshot or (record := ready.slot.record()) is None:
            return None
        self._say(f"snapshot {self._snapshot} is damaged; resuming from {ready.snapshot} instead")
        return self._read(ready.snapshot, ready.tier, record)

    def wait(self) -> Ready | None:
        """Block until the tensors are here; `None` if there is nothing to resume.

        Raises:
            SnapshotCorrupt: there was a snapshot when the program began, and now there is none.
        """
        ready = self._link.wait_ready()
        if ready is None and self._snapshot:
            raise SnapshotCorrupt(
                f"snapshot {self._snapshot} was there when this program began, and now there is none: its `extra` "
                "and its place in the program are in use already, so the program cannot train. Start it again"
            )
        return ready

    def lead_back(self, ready: Ready) -> None:
        """Restore what a body needs that runs again up to the place of the snapshot: near to what it was.

        Where the states differ from those of the snapshot, they stay as they are: the body may change that.
        """
        with contextlib.suppress(StateError):
            make_live(ready, record_of(ready), self._states, self._unlisted, lambda _: None)
        small = SmallState.of(ready.snapshot, ready.tier, record_of(ready))
        self._loaders.restore(small.loaders, small.rng, small.persistent)

    def make_live(self, ready: Ready) -> SmallState:
        """Restore states, loaders and random numbers. Raises StateError if they differ: then nothing was changed."""
        small = make_live(ready, record_of(ready), self._states, self._unlisted, self._say)
        self._loaders.restore(small.loaders, small.rng, small.persistent)
        return small

    def _read(self, snapshot: str, tier: str, record: SlotRecord) -> SmallState:
        self._snapshot = snapshot
        return SmallState.of(snapshot, tier, record)


def make_live(
    ready: Ready, record: SlotRecord, states: Mapping[str, Any], unlisted: Unlisted, say: Callable[[str], None]
) -> SmallState:
    """Restore the live states. Return the small state, for the rest: place, loaders, random numbers, `extra`.

    Args:
        ready: the snapshot, in a slot.
        record: the record of that slot.
        states: the Checkpointer's states, by name.
        unlisted: what they have besides their state_dicts.
        say: shows a line to the user.

    Raises:
        StateError: the live states differ from those of the snapshot; nothing was changed.
    """
    if not ready.verified:
        say(f"snapshot {ready.snapshot} is resumed from memory without verification: it has no digest yet")
    for line in _differences(record.environment, environment()):
        say(f"bit-identity is not promised: {line}")
    small = SmallState.of(ready.snapshot, ready.tier, record)
    restore(states, small.states, tensors_of(ready), unlisted)
    return small


def refill(live: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Give `live` the content of `stored`. What it consists of stays the same objects: the program may hold them."""
    for key in live.keys() - stored.keys():
        del live[key]
    live.update({key: _refilled(live.get(key), value) for key, value in stored.items()})


def _refilled(live: Any, stored: Any) -> Any:
    if type(live) is not type(stored):
        return stored
    if isinstance(stored, dict):
        refill(live, stored)
        return live
    if isinstance(stored, list):
        live[:] = [_refilled(held, value) for value, held in zip_longest(stored, live[: len(stored)])]
        return live
    if is_tensor(live) and (live.shape, live.dtype, live.device) == (stored.shape, stored.dtype, stored.device):
        return live.copy_(stored)
    if is_array(live) and (live.shape, live.dtype) == (stored.shape, stored.dtype):
        live[...] = stored
        return live
    return stored


def _has_tensors(values: Any) -> bool:
    return next(references(values), None) is not None


def tensors_of(ready: Ready) -> dict[str, Tensor | Pieces]:
    """Return the tensors of a snapshot as views into its slots. Raises SnapshotCorrupt."""
    return read_snapshot(ready.slots, ready.rank)


def record_of(ready: Ready) -> SlotRecord:
    """Return the record of the slot that holds the snapshot.

    Raises:
        StateError: the slot holds no snapshot any more.
    """
    record = ready.slot.record()
    if record is None:
        raise StateError(f"snapshot {ready.snapshot} was lost from memory; start again")
    return record


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was {before.get(name, 'absent')}, is {now.get(name, 'absent')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
