"""What a rehearsal sees of a program's own variables."""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from harness.trainer.variables import Variables

HERE = "(test_variables.py)"


class Meter:
    def __init__(self, total: Any = 0.0) -> None:
        self.total = total
        self.inner = argparse.Namespace(count=1)
        self._hidden = 0


class Refusing(dict[str, int]):
    """A value of the program that lets no one look at it."""

    def __repr__(self) -> str:
        raise RuntimeError("not now")

    def items(self) -> Any:
        raise RuntimeError("not now")


class Average:
    def __init__(self, value: float) -> None:
        self.shadow = torch.full((3,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Environment:
    action_space = range(2)

    def __init__(self) -> None:
        self.state = numpy.zeros(4)

    def step(self) -> None: ...

    def reset(self) -> None: ...


def looked_at(value: Any, given: dict[str, object] | None = None, *, thorough: bool = False) -> tuple[Any, Any]:
    """What is seen of a local variable that is named `value`; values, and objects that were not given."""

    def program(value: Any, look: Callable[..., tuple[dict[str, str], dict[str, str]]]) -> Any:
        return look()

    place = f" in {program.__qualname__}() {HERE}"
    values, objects = program(value, functools.partial(Variables(given or {}).look, thorough=thorough))
    return tuple(
        {key.replace(place, ""): text for key, text in found.items() if place in key} for found in (values, objects)
    )


def jagged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))


def of_python(seed: int) -> random.Random:
    return random.Random(seed)


def of_torch(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (0.1, 0.1 + 1e-17 + 2**-56),
        ("a" * 1000, "a" * 999 + "b"),
        (True, None),
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.0 + 2**-23])),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()),
        (jagged(torch.ones(3, 3)), jagged(torch.zeros(3, 3))),
        (torch.empty(3, device="meta"), torch.empty(4, device="meta")),
        (numpy.ones(3), numpy.zeros(3)),
        (numpy.float32(1), numpy.float32(2)),
        ([1, [2, torch.ones(2)]], [1, [2, torch.zeros(2)]]),
        (deque([1], maxlen=5), deque([2], maxlen=5)),
        ({"a": {1, 2}}, {"a": {1, 3}}),
        (itertools.count(1), itertools.count(2)),
    ],
)
def test_values_are_told_apart(one: Any, other: Any) -> None:
    copied = one if isinstance(one, itertools.count) else copy.deepcopy(one)  # from Python 3.14 on it has no copy
    (first, _), (same, _), (second, _) = looked_at(one), looked_at(copied), looked_at(other)

    assert first.keys() == {"value"}
    assert first == same
    assert first != second


def test_dicts_are_equal_in_any_order() -> None:
    assert looked_at({"lr": 1, "betas": 2}) == looked_at({"betas": 2, "lr": 1})


def test_the_attributes_of_the_users_own_objects_are_seen() -> None:
    assert looked_at(Meter(3.5))[0] == {"value.total": "3.5", "value.inner.count": "1"}
    assert looked_at(Environment())[0].keys() == {"value.state"}


@pytest.mark.parametrize("kind", [Average, of_python, of_torch])
def test_an_object_with_a_state_is_seen_unless_it_was_given(kind: Callable[[int], Any]) -> None:
    one = kind(1)

    (name,) = looked_at(one)[1]
    assert name.startswith("value, a")
    assert looked_at(one)[1] != looked_at(kind(2))[1]
    assert looked_at(one, {"average": one}) == ({}, {})


def test_a_module_that_was_given_is_not_looked_at_by_another_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    assert looked_at(model[0], {"model": model}) == ({}, {})
    assert looked_at(model)[1].keys() == {"value, a Sequential,"}


def test_plain_attributes_of_a_given_module_are_seen() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.last = nn.Linear(2, 2), 3, torch.ones(1)

    values, _ = Variables({"model": Counting()}).look(thorough=False)

    assert values["model.calls (an attribute of a module)"] == "3"
    assert values["model.last (an attribute of a module)"] == "1.0"
    assert not any("linear" in name for name in values if "attribute of a module" in name)


def test_what_is_large_is_looked_at_only_thoroughly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.trainer.variables._LARGE_BYTES", 100)
    for large in (torch.ones(200), Average(1.0).shadow.repeat(100)):
        assert looked_at(large) == ({}, {})
        assert looked_at(large, thorough=True)[0].keys() == {"value"}


@pytest.mark.parametrize("unknown", [object(), print, torch, Meter, lambda: 1, iter([1]), sys.stderr, Refusing()])
def test_what_is_unknown_is_left_out(unknown: Any) -> None:
    assert looked_at(unknown) == ({}, {})
