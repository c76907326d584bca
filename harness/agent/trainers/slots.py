"""Make the slots that a trainer's layout needs, in a thread; only the newest layout counts.

Owns the layout that waits for its slots. Making them takes half a second per GiB, and notices are heard meanwhile. Main
thread of the agent, except for the thread that it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from harness.agent.context import Context
from harness.agent.save import slot_pool
from harness.agent.save.slot_pool import (
    TWO_SLOTS_FROM_BYTES,
    SlotPool,
    Wanted,
    how_many_fit,
    total_bytes,
)
from harness.core import events
from harness.core.messages import Layout
from harness.errors import HarnessError
from harness.ipc.slots import Slot

Deliver = Callable[[Layout, list[int] | HarnessError], None]


class SlotSupply:
    """The supply of slots for one rank."""

    def __init__(self, context: Context, pool: SlotPool, rank: int) -> None:
        """Makes nothing yet.

        Args:
            context: of the agent.
            pool: the one that gets the slots.
            rank: the one that owns the slots.
        """
        self._context, self._pool, self._rank = context, pool, rank
        self._wanted: tuple[Layout, Deliver] | None = None
        self._most: int | None = None
        self._making = False
        self.layout: Layout | None = None
        """The newest layout."""

    def want(self, layout: Layout, deliver: Deliver) -> None:
        """Request the slots of a layout, which `make` makes. It replaces an earlier layout.

        Args:
            layout: the trainer's.
            deliver: called with the layout and the indexes of its slots, or with the error if there are none; not if
                the layout was forgotten meanwhile.
        """
        self.layout, self._wanted = layout, (layout, deliver)

    def make(self, most: int | None = None) -> None:
        """Make the slots that were requested, in a thread. Does nothing if there is no request.

        Args:
            most: so many have room in memory, of several ranks for each alike; `None` for as many as fit.
        """
        self._most = most
        self._make()

    def forget(self) -> None:
        """Forget the layout. Slots that are being made are kept for the next trainer."""
        self.layout = self._wanted = None

    def tell(self, layout: Layout, indexes: list[int]) -> None:
        """Log how many slots a layout got, and where they are."""
        slots, size = [self._pool[index] for index in indexes], layout.bytes
        on_disk = slots[0].on_disk
        self._context.emit(events.SlotsReady(slots=len(slots), bytes=size, on_disk=on_disk))
        if on_disk:
            self._context.say(
                f"there is no memory for a snapshot of {size / 1e9:.2f} GB: each one goes through a window to "
                f"{self._context.settings.slot_disk}, and training waits for that disk meanwhile"
            )
        elif len(slots) < self.count:
            self._context.say(f"there is memory for {len(slots)} of {self.count} slots of {size / 1e9:.2f} GB")

    @property
    def count(self) -> int:
        """How many slots there should be."""
        return self._context.settings.slots or (2 if total_bytes() >= TWO_SLOTS_FROM_BYTES else 1)

    def _make(self) -> None:
        if self._making or self._wanted is None:
            return
        (layout, _), self._making = self._wanted, True
        wanted = self._pool.begin(layout.bytes, self.count, self._rank, in_memory=self._most)

        def make() -> None:
            made: list[Slot] | HarnessError
            try:
                made = wanted.make()
            except HarnessError as err:
                made = err
            self._context.post(partial(self._made, layout, wanted, made))

        self._context.thread("harness-slots", make)

    def _made(self, layout: Layout, wanted: Wanted, made: list[Slot] | HarnessError) -> None:
        self._making = False
        indexes = made if isinstance(made, HarnessError) else self._pool.finish(wanted, made)
        if self._wanted is None or layout is not self._wanted[0]:  # there is another layout, or the trainer is gone
            return self._make()
        (_, deliver), self._wanted = self._wanted, None
        return deliver(layout, indexes)


def share_memory(supplies: Sequence[SlotSupply], pool: SlotPool, count: int) -> int | None:
    """Return how many slots each of several ranks gets in memory: as many as every other. `None` while it is not known.

    Slots that a rank has already count as free: they are kept, or make room for its new ones.

    Args:
        supplies: of all ranks.
        pool: with the slots of all.
        count: how many each should have.
    """
    sizes = [supply.layout.bytes for supply in supplies if supply.layout is not None]
    if len(sizes) < len(supplies):
        return None
    return how_many_fit(sum(sizes), count, slot_pool.available_bytes() + pool.free_bytes)
