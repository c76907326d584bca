"""Agents of one run in the real protocol, and a run that watches what they do to its store.

An `Agent` lives as the agent's startup, tier and handover do: survey, claim, wait for the older ones, resume, publish,
verify, retire, sweep, look for a newer one, end. A `Run` makes them move as a schedule says, lets time pass, and checks
after every change of the store what must hold at every moment; tests/model/test_two_agents.py says what that is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import pytest

from cloud.errors import CloudError, NotFound
from cloud.notice import Deadline
from cloud.store import Progress, Receipt, Source
from cloud.testing.memory import MemoryStore
from harness.agent.resume.finder import Finder
from harness.core.manifest import FORMAT, Claim, Manifest, parse_claim, parse_manifest
from harness.core.policy.retention import retain
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit, fetch, records, retire
from harness.snapshots.candidates import stored_copies
from harness.snapshots.dedup import Deduplicator
from harness.snapshots.handover import LOOK_S, Predecessors, newer_claim
from tests.support.interleave import Actor, SteppedStore
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content, ProtocolStore, altered, retrying

_T = TypeVar("_T")
WHOLE_LIST = 1000
PAUSES = 8  # in one move: a newcomer waits for ever for an older one that is heard and not moved
ROUNDS = 40  # in which everybody comes to an end
BEAT_S = 15.0
SILENCE_S = 45.0
WAIT_S = 15.0  # between two looks of a newcomer
HOUR_S = 3600.0


@dataclass(frozen=True)
class Life:
    """What an agent does between its start and its end.

    Attributes:
        snapshots: how many it publishes, unless it is superseded before.
        keep_last, keep_every: retention.
        upkeep: whether it finds the time to verify, retire and sweep.
        restarts: its trainer dies after the first snapshot, and is started in place.
        same_host: it runs where somebody died, if anybody did: it holds that one's lock, and has its local tier.
        leaves: at its end it says `done`; otherwise it dies.
        clock_s, wall_s: what its monotonic and its wall clock show more than the world's.
    """

    snapshots: int = 2
    keep_last: int = 1
    keep_every: int | None = None
    upkeep: bool = True
    restarts: bool = False
    same_host: bool = False
    leaves: bool = True
    clock_s: float = 0.0
    wall_s: float = 0.0


@dataclass(frozen=True)
class Move:
    """After `seconds`, `who` makes its next call with this fate, and goes on until before another call.

    `until`: so many calls, or one of that kind; "end" is the end of its life. Nobody pauses more than `PAUSES` times.
    Three fates are no call's: "land" lets a request arrive that was still on its way; "mute" and "speak" begin and end
    a time in which nobody hears its journal.
    """

    who: int
    until: int | str = 1
    fate: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Sealed:
    """A snapshot that was made on a host, and that the next agent there still finds on its disk."""

    content: Content
    nonce: str


@dataclass(eq=False)
class Operation:
    """One function of the protocol, from the change of the store at which it began.

    `over`: it came to its end. It does not if its agent dies, or loses the store, in the middle.
    """

    began: int
    agent: Agent | None = None
    name: str = ""
    over: bool = False


class Watched(ProtocolStore):
    """Calls `changed` after every change of the store."""

    changed: Callable[[str, bool], None]

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        receipt = super().put(key, source, deadline=deadline, progress=progress)
        self.changed(key, True)
        return receipt

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        super().copy(source, key, expected, deadline=deadline)
        self.changed(key, True)

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        super().put_if_absent(key, data, deadline=deadline)
        self.changed(key, True)

    def delete(self, key: str, *, deadline: Deadline) -> None:
        there = key in self.written
        super().delete(key, deadline=deadline)
        if there:
            self.changed(key, False)


class Run:
    """One run's store, everybody who works on it, what they were promised, and the time.

    Attributes:
        changes: of the store, so far.
        put_in, deleted_in: by key, the operation that last put it (and its number among the changes) or deleted it.
        promised: what any agent believes durable.
        verified: what any agent has verified.
        owners: who has claimed a generation.
        given_up: generations that were silent when a newcomer began.
        local: what lies in the local tier of a place.
        trace: who made which call with which fate.
    """

    def __init__(
        self,
        lives: Sequence[Life],
        page: int = WHOLE_LIST,
        *,
        stops: bool = False,
        new_run_id: Callable[[int], str] = lambda number: RUN_ID,
    ) -> None:
        """Nobody has begun yet.

        Args:
            lives: the agents'.
            page: keys in one page of a listing; between two pages the store may change.
            stops: whoever is not moved is stopped, with all its threads; otherwise its journal goes on.
            new_run_id: the identity that an agent gives to a run that it knows nothing of.
        """
        self.stops = stops
        self.new_run_id = new_run_id
        self.store = Watched(MemoryStore(), may_uncommit=self._may_uncommit, shared=True)
        self.store.changed = self._changed
        self.page = page
        self.time = 0.0
        self.changes = 0
        self.acting = Operation(0)
        self.put_in: dict[str, tuple[int, Operation]] = {}
        self.deleted_in: dict[str, Operation] = {}
        self.manifests: dict[SnapshotId, Manifest] = {}
        self.promised: set[SnapshotId] = set()
        self.verified: set[SnapshotId] = set()
        self.owners: dict[int, Agent] = {}
        self.given_up: set[int] = set()
        self.local: dict[str, Sealed] = {}
        self.agents = [Agent(self, number, life) for number, life in enumerate(lives)]
        self.trace: list[tuple[int, str, str]] = []

    def play(self, moves: Sequence[Move]) -> None:
        """Make the moves; then everybody who has begun lives on in turns, to the end; then a newcomer starts."""
        with self.on_stage():
            for move in moves:
                self.make(move)
            self.go_on([agent for agent in self.agents if agent.actor.begun])
            alive = [agent.number for agent in self.agents if agent.actor.begun and not agent.actor.over]
            assert not alive, f"agents {alive} get nowhere"
            self._welcome_a_newcomer()

    @contextmanager
    def on_stage(self) -> Iterator[None]:
        """Everybody's threads end with it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(records, "utc_now", self._wall_clock)
            try:
                yield
            finally:
                for agent in self.agents:
                    agent.actor.kill()

    def make(self, move: Move) -> None:
        """One move of the schedule."""
        agent = self.agents[move.who % len(self.agents)]
        actor, fate, calls, pauses = agent.actor, move.fate, 0, 0
        self.pass_time(move.seconds, agent)
        if fate in ("mute", "speak"):
            agent.mute = fate == "mute"
            return
        if fate == "land":
            self._land(agent)
            return
        while not actor.over and pauses < PAUSES:
            if actor.wakes_at > self.time:
                pauses += 1
                self.pass_time(actor.wakes_at - self.time, agent)
            self.acting = agent.operation
            if actor.stands_at is not None:
                self.trace.append((agent.number, actor.stands_at.kind, fate))
            actor.move(fate)
            fate, calls = "", calls + 1
            if calls == move.until or (actor.stands_at is not None and actor.stands_at.kind == move.until):
                return

    def pass_time(self, seconds: float, moved: Agent) -> None:
        """Time passes; whoever lives and is heard puts the journal segments that are due."""
        self.time += seconds
        for agent in self.agents:
            if agent is moved or not self.stops:
                agent.beat()

    def go_on(self, agents: Sequence[Agent], rounds: int = ROUNDS) -> None:
        """All that is wrong in the world ends, and they live on in turns."""
        self.stops = False
        for agent in agents:
            agent.mute = False
        for _ in range(rounds):
            for agent in agents:
                self.make(Move(agent.number, "pause"))
        for agent in agents:
            while agent.actor.in_flight:
                self._land(agent)

    def _welcome_a_newcomer(self) -> None:
        newcomer = Agent(self, len(self.agents), Life(upkeep=False, snapshots=1))
        self.agents.append(newcomer)
        self.make(Move(newcomer.number, "end"))
        assert newcomer.left == "interrupted", f"a newcomer cannot start: {newcomer.left}"

    def _land(self, agent: Agent) -> None:
        self.acting = Operation(self.changes)  # nobody's: its sender has given up on it
        agent.actor.land()

    def _wall_clock(self) -> str:
        agent = self.acting.agent
        hours = 12 + int((agent.life.wall_s if agent else 0.0) // HOUR_S)
        return f"2026-01-02T{hours:02d}:04:05.678+00:00"

    # ---- what is there ----------------------------------------------------------------------------------------------

    def committed(self) -> dict[SnapshotId, Manifest]:
        """Every manifest that is not quarantined."""
        written = self.store.written
        return {name: manifest for name, manifest in self.manifests.items() if KEYS.quarantined(name) not in written}

    def missing(self, manifest: Manifest) -> list[str]:
        """Shards that the manifest names and that are not there. What is there never changes (I2)."""
        keys = [KEYS.payload(manifest.directory, shard.name) for part in manifest.parts for shard in part.shards]
        return [key for key in keys if key not in self.store.written]

    def silent_s(self, generation: int) -> float:
        """How long nobody has heard of a generation."""
        owner = self.owners.get(generation)
        return self.time - (owner.heard_at.get(generation, 0.0) if owner is not None else 0.0)

    # ---- what always holds ------------------------------------------------------------------------------------------

    def _changed(self, key: str, put: bool) -> None:
        self.changes += 1
        name = KEYS.parse_commit(key)
        if put:
            self.put_in[key] = self.changes, self.acting
            if name is not None:
                self.manifests[name] = parse_manifest(self.store.written[key], KEYS, name)
                self._check_end(name)
        else:
            self.deleted_in[key] = self.acting
            if name is not None:
                del self.manifests[name]
        self.check_commits(key if put else "")

    def _check_end(self, name: SnapshotId) -> None:
        agent = self.acting.agent
        if agent is not None and name.generation in agent.generations:
            assert KEYS.done(name.generation) not in self.store.written, f"I5: {name} is committed after its done"

    def check_commits(self, put: str = "") -> None:
        """No commit that counts is torn, and what was promised is there. After every change, and every operation."""
        committed = self.committed()
        torn = [name for name, manifest in committed.items() if self.missing(manifest)]
        good = max((name for name in committed if name not in torn), default=None)
        for name in torn:
            assert good is not None and name < good, f"I3: {name} is torn, and nothing newer is good"  # noqa: PT018
            assert self._excused(committed[name]), f"I3: {name} is torn, and nobody will look at it again"
        if self.promised:
            newest = max(self.promised)
            assert good is not None and good >= newest, f"I13: {newest} was durable, now it is {good}"  # noqa: PT018
        if (name := KEYS.parse_quarantined(put)) is not None and name in self.manifests:
            assert self.missing(self.manifests[name]) or (good is not None and name < good), (
                f"I12: {name} is good, and refused"
            )

    def _excused(self, manifest: Manifest) -> bool:
        """Whether it was committed while or after its shards were deleted, by somebody who has yet to see it."""
        put_at, putting = self.put_in[KEYS.commit(manifest.id)]
        deleting = [self.deleted_in[key] for key in self.missing(manifest)]
        late = all(operation.began < put_at for operation in deleting)
        return late and not all(operation.over for operation in [putting, *deleting])

    def _may_uncommit(self, snapshot: SnapshotId) -> None:
        committed = self.committed()
        if snapshot in committed and not self.missing(committed[snapshot]):
            newer = [name for name in self.verified if name > snapshot and name in committed]
            assert newer, f"I6: {snapshot} is deleted, and nothing newer was verified"


class Agent:
    """One agent's life, and what it believes. All but `beat` happens in its actor's thread."""

    def __init__(self, run: Run, number: int, life: Life) -> None:
        self.run, self.number, self.life = run, number, life
        self.name = f"agent-{number}"
        self.actor = Actor(self.name, self._live)
        self.store = retrying(SteppedStore(run.store, self.actor, run.page))
        self.operation = Operation(0, self)
        self.place = f"place-{number}"
        self.generations: list[int] = []
        self.heard_at: dict[int, float] = {}
        self.mute = False
        self.left = ""
        self.run_id = ""
        self.parent: str | None = None
        self.step = 0
        self.verified: set[SnapshotId] = set()
        self._beaten_at, self._segments = 0.0, 0
        self._claims: dict[int, str] = {}
        self._expected: SnapshotId | None = None
        self._nonces, self._swept = 0, False
        self._nonces, self._swept, self._unchanged = 0, False, Deduplicator()

    @property
    def generation(self) -> int:
        """The one that it works in."""
        return self.generations[-1]

    def beat(self) -> None:
        """Its journal's thread: puts a segment when one is due. Test's thread."""
        run = self.run
        if self.actor.over or not self.generations or self.mute or run.time < self._beaten_at + BEAT_S:
            return
        self._beaten_at, self._segments = run.time, self._segments + 1
        run.acting = Operation(run.changes, self, "journal")
        key = KEYS.journal(self.generation, f"host-{self.number}", self._segments)
        run.store.put_if_absent(key, b"{}\n", deadline=FOREVER)
        self.heard_at[self.generation] = run.time

    def _live(self) -> None:
        if self.life.same_host:
            held = {agent.place for agent in self.run.agents if not agent.actor.over}
            self.place = next((agent.place for agent in self.run.agents if agent.place not in held), self.place)
        self._begin()
        for count in range(self.life.snapshots):
            if self.left:
                break
            self._save()
            self._pause(LOOK_S)
            if self._superseded():
                self._save()  # what the trainer did until it heard of it
                self.left = "superseded"
            elif self.life.restarts and count == 0:
                self._begin()
        self._leave()

    def _leave(self) -> None:
        self.left = self.left or "interrupted"
        if not self.life.leaves and self.left == "interrupted":
            self.actor.died = True
            return
        for generation in self.generations:
            self._insist("end", functools.partial(self._end, generation))

    def _end(self, generation: int) -> None:
        nonce = self._claims[generation]
        commit.end(self.store, KEYS, generation, nonce, self.left, self.step, FOREVER)

    # ---- a start ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """As `resume/startup.py`: survey, claim, wait for the older ones, finish what is complete, choose."""
        known = self._insist("survey", lambda: records.survey(self.store, KEYS, FOREVER))
        if self.generations and known.last_claim is not None and known.last_claim.agent != self.name:
            self.left = "superseded"  # a restart in place does not overtake who waits for us
            return
        self._claim(known)
        if self._wait_for_elders():
            self._resume()
        else:
            self.left = "superseded"

    def _claim(self, known: records.Survey) -> None:
        self.run_id = known.run_id or self.run.new_run_id(self.number)
        wanted = Claim(
            format=FORMAT,
            run_id=self.run_id,
            generation=known.next_generation,
            nonce=self._nonce(),
            claimed_at=records.utc_now(),
            host=f"host-{self.number}",
            pid=self.number,
            fresh=False,
            parent=None,
            command=("python", "train.py"),
            named=True,
            agent=self.name,
            lock_id=self.place,
        )
        standing = self._insist("claim", lambda: commit.claim(self.store, KEYS, wanted, FOREVER, join=True))
        assert standing.nonce == wanted.nonce, "somebody else's claim was taken for ours"
        key = KEYS.claim(standing.generation)
        assert parse_claim(self.run.store.written[key], key) == standing, "not the claim that stands"
        assert standing.generation not in self.run.owners, f"two agents have generation {standing.generation}"
        self.run.owners[standing.generation] = self
        self.run_id = standing.run_id
        self.generations.append(standing.generation)
        self._claims[standing.generation] = standing.nonce
        self.heard_at[standing.generation] = self.run.time

    def _wait_for_elders(self) -> bool:
        """Whether it is our turn; no, if somebody newer has come meanwhile."""
        predecessors = Predecessors(
            KEYS,
            self.generation,
            run_id=self.run_id,
            agent=self.name,
            lock_id=self.place,
            silence_s=SILENCE_S,
            clock=lambda: self.run.time + self.life.clock_s,
        )
        prefetched = False
        while True:
            self._expected = max(self.run.promised, default=None)
            try:
                with self._doing("look"):
                    awaited = predecessors.look(self.store, FOREVER)
            except CloudError:
                awaited = [0]
            if not awaited:
                self._check_turn()
                return True
            if not prefetched:
                prefetched = True
                with contextlib.suppress(CloudError, SnapshotCorrupt), self._doing("prefetch"):
                    self._find(records.survey(self.store, KEYS, FOREVER).commits)
            self._pause(WAIT_S)
            if self._superseded():
                return False

    def _check_turn(self) -> None:
        """I5: whoever came before has ended, is dead, or was not heard of for long."""
        for generation, owner in self.run.owners.items():
            if generation >= self.generation or owner is self or owner.actor.over:
                continue
            if KEYS.done(generation) in self.run.store.written or generation in self.run.given_up:
                continue
            assert self.run.silent_s(generation) >= SILENCE_S, f"I5: generation {generation} lives, and is heard"
            self.run.given_up.add(generation)

    def _resume(self) -> None:
        try:
            finished = self._insist("finish", lambda: commit.finish_complete(self.store, KEYS, self.run_id, FOREVER))
        except NotFound:  # what it looked at was retired: it was stopped in the middle of its start
            assert self.generation < max(self.run.owners), "nobody else is there, and something is gone"
            self.left = "failed"
            return
        known = self._insist("survey", lambda: records.survey(self.store, KEYS, FOREVER))
        while True:
            deleted = len(self.run.deleted_in)
            try:
                found = self._insist("find", lambda: self._find({*known.commits, *finished}))  # noqa: B023
                break
            except SnapshotCorrupt:
                before, finished = known, []
                known = self._insist("survey", lambda: records.survey(self.store, KEYS, FOREVER))
                assert known != before, "nothing has changed, and nothing can be resumed"
        if self._expected is not None and len(self.run.deleted_in) == deleted:
            assert found is not None, f"I10: {self._expected} was durable, and the run would start at step 0"
            assert found >= self._expected, f"I5: {found} is resumed, and {self._expected} was durable"
        self.step, self.parent = 0, None
        if found is not None:
            self.step, self.parent = found.step, str(found)
            self._trust(found)
        local = self.run.local.get(self.place)
        if local is not None and (found is None or local.content.id > found):
            self.step, self.parent = local.content.id.step, str(local.content.id)
            self._publish(local, "behind")

    def _find(self, names: Collection[SnapshotId]) -> SnapshotId | None:
        finder = Finder(KEYS, self.run_id, f"host-{self.number}", lambda event: None)
        point = finder.find(stored_copies(self.store, "remote", sorted(names)), lambda copy, record: None)
        if point is None:
            return None
        assert Content(point.id, self.run_id, frozen=True).is_in(point.slots[0]), (
            "I12: not the bytes that were committed"
        )
        point.slots[0].close()
        return point.id

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """As `harness.agent.save.tier`: publish until it is there; verify, retire, sweep where time allows."""
        self.step += 1
        content = Content(SnapshotId(self.generation, self.step), self.run_id, self.parent, frozen=True)
        sealed = Sealed(content, self._claims[self.generation])
        if self.life.same_host:
            self.run.local[self.place] = sealed
        manifest = self._publish(sealed, "publish")
        if manifest is not None and self.life.upkeep:
            with contextlib.suppress(CloudError):
                self._keep_up(manifest)

    def _publish(self, sealed: Sealed, name: str) -> Manifest | None:
        """The manifest that stands; `None` if its shards were swept meanwhile: somebody newer is at work."""
        staged, attempt = sealed.content.staged(), commit.Attempt(sealed.nonce)
        if self.life.same_host:
            staged = altered(staged, known=sealed.content.entries())
        while True:
            try:
                with self._doing("look for a base"):
                    if self._unchanged.base is None and (base := commit.base(self.store, KEYS, FOREVER)) is not None:
                        self._unchanged.committed(base)
                with self._doing(name):
                    manifest = commit.publish(
                        self.store,
                        KEYS,
                        staged,
                        "remote",
                        FOREVER,
                        lambda event: None,
                        attempt=attempt,
                        unchanged=self._unchanged,
                    )
                    self.run.promised.add(manifest.id)
                self._unchanged.committed(manifest)
                return manifest
            except CloudError:
                continue
            except SnapshotCorrupt:
                return None

    def _keep_up(self, manifest: Manifest) -> None:
        try:
            with self._doing("verify"):
                assert fetch.verify(self.store, KEYS, manifest, FOREVER)
            self._trust(manifest.id)
        except SnapshotCorrupt as err:
            with self._doing("quarantine"):
                commit.quarantine(self.store, KEYS, manifest.id, str(err), f"host-{self.number}", FOREVER)
            return
        with self._doing("survey"):
            committed = records.survey(self.store, KEYS, FOREVER).commits
        life = self.life
        for name in retain(committed, keep_last=life.keep_last, keep_every=life.keep_every, verified=self.verified):
            with self._doing("remove"):
                retire.remove(self.store, KEYS, name, FOREVER)
            self.verified.discard(name)
        if not self._swept:
            with self._doing("sweep"):
                retire.sweep(self.store, KEYS, max(name.generation for name in self.verified), FOREVER)
            self._swept = True

    def _trust(self, name: SnapshotId) -> None:
        self.verified.add(name)
        self.run.verified.add(name)

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def _superseded(self) -> bool:
        try:
            with self._doing("look"):
                return newer_claim(self.store, KEYS, self.generation, self.name, FOREVER) is not None
        except CloudError:
            return False

    def _insist(self, name: str, call: Callable[[], _T]) -> _T:
        """Ask until the store answers: schedules end, and so do its failures."""
        while True:
            try:
                with self._doing(name):
                    return call()
            except CloudError as err:
                if not err.retryable:
                    raise

    @contextmanager
    def _doing(self, name: str) -> Iterator[None]:
        operation = self.operation = self.run.acting = Operation(self.run.changes, self, name)
        try:
            yield
        except SnapshotCorrupt:
            operation.over = True
            raise
        else:
            operation.over = True
            self.run.check_commits()
        finally:
            self.operation = self.run.acting = Operation(self.run.changes, self)

    def _pause(self, seconds: float) -> None:
        self.actor.pause(self.run.time + seconds)

    def _nonce(self) -> str:
        """Deterministic, and in no order: listings must not follow the order of attempts."""
        self._nonces += 1
        return f"{(self.number * 40503 + self._nonces * 2654435761) % 2**64:016x}"
