"""What do snapshots of several ranks cost, with DistributedDataParallel on one machine? Good enough is:

- bytes that all ranks copy: at most 1.05 times the state, at any number of ranks;
- stall with 4 ranks: at most 1.2 times that with one rank and the same state;
- training time lost for a snapshot with 4 ranks: the best asynchronous peer at least 3 times ours;
- from the request to the agreement on a step: at most 5 ms; a rank holds at most 2 ms for it, and 20 ms at most;
- from the request until all have sealed: at most two steps and the copy;
- a normal step: at most 1.2 times one with one rank.

The state is a GPT's with AdamW, the same on all ranks. Ours is `harness run -- torchrun` with a directory store; the
others (ranks_session.py) save the same tensors from the same processes, everybody after everybody else in each round,
after a round that warms up. Steps are in lockstep, as with a collective call in each.

    python benchmarks/bench_ranks.py [--size 0.4] [--ranks 1,2,4] [--rounds 5] [--directory DIR] [--check] [--json]
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
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from circumstances import Row, Verdict, at_least, at_most, circumstances, environment, show, spread
from gpt_state import Size
from peers import LIBRARIES
from ranks_session import ASYNCHRONOUS, OURS, PEERS

from cloud.directory.store import DirectoryStore
from harness.core import events
from harness.core.snapshot import RunKeys
from harness.snapshots.journal import read_journal

BAR_BYTES, BAR_STALL, BAR_LOST, BAR_STEP = 1.05, 1.2, 3.0, 1.2
BAR_AGREED_MS, BAR_HELD_MS, BAR_MOST_HELD_MS = 5.0, 2.0, 20.0
PATIENCE_S = 3600.0
LEAST = 0.001  # differences below it are noise
RUN = "bench-ranks"


@dataclass
class Found:
    """What one number of ranks came to; see `ranks_session`, and the journal of the run."""

    bytes: int
    step_s: list[float]
    quick_step_s: list[float]
    absent: dict[str, str]
    figures: dict[str, dict[str, list[float]]]
    copied: list[float]
    agreed_s: list[float]
    sealed_after: list[float]

    def median(self, name: str, what: str) -> float:
        return statistics.median(self.figures[name][what])


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    found = {count: session(options, count) for count in options.ranks}
    verdicts = judge(found)
    show(circumstances(["torch", *LIBRARIES]), rows_of(options.size, found), verdicts, as_json=options.json)
    return 1 if options.check and not all(verdict.met for verdict in verdicts) else 0


def session(options: argparse.Namespace, ranks: int) -> Found:
    """A run of the harness on so many ranks, in which everybody saves in turn."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as name,
        Path(name, "log").open("wb") as log,
    ):
        directory, script = Path(name), Path(__file__).with_name("ranks_session.py")
        run = [sys.executable, "-m", "harness", "run", "--store", str(directory / "store"), "--run", RUN]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        session = [str(script), name, str(options.size), str(options.rounds), *options.peers]
        process = subprocess.Popen(
            [*run, "--metadata", "off", "--every-s", "100000", "--max-crashes", "0", "--", *torchrun, *session],
            env=environment(XDG_RUNTIME_DIR=name),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(directory / "result.json", process)
            told = json.loads((directory / "result.json").read_text())
            figures = {
                who: {what: [one[what] for one in ones] for what in ones[0]}
                for who, ones in told.pop("figures").items()
            }
            return Found(**told, figures=figures, **of_journal(directory / "store", ranks, told))
        except AssertionError as err:
            raise SystemExit(f"{err}:\n{(directory / 'log').read_text(errors='replace')[-4000:]}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(result: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run is over: its journal is whole then."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_S)
    assert result.exists(), f"the session ended with {process.returncode}"


def of_journal(store: Path, ranks: int, told: dict[str, Any]) -> dict[str, Any]:
    """What the agent has seen of each snapshot that was asked for: bytes copied, the agreement, and all sealed."""
    due_at, agreed = None, list[float]()
    sealed: dict[int, list[events.Sealed]] = defaultdict(list)
    after: list[float] = []
    step_s = statistics.median(told["step_s"])
    for line in read_journal(DirectoryStore(store), RunKeys(RUN)):
        match line.body:
            case events.Due(reason="save"):
                due_at = line.mono
            case events.Agreed(seconds=seconds):
                agreed.append(seconds)
            case events.Sealed(step=step) as seal:
                sealed[step].append(seal)
                if len(sealed[step]) == ranks and due_at is not None:
                    copy_s = max(one.stall_s for one in sealed[step])
                    after.append((line.mono - due_at) / (2 * step_s + copy_s))
                    due_at = None
    whole = [sum(seal.bytes for seal in seals) for seals in sealed.values() if len(seals) == ranks]
    return {
        "copied": [size / told["bytes"] for size in whole],
        "agreed_s": agreed,
        "sealed_after": after[1:],
    }


def rows_of(size: Size, found: dict[int, Found]) -> list[Row]:
    """A row for everybody at each number of ranks."""
    rows: list[Row] = []
    for count, one in found.items():
        what = f"{size.words} ({one.bytes / 1e9:.2f}), {ranks_of(count)}"
        for who, figures in one.figures.items():
            ours = who == OURS
            rows.append(
                {
                    "state": what,
                    "who": who,
                    "stall, s": spread(figures["stall_s"]),
                    "training lost, s": spread(figures["lost_s"]),
                    "bytes copied / state": spread(one.copied) if ours else "",
                    "agreed in, ms": spread([1e3 * each for each in one.agreed_s]) if ours and one.agreed_s else "",
                    "held, ms": spread([1e3 * each for each in figures["held_s"]]) if ours and count > 1 else "",
                    "a step, ms": spread([1e3 * each for each in one.step_s]) if ours else "",
                }
            )
        empty: Row = dict.fromkeys(rows[-1], "")
        rows += [empty | {"state": what, "who": who, "stall, s": why} for who, why in one.absent.items()]
    return rows


def ranks_of(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def judge(found: dict[int, Found]) -> list[Verdict]:
    """Every bar; those that need another number of ranks than was measured are left out."""
    verdicts = [
        at_most(f"{ranks_of(count)}: bytes copied by all / the state", BAR_BYTES, max(one.copied))
        for count, one in found.items()
    ]
    most = max(found)
    many = found[most]
    if 1 in found and most > 1:
        alone = found[1]
        ratio = many.median(OURS, "stall_s") / max(alone.median(OURS, "stall_s"), LEAST)
        verdicts.append(at_most(f"stall, {ranks_of(most)} / 1 rank", BAR_STALL, ratio))
        quick = statistics.median(many.quick_step_s) / statistics.median(alone.quick_step_s)
        verdicts.append(at_most(f"a normal step, {ranks_of(most)} / 1 rank", BAR_STEP, quick))
    lost = [(many.median(name, "lost_s"), name) for name in many.figures if name in ASYNCHRONOUS]
    if lost:
        best, name = min(lost)
        ratio = best / max(many.median(OURS, "lost_s"), LEAST)
        verdicts.append(at_least(f"{ranks_of(most)}: training time lost, {name} / ours", BAR_LOST, ratio))
    if many.agreed_s:
        verdicts.append(
            at_most("from the request to the agreement", BAR_AGREED_MS, 1e3 * statistics.median(many.agreed_s), " ms")
        )
    if most > 1:
        held = [1e3 * each for each in many.figures[OURS]["held_s"]]
        verdicts.append(at_most("a rank holds, median", BAR_HELD_MS, statistics.median(held), " ms"))
        verdicts.append(at_most("a rank holds, at most", BAR_MOST_HELD_MS, max(held), " ms"))
    if many.sealed_after:
        ratio = statistics.median(many.sealed_after)
        verdicts.append(at_most("from the request to the last seal / two steps and the copy", 1.0, ratio))
    return verdicts


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=Size.parse, default="0.4")
    parser.add_argument("--ranks", type=numbers, default="1,2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=[*PEERS], help="default: all")
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: the temporary one")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
