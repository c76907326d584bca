"""The states of torchmetrics come back, though no state_dict has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness.core import tree
from harness.errors import StateError
from harness.trainer.state.capture import Captured, capture
from harness.trainer.state.restore import restore
from harness.trainer.state.unlisted import Unlisted


def torchmetrics() -> Any:
    """The library, which takes a second to import: not while the tests are collected."""
    return pytest.importorskip("torchmetrics")


class Program:
    """A model with metrics, as a script makes it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.model = nn.Module()
        self.model.metric = make()
        self.states = {"model": self.model}
        self.warned: list[str] = []
        self.unlisted = Unlisted(self.states, self.warned.append)
        self.unlisted.begin()

    def update(self, *values: float) -> None:
        for value in values:
            predicted = torch.tensor([value, 1 - value])
            if isinstance(self.model.metric, torchmetrics().MetricCollection):
                self.model.metric.update(predicted, torch.tensor([1, 0]))
            else:
                self.model.metric.update(predicted)

    def computed(self) -> Any:
        found = self.model.metric.compute()
        return {key: value.tolist() for key, value in found.items()} if isinstance(found, dict) else found.tolist()

    def capture(self) -> Captured:
        return capture(self.states, self.unlisted)

    def restore(self, captured: Captured) -> None:
        stored = {name: tensor.detach().clone() for name, tensor in captured.tensors.items()}
        restore(self.states, tree.loads(tree.dumps(captured.tree)), stored, self.unlisted)


def collection() -> Any:
    """Two that share their states, as long as they are equal, and one that does not."""
    kinds = torchmetrics().classification
    return torchmetrics().MetricCollection([kinds.BinaryPrecision(), kinds.BinaryRecall(), kinds.BinaryAUROC()])


MAKE: dict[str, Callable[[], Any]] = {
    "sum": lambda: torchmetrics().SumMetric(),
    "mean": lambda: torchmetrics().MeanMetric(),
    "list": lambda: torchmetrics().CatMetric(),
    "collection": collection,
}


@pytest.mark.parametrize("make", MAKE)
def test_a_metric_goes_on_summing_where_it_was(make: str) -> None:
    unbroken, before, after = (Program(MAKE[make]) for _ in range(3))
    unbroken.update(0.1, 0.7, 0.4, 0.9)
    before.update(0.1, 0.7)
    after.update(0.3)  # on the way

    after.restore(before.capture())
    after.update(0.4, 0.9)

    assert after.computed() == unbroken.computed()
    assert before.warned == after.warned == []


def test_a_metric_that_was_reset_is_reset() -> None:
    before, after = Program(MAKE["sum"]), Program(MAKE["sum"])
    before.update(0.1)
    before.capture()
    before.model.metric.reset()
    after.update(0.3)

    after.restore(before.capture())
    after.update(0.5)

    assert after.computed() == 1.0


def test_a_state_that_the_state_dict_has_is_stored_once() -> None:
    program = Program(MAKE["sum"])
    program.model.metric.persistent(True)
    program.update(0.1)
    assert list(program.capture().tensors) == ["model/metric.sum_value"]


def test_a_metric_that_is_not_there_any_more_is_named() -> None:
    before, after = Program(MAKE["sum"]), Program(nn.Identity)
    before.update(0.1)
    with pytest.raises(StateError, match="metric: the snapshot has the state of a metric"):
        after.restore(before.capture())
