"""The ranks of this node: each has its own connection, and all get the same commands.

Owns a control page, a connection and a supply of slots for each, and the reasons why a snapshot is wanted from all of
them. Knows neither notices nor stores. Main thread of the agent, except for `trainer_step`.

    reason ──▶ COMMAND to every rank, once each has a slot ──▶ a seal of each
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cloud.notice import Deadline
from harness.agent.context import Context
from harness.agent.save.pipeline import Steps
from harness.agent.save.slot_pool import SlotPool
from harness.agent.trainers.control import TrainerControl
from harness.agent.trainers.slots import SlotSupply
from harness.ipc.channel import Channel
from harness.ipc.control_page import Command


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


class Ranks:
    """All ranks of the node, in order. It has rank 0; others are added when they are first asked for."""

    def __init__(self, context: Context, pool: SlotPool) -> None:
        """Start with rank 0, without a connection."""
        self._context, self._pool = context, pool
        self._all: tuple[Rank, ...] = (Rank(0, context, pool),)  # replaced as a whole: another thread reads it
        self.reasons: set[str] = set()
        """The reasons why a snapshot is wanted at the next boundary; empty if none is wanted."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._all)

    def of(self, number: int) -> Rank:
        """Return the rank of this number; add it if it is new."""
        found = next((rank for rank in self._all if rank.number == number), None)
        if found is None:
            found = Rank(number, self._context, self._pool)
            self._all = tuple(sorted((*self._all, found), key=lambda rank: rank.number))
        return found

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
    def layout_bytes(self) -> int | None:
        """Size of a snapshot by the present layouts; `None` until all are known."""
        sizes = [rank.control.layout_bytes for rank in self]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def may_ask(self) -> bool:
        """Whether a snapshot can be asked for: each has a slot granted, and nothing else is commanded."""
        return all(rank.control.may_ask for rank in self)

    def grant(self) -> None:
        """Keep a free slot granted to each rank."""
        for rank in self:
            rank.control.grant()

    def command(self, command: Command) -> None:
        """Set the command for the next boundary of all ranks. Does nothing if it is set already."""
        for rank in self:
            rank.control.command(command)

    def sealed(self, rank: Rank) -> None:
        """Note that a rank has sealed a snapshot, so that no request for one is left."""
        self.reasons.clear()
        rank.control.answered()

    def tell_steps(self, steps: Steps) -> None:
        """Publish the newest committed steps on the control pages."""
        for rank in self:
            rank.control.tell_steps(steps)

    def tell_deadline(self, deadline: Deadline) -> None:
        """Publish the drain deadline on the control pages. `Deadline.never()` is not allowed."""
        for rank in self:
            rank.control.tell_deadline(deadline)

    def begin_again(self) -> None:
        """Reset the control pages for new trainers: no step is made, and nothing is commanded."""
        for rank in self:
            rank.control.begin_again()
