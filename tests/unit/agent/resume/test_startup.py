"""Where a generation comes from, while stores, other agents and the end come in between. Whole agents at it are
tests/process/handover."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloud.errors import Denied, NotFound, Unavailable
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from harness.agent.generation import Generation
from harness.agent.journal import Journal
from harness.agent.resume import claims, finder, search, startup
from harness.agent.resume.finder import Copy, Finder
from harness.agent.resume.startup import Finding, Startup, StartupEvents
from harness.agent.save.pipeline import SavePipeline
from harness.config.settings import Settings
from harness.core import events
from harness.core.manifest import FORMAT, Claim, encode
from harness.core.snapshot import MAX_GENERATION, SnapshotId
from harness.ipc.slots import Slot, SlotRecord
from harness.snapshots import commit, handover, records
from tests.support.clock import standing
from tests.support.context import Posts, a_context
from tests.support.patience import HANG_S, telling
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content
from tests.support.slots import a_slot
from tests.support.stores import FaultyStore


class Gate(MemoryStore):
    """A store that is down, or denies writing, for as long as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.down: dict[str, type[Exception]] = {}

    def _pass(self, verb: str) -> None:
        if verb in self.down:
            raise self.down[verb]("injected")

    def list(self, *args: Any, **options: Any) -> Any:
        self._pass("list")
        return super().list(*args, **options)

    def put_if_absent(self, *args: Any, **options: Any) -> None:
        self._pass("put_if_absent")
        super().put_if_absent(*args, **options)


class Scene:
    """A Startup between a store and what it tells."""

    def __init__(self, store: ObjectStore, directory: Path, command: tuple[str, ...] = ("python", "train.py")) -> None:
        settings = Settings(store="memory", run="run", runtime_dir=str(directory))
        self.posts = Posts()
        self.refused, self.superseded, self.bugs, self.heard = list[Any](), list[Claim](), list[Any](), list[Any]()
        self.said = list[str]()
        self.journal = Journal(
            KEYS, "host", listeners=[lambda line: self.heard.append(line.body)], heartbeat=events.Heartbeat
        )
        context = a_context(settings, self.posts, emit=self._emit, say=self.said.append, on_bug=self.bugs.append)
        self.pipeline = SavePipeline(context, lambda _: store, lambda steps: None)
        tell = StartupEvents(lambda: None, self.refused.append, self.superseded.append)
        self.startup = Startup(context, command, self.pipeline, self.journal, tell)

    def _emit(self, event: events.Event) -> None:
        self.journal.emit(event)

    def hand_over(self, number: int, step: int) -> None:
        """Another agent of this host has left a sealed slot."""
        slot = a_slot(Content(SnapshotId(number, step)))
        self.pipeline.adopt(0, slot, Generation(number, RUN_ID, "b" * 16))

    def until(self, condition: Callable[[], object]) -> None:
        """Run what the threads post."""
        with telling(lambda: self.heard):
            while not condition():
                self.posts.run_one(0.01)

    def begin(self) -> None:
        """Until a generation has begun, or the start was refused."""
        begun = threading.Event()
        self.startup.begin(begun.set)
        self.until(lambda: begun.is_set() or self.refused)

    def found(self) -> bool:
        return self.startup.finding is not Finding.PENDING

    def close(self) -> None:
        self.startup.close()
        self.pipeline.close_stores()
        assert not self.bugs


@pytest.fixture
def store() -> Gate:
    return Gate()


