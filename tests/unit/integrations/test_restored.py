"""What hooks change of restored states is put back, and what they write to tensors is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from harness.integrations.restored import Restored


class World:
    """A model, its optimizer and its schedule, restored in the middle of a training."""

    def __init__(self, rate: Any = 0.1) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 1)
        self.model[0].bias.requires_grad_(False)
        self.model[1].eval()
        self.model(torch.ones(2, 2)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def shown(self) -> Any:
        """All that has to be as it was."""
        flags = [param.requires_grad for param in self.model.parameters()]
        modes = [child.training for child in self.model.modules()]
        options = [(name, str(value)) for name, value in self.optimizer.param_groups[0].items() if name != "params"]
        return flags, modes, sorted(options), self.scheduler.state_dict()

    def restored(self) -> Restored:
        return Restored(self.model, self.optimizer, self.scheduler)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_what_hooks_change_is_as_it_was(rate: Any) -> None:
    world = World(rate)
    wanted, restored, own = world.shown(), world.restored(), world.optimizer.param_groups[0]["lr"]
    world.model.requires_grad_(False)[0].bias.requires_grad_(True)
    world.model.train()[2].eval()
    world.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    world.scheduler.step()

    assert restored.put_back()

    assert world.shown() == wanted
    if isinstance(rate, torch.Tensor):
        assert world.optimizer.param_groups[0]["lr"] is own


def test_a_group_that_was_added_stays() -> None:
    world = World()
    restored = world.restored()
    world.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 3.0})
    assert restored.put_back()
    assert [group["lr"] for group in world.optimizer.param_groups] == [pytest.approx(0.01), 3.0]


@pytest.mark.parametrize(
    "written",
    [
        lambda world: world.model[0].weight,
        lambda world: world.model[1].running_mean,
        lambda world: world.optimizer.state[world.model[0].weight]["exp_avg"],
    ],
    ids=["parameter", "buffer", "moment"],
)
def test_a_tensor_that_is_written_to_is_told(written: Callable[[World], torch.Tensor]) -> None:
    world = World()
    restored = world.restored()
    with torch.no_grad():
        written(world).add_(1)
    assert not restored.put_back()


def test_states_without_a_schedule_are_put_back() -> None:
    world = World()
    restored = Restored(world.model, world.optimizer, None)
    world.model.eval()
    assert restored.put_back()
    assert world.model.training
