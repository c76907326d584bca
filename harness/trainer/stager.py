"""Stager: from live state to a sealed slot, and back to tensors.

Owns the layout of the slots, their views, and which step was sealed last. Knows neither loops nor when a snapshot is
due: it fills the slot that the agent has granted, when it is told to.

    capture ─▶ same layout as before? ─no─▶ plan ─▶ ask the agent for slots (the next boundary tries again)
                     └─yes─▶ one copy into the granted slot ─▶ seal ─▶ tell the agent
"""

from __future__ import annotations

import datetime
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.core import tree
from harness.core.shard import ShardLayout, TensorSpec, header_bytes, parse_header, plan_shards
from harness.core.snapshot import shard_name
from harness.errors import NoSpace, StateError
from harness.ipc.slots import ShardSpan, Slot, SlotFull, SlotRecord, place_shards, slot_bytes
from harness.ipc.window import Window
from harness.trainer import copy, state
from harness.trainer.link import Link


@dataclass(frozen=True)
class _Layout:
    """The plan of a slot: which tensors lie where, and what does not change from snapshot to snapshot."""

    specs: tuple[TensorSpec, ...]
    shards: tuple[ShardLayout, ...]
    spans: tuple[ShardSpan, ...]
    environment: dict[str, str]

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(span.size for span in self.spans)


class Stager:
    """Takes snapshots. One per trainer; used from the thread that trains."""

    def __init__(
        self, link: Link, states: Mapping[str, object], small_state: Callable[[int, dict[str, Any]], dict[str, Any]]
    ) -> None:
        """Plans nothing yet.

        Args:
            link: to the agent.
            states: what to capture, by name.
            small_state: everything of a snapshot but its tensors, from its step and the captured states' tree.
        """
        self._link, self._states, self._small_state = link, states, small_state
        self._layout: _Layout | None = None
        self._views: weakref.WeakKeyDictionary[Slot, tuple[_Layout, dict[str, Tensor]]] = weakref.WeakKeyDictionary()
        self._record_bytes = 0
        self._sequence = 0
        self._used_grant = 0
        self.sealed_step: int | None = None

    def begin(self) -> None:
        """Training begins: seals are numbered on from those that the agent knows of."""
        self._sequence = self._link.sequence

    @property
    def planned(self) -> bool:
        """Whether slots were asked for."""
        return self._layout is not None

    def plan(self, step: int) -> None:
        """Lay out the slots for what there is to capture now, and ask the agent for them. Does not wait.

        Raises:
            StateError: something in the states cannot be stored; names it, and the remedy.
        """
        self._plan(step, state.capture(self._states))

    def stage(self, step: int) -> bool:
        """Copy the live state into the granted slot and seal it. Blocks the training step; nothing else does.

        A step is sealed once: (generation, step) names one snapshot, and never two.

        Args:
            step: completed optimizer steps.

        Returns:
            Whether `step` is sealed. False, at once, while there is no slot to fill, and where the layout had to be
            planned again, because tensors came, went or changed their shape.

        Raises:
            NoSpace: the slots fit neither into memory nor onto the local disk, or that has failed.
            StateError: something in the states cannot be stored.
        """
        if self.sealed_step == step:
            return True
        if (error := self._link.slot_error) is not None:
            raise error
        granted = self._link.granted(self._used_grant, self._sequence)
        if granted is None:
            return False
        grant, slot = granted
        started = time.perf_counter()
        captured = state.capture(self._states)
        layout = self._layout
        if layout is None or tuple(captured.specs()) != layout.specs:
            self._plan(step, captured)
            return False
        record = self._record(step, captured, layout)
        self._used_grant = grant
        slot.begin()
        if slot.on_disk:
            self._pass_through(slot, layout, captured)
        else:
            copy.copy_into(self._views_of(slot, layout), captured.tensors)
        try:
            slot.seal(record, self._sequence + 1)
        except SlotFull:
            self._record_bytes = 2 * len(record.encode())
            self._plan(step, captured)
            return False
        self._sequence += 1
        self.sealed_step = step
        stall_s = time.perf_counter() - started
        self._link.send("sealed", index=self._link.index_of(slot), step=step, bytes=layout.bytes, stall_s=stall_s)
        return True

    def _plan(self, step: int, captured: state.Captured) -> None:
        specs = tuple(captured.specs())
        shards = plan_shards(specs)
        small = tree.dumps(self._small_state(step, captured.tree))
        if tree.dumps(tree.loads(small)) != small:
            raise StateError(
                "small state does not survive its own encoding: please report this, with your states' types"
            )
        state.check_encoding(captured.tree)
        spans = place_shards([(shard_name(0, 1, shard.index), shard.size) for shard in shards])
        self._layout = _Layout(specs, shards, spans, state.environment())
        self._views.clear()
        self._link.ask_slots(slot_bytes(spans, max(len(small), self._record_bytes)))

    def _views_of(self, slot: Slot, layout: _Layout) -> dict[str, Tensor]:
        """The slot's tensors, made once for each layout; the shards' headers are written then too."""
        known = self._views.get(slot)
        if known is not None and known[0] is layout:
            return known[1]
        _write_headers(slot, layout)
        found = copy.views(slot.buffer, layout.shards, [span.offset for span in layout.spans])
        self._views[slot] = (layout, found)
        return found

    def _pass_through(self, slot: Slot, layout: _Layout, captured: state.Captured) -> None:
        """Memory has no room for a slot: the loop waits for the disk that has it."""
        _write_headers(slot, layout)
        window = Window(slot)
        try:
            copy.copy_through(window, layout.shards, [span.offset for span in layout.spans], captured.tensors)
        except OSError as err:
            raise NoSpace(
                f"there is no memory for a snapshot, and the disk that takes it instead has failed: {err.strerror}"
            ) from err

    def _record(self, step: int, captured: state.Captured, layout: _Layout) -> SlotRecord:
        return SlotRecord(
            step=step,
            rank=0,
            world_size=1,
            generation=int(self._link.life["number"]),
            shards=layout.spans,
            state=tree.dumps(self._small_state(step, captured.tree)).decode(),
            environment=layout.environment,
            sealed_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )


def _write_headers(slot: Slot, layout: _Layout) -> None:
    for shard, span in zip(layout.shards, layout.spans, strict=True):
        slot.buffer[span.offset : span.offset + len(shard.header)] = shard.header


def read_tensors(slot: Slot, record: SlotRecord) -> dict[str, Tensor]:
    """Every tensor of a sealed slot as a view into it, by the shards' own headers. Raises SnapshotCorrupt."""
    layouts = []
    for index, span in enumerate(record.shards):
        data = slot.shard(span)
        head = header_bytes(bytes(data[:8]), span.size)
        layouts.append(parse_header(bytes(data[:head]), span.size, index))
    return copy.views(slot.buffer, layouts, [span.offset for span in record.shards])
