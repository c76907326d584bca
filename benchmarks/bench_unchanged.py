"""What does a snapshot cost of which most has not changed? Good enough is:

- of a LoRA-like state (95 % frozen, AdamW on the rest) the second snapshot uploads at most 6 % of its bytes to S3,
  records included; and so does the first one of a run that goes on on another instance;
- looking for what has not changed takes at most 2 % of the time that writing the same bytes takes, where all of it has
  changed: a training without frozen tensors must not pay for those with.

Starts real `harness run`s on `tests.support.s3_server` with this script as the trainer, and counts the bytes of the
requests that the server received for each snapshot. What looking, linking and writing take is measured in this process,
on the disk of --directory; "reading to compare" is what a link would cost if its source were read before (it is not:
ADR 0017). The file is dropped from the page cache before it is read.

    python benchmarks/bench_unchanged.py [--mb 400] [--rounds 3] [--directory DIR] [--check] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from circumstances import ROOT, Row, at_most, circumstances, environment, show

sys.path.insert(0, str(ROOT))

from cloud.digest import crc64nvme
from cloud.directory.store import DirectoryStore
from cloud.notice import Deadline
from harness.core.manifest import Manifest
from harness.core.snapshot import RunKeys, SnapshotId, shard_name
from harness.snapshots import commit, retire
from harness.snapshots.dedup import Deduplicator, Wanted
from tests.support.s3_server import serving, steer

BAR_UPLOADED_PERCENT, BAR_LOOKING_PERCENT = 6.0, 2.0
NEVER = Deadline.never()
KEYS = RunKeys("bench")
SHARD_BYTES = 256 * 1024**2
ADAPTERS = 60  # one 60th of the state is adapters; with their gradients' two moments that is 5 % of it
STEP_S = 0.02

T = TypeVar("T")


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    if options.trainer is not None:
        train(options.trainer)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as name:
        directory = Path(name)
        uploads = [uploaded_percent(directory / f"run-{number}", options.mb) for number in range(options.rounds)]
        data = memoryview(mmap.mmap(-1, options.mb * 10**6))
        fill(data, 0)
        disk = [on_disk(directory / f"disk-{number}", data, number) for number in range(options.rounds)]
    gb = options.mb / 1000
    results = [
        Result("uploaded by the first snapshot, % of the state", [found.first for found in uploads]),
        Result(
            "uploaded by the second snapshot, % of the state", [found.second for found in uploads], BAR_UPLOADED_PERCENT
        ),
        Result(
            "uploaded by the first one on another instance, %", [found.elsewhere for found in uploads],
            BAR_UPLOADED_PERCENT,
        ),
        Result("writing what changed, s/GB", [found.write_s / gb for found in disk]),
        Result("looking and linking what did not, s/GB", [found.link_s / gb for found in disk]),
        Result("reading to compare, s/GB", [found.read_s / gb for found in disk]),
        Result("looking where all has changed, s/GB", [found.vain_s / gb for found in disk]),
        Result(
            "looking where all has changed, % of writing",
            [100 * found.vain_s / found.write_s for found in disk],
            BAR_LOOKING_PERCENT,
        ),
    ]  # fmt: skip
    verdicts = [
        at_most(result.name, result.bar, statistics.median(result.figures))
        for result in results
        if result.bar is not None
    ]
    rows = [result.row() for result in results]
    show(circumstances(["torch", "awscrt", "boto3"]), rows, verdicts, as_json=options.json)
    return 1 if options.check and not all(verdict.met for verdict in verdicts) else 0


@dataclass(frozen=True)
class Result:
    """Figures of one kind, and what their median may be at most, where that matters."""

    name: str
    figures: list[float]
    bar: float | None = None

    def row(self) -> Row:
        return {
            "what": self.name,
            "median": f"{statistics.median(self.figures):.3g}",
            "min": f"{min(self.figures):.3g}",
            "max": f"{max(self.figures):.3g}",
        }


# Uploads -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uploaded:
    """What a server received of three snapshots, as shares of the first one's payload."""

    first: float
    second: float
    elsewhere: float


def uploaded_percent(directory: Path, mb: int) -> Uploaded:
    """Two snapshots of one instance, which is then lost, and the first one of another."""
    directory.mkdir()
    with serving() as url:
        with running(directory / "one", url, mb) as log:
            seen = wait_published(log, 2)
        with running(directory / "two", url, mb) as log:
            seen += wait_published(log, 1)
        received = [sum(call["body_bytes"] for call in steer(url, "calls") if name in call["key"]) for name in seen]
        sizes = steer(url, "objects")
        whole = sum(size for key, size in sizes.items() if f"/{seen[-1]}-" in key)
    return Uploaded(*(100 * count / whole for count in received))


