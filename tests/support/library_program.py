"""A training that saves with a library's own means, and resumes with them: nothing in it knows the harness.

Written as the library's documentation shows it. One line for each step to CURVE: its number, and its loss in full
precision. FINAL gets the digest of the parameters.

    python -m tests.support.library_program transformers --out DIR --curve FILE --final FILE [--checkpoint PATH]

    transformers    Trainer: checkpoint-N; goes on from PATH; with --asked, saves on SIGTERM by its own means
    accelerate      Accelerator.save_state: step_N; goes on from PATH
    lightning       ModelCheckpoint, at the end of each epoch: epoch=E-step=N.ckpt; goes on from PATH
    dcp             torch.distributed.checkpoint: step-N; looks for the greatest one that has .metadata
    deepspeed       engine.save_checkpoint, ZeRO 1: global_stepN, and `latest`
    keras           BackupAndRestore, at the end of each epoch: latest.weights.h5 and training_metadata.json
    orbax           CheckpointManager: a directory for each step
    composer        CheckpointSaver: epE-baN-rank0.pt; goes on by autoresume
    fastai          SaveModelCallback, at the end of each epoch: models/model_E.pth; looks for the greatest one
    torch           torch.save: model_N.pt and optimizer_N.pt; looks for the greatest number
    torch-one       torch.save to last.pt, in place

    --hold-at STEP  stay after STEP, which no life before has reached, until a signal comes
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS, SAVE_EVERY, EPOCHS, BATCH, ITEMS = 24, 4, 3, 4, 40


class Rows(Dataset[dict[str, Tensor]]):
    """Random rows, the same each time."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.rand(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()}


class Net(nn.Module):
    """A small model with dropout, whose loss needs the global random states."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(dropout), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": ((self.layers(x).squeeze(1) - labels) ** 2).mean()}


class Told:
    """Where a run writes what it has done, and where it stays for a while."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def step(self, step: int, loss: float) -> None:
        """Write a step down; stay if the test wants that."""
        curve = Path(self._options.curve)
        again = curve.exists() and re.search(rf"^{step} ", curve.read_text(), re.MULTILINE)
        with curve.open("a") as file:
            print(step, loss.hex(), file=file)
        pause = threading.Event()
        while step == self._options.hold_at and not again and not self.asked():
            pause.wait(0.005)

    asked: Callable[[], bool] = staticmethod(lambda: False)
    """Whether a signal has come."""


