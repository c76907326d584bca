"""Train a small autoencoder with Lightning, and survive the machine it runs on.

    python examples/with_lightning.py                    # some seconds, nothing to download
    harness run -- python examples/with_lightning.py     # the same, and a spot interruption costs it nothing

After Lightning-AI/pytorch-lightning, examples/pytorch/basics/autoencoder.py (Apache 2.0), on random pictures instead of
MNIST. The lines marked `# harness` are new.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer, seed_everything
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.integrations.lightning import HarnessCallback  # harness


def pictures(count: int) -> TensorDataset:
    """Pictures of a bright square on noise."""
    images = torch.rand(count, 1, 16, 16) / 4
    for image in images:
        row, column = torch.randint(0, 10, (2,)).tolist()
        image[0, row : row + 6, column : column + 6] += 0.7
    return TensorDataset(images)


class AutoEncoder(LightningModule):
    def __init__(self, curve: str | None):
        super().__init__()
        self.curve = curve
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256))
        self.error = torchmetrics.MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noisy = batch[0] + torch.randn_like(batch[0]) / 10
        loss = nn.functional.mse_loss(self.decoder(self.encoder(noisy)), batch[0].flatten(1))
        self.error(loss.detach())
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.tell("step", self.global_step, loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0].flatten(1))
        self.log("validation", loss)
        self.tell("validation", self.global_step, loss)

    def on_train_epoch_end(self) -> None:
        self.tell("epoch", self.current_epoch, self.trainer.callback_metrics["error"])

    def tell(self, what: str, number: int, value: Tensor) -> None:
        if self.curve:
            with Path(self.curve).open("a") as file:
                file.write(f"{what} {number} {value.item().hex()}\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", default="auto", help="how many; with torchrun, the processes of one machine")
    parser.add_argument("--curve", help="append each loss to this file, as an exact hexadecimal float")
    parser.add_argument("--final", help="write the final model to this safetensors file")
    options = parser.parse_args()

    seed_everything(1)
    model = AutoEncoder(options.curve)
    trainer = Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        val_check_interval=0.5,
        logger=False,
        enable_checkpointing=False,  # the harness saves, and resumes
        callbacks=[HarnessCallback()],  # harness
    )
    trainer.fit(model, DataLoader(pictures(512), 16, shuffle=True), DataLoader(pictures(64), 32))
    if options.final and trainer.is_global_zero:
        save_model(model, options.final)


if __name__ == "__main__":
    main()
