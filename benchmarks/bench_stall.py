"""How long does a snapshot stop the training? At 2 GB at most 1.35 times as long as a flat copy of the same bytes.

Nothing can take a snapshot of a changing state without copying it once; that copy, by two threads with memcpy between
two flat blocks of warm memory, is the limit. The state is a GPT's in fp32, with AdamW's moments. Snapshots are taken
as by a Checkpointer, by a Stager into a real slot; the agent is left out, since the loop never waits for it. The
largest size is judged: in a small one Python's part counts.

Also shown: what of the stall is Python over hundreds of tensors, whatever their size; torch's own copy into the slot;
how fast a new slot's pages are mapped, and the longest that another thread waited for the GIL meanwhile; and with
`--overlap`, the time that a snapshot costs a training on all cores, copied at the boundary and during the step.

    python benchmarks/bench_stall.py [--gb 0.4 2] [--rounds 15] [--overlap] [--check] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from circumstances import ROOT, Row, at_most, circumstances, show
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(ROOT))

from harness.core.messages import GenerationInfo, Sealed
from harness.ipc.pages import PAGE
from harness.ipc.slots import Slot
from harness.trainer.ranks import ALONE
from harness.trainer.staging.overlap import VALIDATIONS, Overlap
from harness.trainer.staging.stager import Stager
from harness.trainer.state import capture
from harness.trainer.state.rng import capture_rng

BAR = 1.35
LAYERS, VOCABULARY = 24, 512
LATE_STEPS = 4
REST = ("taking the state apart", "comparing it with the layout", "encoding small state")


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    torch.set_num_threads(2)
    rows: list[Row] = []
    for gb in sorted(options.gb):
        taken = Snapshots(gb)
        rounds = [taken.round() for _ in range(options.rounds)]
        ratios = [one.stall_s / one.flat_s for one in rounds]
        verdict = at_most(f"{taken.gb:.1f} GB: stall of a Stager alone / flat copy", BAR, statistics.median(ratios))
        rows += [
            row(f"{taken.gb:.2f} GB: flat copy, ms", [1e3 * one.flat_s for one in rounds]),
            row("stall, ms", [1e3 * one.stall_s for one in rounds]),
            row(f"stall / flat copy ({taken.tensors} tensors)", ratios),
            *(
                row(f"of the stall, {what}, ms", [1e3 * one.rest_s[number] for one in rounds])
                for number, what in enumerate(REST)
            ),
            row("torch's copy / flat copy", [one.torch_s / one.flat_s for one in rounds]),
            row("a new slot's pages, s per GB", [taken.map_s / taken.gb]),
            row("longest wait for the GIL meanwhile, ms", [1e3 * taken.gil_s]),
        ]
        if options.overlap:
            at_boundary, during_step = lost(taken, options.rounds)
            rows += [
                row("lost, copied at the boundary, ms per GB", [1e3 * s / taken.gb for s in at_boundary]),
                row("lost, copied during the step, ms per GB", [1e3 * s / taken.gb for s in during_step]),
            ]
        taken.close()
    show(circumstances(["torch"]), rows, [verdict], as_json=options.json)
    return 1 if options.check and not verdict.met else 0


def row(what: str, figures: Sequence[float]) -> Row:
    """Median with the extremes."""
    ends = [f"{min(figures):.3g}", f"{max(figures):.3g}"] if len(figures) > 1 else ["", ""]
    return {"what": what, "median": f"{statistics.median(figures):.3g}", "min": ends[0], "max": ends[1]}


class Round(NamedTuple):
    """Seconds."""

    flat_s: float
    stall_s: float
    torch_s: float
    rest_s: tuple[float, ...]


class Granted:
    """The agent's place: one slot, free again as soon as it is sealed."""

    slot_error = None
    rank = ALONE
    sequence = 0

    def __init__(self, prepare: Callable[[Slot], None]) -> None:
        self.generation = GenerationInfo(1, "", "")
        self.slot: Slot | None = None
        self.told: Sealed | None = None
        self._prepare, self._grants = prepare, itertools.count(1)

    def ask_slots(self, size: int, prepare: Callable[[Slot], None] | None = None) -> None:
        self.slot = Slot.create(size)
        self._prepare(self.slot)

    def granted(self, used: int, sealed: int) -> tuple[int, Slot] | None:
        return None if self.slot is None else (next(self._grants), self.slot)

    def index_of(self, slot: Slot) -> int:
        return 0

    def send(self, message: Sealed) -> None:
        self.told = message


