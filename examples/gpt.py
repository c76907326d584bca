"""Train a small byte-level GPT on the Python standard library's own sources, and survive the instance it runs on.

    python examples/gpt.py                    # about half a minute on two cores
    harness run -- python examples/gpt.py     # the same, and a spot interruption costs it nothing

An ordinary training script: AdamW with warm-up and cosine decay, dropout, gradient accumulation, a shuffled DataLoader
whose workers draw random crops, tied weights, a validation pass. The harness needs the five lines marked `# harness`.
Everything runs on the CPU, so that two runs can be compared bit by bit; `--curve` and `--final` write what to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from harness import Checkpointer  # harness

CONTEXT = 128  # bytes in a crop, and the model's context length
BATCH = 8  # crops in a micro-batch
ACCUMULATE = 2  # micro-batches in an optimizer step


def standard_library(limit_bytes: int = 4_000_000) -> Tensor:
    """Return the sources of the standard library's top-level modules, in a fixed order, as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:limit_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """`count` stretches of a text. Each access crops a stretch at a new random place, in the loader's worker."""

    def __init__(self, text: Tensor, count: int):
        self.text, self.count = text, count
        self.stride = (len(text) - CONTEXT - 1) // count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride + int(torch.randint(self.stride, ()))
        crop = self.text[start : start + CONTEXT + 1].long()
        return crop[:-1], crop[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight  # tied: one tensor, two names

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of predicting `y` after `x`."""
        hidden = self.token(x) + self.position.weight[: x.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(hidden))).flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: GPT, text: Tensor, batches: int = 16) -> float:
    """Return the mean loss on the first crops of a text that is not used for training."""
    model.eval()
    crops = text[: batches * BATCH * (CONTEXT + 1)].long().view(batches, BATCH, CONTEXT + 1)
    loss = sum(float(model(crop[:, :-1], crop[:, 1:])) for crop in crops) / batches
    model.train()
    return loss


def save(path: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimizer state; equal trainings write equal files."""
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    save_file(tensors, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps-per-epoch", type=int, default=60, help="optimizer steps; an epoch sees all the text")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds between two steps, to slow the run down")
    parser.add_argument("--curve", type=Path, help="append a line 'step loss learning-rate' for every step")
    parser.add_argument("--final", type=Path, help="write the final weights and optimizer state, as safetensors")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    # The order of sums depends on the number of threads: equal bits need equal numbers. One thread, because OpenMP's
    # threads spin while they wait for each other: with two on two busy cores, 120 steps took 82 s instead of 22 s.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    text = standard_library()
    held_out = len(text) // 20
    crops = Crops(text[held_out:], args.steps_per_epoch * ACCUMULATE * BATCH)
    loader = DataLoader(crops, batch_size=BATCH, shuffle=True, num_workers=2)

    model = GPT(args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    total = args.epochs * args.steps_per_epoch
    warmup = max(1, total // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / total)),
    )
    ckpt = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)  # harness

    with args.curve.open("a", buffering=1) if args.curve else contextlib.nullcontext() as curve:
        for epoch in ckpt.epochs(args.epochs):  # harness
            loss = 0.0
            for micro, (x, y) in ckpt.enumerate(loader, start=1):  # harness
                part = model(x, y) / ACCUMULATE
                part.backward()
                loss += part.item()
                if micro % ACCUMULATE:
                    continue
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                lr = scheduler.get_last_lr()[0]
                scheduler.step()
                step = scheduler.last_epoch
                if curve:
                    curve.write(f"{step} {loss.hex()} {lr.hex()}\n")
                if step % 20 == 0:
                    print(f"epoch {epoch}  step {step:4d}/{total}  loss {loss:.4f}  lr {lr:.2e}", flush=True)
                time.sleep(args.pause_s)
                loss = 0.0
            with ckpt.evaluating():  # harness
                print(f"epoch {epoch}  validation loss {evaluate(model, text[:held_out]):.4f}", flush=True)

    if args.final:
        save(args.final, model, optimizer)


if __name__ == "__main__":
    main()
