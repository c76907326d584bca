"""S3's refusals turned into CloudErrors that say what failed, where, and the remedy.

Owns the meaning of S3's error codes and the IAM name of each call. Knows no client library: `client.py` takes the
library's exceptions apart and hands over the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from cloud.errors import AlreadyExists, CloudError, Denied, Full, NotFound, OutcomeUnknown, Truncated, Unavailable


class BucketGone(Denied):
    """The bucket does not exist. Never `NotFound`, since it says nothing about an object."""


class CredentialsExpired(Unavailable):
    """The credentials of the request have expired; fresh ones may already be available."""


class CredentialsMissing(Denied):
    """No credentials were found. A user may still provide them, or a metadata service that did not answer yet may."""


class SlowDown(Unavailable):
    """The store asks for fewer requests. The request had no effect."""


class UploadGone(CloudError):
    """The multipart upload does not exist: it was completed or abandoned. The next put begins a new one."""


class PartMissing(CloudError):
    """The store lost or changed a part that it had acknowledged. The next put sends the part again."""


class SumRefused(Unavailable):
    """The bytes that arrived do not have the sum that was sent with them: they were damaged on the way."""


class Unsupported(Denied):
    """The store does not support this request, or a part of it."""


IAM_ACTIONS = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CopyObject": "s3:GetObject and s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "GetBucketEncryption": "s3:GetEncryptionConfiguration",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "GetObject": "s3:GetObject",
    "HeadBucket": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket",
    "ListParts": "s3:ListMultipartUploadParts",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "UploadPartCopy": "s3:GetObject and s3:PutObject",
}

TAKES_EFFECT = {"PutObject", "CopyObject", "CompleteMultipartUpload"}
"""Calls that make an object visible: if the reply to one is lost, the outcome is unknown."""

MOST_SKEW_S = 900.0
"""Seconds between the signer's clock and S3's; S3 refuses a request if the difference is larger."""


@dataclass(frozen=True)
class Refusal:
    """An answer of S3 that is not a success.

    Attributes:
        operation: the call, by S3's name ("PutObject").
        where: the object or bucket of the call ("s3://bucket/key").
        bucket: its name.
        status: the HTTP status.
        code: S3's error code; for HEAD, which has no body, the status as text.
        message: S3's words.
        skew_s: our clock minus the server's, or `None` if it sent no date.
    """

    operation: str
    where: str
    bucket: str
    status: int
    code: str
    message: str
    skew_s: float | None = None


_SLOW = {
    "SlowDown",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
}
_DAMAGED = {"BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "InvalidDigest", "IncompleteBody"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_UNKNOWN_REQUEST = {"NotImplemented", "MethodNotAllowed", "501", "405"}
_NO_ROOM = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "507"}


def explain(refusal: Refusal) -> CloudError:
    """Return the CloudError for S3's answer: its kind says what is known, its text what to do."""
    code, status = refusal.code, refusal.status
    words = f"{refusal.operation} {refusal.where}: {code} {refusal.message}".rstrip()
    if code in ("PreconditionFailed", "412"):
        return AlreadyExists(f"{refusal.where} exists")
    if code == "NoSuchBucket" or (refusal.operation == "HeadBucket" and status == 404):
        return BucketGone(f"{refusal.operation} {refusal.where}: the bucket {refusal.bucket} does not exist; create it")
    if code == "NoSuchUpload":
        return UploadGone(words)
    if code == "NoSuchKey" or (status == 404 and code == "404"):
        return NotFound(f"{refusal.where} does not exist")
    if code in ("InvalidPart", "InvalidPartOrder"):
        return PartMissing(words)
    if code in ("InvalidRange", "416"):
        return Truncated(f"{refusal.where} ends before the bytes that were asked for")
    if code in _EXPIRED or (refusal.operation.startswith("Head") and code == "400"):
        return CredentialsExpired(f"{words}; the credentials have expired")
    if code in _SLOW or status in (429, 503):
        return SlowDown(words)
    if code in _DAMAGED:
        return SumRefused(f"{words}; the bytes were damaged on the way")
    if code in _UNKNOWN_REQUEST:
        return Unsupported(f"{words}; this store does not support the request")
    if code in _NO_ROOM:
        return Full(words)
    if 300 <= status < 400 and code not in _ELSEWHERE:
        return Unavailable(f"{words}; the server there redirects, and is no S3: check the endpoint (http or https?)")
    if code in _ELSEWHERE:
        return Denied(f"{words}; the bucket {refusal.bucket} is in another region: set AWS_REGION to its own")
    skewed = status == 403 and abs(refusal.skew_s or 0.0) > MOST_SKEW_S  # a HEAD has no body with a code
    if skewed or code in ("RequestTimeTooSkewed", "SignatureDoesNotMatch"):
        return Denied(f"{words}; {_signature_remedy(refusal)}")
    if code == "RequestTimeout" or status == 409:
        return Unavailable(words)
    if status >= 500 or status < 300 or code == "InternalError":  # an error may come inside a 200
        return OutcomeUnknown(words) if refusal.operation in TAKES_EFFECT else Unavailable(words)
    return Denied(f"{words}; {_access_remedy(refusal)}")


def _signature_remedy(refusal: Refusal) -> str:
    clock = "" if refusal.skew_s is None else f"this clock is {refusal.skew_s:+.0f} s from the server's; "
    return clock + "set the clock (chrony), or if it is right, check the secret key"


def _access_remedy(refusal: Refusal) -> str:
    if refusal.code == "InvalidAccessKeyId":
        return "this endpoint does not know the access key: check profile and endpoint"
    action = IAM_ACTIONS.get(refusal.operation, "s3:" + refusal.operation)
    if refusal.code.startswith("KMS.") or "kms:" in refusal.message:
        return f"allow kms:GenerateDataKey and kms:Decrypt on the key, and {action}"
    if refusal.status != 403 and refusal.code not in ("AccessDenied", "403"):
        return "the store refused this request"
    also = " (and s3:ListBucket: without it S3 answers 403 for absent keys)" if action == "s3:GetObject" else ""
    return f"allow {action}{also}"
