"""A small training by TRL, a library of subclasses of transformers' Trainer, as its documentation begins one.

It writes each log, in full precision, to CURVE, and what it holds at the end to FINAL. The trainers are TRL's own, and
only the callback is ours.

    python -m tests.support.trl_trainer --curve curve --final final --mode sft [--plain]

    --mode sft    SFTTrainer, on prompts and completions; logs every 3 steps what it has summed by itself
    --mode lora   SFTTrainer with a peft_config, and sequences packed into one
    --mode dpo    DPOTrainer, on what was chosen and what was rejected
    --mode grpo   GRPOTrainer: generates, rewards, and uses what it has generated for two steps
"""

from __future__ import annotations

import argparse
import random
import warnings
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.support.framework_trainer import options_of, prepare, write_final
from tests.support.hf_trainer import Logged

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ITEMS = 40


def tokenizer() -> Any:
    """Return one that knows a few words."""
    known = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>", *WORDS))}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model() -> Any:
    """Return a tiny one, with dropout."""
    size = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=13, bos_token_id=1, eos_token_id=1, pad_token_id=0, **size))


def rows(*columns: str) -> Any:
    """Return a dataset whose columns are short texts."""
    draw = random.Random(0)
    return datasets.Dataset.from_list(
        [{column: " ".join(draw.choices(WORDS, k=draw.randint(2, 9))) for column in columns} for _ in range(ITEMS)]
    )


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Prefer variety."""
    return [float(len(set(text.split()))) for text in completions]


def trainer_of(mode: str, options: dict[str, Any], callbacks: list[Any]) -> Any:
    """Return TRL's trainer of a mode."""
    common: dict[str, Any] = {"model": model(), "processing_class": tokenizer(), "callbacks": callbacks}
    if mode == "dpo":
        from trl import DPOConfig, DPOTrainer

        data = rows("prompt", "chosen", "rejected")
        return DPOTrainer(ref_model=model(), args=DPOConfig(**options), train_dataset=data, **common)
    if mode == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        more = {"num_generations": 4, "max_completion_length": 6, "num_iterations": 2, "logging_steps": 1}
        args = GRPOConfig(**(options | more | {"num_train_epochs": 1}))
        return GRPOTrainer(args=args, train_dataset=rows("prompt"), reward_funcs=reward, **common)
    from trl import SFTConfig, SFTTrainer

    if mode == "lora":
        from peft import LoraConfig

        common["peft_config"] = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        args = SFTConfig(**options, packing=True, packing_strategy="wrapped", max_length=16)
        return SFTTrainer(args=args, train_dataset=rows("text"), **common)
    args = SFTConfig(**options, eval_strategy="steps", eval_steps=5)
    data = rows("prompt", "completion")
    return SFTTrainer(args=args, train_dataset=data, eval_dataset=data.select(range(8)), **common)


def main() -> None:
    """Train."""
    options = options_of(("sft", "lora", "dpo", "grpo")).parse_args()
    prepare(options)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    random.seed(0)
    with options.curve.open("a") as out:
        train(options, out)


def train(options: argparse.Namespace, out: Any) -> None:
    """Train as the mode says."""
    callbacks: list[Any] = [Logged(out)]
    if not options.plain:
        from harness.integrations.transformers import HarnessCallback

        callbacks.insert(0, HarnessCallback())
    arguments = {
        "output_dir": str(options.curve.with_name("output")), "per_device_train_batch_size": 4, "report_to": [],
        "num_train_epochs": 3, "learning_rate": 1e-3, "logging_steps": 3, "disable_tqdm": True, "seed": 7,
        "save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    trainer = trainer_of(options.mode, arguments, callbacks)
    result = trainer.train()
    print("result", result.global_step, result.training_loss.hex(), random.random(), torch.rand(()).item(), file=out)
    write_final(trainer.model, options.final)


if __name__ == "__main__":
    main()
