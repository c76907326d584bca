"""A small training by transformers' Trainer, for what it does in one mode: all that has to be exact after a resume.

A tiny GPT-2 with dropout, data that is augmented from the global random states, a log of each step. It writes a line
for each loss, each evaluated batch and each log, in full precision, to CURVE, and what it holds at the end to FINAL.

    python -m tests.support.hf_trainer --curve curve --final final --mode eval [--plain]

    --mode evaluate      evaluates every 3 steps; attaches to the Trainer after it is made
    --mode epochs        evaluates before the first step, and at the end of each epoch; 3 batches make a step
    --mode workers       2 workers, which stay; ends after 25 steps, in the middle of an epoch
    --mode lora          trains adapters of PEFT on a frozen base
    --mode early         stops early by its evaluations, and loads its best checkpoint
    --mode twice         calls train() twice, each with an evaluation before it, and noise in its embeddings
    --mode stops         a callback ends the first epoch after 4 steps, and the training ends after 24: both at a
                         snapshot, in the middle of an epoch; it logs and evaluates at the end of each
    --mode own           a subclass weighs each loss by what it has counted since its first one; as an epoch begins,
                         callbacks draw what is trained, let a rate of dropout fall, and log more seldom
    --mode jit           with the Trainer's own just-in-time checkpoint
    --mode fsdp2         shards the model over the ranks, by the Trainer's own switch
    --mode tensorboard   logs to TensorBoard, in a directory that the Trainer names by the clock
    --epochs N           instead of 3, where the mode does not set them
    --device cuda        on a GPU, in half precision with a scaler, by deterministic operations
    --plain              without the harness
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from tests.support.framework_trainer import options_of, prepare, write_final
from tests.support.shard_on_cpu import shard_on_cpu

ITEMS, BATCH, EPOCHS = 44, 4, 3
STEPS = EPOCHS * ITEMS // BATCH
TIMES = ("runtime", "per_second", "step_time")


class Noisy(Dataset[dict[str, Tensor]]):
    """Sequences that are turned around and rotated at random, by the global generators of two libraries."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 97, (16,), generator=torch.Generator().manual_seed(index))
        if random.random() < 0.5:
            ids = ids.flip(0)
        if torch.rand(()) < 0.3:
            ids = ids.roll(1)
        return {"input_ids": ids, "labels": ids}


class Telling(Trainer):  # type: ignore[misc]
    """Writes down each loss."""

    out: Any

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss."""
        found = super().compute_loss(*args, **kwargs)
        loss = found[0] if isinstance(found, tuple) else found
        phase = "train" if self.model.training else "eval"
        print(phase, self.state.global_step, loss.item().hex(), file=self.out, flush=True)
        return found


class Weighing(Telling):
    """Weighs a loss by those before it. Its names are those of what the Trainer keeps in its state, or made late."""

    best_metric = 9.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, weighed in the training."""
        found = super().compute_loss(*args, **kwargs)
        if not self.model.training:
            return found
        if not hasattr(self, "window"):
            self.window: deque[float] = deque(maxlen=5)
        self.best_metric = min(self.best_metric, found.item())
        self.window.append(found.item())
        print("weighs", self.best_metric, list(self.window), file=self.out, flush=True)
        return found * (1 + self.best_metric + sum(self.window) / len(self.window))


