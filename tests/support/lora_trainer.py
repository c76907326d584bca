"""A real adapter training on harness.Checkpointer: a frozen network of 8 MB, and beside each layer a pair of thin ones.

Writes `step loss` in full precision for each step to --curve, and a digest of all that there is in the end to --final.

    python -m tests.support.lora_trainer --curve curve.txt --final final.txt
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import Checkpointer
from tests.support import delays
from tests.support.patient import patient

STEPS, EVERY = 16, 4
LAYERS, WIDTH, RANK = 8, 512, 4


class Adapted(nn.Module):
    """A linear layer that stays as it is, and a low-rank correction that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The frozen answer, corrected."""
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Every bit of the model and of the optimizer's state, by name."""
    told = hashlib.sha256()
    tensors = dict(model.state_dict())
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in state.items()}
    for name, value in sorted(tensors.items()):
        told.update(name.encode() + value.contiguous().numpy().tobytes())
    return told.hexdigest()


def main() -> None:
    """Train; leave as the Checkpointer says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--final", type=Path, required=True)
    options = parser.parse_args()
    delays.install(delays.TRAINER)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*(Adapted() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    ckpt = patient(Checkpointer(model=model, optimizer=optimizer))
    with options.curve.open("a") as curve:
        for step in ckpt.steps(STEPS):
            x = torch.randn(4, WIDTH)
            loss = (model(x) - x.flip(0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.write(f"{step} {loss.item().hex()}\n")
            curve.flush()
    options.final.write_text(digest(model, optimizer))


if __name__ == "__main__":
    sys.exit(main())
