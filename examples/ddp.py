"""Train on several processes of one machine with DistributedDataParallel, and survive the instance they run on.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py 5
    harness run -- torchrun --standalone --nproc-per-node 2 examples/ddp.py 5

After pytorch/examples, distributed/ddp-tutorial-series/multigpu_torchrun.py (BSD 3-Clause). Its own snapshots are gone,
and with them the steps since the last one. The lines marked `# harness` are new. It runs on GPUs if there is one for
each process, else on the CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from harness import Checkpointer  # harness


class MyTrainDataset(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(0)
        self.data = [(torch.rand(20, generator=generator), torch.rand(1, generator=generator)) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index]


def ddp_setup() -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() > local_rank:
        torch.cuda.set_device(local_rank)
        init_process_group(backend="nccl")
        return torch.device("cuda", local_rank)
    init_process_group(backend="gloo")
    return torch.device("cpu")


class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        train_data: DataLoader[tuple[Tensor, Tensor]],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        curve: Path | None,
    ):
        self.device, self.train_data, self.optimizer, self.curve = device, train_data, optimizer, curve
        self.model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.ckpt = Checkpointer(model=self.model, optimizer=optimizer)  # harness

    def _run_batch(self, source: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch: int) -> None:
        self.train_data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for source, targets in self.ckpt.batches(self.train_data):  # harness
            loss = self._run_batch(source.to(self.device), targets.to(self.device))
            if self.curve is not None and get_rank() == 0:
                with self.curve.open("a") as file:
                    file.write(f"{self.ckpt.step_count + 1} {loss.hex()}\n")

    def train(self, max_epochs: int) -> None:
        for epoch in self.ckpt.epochs(max_epochs):  # harness
            if get_rank() == 0:
                print(f"epoch {epoch}: {len(self.train_data)} steps", flush=True)
            self._run_epoch(epoch)


def main() -> None:
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("total_epochs", type=int, help="total epochs to train the model")
    parser.add_argument("--batch_size", default=32, type=int, help="on each device")
    parser.add_argument("--curve", type=Path, help="append a line 'step loss' for each step of rank 0")
    args = parser.parse_args()
    device = ddp_setup()
    torch.manual_seed(0)
    dataset = MyTrainDataset(2048)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, pin_memory=device.type == "cuda", sampler=sampler)
    Trainer(model, loader, optimizer, device, args.curve).train(args.total_epochs)
    destroy_process_group()


if __name__ == "__main__":
    main()
