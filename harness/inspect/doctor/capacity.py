"""Checks whether the state fits: into the window of a notice, into the time between two snapshots, into the free space.

Owns the measurement of a store's rate, and what the numbers mean. Knows any ObjectStore, and of a directory only its
file system.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core.policy.drain import MARGIN_S
from harness.core.snapshot import RunKeys
from harness.inspect.doctor.finding import Finding, failure, ok, warning
from harness.inspect.doctor.host import Host, existing, goes_with, medium_of
from harness.inspect.doctor.store import REACH_S, Ground

MEASURE_S = 3.0
PUT_S = 8.0
MEASURED_BYTES = (8 * 1024**2, 64 * 1024**2, 256 * 1024**2)
"""The last size keeps all of S3's sixteen streams busy, as the state's shards do."""
TIGHT = 0.8
"""A state that needs more than this part of the window may not fit: rates vary."""

_PATTERN_BYTES = 8 * 1024**2  # random, and longer than a compressor looks back


@dataclass(frozen=True)
class Rate:
    """Size and duration of one put."""

    size: int
    seconds: float

    @property
    def bytes_s(self) -> float:
        """Bytes per second."""
        return self.size / max(self.seconds, 1e-6)

    def __str__(self) -> str:
        return _speed(self.bytes_s)


@dataclass(frozen=True)
class Window:
    """Seconds between a notice and its deadline, and the kind of notice."""

    seconds: float
    by: str


def measure(place: Ground) -> Rate:
    """Measure the rate of puts: larger and larger incompressible objects for about `MEASURE_S`; the last one counts.

    Raises:
        CloudError: even the smallest object could not be put in time.
    """
    began_at = place.clock()
    room = place.store.free_bytes()
    rate = None
    for size in MEASURED_BYTES:
        if rate is not None and size / rate.bytes_s > MEASURE_S - (place.clock() - began_at):
            break
        if rate is not None and room is not None and size > room / 4:
            break  # others may write there too: a measurement must not fill the store
        data = memoryview(incompressible(size))
        started_at = place.clock()
        place.store.put(place.key(f"rate-{size}"), data, deadline=Deadline.after(PUT_S, place.clock))
        rate = Rate(size, place.clock() - started_at)
    assert rate is not None, "the smallest is always tried"
    return rate


def incompressible(size: int) -> bytearray:
    """Return bytes that no store, and no proxy in between, can compress."""
    pattern = os.urandom(min(size, _PATTERN_BYTES))
    return bytearray((pattern * -(-size // len(pattern)))[:size])


def judge_upload(rate: Rate, state_bytes: int | None, window: Window) -> Finding:
    """Check whether a snapshot becomes durable before the instance ends."""
    name = "upload"
    most = rate.bytes_s * max(window.seconds - MARGIN_S, 0.0)
    if state_bytes is None:
        return ok(
            name, f"{rate}: a state of up to {most / 1e9:.3g} GB fits the {window.seconds:g} s that {window.by} leaves"
        )
    takes_s = state_bytes / rate.bytes_s
    told = f"{state_bytes / 1e9:.3g} GB at {rate} is {takes_s:.0f} s; {window.by} leaves {window.seconds:g} s"
    if state_bytes > most:
        enough = state_bytes / max(window.seconds - MARGIN_S, 1.0)
        return failure(
            name,
            f"{told}: does not fit",
            f"{_speed(enough)} are needed (an instance with a faster network, a nearer store), or a state of "
            f"{most / 1e9:.3g} GB at most; until then a notice saves nothing, only the periodic snapshots are durable",
        )
    if state_bytes > TIGHT * most:
        return warning(
            name, f"{told}: fits, barely", "rates vary: use an instance with a faster network, or a nearer store"
        )
    return ok(name, f"{told}: fits")


def judge_pace(name: str, what: str, rate: Rate, state_bytes: int | None, option: str, every_s: float) -> Finding:
    """Check whether a snapshot is written before the next one is due. `option` sets that interval, `every_s`."""
    if state_bytes is None:
        return ok(name, f"{what}, {rate}")
    takes_s = state_bytes / rate.bytes_s
    told = f"{what}, {rate}: a snapshot takes {takes_s:.0f} s, one is due every {every_s:g} s"
    if takes_s > every_s:
        return warning(
            name,
            told,
            f"make {what} faster, or set {option} {takes_s * 1.2:.0f}; until then they come as fast as they can",
        )
    return ok(name, told)


def check_medium(host: Host, name: str, directory: Path, *, durable: bool) -> Finding:
    """Check that a directory lasts long enough: a store must outlive the instance, a local tier only the training."""
    medium = medium_of(host, directory)
    gone = goes_with(medium)
    if gone is None:
        note = ", durable if the volume is kept when the instance ends" if durable and medium == "EBS" else ""
        return ok(name, f"{directory} is on {medium}{note}")
    if durable:
        return warning(
            name,
            f"{directory} is not durable: it is on {gone}",
            "use an s3:// store, a network file system, or a volume that is kept; this one can be the --local tier",
        )
    if medium == "instance store":
        return ok(name, f"{directory} is on the instance store")
    return warning(
        name, f"{directory} is on {gone}", "put the local tier on a disk: --local DIR on the instance's NVMe"
    )


def check_room(host: Host, name: str, store: ObjectStore, keys: RunKeys, keep: int, state_bytes: int | None) -> Finding:
    """Check the room for the snapshots that are kept, one that is being written, and one to spare."""
    free, count = store.free_bytes(), keep + 2
    if free is None:
        return ok(name, "no limit")
    if state_bytes is None:
        return ok(name, f"{free / 1e9:.1f} GB free, for {count} snapshots")
    held = sum(info.size for info in store.list(keys.snapshots, deadline=Deadline.after(REACH_S, host.clock)))
    needed = count * state_bytes
    told = (
        f"{free / 1e9:.1f} GB free, {held / 1e9:.1f} GB held by this run; {count} snapshots take {needed / 1e9:.1f} GB"
    )
    if free + held >= needed:
        return ok(name, told)
    remedy = f"make {(needed - free - held) / 1e9:.1f} GB of room, or keep fewer than {keep} snapshots"
    return warning(name, told, remedy) if free + held >= 2 * state_bytes else failure(name, told, remedy)


def check_apart(store: Path, local: Path) -> Finding:
    """Check that the local tier is on another file system: else it protects from nothing and doubles the writes."""
    name = "tiers"
    if existing(store).stat().st_dev == existing(local).stat().st_dev:
        return warning(name, "the local tier is on the store's own file system", "remove --local: one tier is enough")
    return ok(name, "the local tier and the store are on different file systems")


def _speed(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.2f} GB/s" if bytes_s >= 1e8 else f"{bytes_s / 1e6:.3g} MB/s"
