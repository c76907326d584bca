"""State on a CUDA device goes through a slot and back bit for bit. Needs a GPU; says so when there is none."""

from __future__ import annotations

import pytest
import torch

from harness.core import tree
from harness.core.shard import plan_shards
from harness.trainer import copy, state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED HERE: there is no CUDA device"),
]


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(64)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(32, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def test_a_training_on_a_gpu_goes_on_bit_for_bit() -> None:
    torch.manual_seed(0)
    model, optimizer = training()
    for _ in range(3):
        step(model, optimizer)
    captured = state.capture({"model": model, "optimizer": optimizer})
    shards = plan_shards(captured.specs())
    offsets, size = [], 0
    for shard in shards:
        offsets.append(size)
        size += -(-shard.size // 4096) * 4096
    slot = bytearray(size)
    for shard, offset in zip(shards, offsets, strict=True):
        slot[offset : offset + len(shard.header)] = shard.header
    views = copy.views(slot, shards, offsets)
    copy.copy_into(views, captured.tensors)
    small = tree.dumps({"states": captured.tree, "rng": state.capture_rng()})
    unbroken = [step(model, optimizer) for _ in range(3)]

    other, other_optimizer = training()
    loaded = tree.loads(small)
    state.restore({"model": other, "optimizer": other_optimizer}, loaded["states"], views)
    state.restore_rng(loaded["rng"])

    assert [step(other, other_optimizer) for _ in range(3)] == unbroken
