"""What a wrapper says of tensors before they are compared: a group of one, since nothing here depends on the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.core.pieces import Holding
from harness.trainer.distributed.claims import Claims, LocalSteps


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_ddp_keeps_equal_is_shared_and_its_buffers_are_each_rank_s_own() -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(2))
    claims = Claims({"model": model})

    assert {claims.of(param) for param in model.parameters()} == {Holding.SHARED}
    assert {claims.of(buffer) for buffer in model.buffers()} == {Holding.OWN}


def test_what_no_wrapper_has_may_be_equal() -> None:
    model, average = DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    claims = Claims({"model": model, "average": average})
    assert {claims.of(param) for param in average.parameters()} == {Holding.MAYBE}


def test_what_ddp_leaves_to_a_hook_may_be_equal() -> None:
    """post_localSGD_hook averages gradients among some ranks only, and the parameters seldom."""
    hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, hooks.allreduce_hook)
    claims = Claims({"model": model})

    assert {claims.of(param) for param in model.parameters()} == {Holding.MAYBE}
    assert {claims.group_of(param) for param in model.parameters()} == {0}, "the ranks have the same model all the same"


def test_what_a_rank_has_trained_by_itself_may_be_equal() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    steps = LocalSteps()
    steps.watch([model, object()])

    with model.no_sync():  # gradients are accumulated
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    steps.note()
    assert {Claims({"model": model}, steps).of(param) for param in model.parameters()} == {Holding.SHARED}

    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    steps.note()
    model(torch.ones(1, 2)).sum().backward()
    steps.note()
    assert {Claims({"model": model}, steps).of(param) for param in model.parameters()} == {Holding.MAYBE}, "for good"
