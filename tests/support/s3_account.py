"""What tests of S3Store start from: somebody's credentials, a store with small parts, and some bytes of seven parts."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.s3.copy import COPY_BYTES
from cloud.s3.store import S3Options, S3Store
from cloud.store import Receipt
from tests.support.clock import FakeClock
from tests.support.s3_server import S3Server

NEVER = Deadline.never()
PART_BYTES = 64 * 1024
STREAMS = 4
PARTS = 7
KEY = "runs/a"  # of what `put` puts, in the bucket


def random_bytes(size: int) -> bytes:
    """The same at every call."""
    return random.Random(0).randbytes(size)


DATA = random_bytes(PARTS * PART_BYTES - 1000)


@functools.cache
def _loader(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def use_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and region in the environment; botocore's models are read once, not 20 ms for each store."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr("botocore.session.create_loader", _loader)


def open_store(server: S3Server, streams: int = STREAMS, copy_bytes: int = COPY_BYTES) -> S3Store:
    """A store in `server` that takes no time to pause."""
    options = S3Options(endpoint=server.url, streams=streams)
    return S3Store("s3://bucket/runs", options, part_bytes=PART_BYTES, copy_bytes=copy_bytes, sleep=FakeClock().sleep)


def put(store: S3Store | RetryingStore, data: bytes = DATA) -> Receipt:
    """Put `data` as KEY."""
    return store.put("a", memoryview(data), deadline=NEVER)
