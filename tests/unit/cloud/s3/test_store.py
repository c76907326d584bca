"""S3Store where the store hangs, refuses, vanishes, or is not quite S3."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import requests

from cloud.digest import crc64nvme
from cloud.errors import CloudError, Denied, NotFound, OutcomeUnknown, Unavailable
from cloud.retry import RetryingStore
from cloud.s3.errors import BucketGone
from cloud.s3.probe import Quirks
from cloud.s3.store import S3Options, S3Store
from cloud.s3.transfer import Pace
from cloud.store import CHUNK_BYTES
from tests.support.clock import FakeClock, standing
from tests.support.patience import HANG_S
from tests.support.s3_account import DATA, KEY, NEVER, PART_BYTES, open_store, put, random_bytes, use_account
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


def count(server: S3Server, operation: str) -> int:
    return len(server.calls(operation))


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


def test_what_no_store_could_hold_is_passed_by(server: S3Server, bare: S3Store) -> None:
    """A console's folders, and whatever else others keep in the bucket: nobody could read or delete it by its key."""
    put(bare)
    for key in ("runs/", "runs/a/", "runs/run/snapshots/", "runs/notes of mine.txt", "runs/run//x", "runs/.hidden"):
        assert requests.put(f"{server.url}/bucket/{key}", data=b"").ok
        assert requests.post(f"{server.url}/bucket/{key}?uploads").ok

    assert [info.key for info in bare.list("", deadline=NEVER)] == ["a"]
    assert bare.unfinished("", deadline=NEVER) == []


def test_one_range_is_asked_for_again_and_not_the_whole(server: S3Server) -> None:
    data = random_bytes(2 * CHUNK_BYTES + 1)
    with closing(open_store(server)) as store:
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
        bare.put("b", view, deadline=standing(0.2))
    with pytest.raises(Unavailable):
        bare.get("a", memoryview(source), deadline=standing(0.2))
    with pytest.raises(OutcomeUnknown):
        bare.put_if_absent("c", b"c", deadline=standing(0.2))

    source.clear()  # BufferError if anybody still held it
    server.wait_struck(held, 3)
    server.release()
    assert "runs/b" not in server.contents()


def test_an_error_holds_no_buffer(server: S3Server, bare: S3Store) -> None:
    """Whoever asked may unmap it: the error's frames may live until the next collection."""
    put(bare)
    server.fault("lose_reply", "GetObject")
    source = bytearray(DATA)
    gc.disable()
    try:
        with pytest.raises(Unavailable):
            bare.get("a", memoryview(source), deadline=NEVER)

        source.clear()  # BufferError if anybody still held it
    finally:
        gc.enable()


def test_a_part_that_hangs_holds_nobody_beyond_the_deadline(server: S3Server, bare: S3Store) -> None:
    server.fault("stall", "UploadPart", nth=2, times=None, after_bytes=1000)
    source = bytearray(DATA)

    with memoryview(source) as view, pytest.raises(Unavailable):
        bare.put("a", view, deadline=standing(0.5))

    source.clear()
    assert server.contents() == {}


def test_a_request_far_behind_its_siblings_is_tried_again(
    server: S3Server, bare: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud.s3.client.READ_S", 10 * HANG_S)  # then nothing but the pace ends a request that hangs
    monkeypatch.setattr(Pace, "AT_LEAST_S", 0.3)
    monkeypatch.setattr(Pace, "LARGE_BYTES", 1024)
    monkeypatch.setattr(Pace, "SAMPLES", 3)
    put(bare)
    into = bytearray(len(DATA))
    for _ in range(3):
        bare.get("a", memoryview(into), deadline=NEVER)
    part = server.fault("stall", "UploadPart", nth=2, after_bytes=1000)
    answer = server.fault("stall", "GetObject", at="reply", after_bytes=1000)

    bare.put("b", memoryview(DATA), deadline=NEVER)
    RetryingStore(bare, sleep=FakeClock().sleep).get("a", memoryview(into), deadline=NEVER)

    server.wait_struck(part)
    server.wait_struck(answer)
    assert server.contents() == {KEY: DATA, "runs/b": DATA}
    assert into == DATA


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

    with pytest.raises(Denied, match=r"this clock is -3[56]\d\d s from the server's"):
        put(store)


# ---------------------------------------------------------------------------------------------------------- encryption


def test_every_object_is_encrypted_as_was_asked(server: S3Server) -> None:
    options = S3Options(endpoint=server.url, sse="aws:kms", sse_kms_key_id="key-1")
    with closing(S3Store("s3://bucket/runs", options, part_bytes=PART_BYTES)) as store:
        put(store)
        store.put("small", memoryview(b"x"), deadline=NEVER)
        store.put_if_absent("claim", b"x", deadline=NEVER)

    for key in ("a", "small", "claim"):
        headers = requests.head(f"{server.url}/bucket/runs/{key}", timeout=HANG_S).headers
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


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("lose_reply", "CreateMultipartUpload"), ("error", "AbortMultipartUpload"), ("error", "DeleteObject")],
)
def test_a_probe_that_fails_in_the_middle_leaves_nothing(
    server: S3Server, bare: S3Store, kind: str, operation: str
) -> None:
    server.fault(kind, operation)

    with suppress(CloudError):
        bare.probe("snapshots/", deadline=NEVER)

    assert server.contents() == {}
    assert server.uploads() == []


def test_a_probe_of_a_store_that_is_down_finds_nothing_out(server: S3Server, bare: S3Store) -> None:
    server.fault("error", times=None, status=503, code="SlowDown")

    with pytest.raises(Unavailable):
        bare.probe("snapshots/", deadline=NEVER)


def test_a_role_that_may_list_below_its_run_only_is_told_what_is_not_there(server: S3Server, bare: S3Store) -> None:
    """AWS answers it 403 then, as it does to somebody who may not list at all."""
    bare.put("run/commits/a", memoryview(b"x"), deadline=NEVER)
    key = next(iter(server.objects()))
    server.configure(role_prefix=key.removesuffix("commits/a"))

    with pytest.raises(NotFound):
        bare.stat("run/commits/b", deadline=NEVER)
    with pytest.raises(NotFound):
        bare.read("run/commits/b", limit_bytes=9, deadline=NEVER)
    with pytest.raises(NotFound):
        bare.get("run/commits/b", memoryview(bytearray(1)), deadline=NEVER)
    assert bare.stat("run/commits/a", deadline=NEVER).size == 1
    with pytest.raises(Denied):
        bare.stat("other/commits/a", deadline=NEVER)
    server.deny("s3:GetObject")
    with pytest.raises(Denied, match="s3:GetObject"):
        bare.stat("run/commits/a", deadline=NEVER)
