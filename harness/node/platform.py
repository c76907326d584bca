"""The platform that we are on: an Auto Scaling group, a Slurm job, or elsewhere; and what it supports.

Owns how to distinguish them, and which group may be acted on: one that the user named, or one whose instances were
tagged for this very run. Other groups are left alone: a development machine or a Kubernetes node may be in one, too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloud.aws.fleet import Fleet, find_fleet
from cloud.aws.instance import Instance, tag, whoami
from cloud.aws.metadata import Metadata, MetadataSession
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.node.exit_policy import Where

GROUP_VARIABLE = "HARNESS_GROUP"
RUN_TAG = "harness-run"
METADATA_S = 1.0  # to find out that this is not EC2: a laptop waits for it
PATIENT_S = 5.0  # if a group is named, it most likely is EC2
DESCRIBE_S = 10.0
SCONTROL_S = 30.0


@dataclass(frozen=True)
class Platform:
    """The platform that we are on.

    Attributes:
        where: its kind.
        words: for people: the platform that was found, or why there is no fleet.
        fleet: this instance in its group; only for FLEET.
        hooked: whether the group waits for us before it ends an instance.
        job: the Slurm job's id.
    """

    where: Where
    words: str
    fleet: Fleet | None = None
    hooked: bool = False
    job: str = ""

    def requeue(self) -> str | None:
        """Have Slurm start this job again; return what went wrong, or `None`."""
        command = ["scontrol", "requeue", self.job]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as err:
            return f"{' '.join(command)}: {err}"
        return f"{' '.join(command)}: {done.stderr.strip() or done.returncode}" if done.returncode else None


def open_metadata(url: str) -> MetadataSession | None:
    """Return the metadata service; `None` if the settings turn it off."""
    return None if url == "off" else MetadataSession(url, timeout_s=METADATA_S)


def find_instance(metadata: Metadata | None, environ: Mapping[str, str]) -> Instance | None:
    """Return the EC2 instance that we are on, if any. If not, blocks for about a second, longer if a group is named."""
    return whoami(metadata, Deadline.after(PATIENT_S if environ.get(GROUP_VARIABLE) else METADATA_S))


def find_platform(
    metadata: Metadata | None, instance: Instance | None, environ: Mapping[str, str], run: str
) -> Platform:
    """Find the platform that we are on.

    Args:
        metadata: of the instance; `None` where it is turned off.
        instance: what `find_instance` found.
        environ: HARNESS_GROUP, HARNESS_HOOK, HARNESS_LAUNCH_HOOK, HARNESS_TOPIC, HARNESS_METRICS, and Slurm's own.
        run: the run's name; empty if it is not known.
    """
    if job := environ.get("SLURM_JOB_ID"):
        return Platform(Where.SLURM, f"Slurm job {job}", job=job)
    group = environ.get(GROUP_VARIABLE) or None
    if instance is None:
        why = "not on EC2" if metadata is not None else "the metadata service is turned off"
        return Platform(Where.ELSEWHERE, f"{why}, although {GROUP_VARIABLE} is set to {group}" if group else why)
    made_for = tag(metadata, RUN_TAG, Deadline.after(PATIENT_S))
    if made_for and run and made_for != run:
        return Platform(Where.ELSEWHERE, f"this instance was started for run {made_for!r}: its fleet is left alone")
    if not group and not made_for:
        return Platform(Where.ELSEWHERE, f"no fleet: neither {GROUP_VARIABLE} nor the tag {RUN_TAG} names one")
    fleet, words = _find(metadata, environ, run or made_for or "")
    if fleet is None:
        return Platform(Where.ELSEWHERE, words)
    here = f"{fleet.instance.id} ({fleet.instance.type}, {fleet.instance.zone})"
    warning = f"; {words}" if words else ""
    named = f"Auto Scaling group {fleet.group}, {here}{warning}"
    return Platform(Where.FLEET, named, fleet=fleet, hooked=bool(environ.get("HARNESS_HOOK")))


def describe_fleet(url: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what `harness status` shows of the fleet. Blocks for about a second where it is not EC2.

    Returns:
        `group`, `desired` and `instances`, as far as they are known; and `why` where something is not.
    """
    nothing: dict[str, Any] = {"group": None, "desired": None, "instances": None}
    metadata = open_metadata(url)
    if metadata is None or whoami(metadata, Deadline.after(METADATA_S)) is None:
        return {**nothing, "why": "not on EC2" if metadata is not None else "the metadata service is turned off"}
    fleet, why = _find(metadata, environ, "")
    if fleet is None:
        return {**nothing, "why": why}
    try:
        state = fleet.describe(Deadline.after(DESCRIBE_S))
    except CloudError as err:
        return {**nothing, "group": fleet.group, "why": str(err)}
    return {"group": state.name, "desired": state.desired, "instances": len(state.instances), "why": None}


def fleet_words(found: Mapping[str, Any]) -> str:
    """Return the result of `describe_fleet` as one line."""
    if found["group"] is None:
        return f"none ({found['why']})"
    if found["desired"] is None:
        return f"{found['group']} ({found['why']})"
    return f"{found['group']}: desired capacity {found['desired']}, instances {found['instances']}"


def _find(metadata: Metadata | None, environ: Mapping[str, str], run: str) -> tuple[Fleet | None, str]:
    return find_fleet(
        metadata,
        group=environ.get(GROUP_VARIABLE),
        hook=environ.get("HARNESS_HOOK"),
        launch_hook=environ.get("HARNESS_LAUNCH_HOOK"),
        topic=environ.get("HARNESS_TOPIC"),
        namespace=environ.get("HARNESS_METRICS"),
        run=run,
        deadline=Deadline.after(DESCRIBE_S),
    )
