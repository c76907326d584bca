"""What systemd is told: checked by systemd itself where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.errors import ExitCode
from harness.node import decision
from tests.node.machine import SCRIPT, Machine
from tests.support.needs import lacking


@pytest.fixture
def prepared(machine: Machine) -> Machine:
    """A machine whose environment is there."""
    file = machine.root / "etc/harness/local.env"
    file.parent.mkdir(parents=True)
    file.write_text('HARNESS_LOCAL="/mnt/harness/local"\nHARNESS_PYTHON="/opt/harness/venv/bin/python"\n')
    return machine


@pytest.mark.parametrize("image", ["", "repo/image:1"])
def test_systemd_finds_no_fault_with_the_units(prepared: Machine, tmp_path: Path, image: str) -> None:
    if shutil.which("systemd-analyze") is None:
        lacking("systemd")
    prepared.settings["HARNESS_IMAGE"] = image
    prepared.replace_program("docker", "")
    assert prepared.prepare("boot", "units").returncode == 0
    copies = []
    for name in ("harness-node.service", "harness.service", "harness-ended.service"):  # whose paths exist here
        copies.append(tmp_path / name)
        copies[-1].write_text(prepared.unit(name).replace("=/opt/harness/bin", f"={prepared.root}/opt/harness/bin"))

    verified = subprocess.run(["systemd-analyze", "verify", *copies], check=False, capture_output=True, text=True)

    assert (verified.returncode, verified.stderr) == (0, "")


def test_what_resume_ends_with_is_not_repeated_and_it_has_the_time_to_end(prepared: Machine) -> None:
    done = prepared.prepare("units")

    assert done.returncode == 0, done.stdout
    unit = dict(line.split("=", 1) for line in prepared.unit("harness.service").splitlines() if "=" in line)
    prevented = {int(code) for code in unit["RestartPreventExitStatus"].split()}
    assert prevented == {0, *(int(code) for code in ExitCode)}
    assert (unit["KillMode"], unit["OOMPolicy"], unit["Restart"]) == ("mixed", "continue", "on-abnormal")
    assert int(unit["TimeoutStopSec"]) > 120
    assert unit["ExecStart"] == "/opt/harness/bin/resume.sh"
    assert unit["WorkingDirectory"] == "/opt/harness/source/current"
    assert unit["User"] == "harness"
    assert unit["OnFailure"] == unit["OnSuccess"] == "harness-ended.service"
    assert unit["Environment"] == f"{decision.VARIABLE}=/run/harness/decision"
    assert "ExecStart=/opt/harness/bin/stop-fleet.sh --unless-decided\n" in prepared.unit("harness-ended.service")


def test_a_second_start_leaves_the_same_units(prepared: Machine) -> None:
    prepared.prepare("boot", "units")
    before = {
        name: prepared.unit(name) for name in ("harness-node.service", "harness.service", "harness-ended.service")
    }
    prepared.prepare("boot", "units")

    assert {name: prepared.unit(name) for name in before} == before


def test_the_time_of_a_boot_is_measured_by_its_parts_once(prepared: Machine) -> None:
    """User data and harness-node.service both come by; the first of a boot has done the work."""
    file = prepared.root / "etc/harness/boot.json"
    assert prepared.prepare("boot", "units").returncode == 0
    first = file.read_text()
    assert prepared.prepare("units").returncode == 0

    assert file.read_text() == first
    found = json.loads(first)
    assert list(found["parts_s"]) == ["system", "boot"]
    assert found["parts_s"]["system"] > 0
    kernel = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    assert found["booted_at"] == int(kernel.split()[1])


def test_with_an_image_resume_runs_in_it_with_every_setting_by_name(prepared: Machine) -> None:
    prepared.settings |= {"HARNESS_IMAGE": "repo/image:1", "HARNESS_COMMAND": 'python "a b" $HOME `id` %n'}
    prepared.replace_program("docker", "")

    prepared.prepare("units")

    unit = prepared.unit("harness.service")
    (start,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert "docker run --rm --init --name harness --entrypoint /opt/harness/bin/resume.sh" in start
    assert "--volume /mnt/harness/local:/mnt/harness/local" in start
    assert "--volume /run/harness:/run/harness --env HARNESS_DECISION" in start
    assert "RuntimeDirectoryMode=0777" in unit, "whoever the image runs as leaves its decision there"
    assert "User=" not in unit
    assert {"--env HARNESS_COMMAND", "--env HARNESS_LOCAL", "--env HARNESS_PYTHON", "--network host"} <= {
        f"--{part.strip()}" for part in start.split("--")
    }
    assert start.endswith(" repo/image:1")
    assert "a b" not in unit  # no value is in a unit, where % and $ would mean something


def test_the_command_of_the_node_uses_the_interpreter_that_was_prepared(prepared: Machine) -> None:
    prepared.settings["HARNESS_PYTHON"] = ""  # as Terraform writes it, unless `python` is given
    python = prepared.root / "python"
    python.write_text('#!/bin/sh\necho "$HARNESS_RUN, $HARNESS_LOCAL: $*"\n')
    python.chmod(0o755)
    (prepared.root / "etc/harness/local.env").write_text(
        f'HARNESS_LOCAL="/mnt/harness/local"\nHARNESS_PYTHON="{python}"\n'
    )
    prepared.replace_program("runuser", 'shift 3; exec "$@"')  # -u harness --

    assert prepared.prepare("units").returncode == 0

    command = prepared.root / "usr/local/bin/harness"
    command.write_text(command.read_text().replace("/etc/harness", f"{prepared.root}/etc/harness"))
    done = subprocess.run(
        [command, "status"], env={"PATH": prepared.environment["PATH"]}, check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("gpt, /mnt/harness/local: -P -m harness status\n", "")


def test_the_log_is_shipped_where_the_image_has_an_agent(prepared: Machine) -> None:
    agent = prepared.root / "opt/aws/amazon-cloudwatch-agent"
    (agent / "bin").mkdir(parents=True)
    (agent / "bin/amazon-cloudwatch-agent-ctl").write_text(f'#!/bin/sh\necho "$@" >"{agent}/called"\n')
    (agent / "bin/amazon-cloudwatch-agent-ctl").chmod(0o755)
    prepared.settings["HARNESS_LOG_GROUP"] = "/harness/gpt"

    prepared.prepare("units")

    (shipped,) = json.loads((agent / "etc/harness.json").read_text())["logs"]["logs_collected"]["files"]["collect_list"]
    assert shipped["log_group_name"] == "/harness/gpt"
    assert shipped["file_path"] == "/var/log/harness/*.log"
    assert (agent / "called").read_text() == f"-a append-config -m ec2 -s -c file:{agent}/etc/harness.json\n"


def test_without_the_environment_no_unit_is_written(machine: Machine) -> None:
    done = machine.prepare("units")

    assert done.returncode == 64
    assert "local.env is not there" in done.stdout
    assert not (machine.root / "etc/systemd").exists()


def test_help_needs_nothing(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "--help"], env={"PATH": "/usr/bin:/bin", "HARNESS_ROOT": str(tmp_path)},
                          check=True, capture_output=True, text=True)  # fmt: skip

    assert done.stdout.startswith("usage: bootstrap-node.sh")
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_does_not_exist_is_refused(machine: Machine) -> None:
    done = machine.prepare("disk")

    assert done.returncode == 64
    assert "usage" in done.stdout


@pytest.mark.parametrize("gpus", [True, False])
def test_an_image_is_tried_with_the_gpus_that_the_run_will_use(machine: Machine, gpus: bool) -> None:
    machine.settings["HARNESS_IMAGE"] = "repo/image:1"
    calls = machine.root / "calls"
    machine.replace_program("docker", f'echo "$@" >>"{calls}"; test "$1" != run || echo python')
    if gpus:
        Path(machine.environment["HARNESS_GPU"]).touch()

    done = machine.prepare("source", "environment", "units")

    assert done.returncode == 0, done.stdout
    (tried,) = (line for line in calls.read_text().splitlines() if line.startswith("run"))
    assert ("--gpus all" in tried) is gpus
    assert ("--gpus all" in machine.unit("harness.service")) is gpus


def test_an_image_that_docker_cannot_start_with_its_gpus_is_refused_before_the_run(machine: Machine) -> None:
    machine.settings["HARNESS_IMAGE"] = "repo/image:1"
    Path(machine.environment["HARNESS_GPU"]).touch()
    why = 'could not select device driver "" with capabilities: [[gpu]]'
    machine.replace_program("docker", f"test \"$1\" != run || {{ echo '{why}' >&2; exit 125; }}")

    done = machine.prepare("source", "environment")

    assert done.returncode == 64
    assert why in done.stdout
