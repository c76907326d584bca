"""State on a CUDA device goes through a slot and back bit for bit. Needs a GPU; says so when there is none."""

from __future__ import annotations

import pytest
import torch

from harness.core import tree
from harness.core.shard import plan_shards
from harness.trainer.copy import to_slot
from harness.trainer.state import capture
from harness.trainer.state.restore import restore
from harness.trainer.state.rng import capture_rng, restore_rng

pytestmark = pytest.mark.gpu


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(64)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.randn(32, 64, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def test_a_training_on_a_gpu_goes_on_bit_for_bit() -> None:
    torch.manual_seed(0)
    model, optimizer = training()
    for _ in range(3):
        step(model, optimizer)
    captured = capture.capture({"model": model, "optimizer": optimizer})
    shards = plan_shards(captured.specs())
    offsets, size = [], 0
    for shard in shards:
        offsets.append(size)
        size += -(-shard.size // 4096) * 4096
    slot = bytearray(size)
    for shard, offset in zip(shards, offsets, strict=True):
        slot[offset : offset + len(shard.header)] = shard.header
    views = to_slot.views(slot, shards, offsets)
    to_slot.copy_into(views, captured.tensors)
    small = tree.dumps({"states": captured.tree, "rng": capture_rng()})
    unbroken = [step(model, optimizer) for _ in range(3)]

    other, other_optimizer = training()
    loaded = tree.loads(small)
    restore({"model": other, "optimizer": other_optimizer}, loaded["states"], views)
    restore_rng(loaded["rng"])

    assert [step(other, other_optimizer) for _ in range(3)] == unbroken


def test_a_restore_goes_through_pinned_memory_and_leaves_everything_where_the_optimizer_wants_it() -> None:
    torch.manual_seed(0)
    model, optimizer = training()
    step(model, optimizer)
    big = torch.nn.Linear(4096, 6000).cuda()  # more than both pinned buffers
    captured = capture.capture({"model": model, "optimizer": optimizer, "big": big})
    stored = {name: tensor.cpu() for name, tensor in captured.tensors.items()}
    other, other_optimizer = training()
    other_big = torch.nn.Linear(4096, 6000).cuda()
    torch.cuda.synchronize()

    restore({"model": other, "optimizer": other_optimizer, "big": other_big}, captured.tree, stored)

    assert torch.equal(other_big.weight, big.weight)
    for there, here in zip(
        optimizer.state_dict()["state"].values(), other_optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(here[key].device == there[key].device and torch.equal(here[key], there[key]) for key in there)
