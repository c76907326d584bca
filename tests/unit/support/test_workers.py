"""As many workers as this process may use cores and memory, whatever the host has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.workers import cpu_quota, how_many

GB = 10**9


@pytest.mark.parametrize(
    ("cores", "quota", "free_bytes", "workers"),
    [
        (2, None, 24 * GB, 3),
        (1, None, 24 * GB, 2),
        (64, None, 500 * GB, 8),
        (64, 2.0, 500 * GB, 3),
        (64, 1.5, 500 * GB, 3),
        (4, 0.5, 24 * GB, 1),
        (16, None, 7 * GB, 3),
        (2, None, 1 * GB, 1),
    ],
)
def test_the_least_of_cores_quota_and_memory_counts(
    cores: int, quota: float | None, free_bytes: int, workers: int
) -> None:
    assert how_many(cores, quota, free_bytes) == workers


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/box\n0::/\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_the_tightest_quota_above_this_process_is_found(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota
