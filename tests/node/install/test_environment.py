"""The interpreter of the run: the AMI's where it has everything, else one on top of it that keeps its torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.machine import ROOT, Machine, wheel

HARNESS = wheel("harness", __main__="")


@pytest.fixture
def code(machine: Machine) -> Path:
    """The run's folder: in a repository, which is the quickest way to have one there."""
    folder = machine.root.parent / "code"
    folder.mkdir()
    (folder / "train.py").write_text("")
    return folder


def prepare(machine: Machine, code: Path, *, killed: bool = False) -> subprocess.CompletedProcess[str]:
    """The source and the environment."""
    git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "change", "--allow-empty"]):
        subprocess.run([*git, *arguments], check=True)
    machine.settings["HARNESS_SOURCE"] = f"git+file://{code}"
    return machine.prepare("source", "environment", killed=killed)


def of(python: str, line: str) -> str:
    return subprocess.run(
        [python, "-P", "-c", line], check=True, capture_output=True, text=True, cwd="/"
    ).stdout.strip()


def test_an_interpreter_that_has_everything_is_used_as_it_is(machine: Machine, code: Path) -> None:
    machine.environment["PYTHONPATH"] = str(ROOT)
    machine.settings["HARNESS_PYTHON"] = sys.executable

    done = prepare(machine, code)

    assert done.returncode == 0, done.stdout
    assert machine.local_env() == {
        "HARNESS_LOCAL": str(machine.root / "var/lib/harness"),
        "HARNESS_PYTHON": sys.executable,
        "HARNESS_BOOT": "/etc/harness/boot.json",
    }
    assert not (machine.root / "opt/harness/venv").exists()


@pytest.mark.sample
def test_a_wheel_in_the_archive_is_installed_beside_the_torch_of_the_base(
    machine: Machine, code: Path, image_python: str
) -> None:
    (code / "wheels").mkdir()
    (code / "wheels/harness-1-py3-none-any.whl").write_bytes(HARNESS)
    (code / "other-1-py3-none-any.whl").write_bytes(wheel("other"))
    (code / "requirements.txt").write_text("./other-1-py3-none-any.whl\n")

    done = prepare(machine, code)

    assert done.returncode == 0, done.stdout
    python, venv = machine.local_env()["HARNESS_PYTHON"], machine.root / "opt/harness/venv"
    assert python == str(venv / "bin/python")
    assert of(python, "import harness.__main__, other; print(harness.__file__)").startswith(str(venv))
    found = [
        of(each, "import importlib.util as u; print(u.find_spec('torch').origin)") for each in (python, image_python)
    ]
    assert found[0] == found[1] != "None"


def test_the_wheel_of_the_archive_is_used_though_the_base_has_the_same_version(machine: Machine, code: Path) -> None:
    base = machine.root.parent / "base"
    old = base.with_name("harness-1-py3-none-any.whl")
    old.write_bytes(wheel("harness", __main__="code = 'old'"))
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", base], check=True)
    pip = [sys.executable, "-m", "pip", "--python", base / "bin/python", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, old], check=True)
    (code / old.name).write_bytes(wheel("harness", __main__="code = 'new'"))
    machine.settings["HARNESS_PYTHON"] = str(base / "bin/python")

    done = prepare(machine, code)

    assert done.returncode == 0, done.stdout
    assert of(machine.local_env()["HARNESS_PYTHON"], "import harness.__main__ as c; print(c.code)") == "new"


def test_an_environment_is_made_once_and_again_when_the_setup_is_another(machine: Machine, code: Path) -> None:
    made = machine.root / "made"
    (code / "harness-1-py3-none-any.whl").write_bytes(HARNESS)
    setup = f'pip --version >"{made}.pip"; echo "$VIRTUAL_ENV $HARNESS_COMMAND" >>"{made}"'
    machine.settings |= {"HARNESS_SETUP": setup, "HARNESS_COMMAND": "python \"a b\" $HOME `id` \\ 'c'"}

    first = prepare(machine, code)
    machine.prepare("environment")

    venv = machine.root / "opt/harness/venv"
    assert first.returncode == 0, first.stdout
    assert made.read_text() == f"{venv} {machine.settings['HARNESS_COMMAND']}\n"
    machine.settings["HARNESS_SETUP"] += " # changed"
    machine.prepare("environment")
    assert made.read_text().count("\n") == 2


