"""Two ranks of FSDP2 that generate after each update, and lay out their slots at steps of their own.

    torchrun --standalone --nproc-per-node 2 -m tests.support.generating_ranks

A forward pass without a backward pass leaves the root's parameters gathered. Rank 1 hears what it stores before it ends
step EARLY, and rank 0 not before it has ended step LATE.
"""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness import Checkpointer
from harness.core.messages import Stores
from harness.ipc.channel import Received
from harness.trainer.link import Link

STEPS, EARLY, LATE = 12, 3, 6


def hold(rank: int) -> tuple[threading.Event, threading.Event]:
    """Have the word on what rank 0 stores wait for it. Return what lets it go, and whether it is heard."""
    free, heard = threading.Event(), threading.Event()
    real = Link._on_message

    def held(link: Link, received: Received) -> None:
        stores = isinstance(received.message, Stores)
        if stores and rank == 0:
            free.wait()
        real(link, received)
        if stores:
            heard.set()

    Link._on_message = held  # type: ignore[method-assign]
    return free, heard


def main() -> None:
    """Train, with a forward pass for its own sake before each boundary."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    free, heard = hold(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    for layer in (model[0], model[-1]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    for step in ckpt.steps(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(4, 6))
        if rank == 1 and step + 1 == EARLY:
            heard.wait()
        if rank == 0 and step == LATE:
            free.set()
    print(f"rank {rank} is done", file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
