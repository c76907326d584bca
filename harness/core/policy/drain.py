"""Which snapshot can still become durable in the time that is left, and how that time is used."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from harness.core.policy.copying import ASSUMED_STORE_BYTES_S, Rates
from harness.core.words import count

_LONG_S = 5.0  # a step that takes this long is mentioned
_CLEARLY_S = 1.0
MARGIN_S = 2.0  # kept free at the end of the window: the commit's own round trips and the exit


class Choice(enum.Enum):
    """What to do with the time that is left."""

    FINISH = "finish"
    """Let the upload in flight become durable; nothing newer fits."""
    NEWEST = "newest"
    """Make the newest snapshot that is already sealed durable; a new one does not fit or cannot be had."""
    NEW = "new"
    """Take a new snapshot at the next boundary: nothing is lost."""


@dataclass(frozen=True)
class Plan:
    """A choice with its numbers, as told to the user before it starts.

    Attributes:
        choice: which snapshot.
        needs_s: until it is durable, at the measured rates.
        has_s: until the instance ends; `None` if unknown.
        replaces: whether the upload in flight is given up for it, because it would not fit behind that upload.
        local_s: until it is at least on the local disk; `None` without a local tier, or before that was measured.
        step_age_s: how long the step has taken so far at whose end a new snapshot is taken, if that is long in itself
            or longer than usual; else `None`.
        meanwhile: whether the newest sealed snapshot is sent while a new one is awaited.
    """

    choice: Choice
    needs_s: float
    has_s: float | None
    replaces: bool = False
    local_s: float | None = None
    step_age_s: float | None = None
    meanwhile: bool = False

    @property
    def fits(self) -> bool:
        """Whether it becomes durable in time, if the rates hold."""
        return self.has_s is None or self.needs_s <= self.has_s

    def words(self, step: int | None) -> str:
        """Return the plan for people: "fits: 41 s of 113 s; step 12 034 (a new snapshot)"."""
        if self.has_s is None:
            verdict = f"needs {self.needs_s:.0f} s, and there is no deadline"
        elif self.fits:
            verdict = f"fits: {self.needs_s:.0f} s of {self.has_s:.0f} s"
        else:
            verdict = f"needs {self.needs_s:.0f} s, has {self.has_s:.0f} s"
        local = f", {self.local_s:.0f} s to the local disk" if self.local_s is not None and not self.fits else ""
        what = {
            Choice.NEW: "a new snapshot",
            Choice.NEWEST: "the newest sealed snapshot",
            Choice.FINISH: "the upload in flight" if self.needs_s > MARGIN_S else "nothing is left to save",
        }[self.choice]
        if self.choice is Choice.NEW and self.step_age_s is not None:
            what += f", if the step, {self.step_age_s:.0f} s so far, ends in time"
        if self.meanwhile:
            what += "; meanwhile the newest sealed one"
        given_up = ", instead of the upload in flight" if self.replaces else ""
        return f"{verdict}{local}; step {count(step)} ({what}{given_up})"


def plan_drain(
    has_s: float | None,
    state_bytes: int | None,
    rates: Rates,
    *,
    trainer_alive: bool,
    in_flight_bytes: int | None,
    sealed: bool,
    step_age_s: float | None = None,
) -> Plan:
    """Choose the newest step that can still become durable in `has_s` seconds.

    A new snapshot is preferred whenever it fits, even if the newest sealed one is of the trainer's current step: the
    trainer may complete another step before it hears of the notice. (At a step that is sealed, a new one costs
    nothing.) It is also preferred when there is nothing else: then nothing is lost by trying. An upload in flight
    continues until the chosen snapshot is sealed. It is given up only if the chosen one does not fit behind it and, at
    rates that were measured, fits without it.

    Args:
        has_s: seconds until the instance ends; `None` if unknown.
        state_bytes: bytes of one snapshot; `None` before the first layout.
        rates: measured speeds.
        trainer_alive: whether a trainer can take a new snapshot.
        in_flight_bytes: bytes the remote tier still has to send of what it is sending; `None` when it is idle.
        sealed: whether there is a sealed snapshot that is not durable yet.
        step_age_s: how long the current step has taken so far; `None` if unknown.
    """
    store_bytes_s = rates.store_bytes_s or ASSUMED_STORE_BYTES_S
    size = state_bytes or 0
    send_s, flight_s = rates.send_s(size), (in_flight_bytes or 0) / store_bytes_s
    wait_s = wait_for_boundary_s(rates.step_s, step_age_s)
    reach_s = size / (rates.copy_bytes_s or store_bytes_s) + wait_s
    write_s = max(0, size - rates.copied.bytes) / rates.disk_bytes_s if rates.disk_bytes_s else None
    may_replace = in_flight_bytes is not None and rates.store_bytes_s is not None

    def plan(choice: Choice, behind_s: float, alone_s: float, ready_s: float) -> Plan:
        replaces = may_replace and has_s is not None and behind_s + MARGIN_S > has_s >= alone_s + MARGIN_S
        needs_s = (alone_s if replaces else behind_s) + MARGIN_S
        return Plan(choice, needs_s, has_s, replaces, None if write_s is None else ready_s + write_s)

    new = plan(Choice.NEW, max(reach_s, flight_s) + send_s, reach_s + send_s, reach_s)
    newest = plan(Choice.NEWEST, flight_s + send_s, send_s, 0.0)
    if trainer_alive and (new.fits or (not sealed and in_flight_bytes is None)):
        idle, overdue = sealed and in_flight_bytes is None, is_overdue(rates.step_s, step_age_s)
        told = step_age_s is not None and (step_age_s >= _LONG_S or overdue)
        meanwhile = idle and (wait_s >= send_s or overdue)
        return replace(new, step_age_s=step_age_s if told else None, meanwhile=meanwhile)
    if sealed and (newest.fits or in_flight_bytes is None):
        return newest
    return Plan(Choice.FINISH, flight_s + MARGIN_S, has_s)


def wait_for_boundary_s(step_s: float | None, age_s: float | None) -> float:
    """Return the expected seconds until the next boundary.

    A step that takes longer than usual (a validation is in it) is expected to take as long again as it has so far.

    Args:
        step_s: the usual duration of a step; `None` before that was measured.
        age_s: how long the current one has taken so far; `None` if unknown.
    """
    if age_s is None:
        return step_s or 0.0
    return age_s if step_s is None or age_s > step_s else step_s - age_s


def is_overdue(step_s: float | None, age_s: float | None) -> bool:
    """Return whether the current step takes clearly longer than usual, so that its end cannot be predicted."""
    return step_s is not None and age_s is not None and age_s > step_s + _CLEARLY_S


def still_fits(has_s: float, size: int, rates: Rates) -> bool:
    """Return whether a snapshot of `size` bytes that is taken now becomes durable in `has_s` seconds."""
    copy_bytes_s = rates.copy_bytes_s or rates.store_bytes_s or ASSUMED_STORE_BYTES_S
    return has_s >= size / copy_bytes_s + rates.send_s(size) + MARGIN_S


def gives_way(has_s: float, in_flight_bytes: int, newer_bytes: int, rates: Rates) -> bool:
    """Return whether to give up an upload in flight for a newer sealed snapshot, `has_s` seconds before the end.

    Only if the newer one does not fit behind it, and provably fits without it. The store's own copies take time, too.
    """
    if rates.store_bytes_s is None:
        return False
    alone_s = rates.send_s(newer_bytes) + MARGIN_S
    return alone_s <= has_s < alone_s + in_flight_bytes / rates.store_bytes_s


def never_fits(state_bytes: int, rates: Rates, window_s: float) -> float | None:
    """Return the seconds to make one snapshot durable, if no notice of `window_s` ever leaves enough; else `None`."""
    if rates.store_bytes_s is None:
        return None  # nothing was measured: nothing is claimed
    needs_s = rates.send_s(state_bytes) + MARGIN_S
    if rates.copy_bytes_s:
        needs_s += state_bytes / rates.copy_bytes_s
    return needs_s if needs_s > window_s else None


def reserve_s(has_s: float) -> float:
    """Return how much of `has_s` to keep for the end itself: of the trainer, of calls in flight, and its record.

    If a host dies before it has recorded its end, the next start waits until the host's journal counts as silent.
    """
    return min(5.0, 0.15 * has_s)
