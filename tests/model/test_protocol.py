"""The commit protocol (docs/commit-protocol.md) under every order of events, against a model of what was promised.

One agent at a time, its trainers (of one to three ranks), a remote and a local tier. Anything may die before or after
any call of a store takes effect; replies are lost, stores are down, hosts vanish with their local tier, stored bytes
rot. Whatever happens:

    I1, I3   a snapshot exists with all its bytes, or not at all        (after every step, and in ProtocolStore)
    I2       nothing is written twice with different bytes              (inside ProtocolStore)
    I4, I12  a start gets the newest usable snapshot with exactly its bytes; rotten ones are quarantined, loudly
    I6       deletion in order, the newest verified one never           (inside ProtocolStore)
    I8       what a sealed slot says is what it holds; after a first seal a complete snapshot exists somewhere
    I9       a lost reply changes nothing about any of this
    I10      no start at step 0 where there are snapshots of the run
    I11      a snapshot is of all ranks, one step and one generation    (parse_manifest; sets that are half sealed)
    I13      what `publish` has returned from is there
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cloud.directory.store import DirectoryStore
from cloud.errors import CloudError, NotFound
from cloud.retry import RetryingStore
from cloud.testing.memory import MemoryStore
from harness.agent.generation import Generation
from harness.agent.resume.finder import Copy, Finder
from harness.agent.resume_point import MemoryCopy, ResumePoint, SealedSlot, SnapshotSet
from harness.agent.save.jobs import LocalSnapshot
from harness.agent.save.slot_pool import SlotPool
from harness.agent.save.snapshot_set import whole_sets
from harness.core import events, small_state
from harness.core.manifest import FORMAT, Claim, Manifest, parse_manifest
from harness.core.policy.retention import retain
from harness.core.snapshot import SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit, fetch, records, retire
from harness.snapshots.candidates import stored_copies
from harness.snapshots.dedup import Deduplicator
from tests.support.protocol import (
    FAULTS,
    FOREVER,
    KEYS,
    SLOT_BYTES,
    Content,
    Crash,
    FastFileSystem,
    Fault,
    ProtocolStore,
    retrying,
)

TIERS = ("remote", "local")
some_fault = st.builds(Fault, st.sampled_from(FAULTS), st.integers(1, 14))
faults = st.one_of(st.none(), st.none(), st.none(), some_fault)  # most of the time the world is well
tiers = st.sampled_from(TIERS)


class Alive:
    """An agent with a trainer: everything here is lost when the agent dies."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.pool = SlotPool()
        self.slots: list[list[int]] = []
        self.step = 0
        self.sequence = 0
        self.sealed_step: int | None = None
        self.pending: dict[str, tuple[int, ...]] = dict.fromkeys(TIERS, ())
        self.manifests: dict[SnapshotId, Manifest] = {}
        self.verified: dict[str, set[SnapshotId]] = {tier: set() for tier in TIERS}
        self.ever_sealed = False
        self.unchanged = {tier: Deduplicator() for tier in TIERS}

    def hold(self, tier: str, indexes: tuple[int, ...]) -> None:
        """The newest job wins: `indexes` are what `tier` needs now, and nothing else."""
        before, self.pending[tier] = self.pending[tier], indexes
        for index in indexes:
            self.pool.hold(index, tier)
        for index in set(before) - set(indexes):
            self.pool.release(index, tier)

    def sets(self) -> list[SnapshotSet]:
        """The snapshots in memory, newest first."""
        found = [(index, self.pool[index], self.pool[index].record()) for index in self.pool.sealed()]
        return whole_sets(SealedSlot(index, slot, record) for index, slot, record in found if record is not None)


def state_of(manifest: Manifest, rank: int) -> str:
    """The whole small state of a rank: a part holds what differs from the first one's."""
    first, its = (bytes(manifest.parts[number].state) for number in (0, rank))
    return (small_state.join(first, its, ()) if rank else first).decode()


