"""FSDP2 at a boundary: a group of one, which gathers and gives back as one of many does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harness import Checkpointer
from harness.trainer.distributed.gathered import sharded
from harness.trainer.ranks import Rank
from tests.support.played_agent import PlayedLink, no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> Any:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    fully_shard(model[0])
    return fully_shard(model)


class App:
    """A script's class around its model, as one of torch.distributed.checkpoint's tutorial is."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {}


class Parts(App):
    """The stages of a pipeline that one rank has."""

    def __init__(self, model: nn.Module) -> None:
        self.stages = {"first": [], "others": 3}
        self.model_parts = [model]


def test_what_a_forward_pass_left_gathered_is_given_back() -> None:
    model = net()
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert not isinstance(model[1].weight, DTensor), "else there would be nothing to give back"

    for module in sharded([torch.optim.SGD(model.parameters()), model]):
        module.reshard()

    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_a_training_of_several_ranks_gives_it_back_at_a_boundary() -> None:
    model, link = net(), PlayedLink()
    link.rank = Rank(0, world_size=2)
    ckpt: Any = Checkpointer(model=model, optimizer=torch.optim.SGD(model.parameters()), link=link)  # type: ignore[arg-type]
    ckpt.resume()
    model(torch.ones(1, 2))

    ckpt._training.reshard()

    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("around", [lambda model: model, App, Parts, nn.Sequential])
def test_a_module_is_found_in_what_holds_it(around: Any) -> None:
    model = net()

    found = sharded([around(model), model])

    assert set(found) == {model, model[0]}
    assert len(found) == 2


@pytest.mark.parametrize("state", [nn.Linear(1, 1), {"model": 3}, torch.Generator(), 4])
def test_there_is_none_in_another_state(state: object) -> None:
    assert sharded([state]) == ()