class Cools(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Halves the dropout as an epoch begins, and sets what only this process has."""

    rate = 0.4

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change the rate."""
        self.rate /= 2
        self.share = 1.0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Use it."""
        model.transformer.drop.p = self.rate * self.share

    def state(self) -> dict[str, Any]:
        """What a checkpoint has."""
        return {"args": {}, "attributes": {"rate": self.rate}}


class Draws(TrainerCallback):  # type: ignore[misc]
    """Draws the layer that is trained, as an epoch begins; lets weights decay more, and logs less. Without a state."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Draw."""
        state.logging_steps += 1
        drawn = random.randrange(2)
        for number, layer in enumerate(model.transformer.h):
            layer.requires_grad_(number == drawn)
        optimizer.param_groups[0]["weight_decay"] += 0.1


class Logged(TrainerCallback):  # type: ignore[misc]
    """Writes down each log."""

    def __init__(self, out: Any) -> None:
        self.out = out

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write all but what depends on the clock."""
        shown = [(key, value) for key, value in sorted(logs.items()) if not any(word in key for word in TIMES)]
        print("log", state.global_step, shown, file=self.out, flush=True)


class EndsEpoch(TrainerCallback):  # type: ignore[misc]
    """Ends the pass over the data after the fourth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide."""
        control.should_epoch_stop = state.global_step == 4


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluate": {"eval_strategy": "steps", "eval_steps": 3},
    "epochs": {"eval_on_start": True, "eval_strategy": "epoch", "logging_steps": 2, "gradient_accumulation_steps": 3},
    "workers": {
        "dataloader_num_workers": 2, "dataloader_persistent_workers": True,
        "max_steps": 25, "lr_scheduler_type": "cosine", "warmup_steps": 5,
    },
    "lora": {},
    "early": {
        "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4, "num_train_epochs": 6,
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
    },
    "twice": {"eval_on_start": True, "neftune_noise_alpha": 5.0},
    "stops": {
        "max_steps": 24, "logging_strategy": "epoch", "eval_strategy": "epoch", "ignore_data_skip": True,
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
    },
    "own": {},
    "jit": {"enable_jit_checkpoint": True},
    "fsdp2": {
        "fsdp": "full_shard",
        "fsdp_config": {
            "fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
        },
    },
    "tensorboard": {"report_to": ["tensorboard"]},
}  # fmt: skip


def main() -> None:
    """Train."""
    parser = options_of(MODES)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options = parser.parse_args()
    prepare(options)
    torch.manual_seed(0)
    random.seed(0)
    size = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=97, bos_token_id=0, eos_token_id=0, **size))
    if options.mode == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1))
    with options.curve.open("a") as out:
        train(model, options, out)
    write_final(model, options.final, is_sharded=options.mode == "fsdp2")


def train(model: Any, options: argparse.Namespace, out: Any) -> None:
    """Train a model as the mode says."""
    if options.mode == "fsdp2":
        shard_on_cpu()
    more: dict[str, list[Any]] = {
        "early": [EarlyStoppingCallback(2)],
        "stops": [EndsEpoch()],
        "own": [Cools(), Draws()],
    }
    callbacks = more.get(options.mode, [])
    ours = None
    if not options.plain:
        from harness.integrations.transformers import HarnessCallback, attach

        ours = attach
        callbacks += [] if options.mode == "evaluate" else [HarnessCallback(keeps_output_dir=True)]
    defaults = {
        "output_dir": str(options.curve.with_name("output")), "per_device_train_batch_size": BATCH, "report_to": [],
        "num_train_epochs": options.epochs, "learning_rate": 1e-3, "logging_steps": 1, "disable_tqdm": True, "seed": 7,
        "save_strategy": "no", "use_cpu": options.device == "cpu", "fp16": options.device == "cuda",
    }  # fmt: skip
    trainer = (Weighing if options.mode == "own" else Telling)(
        model=model,
        args=TrainingArguments(**(defaults | MODES[options.mode])),
        train_dataset=Noisy(ITEMS),
        eval_dataset=Noisy(10),
        callbacks=[*callbacks, Logged(out)],
    )
    trainer.out = out
    if options.mode == "evaluate" and ours is not None:
        ours(trainer)
    for _ in range(2 if options.mode == "twice" else 1):
        result = trainer.train()
        print("result", result.global_step, result.training_loss.hex(), file=out, flush=True)
    state = trainer.state
    print("state", state.best_metric, len(state.log_history), random.random(), torch.rand(()).item(), file=out)


if __name__ == "__main__":
    main()
