"""What judges a soak has to see what is wrong: a soak that cannot fail shows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from cloud.store import ObjectStore
from harness.config.settings import Settings
from harness.core.snapshot import RunKeys, SnapshotId
from harness.snapshots import commit, retire
from harness.snapshots.open import open_existing_store
from tests.soak import leaks, losses
from tests.soak.bucket import Bucket, Found, Promise
from tests.soak.hosts import RUN, Sample
from tests.soak.losses import Step
from tests.soak.troubles import TROUBLES, Deck, StoreTroubles, Trouble
from tests.support.clock import standing
from tests.support.protocol import Content
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.sample

STORE = "s3://bucket/prefix"
KEYS = RunKeys(RUN)
SNAPSHOTS = [SnapshotId(1, 10), SnapshotId(1, 20), SnapshotId(2, 30)]
DURABLE = {str(snapshot) for snapshot in SNAPSHOTS}


def step(number: int, bits: str = "bits", *, pid: int = 1, at: float = 0.0) -> Step:
    return Step(number, f"{bits} of {number}", pid, at or float(number))


def sampled(values: list[int], every_s: float = 1.0) -> list[Sample]:
    return [Sample(index * every_s, value, value, 10, 5) for index, value in enumerate(values)]


# ---------------------------------------------------------------------------------------------------------- the curves


def test_a_torn_last_line_is_no_step(tmp_path: Path) -> None:
    curve = tmp_path / "curve"
    curve.write_text("1 0x1p+0 0x1p-8 7 1.5\n2 0x1p+0 0x1p-8 7 1.6\n3 0x1p+")

    assert [found.number for found in losses.read_curves([curve])] == [1, 2]


def test_one_bit_in_one_life_is_a_difference_though_the_step_was_right_in_another() -> None:
    unbroken = [step(1), step(2)]

    assert losses.differences([step(1), step(2), step(2)], unbroken) == []
    assert len(losses.differences([step(1), step(2, "other"), step(2)], unbroken)) == 1


def test_a_step_that_nobody_trained_is_a_difference_and_so_is_one_too_many() -> None:
    assert losses.differences([step(1)], [step(1), step(2)]) == ["step 2 was never trained"]
    assert len(losses.differences([step(1), step(2)], [step(1)])) == 1


def test_repeated_steps_are_told_by_what_ended_the_life_that_was_ahead() -> None:
    lives = [*(step(n) for n in (1, 2, 3, 4, 5)), step(4, pid=2, at=9.0), step(5, pid=2, at=9.1)]

    assert losses.lost_by_cause(lives, [(2.0, "frozen"), (5.1, "power cut"), (8.0, "rebalance")]) == {"power cut": [2]}


# -------------------------------------------------------------------------------------------------------------- leaks


def test_an_agent_that_grows_all_the_time_leaks_and_one_that_breathes_does_not() -> None:
    mib = 1 << 20
    growing = sampled([mib * second for second in range(120)])
    breathing = sampled([mib * (100 if second % 2 else 200) for second in range(120)])
    warming_up = sampled([mib * min(100, 10 * second) for second in range(120)])

    assert [growth.figure for growth in leaks.grown({1: growing})] == ["own memory"]
    assert leaks.grown({1: breathing, 2: warming_up}) == []


# ------------------------------------------------------------------------------------------------------------- the deck


def test_every_card_comes_before_any_comes_again_and_only_cards_that_fit() -> None:
    deck = Deck([1, 2, 3, 4], Random(0))

    assert sorted(deck.draw() for _ in range(4)) == [1, 2, 3, 4]
    assert [deck.draw(lambda card: card == 2) for _ in range(3)] == [2, 2, 2]


# ------------------------------------------------------------------------------------------------------------- troubles


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.name)
def test_a_trouble_is_over_when_the_store_is_healed(server: S3Server, store: ObjectStore, trouble: Trouble) -> None:
    before = [entry.key for entry in store.list("", deadline=standing(30.0))]
    troubles = StoreTroubles(server.url, Random(0))
    troubles.access_key = "a"

    trouble.begin(troubles, Random(0))
    trouble.end(troubles)
    troubles.heal()

    assert [entry.key for entry in store.list("", deadline=standing(30.0))] == before


# ---------------------------------------------------------------------------------------------------------- the bucket


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with S3Server(min_part_bytes=1) as server:
        yield server


@pytest.fixture
def store(server: S3Server) -> Iterator[ObjectStore]:
    with closing(open_existing_store(STORE, Settings(store=STORE, run=RUN, s3_endpoint=server.url))) as store:
        for snapshot in SNAPSHOTS:
            commit.publish(store, KEYS, Content(snapshot).staged(), "remote", standing(30.0), lambda event: None)
        yield store


def look(server: S3Server, *, keep_last: int = 2, keep_every: int = 10) -> Found:
    return Bucket(server.url, STORE, Promise(keep_last, keep_every)).look(DURABLE, set())


def test_a_bucket_with_what_is_kept_and_nothing_else_is_exact(server: S3Server, store: ObjectStore) -> None:
    assert look(server).is_exact
    assert look(server, keep_last=3, keep_every=1000).is_exact


def test_what_should_have_been_retired_is_surplus(server: S3Server, store: ObjectStore) -> None:
    found = look(server, keep_every=1000)

    assert found.surplus == [SNAPSHOTS[0]]
    assert not found.is_exact


def test_a_milestone_that_is_gone_is_wrong_and_so_are_too_few_commits(server: S3Server, store: ObjectStore) -> None:
    retire.remove(store, KEYS, SNAPSHOTS[0], standing(30.0))

    assert look(server).words() == "wrong: 00000001-000000000010 is gone: a milestone"
    assert look(server, keep_last=3, keep_every=1000).words() == "wrong: only 2 commits"


def test_a_missing_shard_is_wrong(server: S3Server, store: ObjectStore) -> None:
    shard = next(key for key in server.objects() if str(SNAPSHOTS[2]) in key and key.endswith(".safetensors"))
    server.delete_behind(shard)

    assert "None bytes" in look(server).words()


@pytest.mark.parametrize(
    ("key", "where"),
    [
        (f"{RUN}/snapshots/00000001-000000000015-{'a' * 16}/x", "garbage"),
        (f"{RUN}/snapshots/00000009-000000000015-{'a' * 16}/x", "being_written"),
        (f"{RUN}/somewhere/x", "wrong"),
    ],
)
def test_an_object_that_no_manifest_names_is_not_exact(
    server: S3Server, store: ObjectStore, key: str, where: str
) -> None:
    store.put(key, memoryview(b"x"), deadline=standing(30.0))

    found = look(server)

    assert len(getattr(found, where)) == 1
    assert not found.is_exact