@pytest.mark.parametrize("how", ["fails", "is killed"])
def test_an_environment_that_was_left_half_made_is_made_anew(machine: Machine, code: Path, how: str) -> None:
    (code / "harness-1-py3-none-any.whl").write_bytes(HARNESS)
    flag = machine.root / "network"
    machine.settings["HARNESS_SETUP"] = f'test -e "{flag}" || {"exit 3" if how == "fails" else "kill -9 0"}'

    first = prepare(machine, code, killed=how == "is killed")
    assert not (machine.root / "etc/harness/local.env").exists()
    flag.touch()
    second = machine.prepare("environment")

    if how == "fails":
        assert first.returncode == 70
        assert "setup_command: ended with exit code 3: test -e" in first.stdout
    assert second.returncode == 0, second.stdout
    assert of(machine.local_env()["HARNESS_PYTHON"], "import harness.__main__") == ""


def test_a_requirement_of_another_torch_is_refused_instead_of_replacing_it(machine: Machine, code: Path) -> None:
    (code / "harness-1-py3-none-any.whl").write_bytes(HARNESS)
    (code / "requirements.txt").write_text("torch==0.0.1\n")

    done = prepare(machine, code)

    assert done.returncode == 70
    assert "requirements.txt: pip failed. torch stays as the AMI has it" in done.stdout


def test_an_environment_without_the_harness_is_an_error_that_names_the_variable(machine: Machine, code: Path) -> None:
    machine.replace_program("bare", f'exec {sys.executable} -S "$@"')
    machine.settings["HARNESS_PYTHON"] = "bare"

    done = prepare(machine, code)

    assert done.returncode == 64
    assert "harness_package: " in done.stdout
    assert "No module named 'harness'" in done.stdout


def test_an_old_interpreter_is_an_error_that_tells_the_way_out(machine: Machine, code: Path) -> None:
    old = 'case "$*" in *version_info*) exit 1;; -V) echo Python 3.10.4;; esac'
    machine.replace_program("old", old)
    machine.settings["HARNESS_PYTHON"] = "old"

    done = prepare(machine, code)

    assert done.returncode == 64
    assert "is Python 3.10.4, and 3.11 or newer is needed" in done.stdout
    assert "container_image" in done.stdout


def test_an_interpreter_that_is_not_there_is_an_error(machine: Machine, code: Path) -> None:
    machine.settings["HARNESS_PYTHON"] = "/nowhere/python"

    done = prepare(machine, code)

    assert done.returncode == 64
    assert "python: there is no /nowhere/python here" in done.stdout


def test_an_image_is_pulled_and_asked_for_its_interpreter(machine: Machine, code: Path) -> None:
    calls = machine.root / "calls"
    machine.replace_program("docker", f'echo "$*" >>"{calls}"; case "$1" in run) echo python3;; esac')
    machine.settings |= {"HARNESS_IMAGE": "repo/image:1", "HARNESS_PYTHON": ""}

    done = prepare(machine, code)

    assert done.returncode == 0, done.stdout
    pulled, asked = calls.read_text().splitlines()
    assert pulled == "pull --quiet repo/image:1"
    assert f"--workdir {machine.current} repo/image:1 -c " in asked
    assert machine.local_env()["HARNESS_PYTHON"] == "python3"


def test_an_image_without_the_harness_is_an_error_that_names_the_variable(machine: Machine, code: Path) -> None:
    machine.replace_program("docker", 'test "$1" != run')
    machine.settings |= {"HARNESS_IMAGE": "repo/image:1", "HARNESS_PYTHON": ""}

    done = prepare(machine, code)

    assert done.returncode == 64
    assert "no python in it imports the harness, or there is no bash" in done.stdout
