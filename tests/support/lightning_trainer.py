"""A small training by Lightning, for what it does in one mode: all that has to be exact after a resume.

A network with dropout and BatchNorm, data that is augmented from the global random states, values that are logged for
each step and for each epoch. It writes a line for each loss and each epoch's values, in full precision, to CURVE, and
what it holds at the end to FINAL.

    python -m tests.support.lightning_trainer --curve curve --final final --mode validate [--plain]

    --mode validate     validates in the middle of each epoch; sums torchmetrics over an epoch, and logs some values in
                        its first batch only; a datamodule and a callback have states of their own; curves for
                        TensorBoard and as CSV, Lightning's two best checkpoints, and LightningCLI's configuration, in a
                        relative directory
    --mode manual       two optimizers, stepped by the module itself; two loaders of different lengths
    --mode plateau      a scheduler that looks at the validation, and an early stop by it; 3 batches make a step, and
                        gradients are clipped
    --mode workers      2 workers, which stay, and a sampler of several ranks; Lightning's own checkpoints beside it,
                        and its best one validated after the training
    --mode steps        ends after 25 steps, in the middle of an epoch; a scheduler asks how many steps there will be,
                        before the loop begins
    --mode averaged     validates with averaged weights
    --mode stops        the same, and ends after 24 steps, at a snapshot in the middle of an epoch
    --mode scheduled    callbacks of Lightning's let 3 batches make a step from the second epoch on, and train layers
                        that were frozen before, a BatchNorm among them
    --mode fsdp2        shards the model over the 2 ranks, by Lightning's strategy for it
    --package NAME      pytorch_lightning instead of lightning.pytorch
    --device cuda       on a GPU, in half precision with a scaler, by deterministic operations
    --plain             without the harness
"""

from __future__ import annotations

import importlib
import os
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.support.framework_trainer import options_of, prepare, write_final

ITEMS, BATCH, EPOCHS = 44, 4, 3
MODES = ("plain", "validate", "manual", "plateau", "workers", "steps", "averaged", "stops", "scheduled", "fsdp2")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Points that are moved and scaled at random, by the global generators of two libraries."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x * (1 + random.random() / 10) + torch.rand(6) / 10, x.sum().sign()


def loader(count: int, workers: int = 0, *, shuffle: bool = True) -> DataLoader[Any]:
    """Return a loader of so many points."""
    return DataLoader(Noisy(count), BATCH, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0)


def network(norm: type[nn.BatchNorm1d | nn.LayerNorm]) -> nn.Module:
    """Return what is trained."""
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def module_of(pl: Any, mode: str, out: Any) -> Any:
    """Return the module that is trained."""

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network(nn.LayerNorm if mode == "fsdp2" else nn.BatchNorm1d)
            self.automatic_optimization = mode != "manual"
            self.losses: list[Tensor] = []
            if mode == "validate":
                self.mean = torchmetrics.MeanMetric()
                self.both = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])

        def configure_model(self) -> None:
            if mode == "fsdp2":
                for part in (self.net[0], self.net[-1], self.net):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x).squeeze(1), y)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batches = list(batch.values()) if isinstance(batch, dict) else [batch]
            loss = sum((self.loss(each) for each in batches), torch.zeros((), device=self.device))
            print("train", self.current_epoch, batch_idx, self.global_step, loss.item().hex(), file=out, flush=True)
            if mode == "manual":
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batches[0]) + loss.detach())
                    optimizer.step()
            self.losses.append(loss.detach())
            self.log("loss", loss, on_step=True, on_epoch=True, batch_size=BATCH)
            if mode == "validate":
                self.mean(loss.detach())
                self.both(loss.detach())
                self.log("mean", self.mean, on_step=False, on_epoch=True)
                self.log_dict(self.both, on_step=False, on_epoch=True)
                if batch_idx == 0:
                    self.log("first", loss, on_epoch=True, reduce_fx="max", batch_size=BATCH)
            return loss if self.automatic_optimization else None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            print("val", self.current_epoch, batch_idx, self.global_step, loss.item().hex(), file=out, flush=True)
            self.log("val_loss", loss, batch_size=BATCH)

        def on_validation_start(self) -> None:
            for logger in self.trainer.loggers:
                logger.save()  # else a kill loses values that come from before the snapshot

        def on_train_epoch_end(self) -> None:
            shown = {key: value.item().hex() for key, value in sorted(self.trainer.callback_metrics.items())}
            print("epoch", self.current_epoch, shown, torch.stack(self.losses).sum().item(), file=out, flush=True)
            self.losses.clear()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=0.01)
            schedulers = torch.optim.lr_scheduler
            if mode == "manual":
                return [torch.optim.SGD(self.net[0].parameters(), lr=0.01, momentum=0.9), optimizer]
            if mode == "plateau":
                scheduler: Any = schedulers.ReduceLROnPlateau(optimizer, patience=0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
            if mode == "steps":
                total = int(self.trainer.estimated_stepping_batches)
                scheduler = schedulers.OneCycleLR(optimizer, max_lr=0.02, total_steps=total)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            return [optimizer], [schedulers.StepLR(optimizer, 1, 0.7)]

    return Module()


def data_of(pl: Any, mode: str, out: Any) -> dict[str, Any]:
    """Return what `fit` gets."""
    workers = 2 if mode == "workers" else 0
    train: Any = loader(ITEMS, workers)
    if mode == "workers":
        sampler = DistributedSampler(train.dataset, num_replicas=1, rank=0, seed=3)
        train = DataLoader(train.dataset, BATCH, sampler=sampler, num_workers=2, persistent_workers=True)
    if mode == "manual":
        train = {"long": train, "short": loader(16)}
    validation = loader(12, shuffle=False)

    class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        seen = 0

        def train_dataloader(self) -> Any:
            return train

        def val_dataloader(self) -> Any:
            return validation

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen += 1
            print("seen", self.seen, file=out, flush=True)
            return batch

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    if mode == "validate":
        return {"datamodule": Data()}
    return {"train_dataloaders": train, "val_dataloaders": validation}


def callbacks_of(pl: Any, mode: str, out: Any, folder: Path) -> list[Any]:
    """Return the callbacks that are not ours."""

    class Counting(pl.Callback):  # type: ignore[misc, name-defined]
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1
            print("counted", self.batches, file=out, flush=True)

        def state_dict(self) -> dict[str, Any]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.batches = state["batches"]

    class Thawing(pl.callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[:2], train_bn=False)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[:2], optimizer)

    if mode == "plateau":
        return [pl.callbacks.EarlyStopping("val_loss", patience=3)]
    if mode == "scheduled":
        return [pl.callbacks.GradientAccumulationScheduler({1: 3}), Thawing()]
    if mode == "workers":
        return [pl.callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)]
    if mode in ("averaged", "stops"):
        average = getattr(pl.callbacks, "EMAWeightAveraging", None)  # not in 2.5
        return [] if average is None else [average(decay=0.9)]
    best = {"monitor": "val_loss", "save_top_k": 2, "save_last": "link"}
    if mode != "validate":
        return []
    cli = importlib.import_module(f"{pl.__name__}.cli")
    return [Counting(), pl.callbacks.ModelCheckpoint(**best), cli.SaveConfigCallback(Configuration(), "written")]


