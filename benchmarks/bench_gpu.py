"""What does a snapshot of a state on a GPU cost the training? Good enough is:

- stall: at most 1.35 times one copy of the same bytes from the device into pinned memory, which is the limit;
- training time lost until it is durable: the best asynchronous peer at least 1 times ours;
- with `overlap`, less is lost than without; else it is not worth having (ADR 18).

A GPT trains in mixed precision on the device. Everybody saves its own state in turn (gpu_session.py), from the same
process under `harness run`, in each round after everybody else; the first round warms up. Saved alone, for the stall:
the device is idle before, and training may go on after. Saved in the training: what the loop loses until the checkpoint
is durable, beyond what its steps take while nobody saves; not judged where those vary by half as much. With overlap it
is another process, with figures of its own for everything that ours is compared with.

    python benchmarks/bench_gpu.py [--gb 1.5 6] [--rounds 5] [--directory /mnt/disk] [--check] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from circumstances import Row, Verdict, at_least, at_most, circumstances, environment, show, spread, table
from gpu_session import ASYNCHRONOUS, BOUNDARY, COPY, OVERLAP, PEERS
from peers import LIBRARIES, clean_up_after_dlrover

BAR_STALL, BAR_LOST, BAR_OVERLAP = 1.35, 1.0, 1.0
PATIENCE_S = 1800.0
LEAST_S = 0.001  # differences below it are noise


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    for gb in options.gb:
        peers = [name for name in PEERS if name in options.peers]
        found: dict[str, dict[str, Any]] = {}
        for name in (BOUNDARY, OVERLAP):
            found[name] = session(options.directory, gb, options.rounds, name, peers)
            these = rows_of(gb, name, found[name])
            print(table(these), file=sys.stderr)  # minutes before the rest
            rows += these
        verdicts += judge(gb, found)
    around = circumstances(["torch", *LIBRARIES]) | {"device": torch.cuda.get_device_name()}
    show(around, rows, verdicts, as_json=options.json)
    return 1 if options.check and not all(verdict.met for verdict in verdicts) else 0


def session(base: Path | None, gb: float, rounds: int, name: str, peers: Sequence[str]) -> dict[str, Any]:
    """A run of the harness, with overlap or without it, in which everybody saves in turn; see `gpu_session.measure`."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base) as made, Path(made, "log").open("wb") as log:
        directory, script = Path(made), Path(__file__).with_name("gpu_session.py")
        harness = [sys.executable, "-m", "harness", "run", "--store", str(directory / "store"), "--run", "bench-gpu"]
        harness += ["--metadata", "off", "--every-s", "100000", "--keep-last", "1", "--max-crashes", "1", "--"]
        process = subprocess.Popen(
            [*harness, sys.executable, str(script), str(directory), str(gb), str(rounds), name, *peers],
            env=environment(XDG_RUNTIME_DIR=made, TORCHELASTIC_RUN_ID=directory.name),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return wait_for(directory / "result.json", process)
        except AssertionError as err:
            raise SystemExit(f"{err}:\n{(directory / 'log').read_text(errors='replace')[-4000:]}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            clean_up_after_dlrover(directory.name)


def wait_for(result: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The session's result; what comes after it is not waited for."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not result.exists():
        if process.poll() is not None:
            raise AssertionError(f"the session ended with {process.returncode}")
        if time.monotonic() > give_up_at:
            raise AssertionError(f"no result after {PATIENCE_S:g} s")
        time.sleep(0.05)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def rows_of(gb: float, ours: str, found: dict[str, Any]) -> list[Row]:
    """A row for each contender, the limit first."""
    what = f"{gb:g} GB ({found['bytes'] / 1e9:.2f}), a step {1e3 * found['step_s']:.0f} ms"
    error = {"training lost, s": spread(found["error"])}
    rows = [row(what, "nobody, for 1 s", error)]
    for name, figures in found["figures"].items():
        told = {key: spread(figures[key]) for key in figures if figures[key]}
        rows.append(row(what, name, told))
    rows.append(row(what, f"{ours}: a new slot pinned", {"stall, s": spread(found["pin_s"])}))
    return rows + [row(what, name, {"stall, s": why}) for name, why in found["absent"].items()]


def row(what: str, name: str, figures: dict[str, str]) -> Row:
    return {
        "state": what,
        "who": name,
        **{key: figures.get(key, "") for key in ("stall, s", "durable, s", "training lost, s")},
    }


def judge(gb: float, found: dict[str, dict[str, Any]]) -> list[Verdict]:
    """Every bar."""
    of = {name: {who: _medians(each) for who, each in one["figures"].items()} for name, one in found.items()}
    boundary, overlap = of[BOUNDARY], of[OVERLAP]
    stall = boundary[BOUNDARY]["stall, s"] / boundary[COPY]["stall, s"]
    verdicts = [at_most(f"{gb:g} GB: stall, ours / copy into pinned memory", BAR_STALL, stall)]
    lost = boundary[BOUNDARY]["training lost, s"]
    durable_s = boundary[BOUNDARY]["durable, s"]
    if statistics.stdev(found[BOUNDARY]["error"]) * durable_s > lost / 2:
        return verdicts  # the loop's own steps vary by more than what is looked for
    peers = [
        (each["training lost, s"] / max(lost, LEAST_S), name) for name, each in boundary.items() if name in ASYNCHRONOUS
    ]
    if peers:
        ratio, name = min(peers)
        verdicts.append(at_least(f"{gb:g} GB: training time lost, {name} / ours", BAR_LOST, ratio))
    gain = overlap[OVERLAP]["training lost, s"] / max(lost, LEAST_S)
    return [*verdicts, at_most(f"{gb:g} GB: training time lost, with overlap / without", BAR_OVERLAP, gain)]


def _medians(figures: dict[str, list[float]]) -> dict[str, float]:
    return {what: statistics.median(each) for what, each in figures.items() if each}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.5, 6.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=[*PEERS], help="default: all")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: the temporary one")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
