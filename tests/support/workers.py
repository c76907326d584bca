"""How many tests run at once: what this process may use, not what the host has.

64 cores of which a container may use two would be 64 interpreters on two cores, and every one of them slow. A test
waits for processes half of its time: half as many workers again as cores are a fifth sooner than one for each, and
more are no use.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from harness.agent.save.slot_pool import available_bytes

MOST = 8
FOR_EACH_CORE = 1.5
BYTES_EACH = 2 * 10**9  # a worker, and a trainer with torch beside its agent
_ROOT = Path("/")


def how_many(cores: int, quota: float | None, free_bytes: int) -> int:
    """Return how many workers: one at least, and at most three for two cores, or two of the quota, and one for 2 GB."""
    usable = cores if quota is None else min(cores, quota)
    return max(1, min(math.ceil(usable * FOR_EACH_CORE), MOST, free_bytes // BYTES_EACH))


def of_this_process() -> int:
    """Return the number of workers for what this process may use."""
    return how_many(len(os.sched_getaffinity(0)), cpu_quota(_ROOT), available_bytes())


def cpu_quota(root: Path) -> float | None:
    """Return how many cores the tightest cgroup above this process lets it use, or None where none sets a limit.

    Args:
        root: where /proc and /sys are.
    """
    found: list[float] = []
    for line in _words_of_lines(root / "proc/self/cgroup", ":", 2):
        _, controllers, path = line
        if controllers and "cpu" not in controllers.split(","):
            continue
        for directory in (Path(path), *Path(path).parents):
            here = root / "sys/fs/cgroup" / ("cpu" if controllers else "") / str(directory).strip("/")
            quota_us, period_us = _limit(here)
            if quota_us.isdigit() and period_us.isdigit():
                found.append(int(quota_us) / int(period_us))
    return min(found, default=None)


def _limit(directory: Path) -> tuple[str, str]:
    """Return quota and period of one cgroup, of version 2 or 1; the quota is no number where there is none."""
    for words in _words_of_lines(directory / "cpu.max", None, 1):
        return words[0], words[1]
    for quota in _words_of_lines(directory / "cpu.cfs_quota_us", None, 0):
        for period in _words_of_lines(directory / "cpu.cfs_period_us", None, 0):
            return quota[0], period[0]
    return "", ""


def _words_of_lines(path: Path, separator: str | None, splits: int) -> list[list[str]]:
    with contextlib.suppress(OSError):
        return [line.split(separator, splits) for line in path.read_text().splitlines()]
    return []
