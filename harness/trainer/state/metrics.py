"""Metrics: the states of torchmetrics inside of a module, which its state_dict leaves out by default.

Owns how they are found, captured and put back. torchmetrics is not imported: a metric is recognized by what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from harness.core.tree import TensorRef
from harness.errors import StateError


class Walk(Protocol):
    """What a capture offers."""

    def tensor(self, tensor: Tensor, path: list[str | int]) -> TensorRef:
        """Return a reference to a tensor that is stored."""
        ...


def is_metric(module: Any) -> bool:
    """Whether a module is a metric of torchmetrics."""
    return all(hasattr(module, name) for name in ("_defaults", "_persistent", "_update_count", "_computed"))


def capture(name: str, module: nn.Module, walk: Walk) -> dict[str, Any]:
    """Return the states of the metrics in a module that are in no state_dict, by the metric's path."""
    return {
        path: {
            "count": metric._update_count,
            "states": {key: _captured(getattr(metric, key), [name, path, key], walk) for key in _keys(metric)},
        }
        for path, metric in _metrics(module)
        if metric._update_count and _keys(metric)
    }


def prepare(
    module: nn.Module, stored: Mapping[str, Any], copied: Callable[[TensorRef, Tensor | None], Tensor]
) -> Callable[[], None]:
    """Have the states copied with all other tensors; return the call that puts them back afterwards.

    Args:
        module: the live one.
        stored: what `capture` returned.
        copied: returns a copy of a stored tensor, beside a live one.

    Raises:
        StateError: a metric is not there.
    """
    live = dict(_metrics(module))
    if missing := sorted(stored.keys() - live.keys()):
        raise StateError(f"{missing[0]}: the snapshot has the state of a metric, and there is none: use the same ones")
    values = {
        path: {key: _revived(value, getattr(live[path], key, None), copied) for key, value in node["states"].items()}
        for path, node in stored.items()
    }

    def put() -> None:
        for path, metric in live.items():
            metric.reset()
            for key, value in values.get(path, {}).items():
                setattr(metric, key, value)
            metric._update_count = stored[path]["count"] if path in stored else 0
            metric._computed = None

    return put


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, child) for path, child in module.named_modules() if is_metric(child))


def _keys(metric: Any) -> list[str]:
    return [key for key in metric._defaults if not metric._persistent.get(key)]


def _captured(value: Any, path: list[str | int], walk: Walk) -> Any:
    if isinstance(value, list):
        return [walk.tensor(item, [*path, index]) for index, item in enumerate(value)]
    return walk.tensor(value, path)


def _revived(value: Any, live: Any, copied: Callable[[TensorRef, Tensor | None], Tensor]) -> Any:
    if isinstance(value, list):
        return [copied(item, None) for item in value]
    return copied(value, live if isinstance(live, Tensor) else None)
