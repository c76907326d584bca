"""Train a small classifier with Hugging Face Accelerate, and survive the machine it runs on.

    python examples/with_accelerate.py                    # a few seconds, nothing to download
    harness run -- python examples/with_accelerate.py     # the same, and a spot interruption costs it nothing

After huggingface/accelerate, examples/by_feature/gradient_accumulation.py (Apache 2.0), on two spirals instead of GLUE.
The lines marked `# harness` are new.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from harness import Checkpointer  # harness


def spirals(count: int) -> TensorDataset:
    """Points of two spirals, and which one each is of."""
    angle = torch.rand(count) * 3 * math.pi + 0.5
    label = torch.arange(count) % 2
    turned = angle + label * math.pi
    points = torch.stack([turned.cos(), turned.sin()], 1) * angle[:, None] / 10
    return TensorDataset(points + torch.randn(count, 2) / 50, label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--mixed-precision", choices=("no", "fp16", "bf16"), default="no")
    parser.add_argument("--curve", help="append `step loss` to this file, the loss as an exact hexadecimal float")
    parser.add_argument("--final", help="write the final model to this safetensors file")
    options = parser.parse_args()

    torch.manual_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=options.mixed_precision)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    loader = DataLoader(spirals(1000), batch_size=25, shuffle=True)
    validation = DataLoader(spirals(200), batch_size=50)
    model, optimizer, loader, validation, scheduler = accelerator.prepare(
        model, optimizer, loader, validation, scheduler
    )
    ckpt = Checkpointer(accelerator=accelerator)  # harness

    for epoch in ckpt.epochs(options.epochs):  # harness
        model.train()
        for points, labels in ckpt.batches(loader):  # harness
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if options.curve:
                with Path(options.curve).open("a") as file:
                    file.write(f"{epoch} {ckpt.batch} {loss.item().hex()}\n")

        model.eval()
        right = 0
        with torch.no_grad(), ckpt.evaluating():  # harness
            for points, labels in validation:
                predicted, labels = accelerator.gather_for_metrics((model(points).argmax(1), labels))
                right += int((predicted == labels).sum())
        accelerator.print(f"epoch {epoch}: {right / 2:.1f} % right")

    whole = accelerator.get_state_dict(model)
    if options.final and accelerator.is_main_process:
        save_file(whole, options.final)


if __name__ == "__main__":
    main()
