"""Has a real library write a checkpoint, again and again, and kills it at one system call after the other.

Prints one JSON object per moment: name and number of the call, the names of what counts as whole then, and of what of
it is neither what was there before nor what the library writes when it is let alone. The last one is of a checkpoint
that came to its end.

    python -m tests.support.torn_library transformers FOLDER

The library is imported once; each attempt is a child, forked from a process that has everything ready, to which strace
attaches. Strace kills it as it makes the N-th call of one kind, for each kind that changes files. A library that has
threads of its own does not survive a fork: its children get themselves ready.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.watch.adapter import named
from harness.watch.judge import Circumstances, lack_of, shape_of
from harness.watch.look import Look, candidates
from harness.watch.record import Record
from harness.watch.sound import Sound
from harness.watch.survey import Survey, record_of

CALLS = (
    "openat", "creat", "write", "pwrite64", "writev", "pwritev", "ftruncate", "rename", "renameat", "renameat2",
    "unlink", "unlinkat", "mkdir", "mkdirat", "symlink", "symlinkat", "link", "linkat", "fsync", "fdatasync", "close",
    "fallocate", "copy_file_range", "sendfile",
)  # fmt: skip
FIRST, SECOND = 10, 20


def by_transformers(out: Path) -> Callable[[int], None]:
    """The Trainer's own checkpoint."""
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": self.layer(x).mean()}

    arguments = TrainingArguments(str(out), use_cpu=True, report_to=[])
    trainer = Trainer(Net(), arguments, train_dataset=[{"x": torch.zeros(256), "labels": torch.zeros(1)}])
    trainer.create_optimizer_and_scheduler(100)

    def save(step: int) -> None:
        trainer.state.global_step = step
        trainer._save_checkpoint(trainer.model, trial=None)

    return save


def by_lightning(out: Path) -> Callable[[int], None]:
    """The Trainer's own checkpoint, as ModelCheckpoint names it."""
    from lightning.pytorch import LightningModule, Trainer

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    trainer = Trainer(default_root_dir=out, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(Net())
    return lambda step: trainer.save_checkpoint(out / f"epoch=0-step={step}.ckpt")


def by_accelerate(out: Path) -> Callable[[int], None]:
    """`save_state`, with a registered object, which it writes behind all else."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(nn.Linear(8, 8))
    return lambda step: accelerator.save_state(str(out / f"step_{step}"))


def by_dcp(out: Path) -> Callable[[int], None]:
    """`dcp.save`."""
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(256, 256)
    return lambda step: dcp.save({"model": model.state_dict()}, checkpoint_id=out / f"step-{step}", no_dist=True)


def by_torch(out: Path) -> Callable[[int], None]:
    """`torch.save`, a file for each thing and step."""
    model, optimizer = nn.Linear(256, 256), torch.optim.AdamW(nn.Linear(256, 256).parameters())

    def save(step: int) -> None:
        torch.save(model.state_dict(), out / f"model_{step}.pt")
        torch.save(optimizer.state_dict(), out / f"optimizer_{step}.pt")

    return save


def by_torch_one(out: Path) -> Callable[[int], None]:
    """`torch.save`, one file in place."""
    model = nn.Linear(256, 256)
    return lambda step: torch.save({"step": step, "model": model.state_dict()}, out / "last.pt")


def by_keras(out: Path) -> Callable[[int], None]:
    """What the callback BackupAndRestore keeps."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile(optimizer="adam", loss="mse")
    model.fit(torch.zeros(4, 64), torch.zeros(4, 64), verbose=0)
    backup = keras.callbacks.BackupAndRestore(str(out), save_freq=1)
    backup.set_model(model)

    def save(step: int) -> None:
        model.optimizer.iterations.assign(step)
        backup._current_epoch = step
        backup._save_model()

    return save


def by_deepspeed(out: Path) -> Callable[[int], None]:
    """`engine.save_checkpoint`, with ZeRO 1."""
    import deepspeed

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    model = nn.Linear(256, 256)
    adam = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config, dist_init_required=True)

    def save(step: int) -> None:
        engine.global_steps = step
        engine.save_checkpoint(str(out))

    return save


def by_orbax(out: Path) -> Callable[[int], None]:
    """`CheckpointManager.save`."""
    import numpy as np
    from orbax import checkpoint

    def save(step: int) -> None:
        manager = checkpoint.CheckpointManager(out)
        manager.save(step, args=checkpoint.args.StandardSave({"weights": np.ones((64, 64))}))
        manager.wait_until_finished()
        manager.close()

    return save


def by_composer(out: Path) -> Callable[[int], None]:
    """What its CheckpointSaver does at the end of a batch."""
    from composer import ComposerModel, Trainer
    from composer.callbacks import CheckpointSaver

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, batch: Any) -> Any:
            return self.layer(batch)

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.mean()

    trainer = Trainer(model=Model(), save_folder=str(out), run_name="a", device="cpu", progress_bar=False)
    saver = next(each for each in trainer.state.callbacks if isinstance(each, CheckpointSaver))

    def save(step: int) -> None:
        for left in Path(saver.tmp_dir_for_symlink.name).iterdir():
            left.unlink()  # by the child before: its parent has not counted it
        trainer.state.timestamp = trainer.state.timestamp.copy(batch=step)
        saver._save_checkpoint(trainer.state, trainer.logger)

    return save


