"""Stager: from live state to a sealed slot, and back to tensors.

Owns the layout of the slots, their views, and which step was sealed last. Knows neither loops nor when a snapshot is
due: the caller asks for one, and the stager fills the slot that the agent has granted.

    capture ─▶ same layout as before? ─no─▶ plan ─▶ ask the agent for slots (the next boundary tries again)
                     └─yes─▶ one copy into the granted slot ─▶ seal ─▶ tell the agent

With overlap, a thread copies the tensors of an optimizer after the boundary, and `settle` seals.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.core import tree
from harness.core.manifest import MAX_STATE_BYTES, StoredPiece
from harness.core.messages import Sealed
from harness.core.shard import ShardLayout, TensorSpec, header_bytes, parse_header, plan_shards
from harness.core.snapshot import shard_name
from harness.errors import NoSpace, SnapshotCorrupt, StateError
from harness.ipc.slots import ShardSpan, Slot, SlotFull, SlotRecord, place_shards, slot_bytes
from harness.ipc.window import Window
from harness.trainer.copy import to_slot
from harness.trainer.link import Link
from harness.trainer.staging.overlap import Deferred, Overlap, Work
from harness.trainer.staging.shares import Entry, Shares
from harness.trainer.staging.shares import specs as share_specs
from harness.trainer.state.capture import Captured, check_encoding
from harness.trainer.state.environment import environment
from harness.trainer.state.stored import Pieces

_SLACK = 1.5
"""A slot that is asked for again is larger than needed by this factor."""


class Capture(Protocol):
    """Captures all states: `capture` with those of one trainer."""

    def __call__(self, sure: bool, found: Callable[[Mapping[str, Tensor]], None] | None = None) -> Captured:
        """Return what is captured; see `capture` for the arguments."""


@dataclass(frozen=True)
class _Layout:
    """The plan of a slot: which tensors lie where, and everything else that is the same in each snapshot.

    Attributes:
        specs: of all captured tensors.
        shards: of those that are stored.
        spans: of the shards.
        environment: what bit-identity depends on.
        entries: of several ranks: what this one stores; `None` for everything.
        assignment: of several ranks: identity of what all of them store.
        on_device: whether a tensor of these lay on a device.
    """

    specs: tuple[TensorSpec, ...]
    shards: tuple[ShardLayout, ...]
    spans: tuple[ShardSpan, ...]
    environment: dict[str, str]
    entries: tuple[Entry, ...] | None
    assignment: str
    on_device: bool

    def entries_of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what is stored of a tensor, by its name in the shards."""
        if self.entries is None:
            yield name, tensor
        else:
            for entry in self._by_tensor.get(name, ()):
                yield entry.name, entry.of({name: tensor})

    @functools.cached_property
    def _by_tensor(self) -> Mapping[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self.entries or ():
            found.setdefault(entry.tensor, []).append(entry)
        return found

    def tensors(self, captured: Captured) -> Mapping[str, Tensor]:
        """Return what is stored, by its name in the shards."""
        if self.entries is None:
            return captured.tensors
        return {entry.name: entry.of(captured.tensors) for entry in self.entries}

    @property
    def pieces(self) -> dict[str, StoredPiece] | None:
        """Of several ranks: the entries that are not whole tensors which all share."""
        if self.entries is None:
            return None
        return {entry.name: entry.piece for entry in self.entries if entry.piece is not None}


@dataclass(frozen=True)
class _Pending:
    """A snapshot whose boundary is over, while a thread still copies some of it, or compares it.

    Attributes:
        step: the snapshot's step.
        grant: the grant that it uses.
        slot: the slot that it fills.
        record: the record with which it is sealed.
        work: the thread's copy or comparison.
        stall_s: how long the loop waited at the boundary.
    """

    step: int
    grant: int
    slot: Slot
    record: SlotRecord
    work: Work
    stall_s: float


class Stager:
    """Takes snapshots. One per trainer. Used from the thread that trains; `settle` may be called from any thread."""

    def __init__(
        self,
        link: Link,
        states: Mapping[str, object],
        capture_now: Capture,
        small_state: Callable[[int, Captured], dict[str, Any]],
        overlap: Overlap,
    ) -> None:
        """Plan nothing yet.

        Args:
            link: the connection to the agent.
            states: the states to capture, by name.
            capture_now: captures them, and the user's plain values.
            small_state: makes everything of a snapshot but its tensors, from its step and what was captured.
            overlap: makes late copies, if they are asked for.
        """
        self._link, self._states, self._overlap = link, states, overlap
        self._capture, self._small_state = capture_now, small_state
        self._pending: _Pending | None = None
        self._settling = threading.Lock()
        self._shares = None if link.rank.is_alone else Shares(link)
        self._layout: _Layout | None = None
        self._views: weakref.WeakKeyDictionary[Slot, tuple[_Layout, dict[str, Tensor]]] = weakref.WeakKeyDictionary()
        self._record_bytes = 0
        self._asked = False
        self._sure = False  # whether to plan for gradients that may be pending: set once a snapshot has needed it
        self._prepare: Callable[[Slot], None] | None = None
        self._told_unpinned = False
        self._unusable: StateError | None = None
        self._sequence = 0
        self._used_grant = 0
        self.sealed_step: int | None = None
        self.holds = False
        """Whether the agent has to hold back snapshots sealed from now on until it knows how the process ended."""

    def begin(self) -> None:
        """Begin training: continue the numbers of the seals that the agent knows of."""
        self._sequence = self._link.sequence

    @property
    def planned(self) -> bool:
        """Whether slots were asked for, and their layout still stands."""
        return self._layout is not None and not (self._shares is not None and self._shares.stale)

    def plan(self, step: int) -> None:
        """Lay out the slots for the states as they are now, and ask the agent for them. Does not wait.

        With several ranks, the agent first sends each one what it stores; until then there is no plan.

        Raises:
            StateError: something in the states cannot be stored; names it, and the remedy.
        """
        captured = self._capture(self._sure)
        if (needed := self._lay_out(step, captured)) is not None:
            self._ask(needed)

    def stage(self, step: int, *, overlap: bool = False, compares: bool = False) -> bool:
        """Copy the live state into the granted slot and seal it. This is the only call that blocks the training step.

        A step is sealed once: (generation, step) names one snapshot, and never two. See `forget_void`.

        Args:
            step: completed optimizer steps.
            overlap: let a thread copy the tensors of an optimizer, and let `settle` seal.
            compares: of what several ranks have, compare also what a wrapper keeps equal.

        Returns:
            Whether `step` is sealed, or will be by `settle`. False, at once, while there is no slot to fill, and if
            larger slots are needed, because tensors appeared or have grown.

        Raises:
            NoSpace: the slots fit neither into memory nor onto the local disk, or that disk has failed.
            StateError: something in the states cannot be stored.
        """
        self.settle(step)
        if self.sealed_step == step:
            return True
        if (error := self._unusable or self._link.slot_error) is not None:
            raise error
        granted = self._link.granted(self._used_grant, self._sequence)
        if granted is None:
            return False
        grant, slot = granted
        started = time.perf_counter()
        with to_slot.Copying() as copying:
            begun: set[str] = set()
            captured = self._capture(True, None if overlap else self._beginner(slot, copying, begun))
            layout = self._layout
            if layout is None or not self._fits(layout, captured):
                copying.finish()
                begun.clear()
                self._sure = True
                needed = self._lay_out(step, captured)
                if needed is None:
                    return False
                if needed > slot.size or self._shares is not None:  # the agent has to know of a rank's new layout
                    self._ask(needed)
                    return False
                layout = self._layout
                assert layout is not None
            slot.begin()
            deferred = self._copy(slot, layout, captured, copying, begun, overlap=overlap)
            record = self._record(step, captured, layout, compares=compares)
            copying.finish()
        if (not deferred or self._overlap.validating) and not self._seal(grant, slot, record, started):
            self.plan(step)
            return False
        if deferred:
            work = self._overlap.begin(deferred)
            self._pending = _Pending(step, grant, slot, record, work, time.perf_counter() - started)
        return True

    def _beginner(
        self, slot: Slot, copying: to_slot.Copying, begun: set[str]
    ) -> Callable[[Mapping[str, Tensor]], None] | None:
        """Return what begins to copy tensors that lie on a device while the rest of the states is still captured.

        Args:
            slot: to copy into.
            copying: the copy.
            begun: gets the names of the slot's entries whose copy has begun.

        Returns:
            `None` if nothing can begin so early.
        """
        layout = self._layout
        if layout is None or not layout.on_device or slot.on_disk or (self._shares is not None and self._shares.stale):
            return None

        def begin(found: Mapping[str, Tensor]) -> None:
            there = {name: tensor for name, tensor in found.items() if tensor.device.type != "cpu"}
            if not there:
                return
            slot.begin()
            views = self._views_of(slot, layout)
            pairs: list[to_slot.Pair] = []
            for tensor_name, tensor in there.items():
                for entry, source in layout.entries_of(tensor_name, tensor):
                    target = views.get(entry)
                    if target is not None and to_slot.matches(target, source):
                        pairs.append((target, source))
                        begun.add(entry)
            copying.add(pairs)

        return begin

    def _copy(
        self,
        slot: Slot,
        layout: _Layout,
        captured: Captured,
        copying: to_slot.Copying,
        begun: Collection[str],
        *,
        overlap: bool,
    ) -> tuple[Deferred, ...]:
        """Copy what has to be copied at the boundary; return the tensors left for a thread to copy, or to compare.

        The copy is over when `copying` is finished.
        """
        tensors = layout.tensors(captured)
        if slot.on_disk:
            self._pass_through(slot, layout, tensors)
            return ()
        views = self._views_of(slot, layout)
        deferred = self._overlap.choose(self._states, tensors, views) if overlap else ()
        left = set() if self._overlap.validating else {item.name for item in deferred}
        to_slot.check(views, tensors)
        copying.add(
            [(views[name], tensor) for name, tensor in tensors.items() if name not in left and name not in begun]
        )
        return deferred

    @property
    def is_void(self) -> bool:
        """Whether the agent has dropped the newest seal, because there is no snapshot of all ranks with it."""
        return self.sealed_step is not None and self._link.page.is_void(self._sequence)

    def forget_void(self) -> None:
        """Forget the newest seal if the agent has dropped it, so that its step can be sealed again."""
        if self.is_void:
            self.sealed_step = None

    @property
    def pending(self) -> bool:
        """Whether `settle` has something to do."""
        return self._pending is not None

    def settle(self, step: int, *, updating: bool = False) -> bool:
        """Wait for the thread that `stage` started, and seal its snapshot if no tensor has changed meanwhile.

        Called before an optimizer steps, before the next snapshot, and before anything waits for the newest one.

        Args:
            step: completed optimizer steps by now.
            updating: a torch optimizer is about to step.

        Returns:
            False if the snapshot that was begun is void: `stage` can be called again, and will not overlap.
        """
        if self._pending is None:
            return True
        with self._settling:  # a backward pass that steps optimizers calls from several threads at once
            pending: _Pending | None = self._pending
            if pending is None:  # another thread has settled it
                return True
            try:
                return self._settle(pending, step, updating=updating)
            finally:
                if pending.work.done:  # not if Ctrl-C came while the thread was still writing into the slot
                    self._pending = None

    def _settle(self, pending: _Pending, step: int, *, updating: bool) -> bool:
        started, work = time.perf_counter(), pending.work
        copied_s = work.wait()
        stepped = step != pending.step  # and no hook was called: a skipped step, or one that bypassed the hook
        changed = work.changed(thoroughly=stepped or (work.validating and updating))
        if changed is not None:
            self._overlap.switch_off(changed, pending.step)
            return work.validating  # then the snapshot was copied at the boundary: it is sealed, and right
        if work.validating:
            if updating:
                self._overlap.note_valid(work.deferred)
            return True
        began, copy_s = started - pending.stall_s, pending.stall_s + copied_s
        return self._seal(pending.grant, pending.slot, pending.record, began, copy_s)

    def _seal(self, grant: int, slot: Slot, record: SlotRecord, started: float, copy_s: float | None = None) -> bool:
        """Seal the slot and tell the agent. Return False if the record does not fit into the slot.

        Args:
            grant: the grant for this slot.
            slot: the slot with the copied tensors.
            record: the record that names them.
            started: when the loop began to wait; with overlap, when it would have begun, had it waited in one go.
            copy_s: how long the same snapshot takes without overlap, at most; `None`: as long as the loop waited.
        """
        try:
            slot.seal(record, self._sequence + 1)
        except SlotFull:
            self._record_bytes = 2 * len(record.encode())
            self._layout = None
            return False
        self._used_grant = grant
        self._sequence += 1
        self.sealed_step = record.step
        stall_s = time.perf_counter() - started
        self._link.send(
            Sealed(
                self._link.index_of(slot),
                record.step,
                sum(span.size for span in record.shards),
                stall_s,
                stall_s if copy_s is None else copy_s,
                self.holds,
                record.assignment,
            )
        )
        return True

    def _fits(self, layout: _Layout, captured: Captured) -> bool:
        """Whether what was captured has the layout that was planned."""
        same = tuple(captured.specs()) == layout.specs
        return same and (self._shares is None or (self._shares.is_told(captured) and not self._shares.stale))

    def _lay_out(self, step: int, captured: Captured) -> int | None:
        """Plan slots for what was captured. Return the bytes that one has to have; `None` while that is not known."""
        specs, entries = tuple(captured.specs()), None
        if self._shares is not None:
            self._shares.tell(captured)
            if (entries := self._shares.entries(captured)) is None:
                self._layout = None
                return None
        shards = plan_shards(specs if entries is None else share_specs(entries, captured))
        small = self._dumped(step, captured)
        if tree.dumps(tree.loads(small)) != small:
            raise StateError(
                "small state does not survive its own encoding: please report this, with your states' types"
            )
        check_encoding(captured.tree)
        rank = self._link.rank
        spans = place_shards([(shard_name(rank.number, rank.world_size, shard.index), shard.size) for shard in shards])
        on_device = any(tensor.device.type != "cpu" for tensor in captured.tensors.values())
        assignment = "" if self._shares is None else self._shares.assignment
        self._layout = _Layout(specs, shards, spans, environment(), entries, assignment, on_device)
        devices = sorted({tensor.device for tensor in captured.tensors.values() if tensor.is_cuda}, key=str)
        self._prepare = functools.partial(self._pin, devices[0]) if devices else None
        return slot_bytes(spans, max(len(small), self._record_bytes))

    def _ask(self, needed: int) -> None:
        """Ask for slots of so many bytes; after the first time, of more: what has grown may grow again."""
        self._views.clear()
        self._link.ask_slots(int(needed * (_SLACK if self._asked else 1)), self._prepare)
        self._asked = True

    def _pin(self, device: torch.device, slot: Slot) -> None:
        """Make a slot pinned memory, if the driver allows it. Called in the link's thread."""
        if slot.on_disk:
            return
        try:
            slot.at_close(to_slot.pin(slot.buffer, device))
        except to_slot.MemoryTaken as err:
            self._unusable = StateError(
                "no snapshot can be taken: memory that this program had registered with CUDA (cudaHostRegister) was "
                "unmapped without being unregistered, and a slot lies there now, so that copies into it would go "
                f"astray ({err}). Unregister memory before it is unmapped"
            )
        except RuntimeError as err:
            if not self._told_unpinned:
                self._told_unpinned = True
                with contextlib.suppress(UserWarning):  # as an error (-W error) it would end the link's thread
                    warnings.warn(f"slots are not pinned, so copies from the GPU are slower: {err}", stacklevel=2)

    def _views_of(self, slot: Slot, layout: _Layout) -> dict[str, Tensor]:
        """Return views of the slot's tensors, made once for each layout, when the shards' headers are written too."""
        known = self._views.get(slot)
        if known is not None and known[0] is layout:
            return known[1]
        _write_headers(slot, layout)
        found = to_slot.views(slot.buffer, layout.shards, [span.offset for span in layout.spans])
        self._views[slot] = (layout, found)
        return found

    def _pass_through(self, slot: Slot, layout: _Layout, tensors: Mapping[str, Tensor]) -> None:
        """Copy into a slot on disk, for which memory has no room: the loop waits for that disk."""
        _write_headers(slot, layout)
        window = Window(slot)
        try:
            to_slot.copy_through(window, layout.shards, [span.offset for span in layout.spans], tensors)
        except OSError as err:
            raise NoSpace(
                f"there is no memory for a snapshot, and the disk used instead has failed: {err.strerror}"
            ) from err

    def _record(self, step: int, captured: Captured, layout: _Layout, *, compares: bool) -> SlotRecord:
        return SlotRecord(
            step=step,
            rank=self._link.rank.number,
            world_size=self._link.rank.world_size,
            generation=self._link.generation.number,
            shards=layout.spans,
            state=self._dumped(step, captured).decode(),
            environment=layout.environment,
            sealed_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            pieces=layout.pieces,
            assignment=layout.assignment,
            sums={} if self._shares is None else self._shares.sums(captured, thoroughly=compares),
        )

    def _dumped(self, step: int, captured: Captured) -> bytes:
        small = tree.dumps(self._small_state(step, captured))
        if len(small) > MAX_STATE_BYTES:
            raise StateError(
                f"the state outside of tensors takes {len(small) / 1e6:.0f} MB as JSON, and at most "
                f"{MAX_STATE_BYTES / 1e6:.0f} MB can be resumed: keep large data (a buffer of samples, a history) in "
                "tensors"
            )
        return small


def _write_headers(slot: Slot, layout: _Layout) -> None:
    for shard, span in zip(layout.shards, layout.spans, strict=True):
        slot.buffer[span.offset : span.offset + len(shard.header)] = shard.header


def read_snapshot(slots: Sequence[Slot], rank: int) -> dict[str, Tensor | Pieces]:
    """Return the tensors of a snapshot as views into its slots: this rank's own, and what all ranks share.

    Args:
        slots: of all ranks, in order.
        rank: this one.

    Raises:
        SnapshotCorrupt: a slot is not what its record says, or a tensor's pieces are not all of it.
    """
    if len(slots) == 1:
        return dict(_tensors_of(slots[0]))
    shared: dict[str, Tensor | Pieces] = {}
    own: dict[str, Tensor] = {}
    boxes: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for number, slot in enumerate(slots):
        record = slot.record()
        pieces = {} if record is None or record.pieces is None else record.pieces
        for entry, tensor in _tensors_of(slot).items():
            piece = pieces.get(entry)
            if piece is None:
                shared[entry] = tensor
            elif piece.own:
                own |= {entry: tensor} if number == rank else {}
            elif piece.whole is not None and piece.offset is not None:
                boxes.setdefault(piece.tensor, []).append((piece.offset, tensor))
                wholes[piece.tensor] = piece.whole
    for name, found in boxes.items():
        shared[name] = Pieces(wholes[name], tuple(found)).checked(name)
    return {**shared, **own}


def _tensors_of(slot: Slot) -> dict[str, Tensor]:
    record = slot.record()
    if record is None:
        raise SnapshotCorrupt("a slot of the snapshot was lost from memory")
    return read_tensors(slot, record)


def read_tensors(slot: Slot, record: SlotRecord) -> dict[str, Tensor]:
    """Return every tensor of a sealed slot as a view into it, by the shards' headers. Raises SnapshotCorrupt."""
    layouts = []
    for index, span in enumerate(record.shards):
        data = slot.shard(span)
        head = header_bytes(bytes(data[:8]), span.size)
        layouts.append(parse_header(bytes(data[:head]), span.size, index))
    return to_slot.views(slot.buffer, layouts, [span.offset for span in record.shards])