class Configuration:
    """Writes what stands for the configuration, as the parser of LightningCLI does."""

    def save(self, text: str, path: str, **options: Any) -> None:
        Path(path).write_text(text)


def show_logged(trainer: Any, out: Any) -> None:
    """Write down the CSV file, and what the checkpoints' callback knows."""
    checkpoints = trainer.checkpoint_callback
    scores = [*sorted(checkpoints.best_k_models.values()), checkpoints.best_model_score, checkpoints.current_score]
    print("scores", [score.item().hex() for score in scores], file=out)
    for line in Path(trainer.log_dir, "metrics.csv").read_text().splitlines():
        print("logged", line, file=out)
    print("configured", Path(trainer.log_dir, "config.yaml").read_text(), file=out)


OPTIONS: dict[str, dict[str, Any]] = {
    "validate": {"val_check_interval": 4, "enable_checkpointing": True, "log_every_n_steps": 1},
    "plateau": {"max_epochs": 8, "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "steps": {"max_steps": 25, "max_epochs": -1},
    "stops": {"max_steps": 24, "max_epochs": -1},
    "workers": {"enable_checkpointing": True},
    "fsdp2": {"devices": 2},
}


def main() -> None:
    """Train."""
    parser = options_of(MODES)
    parser.add_argument("--package", default="lightning.pytorch")
    options = parser.parse_args()
    prepare(options)
    warnings.simplefilter("ignore")
    pl = importlib.import_module(options.package)

    pl.seed_everything(1)
    with options.curve.open("a") as out:
        module = module_of(pl, options.mode, out)
        callbacks = callbacks_of(pl, options.mode, out, options.curve.with_name("checkpoints"))
        if not options.plain:
            name = options.package.partition(".")[0]
            callbacks.insert(0, importlib.import_module(f"harness.integrations.{name}").HarnessCallback())
        defaults = {
            "max_epochs": EPOCHS, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "accelerator": options.device, "devices": 1,
        }  # fmt: skip
        if options.device == "cuda":
            defaults |= {"precision": "16-mixed", "deterministic": True}
        if options.mode == "fsdp2":
            defaults["strategy"] = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if options.mode == "validate":
            logs = os.path.relpath(options.curve.with_name("logs"))
            defaults |= {"logger": [pl.loggers.CSVLogger(logs), pl.loggers.TensorBoardLogger(logs, "drawn")]}
            defaults["default_root_dir"] = logs
        trainer = pl.Trainer(**(defaults | OPTIONS.get(options.mode, {})), callbacks=callbacks)
        trainer.fit(module, **data_of(pl, options.mode, out))
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        print("end", trainer.global_step, trainer.current_epoch, rates, torch.rand(()).item(), file=out)
        if options.mode == "validate":
            show_logged(trainer, out)
        if options.mode == "workers":
            trainer.validate(dataloaders=loader(12, shuffle=False), ckpt_path="best", verbose=False)
            print("best", trainer.checkpoint_callback.best_model_path, file=out)
    write_final(module, options.final, is_sharded=options.mode == "fsdp2")


if __name__ == "__main__":
    main()
