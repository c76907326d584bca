"""The training that bench_gpu.py measures: a GPT on a CUDA device, whose state everybody saves in turn.

Runs under `harness run`, so that its Checkpointer and the agent are those of a user.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from circumstances import ROOT
from gpt_state import State
from peers import SAVE_PEERS, Durable, one_process_group
from processes import Quiet
from torch import Tensor, nn

sys.path.insert(0, str(ROOT))

from harness import Checkpointer
from harness.ipc.slots import Slot
from harness.trainer.copy import to_slot

COPY, BOUNDARY, OVERLAP = "limit: copy into pinned memory", "ours", "ours, with overlap"
PEERS = ("torch.save", "DCP async_save, thread", "torchsnapshot async_take", "DLRover Flash Checkpoint")
ASYNCHRONOUS = frozenset(PEERS[1:])
STALL, DURABLE, LOST = "stall, s", "durable, s", "training lost, s"
LAYERS, VOCABULARY, CONTEXT, BATCH = 12, 8192, 512, 8
BASELINE_S, PATIENCE_S, POLL_S = 2.0, 120.0, 0.001
DEVICE = torch.device("cuda")


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        change: Tensor = self.down(nn.functional.gelu(self.up(self.after(x))))
        return x + change


class Training:
    """The loop, with a state of about so many GB: float32 parameters, bfloat16 arithmetic, fused AdamW."""

    def __init__(self, gb: float) -> None:
        torch.manual_seed(1)
        width = int((gb * 1e9 / 12 / (12 * LAYERS)) ** 0.5 / 64) * 64
        layers = [Block(width) for _ in range(LAYERS)]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.Linear(width, VOCABULARY)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), device=DEVICE)
        self.step()
        self.state = State(self.model, self.optimizer)

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(self._tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()  # as a loop does that prints it: the CPU is one step ahead at most

    def run(self, seconds: float) -> tuple[float, int]:
        """Train for so long while nobody saves: seconds, and steps."""
        torch.cuda.synchronize()
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.step()
            count += 1
        torch.cuda.synchronize()
        return time.perf_counter() - began, count


class Ours:
    """The Checkpointer, and the agent that is this process's parent."""

    def __init__(self, training: Training, overlap: bool) -> None:
        self._training = training
        self._ckpt = Checkpointer(accumulate=1, overlap=overlap, model=training.model, optimizer=training.optimizer)
        self._ckpt.resume()
        for _ in range(4 if overlap else 2):  # the first makes the slots; with overlap, two are compared
            self._ckpt.save()
            self.boundary()
            step = self._ckpt.step_count
            self.finish(lambda: (self._ckpt.durable_step or -1) >= step)  # noqa: B023  called before the next
            self.settle()

    def save(self) -> Durable:
        self._ckpt.save()
        self._ckpt.step()
        step = self._ckpt.step_count

        def durable() -> bool:
            reached = self._ckpt.durable_step or 0
            if reached > step:
                raise AssertionError(f"the snapshot of step {step} was taken at {reached}: no slot was free")
            return reached == step

        return durable

    def boundary(self) -> None:
        self._ckpt.step()

    def finish(self, durable: Durable) -> None:
        def train() -> None:
            self._training.step()
            self.boundary()

        _wait(durable, train)

    def settle(self) -> None:
        """Wait until the agent has read back what it wrote, deleted what is old, and does nothing any more."""
        quiet = Quiet(os.getppid())
        while not quiet():
            time.sleep(POLL_S)


class Peer:
    """One of the others."""

    def __init__(self, name: str, training: Training, directory: Path) -> None:
        self._peer = SAVE_PEERS[name](directory)
        self._state, self._target = training.state, directory / "target"
        self.close = self._peer.close

    def save(self) -> Durable:
        return self._peer.save(self._state, self._target)

    def boundary(self) -> None: ...

    def settle(self) -> None:
        shutil.rmtree(self._target, ignore_errors=True)


