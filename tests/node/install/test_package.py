"""scripts/package: a release has what git tracks, and nothing that only this machine has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.node.machine import ROOT

pytestmark = pytest.mark.long("an environment is made, and a release is built twice")


@pytest.mark.usefixtures("package_index")
def test_a_release_is_built_from_a_clone_and_refused_with_a_file_that_git_does_not_track(tmp_path: Path) -> None:
    clone, dist = tmp_path / "clone", tmp_path / "dist"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)

    def package() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HARNESS_VENV": str(tmp_path / "venv")}
        command = [clone / "scripts/package", dist]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)

    built = package()
    assert built.returncode == 0, built.stdout + built.stderr
    assert {path.suffix for path in dist.iterdir()} == {".whl", ".gz"}

    (clone / "harness/left_over.py").touch()
    refused = package()
    assert refused.returncode == 1
    assert "wheel: harness/left_over.py is not tracked, or not meant for it" in refused.stdout
