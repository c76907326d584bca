"""The ranks of this node: each has its own connection, and all get the same commands.

Owns a control page, a connection and a supply of slots for each, the reasons why a snapshot is wanted from all of them,
and which of them have taken it. Knows neither notices nor stores. Main thread of the agent, except for `trainer_step`.

    reason ──▶ COMMAND to every rank, once each has a slot ──▶ of several: one step (`meeting.py`) ──▶ a seal of each
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from cloud.notice import Deadline
from harness.agent.context import Context
from harness.agent.resume_point import SealedSlot
from harness.agent.save.pipeline import Steps
from harness.agent.save.slot_pool import SlotPool
from harness.agent.save.snapshot_set import Dropped
from harness.agent.trainers.control import TrainerControl
from harness.agent.trainers.holdings import Difference, Holdings
from harness.agent.trainers.meeting import Meeting
from harness.agent.trainers.slots import SlotSupply, share_memory
from harness.core.messages import Sealed
from harness.core.policy.meeting import Place
from harness.ipc.channel import Channel
from harness.ipc.control_page import Command
from harness.ipc.slots import SlotRecord


@dataclass
class Connection:
    """A connected Checkpointer.

    Attributes:
        channel: to the Checkpointer.
        pid: of its process.
        pidfd: readable once the process is dead.
        exception: whether it said goodbye because of an exception.
        said_bye: whether it said goodbye.
    """

    channel: Channel
    pid: int
    pidfd: int
    exception: bool = False
    said_bye: bool = False


class Rank:
    """One rank of the node. It exists before its process does, and outlives it."""

    def __init__(self, number: int, context: Context, pool: SlotPool) -> None:
        """Start without a connection. `number` is the rank; `pool` is where its slots will be."""
        self.number = number
        self.control = TrainerControl(pool, number)
        self.supply = SlotSupply(context, pool, number)
        self.connection: Connection | None = None

    def forget(self) -> None:
        """Drop all commands, grants and requests of the rank: its process is gone."""
        self.connection = None
        self.supply.forget()
        self.control.forget()


@dataclass(frozen=True)
class Taken:
    """A snapshot that every rank has sealed.

    Attributes:
        step: completed optimizer steps.
        bytes: of all ranks.
        copy_s: how long the slowest rank would have waited without overlap.
        leaves: whether several ranks were asked to leave with this one.
        differences: tensors that were taken for equal on all ranks, and are not: the snapshot is void.
        changed: whether ranks store something else from now on.
    """

    step: int
    bytes: int
    copy_s: float
    leaves: bool = False
    differences: tuple[Difference, ...] = ()
    changed: bool = False


class Ranks:
    """All ranks of the node, in order. There is always rank 0; the first hello tells how many there are."""

    def __init__(self, context: Context, pool: SlotPool) -> None:
        """Start with rank 0, without a connection."""
        self._context, self._pool = context, pool
        self._all: tuple[Rank, ...] = (Rank(0, context, pool),)  # replaced as a whole: another thread reads it
        self._sealed: dict[int, Sealed] = {}  # the newest of each rank
        self.meeting = Meeting(lambda: [rank.control for rank in self])
        self.holdings = Holdings()
        self.reasons: set[str] = set()
        """The reasons why a snapshot is wanted at the next boundary; empty if none is wanted."""
        self._reasons_for_later: set[str] = set()
        self.sealed_step: int | None = None
        """The newest step that all have sealed in this attempt, also if that was in vain, and will not seal again."""
        self.set_step: int | None = None
        """The newest step of which there is a snapshot of all, made in this attempt."""
        self.one_has_left = False
        """Whether one of several has ended in this attempt: there is no step at which all could take a snapshot."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._all)

    def expect(self, world_size: int) -> None:
        """Have so many ranks. Only while none is connected, or if they are as many."""
        kept = self._all[:world_size]
        added = (Rank(number, self._context, self._pool) for number in range(len(kept), world_size))
        self._all = (*kept, *added)

    def of(self, number: int) -> Rank:
        """Return the rank of this number."""
        return self._all[number]

    @property
    def several(self) -> bool:
        """Whether there are other ranks than rank 0."""
        return len(self._all) > 1

    @property
    def complete(self) -> bool:
        """Whether every rank is connected."""
        return all(rank.connection is not None for rank in self)

    def at(self, channel: Channel) -> Rank | None:
        """Return the rank that the connection belongs to; `None` if there is none."""
        return next((rank for rank in self if rank.connection and rank.connection.channel is channel), None)

    @property
    def connections(self) -> list[Connection]:
        """Connections of the processes that are connected now."""
        return [rank.connection for rank in self if rank.connection is not None]

    # ---- all ranks --------------------------------------------------------------------------------------------------

    @property
    def trainer_step(self) -> int | None:
        """Steps that all ranks have completed; `None` while one is before its loop. From any thread."""
        steps = [rank.control.trainer_step for rank in self]
        known = [step for step in steps if step is not None]
        return min(known) if len(known) == len(steps) else None

    @property
    def farthest_step(self) -> int | None:
        """Steps that the rank that is ahead of all has completed; `None` while one is before its loop."""
        steps = [rank.control.trainer_step for rank in self]
        known = [step for step in steps if step is not None]
        return max(known) if len(known) == len(steps) else None

    @property
    def layout_bytes(self) -> int | None:
        """Size of a snapshot by the present layouts; `None` until all are known."""
        sizes = [rank.control.layout_bytes for rank in self]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def may_ask(self) -> bool:
        """Whether a snapshot can be asked for: each has a slot granted, and nothing else is commanded.

        Several ranks have to be in their loops, too: those that are would wait for the others.
        """
        if not self.several:
            return self._all[0].control.may_ask
        idle = not self.meeting.is_open or self.meeting.is_for_later(self.farthest_step)
        return idle and all(rank.control.is_granted for rank in self) and self.trainer_step is not None

    def make_slots(self) -> None:
        """Make the slots that are wanted; of several ranks, as many for each as for every other, once all want some."""
        if not self.several:
            return self._all[0].supply.make()
        supplies = [rank.supply for rank in self]
        most = share_memory(supplies, self._pool, supplies[0].count)
        for supply in supplies if most is not None else ():
            supply.make(most)
        return None

    def grant(self) -> None:
        """Keep a free slot granted to each rank."""
        for rank in self:
            rank.control.grant()

    def command(self, command: Command, at: Place | None = None) -> None:
        """Set the command for the next boundary of all ranks. Does nothing if it is set already.

        Args:
            command: what they do.
            at: of several ranks, the place at which they do it; `None` for the next one that all can come to.
        """
        if not self.several:
            self._all[0].control.command(command)
        elif self.meeting.is_for_later(self.farthest_step) or any(one.control.commanded is not command for one in self):
            self.meeting.ask(command, at)

    def want(self, reason: str, rank: Rank) -> None:
        """Note a rank's reason for a snapshot. If it has sealed one that others have yet to seal, that is too early."""
        early = self.several and self.meeting.is_open and self.has_sealed(rank)
        (self._reasons_for_later if early else self.reasons).add(reason)

    @property
    def evaluate_at(self) -> Place | None:
        """The place at which all of several ranks have entered a validation, and stand; `None` if there is none."""
        place = self._all[0].control.evaluates
        controls = [rank.control for rank in self]
        if not self.several or place is None or any(one.evaluates != place for one in controls):
            return None
        return place if all(one.trainer_step == place.step for one in controls) else None

    def has_sealed(self, rank: Rank) -> bool:
        """Whether a rank has sealed the step of the present ask."""
        sealed = self._sealed.get(rank.number)
        return sealed is not None and sealed.step == self.meeting.agreed

    def sealed(self, rank: Rank, sealed: Sealed) -> Taken | None:
        """Note that a rank has sealed a snapshot. If all have sealed that step, return it: no request is left."""
        self._sealed[rank.number] = sealed
        known = [self._sealed[each.number] for each in self if each.number in self._sealed]
        theirs = [one for one in known if (one.step, one.assignment) == (sealed.step, sealed.assignment)]
        if len(theirs) < len(self):
            return None
        self.reasons, self._reasons_for_later = self._reasons_for_later, set()
        for each in self:
            each.control.answered()
        leaves, differences, changed = False, list[Difference](), False
        if self.several and len(records := self._records_of(theirs)) == len(self):
            differences, changed = self.holdings.judge(records)
        if differences:
            self.reasons.add("difference")
            if not self.meeting.sealed_in_vain(sealed.step):
                self.sealed_step = sealed.step
        else:
            leaves = self.several and self.meeting.sealed(sealed.step)
            self.sealed_step = sealed.step
            self.tell_set(sealed.step)
        size, copy_s = sum(each.bytes for each in theirs), max(each.copy_s for each in theirs)
        return Taken(sealed.step, size, copy_s, leaves, tuple(differences), changed)

    def _records_of(self, seals: Iterable[Sealed]) -> list[SlotRecord]:
        records = [self._pool[sealed.index].record() for sealed in seals if sealed.index in self._pool]
        return [record for record in records if record is not None]

    def plan_again(self, numbers: Collection[int]) -> None:
        """Await new slots of these ranks, which plan them again. A snapshot that is asked for has to wait."""
        for number in numbers:
            self.of(number).control.await_layout()
        command = self._all[0].control.commanded
        self.meeting.give_up()
        self.meeting.ask(Command.NOTHING if command.takes else command)

    def tell_steps(self, steps: Steps) -> None:
        """Publish the newest committed steps on the control pages."""
        for rank in self:
            rank.control.tell_steps(steps)

    def note_untold(self, number: int, slot: SealedSlot) -> None:
        """Note what a rank has sealed without an agent: with what others seal now, it may be a snapshot."""
        record, size = slot.record, slot.payload_bytes
        self._sealed[number] = Sealed(slot.index, record.step, size, 0.0, 0.0, assignment=record.assignment)

    def tell_set(self, step: int) -> None:
        """Note that all ranks have sealed a step, and tell them: one that makes no further step waits for that."""
        self.set_step = step
        for rank in self:
            rank.control.tell_set(step)

    def is_obsolete(self, sealed: Sealed) -> bool:
        """Whether a rank has sealed its share of an assignment that has been replaced: no set will have it."""
        return self.several and self.holdings.assignment not in ("", sealed.assignment)

    def drop(self, dropped: Iterable[Dropped]) -> None:
        """Forget seals that are of no snapshot, and tell their ranks not to wait for it any more."""
        for one in dropped:
            self._sealed.pop(one.rank, None)
            self.of(one.rank).control.tell_void(one.sequence)

    def tell_deadline(self, deadline: Deadline) -> None:
        """Publish the drain deadline on the control pages. `Deadline.never()` is not allowed."""
        for rank in self:
            rank.control.tell_deadline(deadline)

    def begin_again(self) -> None:
        """Reset the control pages for new trainers: no step is made, and nothing is commanded."""
        self._sealed.clear()
        self._reasons_for_later.clear()
        self.sealed_step = self.set_step = None
        self.one_has_left = False
        self.holdings.forget()
        self.meeting.close()
        for rank in self:
            rank.control.begin_again()
