"""Pure decisions: when to snapshot, what can still become durable, what to retain, whether to restart.

Owns every "should we"; does nothing. Functions of values, so that each decision is a table in a test.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.core.snapshot import SnapshotId


@dataclass(frozen=True)
class Cadence:
    """How often a tier wants a new snapshot.

    Attributes:
        every_s: seconds between the starts of two snapshots.
    """

    every_s: float

    def due(self, now: float, last_started_at: float | None, since: float) -> bool:
        """Whether a snapshot is due at monotonic `now`; before the first one the clock runs from `since`."""
        return now - (since if last_started_at is None else last_started_at) >= self.every_s


class Choice(enum.Enum):
    """What to do with the time that is left."""

    FINISH = "finish"
    """Let the upload in flight become durable; nothing newer fits."""
    NEWEST = "newest"
    """Make the newest snapshot that is already sealed durable; a new one does not fit or cannot be had."""
    NEW = "new"
    """Take a new snapshot at the next boundary: nothing is lost."""


@dataclass(frozen=True)
class Rates:
    """Measured speeds; `None` until something was measured.

    Attributes:
        copy_bytes_s: device to slot.
        store_bytes_s: slot to the remote tier, publish included.
        step_s: longest recent time from one boundary to the next.
    """

    copy_bytes_s: float | None = None
    store_bytes_s: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """A choice with its numbers, as told to the user before it starts."""

    choice: Choice
    needs_s: float | None
    has_s: float | None


ASSUMED_STORE_BYTES_S = 50e6  # before anything was measured: a slow EBS volume or a busy bucket
MARGIN_S = 2.0  # kept free at the end of the window: the commit's own round trips and the exit


def plan_drain(
    has_s: float | None,
    state_bytes: int | None,
    rates: Rates,
    *,
    trainer_alive: bool,
    in_flight_bytes: int | None,
    sealed: bool,
) -> Plan:
    """Choose the newest step that can still become durable in `has_s` seconds.

    A new snapshot is preferred whenever it fits, even if the newest sealed one is of the trainer's very step: before it
    hears of the notice the trainer may have made another. (At a step that is sealed, a new one costs nothing.) It is
    also preferred when there is nothing else: then nothing is lost by trying.

    Args:
        has_s: seconds until the instance ends; `None` when nobody knows.
        state_bytes: bytes of one snapshot; `None` before the first layout.
        rates: measured speeds.
        trainer_alive: whether anybody can take a new snapshot.
        in_flight_bytes: bytes the remote tier still has to send of what it is sending; `None` when it is idle.
        sealed: whether there is a sealed snapshot that is not durable yet.
    """
    store_bytes_s = rates.store_bytes_s or ASSUMED_STORE_BYTES_S
    size = state_bytes or 0
    new_s = size / (rates.copy_bytes_s or store_bytes_s) + size / store_bytes_s + (rates.step_s or 0.0) + MARGIN_S
    newest_s = size / store_bytes_s + MARGIN_S
    finish_s = (in_flight_bytes or 0) / store_bytes_s + MARGIN_S
    if trainer_alive:
        nothing_else = not sealed and in_flight_bytes is None
        if has_s is None or new_s <= has_s or nothing_else:
            return Plan(Choice.NEW, new_s, has_s)
    if sealed and (has_s is None or newest_s <= has_s or in_flight_bytes is None):
        return Plan(Choice.NEWEST, newest_s, has_s)
    return Plan(Choice.FINISH, finish_s, has_s)


def retain(
    committed: Sequence[SnapshotId],
    *,
    keep_last: int,
    keep_every: int | None,
    verified: Collection[SnapshotId],
    pinned: Collection[SnapshotId] = (),
) -> list[SnapshotId]:
    """Which committed snapshots may be deleted, oldest first (I6).

    Kept are: the newest `keep_last`; every one whose step is a multiple of `keep_every`; what is `pinned`; and the
    newest *verified* one with everything newer, so that something known to be good always exists. While nothing is
    verified, nothing is deleted.

    Args:
        committed: what the tier holds, in any order.
        keep_last: at least 1.
        keep_every: in steps; `None` for no milestones.
        verified: what has been read back and found good.
        pinned: what something else still needs (an upload from the local tier, a resume).
    """
    if keep_last < 1:
        raise ValueError("keep_last must be at least 1")
    ordered = sorted(committed)
    good = [snapshot for snapshot in ordered if snapshot in verified]
    if not good:
        return []
    newest_good = good[-1]
    kept = {*ordered[-keep_last:], *pinned}
    return [
        snapshot
        for snapshot in ordered
        if snapshot < newest_good
        and snapshot not in kept
        and not (keep_every and snapshot.step > 0 and snapshot.step % keep_every == 0)
    ]


@dataclass(frozen=True)
class Restart:
    """Start the trainer again after `in_s` seconds; `crashes` without progress so far."""

    in_s: float
    crashes: int


@dataclass(frozen=True)
class GiveUp:
    """Too many crashes without progress: leave with the trainer's own code."""

    crashes: int


def after_crash(
    *,
    crashes: int,
    progressed: bool,
    connected: bool,
    max_crashes: int,
    first_delay_s: float = 1.0,
    cap_s: float = 60.0,
) -> Restart | GiveUp:
    """What to do when the trainer died by itself. Preemptions never come here.

    A trainer that never said hello has not failed *under* the harness (a typing error, a missing module): starting it
    again would only repeat the message. Progress (a step beyond the furthest one ever reached) clears the count.

    Args:
        crashes: crashes in a row without progress, before this one.
        progressed: whether this life got beyond every earlier one.
        connected: whether this life's Checkpointer said hello.
        max_crashes: how many crashes without progress are forgiven.
        first_delay_s: delay of the first restart; doubled for each crash without progress.
        cap_s: longest delay.
    """
    if not connected:
        return GiveUp(crashes + 1)
    count = 1 if progressed else crashes + 1
    if count > max_crashes:
        return GiveUp(count)
    return Restart(min(cap_s, first_delay_s * 2 ** (count - 1)), count)
