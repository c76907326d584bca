"""Trackers: a run that was killed goes on in the same place, and no step is on its curve twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.integrations import trackers
from harness.rehearse.passes import offline
from tests.support.tensorboard import curve
from tests.support.world import World

FIRST, SECOND = "0" * 32, "1" * 32


@pytest.fixture(autouse=True)
def run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_RUN_ID", FIRST)


@pytest.mark.sample
def test_tensorboard_hides_what_comes_again(tmp_path: Path) -> None:
    for begin, end in ((0, 10), (6, 14)):
        writer = trackers.summary_writer(tmp_path, begin)
        for step in range(begin + 1, end + 1):
            writer.add_scalar("loss", step * 1.0, step)
        writer.close()
    assert curve(tmp_path, "loss") == [(step, step * 1.0) for step in range(1, 15)]


MLFLOW = """
import json, sys
import mlflow
from harness.integrations.trackers import mlflow_log, mlflow_start
begin, end = int(sys.argv[1]), int(sys.argv[2])
run = mlflow_start(run_name="mine", tags={"of": "the user's"})
for step in range(begin + 1, end + 1):
    mlflow_log({"twice": 1.0}, step)
    mlflow_log({"twice": 2.0}, step)
    mlflow_log({"loss": step * 1.0, **({"rare": step} if step % 4 == 0 else {})}, step)
client = mlflow.MlflowClient()
print(json.dumps({
    "run": run.info.run_id,
    "runs": len(mlflow.search_runs(output_format="list")),
    "tags": client.get_run(run.info.run_id).data.tags,
    **{
        name: [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
        for name in ("loss", "rare", "twice")
    },
}))
"""


def test_mlflow_goes_on_with_its_run_and_gets_no_step_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (world.root / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one that needs no database

    def start(begin: int, end: int) -> dict[str, object]:
        process = world.start(sys.executable, "-c", MLFLOW, str(begin), str(end))
        assert process.wait() == 0, process.stderr
        found: dict[str, object] = json.loads(process.stdout)
        return found

    first, second = start(0, 10), start(6, 14)
    assert second["run"] == first["run"]
    assert second["loss"] == list(range(1, 15))
    assert second["rare"] == [4, 8, 12]
    assert second["twice"] == sorted([*range(1, 15)] * 2), "both values of a step that one start has logged"
    assert isinstance(second["tags"], dict)
    assert second["tags"].items() >= {"of": "the user's", trackers.TAG: FIRST}.items()
    monkeypatch.setenv("HARNESS_RUN_ID", SECOND)
    fresh = start(0, 2)
    assert (fresh["run"] != first["run"], fresh["runs"], fresh["loss"]) == (True, 2, [1, 2])


def test_in_a_rehearsal_mlflow_writes_to_the_scratch_folder(world: World, tmp_path: Path) -> None:
    process = world.start(sys.executable, "-c", MLFLOW, "0", "2", env=offline(world.env, tmp_path))
    assert process.wait() == 0, process.stderr
    assert (tmp_path / "mlruns").is_dir()


def test_wandb_is_told_the_run_s_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = trackers.wandb_init(project="p")
    assert run.id == FIRST
    run.log({"loss": 1.0}, step=1)
    run.finish()


def test_without_a_run_there_is_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", None):
        monkeypatch.delenv("HARNESS_RUN_ID", raising=False)
        if value is not None:
            monkeypatch.setenv("HARNESS_RUN_ID", value)
        assert trackers.run_id() is None
