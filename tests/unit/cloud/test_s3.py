"""What every fault of an S3 store does to S3Store and to the one that asks again."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from cloud.digest import crc64nvme
from cloud.errors import AlreadyExists, CloudError, Denied, NotFound, OutcomeUnknown, Truncated, Unavailable
from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.s3 import S3Options, S3Store
from cloud.s3_errors import BucketGone
from cloud.s3_probe import Quirks
from cloud.store import CHUNK_BYTES, Receipt
from tests.support.clock import FakeClock
from tests.support.s3_account import use_account
from tests.support.s3_server import S3Server

NEVER = Deadline.never()
WAIT_S = 30.0
PART_BYTES = 64 * 1024
STREAMS = 4
PARTS = 7
DATA = os.urandom(PARTS * PART_BYTES - 1000)
KEY = "runs/a"


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    use_account(monkeypatch)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(min_part_bytes=1024) as server:
        yield server


def open_store(server: S3Server, streams: int = STREAMS) -> S3Store:
    options = S3Options(endpoint=server.url, streams=streams)
    return S3Store("s3://bucket/runs", options, part_bytes=PART_BYTES, sleep=FakeClock().sleep)


@pytest.fixture
def bare(server: S3Server) -> Iterator[S3Store]:
    store = open_store(server)
    yield store
    store.close()


@pytest.fixture
def store(bare: S3Store) -> RetryingStore:
    return RetryingStore(bare, sleep=FakeClock().sleep)


def put(store: S3Store | RetryingStore, data: bytes = DATA) -> Receipt:
    return store.put("a", memoryview(data), deadline=NEVER)


class Cancelled(Exception):
    """What a caller raises to end a put."""


def leave_unfinished(server: S3Server, key: str, data: bytes = DATA, parts: int = 2) -> None:
    """An upload that was cancelled when it had exactly so many parts: one stream has nothing else on its way."""
    sent: list[int] = []

    def progress(size: int) -> None:
        sent.append(size)
        if len(sent) == parts:
            raise Cancelled

    with contextlib.closing(open_store(server, streams=1)) as store, pytest.raises(Cancelled):
        store.put(key, memoryview(data), deadline=NEVER, progress=progress)


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


def test_an_exception_of_progress_ends_the_put_and_lets_go_of_the_source(server: S3Server, bare: S3Store) -> None:
    source = bytearray(DATA)

    def progress(_: int) -> None:
        raise Cancelled

    with memoryview(source) as view, pytest.raises(Cancelled):
        bare.put("a", view, deadline=NEVER, progress=progress)

    source.clear()  # BufferError if anybody still held it
    assert count(server, "UploadPart") <= STREAMS
    assert server.contents() == {}
    assert bare.unfinished("", deadline=NEVER) == ["a"]


def test_a_later_put_sends_only_what_is_missing(server: S3Server, bare: S3Store) -> None:
    leave_unfinished(server, "a", parts=3)
    server.forget_calls()
    told: list[int] = []

    receipt = bare.put("a", memoryview(DATA), deadline=NEVER, progress=told.append)

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

    def progress(_: int) -> None:
        assert let_go.wait(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(bare.put, "a", memoryview(DATA), deadline=NEVER, progress=progress)
        server.wait_calls("UploadPart", STREAMS)
        begun = count(server, "UploadPart")
        let_go.set()
        done.result(WAIT_S)

    assert begun == STREAMS


def test_unfinished_uploads_are_told_and_given_up(server: S3Server, bare: S3Store) -> None:
    put(bare)
    for key in ("a", "ab", "a"):
        leave_unfinished(server, key, os.urandom(len(DATA)))

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

    def progress(_: int) -> None:
        os.truncate(source, 10)

    with contextlib.closing(open_store(server, streams=1)) as store, pytest.raises(Truncated, match="source"):
        store.put("a", source, deadline=NEVER, progress=progress)
    assert server.contents() == {}


@pytest.mark.slow
@pytest.mark.parametrize("part_bytes", [CHUNK_BYTES // 2, 2 * CHUNK_BYTES])
def test_chunk_sums_do_not_depend_on_the_size_of_parts(server: S3Server, part_bytes: int) -> None:
    data = bytes(range(256)) * (5 * CHUNK_BYTES // 512) + b"the rest"
    with contextlib.closing(S3Store("s3://bucket", S3Options(server.url), part_bytes=part_bytes)) as store:
        receipt = put(store, data)

    chunks = tuple(crc64nvme(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))
    assert receipt == Receipt(len(data), crc64nvme(data), chunks)


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("fault", [{"kind": "truncate"}, {"kind": "reset", "at": "reply", "after_bytes": 1000}])
def test_an_answer_that_breaks_off_is_asked_for_again(
    server: S3Server, store: RetryingStore, fault: dict[str, object]
) -> None:
    put(store)
    server.fault(operations="GetObject", **fault)  # type: ignore[arg-type]
    into = bytearray(len(DATA) - 5)

    store.get("a", memoryview(into), offset=5, deadline=NEVER)

    assert into == DATA[5:]
    assert count(server, "GetObject") == 2


def test_a_whole_record_that_breaks_off_is_asked_for_again(server: S3Server, store: RetryingStore) -> None:
    put(store, b"a record")
    server.fault("truncate", "GetObject")

    assert store.read("a", limit_bytes=100, deadline=NEVER) == b"a record"


@pytest.mark.slow
def test_one_range_is_asked_for_again_and_not_the_whole(server: S3Server) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 1)
    with contextlib.closing(open_store(server)) as store:
        put(store, data)
        server.fault("truncate", "GetObject", nth=2)
        into = bytearray(len(data))

        store.get("a", memoryview(into), deadline=NEVER)

    assert into == data
    assert count(server, "GetObject") == 4


def test_listing_goes_on_behind_its_last_page(server: S3Server, store: RetryingStore) -> None:
    for name in range(5):
        put(store, b"x") if name == 0 else store.put(f"k{name}", memoryview(b"x"), deadline=NEVER)
    server.fault("lose_reply", "ListObjectsV2", nth=2)

    assert [info.key for info in store.list("", after="a", deadline=NEVER)] == ["k1", "k2", "k3", "k4"]


# -------------------------------------------------------------------------------------------------- time, and no time


def test_a_store_that_hangs_holds_nobody_beyond_the_deadline(server: S3Server, bare: S3Store) -> None:
    put(bare)
    held = server.fault("stall", times=None)
    source = bytearray(DATA)

    with memoryview(source) as view, pytest.raises(Unavailable):
        bare.put("b", view, deadline=Deadline.after(0.2))
    with pytest.raises(Unavailable):
        bare.get("a", memoryview(source), deadline=Deadline.after(0.2))
    with pytest.raises(OutcomeUnknown):
        bare.put_if_absent("c", b"c", deadline=Deadline.after(0.2))

    source.clear()  # BufferError if anybody still held it
    server.wait_struck(held, 3)
    server.release()
    assert "runs/b" not in server.contents()


def test_a_part_that_hangs_holds_nobody_beyond_the_deadline(server: S3Server, bare: S3Store) -> None:
    server.fault("stall", "UploadPart", nth=2, after_bytes=1000)
    source = bytearray(DATA)

    with memoryview(source) as view, pytest.raises(Unavailable):
        bare.put("a", view, deadline=Deadline.after(0.5))

    source.clear()
    assert server.contents() == {}


# ------------------------------------------------------------------------------------------- what is not transient


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("s3:PutObject", lambda store: put(store)),
        ("s3:PutObject", lambda store: store.put_if_absent("b", b"", deadline=NEVER)),
        ("s3:GetObject", lambda store: store.read("a", limit_bytes=9, deadline=NEVER)),
        ("s3:GetObject", lambda store: store.stat("a", deadline=NEVER)),
        ("s3:ListBucket", lambda store: list(store.list("", deadline=NEVER))),
        ("s3:DeleteObject", lambda store: store.delete("a", deadline=NEVER)),
        ("s3:ListBucketMultipartUploads", lambda store: store.unfinished("", deadline=NEVER)),
    ],
)
def test_who_is_denied_hears_which_action_to_allow(server: S3Server, store: RetryingStore, action: str, call) -> None:  # type: ignore[no-untyped-def]
    put(store, b"small")
    server.deny(action)

    with pytest.raises(Denied, match=f"allow {action}"):
        call(store)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: put(store),
        lambda store: put(store, b"small"),
        lambda store: store.put_if_absent("b", b"", deadline=NEVER),
        lambda store: store.read("a", limit_bytes=9, deadline=NEVER),
        lambda store: store.get("a", memoryview(bytearray(1)), deadline=NEVER),
        lambda store: store.stat("a", deadline=NEVER),
        lambda store: list(store.list("", deadline=NEVER)),
        lambda store: store.delete("a", deadline=NEVER),
    ],
)
def test_a_bucket_that_vanished_is_not_an_absent_object(server: S3Server, store: RetryingStore, call) -> None:  # type: ignore[no-untyped-def]
    put(store, b"small")
    server.bucket_vanishes()

    with pytest.raises(BucketGone, match="bucket bucket does not exist"):
        call(store)


def test_an_object_that_was_deleted_is_not_found(server: S3Server, bare: S3Store) -> None:
    put(bare)
    server.delete_behind(KEY)

    with pytest.raises(NotFound):
        bare.stat("a", deadline=NEVER)


def test_clocks_apart_are_told_with_the_difference(server: S3Server, store: RetryingStore) -> None:
    server.configure(clock_offset_s=3600.0)

    with pytest.raises(Denied, match=r"this clock is -3(599|600|601) s from the server's"):
        put(store)


# ---------------------------------------------------------------------------------------------------------- encryption


def test_every_object_is_encrypted_as_was_asked(server: S3Server) -> None:
    options = S3Options(endpoint=server.url, sse="aws:kms", sse_kms_key_id="key-1")
    with contextlib.closing(S3Store("s3://bucket/runs", options, part_bytes=PART_BYTES)) as store:
        put(store)
        store.put("small", memoryview(b"x"), deadline=NEVER)
        store.put_if_absent("claim", b"x", deadline=NEVER)

    for key in ("a", "small", "claim"):
        headers = requests.head(f"{server.url}/bucket/runs/{key}", timeout=WAIT_S).headers
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"


# -------------------------------------------------------------------------------------------------------------- quirks


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, Quirks(conditional=True, takes_sums=True, checks_sums=True)),
        ({"checksums": "ignore"}, Quirks(conditional=True, takes_sums=True, checks_sums=False)),
        ({"checksums": "reject"}, Quirks(conditional=True, takes_sums=False, checks_sums=False)),
        ({"ignore_conditions": True}, Quirks(conditional=False, takes_sums=True, checks_sums=True)),
    ],
)
def test_a_probe_finds_what_a_store_honours_and_adapts(
    server: S3Server, bare: S3Store, settings: dict[str, object], found: Quirks
) -> None:
    server.configure(**settings)

    assert bare.probe("snapshots/", deadline=NEVER) == found
    assert server.contents() == {}
    assert server.uploads() == []
    put(bare)
    bare.put("small", memoryview(b"small"), deadline=NEVER)
    info = bare.stat("a", deadline=NEVER)

    assert server.contents() == {KEY: DATA, "runs/small": b"small"}
    assert info.crc64nvme == (crc64nvme(DATA) if found.checks_sums else None)
    assert bare.conditional == found.conditional


def test_a_sum_of_a_stranger_is_not_believed(server: S3Server, bare: S3Store) -> None:
    put(bare)

    assert bare.stat("a", deadline=NEVER).crc64nvme is None


def test_without_conditions_there_is_no_put_if_absent(server: S3Server, bare: S3Store) -> None:
    server.configure(ignore_conditions=True)
    bare.probe("snapshots/", deadline=NEVER)

    with pytest.raises(Denied, match="ignores If-None-Match"):
        bare.put_if_absent("claim", b"ours", deadline=NEVER)
    assert server.contents() == {}


def test_a_probe_that_is_not_allowed_says_so(server: S3Server, bare: S3Store) -> None:
    server.deny("s3:PutObject")

    with pytest.raises(Denied, match="allow s3:PutObject"):
        bare.probe("snapshots/", deadline=NEVER)
    assert bare.conditional


def test_a_probe_of_a_store_that_is_down_finds_nothing_out(server: S3Server, bare: S3Store) -> None:
    server.fault("error", times=None, status=503, code="SlowDown")

    with pytest.raises(Unavailable):
        bare.probe("snapshots/", deadline=NEVER)
