"""Train a small GPT-2 with the Trainer of Hugging Face transformers, and survive the machine it runs on.

    python examples/huggingface.py                    # about 20 seconds on two cores, nothing to download
    harness run -- python examples/huggingface.py     # the same, and a spot interruption costs it nothing

Bytes of the Python standard library's own sources, shuffled; dropout, warm-up and cosine decay, gradient accumulation,
an evaluation in the middle of each epoch. The harness needs the two lines marked `# harness`.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from harness.integrations.transformers import HarnessCallback  # harness

CONTEXT = 64  # bytes in a sample, and the model's context length


class Bytes(Dataset[dict[str, Tensor]]):
    """Stretches of a text, as bytes."""

    def __init__(self, text: bytes):
        self.text = text

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = torch.tensor(list(self.text[index * CONTEXT : (index + 1) * CONTEXT]))
        return {"input_ids": sample, "labels": sample}


class Curve(TrainerCallback):
    """Writes each logged value to a file, as an exact hexadecimal float."""

    def __init__(self, path: str | None):
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.path is not None:
            shown = [f"{key} {float(value).hex()}" for key, value in sorted(logs.items()) if key.endswith("loss")]
            with Path(self.path).open("a") as file:
                file.write(f"{state.global_step} {' '.join(shown)}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--curve", help="append `step loss` to this file")
    parser.add_argument("--final", help="write the final model to this safetensors file")
    options = parser.parse_args()

    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))[:40_000]
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        logging_steps=1,
        save_strategy="no",  # the harness saves, and resumes
        report_to=[],
        seed=1,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Bytes(text[:36_000]),
        eval_dataset=Bytes(text[36_000:]),
        callbacks=[HarnessCallback(), Curve(options.curve)],  # harness
    )
    trainer.train()
    if options.final:
        save_model(model, options.final)


if __name__ == "__main__":
    main()
