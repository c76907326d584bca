"""A copy that S3 makes itself: no byte comes by here, and nothing is believed that S3 does not say again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from cloud.errors import CannotCopy, CopyDiffers, Denied, NotFound, OutcomeUnknown, Unavailable
from cloud.retry import COPY_ATTEMPTS, RetryingStore
from cloud.s3.store import S3Store
from cloud.store import Receipt
from tests.support.clock import FakeClock
from tests.support.s3_account import DATA, NEVER, open_store, put, use_account
from tests.support.s3_server import S3Server

COPY_BYTES = 100_000
COPIED_PARTS = -(-len(DATA) // COPY_BYTES)


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    use_account(monkeypatch)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(min_part_bytes=1024) as server:
        yield server


@pytest.fixture
def bare(server: S3Server) -> Iterator[S3Store]:
    """Copies an object by one request."""
    with closing(open_store(server)) as store:
        store.probe("", deadline=NEVER)
        yield store


@pytest.fixture
def parted(server: S3Server) -> Iterator[S3Store]:
    """Copies an object in parts."""
    with closing(open_store(server, copy_bytes=COPY_BYTES)) as store:
        store.probe("", deadline=NEVER)
        yield store


def copy(store: S3Store | RetryingStore, receipt: Receipt) -> None:
    store.copy("a", "b", receipt, deadline=NEVER)


def asked(server: S3Server) -> list[str]:
    return [call.operation for call in server.calls()]


def test_a_store_whose_sums_nobody_has_tried_is_not_trusted_with_copies(server: S3Server) -> None:
    with closing(open_store(server)) as store:
        receipt = put(store)

        with pytest.raises(CannotCopy):
            copy(store, receipt)

    assert server.contents() == {"runs/a": DATA}


def test_a_small_object_is_one_request_between_two_looks(server: S3Server, bare: S3Store) -> None:
    receipt = put(bare)
    server.forget_calls()

    copy(bare, receipt)

    assert asked(server) == ["HeadObject", "CopyObject", "HeadObject"]
    assert server.contents() == {"runs/a": DATA, "runs/b": DATA}


def test_a_large_object_is_copied_in_parts(server: S3Server, parted: S3Store) -> None:
    receipt = put(parted)
    server.forget_calls()

    copy(parted, receipt)

    middle = ["CreateMultipartUpload", *["UploadPartCopy"] * COPIED_PARTS, "CompleteMultipartUpload"]
    assert asked(server) == ["HeadObject", *middle, "HeadObject"]
    assert server.contents()["runs/b"] == DATA
    assert parted.stat("b", deadline=NEVER).crc64nvme == receipt.crc64nvme
    assert server.uploads() == []


@pytest.mark.parametrize("operation", ["CopyObject", "UploadPartCopy", "CompleteMultipartUpload"])
@pytest.mark.parametrize("kind", ["error", "lose_reply", "embedded_error"])
def test_a_request_that_fails_is_made_again(server: S3Server, operation: str, kind: str) -> None:
    whole = operation == "CopyObject"
    with closing(open_store(server, copy_bytes=10**9 if whole else COPY_BYTES)) as bare:
        bare.probe("", deadline=NEVER)
        store = RetryingStore(bare, sleep=FakeClock().sleep)
        receipt = put(store)
        server.fault(kind, operation, code="InternalError")

        copy(store, receipt)

    assert server.contents() == {"runs/a": DATA, "runs/b": DATA}


def test_who_cannot_copy_is_told_so_before_long(server: S3Server, bare: S3Store) -> None:
    store = RetryingStore(bare, sleep=FakeClock().sleep)
    receipt = put(store)
    server.forget_calls()
    server.fault("error", "CopyObject", times=None)

    with pytest.raises(OutcomeUnknown):
        copy(store, receipt)

    assert asked(server).count("CopyObject") == COPY_ATTEMPTS


def test_a_source_that_is_gone_is_not_found(server: S3Server, bare: S3Store) -> None:
    receipt = put(bare)
    server.delete_behind("runs/a")

    with pytest.raises(NotFound):
        copy(bare, receipt)


@pytest.mark.parametrize("copy_bytes", [10**9, COPY_BYTES])
def test_a_source_that_is_retired_between_the_look_and_the_copy_is_not_found(server: S3Server, copy_bytes: int) -> None:
    with closing(open_store(server, copy_bytes=copy_bytes)) as store:
        store.probe("", deadline=NEVER)
        receipt = put(store)
        server.fault("error", ("CopyObject", "UploadPartCopy"), status=404, code="NoSuchKey", times=None)

        with pytest.raises(NotFound, match="gone"):
            copy(store, receipt)

    assert server.contents() == {"runs/a": DATA}
    assert server.uploads() == []


def test_a_source_that_has_rotted_is_not_copied(server: S3Server, bare: S3Store) -> None:
    """S3 finds out by itself when it reads; a sum that it tells of the source is compared before."""
    receipt = put(bare)

    with pytest.raises(CopyDiffers):
        copy(bare, Receipt(receipt.size, receipt.crc64nvme ^ 1, receipt.chunk_crcs))

    assert server.contents() == {"runs/a": DATA}


@pytest.mark.parametrize("copy_bytes", [10**9, COPY_BYTES])
def test_a_copy_that_became_something_else_is_deleted(server: S3Server, copy_bytes: int) -> None:
    with closing(open_store(server, copy_bytes=copy_bytes)) as store:
        store.probe("", deadline=NEVER)
        receipt = put(store)
        server.flip("runs/a", offset=5)  # the sum that is kept beside it is still the old one

        with pytest.raises(CopyDiffers):
            copy(store, receipt)

    assert sorted(server.contents()) == ["runs/a"]
    assert server.uploads() == []


@pytest.mark.parametrize("checksums", ["ignore", "reject"])
def test_a_store_that_tells_no_sum_is_not_trusted_with_copies(server: S3Server, checksums: str) -> None:
    server.configure(checksums=checksums)
    with closing(open_store(server)) as store:
        store.probe("", deadline=NEVER)
        receipt = put(store)
        server.forget_calls()

        with pytest.raises(CannotCopy):
            copy(store, receipt)

    assert "CopyObject" not in asked(server)


@pytest.mark.parametrize("copy_bytes", [10**9, COPY_BYTES])
def test_a_role_that_may_not_read_may_not_copy(server: S3Server, copy_bytes: int) -> None:
    with closing(open_store(server, copy_bytes=copy_bytes)) as store:
        store.probe("", deadline=NEVER)
        receipt = put(store)
        server.fault("error", ("CopyObject", "UploadPartCopy"), status=403, code="AccessDenied", times=None)

        with pytest.raises(Denied):
            copy(store, receipt)

    assert server.contents() == {"runs/a": DATA}
    assert server.uploads() == []


def test_a_copy_whose_reply_was_lost_has_an_unknown_outcome(server: S3Server, bare: S3Store) -> None:
    receipt = put(bare)
    server.fault("lose_reply", "CopyObject")

    with pytest.raises(OutcomeUnknown):
        copy(bare, receipt)


def test_a_put_goes_on_after_a_copy_in_parts_that_died(server: S3Server, parted: S3Store) -> None:
    receipt = put(parted)
    server.fault("error", "UploadPartCopy", nth=2, times=None)
    server.fault("error", "AbortMultipartUpload", times=None)
    with pytest.raises(Unavailable):
        copy(parted, receipt)
    server.clear()
    assert len(server.uploads()) == 1

    assert parted.put("b", memoryview(DATA), deadline=NEVER) == receipt

    assert server.contents()["runs/b"] == DATA
    assert server.uploads() == []
