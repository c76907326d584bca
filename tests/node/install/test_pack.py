"""scripts/pack: the same project gives the same archive, with the harness in it and without what nobody wants there."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.node.machine import ROOT


def pack(folder: Path, archive: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/pack", folder, archive], check=False, capture_output=True, text=True, cwd=archive.parent
    )


def names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


@pytest.mark.usefixtures("package_index")  # the wheel is built with hatchling
def test_a_checkout_is_packed_without_what_is_ignored_and_twice_the_same(tmp_path: Path) -> None:
    project, archive = tmp_path / "project", tmp_path / "a.tar.gz"
    project.mkdir()
    git = ["git", "-C", str(project)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for name, text in {"train.py": "print()", "deleted.py": "", ".gitignore": "*.log\n.venv\n", "run.log": ""}.items():
        (project / name).write_text(text)
    (project / ".venv").mkdir()
    (project / ".venv/python").touch()
    subprocess.run([*git, "add", "."], check=True)
    (project / "deleted.py").unlink()
    (project / "new.py").touch()
    (project / "run.sh").touch(mode=0o700)

    first = pack(project, archive)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{archive}\n"
    *own, wheel = names(archive)
    assert own == [".gitignore", "new.py", "run.sh", "train.py"]
    assert wheel.startswith("wheels/harness_spot-")
    with tarfile.open(archive) as tar:
        assert tar.getmember("run.sh").mode == 0o755
        tar.extractall(tmp_path / "node", filter="data")

    bytes_before = archive.read_bytes()
    os.utime(project / "train.py", (1, 1))
    assert pack(project, archive).returncode == 0
    assert archive.read_bytes() == bytes_before


@pytest.mark.sample
def test_a_plain_folder_is_packed_with_its_own_wheel_and_without_environments(tmp_path: Path) -> None:
    project, archive = tmp_path / "project", tmp_path / "project" / "a.tar.gz"
    for name in ("train.py", "lib/a.py", "lib/__pycache__/a.pyc", ".venv/bin/python", "harness-1-py3-none-any.whl"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    (project / "link").symlink_to("lib")

    assert pack(project, archive).returncode == 0
    assert pack(project, archive).returncode == 0  # and not the archive in the archive
    assert names(archive) == ["harness-1-py3-none-any.whl", "lib/a.py", "link", "train.py"]


def test_a_link_out_of_the_folder_is_refused_here_and_not_on_the_instance(tmp_path: Path) -> None:
    project, archive = tmp_path / "project", tmp_path / "a.tar.gz"
    project.mkdir()
    (project / "harness-1-py3-none-any.whl").touch()
    (project / "data").symlink_to("/etc")

    done = pack(project, archive)

    assert done.returncode == 1
    assert "is a link to /etc, by its name outside of the folder" in done.stderr
    assert list(tmp_path.iterdir()) == [project]


@pytest.mark.parametrize("target", ["{folder}/lib", "../project/lib"])
def test_a_link_that_only_holds_on_this_machine_is_refused_here_and_not_on_the_instance(
    tmp_path: Path, target: str
) -> None:
    project = _with_wheel(tmp_path / "project")
    (project / "lib").mkdir()
    (project / "link").symlink_to(target.format(folder=project))

    done = pack(project, tmp_path / "a.tar.gz")

    assert done.returncode == 1
    assert "has to be relative" in done.stderr


def test_a_link_is_packed_where_the_folder_is_reached_by_another(tmp_path: Path) -> None:
    project = _with_wheel(tmp_path / "project")
    (project / "lib").mkdir()
    (project / "link").symlink_to("lib")
    (tmp_path / "home").symlink_to(tmp_path)

    done = pack(tmp_path / "home/project", tmp_path / "a.tar.gz")

    assert done.returncode == 0, done.stderr


def test_a_wheel_of_the_harness_is_packed_though_git_ignores_it(tmp_path: Path) -> None:
    project = _with_wheel(tmp_path / "project", "wheels")
    subprocess.run(["git", "-C", str(project), "init", "--quiet"], check=True)
    (project / ".gitignore").write_text("wheels/\n")  # as GitHub's own list for Python has it

    assert pack(project, tmp_path / "a.tar.gz").returncode == 0
    assert names(tmp_path / "a.tar.gz") == [".gitignore", "wheels/harness-1-py3-none-any.whl"]


def test_a_repository_in_the_repository_is_not_left_out_silently(tmp_path: Path) -> None:
    project = _with_wheel(tmp_path / "project")
    for folder in (project, project / "vendored"):
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (project / "vendored/lib.py").touch()

    done = pack(project, tmp_path / "a.tar.gz")

    assert done.returncode == 1
    assert f"{project}/vendored is a repository of its own" in done.stderr


def test_a_checkout_that_git_does_not_read_is_not_packed_with_what_it_ignores(tmp_path: Path) -> None:
    project = _with_wheel(tmp_path / "project")
    (project / ".git").write_text("gitdir: /nowhere\n")
    (project / ".env").write_text("SECRET=1\n")

    done = pack(project, tmp_path / "a.tar.gz")

    assert done.returncode == 1
    assert "is a git checkout, but: fatal: not a git repository" in done.stderr
    assert not (tmp_path / "a.tar.gz").exists()


def _with_wheel(project: Path, where: str = ".") -> Path:
    (project / where).mkdir(parents=True)
    (project / where / "harness-1-py3-none-any.whl").touch()
    return project
