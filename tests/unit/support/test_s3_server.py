"""The S3 server that other tests rely on: it means what S3 means, refuses damage, and goes wrong exactly as told."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import socket
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from tests.support.patience import HANG_S
from tests.support.s3_bucket import compute
from tests.support.s3_certificate import write_certificate
from tests.support.s3_server import S3Server, Unfinished, serving, steer


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def xml(self) -> dict[str, str]:
        """The text of each element, by its name: the last of several."""
        return {node.tag.rpartition("}")[2]: node.text or "" for node in ET.fromstring(self.body).iter()}

    def all(self, name: str) -> list[str]:
        return [node.text or "" for node in ET.fromstring(self.body).iter() if node.tag.rpartition("}")[2] == name]

    @property
    def code(self) -> str:
        return self.xml["Code"]


class Client:
    """Sends what it is told to, and nothing by itself; one connection while it lasts."""

    def __init__(self, server: S3Server, timeout_s: float = HANG_S) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)

    def __call__(self, method: str, key: str = "", body: bytes = b"", *, headers: Any = (), **query: Any) -> Answer:
        names = {name.replace("_", "-"): value for name, value in query.items()}
        target = f"/bucket/{quote(key)}" + (f"?{urlencode(names)}" if names else "")
        try:
            self._connection.request(method, target, body, dict(headers))
            with self._connection.getresponse() as response:
                return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        except BaseException:
            self._connection.close()  # the next call opens another
            raise

    def close(self) -> None:
        self._connection.close()

    def begin(self, key: str, **headers: str) -> str:
        return self("POST", key, headers=headers, uploads="").xml["UploadId"]

    def part(self, key: str, upload_id: str, number: int, data: bytes, **headers: str) -> str:
        answer = self("PUT", key, data, headers=headers, uploadId=upload_id, partNumber=number)
        assert answer.status == 200, answer
        return answer.headers["etag"]

    def complete(self, key: str, upload_id: str, etags: dict[int, str], **headers: str) -> Answer:
        parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>" for n, etag in etags.items())
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self("POST", key, body, headers=named, uploadId=upload_id)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with S3Server(min_part_bytes=4) as server:
        yield server


@pytest.fixture
def call(server: S3Server) -> Iterator[Client]:
    with closing(Client(server)) as client:
        yield client


def crc(data: bytes, algorithm: str = "crc64nvme") -> dict[str, str]:
    return {f"x-amz-checksum-{algorithm}": compute(algorithm, data)}


# Objects


def test_what_was_put_is_read(server: S3Server, call: Client) -> None:
    headers = {"x-amz-meta-step": "7", "x-amz-server-side-encryption": "aws:kms"}
    assert call("PUT", "a b/ü", b"hello", headers=headers).status == 200

    answer = call("GET", "a b/ü")

    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.headers["x-amz-meta-step"] == "7"
    assert answer.headers["x-amz-server-side-encryption"] == "aws:kms"
    assert server.contents() == {"a b/ü": b"hello"}


def test_a_known_sum_is_that_of_the_format(call: Client) -> None:
    call("PUT", "k", b"123456789")

    answer = call("HEAD", "k", headers={"x-amz-checksum-mode": "ENABLED"})

    assert answer.headers["x-amz-checksum-crc64nvme"] == "rosUhgp5mIg="  # the catalogue's check value, ae8b14860a799888
    assert answer.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    assert (answer.headers["content-length"], answer.body) == ("9", b"")


@pytest.mark.parametrize(
    ("wanted", "status", "body", "content_range"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=4-", 206, b"456789", "bytes 4-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("lines=1-2", 200, b"0123456789", None),
    ],
)
def test_a_range_is_answered_by_206(call: Client, wanted: str, status: int, body: bytes, content_range: str) -> None:
    call("PUT", "k", b"0123456789")

    answer = call("GET", "k", headers={"Range": wanted})

    assert (answer.status, answer.body, answer.headers.get("content-range")) == (status, body, content_range)


def test_a_range_behind_the_end_is_refused(call: Client) -> None:
    call("PUT", "k", b"0123456789")

    answer = call("GET", "k", headers={"Range": "bytes=10-"})

    assert (answer.status, answer.code) == (416, "InvalidRange")


def test_what_is_absent_is_404_and_deleting_it_succeeds(call: Client) -> None:
    assert call("GET", "k").code == "NoSuchKey"
    assert call("HEAD", "k").status == 404
    assert call("DELETE", "k").status == 204


def test_put_if_absent_succeeds_once(server: S3Server, call: Client) -> None:
    first = call("PUT", "k", b"first", headers={"If-None-Match": "*"})
    second = call("PUT", "k", b"second", headers={"If-None-Match": "*"})

    assert first.status == 200
    assert (second.status, second.code) == (412, "PreconditionFailed")
    assert server.contents() == {"k": b"first"}


def test_put_if_match_needs_the_etag(server: S3Server, call: Client) -> None:
    etag = call("PUT", "k", b"first").headers["etag"]

    assert call("PUT", "k", b"third", headers={"If-Match": '"other"'}).status == 412
    assert call("PUT", "absent", b"", headers={"If-Match": etag}).status == 404
    assert call("PUT", "k", b"second", headers={"If-Match": etag}).status == 200
    assert server.contents() == {"k": b"second"}


def test_a_copy_is_the_same(server: S3Server, call: Client) -> None:
    call("PUT", "from", b"bytes")

    assert call("PUT", "to", headers={"x-amz-copy-source": "/bucket/from"}).status == 200
    assert server.contents() == {"from": b"bytes", "to": b"bytes"}


def test_several_are_deleted_at_once(server: S3Server, call: Client) -> None:
    for key in ("a", "b", "c"):
        call("PUT", key, b"x")

    answer = call("POST", "", b"<Delete><Object><Key>a</Key></Object><Object><Key>c</Key></Object></Delete>", delete="")

    assert answer.all("Key") == ["a", "c"]
    assert server.objects() == {"b": 1}


# Sums


@pytest.mark.parametrize("algorithm", ["crc64nvme", "crc32", "crc32c", "sha256", "sha1"])
def test_a_wrong_sum_is_refused_and_nothing_kept(server: S3Server, call: Client, algorithm: str) -> None:
    assert call("PUT", "right", b"bytes", headers=crc(b"bytes", algorithm)).status == 200

    answer = call("PUT", "wrong", b"bytes", headers=crc(b"other", algorithm))

    assert (answer.status, answer.code) == (400, "BadDigest")
    assert set(server.objects()) == {"right"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Content-MD5": base64.b64encode(hashlib.md5(b"other").digest()).decode()}, "BadDigest"),
        ({"Content-MD5": "?"}, "InvalidDigest"),
        ({"x-amz-content-sha256": hashlib.sha256(b"other").hexdigest()}, "XAmzContentSHA256Mismatch"),
        ({"x-amz-checksum-crc64nvme": "AAAA"}, "InvalidRequest"),
        ({"x-amz-trailer": "x-amz-checksum-crc32"}, "MalformedTrailerError"),
    ],
)
def test_damage_is_refused_whatever_tells_of_it(
    server: S3Server, call: Client, headers: dict[str, str], code: str
) -> None:
    answer = call("PUT", "k", b"bytes", headers=headers)

    assert (answer.status, answer.code) == (400, code)
    assert server.contents() == {}


def chunked(signed: bool, trailer: str) -> bytes:
    signature = ";chunk-signature=0" if signed else ""
    chunks = "".join(f"{len(piece):x}{signature}\r\n{piece}\r\n" for piece in ("hello ", "world"))
    return f"{chunks}0{signature}\r\n{trailer}\r\n".encode()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("nested", [True, False], ids=["chunked", "content-length"])
def test_an_aws_chunked_body_is_unwrapped_and_its_trailer_verified(
    server: S3Server, call: Client, signed: bool, nested: bool
) -> None:
    kind = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER" if signed else "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    headers = {
        "Content-Encoding": "aws-chunked",
        "x-amz-content-sha256": kind,
        "x-amz-decoded-content-length": "11",
        "x-amz-trailer": "x-amz-checksum-crc32",
    }

    def put(key: str, checksum: str) -> Answer:
        body = chunked(signed, f"x-amz-checksum-crc32:{checksum}\r\n")
        framing = {}
        if nested:
            framing = {"Transfer-Encoding": "chunked"}
            body = b"7\r\n" + body[:7] + b"\r\n" + f"{len(body) - 7:x}\r\n".encode() + body[7:] + b"\r\n0\r\n\r\n"
        return call("PUT", key, body, headers=headers | framing)

    assert put("right", compute("crc32", b"hello world")).status == 200
    assert put("wrong", compute("crc32", b"other")).code == "BadDigest"
    assert server.contents() == {"right": b"hello world"}


# Lists


def test_a_list_comes_in_the_order_of_utf8_and_in_pages(call: Client) -> None:
    keys = ["a", "a/1", "a/2", "é", "\ufffd", "\U00010000"]
    for key in reversed(keys):
        call("PUT", key, b"x")

    found: list[str] = []
    token: dict[str, Any] = {}
    for _ in range(3):
        page = call("GET", list_type=2, max_keys=2, **token)
        found += page.all("Key")
        token = {"continuation_token": page.xml.get("NextContinuationToken", "")}

    assert found == keys
    assert page.xml["IsTruncated"] == "false"


def test_a_list_knows_prefix_start_delimiter_and_encoding(call: Client) -> None:
    for key in ("p/a b", "p/d/1", "p/d/2", "p/z", "q"):
        call("PUT", key, b"x")

    def listed(**query: Any) -> list[str]:
        return call("GET", list_type=2, **query).all("Key")

    assert listed(prefix="p/", encoding_type="url") == ["p/a%20b", "p/d/1", "p/d/2", "p/z"]
    assert listed(prefix="p/", start_after="p/d/1") == ["p/d/2", "p/z"]
    grouped = call("GET", list_type=2, prefix="p/", delimiter="/")
    assert (grouped.all("Key"), grouped.all("Prefix")) == (["p/a b", "p/z"], ["p/", "p/d/"])


# Multipart uploads


def test_a_multipart_upload_becomes_one_object_with_the_sum_of_all(server: S3Server, call: Client) -> None:
    upload_id = call.begin("k", **{"x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"})
    etags = {n: call.part("k", upload_id, n, data, **crc(data)) for n, data in [(2, b"world"), (1, b"hello ")]}
    assert server.contents() == {}
    assert server.uploads() == [Unfinished("k", upload_id, (1, 2))]

    answer = call.complete(
        "k", upload_id, dict(sorted(etags.items())), **crc(b"hello world"), x_amz_mp_object_size="11"
    )

    assert (answer.status, answer.xml["ChecksumCRC64NVME"]) == (200, compute("crc64nvme", b"hello world"))
    assert server.contents() == {"k": b"hello world"}
    assert server.uploads() == []
    assert call("GET", "k", headers={"Range": "bytes=4-7"}).body == b"o wo"
    second = call("GET", "k", partNumber=2)
    assert (second.body, second.headers["content-range"]) == (b"world", "bytes 6-10/11")
    assert call.complete("k", upload_id, etags).code == "NoSuchUpload"


@pytest.mark.parametrize(
    ("order", "headers", "code"),
    [
        ([2, 1], {}, "InvalidPartOrder"),
        ([1, 3], {}, "InvalidPart"),
        ([1, 2], {"x-amz-mp-object-size": "10"}, "InvalidRequest"),
        ([1, 2], {"x-amz-checksum-crc64nvme": compute("crc64nvme", b"other")}, "BadDigest"),
        ([4, 5], {}, "EntityTooSmall"),
        ([], {}, "MalformedXML"),
    ],
)
def test_a_wrong_completion_is_refused_and_the_upload_stays(
    server: S3Server, call: Client, order: list[int], headers: dict[str, str], code: str
) -> None:
    upload_id = call.begin("k")
    etags = {n: call.part("k", upload_id, n, data) for n, data in [(1, b"hello "), (2, b"world"), (4, b"x"), (5, b"y")]}

    answer = call.complete("k", upload_id, {n: etags.get(n, "none") for n in order}, **headers)

    assert (answer.status, answer.code) == (400, code)
    assert server.contents() == {}
    assert [upload.upload_id for upload in server.uploads()] == [upload_id]


def test_completing_if_absent_yields_to_who_was_first(server: S3Server, call: Client) -> None:
    upload_id = call.begin("k")
    etag = call.part("k", upload_id, 1, b"late")
    call("PUT", "k", b"early")

    assert call.complete("k", upload_id, {1: etag}, if_none_match="*").status == 412
    assert server.contents() == {"k": b"early"}


def test_a_part_with_another_algorithm_is_refused(call: Client) -> None:
    upload_id = call.begin("k")

    answer = call("PUT", "k", b"data", headers=crc(b"data", "crc32"), uploadId=upload_id, partNumber=1)

    assert (answer.status, answer.code) == (400, "InvalidRequest")


def test_unfinished_uploads_and_their_parts_are_listed_in_pages_and_aborted(server: S3Server, call: Client) -> None:
    ids = [call.begin(key) for key in ("p/a", "p/a", "p/b", "q")]
    for number in (1, 2, 3):
        call.part("p/a", ids[0], number, b"part")

    first = call("GET", uploads="", prefix="p/", max_uploads=2)
    marker: dict[str, Any] = {
        "key_marker": first.xml["NextKeyMarker"],
        "upload_id_marker": first.xml["NextUploadIdMarker"],
    }
    assert first.all("UploadId") + call("GET", uploads="", prefix="p/", **marker).all("UploadId") == ids[:3]

    parts = call("GET", "p/a", uploadId=ids[0], max_parts=2)
    assert (parts.all("PartNumber"), parts.xml["IsTruncated"]) == (["1", "2"], "true")
    rest = call("GET", "p/a", uploadId=ids[0], part_number_marker=parts.xml["NextPartNumberMarker"])
    assert (rest.all("PartNumber"), rest.xml["IsTruncated"]) == (["3"], "false")
    assert rest.xml["ChecksumCRC64NVME"] == compute("crc64nvme", b"part")

    assert call("DELETE", "p/a", uploadId=ids[0]).status == 204
    assert call("DELETE", "p/a", uploadId=ids[0]).code == "NoSuchUpload"
    assert [upload.upload_id for upload in server.uploads()] == ids[1:]


# The bucket, and who may


def test_the_bucket_tells_of_itself(server: S3Server, call: Client) -> None:
    assert call("HEAD").headers["x-amz-bucket-region"] == "us-east-1"
    assert call("GET", lifecycle="").code == "NoSuchLifecycleConfiguration"
    server.configure(abort_after_days=7, region="eu-central-1")
    assert call("GET", lifecycle="").xml["DaysAfterInitiation"] == "7"
    assert b">eu-central-1<" in call("GET", location="").body
    assert call("GET", encryption="").xml["SSEAlgorithm"] == "AES256"
    assert call("GET", policy="").code == "NotImplemented"


def test_a_bucket_in_the_host_name_is_understood(server: S3Server, call: Client) -> None:
    call("PUT", "k", b"data")
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)) as connection:
        connection.request("GET", "/k", headers={"Host": f"bucket.localhost:{server.port}"})
        assert connection.getresponse().read() == b"data"


def test_a_bucket_that_vanished_answers_nothing_else(server: S3Server, call: Client) -> None:
    call("PUT", "k", b"data")
    server.bucket_vanishes()
    assert call("GET", "k").code == "NoSuchBucket"
    assert call("PUT", "k", b"data").code == "NoSuchBucket"
    server.bucket_returns()
    assert call("GET", "k").code == "NoSuchKey"


def test_denied_and_expired_are_told_apart(server: S3Server, call: Client) -> None:
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=OLD/20260101/us-east-1/s3/aws4_request, Signature=0"}
    server.deny("s3:PutObject", "secret/")
    server.expire("OLD")

    denied = call("PUT", "secret/k", b"x")
    expired = call("PUT", "open/k", b"x", headers=signed)

    assert (denied.status, denied.code) == (403, "AccessDenied")
    assert (expired.status, expired.code) == (400, "ExpiredToken")
    assert server.calls()[-1].access_key == "OLD"
    assert server.contents() == {}
    server.allow()
    assert call("PUT", "secret/k", b"x", headers=signed).status == 200


def test_who_may_not_list_is_not_told_what_is_absent(server: S3Server, call: Client) -> None:
    server.deny("s3:ListBucket")

    assert call("GET", "k").status == 403
    assert call("GET", list_type=2).code == "AccessDenied"


def test_a_clock_an_hour_off_is_shown_and_refuses(server: S3Server, call: Client) -> None:
    server.configure(clock_offset_s=3600)
    now = datetime.now(UTC)

    answer = call("GET", "k", headers={"x-amz-date": f"{now:%Y%m%dT%H%M%SZ}"})

    assert (answer.status, answer.code) == (403, "RequestTimeTooSkewed")
    assert parsedate_to_datetime(answer.headers["date"]) > now + timedelta(minutes=59)


def test_quirks_of_other_stores(server: S3Server, call: Client) -> None:
    server.configure(ignore_conditions=True, checksums="reject")
    call("PUT", "k", b"first")
    assert call("PUT", "k", b"second", headers={"If-None-Match": "*"}).status == 200
    assert call("PUT", "k", b"x", headers=crc(b"x")).code == "NotImplemented"

    server.configure(checksums="ignore")
    assert call("PUT", "k", b"x", headers=crc(b"other")).status == 200
    head = call("HEAD", "k", headers={"x-amz-checksum-mode": "ENABLED"})
    assert not [name for name in head.headers if name.startswith("x-amz-checksum")]


# What is recorded


def test_every_call_is_recorded_by_its_iam_action(server: S3Server, call: Client) -> None:
    call("PUT", "k", b"x")
    call("HEAD", "k")
    call("GET", list_type=2, prefix="p")
    upload_id = call.begin("m")
    call.part("m", upload_id, 3, b"data")
    call("GET", "m", uploadId=upload_id)
    call("DELETE", "m", uploadId=upload_id)
    call("GET", uploads="")
    call("GET", lifecycle="")

    assert [(one.action, one.operation, one.key, one.status) for one in server.calls()] == [
        ("s3:PutObject", "PutObject", "k", 200),
        ("s3:GetObject", "HeadObject", "k", 200),
        ("s3:ListBucket", "ListObjectsV2", "", 200),
        ("s3:PutObject", "CreateMultipartUpload", "m", 200),
        ("s3:PutObject", "UploadPart", "m", 200),
        ("s3:ListMultipartUploadParts", "ListParts", "m", 200),
        ("s3:AbortMultipartUpload", "AbortMultipartUpload", "m", 204),
        ("s3:ListBucketMultipartUploads", "ListMultipartUploads", "", 200),
        ("s3:GetLifecycleConfiguration", "GetBucketLifecycleConfiguration", "", 404),
    ]
    (part,) = server.calls("UploadPart")
    assert (part.part, part.body_bytes) == (3, 4)


# Faults


def test_an_error_strikes_the_nth_matching_call_so_often(server: S3Server, call: Client) -> None:
    server.fault("error", "PutObject", key="^m/", nth=2, times=2, status=503, code="SlowDown")

    statuses = [call("PUT", key, b"x").status for key in ("m/1", "other", "m/2", "m/3", "m/4")]

    assert statuses == [200, 200, 503, 503, 200]
    assert set(server.objects()) == {"m/1", "other", "m/4"}


def test_an_error_lasts_until_it_is_cleared(server: S3Server, call: Client) -> None:
    server.fault("error", times=None)
    assert [call("GET", "k").code for _ in range(3)] == ["InternalError"] * 3
    server.clear()
    assert call("GET", "k").code == "NoSuchKey"


def test_a_rule_ends_with_its_time(server: S3Server, call: Client) -> None:
    server.fault("error", times=None, for_s=-1.0)

    assert call("PUT", "k", b"x").status == 200


def test_an_error_comes_before_a_body_that_waits_for_100_continue(server: S3Server) -> None:
    server.fault("error", "PutObject", status=503, code="SlowDown")
    head = b"PUT /bucket/k HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), HANG_S) as sock, sock.makefile("rb") as reader:
        sock.sendall(head)
        assert reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
    with socket.create_connection(("127.0.0.1", server.port), HANG_S) as sock, sock.makefile("rb") as reader:
        sock.sendall(head)
        assert (reader.readline(), reader.readline()) == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
        sock.sendall(b"hello")
        assert reader.readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("after_bytes", [0, 1000, 10_000_000])
def test_a_reset_in_the_body_leaves_nothing(server: S3Server, call: Client, after_bytes: int) -> None:
    server.fault("reset", "PutObject", after_bytes=after_bytes)

    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        call("PUT", "k", bytes(100_000))

    assert server.contents() == {}
    assert [one.status for one in server.calls()] == [0]


@pytest.mark.parametrize("operation", ["PutObject", "CompleteMultipartUpload", "DeleteObject"])
def test_a_lost_reply_is_of_a_call_that_took_effect(server: S3Server, call: Client, operation: str) -> None:
    upload_id = call.begin("m")
    etag = call.part("m", upload_id, 1, b"data")
    call("PUT", "d", b"x")
    calls: dict[str, Callable[[], Answer]] = {
        "PutObject": lambda: call("PUT", "k", b"data"),
        "CompleteMultipartUpload": lambda: call.complete("m", upload_id, {1: etag}),
        "DeleteObject": lambda: call("DELETE", "d"),
    }
    server.fault("lose_reply", operation)

    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        calls[operation]()

    expected = {"PutObject": {"d", "k"}, "CompleteMultipartUpload": {"d", "m"}, "DeleteObject": set()}
    assert set(server.objects()) == expected[operation]


def test_a_stalled_call_waits_until_it_is_released(server: S3Server, call: Client) -> None:
    held = server.fault("stall", "PutObject", after_bytes=2)
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(call("PUT", "k", b"data")))
    thread.start()

    server.wait_struck(held, timeout_s=HANG_S)
    assert (server.contents(), server.calls()[0].status) == ({}, 0)
    server.release()
    thread.join(HANG_S)

    assert [answer.status for answer in answers] == [200]
    assert server.contents() == {"k": b"data"}


@pytest.mark.parametrize("at", ["request", "reply"])
def test_a_server_that_closes_ends_stalled_calls_without_a_reply(at: str) -> None:
    with S3Server() as server:
        held = server.fault("stall", "PutObject", at=at)
        with socket.create_connection(("127.0.0.1", server.port), HANG_S) as sock:
            sock.sendall(b"PUT /bucket/k HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\ndata")
            server.wait_struck(held, timeout_s=HANG_S)
            server.close()
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert at == "reply" or server.contents() == {}


def test_a_truncated_body_is_shorter_than_was_said(server: S3Server, call: Client) -> None:
    call("PUT", "k", b"0123456789")
    server.fault("truncate", "GetObject", after_bytes=4)

    with pytest.raises(http.client.IncompleteRead) as caught:
        call("GET", "k")

    assert caught.value.partial == b"0123"
    assert call("GET", "k").body == b"0123456789"


def test_a_reply_resets_after_so_many_bytes(server: S3Server, call: Client) -> None:
    call("PUT", "k", bytes(1_000_000))
    server.fault("reset", "GetObject", at="reply", after_bytes=1000)

    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        call("GET", "k")

    assert call("GET", "k").body == bytes(1_000_000)


def test_a_reply_is_corrupted_on_its_way_only(server: S3Server, call: Client) -> None:
    call("PUT", "k", b"\0\0\0\0")
    server.fault("corrupt_response", "GetObject", offset=1)

    assert call("GET", "k").body == b"\0\1\0\0"
    assert call("GET", "k").body == b"\0\0\0\0"


def test_damage_on_the_way_in_is_refused_only_where_a_sum_was_sent(server: S3Server, call: Client) -> None:
    server.fault("corrupt_stored", "PutObject", times=2, offset=0)

    assert call("PUT", "summed", b"\0\0", headers=crc(b"\0\0")).code == "BadDigest"
    assert call("PUT", "plain", b"\0\0").status == 200
    assert server.contents() == {"plain": b"\1\0"}


def test_a_forgotten_part_shows_at_completion(server: S3Server, call: Client) -> None:
    upload_id = call.begin("k")
    server.fault("forget_part", "UploadPart", nth=2)
    etags = {n: call.part("k", upload_id, n, b"data") for n in (1, 2)}

    assert call.complete("k", upload_id, etags).code == "InvalidPart"
    assert server.contents() == {}


def test_an_embedded_error_is_200_and_no_object(server: S3Server, call: Client) -> None:
    upload_id = call.begin("k")
    etag = call.part("k", upload_id, 1, b"data")
    server.fault("embedded_error", "CompleteMultipartUpload")

    answer = call.complete("k", upload_id, {1: etag})

    assert (answer.status, answer.code) == (200, "InternalError")
    assert server.contents() == {}
    assert call.complete("k", upload_id, {1: etag}).status == 200


def test_a_conflict_at_completion_ends_the_upload(server: S3Server, call: Client) -> None:
    upload_id = call.begin("k")
    etag = call.part("k", upload_id, 1, b"data")
    server.fault("error", "CompleteMultipartUpload", status=409, code="ConditionalRequestConflict")

    assert call.complete("k", upload_id, {1: etag}, if_none_match="*").status == 409
    assert call.complete("k", upload_id, {1: etag}, if_none_match="*").code == "NoSuchUpload"


def test_a_slow_reply_comes(server: S3Server, call: Client) -> None:
    server.fault("slow", "ListObjectsV2", delay_s=0.01)

    assert call("GET", list_type=2).status == 200


def test_a_server_that_is_down_resets_open_and_new_connections(server: S3Server, call: Client) -> None:
    call("PUT", "k", b"data")
    server.down()

    for _ in range(2):  # the connection that was there, and a new one
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            call("GET", "k")
    server.up()
    assert call("GET", "k").body == b"data"


def test_what_is_stored_can_rot_and_be_deleted_by_hand(server: S3Server, call: Client) -> None:
    call("PUT", "k", b"\0\0")
    server.flip("k", 1)
    answer = call("GET", "k", headers={"x-amz-checksum-mode": "ENABLED"})
    assert (answer.body, answer.headers["x-amz-checksum-crc64nvme"]) == (b"\0\1", compute("crc64nvme", b"\0\0"))
    server.delete_behind("k")
    assert call("GET", "k").status == 404


@pytest.mark.parametrize(
    "wrong", [{"kind": "explode"}, {"kind": "reset", "at": "noon"}], ids=["an unknown kind", "an unknown moment"]
)
def test_a_rule_that_means_nothing_is_refused(server: S3Server, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="there are"):
        server.fault(**wrong)


def test_a_setting_that_does_not_exist_is_refused(server: S3Server) -> None:
    with pytest.raises(ValueError, match="no setting no_such_thing"):
        server.configure(no_such_thing=True)


# Steering, TLS, and clients as people use them


def test_another_process_steers_by_the_same_names(server: S3Server, call: Client) -> None:
    fault_id = steer(server.url, "fault", kind="error", operations=["PutObject"], status=503, code="SlowDown")
    assert call("PUT", "k", b"x").code == "SlowDown"
    steer(server.url, "wait_struck", fault_id=fault_id, timeout_s=HANG_S)
    steer(server.url, "down")
    steer(server.url, "up")
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        call("PUT", "k", b"x")
    call.begin("m")

    assert steer(server.url, "uploads") == [{"key": "m", "upload_id": "upload-000001", "parts": []}]
    assert [one["status"] for one in steer(server.url, "calls")] == [503, 200]
    assert steer(server.url, "actions") == ["s3:PutObject"]
    assert steer(server.url, "objects") == {}
    with pytest.raises(ValueError, match="cannot steer 'close'"):
        steer(server.url, "close")


def test_a_limit_that_another_process_gives_is_the_methods_own(server: S3Server) -> None:
    """It was taken for the client's patience: the server waited without one, and did not end for a quarter of an hour.

    The soak then sat in its last line until pytest's limit, five times.
    """
    fault_id = steer(server.url, "fault", kind="error")

    with pytest.raises(ValueError, match=r"TimeoutError: fault 1 struck 0 times, not 1, within 0 s"):
        steer(server.url, "wait_struck", fault_id=fault_id, timeout_s=0)


@pytest.mark.parametrize("forget", [S3Server.clear, S3Server.close])
def test_who_waits_for_a_rule_that_is_forgotten_is_told(server: S3Server, forget: Callable[[S3Server], None]) -> None:
    fault_id = server.fault("error")
    told: list[str] = []

    def wait() -> None:
        try:
            server.wait_struck(fault_id)
        except KeyError as err:
            told.append(str(err))

    waiting = threading.Thread(target=wait)
    waiting.start()
    forget(server)
    waiting.join(HANG_S)

    assert told == ["'no fault 1'"]


def test_who_waits_for_a_call_of_a_server_that_closes_is_told(server: S3Server) -> None:
    told: list[str] = []

    def wait() -> None:
        try:
            server.wait_calls("PutObject")
        except ConnectionError as err:
            told.append(str(err))

    waiting = threading.Thread(target=wait)
    waiting.start()
    server.close()
    waiting.join(HANG_S)

    assert told == ["the server closed"]


def test_the_command_serves_over_tls_until_it_is_told_to_end(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    with serving("--certificate", str(certificate), "--private-key", str(key), bucket="b") as url:
        assert url.startswith("https://127.0.0.1:")
        steer(url, "configure", checksums="ignore")
        assert steer(url, "objects") == {}
    with pytest.raises(ConnectionRefusedError):
        steer(url, "objects")


def test_boto3_works_with_it_and_understands_its_refusals(tmp_path: Path) -> None:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import ClientError

    certificate, key = write_certificate(tmp_path)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 40_000)  # two parts of 8 MiB
    with S3Server(certificate=certificate, private_key=key) as server:
        client = boto3.client(
            "s3", endpoint_url=server.url, region_name="us-east-1", verify=str(certificate),
            aws_access_key_id="a", aws_secret_access_key="b",
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )  # fmt: skip
        try:
            client.upload_file(str(source), "bucket", "file", ExtraArgs={"ChecksumAlgorithm": "CRC64NVME"})
            client.download_file("bucket", "file", str(target))
            client.put_object(Bucket="bucket", Key="ü", Body=b"streamed with a trailer over TLS")
            with pytest.raises(ClientError) as damaged:
                client.put_object(Bucket="bucket", Key="k", Body=b"x", ChecksumCRC64NVME=compute("crc64nvme", b"y"))
            with pytest.raises(ClientError) as second:
                client.put_object(Bucket="bucket", Key="ü", Body=b"x", IfNoneMatch="*")
            pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", PaginationConfig={"PageSize": 1})
            listed = [item["Key"] for page in pages for item in page["Contents"]]
            head = client.head_object(Bucket="bucket", Key="file", ChecksumMode="ENABLED")
        finally:
            client.close()
        assert target.read_bytes() == source.read_bytes()
        assert head["ChecksumCRC64NVME"] == compute("crc64nvme", source.read_bytes())
        assert head["ChecksumType"] == "FULL_OBJECT"
        assert damaged.value.response["Error"]["Code"] == "BadDigest"
        assert second.value.response["Error"]["Code"] == "PreconditionFailed"
        assert listed == ["file", "ü"]
        assert len(server.calls("UploadPart")) == 2