class Flat:
    """One block on the device, one of pinned memory, and nothing but the copy."""

    def __init__(self, size: int) -> None:
        self._from = torch.ones(size, dtype=torch.uint8, device=DEVICE)
        self._into = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy_s(self) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._into.copy_(self._from, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("gb", type=float)
    parser.add_argument("rounds", type=int)
    parser.add_argument("ours", choices=[BOUNDARY, OVERLAP])
    parser.add_argument("peers", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with one_process_group():
        found = measure(options.directory, options.gb, options.rounds, options.ours, options.peers)
    written = options.directory / "result.part"
    written.write_text(json.dumps(found))
    written.rename(options.directory / "result.json")


def measure(directory: Path, gb: float, rounds: int, name: str, names: list[str]) -> dict[str, Any]:
    """What `bench_gpu.py` reads: bytes, seconds of a step, figures by contender, and who is not here."""
    training = Training(gb)
    contenders: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for other in names:
        try:
            contenders[other] = Peer(other, training, directory)
        except Exception as err:  # noqa: BLE001  whatever it is: the row says so
            absent[other] = f"does not run here: {type(err).__name__}: {err}"
    contenders[name] = Ours(training, name == OVERLAP)
    size = training.state.bytes
    flat = Flat(size)
    figures: dict[str, dict[str, list[float]]] = {}
    baselines: list[tuple[float, int]] = []
    trained: dict[str, list[tuple[float, int]]] = {}
    pin_s = [_pin_s(size) for _ in range(3)]
    for number in range(rounds + 1):
        if number <= 1:  # the first round faults memory in, makes plans, and is not counted
            figures = {who: {STALL: [], DURABLE: [], LOST: []} for who in (COPY, *contenders)}
            baselines, trained = [], {who: [] for who in contenders}
        figures[COPY][STALL].append(flat.copy_s())
        print(f"round {number}", flush=True)  # to the session's log
        for who, contender in list(contenders.items()):
            try:
                baselines.append(training.run(BASELINE_S / len(contenders)))
                alone(contender, figures[who])
                trained[who].append(while_training(training, contender))
                print(f"{who}: {figures[who]}, {trained[who][-1]}", flush=True)
            except Exception as err:
                if who == name:
                    raise
                absent[who] = f"failed: {type(err).__name__}: {err}"
                del contenders[who], figures[who]
    step_s = statistics.median(seconds / steps for seconds, steps in baselines)
    for who in contenders:
        figures[who][LOST] = [seconds - steps * step_s for seconds, steps in trained[who]]
    error = [(seconds - steps * step_s) / seconds for seconds, steps in baselines]
    found = {"bytes": size, "step_s": step_s, "pin_s": pin_s, "error": error, "figures": figures, "absent": absent}
    for contender in contenders.values():
        if isinstance(contender, Peer):
            contender.close()
    return found


def alone(contender: Any, figures: dict[str, list[float]]) -> None:
    torch.cuda.synchronize()
    os.sync()
    began = time.perf_counter()
    durable = contender.save()
    figures[STALL].append(time.perf_counter() - began)
    if isinstance(contender, Ours):
        contender.finish(durable)  # a late copy is sealed by the next step
    else:
        _wait(durable, lambda: time.sleep(POLL_S))
    figures[DURABLE].append(time.perf_counter() - began)
    contender.settle()


def while_training(training: Training, contender: Any) -> tuple[float, int]:
    """Seconds and steps, from a save until it is durable."""
    torch.cuda.synchronize()
    os.sync()
    steps = 0

    def train() -> None:
        nonlocal steps
        training.step()
        contender.boundary()
        steps += 1

    began = time.perf_counter()
    _wait(contender.save(), train)
    train()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    contender.settle()
    return took, steps


def _pin_s(size: int) -> float:
    """Seconds to pin a new slot; the link's thread does it, beside the training."""
    slot = Slot.create(size)
    slot.populate()
    began = time.perf_counter()
    unpin = to_slot.pin(slot.buffer, DEVICE)
    took = time.perf_counter() - began
    unpin()
    slot.close()
    return took


def _wait(durable: Durable, meanwhile: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not durable():
        meanwhile()
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not durable after {PATIENCE_S:g} s")


if __name__ == "__main__":
    main()
