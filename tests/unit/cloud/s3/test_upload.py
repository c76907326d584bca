"""Uploads to S3: what was lost is sent again, what is there is not, and nobody guesses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

from cloud.digest import crc64nvme
from cloud.errors import AlreadyExists, CloudError, OutcomeUnknown, SourceUnreadable, Unavailable
from cloud.retry import RetryingStore
from cloud.s3.store import S3Options, S3Store
from cloud.store import CHUNK_BYTES, Receipt
from tests.support.clock import FakeClock
from tests.support.patience import HANG_S
from tests.support.s3_account import DATA, KEY, NEVER, PART_BYTES, PARTS, STREAMS, open_store, put, use_account
from tests.support.s3_server import S3Server


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    use_account(monkeypatch)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(min_part_bytes=1024) as server:
        yield server


@pytest.fixture
def bare(server: S3Server) -> Iterator[S3Store]:
    with closing(open_store(server)) as store:
        yield store


@pytest.fixture
def store(bare: S3Store) -> RetryingStore:
    return RetryingStore(bare, sleep=FakeClock().sleep)


def leave_unfinished(server: S3Server, key: str, data: bytes = DATA, parts: int = 2) -> None:
    """An upload that was cancelled when it had exactly so many parts: one stream has nothing else on its way."""
    sent, cancelled = list[int](), threading.Event()

    def progress(size: int, **_: Any) -> None:
        sent.append(size)
        if len(sent) == parts:
            cancelled.set()

    with closing(open_store(server, streams=1)) as store, pytest.raises(Unavailable, match="no time left"):
        store.put(key, memoryview(data), deadline=NEVER.unless(cancelled), progress=progress)


def count(server: S3Server, operation: str) -> int:
    return len(server.calls(operation))


# --------------------------------------------------------------------------------------------------- replies are lost


@pytest.mark.parametrize(
    "operation",
    [
        "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "ListMultipartUploads", "ListParts",
        "PutObject", "HeadObject", "GetObject", "ListObjectsV2", "DeleteObject", "AbortMultipartUpload",
    ],
)  # fmt: skip
def test_a_lost_reply_changes_nothing_in_the_end(server: S3Server, store: RetryingStore, operation: str) -> None:
    leave_unfinished(server, "a")
    leave_unfinished(server, "b")
    server.fault("lose_reply", operation)

    put(store)
    store.put("c", memoryview(DATA), deadline=NEVER)
    store.put_if_absent("claim", b"ours", deadline=NEVER)
    into = bytearray(len(DATA))
    store.get("a", memoryview(into), deadline=NEVER)
    found = [info.key for info in store.list("", deadline=NEVER)]
    store.delete("a", deadline=NEVER)
    store.abandon("b", deadline=NEVER)

    assert into == DATA
    assert found == ["a", "c", "claim"]
    assert server.contents() == {"runs/c": DATA, "runs/claim": b"ours"}
    assert server.uploads() == []


def test_a_commit_without_a_reply_is_unknown(server: S3Server, bare: S3Store) -> None:
    server.fault("lose_reply", "PutObject")

    with pytest.raises(OutcomeUnknown):
        bare.put_if_absent("claim", b"ours", deadline=NEVER)

    assert server.contents() == {"runs/claim": b"ours"}


def test_a_commit_that_was_ours_is_told_from_another_s(server: S3Server, store: RetryingStore) -> None:
    server.fault("lose_reply", "PutObject")
    store.put_if_absent("claim", b"ours", deadline=NEVER)

    with pytest.raises(AlreadyExists):
        store.put_if_absent("claim", b"theirs", deadline=NEVER)
    assert server.contents() == {"runs/claim": b"ours"}


def test_an_error_of_the_server_leaves_a_commit_unknown(server: S3Server, bare: S3Store) -> None:
    server.fault("error", "PutObject", status=500, code="InternalError")

    with pytest.raises(OutcomeUnknown):
        bare.put_if_absent("claim", b"ours", deadline=NEVER)


def test_a_conflict_and_a_refusal_for_load_leave_nothing(server: S3Server, bare: S3Store) -> None:
    for status, code in ((409, "ConditionalRequestConflict"), (503, "SlowDown")):
        server.fault("error", "PutObject", status=status, code=code)
        with pytest.raises(Unavailable, match=code):
            bare.put_if_absent("claim", b"ours", deadline=NEVER)
    assert server.contents() == {}


def test_a_completion_is_not_repeated_as_an_upload(server: S3Server, bare: S3Store) -> None:
    server.fault("lose_reply", "CompleteMultipartUpload")

    receipt = put(bare)

    assert receipt.crc64nvme == crc64nvme(DATA)
    assert count(server, "UploadPart") == PARTS
    assert server.contents() == {KEY: DATA}


def test_a_look_that_fails_is_repeated_and_the_completion_is_not(server: S3Server, bare: S3Store) -> None:
    server.fault("lose_reply", "HeadObject")

    put(bare)

    assert (count(server, "HeadObject"), count(server, "CompleteMultipartUpload")) == (2, 1)
    assert server.contents() == {KEY: DATA}


def test_without_sums_another_object_of_the_same_size_is_not_taken_for_ours(
    server: S3Server, store: RetryingStore
) -> None:
    server.configure(checksums="ignore")
    put(store, bytes(len(DATA)))
    server.fault("lose_reply", "CompleteMultipartUpload")

    put(store)

    assert server.contents() == {KEY: DATA}


# ----------------------------------------------------------------------------------------- parts that do not arrive


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        ("reset", {"after_bytes": PART_BYTES // 2}),
        ("error", {"status": 500, "code": "InternalError"}),
        ("error", {"status": 503, "code": "SlowDown", "times": 3}),
        ("corrupt_stored", {"offset": 100}),
        ("lose_reply", {}),
    ],
)
def test_one_part_is_sent_again_and_not_the_whole(
    server: S3Server, bare: S3Store, kind: str, details: dict[str, object]
) -> None:
    server.fault(kind, "UploadPart", nth=2, **details)

    put(bare)

    assert server.contents() == {KEY: DATA}
    assert count(server, "UploadPart") == PARTS + int(str(details.get("times", 1)))
    assert server.uploads() == []


def test_what_was_damaged_on_the_way_is_refused_and_sent_again(server: S3Server, store: RetryingStore) -> None:
    server.fault("corrupt_stored", "PutObject")

    put(store, b"small")

    assert server.contents() == {KEY: b"small"}
    assert count(server, "PutObject") == 2


def test_a_part_that_the_store_forgot_is_sent_again_alone(server: S3Server, store: RetryingStore) -> None:
    server.fault("forget_part", "UploadPart", nth=3)

    put(store)

    assert server.contents() == {KEY: DATA}
    assert count(server, "UploadPart") == PARTS + 1


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "embedded_error", "code": "InternalError"},
        {"kind": "error", "status": 503, "code": "SlowDown", "times": 2},
    ],
)
def test_a_completion_that_fails_is_asked_for_again(server: S3Server, bare: S3Store, fault: dict[str, object]) -> None:
    server.fault(operations="CompleteMultipartUpload", **fault)  # type: ignore[arg-type]

    put(bare)

    assert server.contents() == {KEY: DATA}
    assert count(server, "UploadPart") == PARTS


def test_a_conflict_on_completion_is_another_upload(server: S3Server, store: RetryingStore) -> None:
    server.fault("error", "CompleteMultipartUpload", status=409, code="ConditionalRequestConflict")

    put(store)

    assert server.contents() == {KEY: DATA}
    assert server.uploads() == []


def test_a_store_that_is_busy_for_long_is_asked_less_and_in_the_end_served(
    server: S3Server, store: RetryingStore
) -> None:
    server.fault("error", status=503, code="SlowDown", times=8)

    put(store)

    assert server.contents() == {KEY: DATA}


def test_an_upload_that_somebody_abandoned_is_begun_again(server: S3Server, store: RetryingStore) -> None:
    server.fault("error", "UploadPart", nth=4, status=404, code="NoSuchUpload")

    put(store)

    assert server.contents() == {KEY: DATA}


def test_what_was_put_together_wrongly_does_not_stay(server: S3Server, bare: S3Store) -> None:
    server.configure(checksums="ignore")  # then nobody refuses a completion without all parts
    server.fault("forget_part", "UploadPart", nth=PARTS)
    server.fault("lose_reply", "CompleteMultipartUpload")

    with pytest.raises(CloudError):
        put(bare)

    assert server.contents() == {}


# ------------------------------------------------------------------------------------------------- going on after all


def test_a_put_that_is_cancelled_ends_and_lets_go_of_the_source(server: S3Server, bare: S3Store) -> None:
    source, cancelled = bytearray(DATA), threading.Event()

    with memoryview(source) as view, pytest.raises(Unavailable, match="no time left"):
        bare.put("a", view, deadline=NEVER.unless(cancelled), progress=lambda _, **__: cancelled.set())

    source.clear()  # BufferError if anybody still held it
    assert count(server, "UploadPart") <= STREAMS
    assert server.contents() == {}
    assert bare.unfinished("", deadline=NEVER) == ["a"]


def test_a_later_put_sends_only_what_is_missing(server: S3Server, bare: S3Store) -> None:
    leave_unfinished(server, "a", parts=3)
    server.forget_calls()
    told: list[int] = []

    receipt = bare.put("a", memoryview(DATA), deadline=NEVER, progress=lambda count, **_: told.append(count))

    assert sorted(call.part for call in server.calls("UploadPart")) == [4, 5, 6, 7]
    assert sum(told) == len(DATA)
    assert receipt == Receipt(len(DATA), crc64nvme(DATA), (crc64nvme(DATA),))
    assert server.contents() == {KEY: DATA}
    assert server.uploads() == []


def test_a_part_with_another_content_is_sent_again(server: S3Server, bare: S3Store) -> None:
    other = bytearray(DATA)
    other[PART_BYTES] ^= 1
    leave_unfinished(server, "a", bytes(other), parts=3)
    server.forget_calls()

    put(bare)

    assert sorted(call.part for call in server.calls("UploadPart")) == [2, 4, 5, 6, 7]
    assert server.contents() == {KEY: DATA}


def test_what_was_begun_under_another_encryption_does_not_stay(server: S3Server) -> None:
    leave_unfinished(server, "a", parts=3)
    options = S3Options(endpoint=server.url, sse="aws:kms")
    with closing(S3Store("s3://bucket/runs", options, part_bytes=PART_BYTES)) as bare:
        put(RetryingStore(bare, sleep=FakeClock().sleep))

        assert bare.unfinished("", deadline=NEVER) == []
    headers = requests.head(f"{server.url}/bucket/{KEY}", timeout=HANG_S).headers
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert server.contents() == {KEY: DATA}


def test_an_upload_without_sums_is_not_gone_on_with(server: S3Server, bare: S3Store) -> None:
    server.configure(checksums="ignore")
    leave_unfinished(server, "a", parts=3)
    server.forget_calls()

    put(bare)

    assert count(server, "UploadPart") == PARTS
    assert server.contents() == {KEY: DATA}


def test_who_may_not_list_uploads_puts_all_the_same(server: S3Server, bare: S3Store) -> None:
    server.deny("s3:ListBucketMultipartUploads")

    put(bare)

    assert server.contents() == {KEY: DATA}


def test_no_part_is_begun_while_progress_blocks(server: S3Server, bare: S3Store) -> None:
    let_go = threading.Event()

    def progress(_: int, **__: Any) -> None:
        assert let_go.wait(HANG_S)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(bare.put, "a", memoryview(DATA), deadline=NEVER, progress=progress)
        server.wait_calls("UploadPart", STREAMS)
        begun = count(server, "UploadPart")
        let_go.set()
        done.result(HANG_S)

    assert begun == STREAMS


def test_progress_hears_whether_a_part_is_still_on_its_way(server: S3Server, bare: S3Store) -> None:
    held, idle = server.fault("stall", "UploadPart", nth=2), list[float]()

    def progress(_: int, *, idle_s: Callable[[], float]) -> None:
        if not idle:
            server.wait_struck(held)
            idle.append(idle_s())
            server.release()
            while not idle_s():
                os.sched_yield()

    bare.put("a", memoryview(DATA), deadline=NEVER, progress=progress)

    assert idle == [0.0]


def test_unfinished_uploads_are_told_and_given_up(server: S3Server, bare: S3Store) -> None:
    put(bare)
    for key in ("a", "ab", "a"):
        leave_unfinished(server, key, bytes(len(DATA)))

    assert bare.unfinished("", deadline=NEVER) == ["a", "ab"]
    bare.abandon("a", deadline=NEVER)
    bare.abandon("a", deadline=NEVER)

    assert bare.unfinished("a", deadline=NEVER) == ["ab"]
    assert server.contents() == {KEY: DATA}


# ------------------------------------------------------------------------------------------------------------ sources


def test_a_file_goes_up_as_memory_does(server: S3Server, bare: S3Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)

    assert bare.put("a", source, deadline=NEVER) == Receipt(len(DATA), crc64nvme(DATA), (crc64nvme(DATA),))
    assert server.contents() == {KEY: DATA}


def test_a_file_that_becomes_shorter_is_no_object(server: S3Server, bare: S3Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)

    def progress(_: int, **__: Any) -> None:
        os.truncate(source, 10)

    with closing(open_store(server, streams=1)) as store, pytest.raises(SourceUnreadable, match="source"):
        store.put("a", source, deadline=NEVER, progress=progress)
    assert server.contents() == {}


@pytest.mark.parametrize("part_bytes", [CHUNK_BYTES // 2, 2 * CHUNK_BYTES])
def test_chunk_sums_do_not_depend_on_the_size_of_parts(server: S3Server, part_bytes: int) -> None:
    data = bytes(range(256)) * (5 * CHUNK_BYTES // 512) + b"the rest"
    with closing(S3Store("s3://bucket", S3Options(server.url), part_bytes=part_bytes)) as store:
        receipt = put(store, data)

    chunks = tuple(crc64nvme(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
    assert receipt == Receipt(len(data), crc64nvme(data), chunks)
