"""The order in which tests begin: those that take minutes first, so that no worker is left alone with one at the end.

A pytest plugin. xdist gives each worker an equal part of the tests, in order, and lets one that has ended its own take
from the others' ends. So each part begins with its share of the longest: `@pytest.mark.long(reason, minutes=4)`. The
first worker gets none: those that take minutes wait for most of them, and the machine would be idle meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put them into that order, which is the same in every worker."""
    workers = int(getattr(config, "workerinput", {"workercount": 1})["workercount"])
    minutes = [_minutes_of(item) for item in items]
    long = [item for _, item in sorted(zip(minutes, items, strict=True), key=lambda one: -one[0]) if _minutes_of(item)]
    items[:] = dealt(long, [item for item in items if not _minutes_of(item)], workers)


def _minutes_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("long")
    return 0.0 if marker is None else float(marker.kwargs.get("minutes", 0))


def dealt(long: Sequence[Any], others: Sequence[Any], workers: int) -> list[Any]:
    """Return all of them in an order in which the part of each worker begins with its share of the long ones.

    Args:
        long: those to begin with, the longest first.
        others: the rest, whose order stays.
        workers: how many parts there are.
    """
    order: list[Any] = []
    total, taken = len(long) + len(others), 0
    with_long = max(1, workers - 1)
    for worker in range(workers):
        own = long[worker - (workers - with_long) :: with_long] if worker >= workers - with_long else []
        size = max((total - len(order)) // (workers - worker) - len(own), 0)
        order += [*own, *others[taken : taken + size]]
        taken += size
    return [*order, *others[taken:]]
