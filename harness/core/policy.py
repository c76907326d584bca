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
class Copied:
    """What a store copied by itself of one snapshot: so much was not sent.

    Attributes:
        bytes: of the shards that were copied.
        seconds: what it took to find and to copy them.
    """

    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Measured speeds, pessimistic (`harness.core.rate`); `None` until something was measured.

    Attributes:
        copy_bytes_s: device to slot.
        store_bytes_s: slot to the remote tier, publish included.
        step_s: from one boundary to the next.
        disk_bytes_s: slot to the local tier; `None` where there is none, too.
        copied: by the store, of the newest snapshot: what changed then is what will have to be sent of the next one.
    """

    copy_bytes_s: float | None = None
    store_bytes_s: float | None = None
    step_s: float | None = None
    disk_bytes_s: float | None = None
    copied: Copied = Copied()

    @property
    def copies_pay(self) -> bool:
        """Whether the store copies no slower than we send: in a hurry it is asked to, or is not.

        Where it has copied nothing yet, it is tried: what was sent whole just now may be the base of all that follows.
        """
        copied = self.copied
        return not copied.bytes or copied.seconds <= copied.bytes / (self.store_bytes_s or ASSUMED_STORE_BYTES_S)

    def send_s(self, size: int) -> float:
        """Seconds until a snapshot of `size` bytes is durable, if nothing else is being sent."""
        store_bytes_s = self.store_bytes_s or ASSUMED_STORE_BYTES_S
        if not self.copies_pay:
            return size / store_bytes_s
        return max(0, size - self.copied.bytes) / store_bytes_s + self.copied.seconds


@dataclass(frozen=True)
class Plan:
    """A choice with its numbers, as told to the user before it starts.

    Attributes:
        choice: which snapshot.
        needs_s: until it is durable, at the measured rates.
        has_s: until the instance ends; `None` when nobody knows.
        replaces: whether the upload in flight is given up for it: behind it, it would not fit.
        local_s: until it is at least on the local disk; `None` without a local tier, or before that was measured.
    """

    choice: Choice
    needs_s: float
    has_s: float | None
    replaces: bool = False
    local_s: float | None = None

    @property
    def fits(self) -> bool:
        """Whether it becomes durable in time, if the rates hold."""
        return self.has_s is None or self.needs_s <= self.has_s

    def words(self, step: int | None) -> str:
        """For people: "fits: 41 s of 113 s; step 12 034 (a new snapshot)"."""
        if self.has_s is None:
            verdict = f"needs {self.needs_s:.0f} s, and there is no deadline"
        elif self.fits:
            verdict = f"fits: {self.needs_s:.0f} s of {self.has_s:.0f} s"
        else:
            verdict = f"needs {self.needs_s:.0f} s, has {self.has_s:.0f} s"
        local = f", {self.local_s:.0f} s to the local disk" if self.local_s is not None and not self.fits else ""
        what = {
            Choice.NEW: "a new snapshot",
            Choice.NEWEST: "the newest that is sealed",
            Choice.FINISH: "the upload in flight" if self.needs_s > MARGIN_S else "nothing is left to save",
        }[self.choice]
        given_up = ", instead of the upload in flight" if self.replaces else ""
        return f"{verdict}{local}; step {count(step)} ({what}{given_up})"


def count(number: int | None) -> str:
    """A number as people read it: 12 034; "?" for none."""
    return "?" if number is None else f"{number:,}".replace(",", " ")


ASSUMED_STORE_BYTES_S = 50e6  # before anything was measured: a slow EBS volume or a busy bucket
SLOWEST_BYTES_S = 1e6  # what is slower than this is taken for a hang
MARGIN_S = 2.0  # kept free at the end of the window: the commit's own round trips and the exit


def patience_s(size: int, base_s: float, limit_bytes_s: float | None = None) -> float:
    """How long one attempt at moving `size` bytes may take: an attempt that is cut off has to begin again.

    Args:
        size: bytes.
        base_s: for everything but the bytes.
        limit_bytes_s: how fast they may go; `None` for as fast as it goes.
    """
    return base_s + size / min(SLOWEST_BYTES_S, limit_bytes_s or SLOWEST_BYTES_S)


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
    also preferred when there is nothing else: then nothing is lost by trying. An upload in flight goes on until the
    winner is sealed, and is given up for it only if the winner does not fit behind it and, at rates that were measured,
    fits without it.

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
    send_s, flight_s = rates.send_s(size), (in_flight_bytes or 0) / store_bytes_s
    reach_s = size / (rates.copy_bytes_s or store_bytes_s) + (rates.step_s or 0.0)
    write_s = max(0, size - rates.copied.bytes) / rates.disk_bytes_s if rates.disk_bytes_s else None
    may_replace = in_flight_bytes is not None and rates.store_bytes_s is not None

    def plan(choice: Choice, behind_s: float, alone_s: float, ready_s: float) -> Plan:
        replaces = may_replace and has_s is not None and behind_s + MARGIN_S > has_s >= alone_s + MARGIN_S
        needs_s = (alone_s if replaces else behind_s) + MARGIN_S
        return Plan(choice, needs_s, has_s, replaces, None if write_s is None else ready_s + write_s)

    new = plan(Choice.NEW, max(reach_s, flight_s) + send_s, reach_s + send_s, reach_s)
    newest = plan(Choice.NEWEST, flight_s + send_s, send_s, 0.0)
    if trainer_alive and (new.fits or (not sealed and in_flight_bytes is None)):
        return new
    if sealed and (newest.fits or in_flight_bytes is None):
        return newest
    return Plan(Choice.FINISH, flight_s + MARGIN_S, has_s)


def still_fits(has_s: float, size: int, rates: Rates) -> bool:
    """Whether a snapshot of `size` bytes that is taken right now becomes durable in `has_s` seconds."""
    copy_bytes_s = rates.copy_bytes_s or rates.store_bytes_s or ASSUMED_STORE_BYTES_S
    return has_s >= size / copy_bytes_s + rates.send_s(size) + MARGIN_S


def gives_way(has_s: float, in_flight_bytes: int, newer_bytes: int, rates: Rates) -> bool:
    """Whether an upload in flight is given up for a newer sealed snapshot, `has_s` seconds before the end.

    Only if the newer one does not fit behind it, and provably fits without it: what the store copies of it by itself
    takes its time, too.
    """
    if rates.store_bytes_s is None:
        return False
    alone_s = rates.send_s(newer_bytes) + MARGIN_S
    return alone_s <= has_s < alone_s + in_flight_bytes / rates.store_bytes_s


def never_fits(state_bytes: int, rates: Rates, window_s: float) -> float | None:
    """Seconds that making one snapshot durable takes, if no notice of `window_s` ever leaves enough; else `None`."""
    if rates.store_bytes_s is None:
        return None  # nothing was measured: nothing is claimed
    needs_s = rates.send_s(state_bytes) + MARGIN_S
    if rates.copy_bytes_s:
        needs_s += state_bytes / rates.copy_bytes_s
    return needs_s if needs_s > window_s else None


LOOKS_IN_VAIN = 3
LOOKS_EVERY = 16


def should_probe(in_vain: int, passed: int) -> bool:
    """Whether to look for what need not be sent; off by itself where it saves nothing.

    Three times in a row for nothing, and it is tried at every 16th snapshot only: what is frozen later has another
    layout, and so is new to us; what merely stops changing is found within those 16.

    Args:
        in_vain: looks in a row that found nothing.
        passed: snapshots since the last look.
    """
    return in_vain < LOOKS_IN_VAIN or passed >= LOOKS_EVERY - 1


COPY_S = 10.0  # for the round trips of one copy; its bytes may take as long as sending them would


def copy_patience_s(size: int, has_s: float) -> float:
    """How long a store may take to copy `size` bytes by itself, when everything has to be done in `has_s` seconds.

    At most half of those: the other half is for sending, if the copy does not come.
    """
    return min(COPY_S + size / ASSUMED_STORE_BYTES_S, has_s / 2)


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


def reserve_s(has_s: float) -> float:
    """What is kept of `has_s` seconds for the end itself: the trainer's, the calls' in flight, and the record of it.

    A host that dies over it says nothing, and whoever comes next waits until its journal counts as silent.
    """
    return min(5.0, 0.15 * has_s)


@dataclass(frozen=True)
class EndTimes:
    """What each part of an end may take at most, one after the other: all of them end within what is left.

    Each is a share of the seconds that are left when it begins, so that a part that is done early leaves its time to
    the next. A part has `least_s` even where nothing is left.

    Attributes:
        calls_s: for calls in flight, and for recording, while nobody urges.
        journal_s: for the journal, likewise.
        least_s: for any part.
    """

    calls_s: float = 5.0
    journal_s: float = 10.0
    least_s: float = 0.2

    def quiet_s(self, left_s: float) -> float:
        """Until no tier can commit any more."""
        return self._share(left_s, 0.3, self.calls_s)

    def record_s(self, left_s: float) -> float:
        """For the record of the outcome, which must not be missing: whoever comes next would wait for nothing."""
        return self._share(left_s, 0.6, self.calls_s)

    def rest_s(self, left_s: float) -> float:
        """For the journal's last segment; and then for closing the stores."""
        return self._share(left_s, 0.6, self.journal_s)

    def _share(self, left_s: float, share: float, most_s: float) -> float:
        return min(most_s, max(self.least_s, share * left_s))


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
        connected: whether a Checkpointer said hello, in this life or in an earlier one.
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