def by_transformers(options: argparse.Namespace, told: Told) -> nn.Module:
    """The Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tells(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                told.step(state.global_step, logs["loss"])

    arguments = TrainingArguments(
        options.out,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_steps=SAVE_EVERY,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        enable_jit_checkpoint=options.asked,
    )
    model = Net()
    trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[Tells()])
    if options.asked:
        manager = next(one.jit_manager for one in trainer.callback_handler.callbacks if hasattr(one, "jit_manager"))
        told.asked = lambda: manager.is_checkpoint_requested  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=options.checkpoint or None)
    return model


def by_accelerate(options: argparse.Namespace, told: Told) -> nn.Module:
    """A loop as in accelerate's example of checkpointing."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model = Net(dropout=0)  # its own resume in the middle of an epoch draws one random number more than an unbroken run
    loader = DataLoader(Rows(), BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    if options.checkpoint:
        accelerator.load_state(options.checkpoint)
        step = int(Path(options.checkpoint).name.removeprefix("step_"))
    while step < STEPS:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        rows = accelerator.skip_first_batches(loader, done) if done else loader
        for batch in rows:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            told.step(step, loss.item())
            if step % SAVE_EVERY == 0:
                accelerator.save_state(f"{options.out}/step_{step}")
            if step == STEPS:
                break
    return accelerator.unwrap_model(model)  # type: ignore[no-any-return]


def by_lightning(options: argparse.Namespace, told: Told) -> nn.Module:
    """A Trainer with its ModelCheckpoint."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(dropout=0)  # its checkpoints have no random states

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    class Tells(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
            told.step(trainer.global_step, outputs["loss"].item())

    # Without a number of epochs, its own resume at the end of one trains a batch twice.
    module = Module()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [ModelCheckpoint(options.out, save_top_k=-1), Tells()]
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=callbacks, **quiet)
    told.asked = lambda: trainer.received_sigterm  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(Rows(), BATCH), ckpt_path=options.checkpoint or None)
    return module.net


def by_deepspeed(options: argparse.Namespace, told: Told) -> nn.Module:
    """An engine, which knows by itself where its checkpoints are."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed

    model = Net()
    adam = torch.optim.AdamW(model.parameters(), 1e-3)
    config = {"train_batch_size": BATCH, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config, dist_init_required=True)
    rows = list(DataLoader(Rows(), BATCH))  # first: it draws a random number
    _, state = engine.load_checkpoint(options.out)
    if state:
        torch.set_rng_state(state["random"])
    while engine.global_steps < STEPS:
        row = rows[engine.global_steps % len(rows)]
        loss = engine(**{name: value.bfloat16() for name, value in row.items()})["loss"]
        engine.backward(loss)
        engine.step()
        told.step(engine.global_steps, loss.item())
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(options.out, client_state={"random": torch.get_rng_state()})
    return model.float()


def by_keras(options: argparse.Namespace, told: Told) -> nn.Module:
    """A fit with its BackupAndRestore, without dropout: its checkpoints have no random states."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    rows = Rows()
    x, y = (torch.stack([rows[index][name] for index in range(ITEMS)]) for name in ("x", "labels"))
    epochs = [0]

    class Tells(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs[0] = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            told.step(epochs[0] * (ITEMS // BATCH) + batch + 1, float(logs["loss"]))

    keeps = keras.callbacks.BackupAndRestore(options.out, delete_checkpoint=False)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[keeps, Tells()])
    return model  # type: ignore[no-any-return]


def by_orbax(options: argparse.Namespace, told: Told) -> nn.Module:
    """A loop that saves by Orbax."""
    from orbax import checkpoint

    model = Net()
    rows = list(DataLoader(Rows(), BATCH))

    def state() -> dict[str, Any]:
        weights = {name: value.numpy() for name, value in model.state_dict().items()}
        return {"weights": weights, "random": torch.get_rng_state().numpy()}

    manager = checkpoint.CheckpointManager(Path(options.out).absolute())
    step = manager.latest_step() or 0
    if step:
        found = manager.restore(step, args=checkpoint.args.StandardRestore(state()))
        model.load_state_dict({name: torch.tensor(value) for name, value in found["weights"].items()})
        torch.set_rng_state(torch.tensor(found["random"]))
    while step < STEPS:
        loss = model(**rows[step % len(rows)])["loss"]
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
        step += 1
        told.step(step, loss.item())
        if step % SAVE_EVERY == 0:
            manager.save(step, args=checkpoint.args.StandardSave(state()))
            manager.wait_until_finished()
    manager.close()
    return model


def by_composer(options: argparse.Namespace, told: Told) -> nn.Module:
    """A Trainer that resumes by itself."""
    from composer import Callback, ComposerModel, Trainer
    from composer.utils.dist import get_sampler

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return outputs

    class Tells(Callback):  # type: ignore[misc]
        def batch_end(self, state: Any, logger: Any) -> None:
            told.step(int(state.timestamp.batch), state.loss.item())

    rows, model = Rows(), Model()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), 1e-3),
        train_dataloader=DataLoader(rows, BATCH, sampler=get_sampler(rows, shuffle=True)),
        max_duration=f"{STEPS}ba",
        save_folder=options.out,
        save_interval=f"{SAVE_EVERY}ba",
        autoresume=True,
        run_name="a",
        seed=0,
        device="cpu",
        progress_bar=False,
        callbacks=[Tells()],
    )
    trainer.fit()
    return model


def by_fastai(options: argparse.Namespace, told: Told) -> nn.Module:
    """A Learner with its SaveModelCallback, without dropout: its checkpoints have no random states."""
    from fastai.basics import Callback, DataLoaders, Learner
    from fastai.callback.tracker import SaveModelCallback
    from fastai.data.load import DataLoader as Loader

    class Tells(Callback):  # type: ignore[misc]
        def after_batch(self) -> None:
            if self.training:
                told.step(self.epoch * (ITEMS // BATCH) + self.iter + 1, self.loss.item())

    rows = [(row["x"], row["labels"].unsqueeze(0)) for row in map(Rows().__getitem__, range(ITEMS))]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    learner = Learner(
        DataLoaders(Loader(rows, bs=BATCH), Loader(rows, bs=BATCH)),
        model,
        loss_func=nn.MSELoss(),
        path=Path(options.out),
        cbs=[Tells()],
    )
    newest = _greatest(Path(options.out).glob("models/model_*.pth"))
    if newest is not None:
        learner.load(newest.stem, with_opt=True)
    begun = 0 if newest is None else int(newest.stem.removeprefix("model_")) + 1
    keeps = SaveModelCallback(every_epoch=True, with_opt=True)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(EPOCHS, 1e-3, cbs=[keeps], start_epoch=begun)
    return model


def by_hand(options: argparse.Namespace, told: Told) -> nn.Module:
    """A loop that saves with torch's own means."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    save, load = {"dcp": (_save_dcp, _load_dcp), "torch": (_save_two, _load_two), "torch-one": (_save_one, _load_one)}[
        options.library
    ]
    rows = list(DataLoader(Rows(), BATCH))
    step = load(Path(options.out), model, optimizer)
    while step < STEPS:
        loss = model(**rows[step % len(rows)])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        told.step(step, loss.item())
        if step % SAVE_EVERY == 0:
            save(Path(options.out), step, model, optimizer)
    return model


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "random": torch.get_rng_state()}


