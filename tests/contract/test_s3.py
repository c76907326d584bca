"""S3Store owes what every ObjectStore owes: against moto's server, and against a second one that keeps no checksums."""

from __future__ import annotations

import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from cloud.notice import Deadline
from cloud.s3 import S3Options, S3Store
from cloud.s3_probe import Quirks
from cloud.store import ObjectStore
from tests.contract.store_contract import StoreContract, keys, put, read
from tests.support.s3_account import random_bytes, use_account

NEVER = Deadline.never()
START_S = 30.0
PART_BYTES = 8 * 1024 * 1024  # S3 takes no part below 5 MiB but the last
BUCKET = "bucket"
URL = re.compile(r"http://127\.0\.0\.1:\d+")


def serve(*command: str) -> Iterator[str]:
    """The URL that a server prints, until the caller goes on."""
    environment = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        told: queue.Queue[str] = queue.Queue()

        def listen() -> None:  # to the end: a server blocks when nobody reads its log of requests
            assert process.stdout
            for line in process.stdout:
                if found := URL.search(line):
                    told.put(found.group())

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield told.get(timeout=START_S)
        finally:
            process.kill()
            listener.join(START_S)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    yield from serve("moto.server", "-p", "0")


@pytest.fixture(scope="module")
def localbucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("localbucket")
    (root / BUCKET).mkdir()
    with socket.create_server(("127.0.0.1", 0)) as found:  # it does not tell a port that it chose itself
        port = found.getsockname()[1]
    yield from serve("localbucket", str(root), "--port", str(port))


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

    @pytest.mark.slow
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
