"""What does a normal step cost, when no snapshot is due? At most 1 µs.

Runs itself as the trainer of a real `harness run`: a Checkpointer that is connected to its agent. The "training" is the
step of an optimizer that does nothing, so that the Checkpointer's hook fires and every batch is a boundary. Each round
times a plain loop over it and each of the Checkpointer's, back to back; the difference is what a boundary costs. The
hook itself fires in both, so it is measured on its own, by one more of the same kind. Time is
the thread's CPU time: a boundary waits for nothing, and what others do on the machine is not its cost.

    python benchmarks/bench_step.py [--steps 1000] [--rounds 501] [--check] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from circumstances import Row, at_most, circumstances, environment, show

BAR_US = 1.0
PLAIN, HOOK = "plain loop", "the optimizer's hook"
LOOPS = ("ckpt.batches(loader)", "ckpt.steps(n)", "ckpt.step()")


def main() -> int:
    """Measure under `harness run`, print, judge."""
    options = parse()
    if options.trainer is not None:
        options.trainer.write_text(json.dumps(measure(options.steps, options.rounds)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        result = directory / "result.json"
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "harness",
                    "run",
                    "--store",
                    str(directory / "store"),
                    "--run",
                    "bench-step",
                ),
                *("--metadata", "off", "--every-s", "1000", "--"),
                *(sys.executable, __file__, "--steps", str(options.steps), "--rounds", str(options.rounds)),
                *("--trainer", str(result)),
            ],
            env=environment(),
            check=True,
            stderr=None if options.verbose else subprocess.DEVNULL,
        )
        rounds: dict[str, list[float]] = json.loads(result.read_text())
    rows = [row(name, costs) for name, costs in rounds.items()]
    hook = statistics.median(rounds[HOOK])
    worst = max(statistics.median(rounds[loop]) for loop in LOOPS)
    verdict = at_most("what a normal step costs, hook included", BAR_US, hook + worst, " µs")
    show(circumstances(["torch"]), rows, [verdict], as_json=options.json)
    return 1 if options.check and not verdict.met else 0


def row(name: str, costs: Sequence[float]) -> Row:
    """The spread is the middle half: the rest is what else the machine did, of which a difference has both signs."""
    lower, median, upper = statistics.quantiles(costs, n=4, method="inclusive")
    return {"µs per step": name, "median": f"{median:.3f}", "middle half": f"{lower:.3f} to {upper:.3f}"}


def measure(steps: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds per step, for each round."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from harness import Checkpointer

    class Still(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.has_stepped = False

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    optimizer = Still(model.parameters(), lr=0.1)

    def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        optimizer.has_stepped = True

    def plain(iterator: Iterable[Any]) -> float:
        began = time.thread_time()
        for _ in iterator:
            optimizer.step()
        return (time.thread_time() - began) / steps * 1e6

    def by_hand(iterator: Iterable[Any]) -> float:
        began = time.thread_time()
        for _ in iterator:
            optimizer.step()
            ckpt.step()
        return (time.thread_time() - began) / steps * 1e6

    batches = range(steps)
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    found: dict[str, list[float]] = {name: [] for name in (PLAIN, HOOK, *LOOPS)}
    ckpt.resume()
    for _round in range(rounds + 1):
        found[PLAIN].append(plain(batches))
        one_more = register_optimizer_step_post_hook(stepped)
        found[HOOK].append(plain(batches) - found[PLAIN][-1])
        one_more.remove()
        found["ckpt.step()"].append(by_hand(batches) - plain(batches))
    for _epoch in ckpt.epochs(rounds + 1):
        found["ckpt.batches(loader)"].append(plain(ckpt.batches(batches)) - plain(batches))
        found["ckpt.steps(n)"].append(plain(ckpt.steps(steps)) - plain(batches))
    return {name: measured[1:] for name, measured in found.items()}  # the first round warms up, and plans the layout


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=501)
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what the agent says")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
