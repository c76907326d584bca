"""The ranks of this node: reached one by one, told what to do as one.

Owns a control page, a connection and a supply of slots for each, and why a snapshot is wanted of all of them. Knows
neither notices nor stores. Main thread of the agent, but for `trainer_step`.

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
        channel: to it.
        pid: of its process.
        pidfd: readable once that is dead.
        exception: whether it said goodbye because of one.
        said_bye: whether it said goodbye.
    """

    channel: Channel
    pid: int
    pidfd: int
    exception: bool = False
    said_bye: bool = False


class Rank:
    """One of them. It is there before its process is, and outlives it."""

    def __init__(self, number: int, context: Context, pool: SlotPool) -> None:
        """Nobody is connected. `number` is the rank; `pool` is where its slots will be."""
        self.number = number
        self.control = TrainerControl(pool, number)
        self.supply = SlotSupply(context, pool, number)
        self.connection: Connection | None = None

    def forget(self) -> None:
        """Its process is gone: what it was asked, granted and about to get is void."""
        self.connection = None
        self.supply.forget()
        self.control.forget()


class Ranks:
    """All of them, in order. A node has rank 0, and others as they are asked for."""

    def __init__(self, context: Context, pool: SlotPool) -> None:
        """Rank 0, with nobody connected."""
        self._context, self._pool = context, pool
        self._all: tuple[Rank, ...] = (Rank(0, context, pool),)  # replaced as a whole: another thread reads it
        self.reasons: set[str] = set()
        """Why a snapshot is wanted at the next boundary; empty where it is not."""

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._all)

    def of(self, number: int) -> Rank:
        """The rank of this number."""
        found = next((rank for rank in self._all if rank.number == number), None)
        if found is None:
            found = Rank(number, self._context, self._pool)
            self._all = tuple(sorted((*self._all, found), key=lambda rank: rank.number))
        return found

    def at(self, channel: Channel) -> Rank | None:
        """Whose connection it is; `None` if no rank's."""
        return next((rank for rank in self if rank.connection and rank.connection.channel is channel), None)

    @property
    def connections(self) -> list[Connection]:
        """Those of the processes that are there."""
        return [rank.connection for rank in self if rank.connection is not None]

    # ---- as one -----------------------------------------------------------------------------------------------------

    @property
    def trainer_step(self) -> int | None:
        """Steps that all of them have completed; `None` before the loop of one. From any thread."""
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
        """Keep a free slot granted to each."""
        for rank in self:
            rank.control.grant()

    def command(self, command: Command) -> None:
        """For everybody's next boundary. No news where that is commanded already."""
        for rank in self:
            rank.control.command(command)

    def sealed(self, rank: Rank) -> None:
        """One has a snapshot sealed: what there was to ask of it is there."""
        self.reasons.clear()
        rank.control.answered()

    def tell_steps(self, steps: Steps) -> None:
        """The newest committed steps."""
        for rank in self:
            rank.control.tell_steps(steps)

    def tell_deadline(self, deadline: Deadline) -> None:
        """Until when they may wait. Not one that never comes."""
        for rank in self:
            rank.control.tell_deadline(deadline)

    def begin_again(self) -> None:
        """Other trainers: they have made no step, and nothing is commanded."""
        for rank in self:
            rank.control.begin_again()
