"""torch stays in the user's process: import-linter proves it for the source, this for the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_ROOMS = (ROOT / "harness/trainer", ROOT / "harness/integrations")
NOT_FOR_US = {"torch", "numpy"}


def torchless_modules() -> list[str]:
    """Every module of the harness and the cloud outside of these rooms, by name, found without importing any."""
    files = [path for room in ("harness", "cloud") for path in sorted((ROOT / room).rglob("*.py"))]
    names = [path.relative_to(ROOT).with_suffix("").parts for path in files if not in_torch_room(path)]
    return [".".join(parts).removesuffix(".__init__") for parts in names if parts[-1] != "__main__"]


def in_torch_room(path: Path) -> bool:
    return any(path.is_relative_to(room) for room in TORCH_ROOMS)


def loaded_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after `statement`."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def importing(modules: Iterable[str]) -> str:
    return "\n".join(f"import {module}" for module in modules)


def test_no_module_outside_the_trainer_loads_torch() -> None:
    """One interpreter imports them all; each has one of its own only where that has found something."""
    modules = torchless_modules()

    loaded = loaded_after(importing(modules))

    assert loaded.issuperset(modules)
    if loaded & NOT_FOR_US:
        culprits = [module for module in modules if loaded_after(importing([module])) & NOT_FOR_US]
        pytest.fail(f"{', '.join(sorted(loaded & NOT_FOR_US))}: loaded by {', '.join(culprits)}")


def test_importing_the_cloud_loads_nothing_of_the_harness() -> None:
    cloud = [module for module in torchless_modules() if module.startswith("cloud")]

    loaded = loaded_after(importing(cloud))

    assert not {name for name in loaded if name.partition(".")[0] == "harness"}


def test_every_room_is_looked_at() -> None:
    rooms = {".".join(module.split(".")[:2]) for module in torchless_modules()}

    ours = {"core", "errors", "ipc", "snapshots", "agent", "inspect", "node", "cli"}
    assert rooms >= {"cloud.store", *(f"harness.{room}" for room in ours)}
