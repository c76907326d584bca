"""Identity and tags of this EC2 instance, from its own metadata service, which needs no permission.

Owns the paths of identity and tags, and how often to ask. Knows no HTTP (`metadata.py` does).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote

from cloud.aws.metadata import Answer, Metadata
from cloud.errors import Unavailable, call_with_retry
from cloud.notice import Deadline

ATTEMPTS = 3
"""Attempts, a second each, so that an instance in a busy boot is not taken for a laptop."""

GROUP_TAG = "aws:autoscaling:groupName"
"""Set by Auto Scaling itself on its instances: users cannot set a tag that begins with "aws:"."""


@dataclass(frozen=True)
class Instance:
    """The EC2 instance that this process runs on.

    Attributes:
        id: "i-0123456789abcdef0".
        region: "us-east-1"; empty if the identity document names none (boto3's own settings decide then).
        type: "g6e.xlarge".
        zone: "us-east-1a".
        spot: whether it is a spot instance.
    """

    id: str
    region: str
    type: str
    zone: str
    spot: bool


def identify(metadata: Metadata | None, deadline: Deadline) -> Instance:
    """Return the instance that this process runs on. Blocks for about three seconds at most.

    Args:
        metadata: the service; `None` if the settings turn it off.
        deadline: bounds the call further.

    Raises:
        Unavailable: no EC2 metadata service answers: not on EC2.
    """
    if metadata is None:
        raise Unavailable("the settings turn the metadata service off")
    document = _ask(metadata, "dynamic/instance-identity/document", deadline)
    life_cycle = _ask(metadata, "meta-data/instance-life-cycle", deadline)
    try:
        fields = json.loads(document.text if document else "{}")
        id_, region, type_, zone = (
            str(fields.get(name, "")) for name in ("instanceId", "region", "instanceType", "availabilityZone")
        )
    except (ValueError, AttributeError, RecursionError) as err:
        raise Unavailable(f"the metadata service gives no instance identity document: {err}") from err
    if not id_:
        raise Unavailable("the metadata service gives no instance identity document")
    return Instance(id_, region, type_, zone, spot=life_cycle is not None and life_cycle.text.strip() == "spot")


def whoami(metadata: Metadata | None, deadline: Deadline) -> Instance | None:
    """Return the instance as `identify` does, or `None` if not on EC2."""
    try:
        return identify(metadata, deadline)
    except Unavailable:
        return None


def tag(metadata: Metadata | None, key: str, deadline: Deadline) -> str | None:
    """Return the instance's tag `key`; `None` if there is no such tag, no tags in the metadata, or no service."""
    if metadata is None:
        return None
    try:
        answer = _ask(metadata, "meta-data/tags/instance/" + quote(key, safe=":@+="), deadline)
    except Unavailable:
        return None
    return answer.text if answer is not None else None


def _ask(metadata: Metadata, path: str, deadline: Deadline) -> Answer | None:
    return call_with_retry(lambda: metadata.get(path, deadline=deadline), deadline, attempts=ATTEMPTS)
