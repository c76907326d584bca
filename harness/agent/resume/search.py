"""The search for the snapshot that a generation resumes: wait for older generations, list the copies, fetch the newest.

Owns one thread for each search, and the snapshot that it has prefetched. It writes nothing that others read: it reports
each result through `tell`. A run whose snapshots cannot be known does not begin at step 0 (I10): the search continues,
and reports that.

    survey ──▶ await older generations, prefetch meanwhile ──▶ survey ──▶ Finder ──▶ Found | Failed | Refused
       └─ Awaiting, Identified, Unreachable, Header as it goes
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cloud.errors import CloudError, NotFound
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.agent.context import Context
from harness.agent.generation import Generation
from harness.agent.resume.claims import ASK_AGAIN_S, CALL_S
from harness.agent.resume.finder import Copy, Finder, SnapshotsMissing
from harness.agent.resume.identity import check_identity, check_not_over
from harness.agent.resume_point import MemoryCopy, ResumePoint
from harness.agent.save.pipeline import SavePipeline
from harness.core import events
from harness.core.manifest import SET_ASIDE, Done
from harness.core.snapshot import SnapshotId
from harness.errors import ConfigError, HarnessError, NoSpace, SnapshotCorrupt
from harness.ipc.slots import SlotRecord
from harness.snapshots import commit, handover, records, retire
from harness.snapshots.candidates import named, stored_copies
from harness.snapshots.journal import last_lived_at

STALE_S = 60.0  # how long a listing may hide what the store holds before a start is refused
_SHOWN = 5
_WENT_BACK = 100  # starts without a snapshot of their own that are looked at: each costs a call
_LOOKED_BACK = 5  # generations: one that died while it waited has no journal
_UNKNOWN = 0  # stands for an awaited generation whose number the store has not told


@dataclass(frozen=True)
class Awaiting:
    """The search waits for older generations, or has stopped waiting because they have handed over.

    Attributes:
        generations: their numbers, 0 for one that the store has not told yet; empty once they have handed over.
        only_here: whether this machine holds a snapshot that is newer than any in the store.
        news: events for the journal, emitted after the main thread knows of the wait: a notice may follow at once.
    """

    generations: tuple[int, ...]
    only_here: bool
    news: tuple[events.Event, ...] = ()


@dataclass(frozen=True)
class Unreachable:
    """The search waits for a store that does not answer."""


@dataclass(frozen=True)
class Identified:
    """The store has answered: the run's identity, and the lowest number that the generation may have."""

    run_id: str
    number: int


@dataclass(frozen=True)
class Header:
    """A copy that is about to be fetched, with its records in rank order."""

    copy: Copy
    records: tuple[SlotRecord, ...]


@dataclass(frozen=True)
class Found:
    """The search is over.

    Attributes:
        point: what to resume; `None` to begin the run.
        settled: whether the store was asked: no later search can find another older generation.
        older: snapshots that are older than `point`, newest first.
        set_aside: snapshots that are not to be used, though this host may hold them in memory.
    """

    point: ResumePoint | None
    settled: bool
    older: tuple[SnapshotId, ...] = ()
    set_aside: frozenset[SnapshotId] = frozenset()


@dataclass(frozen=True)
class Failed:
    """The snapshots of the run cannot be resumed."""

    error: HarnessError


@dataclass(frozen=True)
class Refused:
    """The run must not be started.

    Attributes:
        error: why.
        over: the end of the run, if an older generation has ended it meanwhile.
    """

    error: ConfigError
    over: Done | None = None


@dataclass(frozen=True)
class LookedBack:
    """The time when the trainer before this agent's first one ended, monotonic; `None` if that is unknown."""

    ended_at: float | None


FinderFor = Callable[[str, bool], Finder]
"""Makes a finder, for a run's identity, and whether the run goes back to the snapshot that it is given."""

Progress = Awaiting | Unreachable | Identified | Header | Found | Failed | Refused | LookedBack


