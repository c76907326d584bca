"""What a fit of Lightning has counted, logged and named: taken apart for a snapshot, and put together again.

Owns the forms of the loops' counts, of the values that `self.log` is summing, of file names and of loggers. Imports
neither `lightning` nor `pytorch_lightning`: see `lightning_fit.py`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.trainer.voice import say

_LOGGED = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_LOGGED_FROM = (*_LOGGED, "dataloader_idx", "metric_attribute")


def module_of(value: Any) -> Any:
    """Return the module of its class."""
    return sys.modules[type(value).__module__]


# ---- loops ----------------------------------------------------------------------------------------------------------


def progress_of(loop: Any) -> dict[str, Any]:
    """Return what a loop has counted, and the loops in it."""
    found: dict[str, Any] = {
        name: value.state_dict() if is_count else progress_of(value) for name, value, is_count in _parts(loop)
    }
    if hasattr(loop, "_batches_that_stepped"):
        found["_batches_that_stepped"] = loop._batches_that_stepped
    return found


def set_progress(loop: Any, progress: Mapping[str, Any]) -> None:
    """Give a loop, and the loops in it, what `progress_of` returned."""
    for name, value, is_count in _parts(loop):
        if not is_count:
            set_progress(value, progress[name])
        else:
            value.load_state_dict(progress[name])
    if "_batches_that_stepped" in progress:
        loop._batches_that_stepped = progress["_batches_that_stepped"]


def _parts(loop: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield name and value of each count and each loop in a loop, and whether it is a count."""
    for name, value in vars(loop).items():
        if dataclasses.is_dataclass(value) and hasattr(value, "state_dict"):
            yield name, value, True
        elif hasattr(value, "on_save_checkpoint") and hasattr(value, "restarting"):
            yield name, value, False


# ---- names of files -------------------------------------------------------------------------------------------------

_PATH = "\0path "


def without_paths(value: Any, paths: list[str], folders: Collection[str] = ()) -> Any:
    """Return what a checkpoint has, with a reference instead of each path.

    Args:
        value: what a checkpoint has.
        paths: the paths are appended to it.
        folders: relative paths are those in one of these; any other text that is not absolute is no path.
    """
    if isinstance(value, str) and (value.startswith(os.sep) or _is_in(value, folders)):
        if value not in paths:
            paths.append(value)
        return f"{_PATH}{paths.index(value)}"
    if type(value) in (dict, OrderedDict):
        items = [tuple(without_paths(part, paths, folders) for part in item) for item in value.items()]
        return type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(without_paths(item, paths, folders) for item in value)
    return value


