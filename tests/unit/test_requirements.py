"""A package that is missing, too old or too new is said in one line, with the command that helps."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness import requirements
from harness.requirements import needed, unmet
from tests.support.world import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Installed:
    """What is installed: everything in a version that is new enough, but for what a test changes."""

    def __init__(self, changed: Mapping[str, str | None]) -> None:
        self._changed = changed

    def __call__(self, name: str) -> str:
        version = self._changed.get(name, "99")
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version


def of(changed: Mapping[str, str | None], extra: str | None = None, **options: object) -> str | None:
    problem = unmet(extra, version=Installed(changed), **options)  # type: ignore[arg-type]
    return None if problem is None else str(problem)


def test_nothing_is_said_of_what_is_here() -> None:
    assert unmet() is None


def test_every_line_of_the_project_is_understood() -> None:
    """A line that was not would be passed over."""
    for line in PROJECT["dependencies"]:
        (name,) = re.findall(r"^[\w-]+", line)
        assert f"{name} is not installed" in str(of({name: None}))


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.6.0a0+ecf3bae40a.nv25.01", "2.6.0rc1", "2.13.0+cpu", "3"])
def test_a_version_counts_by_its_numbers(version: str) -> None:
    assert of({"torch": version}) is None


def test_all_that_is_wrong_is_one_line_and_one_command() -> None:
    assert of({"awscrt": "0.30.2", "msgspec": None, "torch": "2.5.1+cu124"}) == (
        "awscrt 0.30.2 is too old, 0.31 is the oldest that works; msgspec is not installed; "
        "torch 2.5.1+cu124 is too old, 2.6 is the oldest that works: "
        "pip install 'awscrt>=0.31' 'msgspec>=0.21' 'torch>=2.6'"
    )


def test_the_command_line_does_without_torch_but_not_with_an_old_one() -> None:
    assert of({"torch": None}, without=("torch",)) is None
    assert of({"torch": "2.5"}, without=("torch",)) is not None


def test_a_tree_that_was_not_installed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "DISTRIBUTION", "never-installed")
    assert unmet() is None


@pytest.mark.parametrize("extra", ["accelerate", "lightning", "pytorch-lightning", "transformers"])
def test_an_integration_is_told_by_its_extra(extra: str) -> None:
    assert f"{extra} is not installed" in str(of({extra: None}, extra))


def test_what_has_gone_from_a_newer_version_says_that_it_may_be_too_new() -> None:
    with (
        pytest.raises(ImportError, match="this version of lightning may be too new"),
        needed("lightning"),
    ):
        from lightning.pytorch.callbacks import Gone  # noqa: F401


def run(tmp_path: Path, package: str, version: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Start Python with the metadata of another version of a package before the real one's."""
    folder = tmp_path / f"{package}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run([sys.executable, *command], env=environ, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command", [("-m", "harness", "status"), ("-m", "harness", "run", "--", "true"), ("-m", "harness", "doctor")]
)
def test_every_command_says_it_and_does_nothing(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = run(tmp_path, "typer", "0.20.0", *command)
    assert done.returncode == 64
    assert re.fullmatch(r"harness: error: typer 0\.20\.0 is too old, .* works: pip install 'typer>=.*'\n", done.stderr)


def test_a_script_learns_it_where_it_imports_the_checkpointer(tmp_path: Path) -> None:
    done = run(tmp_path, "msgspec", "0.19.0", "-c", "from harness import Checkpointer")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: msgspec 0.19.0 is too old, 0.21 is the oldest that works: pip install 'msgspec>=0.21'"
    )
