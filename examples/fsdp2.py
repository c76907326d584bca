"""Train a small transformer whose parameters are sharded over several processes, and survive the instance they run on.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py
    harness run -- torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

After pytorch/examples, distributed/FSDP2 (BSD 3-Clause). Its own checkpoints are gone; the lines marked `# harness` are
new. It runs on GPUs if there is one for each process, else on the CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.distributed.fsdp import fully_shard

from harness import Checkpointer  # harness

VOCAB, BATCH, LENGTH = 64, 8, 32


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


class Transformer(nn.Module):
    def __init__(self, dim: int = 64, layers: int = 3, heads: int = 4):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(LENGTH, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def setup() -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() > local_rank:
        torch.cuda.set_device(local_rank)
        init_process_group(backend="nccl")
        return torch.device("cuda", local_rank)
    init_process_group(backend="gloo")
    return torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--curve", type=Path, help="append a line 'step loss' for each step of rank 0")
    args = parser.parse_args()
    device = setup()
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + get_rank())
    ckpt = Checkpointer(model=model, optimizer=optimizer)  # harness
    for step in ckpt.steps(args.steps):  # harness
        tokens = torch.randint(0, VOCAB, (BATCH, 1), device=device) + torch.arange(LENGTH + 1, device=device)
        tokens %= VOCAB
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if get_rank() == 0 and args.curve is not None:
            with args.curve.open("a") as file:
                file.write(f"{step + 1} {loss.item().hex()}\n")
    destroy_process_group()


if __name__ == "__main__":
    main()