def _is_in(value: str, folders: Collection[str]) -> bool:
    return value in folders or any(value.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def with_paths(value: Any, paths: Sequence[str]) -> Any:
    """Return what `without_paths` was given."""
    if isinstance(value, str) and value.startswith(_PATH):
        return paths[int(value.removeprefix(_PATH))]
    if type(value) in (dict, OrderedDict):
        return type(value)((with_paths(key, paths), with_paths(item, paths)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(with_paths(item, paths) for item in value)
    return value


# ---- loggers and logged values --------------------------------------------------------------------------------------

_CONTINUED = ("TensorBoardLogger", "CSVLogger")


def version_of(logger: Any) -> Any:
    """Return what a logger numbers its directory by; `None` if it has no such number or name."""
    version = getattr(logger, "_version", None)
    return version if isinstance(version, (int, str)) else None


class Rows:
    """How many rows a logger has got for its newest step."""

    def __init__(self, logger: Any) -> None:
        """Count from here on."""
        self.step, self.rows = -1, 0
        if type(logger).__name__ not in _CONTINUED:
            return
        theirs = logger.log_metrics

        def log_metrics(metrics: Any, step: int | None = None) -> None:
            if step is not None:
                self.step, self.rows = step, 1 + (self.rows if step == self.step else 0)
            theirs(metrics, step)

        logger.log_metrics = log_metrics

    def of(self, step: int) -> int:
        """Return how many are of this step."""
        return self.rows if step == self.step else 0


def continue_logger(logger: Any, counted: Rows, step: int, place: Sequence[Any], *, writes: bool) -> None:
    """Have a logger of TensorBoard or of CSV files write on where it was, without what is logged again.

    So a `ModelCheckpoint`, whose folder is the logger's, continues too: in another folder it would forget its best.

    Args:
        logger: one of the trainer's. It has begun nothing yet.
        counted: counts its rows.
        step: the step that was to be logged next. In a validation, some rows of it were logged before.
        place: kind and version of the logger that it continues, and how many rows it had of that step.
        writes: whether this process is the one whose loggers write.
    """
    kind, version, *rows = place  # older snapshots have no rows
    if kind not in _CONTINUED or kind != type(logger).__name__ or version is None:
        return
    in_use = getattr(logger, "_experiment", None) is not None
    if in_use or (kind == "CSVLogger" and "://" in str(logger.save_dir)):
        if writes:
            why = "it was in use before fit()" if in_use else "its directory is not a local one"
            say(f"{kind} starts a new directory and does not continue the earlier one, because {why}")
        return
    logger._version = version
    counted.step, counted.rows = step, sum(rows)
    if kind == "TensorBoardLogger":
        logger._kwargs.setdefault("purge_step", step + (counted.rows > 0))
    elif writes:
        _continue_file(logger, step, counted.rows)


def _continue_file(logger: Any, step: int, count: int) -> None:
    """Begin a CSVLogger with the rows that its file has, which it would delete: those before a step, and some of it.

    If there are others, which are logged again, the whole file is kept beside it.
    """
    path = Path(logger.log_dir, "metrics.csv")
    earlier = path.with_name(f"metrics.before-step-{step}.csv")
    rows = _rows_of(path) or _rows_of(earlier)  # the second if this was interrupted
    if not rows:
        return
    steps = [_step_of(row, rows[0]) for row in rows[1:]]
    kept = [row for row, of in zip(rows[1:], steps, strict=True) if of < step]
    kept += [row for row, of in zip(rows[1:], steps, strict=True) if of == step][:count]
    new = path.with_suffix(".new")
    with new.open("w", newline="") as file:
        csv.writer(file).writerows([rows[0], *kept])
    is_whole = not (path.exists() and earlier.exists())  # else it has rows of an earlier start
    if not earlier.exists():
        path.rename(earlier)
    with warnings.catch_warnings(action="ignore"):  # that the directory is not empty
        logger.experiment.metrics_keys = rows[0]
    new.rename(path)
    if is_whole and len(kept) == len(rows) - 1:
        earlier.unlink()


def _rows_of(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file, its header first; none if there is no file, or none with a column `step`."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        return []
    return rows if rows and "step" in rows[0] else []


def _step_of(row: Sequence[str], header: Sequence[str]) -> float:
    """Return the step of a row; not a number if a kill has cut the row off."""
    try:
        return float(row[header.index("step")]) if len(row) == len(header) else math.nan
    except ValueError:
        return math.nan


def results_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `self.log` that are being summed over the epoch."""
    return {key: _result_of(metric) for key, metric in results.items()}


def _result_of(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    found = {
        "meta": {name: getattr(meta, name) for name in _LOGGED_FROM},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "is_tensor": metric.is_tensor,
        "has_reset": metric.has_reset,
        "count": metric._update_count,
        "last": metric._forward_cache if isinstance(metric._forward_cache, Tensor) else None,
    }
    if metric.is_tensor:
        found["states"] = {key: getattr(metric, key) for key in metric._defaults}
    return found


def restore_results(trainer: Any, results: Any, stored: Mapping[str, Any]) -> None:
    """Put what `results_of` returned into the trainer's values that are being summed."""
    module = module_of(results)
    for key, node in stored.items():
        meta = module._Metadata(**node["meta"], reduce_fx=getattr(torch, node["reduce"]))
        should, rank_zero_only = node["sync"]
        meta.sync = module._Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
        metric = module._ResultMetric(meta, node["is_tensor"])
        metric.has_reset, metric._update_count, metric._forward_cache = node["has_reset"], node["count"], node["last"]
        for name, value in node.get("states", {}).items():
            setattr(metric, name, value)
        if not node["is_tensor"]:
            if meta.metric_attribute is None:
                continue  # it is logged again under the same key, and its own state is the module's
            metric.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        results[key] = metric
