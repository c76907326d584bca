"""A small real training on several ranks: all that has to be exact after a resume, for each way to divide a model.

A network with BatchNorm and dropout, AdamW, a shuffled DataLoader whose workers augment at random. Each rank writes
`step loss` in full precision to CURVE.RANK, and what it holds at the end to FINAL.RANK.

    torchrun --standalone --nproc-per-node 3 -m tests.support.rank_trainer --curve curve --final final --divide ddp

    --divide ddp     a copy of the model on each rank
    --divide fsdp    fully_shard over all ranks
    --divide hsdp    fully_shard over a mesh of 2 x N/2: replicas of shards
    --divide tp      fully_shard over N/2 times tensor parallelism over 2, with sizes that do not divide
    --device cuda    all on one GPU, with deterministic operations
    --saves WHO      all break off after the first epoch; `one` or `all` of them ask for a snapshot before
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from harness import Checkpointer
from tests.support import delays
from tests.support.noisy import Noisy
from tests.support.patient import patient

EPOCHS, ITEMS, BATCH = 3, 96, 4
WIDTH, HIDDEN = 10, 22


class Net(nn.Module):
    """Two layers, and what differs between ranks."""

    def __init__(self, norm: type[nn.BatchNorm1d | nn.LayerNorm]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = norm(HIDDEN)
        self.down = nn.Linear(HIDDEN, 7)
        self.out = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each row."""
        hidden = nn.functional.dropout(self.norm(self.up(x)).relu(), 0.2, self.training)
        return self.out(self.down(hidden).tanh())  # type: ignore[no-any-return]


def shares(divide: str, ranks: int) -> int:
    """Into how many shares the data is divided: two ranks of tensor parallelism have the same."""
    return ranks // 2 if divide == "tp" else ranks


def steps(divide: str, ranks: int) -> int:
    """Steps of the whole training."""
    return EPOCHS * (ITEMS // shares(divide, ranks) // BATCH)


def divided(how: str, device: str) -> nn.Module:
    """The model, as the ranks hold it together."""
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(Net(nn.BatchNorm1d).to(device))
    net = Net(nn.LayerNorm).to(device)
    if how == "tp":
        mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {
            "down": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),  # 7 columns: 4 and 3
            "out": RowwiseParallel(input_layouts=Shard(-1)),
        }
        parallelize_module(net, mesh["tp"], plan)
        data = mesh["dp"]
    elif how == "hsdp":
        data = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replica", "shard"))
    else:
        data = init_device_mesh(device, (world,))
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=data)
    return fully_shard(net, mesh=data)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """All that was trained, by name: this rank's part of it."""
    for name, value in model.state_dict().items():
        yield name, value.to_local() if isinstance(value, DTensor) else value
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in sorted(state.items()):
            yield f"{index}.{name}", value.to_local() if isinstance(value, DTensor) else value


def main() -> None:
    """Train; leave as the Checkpointer says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--curve", required=True)
    parser.add_argument("--final", required=True)
    parser.add_argument("--divide", choices=["ddp", "fsdp", "hsdp", "tp"], default="ddp")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--hold-until", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--saves", choices=["one", "all"])
    told = parser.parse_args()
    delays.install(delays.TRAINER)
    torch.set_num_threads(1)
    if told.device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
        torch.use_deterministic_algorithms(True)  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = divided(told.divide, told.device)
    count = shares(told.divide, world)
    share = rank * count // world
    torch.manual_seed(100 + share)
    random.seed(100 + share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(Noisy(ITEMS, WIDTH), count, share, seed=3, drop_last=True)
    loader = DataLoader(
        Noisy(ITEMS, WIDTH), batch_size=BATCH, sampler=sampler, num_workers=told.workers, drop_last=True
    )
    ckpt = Checkpointer(model=model, optimizer=optimizer)
    patient(ckpt, hold_at=told.hold_at, hold_until=told.hold_until)
    with Path(f"{told.curve}.{rank}").open("a") as curve:
        for epoch in ckpt.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in ckpt.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x.to(told.device)), y.to(told.device))
                loss.backward()
                optimizer.step()
                curve.write(f"{ckpt.step_count + 1} {loss.item().hex()}\n")
                curve.flush()
            if told.saves is not None:
                if rank == 0 and told.saves == "one":
                    dist.barrier()  # the others have left the loop: else they may be in time for the snapshot
                if rank == 0 or told.saves == "all":
                    ckpt.save()
                break
    if told.saves == "one" and rank != 0:
        dist.barrier()
    if told.saves is not None:
        dist.barrier()
    text = "".join(f"{name} {value.tolist()}\n" for name, value in held(model, optimizer))
    Path(f"{told.final}.{rank}").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