def _greatest(names: Iterator[Path]) -> Path | None:
    return max(names, key=lambda path: int(re.findall(r"\d+", path.name)[-1]), default=None)


def _save_dcp(out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dcp.save(_state(model, optimizer), checkpoint_id=out / f"step-{step}", no_dist=True)


def _load_dcp(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    newest = _greatest(path.parent for path in out.glob("step-*/.metadata"))
    if newest is None:
        return 0
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # its state is loaded in place, so it has to be there
    optimizer.zero_grad()
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=newest, no_dist=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    torch.set_rng_state(state["random"])
    return int(newest.name.removeprefix("step-"))


def _save_two(out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "random": torch.get_rng_state()}, out / f"model_{step}.pt")
    torch.save(optimizer.state_dict(), out / f"optimizer_{step}.pt")


def _load_two(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    newest = _greatest(out.glob("model_*.pt"))
    if newest is None:
        return 0
    state = torch.load(newest)
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random"])
    step = int(newest.stem.removeprefix("model_"))
    optimizer.load_state_dict(torch.load(out / f"optimizer_{step}.pt"))
    return step


def _save_one(out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"step": step, **_state(model, optimizer)}, out / "last.pt")


def _load_one(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not (out / "last.pt").exists():
        return 0
    state = torch.load(out / "last.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    torch.set_rng_state(state["random"])
    return int(state["step"])


PROGRAMS: dict[str, Callable[[argparse.Namespace, Told], nn.Module]] = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "deepspeed": by_deepspeed,
    "keras": by_keras,
    "orbax": by_orbax,
    "composer": by_composer,
    "fastai": by_fastai,
    "dcp": by_hand,
    "torch": by_hand,
    "torch-one": by_hand,
}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=PROGRAMS)
    parser.add_argument("--out", required=True)
    parser.add_argument("--curve", required=True)
    parser.add_argument("--final", required=True)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--asked", action="store_true")
    parser.add_argument("--hold-at", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    model = PROGRAMS[options.library](options, Told(options))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    Path(options.final).write_text(hashlib.sha256(weights).hexdigest())
    if dist.is_initialized():
        dist.destroy_process_group()  # else torch's threads may outlive what they use: a rank aborted as it ended


if __name__ == "__main__":
    main()
