"""S3Store owes what every ObjectStore owes: against moto's server, and against a second one that keeps no checksums."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cloud.notice import Deadline
from cloud.s3 import S3Options, S3Store
from cloud.s3_probe import Quirks
from cloud.store import ObjectStore
from tests.contract.store_contract import StoreContract, keys, put, read
from tests.support.s3_account import use_account

NEVER = Deadline.never()
START_S = 30.0
PART_BYTES = 8 * 1024 * 1024  # S3 takes no part below 5 MiB but the last
BUCKET = "bucket"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(command: list[str], port: int, **environment: str) -> Iterator[str]:
    """A server's URL once it accepts connections, until the caller goes on."""
    # From a clean directory and environment, and silent: a request log of a thousand requests helps nobody.
    process = subprocess.Popen(
        [sys.executable, *command],
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = Deadline.after(START_S)
        while True:
            assert process.poll() is None, f"{command} ended with {process.returncode}"
            assert not deadline.expired, f"{command} does not listen"
            try:
                socket.create_connection(("127.0.0.1", port), timeout=START_S).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(START_S)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    port = free_port()
    yield from serve(["-m", "moto.server", "-p", str(port)], port)


@pytest.fixture(scope="module")
def localbucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    root = tmp_path_factory.mktemp("localbucket")
    (root / BUCKET).mkdir()
    yield from serve(["-m", "localbucket", str(root), "--port", str(port)], port)


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
def moto_store(moto: str) -> Iterator[S3Store]:
    import requests

    requests.put(f"{moto}/{BUCKET}", timeout=START_S).raise_for_status()
    store = S3Store(f"s3://{BUCKET}/tests/moto", S3Options(endpoint=moto), part_bytes=PART_BYTES)
    yield store
    store.close()


@pytest.fixture(scope="module")
def localbucket_store(localbucket: str) -> Iterator[S3Store]:
    store = S3Store(f"s3://{BUCKET}", S3Options(endpoint=localbucket), part_bytes=PART_BYTES)
    yield store
    store.close()


class S3Contract(StoreContract):
    """The contract, and what goes through several requests."""

    def test_a_large_buffer_is_filled_by_several_requests(self, store: S3Store) -> None:
        data = os.urandom(5 * PART_BYTES + 5)
        put(store, "run/a", data)
        into = bytearray(len(data) - 3)

        store.get("run/a", memoryview(into), offset=3, deadline=NEVER)

        assert into == data[3:]

    def test_a_finished_upload_leaves_none_unfinished(self, store: S3Store) -> None:
        put(store, "run/a", bytes(PART_BYTES + 1))

        assert store.unfinished("", deadline=NEVER) == []


class TestMoto(S3Contract):
    @pytest.fixture
    def store(self, moto_store: S3Store) -> Iterator[ObjectStore]:
        yield from emptied(moto_store)

    def test_the_probe_finds_conditions_and_sums_that_nobody_checks(self, store: S3Store) -> None:
        found = store.probe("run/snapshots/", deadline=NEVER)

        assert found == Quirks(conditional=True, takes_sums=True, checks_sums=False)
        assert store.conditional
        assert keys(store) == []


class TestLocalBucket(S3Contract):
    @pytest.fixture
    def store(self, localbucket_store: S3Store) -> Iterator[ObjectStore]:
        yield from emptied(localbucket_store)

    def test_the_probe_finds_conditions_and_no_sums(self, store: S3Store) -> None:
        found = store.probe("run/snapshots/", deadline=NEVER)

        assert found == Quirks(conditional=True, takes_sums=True, checks_sums=False)
        assert keys(store) == []

    def test_objects_outlive_the_store(self, store: S3Store, localbucket: str) -> None:
        put(store, "run/a", b"bytes")
        store.close()

        again = S3Store(store.url, S3Options(endpoint=localbucket))

        assert read(again, "run/a") == b"bytes"
        again.close()
