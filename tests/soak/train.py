"""What the soak trains: a byte-level GPT with more state than most, on one CPU thread, so that runs can be compared.

AdamW with two parameter groups, a cyclic learning rate, gradient clipping, dropout, a moving average of the weights,
hashed trigram counts (a buffer that makes a snapshot more than one part of a multipart upload), a shuffled DataLoader
whose two workers draw random crops. Told by the environment, so that its command line is the same in every life:

    SOAK_CURVE    append a line "step loss learning-rate pid monotonic-seconds" for every step
    SOAK_FINAL    write the final weights, their average, the counts and the optimizer's state
    SOAK_EPOCHS   train so many epochs
    SOAK_PACE_S   wait so long in every step: what a larger model would compute
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from examples.gpt import BATCH, GPT, Crops, save, standard_library
from harness import Checkpointer

STEPS_PER_EPOCH = 100
CYCLE_STEPS = 500  # of the learning rate: it does not depend on how long is trained
SLOTS = 1 << 22  # float32: 16 MiB
WIDTH = 32


class Counting(nn.Module):
    """A GPT that also sees how often each trigram came by so far."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(WIDTH, layers=1)
        self.gain = nn.Parameter(torch.zeros(256))
        self.register_buffer("counts", torch.zeros(SLOTS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of predicting `y` after `x`, each weighted by how rare what came before is."""
        padded = F.pad(x, (2, 0))
        hashed = (padded[:, :-2] * 66_049 + padded[:, 1:-1] * 257 + x) * 2_654_435_761 % SLOTS
        seen = self.counts[hashed]
        if self.training:
            self.counts.index_add_(0, hashed.flatten(), torch.ones(hashed.numel()))
        rarity = (1 + torch.tanh(self.gain[x]) / (1 + seen)).mean()
        loss: Tensor = self.gpt(x, y)
        return loss * rarity


class Average:
    """An exponential moving average of parameters: anything with these two methods is state."""

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        self.model, self.decay = model, decay
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        for name, parameter in self.model.named_parameters():
            self.values[name].lerp_(parameter, 1 - self.decay)

    def state_dict(self) -> dict[str, object]:
        return {"updates": self.updates, "values": self.values}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.updates = state["updates"]  # type: ignore[assignment]
        for name, value in state["values"].items():  # type: ignore[attr-defined]
            self.values[name].copy_(value)


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices decay, vectors do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}]


def main() -> None:
    epochs, pace_s = int(os.environ["SOAK_EPOCHS"]), float(os.environ["SOAK_PACE_S"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    crops = Crops(standard_library(), STEPS_PER_EPOCH * BATCH)
    loader = DataLoader(crops, batch_size=BATCH, shuffle=True, num_workers=2)
    model = Counting()
    average = Average(model)
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CyclicLR(
        optimizer, base_lr=3e-4, max_lr=3e-3, step_size_up=CYCLE_STEPS // 2, cycle_momentum=False
    )
    ckpt = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, average=average)

    never = threading.Event()
    with Path(os.environ["SOAK_CURVE"]).open("a", buffering=1) as curve:
        for _epoch in ckpt.epochs(epochs):
            for x, y in ckpt.batches(loader):
                loss = model(x, y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                average.update()
                rate = scheduler.get_last_lr()[0]
                scheduler.step()
                told = f"{scheduler.last_epoch} {float(loss).hex()} {rate.hex()}"
                curve.write(f"{told} {os.getpid()} {time.monotonic():.3f}\n")
                never.wait(pace_s)

    model.register_parameter("seen", nn.Parameter(model.counts.clone()))
    for name, value in average.values.items():
        model.register_parameter(f"average.{name}".replace(".", "/"), nn.Parameter(value))
    save(Path(os.environ["SOAK_FINAL"]), model, optimizer)


if __name__ == "__main__":
    main()
