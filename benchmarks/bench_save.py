"""What does a checkpoint cost a training, and when is it durable? Good enough is:

- training time lost (the stall, and what a loop of two threads loses until the checkpoint is durable): the best
  asynchronous peer at least 4 times ours;
- stall: at most 1.35 times a flat memcpy by two threads, from 2 GB on; the best peer at least 0.9 times ours;
- time until durable on a local disk: at most 1.25 times that memcpy and one O_DIRECT write; the best asynchronous peer
  at least 1.6 times ours;
- CPU seconds of the whole machine for a GB: the best asynchronous peer at least 3 times ours.

The state is a GPT's with AdamW. Ours is `harness run` with a directory store; the others (peers.py) save the same
tensors from the same process (save_session.py), everybody after everybody else in each round, after a round that warms
up. Where memory does not hold them all, there are several processes, and each other is compared with ours of its own.
Ours computes a checksum of every byte, and reads everything back afterwards; what that adds is a row of its own.

    python benchmarks/bench_save.py [--sizes 0.4,2] [--rounds 5] [--directory /mnt/disk] [--check] [--json]

Sizes are GB in float32; "1bf16" is 1 GB in bfloat16. The disk needs room for four states.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from circumstances import Row, Verdict, at_least, at_most, circumstances, environment, show, spread
from gpt_state import Size
from limits import BUFFER_BYTES
from peers import ASYNCHRONOUS, LIBRARIES, SAVE_PEERS, STAGES, clean_up_after_dlrover
from save_session import OURS

BAR_LOST, BAR_STALL_LIMIT, BAR_STALL_PEER = 4.0, 1.35, 0.9
BAR_DURABLE_LIMIT, BAR_DURABLE_PEER, BAR_CPU = 1.25, 1.6, 3.0
STALL_LIMIT_FROM_GB = 2.0
SPARE_BYTES = 2 * BUFFER_BYTES + 3 * 10**9  # for limits, torch, and files on their way to the disk
TWO_SLOTS_FROM_BYTES = 32 << 30
PATIENCE_S = 3600.0
LEAST = 0.001  # differences below it are noise


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    for size in options.sizes:
        found = [session(options.directory, size, options.rounds, peers) for peers in groups(size, options.peers)]
        rows += rows_of(size, found)
        verdicts += judge(size, found)
    around = circumstances(["torch", *LIBRARIES])
    show(around, rows, verdicts, as_json=options.json)
    return 1 if options.check and not all(verdict.met for verdict in verdicts) else 0


@dataclass(frozen=True)
class Found:
    """What one session came to; see `save_session.measure`."""

    bytes: int
    copy_s: list[float]
    write_s: list[float]
    error: list[float]
    figures: dict[str, dict[str, list[float]]]
    absent: dict[str, str]

    def median(self, name: str, what: str) -> float:
        return statistics.median(self.figures[name][what])


def groups(size: Size, peers: Sequence[str]) -> list[list[str]]:
    """The peers, in as many groups as it takes that each fits into memory together with ours."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    slots = 2 if memory >= TWO_SLOTS_FROM_BYTES else 1
    room = memory - SPARE_BYTES - (1 + slots) * size.gb * 1e9
    made: list[list[str]] = [[]]
    for name in peers:
        staged = [peer for peer in made[-1] if peer in STAGES]
        if name in STAGES and staged and (len(staged) + 1) * size.gb * 1e9 > room:
            made.append([])
        made[-1].append(name)
    return made


