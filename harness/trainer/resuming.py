"""What a start goes on from: read from a snapshot's small state, and made the live state.

Owns how a snapshot becomes live: its environment is compared, its tensors, loaders and random numbers are restored.
When that happens is the Checkpointer's; which snapshot, and where it was found, is the agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from harness.core import tree
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt, StateError
from harness.ipc.slots import SlotRecord
from harness.trainer.link import Link, Ready
from harness.trainer.loaders.hook import InstrumentedLoader
from harness.trainer.loaders.instrument import instrument
from harness.trainer.position import Position
from harness.trainer.staging.stager import read_tensors
from harness.trainer.state.environment import environment
from harness.trainer.state.restore import restore
from harness.trainer.state.rng import capture_rng, restore_rng


@dataclass(frozen=True)
class ResumedFrom:
    """Where this start goes on.

    Attributes:
        generation: the start of the trainers that made the snapshot.
        step: completed optimizer steps.
        tier: where it was found: "memory", "local" or "remote".
    """

    generation: int
    step: int
    tier: str


@dataclass(frozen=True)
class SmallState:
    """The small state of a snapshot; it is known before any tensor is here.

    Attributes:
        resumed_from: which one it is.
        place: where in the program it was taken.
        step: completed optimizer steps.
        extra: the user's.
        states: of every state, with marks where tensors were.
        loaders: positions, by name.
        rng: of every library.
    """

    resumed_from: ResumedFrom
    place: Position
    step: int
    extra: dict[str, Any]
    states: dict[str, Any]
    loaders: dict[str, Any]
    rng: Any

    @classmethod
    def of(cls, snapshot: str, tier: str, record: SlotRecord) -> SmallState:
        """Read it."""
        small, identity = tree.loads(record.state.encode()), SnapshotId.parse(snapshot)
        return cls(
            resumed_from=ResumedFrom(identity.generation, identity.step, tier),
            place=Position(**small["place"]),
            step=small["step"],
            extra=small["extra"],
            states=small["states"],
            loaders=small["loaders"],
            rng=small["rng"],
        )


class Loaders:
    """The loaders of the program's loops, by name, as the loops come by; and the positions that wait for one."""

    def __init__(self, *, seed_workers: bool) -> None:
        """See `instrument` for `seed_workers`."""
        self._seed_workers = seed_workers
        self._known: dict[str, tuple[Any, InstrumentedLoader]] = {}
        self._pending: dict[str, Any] = {}
        self._pending_rng: Any = None

    def instrumented(self, loader: Any, name: str) -> InstrumentedLoader:
        """The loader of the loop called `name`, made resumable; another object each epoch is the same loader to us.

        Raises:
            StateError: its position cannot be restored exactly; says why, and the remedy.
        """
        known = self._known.get(name)
        if known is not None and known[0] is loader:
            return known[1]
        made = instrument(loader, name, capture_rng, restore_rng, self._seed_workers)
        self._known[name] = (loader, made)
        if name in self._pending:
            made.restore(self._pending.pop(name), self._pending_rng)
        return made

    def positions(self) -> dict[str, Any]:
        """Where each of them stands."""
        return {name: loader.position() for name, (_, loader) in self._known.items()}

    def restore(self, positions: dict[str, Any], rng: Any) -> None:
        """Those that are known now; the others when their loops come by. Sets the global RNG, last of all."""
        self._pending = positions
        for name, (_, loader) in self._known.items():
            if name in self._pending:
                loader.restore(self._pending.pop(name), rng)
        restore_rng(rng)
        self._pending_rng = rng


class Resumption:
    """What one start goes on from: told by the agent, first its small state, then its tensors."""

    def __init__(self, link: Link, states: Mapping[str, Any], loaders: Loaders, say: Callable[[str], None]) -> None:
        """Nothing is known yet.

        Args:
            link: to the agent.
            states: what was given to the Checkpointer, by name.
            loaders: of the program.
            say: a word to the user.
        """
        self._link, self._states, self._loaders, self._say = link, states, loaders, say
        self._snapshot = ""

    def learn(self) -> SmallState | None:
        """Block until it is known what is resumed; `None` if nothing is. Raises what the agent reported."""
        head = self._link.wait_head()
        return None if head is None else self._read(head.snapshot, head.tier, head.record)

    def confirm(self) -> SmallState | None:
        """Block until the tensors are here; the small state of another snapshot where the first one was damaged."""
        ready = self._link.wait_ready() if self._snapshot else None
        if ready is None or ready.snapshot == self._snapshot or (record := ready.slot.record()) is None:
            return None
        self._say(f"snapshot {self._snapshot} turned out to be damaged; going on from {ready.snapshot} instead")
        return self._read(ready.snapshot, ready.tier, record)

    def wait(self) -> Ready | None:
        """Block until the tensors are here; `None` if there is nothing to resume.

        Raises:
            SnapshotCorrupt: there was something when the program began, and now there is nothing.
        """
        ready = self._link.wait_ready()
        if ready is None and self._snapshot:
            raise SnapshotCorrupt(
                f"snapshot {self._snapshot} was there when this program began, and now there is none: its `extra` "
                "and its place in the program are in use already, so nothing is trained. Start it again"
            )
        return ready

    def make_live(self, ready: Ready) -> SmallState:
        """Make states, loaders and random numbers the snapshot's. Raises StateError: they differ; nothing changed."""
        small = make_live(ready, record_of(ready), self._states, self._say)
        self._loaders.restore(small.loaders, small.rng)
        return small

    def _read(self, snapshot: str, tier: str, record: SlotRecord) -> SmallState:
        self._snapshot = snapshot
        return SmallState.of(snapshot, tier, record)


def make_live(ready: Ready, record: SlotRecord, states: Mapping[str, Any], say: Callable[[str], None]) -> SmallState:
    """Make the live states the snapshot's; its small state, for the rest: place, loaders, random numbers, `extra`.

    Args:
        ready: the snapshot, in a slot.
        record: of that slot.
        states: what was given to the Checkpointer.
        say: a word to the user.

    Raises:
        StateError: the live states differ from those of the snapshot; nothing was changed.
    """
    if not ready.verified:
        say(f"snapshot {ready.snapshot} is resumed from memory as it is: no digest of it was written yet")
    for line in _differences(record.environment, environment()):
        say(f"bit-identity is not promised: {line}")
    small = SmallState.of(ready.snapshot, ready.tier, record)
    tensors = read_tensors(ready.slot, record)
    restore(states, small.states, tensors)
    return small


def refill(live: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Give `live` the content of `stored`. Dicts and lists in it stay the same objects: the program may hold them."""
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
    return stored


def record_of(ready: Ready) -> SlotRecord:
    """What its slot holds.

    Raises:
        StateError: nothing, any more.
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
