"""What a fit of Lightning has counted, logged and named: taken apart for a snapshot, and put together again.

Owns the forms of the loops' counts, of the values that `self.log` is summing, of file names and of loggers. Imports
neither `lightning` nor `pytorch_lightning`: see `lightning_fit.py`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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


def without_paths(value: Any, paths: list[str]) -> Any:
    """Return what a checkpoint has, with a reference instead of each absolute path; append the paths to a list."""
    if isinstance(value, str) and value.startswith(os.sep):
        if value not in paths:
            paths.append(value)
        return f"{_PATH}{paths.index(value)}"
    if type(value) in (dict, OrderedDict):
        return type(value)((without_paths(key, paths), without_paths(item, paths)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(without_paths(item, paths) for item in value)
    return value


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


def version_of(logger: Any) -> Any:
    """Return what a logger numbers its directory by; `None` if it has no such number or name."""
    version = getattr(logger, "_version", None)
    return version if isinstance(version, (int, str)) else None


def continue_loggers(loggers: list[Any], own: Mapping[str, Any]) -> None:
    """Have a TensorBoard logger write on where it was, without the steps that are made again."""
    for logger, (kind, version) in zip(loggers, own["places"]["loggers"], strict=False):
        if kind == type(logger).__name__ == "TensorBoardLogger" and version is not None:
            logger._version = version
            logger._kwargs.setdefault("purge_step", own["logged"])
        elif kind == type(logger).__name__ == "CSVLogger":
            say("CSVLogger begins a file of its own in each start: the curve is in all of them together")


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
