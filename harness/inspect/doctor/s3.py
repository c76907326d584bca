"""Checks that only a bucket needs: credentials, region, a clock that must agree with ours, lifecycle rules, quirks.

Owns what the facts from `cloud.s3.store` mean for a run. Asks the bucket twice, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cloud.notice import Clock, Deadline
from cloud.s3.facts import BucketFacts
from cloud.s3.probe import Quirks
from cloud.store import ObjectStore
from harness.core.snapshot import RunKeys
from harness.inspect.doctor.finding import Finding, failure, ok, warning

FACTS_S = 5.0
REFUSED_SKEW_S = 900.0
"""S3 refuses a request if the time of its signature differs from S3's time by more seconds than this."""
SUSPECT_SKEW_S = 60.0
LAZY_DAYS = 30


class Bucket(ObjectStore, Protocol):
    """An S3 store that can also describe its bucket."""

    def facts(self, prefix: str, *, deadline: Deadline) -> BucketFacts:
        """See `cloud.s3.store.S3Store.facts`."""
        ...

    def probe(self, prefix: str, *, deadline: Deadline) -> Quirks:
        """See `cloud.s3.store.S3Store.probe`."""
        ...


def check_bucket(bucket: Bucket, keys: RunKeys, clock: Clock) -> Iterator[Finding]:
    """Check credentials, region, encryption, clock, and the rule for unfinished uploads. Raises CloudError."""
    facts = bucket.facts(keys.snapshots, deadline=Deadline.after(FACTS_S, clock))
    yield judge_credentials(facts)
    yield ok("bucket", f"in {facts.region or 'an unknown region'}, {_encryption(facts.encryption)}")
    yield judge_clock(facts.clock_skew_s)
    yield judge_lifecycle(facts.abort_days)


def check_sums(bucket: Bucket, prefix: str, clock: Clock) -> Finding:
    """Check whether the store compares checksums, with keys that start with `prefix`. Raises CloudError.

    From then on, `bucket` uses only the features that the store honours. The check `put if absent` tries conditions.
    """
    quirks = bucket.probe(prefix, deadline=Deadline.after(FACTS_S, clock))
    if quirks.takes_sums and quirks.checks_sums:
        return ok("sums", "the store compares the CRC64NVME sums that are sent with the data")
    how = "does not compare" if quirks.takes_sums else "does not take"
    return warning(
        "sums",
        f"the store {how} CRC64NVME sums: damage in transit is found only when a snapshot is read back",
        "no action is needed; with a store that compares them, such as AWS S3, a damaged part is sent again at once",
    )


def judge_credentials(facts: BucketFacts) -> Finding:
    """Report where the credentials came from: an instance that has a role may use a person's key instead."""
    if facts.credentials_from is None:
        return warning("credentials", "none were found: requests are anonymous", "give the instance a role")
    return ok("credentials", f"{facts.credentials_from}, access key ending in {facts.access_key_end}")


def judge_clock(skew_s: float | None) -> Finding:
    """Check whether this host's clock and the store's agree."""
    if skew_s is None:
        return warning("clock", "could not be compared: the store sent no date")
    told = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store's"
    remedy = "set the clock: timedatectl set-ntp true, or chronyc makestep"
    if abs(skew_s) > REFUSED_SKEW_S:
        return failure("clock", f"{told}: S3 refuses more than {REFUSED_SKEW_S:.0f} s", remedy)
    if abs(skew_s) > SUSPECT_SKEW_S:
        return warning("clock", f"{told}; S3 refuses more than {REFUSED_SKEW_S:.0f} s", remedy)
    return ok("clock", told)


def judge_lifecycle(abort_days: int | None) -> Finding:
    """Check whether the bucket itself deletes the parts that a killed instance leaves behind, if no start does."""
    remedy = "add a lifecycle rule with AbortIncompleteMultipartUpload, DaysAfterInitiation 7, for the whole bucket"
    if abort_days is None:
        return warning(
            "lifecycle", "the bucket's rules could not be read", f"allow s3:GetLifecycleConfiguration, or {remedy}"
        )
    if abort_days == 0:
        return warning(
            "lifecycle", "no rule deletes parts of uploads that were never completed: you pay for them", remedy
        )
    days = f"parts of uploads that were never completed are deleted after {abort_days} days"
    return (
        warning("lifecycle", days, f"fewer days cost less: {remedy}")
        if abort_days > LAZY_DAYS
        else ok("lifecycle", days)
    )


def _encryption(name: str | None) -> str:
    if name is None:
        return "its default encryption could not be read"
    return f"encrypts with {name}" if name else "encrypts nothing by default"
