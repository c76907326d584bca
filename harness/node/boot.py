"""What this node is, and where the time of its boot went, for the run's journal.

Owns how the agent is told: by one variable of its environment, which holds the event that it emits.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cloud.aws.instance import Instance
from harness.core import events

FILE_VARIABLE = "HARNESS_BOOT"
"""Where scripts/bootstrap-node.sh has left its measurements."""
_NO_PARTS = '{"booted_at": null, "parts_s": {}}'


def describe_node(instance: Instance | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the agent's environment needs to describe this node; nothing if it is no EC2 instance."""
    if instance is None:
        return {}
    booted_at, parts = _measured(environ.get(FILE_VARIABLE))
    event = events.NodeBooted(
        instance=instance.id,
        instance_type=instance.type,
        zone=instance.zone,
        spot=instance.spot,
        booted_at=booted_at,
        parts_s=parts,
    )
    return {events.NODE_VARIABLE: msgspec.json.encode(event).decode()}


def _measured(path: str | None) -> tuple[str | None, dict[str, float]]:
    try:
        found = json.loads(Path(path).read_text() if path else _NO_PARTS)
        booted_at, parts = found["booted_at"], {str(name): float(s) for name, s in found["parts_s"].items()}
        at = None if booted_at is None else datetime.datetime.fromtimestamp(booted_at, datetime.UTC).isoformat()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return None, {}  # another program has prepared this node
    return at, parts
