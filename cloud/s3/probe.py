"""Find out by trial how an S3-compatible store treats conditions and checksums.

Owns the trial and its result. AWS's own S3 is not tried: its behaviour is documented.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from cloud.errors import AlreadyExists, CloudError, Denied, call_with_retry
from cloud.notice import Deadline
from cloud.s3.client import S3Client
from cloud.s3.errors import SumRefused
from cloud.s3.transfer import encode_crc
from cloud.s3.upload import list_uploads

CLEAN_ATTEMPTS = 3  # no other code deletes an object that a probe leaves behind

_BODY = b"123456789"
_CRC = 0xAE8B14860A799888  # of these bytes
_WRONG = _CRC ^ 1


@dataclass(frozen=True)
class Quirks:
    """How a store differs from AWS's S3.

    Attributes:
        conditional: honours If-None-Match, so that put-if-absent has one winner. Otherwise nothing protects a run
            against a second writer.
        takes_sums: accepts CRC64NVME, with single puts and with multipart uploads.
        checks_sums: refuses bytes that do not have the sum that was sent with them. Otherwise damage on the way is
            found only when a snapshot is read back, and a sum that the store reports is only an echo.
    """

    conditional: bool = True
    takes_sums: bool = True
    checks_sums: bool = True


def probe(client: S3Client, prefix: str, deadline: Deadline) -> Quirks:
    """Find the store's quirks by trial, with objects under `prefix` that are deleted again.

    Raises:
        Denied: not allowed to write there.
        CloudError: the store could not be asked; its quirks are still unknown.
    """
    key = f"{prefix}probe-{secrets.token_hex(8)}"
    try:
        takes_sums = _takes_sums(client, key, deadline)
        return Quirks(
            conditional=_conditional(client, key, deadline),
            takes_sums=takes_sums,
            checks_sums=takes_sums and _checks_sums(client, key, deadline),
        )
    except CloudError:
        with contextlib.suppress(CloudError):  # an upload may exist although the reply with its id was lost
            call_with_retry(lambda: _abort_uploads(client, key, deadline), deadline, attempts=CLEAN_ATTEMPTS)
        raise
    finally:
        with contextlib.suppress(CloudError):
            call_with_retry(
                lambda: client.call("DeleteObject", key, deadline=deadline), deadline, attempts=CLEAN_ATTEMPTS
            )


def _takes_sums(client: S3Client, key: str, deadline: Deadline) -> bool:
    try:
        client.call("PutObject", key, deadline=deadline, Body=_BODY, ChecksumCRC64NVME=encode_crc(_CRC))
        begun = client.call(
            "CreateMultipartUpload",
            key,
            deadline=deadline,
            ChecksumAlgorithm="CRC64NVME",
            ChecksumType="FULL_OBJECT",
        )
    except Denied:
        client.call("PutObject", key, deadline=deadline, Body=_BODY)  # raises if the refusal was not about the sum
        return False
    with contextlib.suppress(Denied):  # says nothing about sums
        client.call("AbortMultipartUpload", key, deadline=deadline, UploadId=begun["UploadId"])
    return True


def _conditional(client: S3Client, key: str, deadline: Deadline) -> bool:
    """Whether a second put of a key that exists is refused."""
    try:
        client.call("PutObject", key, deadline=deadline, Body=_BODY, IfNoneMatch="*")
    except AlreadyExists:
        return True
    except Denied:  # such as NotImplemented
        return False
    return False


def _checks_sums(client: S3Client, key: str, deadline: Deadline) -> bool:
    try:
        client.call("PutObject", key, deadline=deadline, Body=_BODY, ChecksumCRC64NVME=encode_crc(_WRONG))
    except SumRefused:
        return True
    except Denied:  # a store that has its own code for this refusal
        return True
    return False


def _abort_uploads(client: S3Client, key: str, deadline: Deadline) -> None:
    for found, upload_id in list_uploads(client, key, deadline):
        client.call("AbortMultipartUpload", found, deadline=deadline, UploadId=upload_id)