@dataclass(frozen=True)
class Start:
    """The input of a search.

    Attributes:
        generation: the one that resumes. Its number and its identity are final once it is claimed.
        known: the run, as the store knew it when the generation was made; `None` if the store did not answer.
        memory: sealed slots of this host.
        agent: our identity, in claims.
        lock_id: names the lock that this agent holds.
        settled: whether an earlier search of this agent has asked the store: then no older generation is left to await.
        looks_back: whether the search has to look up when the attempt before ours ended.
        wanted: name or step of the snapshot to go back to; `None` for the newest one.
    """

    generation: Generation
    known: records.Survey | None
    memory: Sequence[MemoryCopy]
    agent: str
    lock_id: str
    settled: bool
    looks_back: bool
    wanted: str | None = None


def no_such_snapshot(run: str, wanted: str, known: Iterable[SnapshotId]) -> ConfigError:
    """Return the error for a snapshot to go back to that the run does not have."""
    newest = ", ".join(map(str, sorted(known, reverse=True)[:_SHOWN])) or "none"
    return ConfigError(f"{run} has no snapshot {wanted} that can be used. The newest are: {newest}")


class _Contradiction(CloudError):
    """The store's listing contradicts what the store holds."""

    retryable = True


def _distrust(store: str, contradiction: Exception) -> ConfigError:
    return ConfigError(
        f"the listings of {store} cannot be trusted: {contradiction}. Nothing was started; if its snapshots were "
        "removed on purpose, --fresh starts at step 0"
    )


