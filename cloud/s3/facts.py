"""What can be known of a bucket before it costs a night: for `harness doctor`.

Owns the questions and what a missing answer means. Changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from cloud.errors import CloudError, Denied
from cloud.notice import Deadline
from cloud.s3.client import S3Client, skew_s


@dataclass(frozen=True)
class BucketFacts:
    """Each is `None` where it could not be found out (not allowed, not supported).

    Attributes:
        region: where the bucket is.
        clock_skew_s: this host's clock minus the store's, to the second. S3 refuses more than 900.
        abort_days: days after which a lifecycle rule gives up what is left of multipart uploads; 0: there is no rule.
        encryption: what new objects are encrypted with by default: "AES256", "aws:kms", "" for nothing.
        access_key_end: the last four characters of the access key.
        credentials_from: "iam-role", "env", "shared-credentials-file", ... as botocore calls it.
    """

    region: str | None
    clock_skew_s: float | None
    abort_days: int | None
    encryption: str | None
    access_key_end: str | None
    credentials_from: str | None


def ask(client: S3Client, prefix: str, deadline: Deadline) -> BucketFacts:
    """The facts; `prefix` is the full prefix of the run's keys.

    Raises:
        CloudError: the bucket itself cannot be reached; says why.
    """
    # Not HeadBucket: a role that may list below its prefix only, as ours should, is denied that.
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
    """A question that may not be asked has no answer; a store that is down is an error."""
    if not isinstance(err, Denied):
        raise err
