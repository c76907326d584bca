"""Two generations of one run at once: when the older one hands over, and when the newcomer may begin.

Owns both checks of the handover (docs/commit-protocol.md); knows neither trainers nor slots, and decides nothing else.

    older agent    every LOOK_S: is there a newer claim? ────────────────▶ drains, publishes, puts `.done`, exits 73
    newcomer       claims, prefetches, every AWAIT_S: has each older one
                   a `.done`, or has its journal been silent long enough? ─▶ fixes its resume point

No wall clock is used. The newcomer measures silence by its own monotonic clock, from when it saw the last segment, and
only while it could look: after an outage of the store, the older agent gets time to be heard again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cloud.errors import NotFound
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core.manifest import STOPPED_EARLY, Claim, Done
from harness.core.snapshot import LISTED_IN_ORDER, RunKeys
from harness.errors import SnapshotCorrupt
from harness.snapshots.journal import newest_segments
from harness.snapshots.records import read_claim, read_done

LOOK_S = 15.0
AWAIT_S = 2.0
LONGEST_GAP_S = 15.0  # one heartbeat of the journal; the rest of a longer pause between two looks is not silence


def newer_claim(store: ObjectStore, keys: RunKeys, generation: int, agent: str, deadline: Deadline) -> Claim | None:
    """Return the newest claim above `generation` by another agent, which waits for us; or `None`. One listing.

    Raises:
        CloudError: the store could not be asked.
        SnapshotCorrupt: a claim cannot be read.
    """
    after = keys.claim(generation) if generation < LISTED_IN_ORDER else ""
    listed = store.list(keys.generations, after=after, deadline=deadline)
    numbers = [found for info in listed if (found := keys.parse_claim(info.key)) is not None and found > generation]
    for number in sorted(numbers, reverse=True):
        claim = read_claim(store, keys, number, deadline)
        if claim.agent != agent or not agent:
            return claim
    return None


@dataclass
class _Predecessor:
    """An older generation, and when its journal last had a new segment. `heard_at` is monotonic."""

    claim: Claim | None  # None: unreadable, or deleted
    heard_at: float
    segments: dict[str, str] = field(default_factory=dict)  # the newest of each host


class Predecessors:
    """The older generations that could still commit, as the newcomer sees them. For one thread."""

    def __init__(
        self,
        keys: RunKeys,
        generation: int,
        *,
        run_id: str,
        agent: str,
        lock_id: str,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nothing yet.

        Args:
            keys: keys of the run.
            generation: our generation; lower numbers are older.
            run_id: identity of the run; generations before a `--fresh` have another one and are not awaited.
            agent: our agent's id in claims; earlier generations of this agent are not awaited.
            lock_id: the lock that we hold; an agent that claimed with it before is dead.
            silence_s: seconds without a new segment after which a journal counts as silent.
            clock: monotonic seconds.
        """
        self._keys, self.generation, self.run_id = keys, generation, run_id
        self._agent, self._lock_id = agent, lock_id
        self._silence_s, self._clock = silence_s, clock
        self._known: dict[int, _Predecessor] = {}
        self._looked_at: float | None = None
        self._missed = True
        self.over: Done | None = None
        """The record by which an older generation has ended the whole run meanwhile; `None` if there is none."""

    def look(self, store: ObjectStore, deadline: Deadline) -> list[int]:
        """Return the generations that are still awaited; empty once the resume point may be fixed (I5).

        Raises:
            CloudError: the store could not be asked; nothing counts as silence.
        """
        now = self._clock()
        missed, self._missed = self._missed, True
        claims, dones = self._list(store, deadline)
        committed = [found.generation for info in store.list(self._keys.commits, deadline=deadline)
                     if (found := self._keys.parse_commit(info.key)) is not None]  # fmt: skip
        # A generation that committed had fixed its resume point, and so had waited for all before it.
        floor = max(committed, default=0)
        for number in {floor, *claims} - {0}:  # a lifecycle rule of the bucket may have deleted the claim
            if floor <= number < self.generation and number not in self._known:
                self._known[number] = _Predecessor(self._claim(store, number, deadline), now)
        self._note_over(store, [number for number in dones if number in self._known], deadline)
        ended = {self._agent_of(number) for number in dones} - {""}
        awaited = [
            number
            for number, older in self._known.items()
            if number not in dones and not self._is_dead(older) and not (older.claim and older.claim.agent in ended)
        ]
        self._discount(now, missed=missed)
        silent = [number for number in awaited if self._is_silent(store, number, now, deadline)]
        self._looked_at, self._missed = now, False
        return [number for number in awaited if number not in silent]

    def _discount(self, now: float, *, missed: bool) -> None:
        """Discount the time since the last look that is not silence, if it is longer than LONGEST_GAP_S.

        If a look failed meanwhile, silence starts again at zero; else LONGEST_GAP_S of the time counts. So successful
        looks always add some silence, even if the store is slow and each look takes longer than a heartbeat.
        """
        gap_s = math.inf if self._looked_at is None else now - self._looked_at
        if gap_s > LONGEST_GAP_S:
            unheard_s = math.inf if missed else gap_s - LONGEST_GAP_S
            for older in self._known.values():
                older.heard_at = min(now, older.heard_at + unheard_s)

    def claim_of(self, generation: int) -> Claim | None:
        """Return the claim of a generation that `look` has returned; `None` if it cannot be read."""
        return self._known[generation].claim

    def _list(self, store: ObjectStore, deadline: Deadline) -> tuple[list[int], set[int]]:
        claims, dones = [], set()
        for info in store.list(self._keys.generations, deadline=deadline):
            if (number := self._keys.parse_claim(info.key)) is not None:
                claims.append(number)
            elif (number := self._keys.parse_done(info.key)) is not None:
                dones.add(number)
        return claims, dones

    def _claim(self, store: ObjectStore, number: int, deadline: Deadline) -> Claim | None:
        try:
            return read_claim(store, self._keys, number, deadline)
        except (SnapshotCorrupt, NotFound):
            return None  # its journal shows whether it lives

    def _agent_of(self, number: int) -> str:
        older = self._known.get(number)
        return older.claim.agent if older is not None and older.claim is not None else ""

    def _is_dead(self, older: _Predecessor) -> bool:
        """Whether this predecessor cannot commit, or its commits cannot matter to us."""
        claim = older.claim
        if claim is None:
            return False
        ours = claim.agent == self._agent != ""
        same_lock = claim.lock_id == self._lock_id != ""
        return ours or same_lock or claim.run_id != self.run_id

    def _note_over(self, store: ObjectStore, ended: list[int], deadline: Deadline) -> None:
        for number in ended:
            try:
                done = read_done(store, self._keys, number, deadline)
            except SnapshotCorrupt:
                continue
            claim = self._known[number].claim
            over = done.outcome in ("finished", STOPPED_EARLY) and not self._goes_on_after(number, done)
            if over and claim is not None and claim.run_id == self.run_id:
                self.over = done

    def _goes_on_after(self, number: int, done: Done) -> bool:
        """Whether a later generation went back to a snapshot, or continued the run after this one had stopped early."""
        later = [older.claim for known, older in self._known.items() if known > number and older.claim is not None]
        return any(claim.back_to is not None for claim in later) or (
            done.outcome == STOPPED_EARLY and any(claim.continues for claim in later)
        )

    def _is_silent(self, store: ObjectStore, number: int, now: float, deadline: Deadline) -> bool:
        older = self._known[number]
        newest = newest_segments(store, self._keys, number, older.segments, deadline)
        if newest != older.segments:
            older.segments, older.heard_at = newest, now
        return now - older.heard_at >= self._silence_s
