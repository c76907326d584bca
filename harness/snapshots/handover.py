"""Two generations of one run at once: who hands over, and when the newcomer may begin.

Owns both looks of the handover (docs/commit-protocol.md); knows neither trainers nor slots, and decides nothing else.

    older agent    every LOOK_S: is there a newer claim? ────────────────▶ drains, publishes, puts `.done`, exits 73
    newcomer       claims, prefetches, every AWAIT_S: has each older one
                   a `.done`, or has its journal been silent long enough? ─▶ fixes its resume point

Nobody's wall clock counts. Silence is measured by the newcomer's own monotonic clock, from when it saw the last
segment, and only while it could look: after an outage of the store, the older one gets time to be heard again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cloud.errors import NotFound
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core.manifest import STOPPED_EARLY, Claim, Done
from harness.core.snapshot import LISTED_IN_ORDER, RunKeys
from harness.errors import SnapshotCorrupt
from harness.snapshots.records import read_claim, read_done

LOOK_S = 15.0
AWAIT_S = 2.0
LONGEST_GAP_S = 15.0  # of a pause between two looks no more counts as silence: one heartbeat of the journal


def newer_claim(store: ObjectStore, keys: RunKeys, generation: int, agent: str, deadline: Deadline) -> Claim | None:
    """The newest claim above `generation` that is not `agent`'s own: whoever made it waits for us. One listing.

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
    """One older generation. `heard_at` is monotonic."""

    claim: Claim | None  # None: unreadable, or deleted
    heard_at: float
    last_segment: str = ""


class Predecessors:
    """The older generations that could still commit, as the newcomer sees them. One thread."""

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
            keys: of the run.
            generation: ours: what is below it is older.
            run_id: identity of the run; what was before a `--fresh` does not matter.
            agent: ours, in our claims: what an earlier life of ours made needs no waiting for.
            lock_id: the lock that we hold: whoever claimed with it before is dead.
            silence_s: how long a journal must be without a new segment.
            clock: monotonic seconds.
        """
        self._keys, self.generation, self.run_id = keys, generation, run_id
        self._agent, self._lock_id = agent, lock_id
        self._silence_s, self._clock = silence_s, clock
        self._known: dict[int, _Predecessor] = {}
        self._looked_at: float | None = None
        self._missed = True
        self.over: Done | None = None
        """The end that an older generation has brought to the whole run meanwhile; `None` while none has."""

    def look(self, store: ObjectStore, deadline: Deadline) -> list[int]:
        """The generations that are still awaited; empty once the resume point may be fixed (I5).

        Raises:
            CloudError: the store could not be asked; nothing counts as silence.
        """
        now = self._clock()
        missed, self._missed = self._missed, True
        claims, dones = self._list(store, deadline)
        committed = [found.generation for info in store.list(self._keys.commits, deadline=deadline)
                     if (found := self._keys.parse_commit(info.key)) is not None]  # fmt: skip
        # Whoever committed had fixed its resume point, and so had waited for everybody before it.
        floor = max(committed, default=0)
        for number in {floor, *claims} - {0}:  # a lifecycle rule of the bucket may have deleted the claim
            if floor <= number < self.generation and number not in self._known:
                self._known[number] = _Predecessor(self._claim(store, number, deadline), now)
        self._note_over(store, [number for number in dones if number in self._known], deadline)
        ended = {self._agent_of(number) for number in dones} - {""}
        awaited = [
            number
            for number, elder in self._known.items()
            if number not in dones and not self._is_dead(elder) and not (elder.claim and elder.claim.agent in ended)
        ]
        self._discount(now, missed=missed)
        silent = [number for number in awaited if self._is_silent(store, number, now, deadline)]
        self._looked_at, self._missed = now, False
        return [number for number in awaited if number not in silent]

    def _discount(self, now: float, *, missed: bool) -> None:
        """What of the time since the last look is no silence: none of it where looks failed, a heartbeat elsewhere.

        A look that succeeds always counts a little: of a store that is slow each look may take longer than a heartbeat.
        """
        gap_s = math.inf if self._looked_at is None else now - self._looked_at
        if gap_s > LONGEST_GAP_S:
            unheard_s = math.inf if missed else gap_s - LONGEST_GAP_S
            for elder in self._known.values():
                elder.heard_at = min(now, elder.heard_at + unheard_s)

    def claim_of(self, generation: int) -> Claim | None:
        """The claim of a generation that `look` has named; `None` where it cannot be read."""
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
            return None  # its journal tells whether it lives

    def _agent_of(self, number: int) -> str:
        elder = self._known.get(number)
        return elder.claim.agent if elder is not None and elder.claim is not None else ""

    def _is_dead(self, elder: _Predecessor) -> bool:
        """Whether it cannot commit, or what it commits cannot matter to us."""
        claim = elder.claim
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
            over = done.outcome == "finished" or (done.outcome == STOPPED_EARLY and not self._goes_on_after(number))
            if over and claim is not None and claim.run_id == self.run_id:
                self.over = done

    def _goes_on_after(self, number: int) -> bool:
        """Whether somebody went on with the run after that generation had stopped early."""
        later = (elder.claim for known, elder in self._known.items() if known > number)
        return any(claim is not None and claim.continues for claim in later)

    def _is_silent(self, store: ObjectStore, number: int, now: float, deadline: Deadline) -> bool:
        elder = self._known[number]
        newest = elder.last_segment
        for info in store.list(self._keys.journal_of(number), after=elder.last_segment, deadline=deadline):
            newest = max(newest, info.key)
        if newest != elder.last_segment:
            elder.last_segment, elder.heard_at = newest, now
        return now - elder.heard_at >= self._silence_s
