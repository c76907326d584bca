"""DistributedDataParallel before its first step: a group of one, since nothing here depends on the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.trainer.distributed.buckets import settle


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_no_gradient_is_left_and_the_next_backward_counts_all() -> None:
    model = DistributedDataParallel(net())

    assert settle([model]) == []

    assert all(param.grad is None for param in model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert model.reducer._rebuild_buckets() is False, "they are final: the first forward has rebuilt them"


def test_gradients_that_are_there_stay_as_they_are() -> None:
    model = DistributedDataParallel(net())
    grads = [torch.full_like(param, 3.0) for param in model.parameters()]
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad

    settle([nn.Sequential(model)])

    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert all(bool((grad == 3).all()) for grad in grads)


def hooked(model: Any) -> None:
    next(iter(model.parameters())).register_hook(lambda grad: grad * 2)


def in_backward(model: Any) -> None:
    next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda param: None)


def communicated(model: Any) -> None:
    hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    model.register_comm_hook(None, hooks.allreduce_hook)


def unknown(model: Any) -> None:
    model.reducer = object()


@pytest.mark.parametrize(
    ("options", "change", "why"),
    [
        ({"static_graph": True}, lambda model: None, "static_graph"),
        ({}, hooked, "hooks on its gradients"),
        ({}, in_backward, "hooks on its gradients"),
        ({}, communicated, "communication hook"),
        ({}, unknown, "this version of torch"),
    ],
)
def test_where_it_would_not_be_right_it_is_told(
    options: dict[str, Any], change: Callable[[Any], None], why: str
) -> None:
    model = DistributedDataParallel(net(), **options)
    change(model)

    (told,) = settle([model])

    assert why in told
    assert "last bits" in told


def test_nothing_is_told_where_buckets_are_never_rebuilt_or_were_before() -> None:
    never = DistributedDataParallel(net(), find_unused_parameters=True)
    begun = DistributedDataParallel(net())
    for _ in range(2):
        begun(torch.ones(1, 2)).sum().backward()
    hooked(begun)

    assert settle([never, begun, torch.optim.SGD(begun.parameters())]) == []
