"""Where a generation comes from: which run it belongs to, its claim, and the snapshot it resumes; and who comes after.

Owns the first words with the store at a start: survey, identity, claim, handover, resume; and the look for a newer
generation. Everything that waits for a store runs in a thread; what it found is told in the main thread through `post`.
A store that is down delays a claim, never a step; but a run whose snapshots cannot be known is not started at step 0
(I10): it waits, and says so.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cloud.errors import CloudError, NotFound, Unavailable
from cloud.notice import Deadline
from cloud.pool import Pool
from harness.agent.generation import Generation
from harness.agent.journal import Journal, last_lived_at
from harness.agent.resume.finder import Copy, Finder, MemoryCopy, ResumePoint, SnapshotsMissing, stored_copies
from harness.agent.save.pipeline import SavePipeline
from harness.agent.trainers.child import script_of
from harness.config.settings import Settings
from harness.core import events
from harness.core.manifest import FORMAT, STOPPED_EARLY, Claim, Done
from harness.core.snapshot import MAX_GENERATION, RunKeys, SnapshotId
from harness.core.words import without_secrets
from harness.errors import ConfigError, HarnessError, NoSpace, SnapshotCorrupt
from harness.ipc.slots import SlotRecord
from harness.snapshots import commit, handover

FIRST_ANSWER_S = 10.0  # how long a start waits for the store before it goes on without
AGAIN_S = 5.0  # how long a restart in place waits for it
CALL_S = 60.0
STALE_S = 60.0  # how long a list may hide what the store holds, before a start is refused
_ASK_AGAIN_S = 2.0
_LOOKED_BACK = 5  # generations: one that died while it waited has no journal
_T = TypeVar("_T")
_NOBODY_KNOWS = 0  # instead of a generation that is awaited: the store has not told


class _Contradiction(CloudError):
    """The store says one thing by its list, and another by what it holds."""

    retryable = True

    def refusal(self, store: str) -> ConfigError:
        return ConfigError(
            f"the lists of {store} cannot be trusted: {self}. Nothing was started; if its snapshots were removed on "
            "purpose, --fresh starts at step 0"
        )


@dataclass(frozen=True)
class _Opened:
    """A new generation: what was known of the run, and why it is not claimed yet, if so."""

    known: commit.Survey | None
    generation: Generation
    unclaimed: str | None


class Finding(enum.Enum):
    """How far the search for a resume point is. PENDING → READY, NOTHING or FAILED; a new generation begins again."""

    PENDING = "pending"
    READY = "ready"
    NOTHING = "nothing"
    FAILED = "failed"


class Startup:
    """The current generation, and what it resumes. Main thread only, but for the threads it starts itself."""

    def __init__(
        self,
        settings: Settings,
        keys: RunKeys,
        host: str,
        command: Sequence[str],
        pipeline: SavePipeline,
        journal: Journal,
        post: Callable[[Callable[[], None]], None],
        on_change: Callable[[], None],
        refuse: Callable[[ConfigError], None],
        superseded: Callable[[Claim], None],
        fatal: Callable[[BaseException], None],
        say: Callable[[str], None],
    ) -> None:
        """Asks nothing yet.

        Args:
            settings: of the run.
            keys: of the run.
            host: for records.
            command: the trainer's command line, remembered by the claim but for what looks secret.
            pipeline: tiers, and slots of earlier lives.
            journal: of this agent.
            post: runs something in the main thread.
            on_change: called in the main thread when more is known of the resume.
            refuse: called in the main thread when a store that answers late shows that the run must not start.
            superseded: called in the main thread when a newer generation asks for the run.
            fatal: called from a thread that met a bug.
            say: a word to the user.
        """
        self._settings, self._keys, self._host, self._command = settings, keys, host, without_secrets(command)
        self._pipeline, self._journal, self._post, self._say = pipeline, journal, post, say
        self._on_change, self._refuse, self._fatal = on_change, refuse, fatal
        self._superseded = superseded
        self._agent = secrets.token_hex(8)
        self._generations: list[Generation] = []
        self._over: Done | None = None
        self._fixed = self._inherits = False
        self._prefetched: ResumePoint | None = None
        self._tried: tuple[SnapshotId, ...] = ()
        self.place = ""
        """Names the lock that this agent holds; set once it does."""
        self.awaiting = False
        """Whether an older generation is being waited for: nothing of ours exists yet."""
        self.unreachable = False
        """Whether the search for a resume point waits for a store that does not answer."""
        self.only_here = False
        """While one is: whether this machine holds a snapshot that is newer than any in the store."""
        self.looked_back = False
        """Whether it has been asked when the life before this agent's first one ended."""
        self.last_ended_at: float | None = None
        """When it did, monotonic, by this host's wall clock; `None` if nobody knows."""
        self.generation = Generation(0, "", secrets.token_hex(8))
        self.finding = Finding.PENDING
        self.point: ResumePoint | None = None
        self.head: tuple[str, str, SlotRecord] | None = None
        self.error: HarnessError | None = None
        self._search_number = 0
        self._closed = threading.Event()

    def begin(self, begun: Callable[[], None]) -> None:
        """The first generation of this agent. Returns at once.

        `begun` is called in the main thread when it is there: once the store has answered, or has not for some seconds.
        Instead of it `refuse` is, where the run is finished, or another script's, or the store cannot be used.
        """
        fresh, floor = self._settings.fresh, self._next_here()
        inherited = "" if fresh else self._pipeline.run_id  # slots of another agent tell it while the store has yet to

        def ask() -> _Opened:
            known = self._first_survey()
            run_id = secrets.token_hex(16) if fresh or (known is not None and not known.run_id) else inherited
            self._inherits = known is None and bool(inherited)
            return self._open(known, known.run_id if known and known.run_id and not fresh else run_id, floor, fresh)

        def begin(opened: _Opened | None) -> None:
            if opened is None:
                self._inherits = bool(inherited)
                run_id = secrets.token_hex(16) if fresh else inherited
                opened = _Opened(None, self._made(floor, run_id), "the store has not answered")
            self.unreachable = opened.known is None
            self._take(opened, fresh=fresh)
            self._thread("harness-newer", self._look_for_newer)
            begun()

        self._aside("harness-begin", 2 * FIRST_ANSWER_S, ask, begin)

    def begin_again(self, begun: Callable[[bool], None]) -> None:
        """The next generation, for trainers that are started in place. Returns at once; a store that is down is let be.

        `begun` is called in the main thread, within seconds: False if another agent has claimed the run since, so that
        nothing is begun; then `superseded` was called before it.
        """
        before, floor = self.generation, self._next_here()
        self._search_number += 1  # what the search for the dead one's resume point finds is nobody's any more

        def ask() -> _Opened | Claim:
            known = None
            with contextlib.suppress(CloudError, SnapshotCorrupt):
                known = commit.survey(self._pipeline.remote.store, self._keys, Deadline.after(AGAIN_S))
                if (newest := known.last_claim) is not None and self._is_overtaken(before, newest):
                    return newest
            return self._open(known, before.run_id, floor, fresh=False)

        def begin(opened: _Opened | Claim | None) -> None:
            if isinstance(opened, Claim):
                self._superseded(opened)
                return begun(False)
            made = opened or _Opened(None, self._made(floor, before.run_id), "the store has not answered")
            self._take(made, fresh=False)
            return begun(True)

        self._aside("harness-begin", 2 * AGAIN_S, ask, begin)

    def _is_overtaken(self, ours: Generation, newest: Claim) -> bool:
        """Whether another agent asks for the run. One of ours that is not claimed yet asks itself: it gets a number."""
        return newest.agent != self._agent and newest.generation > ours.number and ours.claimed.is_set()

    def adopt(self, generation: Generation) -> None:
        """A live trainer whose agent died: its generation goes on, and nothing is resumed."""
        generation.claimed.clear()  # we look whether it stands, and under which number
        self.generation, self._fixed = generation, True
        self._generations.append(generation)
        self._journal.generation = generation.number
        self._claim_later(generation, "the agent was replaced", fresh=False)
        self._thread("harness-newer", self._look_for_newer)

    def end(self, outcome: str, deadline: Deadline) -> None:
        """Record how it ended, for each generation of ours that was claimed. Blocks. Raises CloudError.

        IMPORTANT: only when no tier can commit any more (I5).
        """
        pool = Pool(1, "harness-end")
        try:
            pool.submit(self._record_end, outcome, deadline).result(max(0.0, deadline.remaining_s))
        except TimeoutError as err:
            raise Unavailable("it has not answered in time") from err
        finally:
            pool.shutdown()

    def _record_end(self, outcome: str, deadline: Deadline) -> None:
        store, step = self._pipeline.remote.store, self._pipeline.steps.durable
        if self._over is not None:
            outcome, step = self._over.outcome, self._over.step  # the one before us; later starts look at the newest
        for generation in self._generations:
            if generation.claimed.is_set():
                commit.end(store, self._keys, generation.number, generation.nonce, outcome, step, deadline)

    def leave(self, err: HarnessError) -> None:
        """There will be no resume point: whoever waits for it is told why."""
        self._search_number += 1
        self.finding, self.error = Finding.FAILED, err
        self._on_change()

    def close(self) -> None:
        """No thread of ours begins anything any more."""
        self._closed.set()

    # ---- identity ---------------------------------------------------------------------------------------------------

    def _first_survey(self) -> commit.Survey | None:
        """What the store knows of the run; `None` if it does not answer in time (we go on asking, and say so)."""
        try:
            known = commit.survey(self._pipeline.remote.store, self._keys, Deadline.after(FIRST_ANSWER_S))
        except SnapshotCorrupt as err:
            raise ConfigError(f"run {self._settings.run!r} in {self._settings.store}: {err}") from err
        except CloudError as err:
            if not err.retryable:
                raise ConfigError(f"the store {self._settings.store} cannot be used: {err}") from err
            self._journal.emit(events.StoreBlind(store=self._settings.store, reason=str(err)))
            return None
        self._check_identity(known)
        return known

    def _check_identity(self, known: commit.Survey) -> None:
        """Refuse a finished run and another script's; tell what else differs from the last start."""
        claim, settings = known.last_claim, self._settings
        if claim is None or settings.fresh:
            return
        self._check_not_over(known.done)
        if not settings.run_named and not claim.named and _scripts_differ(claim.command, self._command):
            raise ConfigError(
                f"run {settings.run!r} belongs to another script: {' '.join(claim.command)}. Name this one: --run NAME"
            )
        if self._command and claim.command and self._command != claim.command:
            self._say(f"the command differs from the last start's, which was: {' '.join(claim.command)}")
        for name, value in settings.remembered().items():
            before = claim.settings.get(name)
            if before is not None and before != value:
                self._say(f"{name} differs from the last start's: it was {before}, now it is {value}")

    def _check_not_over(self, done: Done | None) -> None:
        """Refuse a run that has come to its end, or that its program stopped early unless it is to go on."""
        run, others = self._settings.run, "--fresh starts it again at step 0, another --run starts another"
        if done is not None and done.outcome == "finished":
            raise ConfigError(f"run {run!r} finished at step {done.step}: {others}")
        if done is not None and done.outcome == STOPPED_EARLY and not self._settings.continue_:
            where = "from its beginning" if done.step is None else f"from step {done.step}"
            raise ConfigError(f"run {run!r} was stopped early by its own program: --continue goes on {where}, {others}")

    # ---- claim ------------------------------------------------------------------------------------------------------

    def _next_here(self) -> int:
        """A number above those that this host knows of."""
        return 1 + max([self.generation.number, *(made.number for _, made in self._pipeline.handed_over())])

    def _made(self, number: int, run_id: str) -> Generation:
        made = Generation(number, run_id, secrets.token_hex(8))
        self._generations.append(made)
        return made

    def _open(self, known: commit.Survey | None, run_id: str, floor: int, fresh: bool) -> _Opened:
        """A new generation, claimed if the store answers. In a thread.

        Raises:
            ConfigError: the store does not let it be claimed.
        """
        if known is None:
            return _Opened(None, self._made(floor, run_id), "the store has not answered")
        if (number := max(known.next_generation, floor)) > MAX_GENERATION:
            raise ConfigError(f"no generation can follow {number - 1}: run under another name, or from another prefix")
        made = self._made(number, run_id)
        try:
            self._claim(made, Deadline.after(FIRST_ANSWER_S), fresh=fresh)
        except CloudError as err:
            if not err.retryable:
                raise ConfigError(f"the store {self._settings.store} cannot be written: {err}") from err
            return _Opened(known, made, str(err))
        return _Opened(known, made, None)

    def _take(self, opened: _Opened, *, fresh: bool) -> None:
        """A new generation is ours: claimed later if it is not yet; and the search for its origin."""
        generation = self.generation = opened.generation
        self._journal.generation = generation.number
        if opened.unclaimed is not None and generation.run_id:
            self._claim_later(generation, opened.unclaimed, fresh=fresh)
        self._find(opened.known, fresh=fresh)

    def _claim(self, generation: Generation, deadline: Deadline, *, fresh: bool) -> None:
        wanted = Claim(
            format=FORMAT,
            run_id=generation.run_id,
            generation=generation.number,
            nonce=generation.nonce,
            claimed_at=commit.utc_now(),
            host=self._host,
            pid=os.getpid(),
            fresh=fresh,
            parent=generation.parent,
            command=self._command,
            named=self._settings.run_named,
            settings=self._settings.remembered(),
            agent=self._agent,
            place=self.place,
            continues=self._settings.continue_,
        )
        # nothing of ours exists yet that could be another run's
        begins = not fresh and not self._fixed and not self._inherits
        standing = commit.claim(self._pipeline.remote.store, self._keys, wanted, deadline, join=begins)
        generation.number, generation.run_id = standing.generation, standing.run_id
        self._journal.claimed = max(self._journal.claimed, generation.number)
        if generation is self.generation:
            self._journal.generation = generation.number
        self._journal.emit(events.Claimed(generation=generation.number, run_id=generation.run_id))
        generation.claimed.set()

    def _claim_later(self, generation: Generation, reason: str, *, fresh: bool) -> None:
        self._journal.emit(events.ClaimDeferred(generation=generation.number, reason=reason))

        def attempt() -> None:
            while not self._closed.is_set() and not generation.claimed.is_set():
                try:
                    return self._claim(generation, Deadline.after(CALL_S), fresh=fresh)
                except CloudError as err:
                    if not err.retryable and self.awaiting:  # nothing of ours trains yet, and this would wait for ever
                        cannot = ConfigError(f"the store {self._settings.store} cannot be written: {err}")
                        return self._post(partial(self._refuse, cannot))
                self._closed.wait(_ASK_AGAIN_S)
            return None

        self._thread("harness-claim", attempt)

    # ---- handover ---------------------------------------------------------------------------------------------------

    def _look_for_newer(self) -> None:
        """Whether another agent has claimed the run after us: then it waits for us."""
        told = 0
        while not self._closed.wait(handover.LOOK_S):
            generation, store = self.generation, self._pipeline.remote.store
            if not generation.claimed.is_set():
                continue
            with contextlib.suppress(CloudError, SnapshotCorrupt):  # asked again; the tiers report a store that is down
                deadline = Deadline.after(CALL_S)
                newer = handover.newer_claim(store, self._keys, generation.number, self._agent, deadline)
                if newer is not None and newer.generation > told:
                    told = newer.generation  # and go on: it comes to nothing if ours has a higher number by then
                    self._post(partial(self._superseded, newer))

    def _await_elders(self, predecessors: handover.Predecessors, generation: Generation) -> None:
        """Wait until no older generation can commit any more, and prefetch meanwhile. Resume thread.

        Raises:
            ConfigError: an older one has ended the run.
            CloudError: the store cannot be asked, for good.
        """
        told = {_NOBODY_KNOWS}
        began = time.monotonic()
        while awaited := self._look(predecessors, generation):
            self.awaiting = True  # before it is told: a notice may follow at once
            for number in awaited:
                if number not in told:
                    told.add(number)
                    claim = predecessors.claim_of(number)
                    host, silence_s = claim.host if claim else "?", self._settings.handover_s
                    self._journal.emit(events.HandoverAwaited(generation=number, host=host, silence_s=silence_s))
            self._prefetch(generation)
            if self._closed.wait(handover.AWAIT_S):
                return
        self.awaiting = False
        if len(told) > 1:
            self._journal.emit(events.HandoverOver(seconds=time.monotonic() - began))
        self._over = predecessors.over
        self._check_not_over(predecessors.over)
        self._over = None

    def _look(self, predecessors: handover.Predecessors, generation: Generation) -> list[int]:
        """Who is awaited."""
        if not generation.claimed.is_set():
            return [_NOBODY_KNOWS]  # its number may be another's, who is older then
        predecessors.generation, predecessors.run_id = (
            generation.number,
            generation.run_id,
        )  # as they stand in the store now
        try:
            return predecessors.look(self._pipeline.remote.store, Deadline.after(CALL_S))
        except CloudError as err:
            if not err.retryable:
                raise
            self._journal.emit(events.StoreBlind(store=self._settings.store, reason=str(err)))
            return [_NOBODY_KNOWS]

    def _is_newer_here(self, survey: commit.Survey, memory: Sequence[MemoryCopy], generation: Generation) -> bool:
        """Whether memory or the local tier hold a snapshot of this run that is newer than any in the store."""
        here, local = [copy.id for copy in memory], self._pipeline.local
        if local is not None:
            with contextlib.suppress(CloudError, SnapshotCorrupt, ValueError):
                newest = max(commit.survey(local.store, self._keys, Deadline.after(CALL_S)).commits)
                manifest = commit.read_manifest(local.store, self._keys, newest, Deadline.after(CALL_S))
                here += [newest] if manifest.run_id == generation.run_id else []
        return any(copy > max(survey.commits, default=SnapshotId(1, 0)) for copy in here)

    def _prefetch(self, generation: Generation) -> None:
        """Fetch the newest snapshot there is now: most likely the older generation's last, or its last but one."""
        if self._prefetched is not None:
            return
        store = self._pipeline.remote.store
        with contextlib.suppress(CloudError, SnapshotCorrupt, NoSpace):  # it is all done again, in earnest
            known = commit.survey(store, self._keys, Deadline.after(CALL_S))
            if known.commits == self._tried:
                return
            self._tried = known.commits
            finder = self._finder(generation)
            copies = stored_copies(store, "remote", known.commits)
            self._prefetched = finder.find(copies, lambda copy, record: None)

    # ---- resume -----------------------------------------------------------------------------------------------------

    def _find(self, known: commit.Survey | None, *, fresh: bool) -> None:
        """Locate, fetch and verify in a thread, while the trainer imports torch."""
        self._search_number += 1
        number, generation = self._search_number, self.generation
        self.finding, self.point, self.head, self.error = Finding.PENDING, None, None, None
        if fresh:
            self.looked_back = True
            self._found(number, None, "--fresh")
            return
        memory = self._pipeline.memory_copies(generation.run_id)

        self._thread("harness-resume", lambda: self._find_until_known(known, memory, generation, number))

    def _find_until_known(
        self, survey: commit.Survey | None, memory: Sequence[MemoryCopy], generation: Generation, number: int
    ) -> None:
        """Search until the stores have answered; tell what came of it. Resume thread."""
        predecessors, over = None, self._fixed
        stale_since: float | None = None
        while not self._closed.is_set():
            try:
                if survey is None and not memory:
                    survey = commit.survey(self._pipeline.remote.store, self._keys, Deadline.after(CALL_S))
                if survey is not None and not generation.run_id:
                    self._identify_late(generation, survey)
                if survey is not None and not over:
                    predecessors = predecessors or self._elders(generation)
                    self.only_here = self._is_newer_here(survey, memory, generation)
                    self._await_elders(predecessors, generation)
                    if self._closed.is_set():
                        return None
                    survey, over = commit.survey(self._pipeline.remote.store, self._keys, Deadline.after(CALL_S)), True
                    self._check_list(survey, generation)
                point = self._search(survey, memory, generation, number)
            except (_Contradiction, SnapshotsMissing) as err:
                stale_since = stale_since or time.monotonic()
                if time.monotonic() - stale_since > STALE_S:
                    if isinstance(err, SnapshotsMissing):
                        return self._post(partial(self._failed, number, err))
                    return self._post(partial(self._refuse, err.refusal(self._settings.store)))
                survey, over = None, self._fixed
                self.unreachable = True
                self._journal.emit(events.StoreBlind(store=self._settings.store, reason=str(err)))
                self._closed.wait(_ASK_AGAIN_S)
            except CloudError as err:
                if not err.retryable:
                    lost = SnapshotCorrupt(f"the store {self._settings.store} cannot be read: {err}")
                    return self._post(partial(self._failed, number, lost))
                self.unreachable = True
                self._journal.emit(events.StoreBlind(store=self._settings.store, reason=str(err)))
                self._closed.wait(_ASK_AGAIN_S)
            except ConfigError as err:
                return self._post(partial(self._refuse, err))
            except HarnessError as err:
                if survey is not None and (newer := self._changed(survey)) is not None:
                    survey = newer  # what could not be used was retired while we looked at it
                    continue
                return self._post(partial(self._failed, number, err))
            else:
                self._post(partial(self._found, number, point, "no snapshot of this run anywhere"))
                self._look_back(generation)
                if survey is not None and not self._fixed:
                    self._fixed = True
                    self._abandon_stale(point, generation)
                return None
        return None

    def _check_list(self, survey: commit.Survey, generation: Generation) -> None:
        """A list that does not show what was written a moment ago may hide snapshots as well (I10).

        Stores list what they hold; a cache in front of one, or one that is repaired, may not.
        """
        newest = survey.last_claim.generation if survey.last_claim is not None else 0
        if newest < generation.number:
            raise _Contradiction(f"its list ends at generation {newest}, and {generation.number} is claimed")

    def _look_back(self, generation: Generation) -> None:
        """When the trainer of the life before ours last lived, by its journal. Nobody waits for it. Resume thread."""
        if self.looked_back:
            return  # that life was one of ours
        ended_at = None
        with contextlib.suppress(CloudError):
            for number in range(generation.number - 1, max(0, generation.number - 1 - _LOOKED_BACK), -1):
                ended = last_lived_at(self._pipeline.remote.store, self._keys, number, Deadline.after(CALL_S))
                if ended is not None:
                    age_s = (datetime.datetime.now(datetime.UTC) - ended).total_seconds()
                    ended_at = time.monotonic() - age_s
                    break

        def note() -> None:
            self.looked_back, self.last_ended_at = True, ended_at

        self._post(note)

    def _elders(self, generation: Generation) -> handover.Predecessors:
        return handover.Predecessors(
            self._keys,
            generation.number,
            run_id=generation.run_id,
            agent=self._agent,
            place=self.place,
            silence_s=self._settings.handover_s,
        )

    def _changed(self, survey: commit.Survey) -> commit.Survey | None:
        """The run as it is now, if there are commits that `survey` does not know, or some it does are gone."""
        with contextlib.suppress(CloudError, SnapshotCorrupt):
            now = commit.survey(self._pipeline.remote.store, self._keys, Deadline.after(CALL_S))
            gone = set(survey.commits) - set(now.commits) - now.quarantined
            if gone or set(now.commits) - set(survey.commits):
                return now
        return None

    def _abandon_stale(self, point: ResumePoint | None, generation: Generation) -> None:
        """Uploads that older generations have left unfinished cost money; nobody goes on with them but we, with one."""
        remote, local = self._pipeline.remote.store, self._pipeline.local
        deadline = Deadline.after(CALL_S)
        try:
            spared = None
            if local is not None and point is not None and point.tier == "local":
                spared = commit.read_manifest(local.store, self._keys, point.id, deadline).directory
            commit.abandon_stale(remote, self._keys, generation.number, spared, deadline)
        except (CloudError, SnapshotCorrupt) as err:
            self._journal.emit(events.UpkeepFailed(tier="remote", reason=str(err)))

    def _identify_late(self, generation: Generation, known: commit.Survey) -> None:
        """The store answers at last: now the run has an identity, and the generation its number. Resume thread."""
        self._check_identity(known)
        generation.run_id = known.run_id or secrets.token_hex(16)
        generation.number = max(known.next_generation, generation.number)
        self._claim_later(generation, "the store had not answered", fresh=False)

    def _finder(self, generation: Generation) -> Finder:
        return Finder(self._keys, generation.run_id, self._host, self._journal.emit, self._settings.slot_disk)

    def _search(
        self, survey: commit.Survey | None, memory: Sequence[MemoryCopy], generation: Generation, number: int
    ) -> ResumePoint | None:
        """All tiers' copies, newest first; what somebody died over is committed before looking. Resume thread."""
        copies: list[Copy] = list(memory)
        remote, local = self._pipeline.remote, self._pipeline.local
        if survey is not None:
            finished = commit.finish_complete(remote.store, self._keys, generation.run_id, Deadline.after(CALL_S))
            copies += stored_copies(remote.store, "remote", [*survey.commits, *finished])
        if local is not None:
            try:
                commit.finish_complete(local.store, self._keys, generation.run_id, Deadline.after(CALL_S))
                at_hand = commit.survey(local.store, self._keys, Deadline.after(CALL_S))
                copies += stored_copies(local.store, "local", at_hand.commits)
            except CloudError as err:  # a broken disk must not keep a run from its durable snapshots
                self._journal.emit(events.Rejected(snapshot="all", tier="local", reason=str(err)))

        def head(copy: Copy, record: SlotRecord) -> None:
            self._post(lambda: self._heard(number, copy, record))

        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None:
            if prefetched.id == max((copy.id for copy in copies), default=None):
                return prefetched
            prefetched.slot.close()  # there is a newer one now, and memory for one of them
        point = self._finder(generation).find(copies, head)
        if point is None and survey is not None:
            self._check_nothing_is_lost(survey, generation)
        return point

    def _check_nothing_is_lost(self, known: commit.Survey, generation: Generation) -> None:
        """Raise where the run has snapshots, and it would begin anew all the same (I10).

        Raises:
            SnapshotCorrupt: each of them is in quarantine.
            _Contradiction: none is listed, though one was made durable here, or an end says so.
        """
        run_id, durable = generation.run_id, self._pipeline.steps.durable
        if durable is None and not known.quarantined:
            durable = self._durable_before(generation)
        if durable is not None and not known.quarantined:
            raise _Contradiction(f"it lists no snapshot, and step {durable} was durable there")
        for snapshot in sorted(known.quarantined, reverse=True):
            with contextlib.suppress(NotFound):  # retired since
                store, deadline = self._pipeline.remote.store, Deadline.after(CALL_S)
                if commit.read_manifest(store, self._keys, snapshot, deadline).run_id == run_id:
                    raise SnapshotCorrupt(
                        "this run has snapshots, and all of them are quarantined: see harness ls. "
                        "Nothing was started; --fresh starts at step 0"
                    )

    def _durable_before(self, generation: Generation) -> int | None:
        """The step that the newest end of the run before us says was durable; `None` if it says none."""
        store, deadline = self._pipeline.remote.store, Deadline.after(CALL_S)
        for number in range(generation.number - 1, max(0, generation.number - 1 - _LOOKED_BACK), -1):
            with contextlib.suppress(NotFound, SnapshotCorrupt):
                if commit.read_claim(store, self._keys, number, deadline).run_id != generation.run_id:
                    return None  # what was before a --fresh
                return commit.read_done(store, self._keys, number, deadline).step
        return None

    def _heard(self, number: int, copy: Copy, record: SlotRecord) -> None:
        if number == self._search_number and self.finding is Finding.PENDING:
            self.head = (str(copy.id), copy.tier, record)
            self._on_change()

    def _found(self, number: int, point: ResumePoint | None, why_none: str) -> None:
        if number != self._search_number:
            if point is not None and point.index is None:
                point.slot.close()
            return None
        self.unreachable = False
        if point is None and self.head is not None:
            return self._failed(number, SnapshotCorrupt(f"snapshot {self.head[0]} is gone, and so is every other one"))
        if point is None:
            self.finding = Finding.NOTHING
            self._journal.emit(events.NothingToResume(reason=why_none))
        else:
            self.finding = Finding.READY
            self.generation.parent = str(point.id)
            self.point = self._pipeline.note_resumed(point, self.generation)
        self._on_change()
        return None

    def _failed(self, number: int, err: HarnessError) -> None:
        if number == self._search_number:
            self.finding, self.error, self.awaiting, self.unreachable = Finding.FAILED, err, False, False
            self._say(str(err))
            self._on_change()

    def _aside(self, name: str, within_s: float, work: Callable[[], _T], then: Callable[[_T | None], None]) -> None:
        """Run `work` in a thread, and `then` in the main thread with what it gave; with `None` after `within_s`.

        After half of that the journal says that it is being waited for.

        A deadline ends no system call: on a hung NFS whoever makes one hangs with it.
        """
        waiting = [then]

        def settle(found: _T | None) -> None:
            if waiting and not self._closed.is_set():
                waiting.pop()(found)

        def refused(err: ConfigError) -> None:
            if waiting and not self._closed.is_set():
                waiting.clear()
                self._refuse(err)

        def ask() -> None:
            try:
                found = work()
            except ConfigError as err:
                self._post(partial(refused, err))
            else:
                self._post(partial(settle, found))

        def note() -> None:
            if waiting:
                self._journal.emit(events.StoreBlind(store=self._settings.store, reason="it has not answered yet"))

        def give_up() -> None:
            if not self._closed.wait(within_s / 2):
                self._post(note)
            if not self._closed.wait(within_s / 2):
                self._post(partial(settle, None))

        self._thread(name, ask)
        self._thread(f"{name}-patience", give_up)

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        def root() -> None:
            try:
                work()
            except Exception as err:  # noqa: BLE001  the thread's root
                self._fatal(err)

        threading.Thread(target=root, name=name, daemon=True).start()


def _scripts_differ(before: Sequence[str], now: Sequence[str]) -> bool:
    first, second = (script_of(command) if command else None for command in (before, now))
    return first is not None and second is not None and os.path.normpath(first) != os.path.normpath(second)
