"""One training on several ranks in which everybody saves in turn: `bench_ranks.py` starts it under `harness run`.

    torchrun --standalone --nproc-per-node N benchmarks/ranks_session.py DIRECTORY SIZE ROUNDS [PEER…]

All ranks have the same state of a GPT in DistributedDataParallel, and make steps in lockstep. Rank 0 writes
DIRECTORY/result.json; whatever it says of a rank is of the slowest one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_state import Size, State, gpt_state
from limits import Limits, sync_tree
from peers import DcpAsync, DcpAsyncProcess, Durable, Torchsnapshot, _planner, _when, _writer
from torch.nn.parallel import DistributedDataParallel

from harness import Checkpointer
from harness.trainer.meeting import Meeting

OURS, NOTHING, WRITE = "ours", "no save", "limit: O_DIRECT write"
BASE_STEPS, QUICK_STEPS = 30, 2000


class DcpSave:
    """torch.distributed.checkpoint.save: blocks until everything is durable."""

    def __init__(self, _directory: Path) -> None: ...

    def save(self, state: State, target: Path) -> Durable:
        import torch.distributed.checkpoint as dcp

        dcp.save(state.tree(), storage_writer=_writer(target), planner=_planner())
        sync_tree(target)
        return lambda: True

    def close(self) -> None: ...


class NoSave:
    """The control: what the same measurement comes to where nothing is saved."""

    def save(self, _state: State, _target: Path) -> Durable:
        return lambda: True

    def close(self) -> None: ...


class Write:
    """The limit: rank 0 writes as many bytes, which it has at hand. On a virtual machine that takes the cores' time."""

    def __init__(self, size: int) -> None:
        self._limits = Limits(size) if dist.get_rank() == 0 else None
        self._background = ThreadPoolExecutor(1)

    def save(self, _state: State, target: Path) -> Durable:
        if self._limits is None:
            return lambda: True
        return _when(self._background.submit(self._limits.write_s, target))

    def close(self) -> None:
        self._background.shutdown()


PEERS: dict[str, Callable[[Path], Any]] = {
    "DCP save": DcpSave,
    "DCP async_save, thread": lambda directory: DcpAsync(directory, dist.new_group(backend="gloo")),
    "DCP async_save, process": lambda directory: DcpAsyncProcess(directory, dist.new_group(backend="gloo")),
    "torchsnapshot async_take": lambda directory: Torchsnapshot(directory, replicated=["**"]),
}
ASYNCHRONOUS = frozenset(list(PEERS)[1:])


class Session:
    """This rank's part of it."""

    def __init__(self, directory: Path, size: Size, peers: list[str]) -> None:
        self.directory = directory
        self.state = gpt_state(size)
        self.work = torch.rand(256, 256)
        self.held_s = 0.0
        self._watch_meetings()
        wrapped = DistributedDataParallel(self.state.model)
        # Neither is ever run: buckets do not matter, and nothing shows where an optimizer step ends.
        self.ckpt = Checkpointer(model=wrapped, optimizer=self.state.optimizer, accumulate=1, settle_ddp=False)
        self.ckpt.resume()
        self.peers: dict[str, Any] = {NOTHING: NoSave(), WRITE: Write(self.state.bytes)}
        self.absent: dict[str, str] = {}
        for name in peers:
            try:
                self.peers[name] = PEERS[name](directory)
            except ImportError as err:
                self.absent[name] = f"not installed: {err}"
        self.base_s = 0.0

    def _watch_meetings(self) -> None:
        """Sum how long meetings hold this rank at a boundary, but for the snapshot itself."""
        rest = Meeting._rest

        def timed(meeting: Meeting, tell_at: float) -> float:
            began = time.perf_counter()
            told = rest(meeting, tell_at)
            self.held_s += time.perf_counter() - began
            return told

        Meeting._rest = timed  # type: ignore[method-assign, assignment]

    def step(self) -> float:
        """Make one step, in lockstep with the others; how long its boundary took."""
        for _ in range(40):
            self.work = torch.nn.functional.normalize(self.work @ self.work)
        dist.all_reduce(self.work)
        began = time.perf_counter()
        self.ckpt.step()
        return time.perf_counter() - began

    def measure_steps(self) -> None:
        """How long a step takes while nobody saves."""
        times = []
        for _ in range(BASE_STEPS):
            began = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - began)
        self.base_s = statistics.median(times)

    def quick_step_s(self) -> float:
        """How long the boundary of a normal step takes the CPU."""
        began = time.thread_time()  # there may be more ranks than cores
        for _ in range(QUICK_STEPS):
            self.ckpt.step()
        return (time.thread_time() - began) / QUICK_STEPS

    def save(self, name: str, round_: int) -> dict[str, float]:
        """Save once, and train until it is durable: stall, training time lost and time held for the agreement."""
        self.measure_steps()
        self.state.update()
        self.held_s = 0.0
        dist.barrier()
        began, stall, steps = time.perf_counter(), 0.0, 0
        if name == OURS:
            self.ckpt.save()
            asked_at = self.ckpt.step_count
            done: Durable = lambda: (self.ckpt.durable_step or 0) > asked_at  # noqa: E731
        else:
            done = self.peers[name].save(self.state, self.directory / f"{name}-{round_}".replace(" ", "_"))
            stall = time.perf_counter() - began
        while True:
            boundary_s = self.step()
            steps += 1
            stall += boundary_s if name == OURS else 0.0
            all_done = torch.tensor([float(done())])
            dist.all_reduce(all_done, dist.ReduceOp.MIN)
            if all_done.item() and steps >= BASE_STEPS:
                break
        lost = time.perf_counter() - began - steps * self.base_s
        slowest = torch.tensor([stall, lost, self.held_s])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return dict(zip(("stall_s", "lost_s", "held_s"), slowest.tolist(), strict=True))


def main() -> None:
    directory, size, rounds, *peers = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    session = Session(Path(directory), Size.parse(size), peers)
    figures: dict[str, list[dict[str, float]]] = {OURS: [], **{name: [] for name in session.peers}}
    quick, base = [], []
    for round_ in range(int(rounds) + 1):  # the first one warms up
        for name, found in figures.items():
            one = session.save(name, round_)
            if round_:
                found.append(one)
        quick.append(session.quick_step_s())
        base.append(session.base_s)
    if dist.get_rank() == 0:
        result = {
            "bytes": session.state.bytes,
            "step_s": base[1:],
            "quick_step_s": quick[1:],
            "figures": figures,
            "absent": session.absent,
        }
        draft = Path(directory, "result.draft")
        draft.write_text(json.dumps(result))
        draft.rename(Path(directory, "result.json"))
    dist.barrier()


if __name__ == "__main__":
    main()
