"""Two ranks that validate after each epoch. Rank 0 waits for nothing in it, as a GPU's CPU.

    torchrun --standalone --nproc-per-node 2 -m tests.support.validating_ranks --curve FILE [--hold-until FILE]

Rank 1 does not begin the last validation before the file is there.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness import Checkpointer

EPOCHS, BATCHES = 2, 3


def main() -> None:
    """Train, and write down what each rank has got in each validation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--hold-until", type=Path)
    told = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(2 * BATCHES, 2)), batch_size=2)
    ckpt = Checkpointer(model=model, optimizer=optimizer, loader=loader)
    for epoch in ckpt.epochs(EPOCHS):
        for (batch,) in ckpt.batches(loader):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if rank == 1 and epoch == EPOCHS - 1 and told.hold_until:
            print("rank 1 stands before the last validation", file=sys.stderr, flush=True)
            while not told.hold_until.exists():
                threading.Event().wait(0.01)
        with ckpt.evaluating():
            number = torch.tensor([epoch if rank == 0 else -1])
            sent = dist.broadcast(number, 0, async_op=True)
            if rank:
                sent.wait()
            with told.curve.with_name(f"{told.curve.name}.{rank}").open("a") as curve:
                curve.write(f"{epoch} {number.item()}\n")
        print(f"rank {rank} has validated epoch {epoch}", file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
