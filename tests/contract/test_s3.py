"""S3Store owes what every ObjectStore owes: against moto's server, and against our own, which keeps every sum."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloud.notice import Deadline
from cloud.s3.probe import Quirks
from cloud.s3.store import S3Options, S3Store
from cloud.store import ObjectStore
from tests.contract.store_contract import StoreContract, keys, put, read
from tests.support.aws_account import REGION, Account, Lease, open_account
from tests.support.s3_account import random_bytes, use_account
from tests.support.s3_server import S3Server

NEVER = Deadline.never()
PART_BYTES = 8 * 1024 * 1024  # S3 takes no part below 5 MiB but the last
BUCKET = "bucket"


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """moto that answers one call at a time: its own server lets two threads have one key now and then."""
    lease_path = tmp_path_factory.mktemp("account") / "lease"
    lease = Lease(lease_path)
    yield open_account(lease_path, lease_path.with_name("log"))
    lease.release()


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    use_account(monkeypatch)


def emptied(store: S3Store) -> Iterator[S3Store]:
    """`store`, and nothing in it afterwards: opening one costs 0.1 s, and it may be used again after `close`."""
    yield store
    for key in keys(store):
        store.delete(key, deadline=NEVER)
    for key in store.unfinished("", deadline=NEVER):
        store.abandon(key, deadline=NEVER)


@pytest.fixture(scope="module")
def moto_store(moto: Account) -> Iterator[S3Store]:
    moto.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    store = S3Store(f"s3://{BUCKET}/tests/moto", S3Options(endpoint=moto.url), part_bytes=PART_BYTES)
    yield store
    store.close()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(bucket=BUCKET) as server:
        yield server


@pytest.fixture(scope="module")
def server_store(server: S3Server) -> Iterator[S3Store]:
    store = S3Store(f"s3://{BUCKET}/tests", S3Options(endpoint=server.url), part_bytes=PART_BYTES)
    yield store
    store.close()


class S3Contract(StoreContract):
    """The contract, and what goes through several requests."""

    def test_a_large_buffer_is_filled_by_several_requests(self, store: S3Store) -> None:
        data = random_bytes(5 * PART_BYTES + 5)
        put(store, "run/a", data)
        into = bytearray(len(data) - 3)

        store.get("run/a", memoryview(into), offset=3, deadline=NEVER)

        assert into == data[3:]

    def test_a_finished_upload_leaves_none_unfinished(self, store: S3Store) -> None:
        put(store, "run/a", bytes(PART_BYTES + 1))

        assert store.unfinished("", deadline=NEVER) == []


class TestMoto(S3Contract):
    keeps_sums = False

    @pytest.fixture
    def store(self, moto_store: S3Store) -> Iterator[ObjectStore]:
        yield from emptied(moto_store)

    def test_the_probe_finds_conditions_and_sums_that_nobody_checks(self, store: S3Store) -> None:
        found = store.probe("run/snapshots/", deadline=NEVER)

        assert found == Quirks(conditional=True, takes_sums=True, checks_sums=False)
        assert store.conditional
        assert keys(store) == []


class TestServerWithSums(S3Contract):
    @pytest.fixture
    def store(self, server_store: S3Store) -> Iterator[ObjectStore]:
        server_store.probe("run/snapshots/", deadline=NEVER)  # without it, the sums that a store tells are not believed
        yield from emptied(server_store)

    def test_the_probe_finds_conditions_and_sums(self, store: S3Store) -> None:
        found = store.probe("run/snapshots/", deadline=NEVER)

        assert found == Quirks(conditional=True, takes_sums=True, checks_sums=True)
        assert keys(store) == []

    def test_objects_outlive_the_store(self, store: S3Store, server: S3Server) -> None:
        put(store, "run/a", b"bytes")
        store.close()

        again = S3Store(store.url, S3Options(endpoint=server.url))

        assert read(again, "run/a") == b"bytes"
        again.close()
