"""Who is awaited, and for how long. Whole agents at it are tests/process/handover, every order of events is
tests/model/test_two_agents.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloud.errors import Unavailable
from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore
from cloud.testing.memory import MemoryStore
from harness.core.manifest import FORMAT, Claim
from harness.core.snapshot import SnapshotId
from harness.snapshots import commit
from harness.snapshots.handover import LONGEST_GAP_S, Predecessors, newer_claim
from tests.support.clock import FakeClock
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content
from tests.support.stores import FaultyStore

SILENCE_S = 150.0


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def claimed(
    store: ObjectStore,
    number: int,
    agent: str = "",
    lock_id: str = "",
    run_id: str = RUN_ID,
    *,
    continues: bool = False,
) -> None:
    claim = Claim(
        format=FORMAT, run_id=run_id, generation=number, nonce=f"{number:016x}", claimed_at="",
        host=f"host-{number}", pid=1, fresh=False, parent=None, command=("python", "train.py"), named=True,
        agent=agent or f"agent-{number}", lock_id=lock_id or f"place-{number}", continues=continues,
    )  # fmt: skip
    assert commit.claim(store, KEYS, claim, FOREVER).generation == number


def ended(store: ObjectStore, number: int, outcome: str = "interrupted", step: int = 10) -> None:
    commit.end(store, KEYS, number, f"{number:016x}", outcome, step, FOREVER)


def heard(store: ObjectStore, number: int, segment: int) -> None:
    store.put_if_absent(KEYS.journal(number, "host", segment), b"{}\n", deadline=FOREVER)


def predecessors(clock: FakeClock, number: int, agent: str = "ours", lock_id: str = "here") -> Predecessors:
    return Predecessors(KEYS, number, run_id=RUN_ID, agent=agent, lock_id=lock_id, silence_s=SILENCE_S, clock=clock)


def looks(watch: Predecessors, store: ObjectStore, clock: FakeClock, seconds: float, every_s: float = 2.0) -> list[int]:
    """What the last look says, after looking for so long."""
    awaited = watch.look(store, FOREVER)
    for _ in range(int(seconds / every_s)):
        clock.advance(every_s)
        awaited = watch.look(store, FOREVER)
    return awaited


# ---- the newcomer ---------------------------------------------------------------------------------------------------


def test_a_first_start_waits_for_nobody(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1, "ours")

    assert predecessors(clock, 1).look(store, FOREVER) == []


def test_an_older_generation_is_awaited_until_it_has_ended(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1)
    watch = predecessors(clock, 2)

    assert watch.look(store, FOREVER) == [1]
    claim = watch.claim_of(1)
    assert claim is not None
    assert claim.host == "host-1"
    ended(store, 1)
    assert watch.look(store, FOREVER) == []


def test_a_silent_journal_counts_as_an_end_and_not_a_second_sooner(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1)
    heard(store, 1, 0)
    watch = predecessors(clock, 2)

    assert looks(watch, store, clock, SILENCE_S - 2.0) == [1]
    clock.advance(2.0)
    assert watch.look(store, FOREVER) == []


def test_a_journal_that_goes_on_is_waited_for(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1)
    watch = predecessors(clock, 2)
    for segment in range(5):
        assert looks(watch, store, clock, SILENCE_S - 2.0) == [1]
        heard(store, 1, segment)

    assert looks(watch, store, clock, SILENCE_S - 2.0) == [1]
    assert looks(watch, store, clock, 4.0) == []


@pytest.mark.parametrize("late", ["host-z", "host-9"])
def test_each_host_s_segments_count_however_its_name_sorts(store: MemoryStore, clock: FakeClock, late: str) -> None:
    """Beside them lie the records of instances that were unfit."""
    claimed(store, 1)
    for segment in range(3):
        store.put_if_absent(KEYS.journal(1, "host-a", segment), b"{}\n", deadline=FOREVER)
    for instance in ("host-0", "i-1"):
        store.put_if_absent(KEYS.unfit(1, instance), b"{}", deadline=FOREVER)
    watch = predecessors(clock, 2)
    for segment in range(int(3 * SILENCE_S / 10)):
        store.put_if_absent(KEYS.journal(1, late, segment), b"{}\n", deadline=FOREVER)
        assert watch.look(store, FOREVER) == [1]
        clock.advance(10)
    assert looks(watch, store, clock, SILENCE_S) == []


def test_while_the_store_cannot_be_asked_nothing_counts_as_silence(store: MemoryStore, clock: FakeClock) -> None:
    """The older one could not put its journal either: it is to be heard again first."""
    claimed(store, 1)
    watch = predecessors(clock, 2)
    assert watch.look(store, FOREVER) == [1]
    clock.advance(SILENCE_S + LONGEST_GAP_S)
    with pytest.raises(Unavailable):
        watch.look(FaultyStore(store, "list"), FOREVER)

    assert watch.look(store, FOREVER) == [1]
    assert looks(watch, store, clock, SILENCE_S - 2.0) == [1]
    assert looks(watch, store, clock, 4.0) == []


def test_an_earlier_life_of_this_agent_is_not_awaited(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1, agent="ours")

    assert predecessors(clock, 2).look(store, FOREVER) == []


def test_who_held_the_lock_that_we_hold_is_dead(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1, lock_id="here")

    assert predecessors(clock, 2).look(store, FOREVER) == []


def test_claims_without_agent_and_place_are_nobody_s(store: MemoryStore, clock: FakeClock) -> None:
    claim = Claim(
        format=FORMAT, run_id=RUN_ID, generation=1, nonce="a" * 16, claimed_at="", host="h", pid=1, fresh=False,
        parent=None, command=(), named=True,
    )  # fmt: skip
    commit.claim(store, KEYS, claim, FOREVER)

    assert predecessors(clock, 2, agent="", lock_id="").look(store, FOREVER) == [1]


def test_what_was_before_fresh_is_not_awaited(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1, run_id="f" * 32)

    assert predecessors(clock, 2).look(store, FOREVER) == []


def test_an_agent_s_end_is_the_end_of_all_its_lives(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1, agent="restarted-in-place")
    claimed(store, 2, agent="restarted-in-place")
    watch = predecessors(clock, 3)
    assert watch.look(store, FOREVER) == [1, 2]

    ended(store, 2)

    assert watch.look(store, FOREVER) == []


def test_whoever_committed_had_waited_for_those_before_it(store: MemoryStore, clock: FakeClock) -> None:
    """Otherwise every start would wait for each generation that was ever killed without a word."""
    claimed(store, 1)
    claimed(store, 2)
    commit.publish(store, KEYS, Content(SnapshotId(2, 10)).staged(), "remote", FOREVER, lambda event: None)

    assert predecessors(clock, 3).look(store, FOREVER) == [2]


def test_that_the_run_was_finished_meanwhile_is_noted(store: MemoryStore, clock: FakeClock) -> None:
    claimed(store, 1)
    watch = predecessors(clock, 2)
    assert watch.look(store, FOREVER) == [1]
    assert watch.over is None

    ended(store, 1, "finished", 200)

    assert watch.look(store, FOREVER) == []
    assert watch.over is not None
    assert (watch.over.outcome, watch.over.step) == ("finished", 200)


@pytest.mark.parametrize("continues", [False, True])
def test_that_its_program_stopped_the_run_early_is_noted_unless_somebody_went_on(
    store: MemoryStore, clock: FakeClock, continues: bool
) -> None:
    claimed(store, 1)
    ended(store, 1, "stopped early", 200)
    claimed(store, 2, continues=continues)
    watch = predecessors(clock, 3)

    watch.look(store, FOREVER)

    assert (watch.over is None) is continues


def test_a_damaged_claim_is_awaited_by_its_journal(store: MemoryStore, clock: FakeClock) -> None:
    store.put_if_absent(KEYS.claim(1), b"{}", deadline=FOREVER)
    watch = predecessors(clock, 2)

    assert looks(watch, store, clock, SILENCE_S - 2.0) == [1]
    assert watch.claim_of(1) is None
    assert looks(watch, store, clock, 4.0) == []


def test_a_number_that_rises_while_the_claim_waits_makes_more_of_them_older(
    store: MemoryStore, clock: FakeClock
) -> None:
    claimed(store, 1)
    watch = predecessors(clock, 2)
    assert watch.look(store, FOREVER) == [1]
    claimed(store, 2)

    watch.generation = 3

    assert watch.look(store, FOREVER) == [1, 2]


# ---- the older one --------------------------------------------------------------------------------------------------


def test_a_newer_claim_of_somebody_else_is_seen(store: MemoryStore) -> None:
    claimed(store, 1, agent="ours")
    assert newer_claim(store, KEYS, 1, "ours", FOREVER) is None

    claimed(store, 2)

    newer = newer_claim(store, KEYS, 1, "ours", FOREVER)
    assert newer is not None
    assert newer.generation == 2
    assert newer_claim(store, KEYS, 2, "agent-2", FOREVER) is None


@pytest.mark.parametrize(("ours", "newer"), [(5, 10**8), (2 * 10**7, 10**8), (99_999_999, 10**8), (10**8, 10**8 + 1)])
def test_a_newer_claim_is_seen_where_a_list_is_not_in_the_order_of_numbers(
    store: MemoryStore, ours: int, newer: int
) -> None:
    claimed(store, newer)
    claimed(store, 3)

    found = newer_claim(store, KEYS, ours, "ours", FOREVER)

    assert found is not None
    assert found.generation == newer


def test_one_s_own_restart_in_place_asks_nobody_to_leave(store: MemoryStore) -> None:
    claimed(store, 1, agent="ours")
    ended(store, 1)
    claimed(store, 2, agent="ours")

    assert newer_claim(store, KEYS, 1, "ours", FOREVER) is None


def test_somebody_between_two_of_one_s_own_is_seen(store: MemoryStore) -> None:
    claimed(store, 1, agent="ours")
    claimed(store, 2)
    claimed(store, 3, agent="ours")

    newer = newer_claim(store, KEYS, 1, "ours", FOREVER)
    assert newer is not None
    assert newer.generation == 2


# ---- what a review found --------------------------------------------------------------------------------------------


class Slow(MemoryStore):
    """Each listing takes its time."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        self._clock.advance(self._seconds)
        return super().list(prefix, after=after, deadline=deadline)


def test_a_slow_store_is_no_reason_to_wait_for_ever(clock: FakeClock) -> None:
    """Looks further apart than a heartbeat began the silence anew, each of them."""
    store = Slow(clock, 10.0)
    claimed(store, 1)
    watch = predecessors(clock, 2)

    assert looks(watch, store, clock, 10.0) == [1]
    assert looks(watch, store, clock, 20.0) == []


def test_one_whose_claim_a_lifecycle_rule_has_deleted_is_awaited_by_its_journal(
    store: MemoryStore, clock: FakeClock
) -> None:
    commit.publish(store, KEYS, Content(SnapshotId(1, 10)).staged(), "remote", FOREVER, lambda event: None)
    watch = predecessors(clock, 2)

    assert looks(watch, store, clock, SILENCE_S - 2.0) == [1]
    assert watch.claim_of(1) is None
    assert looks(watch, store, clock, 4.0) == []
