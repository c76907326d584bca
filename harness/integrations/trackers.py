"""Trackers: a run goes on in Weights & Biases, MLflow or TensorBoard after an interruption, with no step twice.

Owns what each of them has to be told for that: the identity of the run, and the step that it goes on from. Each is
imported where it is used.

    start ─▶ HARNESS_RUN_ID, the same in every start ─▶ the tracker's run of that name ─▶ steps behind the snapshot
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

TAG = "harness.run_id"
"""Tag of an MLflow run: it chooses its own identities."""


def run_id() -> str | None:
    """Return the identity of this run: the same in every start, and another one after `--fresh`.

    32 hex digits. It is known once a `Checkpointer` is made, under `harness run` as the program starts; `None` before,
    and with `HARNESS=off`.
    """
    return os.environ.get("HARNESS_RUN_ID") or None


def wandb_init(**options: Any) -> Any:
    """Start the run in Weights & Biases, or go on with it: `wandb.init` with the run's identity.

    Log with `run.log(values, step=step)`: a step that is there already is left out by Weights & Biases itself.

    Args:
        **options: of `wandb.init`; `id` and `resume` are set.
    """
    import wandb

    return wandb.init(**options, id=run_id(), resume="allow") if run_id() is not None else wandb.init(**options)


def mlflow_start(**options: Any) -> Any:
    """Start the run in MLflow, or go on with it: `mlflow.start_run` with the run that has this one's tag.

    Also sets `MLFLOW_RUN_ID`, by which frameworks find it. Call it in one process of the training.

    Args:
        **options: of `mlflow.start_run`, for a run that begins.
    """
    import mlflow

    if (identity := run_id()) is None:
        return mlflow.start_run(**options)
    wanted = f"tags.`{TAG}` = '{identity}'"
    experiment = options.get("experiment_id")
    found = mlflow.search_runs(
        None if experiment is None else [experiment], filter_string=wanted, max_results=1, output_format="list"
    )
    if found:
        run = mlflow.start_run(run_id=found[0].info.run_id)
    else:
        tags = {**(options.pop("tags", None) or {}), TAG: identity}
        run = mlflow.start_run(tags=tags, **options)
    os.environ["MLFLOW_RUN_ID"] = run.info.run_id
    return run


def mlflow_log(metrics: Mapping[str, float], step: int) -> None:
    """Log metrics of a step to the active run of MLflow, but for those that an earlier start has logged already.

    MLflow takes nothing back: what was logged between the snapshot and a kill is there, and comes again. What this
    start has logged itself is not looked at: a step may have several values.

    Args:
        metrics: by name.
        step: completed steps.
    """
    import mlflow

    run = mlflow.active_run() or mlflow_start()
    newest = _newest.setdefault(run.info.run_id, {})
    client = mlflow.MlflowClient()
    for name in metrics:
        if name not in newest:
            history = client.get_metric_history(run.info.run_id, name)
            newest[name] = max((metric.step for metric in history), default=-1)
    new = {name: value for name, value in metrics.items() if step > newest[name]}
    if new:
        mlflow.log_metrics(new, step=step)


_newest: dict[str, dict[str, int]] = {}
"""The newest step of each metric of each run, as this start has found it."""


def summary_writer(log_dir: str | os.PathLike[str], step: int, **options: Any) -> Any:
    """Return a `SummaryWriter` of TensorBoard that hides what earlier starts have written behind a step.

    The directory has to outlive the machine, as the store does.

    Args:
        log_dir: the same in every start.
        step: completed steps as the training begins: `ckpt.step_count`.
        **options: of `torch.utils.tensorboard.SummaryWriter`.
    """
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(log_dir), purge_step=step + 1, **options)