def session(base: Path | None, size: Size, rounds: int, peers: Sequence[str]) -> Found:
    """A run of the harness in which everybody saves in turn."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=base) as name, Path(name, "log").open("wb") as log:
        directory, script = Path(name), Path(__file__).with_name("save_session.py")
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "harness",
                    "run",
                    "--store",
                    str(directory / "store"),
                    "--run",
                    "bench-save",
                ),
                *("--metadata", "off", "--every-s", "100000", "--keep-last", "1", "--max-crashes", "1", "--"),
                *(sys.executable, str(script), str(directory), str(size), str(rounds), *peers),
            ],
            env=environment(XDG_RUNTIME_DIR=name, TORCHELASTIC_RUN_ID=directory.name),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return Found(**wait_for(directory / "result.json", process))
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


def rows_of(size: Size, found: Sequence[Found]) -> list[Row]:
    """A row for the limits, one for ours, one for each of the others."""
    what = f"{size.words} ({found[0].bytes / 1e9:.2f})"
    copies = [one for session in found for one in session.copy_s]
    both = [sum(pair) for session in found for pair in zip(session.copy_s, session.write_s, strict=False)]
    limit = {"stall, s": spread(copies), "durable, s": spread(both) if both else "O_DIRECT refused"}
    rows: list[Row] = [row(what, "limit: memcpy, O_DIRECT write", limit)]
    ours = {key: [one for session in found for one in session.figures[OURS][key]] for key in found[0].figures[OURS]}
    error = {"training lost, s": spread([one for session in found for one in session.error])}
    rows += [row(what, "nobody, for 1 s", error)]
    rows += [row(what, OURS, cells(ours)), row(what, "ours, and read back", after(ours))]
    for session in found:
        rows += [row(what, name, cells(figures)) for name, figures in session.figures.items() if name != OURS]
        rows += [row(what, name, {"stall, s": why}) for name, why in session.absent.items()]
    return rows


def row(what: str, name: str, figures: dict[str, str]) -> Row:
    columns = ("stall, s", "durable, s", "training lost, s", "CPU s/GB")
    return {"state": what, "who": name, **{column: figures.get(column, "") for column in columns}}


def cells(figures: dict[str, list[float]]) -> dict[str, str]:
    return {
        "stall, s": spread(figures["stall_s"]),
        "durable, s": spread(figures["durable_s"]),
        "training lost, s": spread(figures["lost_s"]),
        "CPU s/GB": spread(figures["cpu_s_per_gb"]),
    }


def after(figures: dict[str, list[float]]) -> dict[str, str]:
    return {
        "training lost, s": spread(figures["lost_after_s"]),
        "CPU s/GB": spread(figures["cpu_after_s_per_gb"]),
    }


def judge(size: Size, found: Sequence[Found]) -> list[Verdict]:
    """Every bar; those that need somebody or something that is not here are left out."""
    verdicts = []

    def best(what: str, names: frozenset[str]) -> tuple[float, str] | None:
        """The peer that is nearest to ours, of the same session."""
        ratios = [
            (session.median(name, what) / max(session.median(OURS, what), LEAST), name)
            for session in found
            for name in session.figures
            if name in names
        ]
        return min(ratios, default=None)

    def compare(question: str, bar: float, what: str, names: frozenset[str]) -> None:
        if (nearest := best(what, names)) is not None:
            verdicts.append(at_least(f"{size.words}: {question}, {nearest[1]} / ours", bar, nearest[0]))

    def hold(question: str, bar: float, ours: Sequence[float], limits: Sequence[float]) -> None:
        verdicts.append(
            at_most(f"{size.words}: {question}", bar, statistics.median(ours) / max(statistics.median(limits), LEAST))
        )

    compare("training time lost for a checkpoint", BAR_LOST, "lost_s", ASYNCHRONOUS)
    stalls = [one for session in found for one in session.figures[OURS]["stall_s"]]
    if size.gb >= STALL_LIMIT_FROM_GB:
        hold("stall, ours / memcpy", BAR_STALL_LIMIT, stalls, [one for session in found for one in session.copy_s])
    compare("stall", BAR_STALL_PEER, "stall_s", frozenset(SAVE_PEERS))
    durable = [one for session in found for one in session.figures[OURS]["durable_s"]]
    limits = [sum(pair) for session in found for pair in zip(session.copy_s, session.write_s, strict=False)]
    if limits:
        hold("durable, ours / memcpy and O_DIRECT write", BAR_DURABLE_LIMIT, durable, limits)
    compare("durable", BAR_DURABLE_PEER, "durable_s", ASYNCHRONOUS)
    compare("CPU of a GB", BAR_CPU, "cpu_s_per_gb", ASYNCHRONOUS)
    return verdicts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [Size.parse(part) for part in text.split(",")], default="0.4,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=list(SAVE_PEERS), choices=[*SAVE_PEERS], help="default: all")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: the temporary one")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
