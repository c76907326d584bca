"""Facts about a bucket that `harness doctor` checks before a run: region, clock, lifecycle rules, encryption, key.

Owns the requests, and the meaning of a missing answer. Changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from cloud.errors import CloudError, Denied
from cloud.notice import Deadline
from cloud.s3.client import S3Client, skew_s


@dataclass(frozen=True)
class BucketFacts:
    """Facts about a bucket. Each is `None` if it could not be found out (not allowed, not supported).

    Attributes:
        region: the bucket's region.
        clock_skew_s: this host's clock minus the store's, to the second. S3 refuses more than 900.
        abort_days: days after which a lifecycle rule aborts unfinished multipart uploads; 0: there is no rule.
        encryption: the default encryption of new objects: "AES256", "aws:kms", "" for none.
        access_key_end: the last four characters of the access key.
        credentials_from: botocore's name for their source: "iam-role", "env", "shared-credentials-file", ...
    """

    region: str | None
    clock_skew_s: float | None
    abort_days: int | None
    encryption: str | None
    access_key_end: str | None
    credentials_from: str | None


def ask(client: S3Client, prefix: str, deadline: Deadline) -> BucketFacts:
    """Return the facts; `prefix` is the full prefix of the run's keys.

    Raises:
        CloudError: the bucket itself cannot be reached; the message says why.
    """
    # Not HeadBucket: S3 denies it to a role that may list only below its prefix, as ours should.
    reply = client.call("ListObjectsV2", None, deadline=deadline, Prefix=prefix, MaxKeys=1)["ResponseMetadata"]
    key_end, method = client.identity()
    return BucketFacts(
        region=reply.get("HTTPHeaders", {}).get("x-amz-bucket-region"),
        clock_skew_s=skew_s(reply, time.time()),
        abort_days=_abort_days(client, prefix, deadline),
        encryption=_encryption(client, deadline),
        access_key_end=key_end or None,
        credentials_from=method or None,
    )


def _abort_days(client: S3Client, prefix: str, deadline: Deadline) -> int | None:
    try:
        reply = client.call("GetBucketLifecycleConfiguration", None, deadline=deadline)
    except CloudError as err:
        if "NoSuchLifecycleConfiguration" in str(err):
            return 0
        _raise_unless_denied(err)
        return None
    days = [
        rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        for rule in reply.get("Rules", [])
        if rule["Status"] == "Enabled"
        and "AbortIncompleteMultipartUpload" in rule
        and prefix.startswith(rule.get("Filter", {}).get("Prefix", rule.get("Prefix", "")))
    ]
    return min(days, default=0)


def _encryption(client: S3Client, deadline: Deadline) -> str | None:
    try:
        reply = client.call("GetBucketEncryption", None, deadline=deadline)
    except CloudError as err:
        if "ServerSideEncryptionConfigurationNotFoundError" in str(err):
            return ""
        _raise_unless_denied(err)
        return None
    rules = reply.get("ServerSideEncryptionConfiguration", {}).get("Rules", [])
    names = [rule.get("ApplyServerSideEncryptionByDefault", {}).get("SSEAlgorithm", "") for rule in rules]
    return str(names[0]) if names else ""


def _raise_unless_denied(err: CloudError) -> None:
    """Raise `err` unless it is Denied: a denied question has no answer, but a store that is down is an error."""
    if not isinstance(err, Denied):
        raise err