class Block(nn.Module):
    """A transformer's layer; attention is left out of the arithmetic, which is beside the point here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.project(self.attend(self.before(x)).chunk(3, -1)[0])
        change: torch.Tensor = self.down(nn.functional.gelu(self.up(self.after(x))))
        return x + change


class Snapshots:
    """A GPT's state of so many GB, a slot for it, and a flat block of the same size."""

    def __init__(self, gb: float) -> None:
        width = int((gb * 1e9 / 12 / (12 * LAYERS)) ** 0.5 / 16) * 16
        self.width = width
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.train(1)
        schedule.step()
        self.states = {"model": self.model, "optimizer": self.optimizer, "schedule": schedule}
        self.link = Granted(self._map)
        self.overlap = Overlap(lambda text: None)
        self.stager = Stager(self.link, self.states, self._capture, self._small, self.overlap)  # type: ignore[arg-type]
        self.step = 0
        self.stager.begin()
        self.stager.plan(self.step)
        captured = capture.capture(self.states).tensors
        size = sum(tensor.nbytes for tensor in captured.values())
        self.tensors, self.gb = len(captured), size / 1e9
        self._flat = torch.ones(size, dtype=torch.uint8)
        self._other = Slot.create(size + PAGE)
        self._other.populate()
        self.stall_s()  # the slot's views are made with its first snapshot
        self.flat_copy_s()

    def close(self) -> None:
        """Give the memory back."""
        self._other.close()
        if self.link.slot is not None:
            self.link.slot.close()

    def flat_copy_s(self) -> float:
        """Two threads, half of it each: the limit."""
        into = torch.frombuffer(self._other.buffer, dtype=torch.uint8).data_ptr()
        from_, half = self._flat.data_ptr(), self._flat.nbytes // 2
        other = threading.Thread(target=ctypes.memmove, args=(into, from_, half))
        began = time.perf_counter()
        other.start()
        ctypes.memmove(into + half, from_ + half, self._flat.nbytes - half)
        other.join()
        return time.perf_counter() - began

    def round(self) -> Round:
        """One of each, back to back."""
        return Round(self.flat_copy_s(), self.stall_s(), self.torch_copy_s(), self.without_tensors_s())

    def torch_copy_s(self) -> float:
        """What the stall would be, were the copy left to torch, and nothing else done."""
        assert self.link.slot is not None
        live = capture.capture(self.states).tensors
        _, views = self.stager._views[self.link.slot]
        into = [views[name] for name in live]
        began = time.perf_counter()
        torch._foreach_copy_(into, list(live.values()))
        return time.perf_counter() - began

    def stall_s(self) -> float:
        """One snapshot, copied at its boundary."""
        self.step += 1
        began = time.perf_counter()
        assert self.stager.stage(self.step), "there is always a slot"
        return time.perf_counter() - began

    def without_tensors_s(self) -> tuple[float, ...]:
        """What a snapshot does besides the copy, see `REST`."""
        layout = self.stager._layout
        assert layout is not None
        began = time.perf_counter()
        captured = capture.capture(self.states)
        taken_apart = time.perf_counter()
        assert tuple(captured.specs()) == layout.specs
        compared = time.perf_counter()
        self.stager._record(self.step, captured, layout, compares=False)
        return taken_apart - began, compared - taken_apart, time.perf_counter() - compared

    def settle(self) -> None:
        """The optimizer is about to step."""
        self.stager.settle(self.step, updating=True)

    def train(self, steps: int) -> float:
        """Seconds for some steps of the training, on all cores."""
        tokens = torch.arange(VOCABULARY // 8)
        began = time.perf_counter()
        for _ in range(steps):
            self.model(tokens).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - began

    def _map(self, slot: Slot) -> None:
        """As the link does, in a thread; and how long this one waits for the GIL then."""
        began = time.perf_counter()
        mapping = threading.Thread(target=slot.populate)
        mapping.start()
        self.gil_s, before = 0.0, time.perf_counter()
        while mapping.is_alive():
            time.sleep(0)
            now = time.perf_counter()
            self.gil_s, before = max(self.gil_s, now - before), now
        self.map_s = time.perf_counter() - began

    def _capture(
        self, sure: bool, found: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    ) -> capture.Captured:
        return capture.capture(self.states, sure=sure, found=found)

    def _small(self, step: int, captured: capture.Captured) -> dict[str, Any]:
        return {"step": step, "states": captured.tree, "rng": capture_rng(), "loaders": {}, "extra": {}}


def lost(taken: Snapshots, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds by which a snapshot makes a training of some steps longer: at its boundary, and during the step."""
    handle = register_optimizer_step_pre_hook(lambda *_: taken.settle())
    for _ in range(VALIDATIONS):
        taken.step += 1
        taken.stager.stage(taken.step, overlap=True)
        taken.train(1)
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for overlap, losses in found.items():
            without = taken.train(LATE_STEPS)
            taken.step += 1
            began = time.perf_counter()
            taken.stager.stage(taken.step, overlap=overlap)
            taken.train(LATE_STEPS)
            losses.append(time.perf_counter() - began - without)
    handle.remove()
    assert taken.overlap.on, "nothing but the optimizer writes here"
    return found[False], found[True]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.4, 2.0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--overlap", action="store_true", help="what is lost with and without it; takes minutes")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the bar is missed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
