"""Copy one object of a bucket to another key inside S3: by one request, or in parts that are copied in parallel.

    CopyObject  |  CreateMultipartUpload ──▶ UploadPartCopy, several at once ──▶ CompleteMultipartUpload

Owns those requests. `store.py` checks the source before and the copy after.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

from cloud.digest import format_crc
from cloud.errors import CloudError, CopyDiffers, Unavailable, call_with_retry
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.s3.client import S3Client
from cloud.s3.errors import SumRefused
from cloud.s3.transfer import encode_crc
from cloud.s3.upload import MAX_PARTS, PART_ATTEMPTS
from cloud.store import Receipt

COPY_BYTES = 64 * 1024 * 1024
"""Bytes that one request copies. S3 would accept 5 GiB, but answer long after every time-out."""


def copy(
    client: S3Client,
    source: str,
    key: str,
    expected: Receipt,
    *,
    part_bytes: int,
    streams: int,
    options: dict[str, str],
    deadline: Deadline,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Copy one object. A copy in parts that fails is aborted, so that no parts stay, unless the abort fails too.

    Args:
        client: sends the requests.
        source: full key of the source.
        key: full key of the copy.
        expected: size and sum of the source.
        part_bytes: bytes that one request copies.
        streams: requests in flight at most.
        options: parameters of the requests that create an object (encryption).
        deadline: for the whole.
        sleep: how to pause before a part is copied again.

    Raises:
        CopyDiffers: S3 reports that the parts do not have the expected sum together.
        CloudError: see `S3Client.call`.
    """
    origin = {"Bucket": client.bucket, "Key": source}
    if expected.size <= part_bytes:
        # With ChecksumAlgorithm, S3 computes the sum from the copied bytes, whatever sum the source has.
        client.call("CopyObject", key, deadline=deadline, CopySource=origin, ChecksumAlgorithm="CRC64NVME", **options)
        return
    begun = client.call(
        "CreateMultipartUpload",
        key,
        deadline=deadline,
        ChecksumAlgorithm="CRC64NVME",
        ChecksumType="FULL_OBJECT",
        **options,
    )
    upload = {"UploadId": begun["UploadId"]}
    try:
        size = part_bytes * max(1, -(-expected.size // (part_bytes * MAX_PARTS)))
        ranges = [(at, min(at + size, expected.size) - 1) for at in range(0, expected.size, size)]

        def copy_part(number: int, first: int, last: int) -> dict[str, Any]:
            def attempt() -> dict[str, Any]:
                reply = client.call(
                    "UploadPartCopy",
                    key,
                    deadline=deadline,
                    PartNumber=number,
                    CopySource=origin,
                    CopySourceRange=f"bytes={first}-{last}",
                    **upload,
                )
                return {"PartNumber": number, "ETag": reply["CopyPartResult"]["ETag"]}

            return call_with_retry(attempt, deadline, sleep=sleep, attempts=PART_ATTEMPTS)

        pool = Pool(streams, "harness-s3-copy")
        try:
            futures = [pool.submit(copy_part, number, *span) for number, span in enumerate(ranges, start=1)]
            done, pending = wait(futures, min(deadline.remaining_s, 1e6), FIRST_EXCEPTION)
            parts = [future.result() for future in futures if future in done]
            if pending:
                raise Unavailable(f"{key}: no time left; {len(done)} of {len(futures)} parts are copied")
        finally:
            pool.shutdown()
        client.call(
            "CompleteMultipartUpload",
            key,
            deadline=deadline,
            MultipartUpload={"Parts": parts},
            ChecksumType="FULL_OBJECT",
            ChecksumCRC64NVME=encode_crc(expected.crc64nvme),
            MpuObjectSize=expected.size,
            **upload,
        )
    except SumRefused as err:
        _abort(client, key, upload, deadline)
        raise CopyDiffers(f"{source}: its copy does not have the sum {format_crc(expected.crc64nvme)}") from err
    except CloudError:
        _abort(client, key, upload, deadline)
        raise


def _abort(client: S3Client, key: str, upload: dict[str, str], deadline: Deadline) -> None:
    with contextlib.suppress(CloudError):  # a put of the key resumes the upload, or a later start abandons it
        client.call("AbortMultipartUpload", key, deadline=deadline, **upload)
