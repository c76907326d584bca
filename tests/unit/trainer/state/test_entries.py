"""A module whose state_dict has other entries than at the beginning: taken where it can be, told of where not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from harness.errors import StateError
from harness.trainer.state.capture import capture
from harness.trainer.state.restore import restore
from harness.trainer.state.unlisted import Unlisted
from tests.support.broken_off import Life, check_goes_on, live
from tests.support.played_agent import no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)

WARNING = r"since Checkpointer\(\.\.\.\) was made"


class Centred(nn.Module):
    """Has its buffer from the first batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0) if self.mean is None else self.mean * 0.9 + x.mean(0) * 0.1
        self.mean = mean.detach()
        return self.linear(x - mean)


class Ranged(nn.Module):
    """Has one range of each column from the first batch on, and loads them, as the observers of a quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.zeros(0))
        self.linear = nn.Linear(4, 1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self.most = torch.empty_like(state_dict[f"{prefix}most"])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x: Tensor) -> Tensor:
        most = x.abs().amax(0)
        self.most = torch.maximum(self.most, most) if self.most.numel() else most
        return self.linear(x / self.most)


def around(module: nn.Module) -> nn.Module:
    return nn.Sequential(module)


def in_data_parallel(module: nn.Module) -> nn.Module:
    return nn.DataParallel(module)


@pytest.mark.parametrize("wrap", [around, in_data_parallel])
@pytest.mark.parametrize("module", [Centred, Ranged])
def test_a_buffer_that_gets_its_shape_from_the_first_batch_comes_back(
    module: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    def program(life: Life) -> Any:
        life.model = wrap(module())
        life.optimizer = torch.optim.SGD(life.model.parameters(), lr=0.01)
        ckpt = life.begin()
        for _ in ckpt.steps(5):
            life.step(torch.randn(4, 4))
        return dict(life.model.state_dict())

    check_goes_on(program, (1, 3, (2, 4)))


def test_a_shape_that_a_module_does_not_take_is_refused_and_changes_nothing() -> None:
    before, after = nn.Module(), nn.Module()
    before.register_buffer("most", torch.ones(4))
    after.register_buffer("most", torch.zeros(3))
    captured = capture({"model": before})

    with pytest.raises(StateError, match=r"most: stored float32 \[4\], live float32 \[3\]"):
        restore({"model": after}, captured.tree, captured.tensors)

    assert torch.equal(after.get_buffer("most"), torch.zeros(3))


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.get_submodule("0"), "weight", amount=0.5)


def widened(model: nn.Module) -> None:
    model.get_submodule("0").register_parameter("bias", nn.Parameter(torch.zeros(8, 1)))


def without_bias(model: nn.Module) -> None:
    model.get_submodule("0").register_parameter("bias", None)


def with_one_more(model: nn.Module) -> None:
    model.register_buffer("count", torch.zeros(()))


CHANGES = [
    (pruned, "0.weight is gone"),
    (widened, "0.bias has got another shape"),
    (without_bias, "0.bias is gone"),
    (with_one_more, "count is new"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_change_that_no_start_could_take_is_told_of_once(change: Callable[[nn.Module], None], words: str) -> None:
    told: list[str] = []
    model = nn.Sequential(nn.Linear(4, 8))
    states = {"model": model}
    unlisted = Unlisted(states, told.append)
    capture(states, unlisted)
    assert told == []

    change(model)
    capture(states, unlisted)
    capture(states, unlisted)

    assert [line.partition(" since")[0] for line in told] == [f"model: {words}"]


def test_a_change_during_the_training_is_told_of_at_the_next_snapshot() -> None:
    def program(life: Life) -> Any:
        ckpt = life.begin()
        for step in ckpt.steps(3):
            if step == 1:
                pruned(life.model)
            life.step(torch.randn(4, 4))

    with pytest.warns(UserWarning, match=f"model: 0.weight is gone {WARNING}"):
        live(program)


def test_a_change_that_the_program_makes_before_its_loop_goes_on() -> None:
    def program(life: Life) -> Any:
        ckpt = life.begin()
        for epoch in ckpt.epochs(2):
            if epoch == 1:
                pruned(life.model)
            for _ in ckpt.steps(3):
                life.step(torch.randn(4, 4))
        return dict(life.model.state_dict())

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{WARNING}")
        check_goes_on(program, (2, 4))
