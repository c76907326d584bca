"""Each folder of tests/ runs at some time, and none of them is without a test that runs every day."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import FOLDERS, TESTS, Tier, tier_of

ROOT = TESTS.parent
WITHOUT_SAMPLE = {"gpu"}  # every day, on a machine without one, it would be skipped


def test_a_file_has_the_tier_of_its_innermost_folder() -> None:
    assert tier_of(TESTS / "process/kills/test_every_event.py") is Tier.ALL
    assert tier_of(TESTS / "process/test_run.py") is Tier.EVERYDAY
    assert tier_of(TESTS / "unit/trainer/state/test_capture.py") is Tier.QUICK
    assert tier_of(TESTS / "unit/trainer/loaders/test_dataloader.py") is Tier.EVERYDAY
    assert tier_of(TESTS / "another/test_run.py") is None
    assert tier_of(TESTS / "test_run.py") is None
    assert tier_of(ROOT / "examples/test_run.py") is None


def test_every_file_of_tests_is_in_a_tier_and_every_folder_of_the_table_is_there() -> None:
    assert {path for path in TESTS.rglob("test_*.py") if tier_of(path) is None} == set()
    assert {folder for folder in FOLDERS if not (TESTS / folder).is_dir()} == set()


@pytest.mark.parametrize("folder", [folder for folder, tier in FOLDERS.items() if tier is Tier.ALL])
def test_a_folder_that_does_not_run_every_day_has_a_test_that_does(folder: str) -> None:
    samples = [path for path in (TESTS / folder).rglob("test_*.py") if "pytest.mark.sample" in path.read_text()]
    assert bool(samples) == (folder not in WITHOUT_SAMPLE)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small tests/ with the plugin in it."""
    support = tmp_path / "tests/support"
    support.mkdir(parents=True)
    shutil.copy(TESTS / "support/tiers.py", support)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\npythonpath = .\naddopts = --import-mode=importlib -p no:cacheprovider\n"
        "markers =\n    sample\n    nightly\n"
    )
    (tmp_path / "tests/conftest.py").write_text('pytest_plugins = ["tests.support.tiers"]\n')
    for folder in FOLDERS:
        (tmp_path / "tests" / folder).mkdir(parents=True, exist_ok=True)
        name = folder.replace("/", "_")
        (tmp_path / "tests" / folder / f"test_{name}.py").write_text(
            f"import pytest\ndef test_{name}(): pass\n@pytest.mark.sample\ndef test_sample(): pass\n"
            "@pytest.mark.nightly\ndef test_nightly(): pass\n"
        )
    return tmp_path


def names(clone: Path, *arguments: str, workers: int = 0) -> set[str]:
    """Which tests run."""
    command = [sys.executable, "-m", "pytest", "--numprocesses", str(workers), "--verbose", *arguments]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {word for line in done.stdout.splitlines() if " PASSED" in line for word in line.split() if "::" in word}


def of(*tiers: Tier) -> set[str]:
    """The tests of these tiers' folders, but the samples."""
    return {
        f"tests/{folder}/test_{name}.py::test_{name}"
        for folder, tier in FOLDERS.items()
        for name in [folder.replace("/", "_")]
        if tier in tiers
    }


def samples(*tiers: Tier) -> set[str]:
    """The samples in these tiers' folders."""
    return named("sample", *tiers)


def named(mark: str, *tiers: Tier) -> set[str]:
    """The tests with this mark in these tiers' folders."""
    return {f"{test.partition('::')[0]}::test_{mark}" for test in of(*tiers)}


def test_every_option_runs_its_tier_and_those_before_it(clone: Path) -> None:
    quick, everyday, later, _ = Tier
    assert names(clone, "--quick") == of(quick) | samples(quick)
    assert names(clone) == of(quick, everyday) | samples(*Tier)
    assert names(clone, "--everyday", workers=2) == names(clone)
    assert names(clone, "--all") == of(quick, everyday, later) | samples(*Tier)
    assert names(clone, "--nightly") == of(*Tier) | named("nightly", *Tier) | samples(*Tier)


def test_what_is_named_runs_whatever_its_tier_but_where_the_tier_is_named_as_well(clone: Path) -> None:
    power = "tests/power/test_power.py"
    every = {f"{power}::test_{name}" for name in ("power", "sample", "nightly")}
    assert names(clone, "tests/power") == every
    assert names(clone, "--quick", "tests/unit", "tests/power") == of(Tier.QUICK) | samples(Tier.QUICK)


def test_a_file_in_no_folder_of_the_table_stops_the_run(clone: Path) -> None:
    (clone / "tests/other").mkdir()
    (clone / "tests/other/test_it.py").write_text("def test_it(): pass\n")

    done = subprocess.run([sys.executable, "-m", "pytest"], cwd=clone, capture_output=True, text=True)

    assert done.returncode != 0
    assert "tests/other/test_it.py is in no tier" in done.stdout + done.stderr
