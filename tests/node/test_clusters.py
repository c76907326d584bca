"""The files of examples/cluster, as a cluster would read and run them: their commands are run, up to the start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.errors import ExitCode
from tests.support.world import ROOT

FOLDER = ROOT / "examples" / "cluster"
KUBERNETES = sorted(FOLDER.glob("kubernetes*.yaml"))
SLURM = sorted(FOLDER.glob("slurm*.sh"))
SKYPILOT = sorted(FOLDER.glob("skypilot*.yaml"))
AGAIN = {ExitCode.INTERRUPTED_LOCAL, ExitCode.INTERRUPTED}
NEVER = {ExitCode.USAGE, ExitCode.BUG, ExitCode.SUPERSEDED}


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A project with a training script, and with a resume.sh that goes as far as the start."""
    (tmp_path / "scripts").mkdir()
    stub = tmp_path / "scripts" / "resume.sh"
    stub.write_text(f'#!/bin/bash\nexec {ROOT}/scripts/resume.sh --dry-run "${{@//s3:/{tmp_path}/s3}}"\n')
    stub.chmod(0o755)
    (tmp_path / "train.py").touch()
    return tmp_path


def run(home: Path, command: list[str]) -> str:
    """What the harness would do."""
    environ = {"PATH": "/usr/bin:/bin", "HARNESS_PYTHON": sys.executable, "HOME": str(home), "TMPDIR": str(home)}
    done = subprocess.run(command, cwd=home, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def jobs(path: Path) -> list[Any]:
    return [part for part in yaml.safe_load_all(path.read_text()) if part["kind"] == "Job"]


def check_command(path: Path, home: Path, command: list[str]) -> None:
    said = run(home, command)
    assert "train.py" in said
    if "watch" in path.name:
        assert "--resume_from_checkpoint" in said


@pytest.mark.parametrize("name", names(KUBERNETES))
def test_a_job_of_kubernetes_starts_and_starts_again_only_where_that_helps(name: str, home: Path) -> None:
    (job,) = jobs(FOLDER / name)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    codes = {rule["action"]: set(rule["onExitCodes"]["values"]) for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert codes == {"Ignore": AGAIN, "FailJob": NEVER}
    assert pod["restartPolicy"] == "Never", "podFailurePolicy demands it"
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    options = dict(word[2:].split("=") for word in container["command"] if re.match("--[a-z-]+=", word))
    assert int(options["grace-s"]) < pod["terminationGracePeriodSeconds"]
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["touch", options["drain-file"]]
    command = [word.replace("/checkpoints", str(home / "checkpoints")) for word in container["command"]]
    check_command(FOLDER / name, home, [word.replace("/data", str(home / "data")) for word in command])


@pytest.mark.parametrize("name", names(SLURM))
def test_a_job_of_slurm_starts_and_has_time_to_save(name: str, home: Path) -> None:
    text = (FOLDER / name).read_text()
    found = re.search(r"--signal=B:TERM@(\d+)$", text, re.MULTILINE)
    grace = re.search(r"--grace-s (\d+)", text)
    assert found is not None
    assert grace is not None
    assert int(grace[1]) < int(found[1])
    assert re.search(r"^#SBATCH --requeue$", text, re.MULTILINE)
    script = home / name
    script.write_text(text.replace("/shared", str(home / "shared")))
    check_command(FOLDER / name, home, ["bash", str(script)])


@pytest.mark.parametrize("name", names(SKYPILOT))
def test_a_task_of_skypilot_starts_and_is_recovered_after_an_interruption(name: str, home: Path) -> None:
    task = yaml.safe_load((FOLDER / name).read_text())
    assert set(task["resources"]["job_recovery"]["recover_on_exit_codes"]) == AGAIN
    check_command(FOLDER / name, home, ["bash", "-c", task["run"]])


def test_there_are_some() -> None:
    assert (len(KUBERNETES), len(SLURM), len(SKYPILOT)) == (3, 2, 2)
