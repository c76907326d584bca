"""Room and time: what a rate and a size mean."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from cloud.errors import Unavailable
from cloud.testing.memory import MemoryStore
from harness.inspect.doctor.capacity import (
    Rate,
    Window,
    check_apart,
    check_medium,
    check_room,
    incompressible,
    judge_pace,
    judge_upload,
    measure,
)
from harness.inspect.doctor.finding import Level
from harness.inspect.doctor.host import (
    Host,
)
from harness.inspect.doctor.store import (
    Ground,
)
from tests.support.machine import GB, Machine, Slow
from tests.support.protocol import FOREVER, KEYS

OK, WARNING, FAILURE = Level.OK, Level.WARNING, Level.FAILURE


@pytest.fixture
def disks(tmp_path: Path) -> Host:
    return Machine(tmp_path / "root").with_disks(tmp_path)


@pytest.mark.parametrize(
    ("where", "as_store", "as_local"),
    [
        ("nvme", WARNING, OK),
        ("raid", WARNING, OK),
        ("a share", OK, OK),
        ("layer", WARNING, WARNING),
        (".", WARNING, WARNING),
    ],
)
def test_a_store_must_outlive_the_instance_and_a_local_tier_needs_a_disk(
    disks: Host, tmp_path: Path, where: str, as_store: Level, as_local: Level
) -> None:
    assert check_medium(disks, "durable", tmp_path / where, durable=True).level is as_store
    assert check_medium(disks, "local disk", tmp_path / where, durable=False).level is as_local


def test_a_volume_is_durable_if_it_is_kept(disks: Host) -> None:
    assert "if the volume is kept" in check_medium(disks, "durable", Path("/"), durable=True).what


class Room(MemoryStore):
    """A store with so many bytes free."""

    def __init__(self, free: int | None) -> None:
        super().__init__()
        self.free = free

    def free_bytes(self) -> int | None:
        return self.free


@pytest.mark.parametrize(
    ("free", "state", "level"),
    [
        (None, 100, OK),
        (499, None, OK),
        (500, 100, OK),
        (499, 100, WARNING),
        (200, 100, WARNING),
        (199, 100, FAILURE),
    ],
)
def test_room_for_what_is_kept_and_two_more(free: int | None, state: int | None, level: Level) -> None:
    assert check_room(Host({}), "room", Room(free), KEYS, 3, state).level is level


def test_what_a_run_holds_already_is_room_that_it_has() -> None:
    store = Room(300)
    store.put(KEYS.payload("x", "y"), memoryview(bytes(200)), deadline=FOREVER)

    assert check_room(Host({}), "room", store, KEYS, 3, 100).level is OK


def test_a_local_tier_on_the_store_s_own_disk_is_told(tmp_path: Path) -> None:
    found = check_apart(tmp_path / "a", tmp_path / "not" / "there")

    assert (found.level, "remove --local" in found.remedy) == (WARNING, True)
    assert check_apart(Path("/proc"), tmp_path).level is OK


# ---- rates ----------------------------------------------------------------------------------------------------------


def measured(store: Slow) -> Rate:
    return measure(Ground(store, KEYS, KEYS.snapshots + "doctor-0/", store.clock))


@pytest.mark.parametrize(("bytes_s", "objects"), [(2e6, 1), (30e6, 2), (500e6, 3)])
def test_a_slow_store_is_measured_with_less(bytes_s: float, objects: int) -> None:
    store = Slow(bytes_s)

    assert measured(store).bytes_s == pytest.approx(bytes_s)
    assert len(list(store.list("", deadline=FOREVER))) == objects


def test_a_store_that_takes_nothing_in_time_has_no_rate() -> None:
    with pytest.raises(Unavailable):
        measured(Slow(1e6))


def test_what_is_nearly_full_is_not_filled_by_a_measurement() -> None:
    class Small(Slow):
        def free_bytes(self) -> int:
            return 200 * 1024**2

    store = Small(500e6)

    assert measured(store).size == 8 * 1024**2


def test_what_is_sent_cannot_be_compressed() -> None:

    data = bytes(incompressible(3 * 1024**2))

    assert len(zlib.compress(data, 1)) > len(data)
    assert len(incompressible(9 * 1024**2)) == 9 * 1024**2


NOTICE = Window(120.0, "a spot notice")


@pytest.mark.parametrize(
    ("state", "level", "told"),
    [
        (13_400_000_000, OK, "13.4 GB at 0.21 GB/s is 64 s; a spot notice leaves 120 s: fits"),
        (24 * GB, WARNING, "24 GB at 0.21 GB/s is 114 s; a spot notice leaves 120 s: fits, barely"),
        (25 * GB, FAILURE, "25 GB at 0.21 GB/s is 119 s; a spot notice leaves 120 s: does not fit"),
        (None, OK, "0.21 GB/s: a state of up to 24.8 GB fits the 120 s that a spot notice leaves"),
    ],
)
def test_the_state_must_fit_the_window(state: int | None, level: Level, told: str) -> None:
    found = judge_upload(Rate(210_000_000, 1.0), state, NOTICE)

    assert (found.level, found.what) == (level, told)


def test_a_state_that_does_not_fit_is_told_what_would() -> None:
    found = judge_upload(Rate(50_000_000, 1.0), 59 * GB, NOTICE)

    assert found.remedy.startswith("0.50 GB/s are needed")
    assert "a state of 5.9 GB" in found.remedy


def test_a_window_that_is_no_longer_than_the_margin_holds_nothing() -> None:
    assert judge_upload(Rate(GB, 1.0), 1, Window(1.0, "a SIGTERM")).level is FAILURE


@pytest.mark.parametrize(("state", "level"), [(None, OK), (6 * GB, OK), (7 * GB, WARNING)])
def test_a_snapshot_must_be_written_before_the_next_is_due(state: int | None, level: Level) -> None:
    found = judge_pace("pace", "the store", Rate(100_000_000, 1.0), state, "--every-s", 60.0)

    assert found.level is level
    assert level is OK or "--every-s 84" in found.remedy