@contextlib.contextmanager
def running(directory: Path, url: str, mb: int) -> Iterator[Path]:
    """A `harness run` on an instance of its own, killed with its disk at the end; where its log is."""
    directory.mkdir()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "harness", "run", "--store", "s3://bucket/runs", "--s3-endpoint", url),
                *("--run", "bench", "--local", str(directory / "local"), "--durable-every-s", "0.01"),
                *("--metadata", "off", "--every-steps", "20", "--every-s", "1000", "--handover-s", "0.5"),
                *("--", sys.executable, __file__, "--trainer", str(mb)),
            ],
            env=environment(XDG_RUNTIME_DIR=str(directory), AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench"),
            stderr=log,
            start_new_session=True,
        )
    try:
        yield directory / "log"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_published(log: Path, count: int, timeout_s: float = 120.0) -> list[str]:
    """The names of the first `count` snapshots that became durable."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        text = log.read_text()
        lines = [line for line in text.splitlines() if " Published tier=remote " in line]
        if len(lines) >= count:
            return [line.split(" snapshot=")[1].split()[0] for line in lines[:count]]
        if time.monotonic() > give_up_at:
            raise SystemExit(f"no {count} snapshots within {timeout_s:g} s:\n{text}")
        time.sleep(0.01)


def train(mb: int) -> None:
    """The trainer: of `mb` MB 95 % are frozen, and one part in `ADAPTERS` is adapters, with AdamW on those."""
    import torch

    from harness import Checkpointer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = mb * 10**6 // 4 // 1000
    frozen, adapters = rows * 95 // 100, rows // ADAPTERS
    model = torch.nn.ParameterList(
        [
            *(torch.nn.Parameter(torch.randn(frozen // 10, 1000), requires_grad=False) for _ in range(10)),
            torch.nn.Parameter(torch.randn(adapters, 1000)),
        ]
    )
    optimizer = torch.optim.AdamW([model[-1]], lr=1e-3)
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    for _ in ckpt.steps(10**9):
        model[-1].grad = torch.randn(adapters, 1000)
        optimizer.step()
        time.sleep(STEP_S)


# A disk --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnDisk:
    """Seconds that each took."""

    write_s: float
    link_s: float
    read_s: float
    vain_s: float


def on_disk(directory: Path, data: memoryview, number: int) -> OnDisk:
    """Publish, publish the same again, read what the first wrote, and look for it where every shard has changed."""
    store = DirectoryStore(directory)
    write_s, base = timed(lambda: publish(store, data, 2 * number + 1, Deduplicator()))
    unchanged = Deduplicator()
    unchanged.committed(base)
    link_s, _ = timed(lambda: publish(store, data, 2 * number + 2, unchanged))
    paths = [store.local_path(KEYS.payload(base.directory, shard.name)) for shard in base.parts[0].shards]
    read_s, _ = timed(lambda: [read(path) for path in paths if path is not None])
    for at in range(0, len(data), SHARD_BYTES):
        data[at] ^= 1
    vain_s, found = timed(lambda: [unchanged.find(Wanted(name, shard)) for name, shard in shards(data)])
    if any(found):
        raise SystemExit("what has changed was taken for what has not")
    retire.remove(store, KEYS, base.id, NEVER)
    retire.remove(store, KEYS, SnapshotId(1, 2 * number + 2), NEVER)
    return OnDisk(write_s, link_s, read_s, vain_s)


def publish(store: DirectoryStore, data: memoryview, step: int, unchanged: Deduplicator) -> Manifest:
    part = commit.StagedPart(
        rank=0, world_size=1, state=b"{}", environment={}, sealed_at="", shards=shards(data)
    )  # fmt: skip
    staged = commit.Staged(id=SnapshotId(1, step), run_id="0" * 32, parent=None, parts=[part])
    return commit.publish(store, KEYS, staged, "local", NEVER, lambda event: None, unchanged=unchanged)


def shards(data: memoryview) -> list[tuple[str, memoryview]]:
    return [
        (shard_name(0, 1, index), data[at : at + SHARD_BYTES])
        for index, at in enumerate(range(0, len(data), SHARD_BYTES))
    ]


def read(path: Path) -> int:
    """The sum of a file that is not in the page cache."""
    crc, buffer = 0, memoryview(bytearray(16 * 1024**2))
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while count := file.readinto(buffer):
            crc = crc64nvme(buffer[:count], crc)
    return crc


def fill(data: memoryview, seed: int) -> None:
    piece = random.Random(seed).randbytes(1 << 20)
    for at in range(0, len(data), len(piece)):
        data[at : at + len(piece)] = piece[: len(data) - at]


def timed(act: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; without it the one of temporary files")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