class Protocol(RuleBasedStateMachine):
    """Real stores, slots, commits and resumes on one side; sets and dicts on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="harness-model-"))
        self.hosts, self.world_size = 0, 1
        self.nonces: dict[int, str] = {}
        self.agent: Alive | None = None
        self.truth: dict[SnapshotId, Content] = {}
        self.promised: dict[str, set[SnapshotId]] = {tier: set() for tier in TIERS}
        self.spoilt: dict[str, dict[SnapshotId, set[str]]] = {tier: {} for tier in TIERS}
        self.stores: dict[str, ProtocolStore] = {}
        self.retrying: dict[str, RetryingStore] = {}
        self.events: list[events.Event] = []
        self._open("remote", ProtocolStore(MemoryStore()))
        self._new_host()

    def teardown(self) -> None:
        self._die()
        shutil.rmtree(self.directory)

    # ---- rules ------------------------------------------------------------------------------------------------------

    @initialize(world_size=st.sampled_from([1, 1, 2, 3]))
    def ranks(self, world_size: int) -> None:
        self.world_size = world_size

    @precondition(lambda self: self.agent is None)
    @rule(fault=faults, tier=tiers, fresh=st.sampled_from([False] * 7 + [True]))
    def start(self, fault: Fault | None, tier: str, fresh: bool) -> None:
        with self._mortal(tier, fault):
            self._start(None, fresh=fresh)

    @precondition(lambda self: self.agent is not None)
    @rule(fault=faults, tier=tiers, torn=st.booleans())
    def restart_in_place(self, fault: Fault | None, tier: str, torn: bool) -> None:
        """The trainers die, perhaps in the middle of filling a slot; the agent starts them again."""
        agent = self._agent()
        if torn and (indexes := self._granted()):
            agent.step, agent.sequence = agent.step + 1, agent.sequence + 1
            content, *_, last = self._next(), *indexes
            for rank, index in enumerate(indexes[:-1]):
                content.seal(agent.pool[index], agent.sequence, rank)
            content.fill(agent.pool[last], self.world_size - 1, half=True)
        with self._mortal(tier, fault):
            self._start(agent, fresh=False)

    @precondition(lambda self: self.agent is not None)
    @rule(steps=st.integers(1, 3))
    def seal(self, steps: int) -> None:
        agent = self._agent()
        agent.step += steps
        indexes = self._granted()
        if not indexes:
            return  # every slot is needed: the trainers go on without a snapshot
        content = self._next()
        agent.sequence += 1
        for rank, index in enumerate(indexes):
            content.seal(agent.pool[index], agent.sequence, rank)
        agent.sealed_step, agent.ever_sealed = agent.step, True
        for tier in TIERS:
            agent.hold(tier, indexes)
        agent.pool.collect()

    @precondition(lambda self: self.agent is not None)
    @rule()
    def replace_agent(self) -> None:
        """The agent dies, and its trainers go on with another: it publishes again what is newest, and knows nothing."""
        agent = self._agent()
        agent.unchanged = {tier: Deduplicator() for tier in TIERS}
        newest = next(iter(agent.sets()), ())
        ours = tuple(sealed.index for sealed in newest if sealed.record.generation == agent.generation.number)
        for tier in TIERS:
            agent.hold(tier, ours)

    @precondition(lambda self: self.agent is not None)
    @rule(steps=st.integers(1, 3), upload=st.booleans(), verify=st.booleans())
    def save(self, steps: int, upload: bool, verify: bool) -> None:
        """The common case in one piece, so that long histories are reached."""
        self.seal(steps)
        for tier in ("local", "remote") if upload else ("local",):
            self.publish_from_slot(tier, None)
            if verify:
                self.verify_newest(tier, None)

    @precondition(lambda self: self.agent is not None)
    @rule(tier=tiers, fault=faults)
    def publish_from_slot(self, tier: str, fault: Fault | None) -> None:
        agent = self._agent()
        if not (indexes := agent.pending[tier]):
            return
        records = [agent.pool[index].record() for index in indexes]
        (name,) = {SnapshotId(record.generation, record.step) for record in records if record is not None}
        assert None not in records, "I8: a slot that a tier needs was overwritten"
        content = self.truth[name]
        with self._mortal(tier, fault):
            agent.manifests[name] = self._publish(tier, content.staged(), commit.Attempt(self.nonces[name.generation]))
            agent.hold(tier, ())

    @precondition(lambda self: self.agent is not None)
    @rule(fault=faults, failing=tiers)
    def publish_from_local_tier(self, fault: Fault | None, failing: str) -> None:
        agent, store = self._agent(), self.retrying["local"]
        usable = [name for name in self._committed("local") if name not in self._quarantined("local")]
        if not usable or self.truth[usable[-1]].run_id != agent.generation.run_id:
            return
        with self._mortal(failing, fault):
            try:
                manifest = records.read_manifest(store, KEYS, usable[-1], FOREVER)
                job = LocalSnapshot(store, KEYS, manifest, agent.generation, 0.0, behind=True)
                self._publish("remote", job.stage(), job.attempt())
            except (SnapshotCorrupt, NotFound):
                assert usable[-1] in self._damaged("local") | self._damaged("remote")

    @precondition(lambda self: self.agent is not None)
    @rule(tier=tiers, fault=faults)
    def verify_newest(self, tier: str, fault: Fault | None) -> None:
        agent, store = self._agent(), self.retrying[tier]
        usable = [name for name in self._committed(tier) if name not in self._quarantined(tier)]
        if not usable:
            return
        name = usable[-1]
        with self._mortal(tier, fault):
            try:
                manifest = records.read_manifest(store, KEYS, name, FOREVER)
                assert fetch.verify(store, KEYS, manifest, FOREVER)
            except SnapshotCorrupt as err:
                assert name in self._damaged(tier), "a good snapshot was called damaged"
                commit.quarantine(store, KEYS, name, str(err), "here", FOREVER)
                return
            assert name not in self._damaged(tier), "a damaged snapshot was called good"
            agent.verified[tier].add(name)

    @precondition(lambda self: self.agent is not None)
    @rule(tier=tiers, keep_last=st.integers(1, 3), keep_every=st.none() | st.integers(1, 5), fault=faults)
    def retire(self, tier: str, keep_last: int, keep_every: int | None, fault: Fault | None) -> None:
        verified = self._agent().verified[tier]
        doomed = retain(self._committed(tier), keep_last=keep_last, keep_every=keep_every, verified=verified)
        with self._mortal(tier, fault):
            for name in doomed:
                self.promised[tier].discard(name)
                retire.remove(self.retrying[tier], KEYS, name, FOREVER)

    @precondition(lambda self: self.agent is not None)
    @rule(tier=tiers, fault=faults)
    def sweep(self, tier: str, fault: Fault | None) -> None:
        latest = max(self._committed(tier), default=None)
        above = {key for key in self._payload(tier) if latest is None or key > f"{KEYS.snapshots}{latest}"}
        with self._mortal(tier, fault):
            retire.sweep(self.retrying[tier], KEYS, self._agent().generation.number, FOREVER)
        assert above <= self._payload(tier), "what is above Latest may still be finished, and was swept"

    @precondition(lambda self: self.agent is not None)
    @rule(fault=faults)
    def finish_complete(self, fault: Fault | None) -> None:
        with self._mortal("remote", fault):
            self._finish_complete("remote", self._agent().generation.run_id)

    @precondition(lambda self: self.agent is not None)
    @rule(fault=faults)
    def leave(self, fault: Fault | None) -> None:
        agent = self._agent()
        with self._mortal("remote", fault):
            own = agent.generation
            commit.end(self.retrying["remote"], KEYS, own.number, own.nonce, "interrupted", agent.step, FOREVER)
        self._die()

    @rule(fate=st.sampled_from(["agent", "agent", "host"]))
    def kill(self, fate: str) -> None:
        """SIGKILL of agent and trainer; or the end of the instance, its disk included."""
        self._die()
        if fate == "host":
            self._new_host()

    @rule(
        tier=tiers,
        which=st.integers(0, 3),
        what=st.sampled_from(["shard", "shard", "manifest"]),
        how=st.sampled_from(["flip", "truncate", "delete"]),
    )
    def damage(self, tier: str, which: int, what: str, how: str) -> None:
        """Bytes that were committed rot on the medium. A manifest rots where it shows: it carries no sum of itself."""
        store, committed = self.stores[tier], self._committed(tier)[::-1]
        if which >= len(committed):
            return
        name = committed[which]
        manifest = parse_manifest(store.written[KEYS.commit(name)], KEYS, name)
        shard = manifest.parts[-1].shards[which % 2].name
        key = KEYS.commit(name) if what == "manifest" else KEYS.payload(manifest.directory, shard)
        if key in store.damaged or key not in store.keys(key):
            return
        store.damage(key, how, at=0.0 if what == "manifest" else 0.5)
        self.spoilt[tier].setdefault(name, set()).add(key)
        if self.agent is not None:
            self.agent.verified[tier].discard(name)

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def what_is_committed_is_complete_and_exact(self) -> None:
        for tier, store in self.stores.items():
            for name in self._committed(tier):
                if name in self._damaged(tier):
                    continue
                manifest = records.read_manifest(store.inner, KEYS, name, FOREVER)
                assert len(manifest.parts) == self.world_size
                for rank, part in enumerate(manifest.parts):
                    found = [store.peek(KEYS.payload(manifest.directory, shard.name)) for shard in part.shards]
                    assert found == self.truth[name].shards_of(rank)
                    assert state_of(manifest, rank) == self.truth[name].state

    @invariant()
    def what_was_promised_is_there(self) -> None:
        for tier in TIERS:
            lost = self.promised[tier] - set(self._committed(tier)) - set(self.spoilt[tier])
            assert not lost, f"{lost} was published in {tier}, and is gone"

    @invariant()
    def nothing_good_is_quarantined(self) -> None:
        for tier in TIERS:
            assert self._quarantined(tier) <= set(self.spoilt[tier])

    @invariant()
    def a_sealed_slot_holds_what_it_says(self) -> None:
        agent = self.agent
        if agent is None:
            return
        sealed = [agent.pool[index] for index in agent.pool.sealed()]
        for slot in sealed:
            record = slot.record()
            assert record is not None
            assert self.truth[SnapshotId(record.generation, record.step)].is_in(slot, record.rank)
        if agent.ever_sealed:
            good = [name for tier in TIERS for name in self._committed(tier) if name not in self._damaged(tier)]
            assert agent.sets() or good or any(self.spoilt.values()), (
                "I8: a first snapshot was sealed, and none exists any more"
            )

    # ---- a start ----------------------------------------------------------------------------------------------------

    def _start(self, alive: Alive | None, *, fresh: bool) -> None:
        """What the agent does at the start of every generation (harness.agent.resume.startup)."""
        remote, local = self.retrying["remote"], self.retrying["local"]
        known = records.survey(remote, KEYS, FOREVER)
        before = "" if fresh or known.last_claim is None else known.last_claim.run_id
        generation = Generation(
            number=max(known.next_generation, alive.generation.number + 1 if alive else 1),
            run_id=alive.generation.run_id if alive else before or f"{known.next_generation:032x}",
            nonce=f"{len(self.stores['remote'].written):016x}",
        )
        self.nonces[generation.number] = generation.nonce
        standing = commit.claim(remote, KEYS, _claim(generation, fresh=fresh), FOREVER)
        assert standing.nonce == generation.nonce
        agent = alive or Alive(generation)
        copies: list[Copy] = []
        if not fresh:
            finished = self._finish_complete("remote", generation.run_id)
            self._finish_complete("local", generation.run_id)
            at_hand = records.survey(local, KEYS, FOREVER)
            copies = [
                *self._memory_copies(agent),
                *stored_copies(remote, "remote", [*known.commits, *finished]),
                *stored_copies(local, "local", at_hand.commits),
            ]
        agent.generation = generation
        self._choose(agent, copies)
        self.agent = agent

    def _choose(self, agent: Alive, copies: list[Copy]) -> None:
        generation = agent.generation
        wanted = sorted(
            copies, key=lambda copy: (copy.id, ["remote", "local", "memory"].index(copy.tier)), reverse=True
        )
        ours = [copy for copy in wanted if self.truth[copy.id].run_id == generation.run_id]
        finder, told = Finder(KEYS, generation.run_id, "here", self.events.append), len(self.events)
        point, refusal = None, None
        try:
            point = finder.find(copies, lambda copy, record: None)
        except SnapshotCorrupt as err:
            refusal = err
        # A disk that fails at this very moment keeps nobody from what is durable: it is passed over, and that is told.
        silent = {
            event.snapshot
            for event in self.events[told:]
            if isinstance(event, events.Rejected) and event.tier == "local" and "injected" in event.reason
        }
        ours = [copy for copy in ours if copy.tier != "local" or str(copy.id) not in silent]
        best = next((copy for copy in ours if self._usable(copy)), None)
        refused = ours[: ours.index(best)] if best is not None else ours
        if refusal is not None:
            assert best is None, f"{best} could have been used"
            assert silent or any(not self._usable(copy) for copy in copies), "refused although nothing is damaged"
            self._check_refused(refused, None, told)
            raise refusal
        if point is None:
            assert not ours, "I10: there are snapshots, and the run would start at step 0"
            self._restored(agent, None)
            return
        assert best is not None
        assert (point.id, point.tier) == (best.id, best.tier), "I4: not the newest usable copy"
        for rank, slot in enumerate(point.slots):
            assert self.truth[point.id].is_in(slot, rank), "I12: not the bytes that were committed"
        assert len(point.slots) == self.world_size, "I11: not all ranks"
        self._check_refused(refused, point, told)
        self._restored(agent, point)

    def _check_refused(self, refused: list[Copy], used: ResumePoint | None, since: int) -> None:
        """What was passed over was passed over for a reason, and that is told; one is condemned, by who read another.

        Args:
            refused: copies that a start would have preferred to the one that it used.
            used: that one.
            since: events before this one are other starts'.
        """
        told = {
            (event.snapshot, event.tier): event.reason for event in self.events if isinstance(event, events.Rejected)
        }
        for copy in refused:
            assert (str(copy.id), copy.tier) in told
        condemned = [event.snapshot for event in self.events[since:] if isinstance(event, events.Quarantined)]
        assert len(condemned) <= 1, "I12: a reader that finds damage everywhere condemns them all"
        if used is None or used.tier == "memory":
            assert not condemned, "I12: it is condemned by who has not read anything right"
            return
        for copy in refused:
            damaged = "not what was committed" in told[str(copy.id), copy.tier]
            if copy.tier == used.tier and damaged and copy.id in self._committed(copy.tier):
                assert condemned or copy.id in self._quarantined(copy.tier), f"I12: {copy.id} is not quarantined"

    def _restored(self, agent: Alive, point: ResumePoint | None) -> None:
        agent.generation.claimed.set()
        agent.step = agent.sealed_step = 0
        if point is None:
            return
        agent.step = point.id.step
        agent.generation.parent = str(point.id)
        if point.tier != "memory":
            agent.verified[point.tier].add(point.id)
        if not point.indexes:
            for rank, slot in enumerate(point.slots):
                agent.pool.add(slot, rank)
            agent.ever_sealed = True

    def _memory_copies(self, agent: Alive) -> list[Copy]:
        named = [(SnapshotId(slots[0].record.generation, slots[0].record.step), slots) for slots in agent.sets()]
        return [MemoryCopy(name, slots, agent.manifests.get(name)) for name, slots in named]

    def _usable(self, copy: Copy) -> bool:
        return copy.tier == "memory" or copy.id not in self._damaged(copy.tier)

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def _next(self) -> Content:
        """What is sealed at this step."""
        own = self._agent().generation
        name = SnapshotId(own.number, self._agent().step)
        made = Content(name, own.run_id, own.parent, frozen=True, world_size=self.world_size)
        self.truth[name] = made
        return made

    def _publish(self, tier: str, staged: commit.Staged, attempt: commit.Attempt) -> Manifest:
        store, unchanged = self.retrying[tier], self._agent().unchanged[tier]
        if unchanged.base is None and (base := commit.base(store, KEYS, FOREVER)) is not None:
            unchanged.committed(base)
        manifest = commit.publish(
            store, KEYS, staged, tier, FOREVER, self.events.append, attempt=attempt, unchanged=unchanged
        )
        unchanged.committed(manifest)
        assert manifest.id == staged.id
        assert manifest.id in self._committed(tier), "I13: published, and not there"
        self.promised[tier].add(manifest.id)
        return manifest

    def _finish_complete(self, tier: str, run_id: str) -> list[SnapshotId]:
        latest = max(self._committed(tier), default=None)
        finished = commit.finish_complete(self.retrying[tier], KEYS, run_id, FOREVER)
        for name in finished:
            assert latest is None or name > latest, "only what is above Latest is finished"
            assert name not in self._quarantined(tier)
            assert self.truth[name].run_id == run_id
        return finished

    def _granted(self) -> tuple[int, ...]:
        """A slot for each rank; none, where one has none."""
        agent, granted = self._agent(), list[int]()
        for rank in range(self.world_size):
            if len(agent.slots) == rank:
                agent.slots.append(agent.pool.allocate(SLOT_BYTES, 1 + self.hosts % 2, rank))  # small hosts have one
            if (index := agent.pool.grant(rank)) is None:
                return ()
            assert all(index not in held for held in agent.pending.values()), "I8: granted while a tier reads it"
            granted.append(index)
        return tuple(granted)

    @contextmanager
    def _mortal(self, tier: str, fault: Fault | None) -> Iterator[None]:
        """A stretch of the agent's life in which `tier` misbehaves: it may fail, and it may be the last."""
        with self.stores[tier].armed(fault):
            try:
                yield
            except Crash:
                self._die()
            except CloudError:
                assert fault is not None, "a store failed by itself"
            except SnapshotCorrupt as err:
                unread = "injected" in str(err)  # all there is lies on a disk that fails: not step 0, but no start
                assert unread or any(self.spoilt.values()), "nothing is damaged, and something is called so"
                if self.agent is not None:
                    self._die()  # nothing to resume from: the agent leaves, loudly

    def _agent(self) -> Alive:
        assert self.agent is not None
        return self.agent

    def _die(self) -> None:
        if self.agent is not None:
            self.agent.pool.close()
        self.agent = None

    def _new_host(self) -> None:
        self.hosts += 1
        root = self.directory / str(self.hosts)
        self.promised["local"], self.spoilt["local"] = set(), {}
        self._open("local", ProtocolStore(DirectoryStore(root, fs=FastFileSystem())))

    def _open(self, tier: str, store: ProtocolStore) -> None:
        store.may_uncommit = lambda snapshot: self._may_uncommit(tier, snapshot)
        store.spoils = lambda key: self._spoil(tier, key)
        self.stores[tier], self.retrying[tier] = store, retrying(store)

    def _spoil(self, tier: str, key: str) -> None:
        """A copy of something damaged is damaged from its first moment on."""
        named = KEYS.parse_directory(key)
        assert named is not None
        self.spoilt[tier].setdefault(named[0], set()).add(key)

    def _may_uncommit(self, tier: str, snapshot: SnapshotId) -> None:
        newer = [name for name in self._agent().verified[tier] if name > snapshot and name in self._committed(tier)]
        assert newer, f"I6: {snapshot} is deleted, and nothing newer was verified"

    def _committed(self, tier: str) -> list[SnapshotId]:
        found = (KEYS.parse_commit(key) for key in self.stores[tier].keys(KEYS.commits))
        return [name for name in found if name is not None]

    def _payload(self, tier: str) -> set[str]:
        return set(self.stores[tier].keys(KEYS.snapshots))

    def _damaged(self, tier: str) -> set[SnapshotId]:
        """Snapshots that are not what was committed just now: a deleted manifest may have been put again."""
        store = self.stores[tier]
        present = set(store.keys(KEYS.run))

        def counts(name: SnapshotId, key: str) -> bool:
            """Whether it is the manifest, or in the directory that the manifest names: another attempt's is nothing."""
            written = store.written.get(KEYS.commit(name))
            if written is None or key == KEYS.commit(name):
                return True
            return key.startswith(f"{KEYS.snapshots}{parse_manifest(written, KEYS, name).directory}/")

        return {
            name
            for name, keys in self.spoilt[tier].items()
            if any((key in store.damaged or key not in present) and counts(name, key) for key in keys)
        }

    def _quarantined(self, tier: str) -> set[SnapshotId]:
        found = (KEYS.parse_quarantined(key) for key in self.stores[tier].keys(KEYS.quarantine))
        return {name for name in found if name is not None}


def _claim(generation: Generation, *, fresh: bool) -> Claim:
    return Claim(
        format=FORMAT,
        run_id=generation.run_id,
        generation=generation.number,
        nonce=generation.nonce,
        claimed_at="2026-01-02T03:04:05.678+00:00",
        host="here",
        pid=1,
        fresh=fresh,
        parent=None,
        command=("python", "train.py"),
        named=True,
    )


TestProtocol = pytest.mark.long("200 schedules")(Protocol.TestCase)
TestProtocol.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow]
)
