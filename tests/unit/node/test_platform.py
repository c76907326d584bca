"""Where we are, and whose fleet may be acted upon."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud.testing.metadata_sim import Fault, MetadataSimulator
from harness.node import platform as node_platform
from harness.node.exit_policy import Where
from harness.node.platform import Platform, describe_fleet, find_instance, find_platform, fleet_words, open_metadata
from tests.support.fleet_server import FleetServer
from tests.support.patience import HANG_S
from tests.support.s3_account import use_account

GROUP_TAG = "aws:autoscaling:groupName"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every service here answers, or refuses at once; how soon is not the subject."""
    monkeypatch.setattr(node_platform, "METADATA_S", HANG_S)


def platform(simulator: MetadataSimulator | None, environ: dict[str, str], run: str = "a") -> Platform:
    metadata = open_metadata("off" if simulator is None else simulator.url)
    return find_platform(metadata, find_instance(metadata, environ), environ, run)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FleetServer:
    use_account(monkeypatch)
    with FleetServer() as serving:
        monkeypatch.setenv("AWS_ENDPOINT_URL", serving.url)
        yield serving  # type: ignore[misc]


def test_a_laptop_is_elsewhere() -> None:
    found = platform(None, {})

    assert (found.where, found.words) == (Where.ELSEWHERE, "the metadata service is turned off")


def test_a_slurm_job_is_one_wherever_it_runs() -> None:
    with MetadataSimulator(tags={GROUP_TAG: "g", "harness-run": "a"}) as simulator:
        found = platform(simulator, {"SLURM_JOB_ID": "42"})

    assert (found.where, found.job) == (Where.SLURM, "42")


def test_an_instance_of_a_group_that_was_made_for_the_run_is_a_fleet(server: FleetServer) -> None:
    (instance,) = server.create_group("trainers")
    with MetadataSimulator(instance_id=instance, tags={GROUP_TAG: "trainers", "harness-run": "a"}) as simulator:
        found = platform(simulator, {"HARNESS_HOOK": "drain"})

    assert (found.where, found.hooked) == (Where.FLEET, True)
    assert found.fleet is not None
    assert found.words == f"Auto Scaling group trainers, {instance} (g6e.xlarge, us-east-1a)"


def test_a_group_that_somebody_named_is_a_fleet(server: FleetServer) -> None:
    (instance,) = server.create_group("trainers")
    with MetadataSimulator(instance_id=instance) as simulator:
        assert platform(simulator, {"HARNESS_GROUP": "trainers"}).where is Where.FLEET


@pytest.mark.parametrize("tags", [{GROUP_TAG: "nodes"}, {GROUP_TAG: "nodes", "harness-run": "another"}])
def test_a_group_that_was_not_made_for_the_run_is_left_alone(tags: dict[str, str]) -> None:
    with MetadataSimulator(tags=tags) as simulator:
        assert platform(simulator, {}).where is Where.ELSEWHERE


def test_even_a_named_group_is_left_alone_by_another_run_than_the_instance_s() -> None:
    with MetadataSimulator(tags={"harness-run": "another"}) as simulator:
        found = platform(simulator, {"HARNESS_GROUP": "trainers"})

    assert (found.where, found.words) == (
        Where.ELSEWHERE,
        "this instance was started for run 'another': its fleet is left alone",
    )


def test_a_named_group_without_an_instance_is_said() -> None:
    with MetadataSimulator() as simulator:
        simulator.fault(Fault.DISABLED)
        assert platform(simulator, {"HARNESS_GROUP": "g"}).words == "not on EC2, although HARNESS_GROUP is set to g"


def tool(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = directory / "scontrol"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_a_job_is_requeued_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked')

    assert Platform(Where.SLURM, "", job="42").requeue() is None
    assert (tmp_path / "asked").read_text() == "requeue 42\n"


def test_a_refused_requeue_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, monkeypatch, "echo slurm_requeue error: disabled >&2; exit 1")
    assert Platform(Where.SLURM, "", job="42").requeue() == "scontrol requeue 42: slurm_requeue error: disabled"

    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "No such file" in str(Platform(Where.SLURM, "", job="42").requeue())


# ---- harness status -------------------------------------------------------------------------------------------------


def test_status_shows_the_group(server: FleetServer) -> None:
    (first, _) = server.create_group("trainers", desired=2)
    with MetadataSimulator(instance_id=first, tags={GROUP_TAG: "trainers"}) as simulator:
        found = describe_fleet(simulator.url, {})

    assert found == {"group": "trainers", "desired": 2, "instances": 2, "why": None}
    assert fleet_words(found) == "trainers: desired capacity 2, instances 2"


def test_status_says_why_there_is_no_fleet() -> None:
    assert fleet_words(describe_fleet("off", {})) == "none (the metadata service is turned off)"
    with MetadataSimulator() as simulator:
        assert fleet_words(describe_fleet(simulator.url, {})) == "none (no Auto Scaling group)"
        simulator.fault(Fault.DISABLED)
        assert fleet_words(describe_fleet(simulator.url, {})) == "none (not on EC2)"


def test_status_shows_a_group_that_may_not_be_described(server: FleetServer) -> None:
    (instance,) = server.create_group("trainers")
    server.fault("DescribeAutoScalingGroups", code="AccessDenied", status=403, times=9)
    with MetadataSimulator(instance_id=instance, tags={GROUP_TAG: "trainers"}) as simulator:
        found = describe_fleet(simulator.url, {})

    assert found["group"] == "trainers"
    assert "autoscaling:DescribeAutoScalingGroups" in fleet_words(found)
