"""What does a snapshot cost the loop where memory has no room for it? At most 1.3 of writing the same bytes.

Copies a state of many tensors into a slot on a disk, as a trainer does, in turns with the limit: the same bytes from a
warm buffer into a file that is there already, by O_DIRECT, 16 MiB at a time. Both in a process whose memory is limited
to the state and a quarter, by a cgroup of its own; where none can be made, without, and that is said.

    python benchmarks/bench_window.py [--gb 1.5] [--rounds 7] [--directory .] [--check] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from circumstances import Row, at_most, circumstances, environment, show

BAR = 1.3
PIECE = 16 * 1024 * 1024
BASE_BYTES = 400_000_000  # Python, torch, and the window
OURS, LIMIT = "through the window", "limit: O_DIRECT write"


def main() -> int:
    """Measure in a process with little memory, print, judge."""
    options = parse()
    if options.trainer is not None:
        options.trainer.write_text(json.dumps(measure(int(options.gb * 1e9), options.rounds, options.directory)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as name:
        result = Path(name) / "result.json"
        with memory_limit(BASE_BYTES + int(1.25e9 * options.gb)) as limited:
            words = ["--gb", str(options.gb), "--rounds", str(options.rounds), "--directory", name]
            subprocess.run(
                [*limited, sys.executable, __file__, *words, "--trainer", str(result)], env=environment(), check=True
            )
        found: dict[str, list[float]] = json.loads(result.read_text())
    ratio = statistics.median(ours / limit for ours, limit in zip(found[OURS], found[LIMIT], strict=True))
    around = circumstances(["torch"])
    around["memory"] = "limited to the state and a quarter" if limited else "NOT LIMITED: no cgroup can be made here"
    verdict = at_most("stall where memory holds no slot, ours / O_DIRECT write", BAR, ratio)
    rows = [row(name, seconds, options.gb) for name, seconds in found.items()]
    show(around, rows, [verdict], as_json=options.json)
    return 1 if options.check and not verdict.met else 0


def row(name: str, seconds: Sequence[float], size_gb: float) -> Row:
    """Seconds of one of them."""
    median = statistics.median(seconds)
    return {
        "seconds": name,
        "median": f"{median:.2f}",
        "min to max": f"{min(seconds):.2f} to {max(seconds):.2f}",
        "GB/s": f"{size_gb / median:.2f}",
    }


def measure(size: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds, for each round; the first round, which warms up, is left out."""
    import torch

    from harness.core.shard import TensorSpec, plan_shards
    from harness.ipc.slots import Slot, place_shards, slot_bytes
    from harness.ipc.window import Window
    from harness.trainer.copy.to_slot import copy_through

    torch.set_num_threads(2)
    tensors = {f"{number}": torch.rand(size // 4 // 100) for number in range(100)}
    shards = plan_shards([TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()])
    spans = place_shards([(str(shard.index), shard.size) for shard in shards])
    slot = Slot.create(slot_bytes(spans, 0), directory)
    offsets = [span.offset for span in spans]

    def ours() -> None:
        copy_through(Window(slot), shards, offsets, tensors)

    source = mmap.mmap(-1, PIECE)
    source[:] = os.urandom(PIECE)
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        direct = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)

        def limit() -> None:
            for at in range(0, size // PIECE * PIECE, PIECE):
                os.pwritev(direct, [source], at)

        found: dict[str, list[float]] = {OURS: [], LIMIT: []}
        for _ in range(rounds + 1):
            for name, act in ((OURS, ours), (LIMIT, limit)):
                began = time.monotonic()
                act()
                found[name].append(time.monotonic() - began)
        os.close(direct)
    return {name: seconds[1:] for name, seconds in found.items()}


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[list[str]]:
    """What to put before a command that is to have `size` bytes of memory; nothing where that cannot be."""
    root = Path("/sys/fs/cgroup")
    for base, limit in ((root / "memory", "memory.limit_in_bytes"), (root, "memory.max")):
        group = base / f"harness-bench-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(size))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield ["/bin/sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "limited"]
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    yield []


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk that is meant")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
