"""What needs no server: names, errors, sums, paces."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from cloud.errors import (
    AlreadyExists,
    CloudError,
    Denied,
    Full,
    NotFound,
    OutcomeUnknown,
    Truncated,
    Unavailable,
)
from cloud.s3.client import skew_s
from cloud.s3.errors import (
    IAM_ACTIONS,
    BucketGone,
    CredentialsExpired,
    PartMissing,
    Refusal,
    SlowDown,
    SumRefused,
    Unsupported,
    UploadGone,
    explain,
)
from cloud.s3.store import S3Options, S3Store
from cloud.s3.transfer import Pace, Reader, Stopped, Target, decode_crc, encode_crc
from cloud.s3.upload import MAX_PARTS, plan_part_bytes
from tests.support.clock import FakeClock
from tests.support.open_files import open_files

MIB = 1024 * 1024

# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://a.bucket-1/runs/2026/", "s3://a.bucket-1/runs/2026"),
    ],
)
def test_a_url_names_bucket_and_prefix(url: str, named: str) -> None:
    assert S3Store(url).url == named


@pytest.mark.parametrize(
    "url", ["", "bucket", "s3:/bucket", "s3://", "s3://B", "s3://bucket/../x", "s3://bucket/a b", "https://bucket/x"]
)
def test_what_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"not |is no bucket.s name"):
        S3Store(url)


def test_a_directory_bucket_is_refused_for_its_disorder() -> None:
    with pytest.raises(ValueError, match="in no order"):
        S3Store("s3://data--use1-az4--x-s3/runs")


@pytest.mark.parametrize(
    "options",
    [{"sse": "rot13"}, {"sse_kms_key_id": "key"}, {"endpoint": "localhost:9000"}, {"streams": 0}],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  each has its own words
        S3Options(**options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- errors


def refusal(code: str, status: int, operation: str = "GetObject", message: str = "words") -> Refusal:
    return Refusal(operation, "s3://bucket/key", "bucket", status, code, message)


@pytest.mark.parametrize(
    ("code", "status", "operation", "kind"),
    [
        ("NoSuchKey", 404, "GetObject", NotFound),
        ("404", 404, "HeadObject", NotFound),
        ("404", 404, "HeadBucket", BucketGone),
        ("NoSuchBucket", 404, "GetObject", BucketGone),
        ("NoSuchUpload", 404, "UploadPart", UploadGone),
        ("PreconditionFailed", 412, "PutObject", AlreadyExists),
        ("ConditionalRequestConflict", 409, "PutObject", Unavailable),
        ("InvalidPart", 400, "CompleteMultipartUpload", PartMissing),
        ("InvalidRange", 416, "GetObject", Truncated),
        ("ExpiredToken", 400, "PutObject", CredentialsExpired),
        ("400", 400, "HeadObject", CredentialsExpired),
        ("SlowDown", 503, "PutObject", SlowDown),
        ("503", 503, "HeadObject", SlowDown),
        ("TooManyRequests", 429, "PutObject", SlowDown),
        ("BadDigest", 400, "PutObject", SumRefused),
        ("XAmzContentChecksumMismatch", 400, "UploadPart", SumRefused),
        ("NotImplemented", 501, "PutObject", Unsupported),
        ("QuotaExceeded", 403, "PutObject", Full),
        ("InternalError", 500, "PutObject", OutcomeUnknown),
        ("InternalError", 200, "CompleteMultipartUpload", OutcomeUnknown),
        ("InternalError", 500, "GetObject", Unavailable),
        ("RequestTimeout", 400, "UploadPart", Unavailable),
        ("PermanentRedirect", 301, "PutObject", Denied),
        ("AccessDenied", 403, "PutObject", Denied),
        ("SignatureDoesNotMatch", 403, "PutObject", Denied),
    ],
)
def test_each_refusal_has_its_kind(code: str, status: int, operation: str, kind: type[CloudError]) -> None:
    assert type(explain(refusal(code, status, operation))) is kind


@pytest.mark.parametrize("operation", sorted(IAM_ACTIONS))
def test_who_is_denied_hears_the_action_s_name_in_iam(operation: str) -> None:
    assert f"allow {IAM_ACTIONS[operation]}" in str(explain(refusal("AccessDenied", 403, operation)))


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        ("PermanentRedirect", "", "set AWS_REGION"),
        ("InvalidAccessKeyId", "", "check profile and endpoint"),
        ("AccessDenied", "not authorized to perform: kms:GenerateDataKey", "allow kms:GenerateDataKey"),
        ("RequestTimeTooSkewed", "", r"set the clock"),
    ],
)
def test_a_refusal_names_the_remedy(code: str, message: str, remedy: str) -> None:
    assert remedy in str(explain(refusal(code, 403, "PutObject", message)))


def test_a_refusal_without_a_word_by_a_clock_far_away_is_the_clock_s() -> None:
    refused = Refusal("HeadObject", "s3://bucket/key", "bucket", 403, "403", "Forbidden", skew_s=-3600.0)

    assert "this clock is -3600 s from the server's" in str(explain(refused))


def test_the_skew_is_ours_minus_theirs() -> None:
    metadata = {"HTTPHeaders": {"date": "Thu, 01 Jan 1970 00:01:40 GMT"}}

    assert skew_s(metadata, 160.0) == 60.0
    assert skew_s({}, 160.0) is None


# --------------------------------------------------------------------------------------------------------------- sums


def test_a_sum_travels_as_base64_of_eight_bytes() -> None:
    assert encode_crc(0xAE8B14860A799888) == "rosUhgp5mIg="
    assert decode_crc("rosUhgp5mIg=") == 0xAE8B14860A799888


@pytest.mark.parametrize("text", [None, "", "rosUhgp5mIg=-3", "AAAA", "?"])
def test_what_is_no_whole_object_s_sum_is_none(text: str | None) -> None:
    assert decode_crc(text) is None


@pytest.mark.parametrize(
    ("size", "part_bytes"),
    [(1, 16 * MIB), (16 * MIB * MAX_PARTS, 16 * MIB), (16 * MIB * MAX_PARTS + 1, 32 * MIB)],
)
def test_ten_thousand_parts_suffice(size: int, part_bytes: int) -> None:
    assert plan_part_bytes(size, 16 * MIB) == part_bytes
    assert -(-size // part_bytes) <= MAX_PARTS


# ------------------------------------------------------------------------------------------------ bodies and targets


def test_a_closed_body_reads_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(b"0123456789")
    for source in (memoryview(b"0123456789"), path):
        reader = Reader(source)
        body = reader.body(2, 5)
        reader.close()

        assert (len(body), bytes(body.read())) == (5, b"23456")
        body.seek(0)
        body.close()
        body.close()
        with pytest.raises(Stopped):
            body.read()
        with pytest.raises(Stopped):
            body.crc(0, 5)


def test_what_was_sent_of_a_file_does_not_stay_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, advised = tmp_path / "shard", list[tuple[int, int, int]]()
    file.write_bytes(bytes(100))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *advice: advised.append(advice))
    reader = Reader(file)

    reader.body(20, 30).close()
    reader.close()

    assert advised == [(20, 30, os.POSIX_FADV_DONTNEED)]


def test_a_closed_target_is_not_written() -> None:
    into = bytearray(4)
    target = Target(memoryview(into))
    target.write(0, b"ab")
    target.close()

    with pytest.raises(Stopped):
        target.write(2, b"cd")
    assert into == b"ab\0\0"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_bytes(b"0123456789")
    before = open_files()

    reader = Reader(path)
    body = reader.body(0, 5)
    body.close()
    reader.close()

    assert open_files() <= before


# --------------------------------------------------------------------------------------------------------------- pace


def pace_of(seconds: float, streams: int = 8) -> Pace:
    pace = Pace(streams)
    for _ in range(Pace.SAMPLES):
        pace.finished(16 * MIB, seconds)
    return pace


def test_a_request_may_take_four_times_what_its_siblings_took() -> None:
    assert pace_of(3.0).limit_s(16 * MIB) == pytest.approx(12.0)
    assert pace_of(3.0).limit_s(8 * MIB) == pytest.approx(6.0)


def test_nobody_is_given_up_within_two_seconds_or_without_siblings_or_when_small() -> None:
    assert pace_of(0.01).limit_s(16 * MIB) == 2.0
    assert Pace(8).limit_s(16 * MIB) == math.inf
    assert pace_of(3.0).limit_s(1000) == math.inf


def test_where_all_are_slow_nobody_is_given_up_for_ever() -> None:
    pace = pace_of(3.0)
    for _ in range(Pace.IN_A_ROW):
        assert pace.limit_s(16 * MIB) < math.inf
        pace.gave_up(4 * MIB, 12.0)

    assert pace.limit_s(16 * MIB) == math.inf
    for _ in range(Pace.SAMPLES):
        pace.finished(16 * MIB, 48.0)
    assert pace.limit_s(16 * MIB) > 100.0


def test_failures_halve_what_is_in_flight_once_a_second_and_success_brings_it_back() -> None:
    clock = FakeClock()
    pace = Pace(8, clock)
    for left in (4, 2, 1, 1):
        pace.failed()
        pace.failed()
        assert pace.window == left
        clock.advance(Pace.HALVED_EVERY_S)

    for _ in range(7):
        pace.finished(16 * MIB, 1.0)

    assert pace.window == 8
