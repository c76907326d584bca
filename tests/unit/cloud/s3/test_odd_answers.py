"""Answers that are none of S3's: pages of a portal or a load balancer, half an answer, a header that nobody can read.

None of them is an answer, and none says that something is, or is not, in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cloud.digest import crc64nvme
from cloud.errors import OutcomeUnknown, Unavailable
from cloud.notice import Deadline
from cloud.s3.store import S3Options, S3Store
from cloud.store import Receipt
from tests.support.s3_account import use_account
from tests.support.s3_server import S3Server

NEVER = Deadline.never()
DATA = bytes(range(256)) * 64
PART_BYTES = 4096
MOST_CALLS = 12
"""Of one verb of a store: parts are tried again, and what was begun is looked after."""

Verb = Callable[[S3Store], object]


@pytest.fixture(autouse=True)
def _account(monkeypatch: pytest.MonkeyPatch) -> None:
    use_account(monkeypatch)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(min_part_bytes=1024) as made:
        yield made


@pytest.fixture
def store(server: S3Server) -> Iterator[S3Store]:
    made = S3Store(
        "s3://bucket/p",
        S3Options(endpoint=server.url),
        part_bytes=PART_BYTES,
        copy_bytes=PART_BYTES,
        sleep=lambda _: None,
    )
    made.put("there", memoryview(DATA[:100]), deadline=NEVER)
    made.put("large", memoryview(DATA), deadline=NEVER)
    made.probe("probe/", deadline=NEVER)
    yield made
    made.close()


VERBS: dict[str, Verb] = {
    "put": lambda store: store.put("new", memoryview(DATA[:100]), deadline=NEVER),
    "put-parts": lambda store: store.put("new", memoryview(DATA), deadline=NEVER),
    "put_if_absent": lambda store: store.put_if_absent("new", b"data", deadline=NEVER),
    "copy": lambda store: store.copy("there", "copy", Receipt(100, crc64nvme(DATA[:100]), ()), deadline=NEVER),
    "copy-parts": lambda store: store.copy("large", "copy", Receipt(len(DATA), crc64nvme(DATA), ()), deadline=NEVER),
    "get": lambda store: store.get("there", memoryview(bytearray(100)), deadline=NEVER),
    "get-at": lambda store: store.get("there", memoryview(bytearray(10)), offset=50, deadline=NEVER),
    "read": lambda store: store.read("there", limit_bytes=1000, deadline=NEVER),
    "stat": lambda store: store.stat("there", deadline=NEVER),
    "list": lambda store: list(store.list("", deadline=NEVER)),
    "unfinished": lambda store: store.unfinished("", deadline=NEVER),
    "probe": lambda store: store.probe("probe/", deadline=NEVER),
}


@pytest.mark.parametrize("status", [200, 301, 302, 307, 308])
@pytest.mark.parametrize("verb", VERBS)
def test_a_page_is_no_answer(store: S3Store, server: S3Server, verb: str, status: int) -> None:
    server.forget_calls()
    server.fault("page", status=status, times=None)

    with pytest.raises((Unavailable, OutcomeUnknown)):
        VERBS[verb](store)

    assert len(server.calls()) <= MOST_CALLS, "nobody asks the one that redirects where to go"


@pytest.mark.parametrize("status", [200, 302])
@pytest.mark.parametrize(
    ("verb", "operation"),
    [
        ("put-parts", "CreateMultipartUpload"),
        ("put-parts", "UploadPart"),
        ("put-parts", "CompleteMultipartUpload"),
        ("put-parts", "ListMultipartUploads"),
        ("copy", "CopyObject"),
        ("copy-parts", "UploadPartCopy"),
        ("copy", "HeadObject"),
    ],
)
def test_a_page_in_the_midst_of_answers_is_none_either(
    store: S3Store, server: S3Server, verb: str, operation: str, status: int
) -> None:
    server.fault("page", operation, status=status, times=None)
    with pytest.raises((Unavailable, OutcomeUnknown)):
        VERBS[verb](store)


def test_a_page_instead_of_an_empty_list_is_not_one(store: S3Store, server: S3Server) -> None:
    server.fault("page", "ListObjectsV2", status=200)
    with pytest.raises(Unavailable, match="is not S3's"):
        list(store.list("nothing/", deadline=NEVER))
    assert list(store.list("nothing/", deadline=NEVER)) == []


@pytest.mark.parametrize(
    ("verb", "operation"),
    [("read", "GetObject"), ("get", "GetObject"), ("list", "ListObjectsV2"), ("stat", "HeadObject")],
)
@pytest.mark.parametrize("header", ["Last-Modified: yesterday", "x-amz-expiration: ,", "ETag: "])
def test_a_header_that_nobody_can_read_is_no_bug_of_ours(
    store: S3Store, server: S3Server, verb: str, operation: str, header: str
) -> None:
    server.fault("header", operation, code=header)
    try:
        VERBS[verb](store)
    except Unavailable as err:
        assert "is not S3's" in str(err)  # noqa: PT017  it may be understood all the same


@pytest.mark.parametrize("verb", ["read", "get", "get-at", "list"])
def test_half_an_answer_that_is_said_to_be_a_whole_one_is_none(store: S3Store, server: S3Server, verb: str) -> None:
    server.fault("short_reply", ("GetObject", "ListObjectsV2"))
    try:
        VERBS[verb](store)
    except Unavailable:
        return
    assert verb == "read", "whose bytes are a record, and are parsed"


@pytest.mark.parametrize("verb", ["put", "stat", "list"])
def test_an_answer_that_the_library_itself_stumbles_over_is_none(store: S3Store, server: S3Server, verb: str) -> None:
    """Urllib3 makes a GET of what a 303 answers, and cannot read the headers that botocore has put there."""
    server.fault("page", status=303, times=None)
    with pytest.raises((Unavailable, OutcomeUnknown)):
        VERBS[verb](store)


def test_a_redirect_says_what_to_check(store: S3Store, server: S3Server) -> None:
    server.fault("page", status=307, times=None)
    with pytest.raises(Unavailable, match="redirects, and is no S3: check the endpoint"):
        store.stat("there", deadline=NEVER)