def by_fastai(out: Path) -> Callable[[int], None]:
    """What its SaveModelCallback does at the end of an epoch."""
    from fastai.basics import DataLoaders, Learner

    learner = Learner(DataLoaders([], []), nn.Linear(256, 256), loss_func=nn.MSELoss(), path=out)
    learner.create_opt()
    return lambda step: learner.save(f"model_{step}", with_opt=True)


Save = Callable[[int], None]


@dataclass(frozen=True)
class Library:
    """How a library saves.

    Attributes:
        adapter: of its layout.
        prepare: gets a training ready in a folder, and returns what saves a step.
        module: it has threads of its own: this is imported once, and each child prepares for itself.
    """

    adapter: str
    prepare: Callable[[Path], Save]
    module: str = ""


LIBRARIES: Mapping[str, Library] = {
    "transformers": Library("transformers", by_transformers),
    "accelerate": Library("accelerate", by_accelerate),
    "lightning": Library("lightning", by_lightning),
    "dcp": Library("dcp", by_dcp),
    "torch": Library("torch-save", by_torch),
    "torch-one": Library("torch-save-one", by_torch_one),
    "keras": Library("keras", by_keras),
    "deepspeed": Library("deepspeed", by_deepspeed, module="deepspeed"),
    "orbax": Library("orbax", by_orbax, module="orbax.checkpoint"),
    "composer": Library("composer", by_composer),
    "fastai": Library("fastai", by_fastai),
}


def whole(root: Path, adapter_name: str, record: Record) -> dict[str, str]:
    """Digest of each checkpoint that counts as whole, at rest or while the writer stands still, by its name."""
    found = {one.candidate.name: one.candidate for one in Survey.of(root, adapter_name, record).judged if not one.lack}
    look, adapter = Look.at(root), named(adapter_name)
    all_of_them = candidates(look, adapter)
    live = Circumstances(before=look, ranks=1, shape=frozenset(record.shape))
    for one in all_of_them:
        if lack_of(one, look, adapter, all_of_them, Sound(), live) is None:
            found[one.name] = one
    return {name: _digest(root, [*one.files]) for name, one in found.items()}


def _digest(root: Path, paths: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        data = (root / path).read_bytes()
        digest.update(f"{path} {len(data)} ".encode() + data)
    return digest.hexdigest()


def comes_to_its_end(prepare: Callable[[], Save], step: int, call: str = "", number: int = 0) -> bool:
    """Save in a child that dies as one of its threads makes this call; return whether it came to its end.

    Args:
        prepare: returns what saves a step.
        step: which to save.
        call: the name of a system call; "" to let the child live.
        number: which of them, from 1.
    """
    (go, ready), (is_prepared, prepared) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ready)
        save = prepare()
        os.write(prepared, b".")
        os.read(go, 1)
        random.seed(0)  # Python seeds it in a fork, and checkpoints have its state
        save(step)
        os._exit(0)
    os.close(go)
    os.close(prepared)
    os.read(is_prepared, 1)
    os.close(is_prepared)
    tracer = None
    if call:
        inject = f"inject={call}:signal=KILL:when={number}"
        words = ["strace", "-f", "-p", str(pid), "-e", f"trace={call}", "-e", inject, "-o", "/dev/null"]
        tracer = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        for line in tracer.stderr:
            if re.search(r"Process \d+ attached", line):
                break
    os.close(ready)
    _, status = os.waitpid(pid, 0)
    if tracer is not None:
        tracer.communicate()
    return os.waitstatus_to_exitcode(status) == 0


def main() -> None:
    """Kill it at every N-th call."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    library = LIBRARIES[options.library]
    adapter_name = library.adapter
    out, begun = options.folder / "out", options.folder / "begun"
    out.mkdir(parents=True)
    if library.module:
        importlib.import_module(library.module)
    ready = None if library.module else library.prepare(out)

    def prepare() -> Save:
        return ready or library.prepare(out)

    if ready is None:
        assert comes_to_its_end(prepare, FIRST), "it saves"
    else:
        ready(FIRST)
    newest = candidates(Look.at(out), named(adapter_name))[-1]
    record = record_of(newest, named(adapter_name), FIRST, 1)
    assert record.shape == tuple(sorted(shape_of(newest)))
    shutil.copytree(out, begun, symlinks=True)

    def again(call: str = "", number: int = 0) -> bool:
        shutil.rmtree(out)
        shutil.copytree(begun, out, symlinks=True)
        return comes_to_its_end(prepare, SECOND, call, number)

    before = whole(out, adapter_name, record)
    assert again(), "it saves"
    after = whole(out, adapter_name, record)
    for call in CALLS:
        number = 1
        while not again(call, number):
            found = whole(out, adapter_name, record)
            torn = sorted(name for name, digest in found.items() if digest not in (before.get(name), after.get(name)))
            print(json.dumps({"call": call, "number": number, "whole": sorted(found), "torn": torn}), flush=True)
            number += 1
    print(json.dumps({"before": before, "after": after}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
