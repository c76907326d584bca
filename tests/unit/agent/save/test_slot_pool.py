from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.agent.save import slot_pool
from harness.agent.save.slot_pool import (
    RESERVED_BYTES,
    SlotPool,
    SlotRequest,
    available_bytes,
    how_many_fit,
    oom_kills,
    total_bytes,
)
from harness.core.snapshot import SnapshotId
from harness.errors import NoSpace
from harness.ipc.slots import Slot, SlotState
from tests.support.protocol import SLOT_BYTES, Content

GB = 1000**3


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with 64 GiB, of which 16 GiB are available, and no cgroup."""
    write(tmp_path, {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\n"})
    monkeypatch.setattr(slot_pool, "_ROOT", tmp_path)
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool()
    yield pool
    pool.close()


def seal(pool: SlotPool, index: int, sequence: int) -> None:
    content = Content(SnapshotId(1, sequence))
    content.fill(pool[index])
    pool[index].seal(content.record(), sequence)


# ---- the budget -----------------------------------------------------------------------------------------------------


def test_without_a_cgroup_the_host_is_the_limit(host: Path) -> None:
    assert (available_bytes(), total_bytes()) == (16 * 1024**3, 64 * 1024**3)


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [
        ("max", "5", 16 * 1024**3),
        (str(4 * 1024**3), str(1024**3), 3 * 1024**3),
        (str(100 * 1024**3), "0", 16 * 1024**3),
        (str(1024**3), str(2 * 1024**3), 0),
        ("nonsense", "5", 16 * 1024**3),
    ],
)
def test_a_cgroup_that_leaves_less_is_the_limit(host: Path, limit: str, used: str, available: int) -> None:
    write(host, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{limit}\n"})
    write(host, {"sys/fs/cgroup/memory.current": f"{used}\n"})

    assert available_bytes() == available


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": "5"}, None),
        (
            {
                "proc/self/cgroup": "0::/user.slice/train.service\n",
                "sys/fs/cgroup/user.slice/train.service/memory.max": "max",
                "sys/fs/cgroup/user.slice/train.service/memory.current": "5",
                "sys/fs/cgroup/user.slice/memory.max": "1000",
                "sys/fs/cgroup/user.slice/memory.current": "400",
            },
            600,
        ),
        (
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory:/docker/1\n0::/\n",
                "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "1000",
                "sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes": "1200",
            },
            0,
        ),
        (
            {  # what is cached of files is there to be taken
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "1000",
                "sys/fs/cgroup/memory.current": "950",
                "sys/fs/cgroup/memory.stat": "anon 100\nactive_file 50\ninactive_file 800\n",
            },
            850,
        ),
        (
            {  # a container: the path is the host's, its files are at the root
                "proc/self/cgroup": "4:memory:/docker/2\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "100",
            },
            900,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "x", "sys/fs/cgroup/memory.current": "5"}, None),
    ],
)
def test_the_tightest_cgroup_above_us_is_the_limit(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    write(tmp_path, files)

    assert slot_pool.free_in_cgroup(tmp_path) == left


@pytest.mark.parametrize(
    ("available", "fit"),
    [(0, 0), (GB + RESERVED_BYTES - 1, 0), (GB + RESERVED_BYTES, 1), (2 * GB + RESERVED_BYTES, 2), (99 * GB, 2)],
)
def test_something_is_left_to_the_trainer(available: int, fit: int) -> None:
    assert how_many_fit(GB, 2, available) == fit


@pytest.mark.parametrize(("free", "count", "on_disk"), [(3, 2, False), (1, 1, False), (0, 1, True)])
def test_there_are_as_many_slots_as_memory_has_room_for_else_one_on_the_disk(
    host: Path, tmp_path: Path, free: int, count: int, on_disk: bool
) -> None:
    left = (RESERVED_BYTES + free * SLOT_BYTES) // 1024
    (host / "proc/meminfo").write_text(f"MemAvailable: {left} kB\n")
    before = sorted(tmp_path.iterdir())
    pool = SlotPool(tmp_path)

    assert [pool[index].on_disk for index in pool.allocate(SLOT_BYTES, 2)] == [on_disk] * count

    assert sorted(tmp_path.iterdir()) == before, "a slot on a disk has no name"
    pool.close()


def test_a_resume_by_way_of_the_disk_does_not_keep_the_snapshots_there(host: Path, tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    resumed = pool.add(Slot.create(SLOT_BYTES, tmp_path))

    made = pool.allocate(SLOT_BYTES, 2)

    assert [pool[index].on_disk for index in made] == [False, False]
    assert resumed not in pool
    (host / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
    again = SlotPool(tmp_path)
    resumed = again.add(Slot.create(SLOT_BYTES, tmp_path))
    assert again.allocate(SLOT_BYTES, 2) == [resumed]
    pool.close()
    again.close()


def test_room_that_somebody_else_will_need_is_left(host: Path, tmp_path: Path) -> None:
    (host / "proc/meminfo").write_text(f"MemAvailable: {(RESERVED_BYTES + 2 * SLOT_BYTES) // 1024} kB\n")

    for reserve, on_disk in ((SLOT_BYTES, False), (SLOT_BYTES + 1024, True)):
        (slot,) = SlotRequest(SLOT_BYTES, tmp_path, reserve_bytes=reserve).make()
        assert slot.on_disk == on_disk
        slot.close()


def test_too_little_of_everything_is_said_with_numbers_and_a_remedy(host: Path, pool: SlotPool, tmp_path: Path) -> None:
    (host / "proc/meminfo").write_text("MemAvailable: 1 kB\n")

    with pytest.raises(NoSpace, match=r"needs 0\.00 GB of memory, 0\.00 GB are free here; .* --local DIR"):
        pool.allocate(SLOT_BYTES, 2)
    assert len(pool) == 0
    with pytest.raises(NoSpace, match=r"no room for it either: (File too large|No space left)"):
        SlotPool(tmp_path).allocate(1 << 60, 1)


def test_a_slot_that_is_there_already_is_enough(host: Path, pool: SlotPool) -> None:
    """A resume's, for a trainer that by now has taken the memory for itself."""
    resumed = pool.add(Slot.create(SLOT_BYTES))
    (host / "proc/meminfo").write_text("MemAvailable: 1 kB\n")

    assert pool.allocate(SLOT_BYTES, 2) == [resumed]