class ResumeSearch:
    """One search. `run` in a thread of its own, everything else from the main thread."""

    def __init__(
        self,
        context: Context,
        command: Sequence[str],
        pipeline: SavePipeline,
        start: Start,
        finder: FinderFor,
        tell: Callable[[ResumeSearch, Progress], None],
    ) -> None:
        """Prepare; no store is asked yet.

        Args:
            context: of the agent.
            command: the trainer's command line, without secrets.
            pipeline: which has the stores, and knows what was durable.
            start: the input of the search.
            finder: makes the one that tries the copies.
            tell: called from the search's thread, with the search and each result.
        """
        self._context, self._command, self._pipeline, self._start = context, command, pipeline, start
        self._keys, self._settings, self._emit = context.keys, context.settings, context.emit
        self._generation, self._memory = start.generation, start.memory
        self._finder_for, self._tell = finder, tell
        self._identified = ""
        self._prefetched: ResumePoint | None = None
        self._tried: tuple[SnapshotId, ...] = ()
        self._older: tuple[SnapshotId, ...] = ()
        self._set_aside: frozenset[SnapshotId] = frozenset()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop soon, and begin nothing new: the result is not needed any more."""
        self._stopped.set()

    def run(self) -> None:
        """Search until the stores have answered. Blocks."""
        try:
            self._search_until_known()
        finally:
            if self._prefetched is not None:
                self._prefetched.close()

    @property
    def _remote(self) -> ObjectStore:
        return self._pipeline.remote.store

    @property
    def _run_id(self) -> str:
        """Identity of the run: from the claim once that stands, else from the store's answer to this search."""
        return self._generation.run_id or self._identified

    def _survey(self) -> records.Survey:
        return records.survey(self._remote, self._keys, Deadline.after(CALL_S))

    def _note(self, progress: Progress) -> None:
        self._tell(self, progress)

    def _search_until_known(self) -> None:
        survey, settled = self._start.known, self._start.settled
        predecessors: handover.Predecessors | None = None
        stale_since: float | None = None
        while not self._stopped.is_set():
            try:
                if survey is None and (not self._memory or self._start.wanted is not None):
                    survey = self._survey()
                if survey is not None and not self._run_id:
                    self._identify(survey)
                if survey is not None and not settled:
                    predecessors = predecessors or self._predecessors()
                    self._await(predecessors, only_here=self._is_newer_here(survey))
                    if self._stopped.is_set():
                        return None
                    survey, settled = self._survey(), True
                    self._check_list(survey)
                point = self._search(survey)
            except (_Contradiction, SnapshotsMissing) as err:
                stale_since = stale_since or time.monotonic()
                if time.monotonic() - stale_since > STALE_S:
                    if isinstance(err, SnapshotsMissing):
                        return self._note(Failed(err))
                    return self._note(Refused(_distrust(self._settings.store, err)))
                survey, settled = None, self._start.settled
                self._wait_for_store(err)
            except CloudError as err:
                if not err.retryable:
                    lost = SnapshotCorrupt(f"the store {self._settings.store} cannot be read: {err}")
                    return self._note(Failed(lost))
                self._wait_for_store(err)
            except ConfigError as err:
                return self._note(Refused(err, None if predecessors is None else predecessors.over))
            except HarnessError as err:
                if survey is not None and (newer := self._changed(survey)) is not None:
                    survey = newer  # the unusable snapshot was retired meanwhile
                    continue
                return self._note(Failed(err))
            else:
                self._note(Found(point, survey is not None, self._older, self._set_aside))
                self._look_back()
                if survey is not None and not self._start.settled:
                    self._abandon_stale(point)
                return None
        return None

    def _wait_for_store(self, err: Exception) -> None:
        self._note(Unreachable())
        self._emit(events.StoreBlind(store=self._settings.store, reason=str(err)))
        self._stopped.wait(ASK_AGAIN_S)

    def _identify(self, known: records.Survey) -> None:
        """Report the run's identity and the generation's number, after the store has answered."""
        for words in check_identity(known, self._settings, self._command):
            self._context.say(words)
        self._identified = known.run_id or secrets.token_hex(16)
        self._note(Identified(self._identified, known.next_generation))

    # ---- older generations ------------------------------------------------------------------------------------------

    def _predecessors(self) -> handover.Predecessors:
        return handover.Predecessors(
            self._keys,
            self._generation.number,
            run_id=self._run_id,
            agent=self._start.agent,
            lock_id=self._start.lock_id,
            silence_s=self._settings.handover_s,
        )

    def _await(self, predecessors: handover.Predecessors, *, only_here: bool) -> None:
        """Wait until no older generation can commit any more, and prefetch meanwhile.

        Raises:
            ConfigError: an older one has ended the run.
            CloudError: the store cannot be read, and a retry would not help.
        """
        told = {_UNKNOWN}
        began = time.monotonic()
        while awaited := self._look(predecessors):
            news: list[events.Event] = []
            for number in set(awaited) - told:
                claim = predecessors.claim_of(number)
                host, silence_s = claim.host if claim else "?", self._settings.handover_s
                news.append(events.HandoverAwaited(generation=number, host=host, silence_s=silence_s))
            told.update(awaited)
            self._note(Awaiting(tuple(awaited), only_here, tuple(news)))
            self._prefetch()
            if self._stopped.wait(handover.AWAIT_S):
                return
        over = events.HandoverOver(seconds=time.monotonic() - began)
        self._note(Awaiting((), only_here, (over,) if len(told) > 1 else ()))
        check_not_over(predecessors.over, self._settings)

    def _look(self, predecessors: handover.Predecessors) -> list[int]:
        """Return the numbers of the older generations that may still commit; `_UNKNOWN` if the store does not tell."""
        if not self._generation.claimed.is_set():
            return [_UNKNOWN]  # another agent may have the number, and is older then
        # As they stand in the store now:
        predecessors.generation, predecessors.run_id = self._generation.number, self._generation.run_id
        try:
            return predecessors.look(self._remote, Deadline.after(CALL_S))
        except CloudError as err:
            if not err.retryable:
                raise
            self._emit(events.StoreBlind(store=self._settings.store, reason=str(err)))
            return [_UNKNOWN]

    def _is_newer_here(self, survey: records.Survey) -> bool:
        """Return whether memory or the local tier holds a snapshot of this run that is newer than any in the store."""
        here, local = [copy.id for copy in self._memory], self._pipeline.local
        if local is not None:
            with contextlib.suppress(CloudError, SnapshotCorrupt, ValueError):
                newest = max(records.survey(local.store, self._keys, Deadline.after(CALL_S)).commits)
                manifest = records.read_manifest(local.store, self._keys, newest, Deadline.after(CALL_S))
                here += [newest] if manifest.run_id == self._run_id else []
        return any(copy > max(survey.commits, default=SnapshotId(1, 0)) for copy in here)

    def _prefetch(self) -> None:
        """Fetch the newest snapshot so far: most likely the older generation's last, or its last but one."""
        if self._prefetched is not None or self._start.wanted is not None or not self._finder().looks_ahead:
            return
        with contextlib.suppress(CloudError, SnapshotCorrupt, NoSpace):  # an error is no loss: the search does it again
            known = self._survey()
            if known.commits == self._tried:
                return
            self._tried = known.commits
            copies = stored_copies(self._remote, "remote", known.commits)
            self._prefetched = self._finder().find(copies, lambda copy, records: None)

    def _check_list(self, survey: records.Survey) -> None:
        """Raise if the listing lacks our own claim, which was just written: it may hide snapshots as well (I10).

        Stores list what they hold. A cache in front of a store, or a store under repair, may not.
        """
        newest = survey.last_claim.generation if survey.last_claim is not None else 0
        if newest < self._generation.number:
            raise _Contradiction(f"its listing ends at generation {newest}, but {self._generation.number} is claimed")

    # ---- which snapshot ---------------------------------------------------------------------------------------------

    def _finder(self, *, goes_back: bool = False) -> Finder:
        return self._finder_for(self._run_id, goes_back)

    def _search(self, survey: records.Survey | None) -> ResumePoint | None:
        """Return the newest usable copy of all tiers. Complete snapshots of dead agents are committed before."""
        copies: list[Copy] = list(self._memory)
        local = self._pipeline.local
        if survey is not None:
            finished = commit.finish_complete(self._remote, self._keys, self._run_id, Deadline.after(CALL_S))
            copies += stored_copies(self._remote, "remote", [*survey.commits, *finished])
        if local is not None:
            try:
                commit.finish_complete(local.store, self._keys, self._run_id, Deadline.after(CALL_S))
                at_hand = records.survey(local.store, self._keys, Deadline.after(CALL_S))
                copies += stored_copies(local.store, "local", at_hand.commits)
            except CloudError as err:  # a broken disk must not keep a run from its durable snapshots
                self._emit(events.Rejected(snapshot="all", tier="local", reason=str(err)))
        if (wanted := self._start.wanted or self._went_back(survey, copies)) is not None:
            return self._go_back(wanted, copies)
        point, self._prefetched = self._prefetched, None
        if point is not None and point.id != max((copy.id for copy in copies), default=None):
            point.close()  # there is a newer one now, and memory for only one of them
            point = None
        point = point or self._finder().find(copies, lambda copy, parts: self._note(Header(copy, parts)))
        if point is None and survey is not None:
            self._check_nothing_is_lost(survey)
        if point is not None:
            self._note_older(point.id, copies)
        return point

    def _went_back(self, survey: records.Survey | None, copies: Sequence[Copy]) -> str | None:
        """Return the snapshot to which an older start went back, if that start has no snapshot of its own yet.

        It may have died before it had set all newer ones aside, or some may be on this machine alone.
        """
        newest = max((copy.id.generation for copy in copies), default=0)
        numbers = range(self._generation.number - 1, max(newest, self._generation.number - 1 - _WENT_BACK), -1)
        for number in numbers if survey is not None else ():
            with contextlib.suppress(NotFound, SnapshotCorrupt):
                claim = records.read_claim(self._remote, self._keys, number, Deadline.after(CALL_S))
                if claim.run_id == self._run_id and claim.back_to is not None:
                    return claim.back_to if named(claim.back_to, (copy.id for copy in copies)) is not None else None
        return None

    def _note_older(self, than: SnapshotId, copies: Sequence[Copy]) -> None:
        self._older = tuple(sorted({copy.id for copy in copies if copy.id < than}, reverse=True))

    def _go_back(self, wanted: str, copies: Sequence[Copy]) -> ResumePoint:
        """Return the snapshot that the user named, and set all newer ones aside: they stay, and no start uses them.

        Raises:
            ConfigError: the run has no such snapshot.
            SnapshotCorrupt: it cannot be used. Nothing was set aside.
        """
        run = f"run {self._settings.run!r} in {self._settings.store}"
        known = {copy.id for copy in copies}
        snapshot = named(wanted, known)
        if snapshot is None:
            raise no_such_snapshot(run, wanted, known)
        meant = [copy for copy in copies if copy.id == snapshot]
        point = self._finder(goes_back=True).find(meant, lambda copy, parts: self._note(Header(copy, parts)))
        if point is None:
            raise ConfigError(f"snapshot {snapshot} belongs to another run of this name, from before --fresh")
        newer = frozenset(other for other in known if other > snapshot)
        local = self._pipeline.local
        for store in [self._remote, *([] if local is None else [local.store])]:
            for other in sorted(newer):  # in both: a copy in memory, or on the local disk, may be stored later
                reason = f"{SET_ASIDE}the run went back to {snapshot}"
                commit.quarantine(store, self._keys, other, reason, self._context.host, Deadline.after(CALL_S))
        if newer:
            self._context.say(
                f"the run goes back to snapshot {snapshot}: {len(newer)} newer ones are set aside. They stay in the "
                "store, and no start uses them; harness verify --lift brings them back"
            )
        self._note_older(snapshot, copies)
        self._set_aside = newer
        return point

    def _check_nothing_is_lost(self, known: records.Survey) -> None:
        """Raise if the run has snapshots, but would begin at step 0 (I10).

        Raises:
            SnapshotCorrupt: each of them is quarantined.
            _Contradiction: none is listed, although one was made durable here, or a recorded end says so.
        """
        durable = self._pipeline.steps.durable
        if durable is None and not known.quarantined:
            durable = self._durable_before()
        if durable is not None and not known.quarantined:
            raise _Contradiction(f"it lists no snapshot, but step {durable} was durable there")
        for snapshot in sorted(known.quarantined, reverse=True):
            with contextlib.suppress(NotFound):  # retired since
                manifest = records.read_manifest(self._remote, self._keys, snapshot, Deadline.after(CALL_S))
                if manifest.run_id == self._run_id:
                    raise SnapshotCorrupt(
                        "this run has snapshots, and all of them are quarantined: see harness ls. "
                        "Nothing was started; --fresh starts at step 0"
                    )

    def _durable_before(self) -> int | None:
        """Return the durable step in the run's newest recorded end before ours; `None` if there is none."""
        deadline = Deadline.after(CALL_S)
        for number in self._numbers_before():
            with contextlib.suppress(NotFound, SnapshotCorrupt):
                if records.read_claim(self._remote, self._keys, number, deadline).run_id != self._run_id:
                    return None  # older generations are from before a --fresh
                return records.read_done(self._remote, self._keys, number, deadline).step
        return None

    def _changed(self, survey: records.Survey) -> records.Survey | None:
        """Return the run as it is now, if commits were added or removed since `survey`; else `None`."""
        with contextlib.suppress(CloudError, SnapshotCorrupt):
            now = self._survey()
            gone = set(survey.commits) - set(now.commits) - now.quarantined
            if gone or set(now.commits) - set(survey.commits):
                return now
        return None

    # ---- after the search -------------------------------------------------------------------------------------------

    def _numbers_before(self) -> range:
        """Return the numbers of the newest generations before ours, newest first."""
        number = self._generation.number
        return range(number - 1, max(0, number - 1 - _LOOKED_BACK), -1)

    def _look_back(self) -> None:
        """Report when the trainer of the attempt before ours was last alive, by its journal."""
        if not self._start.looks_back:
            return
        ended_at = None
        with contextlib.suppress(CloudError):
            for number in self._numbers_before():
                ended = last_lived_at(self._remote, self._keys, number, Deadline.after(CALL_S))
                if ended is not None:
                    age_s = (datetime.datetime.now(datetime.UTC) - ended).total_seconds()
                    ended_at = time.monotonic() - age_s
                    break
        self._note(LookedBack(ended_at))

    def _abandon_stale(self, point: ResumePoint | None) -> None:
        """Abandon unfinished uploads of older generations: they cost money. Only a local `point`'s is continued."""
        local, deadline = self._pipeline.local, Deadline.after(CALL_S)
        try:
            spared = None
            if local is not None and point is not None and point.tier == "local":
                spared = records.read_manifest(local.store, self._keys, point.id, deadline).directory
            retire.abandon_stale(self._remote, self._keys, self._generation.number, spared, deadline)
        except (CloudError, SnapshotCorrupt) as err:
            self._emit(events.UpkeepFailed(tier="remote", reason=str(err)))