@pytest.fixture
def scene(store: Gate, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(store, tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(search, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(handover, "AWAIT_S", 0.01)
    monkeypatch.setattr(handover, "LOOK_S", 0.01)


def claim_of(number: int, run_id: str = RUN_ID) -> Claim:
    return Claim(
        format=FORMAT, run_id=run_id, generation=number, nonce=f"{number:016x}", claimed_at="", host=f"host-{number}",
        pid=1, fresh=False, parent=None, command=("python", "train.py"), named=True, agent=f"agent-{number}",
        lock_id=f"{number}",
    )  # fmt: skip


def claimed(store: ObjectStore, number: int, run_id: str = RUN_ID) -> None:
    claim = claim_of(number, run_id)
    assert commit.claim(store, KEYS, claim, FOREVER).generation == number


def published(store: ObjectStore, number: int, step: int) -> None:
    commit.publish(store, KEYS, Content(SnapshotId(number, step)).staged(), "remote", FOREVER, lambda event: None)


def located(scene: Scene) -> list[Any]:
    return [event for event in scene.heard if isinstance(event, events.Located)]


def test_slots_of_another_agent_tell_whose_run_it_is_while_the_store_does_not(store: Gate, scene: Scene) -> None:
    """A start that went on from them had no identity, never claimed, and so never saved anything again."""
    claimed(store, 5)
    scene.hand_over(5, 20)
    store.down["list"] = Unavailable
    scene.begin()
    scene.until(scene.found)

    assert scene.startup.generation.run_id == RUN_ID
    assert scene.startup.generation.number == 6, "what it saves locally comes after what it goes on from"
    store.down.clear()
    scene.until(scene.startup.generation.claimed.is_set)
    assert scene.startup.generation.number == 6


def test_a_resume_point_is_not_fixed_while_the_number_may_be_another_s(store: Gate, scene: Scene) -> None:
    """Whoever had it was not looked for: it was no older generation then."""
    store.down["put_if_absent"] = Unavailable
    scene.begin()
    MemoryStore.put_if_absent(store, KEYS.claim(1), encode(claim_of(1)), deadline=FOREVER)
    threading.Event().wait(0.1)
    assert not scene.found()
    store.down.clear()
    scene.until(lambda: any(isinstance(event, events.HandoverAwaited) for event in scene.heard))

    assert scene.startup.generation.number == 2
    assert scene.startup.finding is Finding.PENDING


def test_a_claim_that_is_denied_ends_a_start_that_would_wait_for_it_for_ever(store: Gate, scene: Scene) -> None:
    store.down["put_if_absent"] = Unavailable
    scene.begin()
    store.down["put_if_absent"] = Denied
    scene.until(lambda: scene.refused)

    assert "cannot be written" in str(scene.refused[0])


def test_who_is_told_of_a_handover_finds_it_awaited(store: Gate, scene: Scene) -> None:
    """A notice in between found a start that waits for nobody, and holds what no store has: 74, and left at once."""
    claimed(store, 1)
    awaiting = list[bool]()
    emit = scene.journal.emit

    def watching(event: events.Event) -> None:
        if isinstance(event, events.HandoverAwaited):
            awaiting.append(scene.startup.awaiting)
        emit(event)

    scene.journal.emit = watching  # type: ignore[method-assign]
    scene.begin()
    scene.until(lambda: awaiting)

    assert awaiting == [True]


def test_an_agent_that_ends_while_it_waits_begins_nothing_more(store: Gate, scene: Scene) -> None:
    """It committed, and fetched, after its own end had been recorded."""
    claimed(store, 1)
    staged = Content(SnapshotId(1, 10)).staged()
    with pytest.raises(Unavailable):  # a part, and no manifest
        commit.publish(FaultyStore(store, "put_if_absent", fail_on=2), KEYS, staged, "remote", FOREVER, lambda e: None)
    scene.begin()
    scene.until(lambda: scene.startup.awaiting)

    scene.startup.close()
    scene.until(lambda: not [t for t in threading.enumerate() if t.name == "harness-resume"])

    assert not list(store.list(KEYS.commits, deadline=FOREVER))


def test_a_newer_claim_is_looked_for_as_long_as_one_lives(store: Gate, scene: Scene) -> None:
    """The first one may have come to nothing, because a restart in place had got a higher number meanwhile."""
    scene.begin()
    scene.until(scene.found)
    run_id = scene.startup.generation.run_id
    claimed(store, 2, run_id)
    scene.until(lambda: scene.superseded)
    claimed(store, 3, run_id)
    scene.until(lambda: len(scene.superseded) > 1)

    assert [claim.generation for claim in scene.superseded] == [2, 3]


def test_what_only_this_machine_has_is_known_while_an_older_one_is_awaited(store: Gate, scene: Scene) -> None:
    claimed(store, 1)
    published(store, 1, 10)
    scene.hand_over(1, 20)
    scene.begin()
    scene.until(lambda: scene.startup.awaiting)

    assert scene.startup.only_here


def test_a_first_fetch_that_failed_is_tried_again_only_when_there_is_something_newer(
    store: Gate, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(store, 1)
    published(store, 1, 10)
    monkeypatch.setattr("harness.agent.save.slot_pool.available_bytes", lambda: 0)
    monkeypatch.setattr("harness.config.settings.Settings.slot_disk", None)
    scene.begin()
    scene.until(lambda: len(located(scene)) >= 1)
    published(store, 1, 20)
    scene.until(lambda: len(located(scene)) >= 2)
    threading.Event().wait(0.1)

    assert len(located(scene)) == 2


def test_what_looks_secret_in_a_command_line_is_not_claimed(store: Gate, tmp_path: Path) -> None:
    """Whoever may read the store reads the claims. A start with the same command is the same all the same."""
    for number in (1, 2):
        scene = Scene(store, tmp_path, ("python", "train.py", "--api-key", "sesame", "--hub_token=sesame"))
        scene.begin()
        scene.until(scene.startup.generation.claimed.is_set)
        scene.close()
        claim = records.read_claim(store, KEYS, number, FOREVER)
        assert claim.command == ("python", "train.py", "--api-key", "***", "--hub_token=***")
        assert all("rehearsed" in line for line in scene.said)
        commit.end(store, KEYS, number, claim.nonce, "interrupted", None, FOREVER)


# ---- a store that does not answer ------------------------------------------------------------------------------------


class Hung(MemoryStore):
    """A store that answers when a test says so, as on a hung mount: no deadline ends a system call."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def list(self, *args: Any, **options: Any) -> Any:
        assert self.goes_on.wait(HANG_S)
        return super().list(*args, **options)

    def put_if_absent(self, *args: Any, **options: Any) -> None:
        assert self.goes_on.wait(HANG_S)
        super().put_if_absent(*args, **options)


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hung, Scene]]:
    monkeypatch.setattr(startup, "FIRST_ANSWER_S", 0.05)
    monkeypatch.setattr(startup, "AGAIN_S", 0.05)
    store = Hung()
    scene = Scene(store, tmp_path)
    yield store, scene
    store.goes_on.set()
    scene.close()


def test_a_start_goes_on_while_a_call_to_the_store_does_not_come_back(hung: tuple[Hung, Scene]) -> None:
    """The main thread made that call: signals, notices and `harness status` waited with it, for as long as it hung."""
    store, scene = hung
    scene.hand_over(5, 20)

    scene.begin()

    assert scene.startup.generation.number == 6
    assert scene.startup.generation.run_id == RUN_ID
    assert not scene.startup.generation.claimed.is_set()
    store.goes_on.set()
    scene.until(scene.startup.generation.claimed.is_set)


def test_a_restart_in_place_goes_on_as_well_and_what_comes_back_late_changes_nothing(hung: tuple[Hung, Scene]) -> None:
    store, scene = hung
    scene.hand_over(5, 20)
    scene.begin()
    begun = list[bool]()

    scene.startup.begin_again(begun.append)
    scene.until(lambda: begun)

    assert begun == [True]
    assert scene.startup.generation.number == 7
    second = scene.startup.generation
    store.goes_on.set()
    scene.until(second.claimed.is_set)
    assert begun == [True]
    assert scene.startup.generation is second
    assert not scene.superseded


def test_a_restart_in_place_learns_from_the_store_which_run_it_is(store: Gate, scene: Scene) -> None:
    """The store had not answered at the start: the next generation was claimed without an identity."""
    claimed(store, 1)
    published(store, 1, 20)
    ended(store, 1, 20)
    store.down["list"] = Unavailable
    scene.begin()
    assert scene.startup.generation.run_id == ""
    begun = list[bool]()

    store.down.clear()
    scene.startup.begin_again(begun.append)
    scene.until(lambda: begun and scene.found())

    assert scene.startup.generation.run_id == RUN_ID
    assert records.read_claim(store, KEYS, scene.startup.generation.number, FOREVER).run_id == RUN_ID
    assert scene.startup.point is not None


def test_a_restart_in_place_from_memory_waits_for_nobody_any_more(store: Gate, scene: Scene) -> None:
    """The start before it had waited for an older one: at a notice the trainer was stopped without a last snapshot."""
    claimed(store, 5)
    scene.hand_over(5, 20)
    scene.begin()
    scene.until(lambda: scene.startup.awaiting)
    begun = list[bool]()

    store.down["list"] = Unavailable
    scene.startup.begin_again(begun.append)
    scene.until(lambda: begun and scene.found())

    assert scene.startup.point is not None
    assert scene.startup.point.tier == "memory"
    assert not scene.startup.awaiting


def test_what_was_found_for_a_trainer_that_has_died_meanwhile_is_nobodys(
    hung: tuple[Hung, Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was noted as what the next trainer resumes, and its slot held for ever: none was granted for a snapshot."""
    store, scene = hung
    store.goes_on.set()
    monkeypatch.setattr(startup, "FIRST_ANSWER_S", HANG_S)
    monkeypatch.setattr(startup, "AGAIN_S", HANG_S)
    claimed(store, 1)
    published(store, 1, 20)
    ended(store, 1, 20)
    found, closed, may_be_found = list[Any](), list[Slot](), threading.Event()
    find, close = Finder.find, Slot.close

    def find_when_let(finder: Finder, copies: list[Copy], head: Callable[[Copy, SlotRecord], None]) -> Any:
        found.append(find(finder, copies, head))
        assert may_be_found.wait(HANG_S)
        return found[-1]

    def tell_and_close(slot: Slot) -> None:
        closed.append(slot)
        close(slot)

    monkeypatch.setattr(Finder, "find", find_when_let)
    monkeypatch.setattr(Slot, "close", tell_and_close)
    scene.begin()
    scene.until(lambda: found)
    begun = list[bool]()
    store.goes_on.clear()  # what the next generation asks of the store takes longer than the search for the first did

    scene.startup.begin_again(begun.append)
    may_be_found.set()
    scene.until(lambda: closed or scene.startup.point)

    assert closed == list(found[0].slots)
    assert not begun
    store.goes_on.set()
    scene.until(lambda: begun and scene.startup.point)
    assert scene.pipeline.pool.usable == list(scene.startup.point.indexes)  # type: ignore[union-attr]


def test_an_end_that_a_store_does_not_take_is_waited_for_no_longer_than_it_may(hung: tuple[Hung, Scene]) -> None:
    """A hung mount kept a process of an instance that was going away, until it was killed without another word."""
    store, scene = hung
    store.goes_on.set()
    claimed(store, 1)
    ended(store, 1, None)
    scene.begin()
    scene.until(scene.startup.generation.claimed.is_set)
    store.goes_on.clear()

    with pytest.raises(Unavailable, match="has not answered in time"):
        scene.startup.end("interrupted", standing(0.05))


def test_no_generation_follows_the_last_one_that_there_can_be(store: Gate, scene: Scene) -> None:
    claimed(store, MAX_GENERATION)

    scene.begin()

    assert f"no generation can follow {MAX_GENERATION}" in str(scene.refused[0])


@pytest.mark.parametrize("number", [99_999_999, 10**8 + 1])
def test_a_run_goes_on_after_a_generation_of_any_length(store: Gate, scene: Scene, number: int) -> None:
    claimed(store, number)
    published(store, number, 20)
    ended(store, number, 20)

    scene.begin()
    scene.until(scene.found)

    assert scene.startup.generation.number == number + 1
    assert scene.startup.point is not None
    assert scene.startup.point.id == SnapshotId(number, 20)


def test_a_snapshot_whose_beginning_was_told_and_that_is_gone_is_no_new_run(
    store: Gate, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script had its `extra` and its place in the program already, and then trained fresh weights from there."""
    claimed(store, 1)
    published(store, 1, 20)
    ended(store, 1, None)

    def tell_and_lose(finder: Finder, copies: list[Copy], head: Callable[[Copy, SlotRecord], None]) -> None:
        head(copies[0], Content(copies[0].id).record())

    monkeypatch.setattr(Finder, "find", tell_and_lose)
    scene.begin()
    scene.until(scene.found)

    assert scene.startup.finding is Finding.FAILED
    assert "is gone, and so is every other one" in str(scene.startup.error)


# ---- lists that hide what the store holds ---------------------------------------------------------------------------


class Stale(Gate):
    """A store whose lists show nothing for as long as a test says: a cache in front of it, or a page of a gateway."""

    def __init__(self, *hidden: str) -> None:
        super().__init__()
        self.stale, self.hidden = True, hidden or ("",)

    def list(self, prefix: str, **options: Any) -> Any:
        hides = self.stale and prefix.startswith(self.hidden)
        return iter([]) if hides else super().list(prefix, **options)


@pytest.fixture
def stale(tmp_path: Path) -> Iterator[tuple[Stale, Scene]]:
    store = Stale()
    scene = Scene(store, tmp_path)
    yield store, scene
    scene.close()


def nothing_was_begun(scene: Scene) -> bool:
    return not any(isinstance(event, events.NothingToResume) for event in scene.heard)


def test_an_empty_list_is_no_new_run_where_its_first_claim_is_taken(stale: tuple[Stale, Scene]) -> None:
    """A run began anew beside the one that there was, under another identity, and retired all of its snapshots."""
    store, scene = stale
    for number in (1, 2):
        claimed(store, number)
        ended(store, number, 20)
    published(store, 2, 20)

    scene.begin()
    scene.until(lambda: any(isinstance(event, events.StoreBlind) for event in scene.heard))
    assert not scene.found()
    store.stale = False
    scene.until(scene.found)

    assert scene.startup.point is not None
    assert str(scene.startup.point.id) == str(SnapshotId(2, 20))
    assert scene.startup.generation.run_id == RUN_ID
    assert nothing_was_begun(scene)


def test_a_list_that_stays_empty_refuses_the_start(stale: tuple[Stale, Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "STALE_S", 0.05)
    store, scene = stale
    claimed(store, 1)
    published(store, 1, 20)
    ended(store, 1, 20)

    scene.begin()
    scene.until(lambda: scene.refused)

    assert "cannot be trusted: its listing ends at generation 0, but 2 is claimed" in str(scene.refused[0])
    assert "--fresh" in str(scene.refused[0])
    assert nothing_was_begun(scene)
    store.stale = False
    assert [info.key for info in store.list(KEYS.commits, deadline=FOREVER)] == [KEYS.commit(SnapshotId(1, 20))]


class Repaired(MemoryStore):
    """A store that has lost sight of every shard, until a test says otherwise."""

    missing = True

    def stat(self, key: str, **options: Any) -> Any:
        if self.missing and key.endswith(".safetensors"):
            raise NotFound(key)
        return super().stat(key, **options)


@pytest.fixture
def repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Repaired, Scene]]:
    """A run with two snapshots whose shards are missing."""
    monkeypatch.setattr(finder, "PAUSES_S", ())
    store = Repaired()
    claimed(store, 1)
    store.missing = False
    published(store, 1, 20)
    ended(store, 1, 20)
    store.missing = True
    scene = Scene(store, tmp_path)
    yield store, scene
    scene.close()


def test_snapshots_that_are_all_missing_are_looked_for_again(repaired: tuple[Repaired, Scene]) -> None:
    """A store that is being repaired says 404 for half a minute: no reason to end a fleet."""
    store, scene = repaired
    scene.begin()
    scene.until(lambda: any(isinstance(event, events.StoreBlind) for event in scene.heard))
    assert not scene.found()
    store.missing = False
    scene.until(scene.found)

    assert scene.startup.point is not None
    assert scene.startup.point.id == SnapshotId(1, 20)


def test_snapshots_that_stay_missing_end_the_start(
    repaired: tuple[Repaired, Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "STALE_S", 0.05)
    scene = repaired[1]
    scene.begin()
    scene.until(scene.found)

    assert scene.startup.finding is Finding.FAILED
    assert "none of them can be used" in str(scene.startup.error)
    assert nothing_was_begun(scene)


def ended(store: ObjectStore, number: int, step: int | None) -> None:
    claim = claim_of(number)
    commit.end(store, KEYS, number, claim.nonce, "interrupted", step, FOREVER)


def test_a_list_without_the_snapshots_that_an_end_speaks_of_is_looked_at_again(tmp_path: Path) -> None:
    """It shows the claims, which are new, and hides the commits."""
    store = Stale(KEYS.commits, KEYS.snapshots)
    claimed(store, 1)
    published(store, 1, 20)
    ended(store, 1, 20)
    scene = Scene(store, tmp_path)
    try:
        scene.begin()
        scene.until(lambda: any(isinstance(event, events.StoreBlind) for event in scene.heard))
        blind = next(event for event in scene.heard if isinstance(event, events.StoreBlind))
        assert "it lists no snapshot, but step 20 was durable there" in blind.reason
        assert not scene.found()
        store.stale = False
        scene.until(scene.found)
        assert scene.startup.point is not None
    finally:
        scene.close()


@pytest.mark.parametrize("before", ["nothing durable", "another identity"])
def test_a_run_without_snapshots_begins_at_step_0(store: Gate, scene: Scene, before: str) -> None:
    claimed(store, 1, RUN_ID if before == "nothing durable" else "f" * 32)
    ended(store, 1, None if before == "nothing durable" else 20)
    if before == "another identity":
        claimed(store, 2)
        ended(store, 2, None)
    scene.begin()
    scene.until(scene.found)

    assert scene.startup.finding is Finding.NOTHING
