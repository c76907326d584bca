"""Does a resume fetch its snapshot while the program imports torch? Good enough is a first step no later than

    1.15 × max(fetch, import + construction) + restore

after the program was started. One after the other, it would be their sum.

A real run is ended after its first snapshot and started again, round after round, until its first step is complete; the
durations are those of its own journal (`Restarted`). Each round starts it twice: from a store that is as fast as the
disk, which tells what import and construction take alone, and from one that is slowed to a known rate, so that the
fetch takes as long as the import just did, half as long, and twice as long. Steps cost nothing, so that the first one
is no part of what is measured. Unlike `harness run`, the agent is started by this script, which slows its store.

    python benchmarks/bench_resume_overlap.py [--mb 600] [--rounds 3] [--check] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from circumstances import ROOT, Row, at_most, circumstances, environment, show

sys.path.insert(0, str(ROOT))

BAR = 1.15
SHARES = (0.5, 1.0, 2.0)
WAIT_S = 300.0
STEP_S = 0.02


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    if options.trainer is not None:
        train(options.trainer)
        return 0
    if options.agent is not None:
        return resume(**json.loads(options.agent))
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        start(directory, options.mb, until="Published", rate=0.0)
        found: dict[float, list[Mapping[str, float]]] = {share: [] for share in SHARES}
        for _ in range(options.rounds):
            for share in SHARES:
                alone = start(directory, options.mb, until="Restarted", rate=0.0)
                rate = options.mb * 1e6 / (share * alone["import"])
                slowed = start(directory, options.mb, until="Restarted", rate=rate)
                found[share].append(figures(alone, slowed))
    rows = [row(share, rounds) for share, rounds in found.items()]
    verdicts = [
        at_most(f"first step − restore / the longer of fetch and import, fetch {share:g} × import", BAR, worst)
        for share, worst in ((share, median(rounds, "ratio")) for share, rounds in found.items())
    ]
    show(circumstances(["torch", "msgspec"]), rows, verdicts, as_json=options.json)
    return 1 if options.check and not all(verdict.met for verdict in verdicts) else 0


def figures(alone: Mapping[str, float], slowed: Mapping[str, float]) -> dict[str, float]:
    """One round: seconds after the program was started, and how far they are from the longer of the two."""
    longer_s = max(slowed["fetch"], alone["import"])
    return {
        "import": alone["import"],
        "fetch": slowed["fetch"],
        "restore": slowed["restore"],
        "step": slowed["step"],
        "ratio": (slowed["step"] - slowed["restore"]) / longer_s,
        "sum": slowed["fetch"] + alone["import"] + slowed["restore"],
    }


def row(share: float, rounds: list[Mapping[str, float]]) -> Row:
    ratios = [found["ratio"] for found in rounds]
    return {
        "fetch / import": f"{share:g}",
        "import + construction, s": f"{median(rounds, 'import'):.2f}",
        "fetch, s": f"{median(rounds, 'fetch'):.2f}",
        "restore, s": f"{median(rounds, 'restore'):.2f}",
        "first step after, s": f"{median(rounds, 'step'):.2f}",
        "one after the other, s": f"{median(rounds, 'sum'):.2f}",
        "× the longer": f"{statistics.median(ratios):.3f}",
        "min": f"{min(ratios):.3f}",
        "max": f"{max(ratios):.3f}",
    }


def median(rounds: list[Mapping[str, float]], name: str) -> float:
    return statistics.median(found[name] for found in rounds)


def start(directory: Path, mb: int, *, until: str, rate: float) -> dict[str, Any]:
    """Start the run, wait for an event, kill everybody. `rate` is bytes/s; 0 for the disk's own.

    Returns:
        At its first step: seconds after the program was started, and what of them was import, fetch and restore.
    """
    told = directory / "told.json"
    told.unlink(missing_ok=True)
    arguments = {"directory": str(directory), "mb": mb, "until": until, "rate": rate}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--agent", json.dumps(arguments)],
            env=environment(XDG_RUNTIME_DIR=str(directory)),
            stderr=log,
            start_new_session=True,
        )
    give_up_at = time.monotonic() + WAIT_S
    try:
        while not told.exists():
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise SystemExit(f"no {until}:\n{(directory / 'log').read_text()}")
            time.sleep(0.01)
        fields: dict[str, Any] = json.loads(told.read_text())
        return fields
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def resume(directory: str, mb: int, until: str, rate: float) -> int:
    """The agent, as `harness run` has it, but for its store."""
    from harness.agent.main import Agent
    from harness.config.program import Program
    from harness.config.settings import Settings
    from harness.core import events
    from harness.snapshots.open import open_store

    there = Path(directory)
    heard: dict[str, events.Line] = {}

    def listen(line: events.Line) -> None:
        heard[type(line.body).__name__] = line
        if type(line.body).__name__ == until:
            told = {}
            if isinstance(line.body, events.Restarted):
                began_at, restored = heard["TrainerStarted"].mono, heard["Restored"]
                told = {
                    "import": restored.mono - restored.body.seconds - began_at,  # type: ignore[attr-defined]
                    "restore": restored.body.seconds,  # type: ignore[attr-defined]
                    "fetch": line.body.fetching_s,
                    "step": heard["FirstStep"].mono - began_at,
                }
            (there / "told").write_text(json.dumps(told))
            (there / "told").rename(there / "told.json")

    settings = Settings(
        store=str(there / "store"), run="bench", metadata="off", every_s=1000.0, every_steps=3, runtime_dir=directory
    )
    agent = Agent(
        settings,
        Program([sys.executable, __file__, "--trainer", str(mb)], os.environ),
        listeners=[listen],
        stores=lambda location: SlowStore(open_store(location, settings), rate),  # type: ignore[arg-type,return-value]
    )
    return agent.run()


class SlowStore:
    """A store behind a network that carries so many bytes a second, whoever asks, and 0 for as many as there are."""

    def __init__(self, store: Any, bytes_s: float) -> None:
        self._store, self._bytes_s = store, bytes_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def local_path(self, key: str) -> Path | None:
        """There is no way around the network."""
        return None if self._bytes_s else self._store.local_path(key)

    def get(self, key: str, target: memoryview, **options: Any) -> None:
        if self._bytes_s:
            with self._lock:
                self._free_at = max(time.monotonic(), self._free_at) + len(target) / self._bytes_s
                free_at = self._free_at
            time.sleep(max(0.0, free_at - time.monotonic()))
        self._store.get(key, target, **options)


def train(mb: int) -> None:
    """The program: parameters and an optimizer's moments, `mb` MB in all; steps that cost nothing."""
    import torch

    from harness import Checkpointer

    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(max(1, mb // 12))]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    for step in ckpt.steps(10**9):
        if step == 0:
            for layer in layers:
                layer.weight.grad = torch.zeros_like(layer.weight)
            optimizer.step()
        time.sleep(STEP_S)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
