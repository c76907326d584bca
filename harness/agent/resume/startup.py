"""The start of a generation: the run that it belongs to, its claim, and the snapshot that it resumes.

Owns the current search for a resume point, and its result so far. Every call to a store runs in a thread; the main
thread takes over the result, and alone writes the attributes that others read here. A store that is down delays a
claim, never a step. But a run whose snapshots cannot be known is not started at step 0 (I10): it waits, and logs that.

    begin ──▶ survey, identity, claim (within seconds, or later) ──▶ ResumeSearch ──▶ READY | NOTHING | FAILED
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.agent.context import Context
from harness.agent.generation import Generation
from harness.agent.journal import Journal
from harness.agent.resume import search
from harness.agent.resume.claims import Claims
from harness.agent.resume.finder import Finder
from harness.agent.resume.identity import check_identity
from harness.agent.resume.search import Progress, ResumeSearch, Start
from harness.agent.resume_point import ResumePoint
from harness.agent.save.pipeline import SavePipeline
from harness.config.program import digest_of, words_of
from harness.core import events
from harness.core.manifest import Claim, Done
from harness.core.rehearsal import VARIABLE
from harness.core.snapshot import MAX_GENERATION, SnapshotId
from harness.core.words import without_secrets
from harness.errors import ConfigError, HarnessError, SnapshotCorrupt
from harness.snapshots import records
from harness.snapshots.candidates import named

FIRST_ANSWER_S = 10.0  # how long a start waits for the store before it continues without it
AGAIN_S = 5.0  # how long a restart in place waits for the store
_T = TypeVar("_T")


class Finding(enum.Enum):
    """How far the search for a resume point is. PENDING → READY, NOTHING or FAILED; a new generation begins again."""

    PENDING = "pending"
    READY = "ready"
    NOTHING = "nothing"
    FAILED = "failed"


@dataclass(frozen=True)
class StartupEvents:
    """Callbacks of a start. Each is called in the main thread.

    Attributes:
        changed: more is known about the resume.
        refused: a store shows that the run must not start; it may have started already.
        superseded: a newer generation asks for the run.
    """

    changed: Callable[[], None]
    refused: Callable[[ConfigError], None]
    superseded: Callable[[Claim], None]


@dataclass(frozen=True)
class _Opened:
    """A new generation, with its claim and what the store knows of the run.

    Attributes:
        known: the run, as the store knows it; `None` if the store has not answered.
        generation: the new one; the rest of the agent does not know it yet.
        standing: its claim; `None` while it is not claimed.
        unclaimed: why it is not claimed.
    """

    known: records.Survey | None
    generation: Generation
    standing: Claim | None = None
    unclaimed: str = "the store has not answered"


class Startup:
    """The current generation, and what it resumes. Main thread only."""

    def __init__(
        self,
        context: Context,
        command: Sequence[str],
        pipeline: SavePipeline,
        journal: Journal,
        tell: StartupEvents,
        finder: search.FinderFor | None = None,
    ) -> None:
        """Prepare; no store is asked yet.

        Args:
            context: of the agent.
            command: the trainer's command line; the claim remembers it without what looks secret.
            pipeline: of the run, with its tiers and the slots of earlier attempts.
            journal: of this agent.
            tell: callbacks for the results.
            finder: makes what tries the copies; `None` for one that fetches them into slots.
        """
        self._context, self._command = context, without_secrets(command)
        self._finder_for = finder or self._into_slots
        self._settings, self._pipeline, self._tell = context.settings, pipeline, tell
        self.claims = Claims(context, self._command, pipeline, journal)
        self._search: ResumeSearch | None = None
        self._settled = self._inherits = False
        self._closed = threading.Event()
        self._over: Done | None = None
        self.awaiting = False
        """Whether the start waits for an older generation; nothing of this generation exists yet."""
        self.unreachable = False
        """Whether the search for a resume point waits for a store that does not answer."""
        self.only_here = False
        """While `awaiting`: whether this machine holds a snapshot that is newer than any in the store."""
        self.looked_back = False
        """Whether the search has looked up when the attempt before this agent's first one ended."""
        self.last_ended_at: float | None = None
        """When that attempt ended, monotonic, computed from this host's wall clock; `None` if unknown."""
        self.finding = Finding.PENDING
        self.point: ResumePoint | None = None
        self.header: search.Header | None = None
        """The snapshot that is being fetched."""
        self.error: HarnessError | None = None
        self.older: tuple[SnapshotId, ...] = ()
        """Snapshots of the run that are older than the one that is resumed, newest first."""
        self._goes_back_to = self._settings.from_
        self._set_aside: frozenset[SnapshotId] = frozenset()

    @property
    def generation(self) -> Generation:
        """The current generation."""
        return self.claims.current

    def begin(self, begun: Callable[[], None]) -> None:
        """Begin the first generation of this agent. Returns at once.

        `begun` is called in the main thread once the store has answered, or has not answered for some seconds.
        `refused` is called instead if the run is finished or belongs to another script, or the store cannot be used.
        """
        fresh, floor = self._settings.fresh, self._next_here()
        inherited = "" if fresh else self._pipeline.run_id  # known from another agent's slots before the store answers

        def ask() -> _Opened:
            if (known := self._first_survey()) is None:
                return _Opened(None, _made(floor, secrets.token_hex(16) if fresh else inherited))
            run_id = known.run_id if known.run_id and not fresh else secrets.token_hex(16)
            return self._open(known, run_id, floor, fresh=fresh, joins=not fresh)

        def begin(opened: _Opened | None) -> None:
            opened = opened or _Opened(None, _made(floor, secrets.token_hex(16) if fresh else inherited))
            self._inherits = opened.known is None and bool(inherited)
            self.unreachable = opened.known is None
            self._take(opened, fresh=fresh)
            self.claims.watch_newer(self._tell.superseded)
            begun()

        self._aside("harness-begin", 2 * FIRST_ANSWER_S, ask, begin)
        if VARIABLE not in os.environ:  # this is no rehearsal
            self._context.thread("harness-rehearsed", self._say_whether_rehearsed)

    def _say_whether_rehearsed(self) -> None:
        """Print whether `harness rehearse` has shown that this program resumes exactly. Nothing if that is unknown."""
        digest, words = digest_of(self._command or ("",)), words_of(self._command)
        try:
            record = records.read_rehearsal(
                self._pipeline.remote.store, self._context.keys, digest, Deadline.after(FIRST_ANSWER_S)
            )
        except (CloudError, SnapshotCorrupt):
            return
        if record is None:
            self._context.say("not rehearsed: harness rehearse shows whether this program resumes exactly")
        else:
            self._context.say(record.in_words + ("" if record.fits(words) else ", with other arguments"))

    def begin_again(self, begun: Callable[[bool], None]) -> None:
        """Begin the next generation, for trainers that are restarted in place. Returns at once, also with a store down.

        `begun` is called in the main thread, within seconds. Its argument is False if another agent has claimed the run
        since: then nothing is begun, and `superseded` was called before.
        """
        before, floor, joins = self.generation, self._next_here(), self._joins(fresh=False)
        self._stop_search()  # the dead trainer does not need its resume point any more

        def ask() -> _Opened | Claim:
            known = None
            with contextlib.suppress(CloudError, SnapshotCorrupt):
                known = records.survey(self._pipeline.remote.store, self._context.keys, Deadline.after(AGAIN_S))
            if known is None:
                return _Opened(None, _made(floor, before.run_id))
            if (newest := known.last_claim) is not None and self._is_overtaken(before, newest):
                return newest
            if not before.run_id:  # the store did not answer before: only now it is known which run this is
                self._check_identity(known)
            run_id = before.run_id or known.run_id or secrets.token_hex(16)
            return self._open(known, run_id, floor, fresh=False, joins=joins)

        def begin(opened: _Opened | Claim | None) -> None:
            if isinstance(opened, Claim):
                self._tell.superseded(opened)
                return begun(False)
            self._take(opened or _Opened(None, _made(floor, before.run_id)), fresh=False)
            return begun(True)

        self._aside("harness-begin", 2 * AGAIN_S, ask, begin)

    def _is_overtaken(self, ours: Generation, newest: Claim) -> bool:
        """Return whether another agent has claimed the run after us. Without a claim yet, ours will be the newer."""
        return newest.agent != self.claims.agent and newest.generation > ours.number and ours.claimed.is_set()

    def adopt(self, generation: Generation) -> None:
        """Continue the generation of a live trainer whose agent died; nothing is resumed."""
        self._goes_back_to = None
        generation.claimed.clear()  # look again whether the claim stands, and under which number
        self._settled = True
        self.claims.begin(generation)
        self._claim_later(generation, "the agent was replaced", fresh=False)
        self.claims.watch_newer(self._tell.superseded)

    def end(self, outcome: str, deadline: Deadline) -> None:
        """Record `outcome` for each generation of this agent that was claimed. Blocks. Raises CloudError.

        IMPORTANT: only when no tier can commit any more (I5).
        """
        step = self._pipeline.steps.durable
        if self._over is not None:
            outcome, step = self._over.outcome, self._over.step  # the earlier end; later starts look at the newest
        self.claims.end(outcome, step, deadline)

    def leave(self, err: HarnessError) -> None:
        """End the search without a resume point, and tell the trainers why."""
        self._stop_search()
        self.finding, self.error = Finding.FAILED, err
        self._tell.changed()

    def close(self) -> None:
        """Stop the search and the claims: their threads begin nothing new."""
        self._closed.set()
        self._stop_search()
        self.claims.close()

    # ---- a new generation -------------------------------------------------------------------------------------------

    def _first_survey(self) -> records.Survey | None:
        """Return what the store knows of the run; `None` if it does not answer in time (the search asks it again)."""
        store = self._settings.store
        try:
            known = records.survey(self._pipeline.remote.store, self._context.keys, Deadline.after(FIRST_ANSWER_S))
        except SnapshotCorrupt as err:
            raise ConfigError(f"run {self._settings.run!r} in {store}: {err}") from err
        except CloudError as err:
            if not err.retryable:
                raise ConfigError(f"the store {store} cannot be used: {err}") from err
            self._context.emit(events.StoreBlind(store=store, reason=str(err)))
            return None
        self._check_identity(known)
        self._check_wanted(known)
        return known

    def _check_wanted(self, known: records.Survey) -> None:
        """Refuse to go back to a snapshot that does not exist, before the run is claimed."""
        wanted, local = self._settings.from_, self._pipeline.local
        if wanted is None:
            return
        ids = {*known.commits, *(copy.id for copy in self._pipeline.memory_copies(known.run_id))}
        if local is not None:
            with contextlib.suppress(CloudError, SnapshotCorrupt):
                ids |= {*records.survey(local.store, self._context.keys, Deadline.after(AGAIN_S)).commits}
        if named(wanted, ids) is None:
            run = f"run {self._settings.run!r} in {self._settings.store}"
            raise search.no_such_snapshot(run, wanted, ids)

    def _check_identity(self, known: records.Survey) -> None:
        for words in check_identity(known, self._settings, self._command):
            self._context.say(words)

    def _next_here(self) -> int:
        """Return a generation number above all that this host knows."""
        return 1 + max([self.generation.number, *(made.number for _, made in self._pipeline.handed_over())])

    def _joins(self, *, fresh: bool) -> bool:
        """Return whether a claim may join another agent's run: nothing of this generation's own run exists yet."""
        return not fresh and not self._settled and not self._inherits

    def _open(self, known: records.Survey, run_id: str, floor: int, *, fresh: bool, joins: bool) -> _Opened:
        """Make a new generation, and claim it if the store answers. Runs in a thread.

        Raises:
            ConfigError: the store does not let it be claimed.
        """
        if (number := max(known.next_generation, floor)) > MAX_GENERATION:
            raise ConfigError(f"no generation can follow {number - 1}: use another run name, or another prefix")
        made = _made(number, run_id)
        try:
            standing = self.claims.put(made, Deadline.after(FIRST_ANSWER_S), fresh=fresh, joins=joins)
        except CloudError as err:
            if not err.retryable:
                raise ConfigError(f"the store {self._settings.store} cannot be written: {err}") from err
            return _Opened(known, made, unclaimed=str(err))
        return _Opened(known, made, standing)

    def _take(self, opened: _Opened, *, fresh: bool) -> None:
        """Take over a new generation: claim it later if it is not claimed yet, and search for what it resumes."""
        self.claims.begin(opened.generation)
        if opened.standing is not None:
            self.claims.note(opened.generation, opened.standing)
        elif opened.generation.run_id:
            self._claim_later(opened.generation, opened.unclaimed, fresh=fresh)
        self._find(opened.known, fresh=fresh)

    def _claim_later(self, generation: Generation, reason: str, *, fresh: bool) -> None:
        self.claims.put_later(generation, reason, self._on_denied, fresh=fresh, joins=self._joins(fresh=fresh))

    def _on_denied(self, err: CloudError) -> None:
        if self.awaiting:  # nothing trains here yet, and the start would wait forever
            self._tell.refused(ConfigError(f"the store {self._settings.store} cannot be written: {err}"))

    # ---- resume -----------------------------------------------------------------------------------------------------

    def _find(self, known: records.Survey | None, *, fresh: bool) -> None:
        """Locate, fetch and verify in a thread, while the trainer imports torch."""
        self._stop_search()
        self.finding, self.point, self.header, self.error = Finding.PENDING, None, None, None
        self.awaiting = self.only_here = False
        if fresh:
            self.looked_back = True
            return self._found(None, "--fresh")
        generation = self.generation
        start = Start(
            generation=generation,
            known=known,
            memory=[copy for copy in self._pipeline.memory_copies(generation.run_id) if copy.id not in self._set_aside],
            agent=self.claims.agent,
            lock_id=self.claims.lock_id,
            settled=self._settled,
            looks_back=not self.looked_back,
            wanted=self._goes_back_to,
        )
        self._search = ResumeSearch(self._context, self._command, self._pipeline, start, self._finder_for, self._post)
        return self._context.thread("harness-resume", self._search.run)

    def _into_slots(self, run_id: str, _goes_back: bool) -> Finder:
        context = self._context
        return Finder(context.keys, run_id, context.host, context.emit, context.settings.slot_disk)

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.stop()
        self._search = None

    def _post(self, of: ResumeSearch, progress: Progress) -> None:
        self._context.post(lambda: self._on_progress(of, progress))

    def _on_progress(self, of: ResumeSearch, progress: Progress) -> None:
        """Handle a result of a search. From a search that is not current any more, only lasting facts count."""
        match progress:
            case search.LookedBack(ended_at):
                self.looked_back, self.last_ended_at = True, ended_at
            case search.Refused(error, over):
                self._over = over
                self._tell.refused(error)
            case search.Found(point) if of is not self._search:
                if point is not None:
                    point.close()
            case _ if of is not self._search:
                pass
            case search.Awaiting(generations, only_here, news):
                self.awaiting, self.only_here = bool(generations), only_here
                for event in news:
                    self._context.emit(event)
            case search.Unreachable():
                self.unreachable = True
            case search.Identified(run_id, number):
                self.generation.run_id = run_id
                self.generation.number = max(number, self.generation.number)
                self._claim_later(self.generation, "the store had not answered", fresh=False)
            case search.Header():
                self.header = progress
                self._tell.changed()
            case search.Found(point, settled, older, set_aside):
                self._settled = self._settled or settled
                self.older, self._goes_back_to = older, None
                self._set_aside |= set_aside
                self._found(point, "no snapshot of this run anywhere")
            case search.Failed(error):
                self._failed(error)

    def _found(self, point: ResumePoint | None, why_none: str) -> None:
        self.unreachable = False
        if point is None and self.header is not None:
            gone = f"snapshot {self.header.copy.id} is gone, and so is every other one"
            return self._failed(SnapshotCorrupt(gone))
        if point is None:
            self.finding = Finding.NOTHING
            self._context.emit(events.NothingToResume(reason=why_none))
        else:
            self.finding = Finding.READY
            self.generation.parent = str(point.id)
            self.point = self._pipeline.note_resumed(point, self.generation)
        return self._tell.changed()

    def _failed(self, err: HarnessError) -> None:
        self.finding, self.error, self.awaiting, self.unreachable = Finding.FAILED, err, False, False
        self._context.say(str(err))
        self._tell.changed()

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _aside(self, name: str, within_s: float, work: Callable[[], _T], then: Callable[[_T | None], None]) -> None:
        """Run `work` in a thread, then `then` in the main thread with its result, or with `None` after `within_s`.

        After half of that time the journal notes that the store has not answered yet. A claim that comes back too late
        gets its end together with the others.

        A deadline does not end a system call: on a hung NFS, the thread that makes the call hangs.
        """
        waiting = [then]

        def settle(found: _T | None) -> None:
            if waiting and not self._closed.is_set():
                waiting.pop()(found)
            elif isinstance(found, _Opened) and found.standing is not None:
                self.claims.add_late(found.generation, found.standing)

        def refused(err: ConfigError) -> None:
            if waiting and not self._closed.is_set():
                waiting.clear()
                self._tell.refused(err)

        def ask() -> None:
            try:
                found = work()
            except ConfigError as err:
                self._context.post(partial(refused, err))
            else:
                self._context.post(partial(settle, found))

        def note() -> None:
            if waiting:
                blind = events.StoreBlind(store=self._settings.store, reason="it has not answered yet")
                self._context.emit(blind)

        def give_up() -> None:
            if not self._closed.wait(within_s / 2):
                self._context.post(note)
            if not self._closed.wait(within_s / 2):
                self._context.post(partial(settle, None))

        self._context.thread(name, ask)
        self._context.thread(f"{name}-patience", give_up)


def _made(number: int, run_id: str) -> Generation:
    return Generation(number, run_id, secrets.token_hex(8))