def test_a_kernel_that_has_none_after_all_is_no_space(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> Slot:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(slot_pool.Slot, "create", refuse)

    with pytest.raises(NoSpace, match="Cannot allocate memory"):
        pool.allocate(SLOT_BYTES, 2)


# ---- the kernel has none left ---------------------------------------------------------------------------------------


def test_the_newest_snapshot_moves_to_the_disk_byte_for_byte_and_later_slots_are_made_there(
    host: Path, tmp_path: Path
) -> None:
    pool = SlotPool(tmp_path)
    older, newest = pool.allocate(SLOT_BYTES, 2)
    seal(pool, older, 1)
    seal(pool, newest, 2)
    pool.hold(older, "remote")
    before = bytes(pool[newest].buffer)

    moved = pool.leave_memory()

    assert list(moved) == [newest]
    assert bytes(pool[moved[newest]].buffer) == before
    assert (pool.newest(), pool.usable) == ([moved[newest]], [moved[newest]])
    assert newest not in pool
    assert older in pool, "a tier reads it"
    pool.release(older, "remote")
    assert older not in pool
    assert pool.allocate(SLOT_BYTES, 2) == [moved[newest]]
    assert [pool[index].on_disk for index in pool.allocate(2 * SLOT_BYTES, 2)] == [True]
    assert pool.leave_memory() == {}
    pool.close()


def test_where_there_is_no_disk_the_snapshot_stays_where_it_is(host: Path, pool: SlotPool) -> None:
    (index,) = pool.allocate(SLOT_BYTES, 1)
    seal(pool, index, 1)

    with pytest.raises(NoSpace):
        pool.leave_memory()
    assert pool.newest() == [index]
    with pytest.raises(NoSpace, match="--local DIR"):
        SlotPool().leave_memory()


def test_a_disk_that_fails_in_the_middle_of_it_changes_nothing(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    pool = SlotPool(tmp_path)
    (index,) = pool.allocate(SLOT_BYTES, 1)
    seal(pool, index, 1)
    monkeypatch.setattr("os.pwrite", fail)
    with pytest.raises(NoSpace, match="Input/output error"):
        pool.leave_memory()

    assert (pool.newest(), len(pool)) == ([index], 1)
    pool.close()


def test_the_kernel_s_kills_are_counted(host: Path) -> None:
    assert oom_kills() == 0
    write(host, {"proc/vmstat": "nr_free_pages 5\noom_kill 17\nother 3\n"})
    assert oom_kills() == 17


# ---- slots ----------------------------------------------------------------------------------------------------------


def test_a_layout_of_the_same_size_keeps_its_slots(pool: SlotPool) -> None:
    assert pool.allocate(SLOT_BYTES, 2) == [0, 1]
    assert pool.allocate(SLOT_BYTES, 2) == [0, 1]


def test_a_resumes_slot_becomes_the_first_snapshots(pool: SlotPool) -> None:
    resumed = pool.add(Slot.create(SLOT_BYTES))

    assert pool.allocate(SLOT_BYTES, 2) == [resumed, resumed + 1]


def test_the_slot_with_the_oldest_content_is_granted(pool: SlotPool) -> None:
    first, second = pool.allocate(SLOT_BYTES, 2)
    seal(pool, first, 1)
    assert pool.grant() == second

    seal(pool, second, 2)
    assert pool.grant() == first


def test_a_slot_that_a_tier_reads_is_not_granted(pool: SlotPool) -> None:
    first, second = pool.allocate(SLOT_BYTES, 2)
    pool.hold(first, "local")
    pool.hold(first, "remote")
    pool.hold(second, "remote")
    assert pool.grant() is None

    pool.release(first, "local")
    assert pool.grant() is None

    pool.release(first, "remote")
    assert pool.grant() == first


def test_slots_of_an_old_layout_stay_while_they_are_read(pool: SlotPool) -> None:
    (old,) = pool.allocate(SLOT_BYTES, 1)
    seal(pool, old, 1)
    pool.hold(old, "remote")
    (new,) = pool.allocate(2 * SLOT_BYTES, 1)
    seal(pool, new, 2)
    assert (old in pool, pool.usable) == (True, [new])

    pool.release(old, "remote")

    assert old not in pool


def test_the_newest_complete_snapshot_outlives_its_layout(pool: SlotPool) -> None:
    (old,) = pool.allocate(SLOT_BYTES, 1)
    seal(pool, old, 1)
    (new,) = pool.allocate(2 * SLOT_BYTES, 1)
    assert pool.newest() == [old]

    pool[new].begin()
    pool.collect()
    assert pool.newest() == [old]

    seal(pool, new, 2)
    pool.collect()
    assert (old in pool, pool.newest()) == (False, [new])


def test_a_layout_that_does_not_fit_loses_no_snapshot(pool: SlotPool, host: Path) -> None:
    (old,) = pool.allocate(SLOT_BYTES, 1)
    seal(pool, old, 1)
    (host / "proc/meminfo").write_text("MemAvailable: 1 kB\n")

    with pytest.raises(NoSpace):
        pool.allocate(2 * SLOT_BYTES, 1)

    assert pool[old].state is SlotState.SEALED


def test_an_index_that_was_used_does_not_come_again(pool: SlotPool) -> None:
    seen = set()
    for _ in range(20):
        index = pool.add(Slot.create(4096 * 2))
        assert index not in seen
        seen.add(index)
        pool.close([index])


def test_releasing_what_is_gone_is_nothing(pool: SlotPool) -> None:
    pool.release(7, "remote")

    assert pool.grant() is None
    assert pool.newest() == []


def test_a_snapshot_that_moves_to_a_disk_of_memory_is_not_lost(
    host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of tmpfs is memory as a memfd is: the slot that it had just moved to was voided with the others."""
    monkeypatch.setattr("harness.ipc.slots._is_memory", lambda fd: True)
    pool = SlotPool(tmp_path)
    (newest,) = pool.allocate(SLOT_BYTES, 1)
    seal(pool, newest, 1)

    moved = pool.leave_memory()

    assert pool.newest() == [moved[newest]]
    pool.close()
