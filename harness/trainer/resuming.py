"""Resuming: reads a snapshot's small state, and restores the live state from the snapshot.

Owns how a snapshot becomes live: its environment is compared, its tensors, loaders and random numbers are restored.
The Checkpointer decides when that happens; the agent decides which snapshot it is, and where to read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from torch import Tensor

from harness.core import tree
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt, StateError
from harness.ipc.slots import SlotRecord
from harness.trainer.link import Link, Ready
from harness.trainer.loaders.known import Loaders, StoredLoaders
from harness.trainer.position import Position
from harness.trainer.staging.stager import read_snapshot
from harness.trainer.state.compare import references
from harness.trainer.state.environment import environment
from harness.trainer.state.kinds import is_array, is_tensor
from harness.trainer.state.random_states import RandomStates
from harness.trainer.state.restore import restore, restore_values
from harness.trainer.state.stored import Pieces
from harness.trainer.state.unlisted import Unlisted

BEHIND_A_LOOP: Final = (
    "the program went on behind a loop, which has yielded nothing in this start. What only the loop's body sets is not "
    "there then: set it before the loop. What only its body adds to (a sum, a count, a list) is empty: keep it in "
    "ckpt.extra, or let the code behind the loop allow for it"
)
"""Explains a failure of which `misses_iterations` is true."""


def misses_iterations(error: BaseException) -> bool:
    """Whether an exception may come of a loop that has yielded nothing."""
    return isinstance(error, (NameError, ZeroDivisionError, IndexError)) or "empty" in str(error)


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
        loaders: where the loaders were.
        rng: the random state of every library.
    """

    resumed_from: ResumedFrom
    place: Position
    step: int
    extra: dict[str, Any]
    states: dict[str, Any]
    devices: dict[str, str]
    loaders: StoredLoaders
    rng: Any

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
            loaders=StoredLoaders.of(small),
            rng=small["rng"],
        )


class Resumption:
    """The snapshot that one start resumes. The agent sends its small state first, then its tensors."""

    def __init__(
        self,
        link: Link,
        states: Mapping[str, Any],
        unlisted: Unlisted,
        loaders: Loaders,
        random: RandomStates,
        say: Callable[[str], None],
    ) -> None:
        """Begin without a snapshot.

        Args:
            link: the connection to the agent.
            states: the Checkpointer's states, by name.
            unlisted: what they have besides their state_dicts.
            loaders: the loaders of the program.
            random: its random states.
            say: shows a line to the user.
        """
        self._link, self._states, self._unlisted = link, states, unlisted
        self._loaders, self._random, self._say = loaders, random, say
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

        Where the states differ from those of the snapshot, they stay as they are: the body may change that. Modules
        stay in training mode, or not: the body may have begun otherwise than it came to the place, a validation.
        """
        with contextlib.suppress(StateError), self._unlisted.keeping_modes():
            make_live(ready, record_of(ready), self._states, self._unlisted, lambda _: None)
        small = SmallState.of(ready.snapshot, ready.tier, record_of(ready))
        self._loaders.restore(small.loaders, self._random.completed(small.rng), arrives=False)

    def make_live(self, ready: Ready) -> SmallState:
        """Restore states, loaders and random numbers. Raises StateError if they differ: then nothing was changed."""
        small = make_live(ready, record_of(ready), self._states, self._unlisted, self._say)
        self._loaders.restore(small.loaders, self._random.completed(small.rng), arrives=True)
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
