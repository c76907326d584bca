"""`ckpt.extra`: tensors and arrays come back, and what cannot be stored is refused when it is assigned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from harness.errors import StateError
from harness.trainer.resuming import refill
from harness.trainer.state.capture import capture
from harness.trainer.state.extra import Extra, shared_in
from harness.trainer.state.restore import restore_values
from tests.support.broken_off import Life, live
from tests.support.played_agent import no_checkpointer

numpy = pytest.importorskip("numpy")

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


def carried(extra: Extra) -> Any:
    captured = capture({}, extra=extra)
    return restore_values(captured.extra, {name: tensor.clone() for name, tensor in captured.tensors.items()}, {})


def test_tensors_and_arrays_come_back_as_what_they_were() -> None:
    extra = Extra(best=1.5, hidden=[torch.randn(2, 3), torch.zeros(0)], seen={"ids": numpy.arange(4)})

    again = carried(extra)

    assert again["best"] == 1.5
    assert torch.equal(again["hidden"][0], extra["hidden"][0])
    assert again["hidden"][1].shape == (0,)
    assert numpy.array_equal(again["seen"]["ids"], numpy.arange(4))


def test_they_are_copies() -> None:
    kept = torch.zeros(2)
    again = carried(Extra(kept=kept))

    kept.add_(1)

    assert again["kept"].tolist() == [0, 0]


def test_what_a_program_holds_stays_the_same_object() -> None:
    held, array = torch.zeros(2), numpy.zeros(2)
    extra = Extra(mean=held, array=array)

    refill(extra, {"mean": torch.ones(2), "array": numpy.ones(2)})

    assert held.tolist() == array.tolist() == [1, 1]


def test_a_device_that_this_machine_lacks_is_the_cpu() -> None:
    captured = capture({}, extra={"x": torch.ones(1)})

    again = restore_values(captured.extra, captured.tensors, {"ckpt.extra/x": "cuda:7"})

    assert again["x"].device.type == "cpu"


def assign(extra: Extra, value: Any) -> None:
    extra["a"] = value


def update(extra: Extra, value: Any) -> None:
    extra.update(a=value)


def default(extra: Extra, value: Any) -> None:
    extra.setdefault("a", value)


def merge(extra: Extra, value: Any) -> None:
    extra |= {"a": value}


@pytest.mark.parametrize("put", [assign, update, default, merge])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), r"ckpt\.extra\.a"),
        ({"inner": [lambda: None]}, r"ckpt\.extra\.a\.inner"),
        (torch.ones(2).to_sparse(), r"ckpt\.extra\.a: cannot store"),
        (torch.ones(1, requires_grad=True), r"ckpt\.extra\.a: .*detach"),
    ],
)
def test_what_cannot_be_stored_is_refused_at_the_assignment(put: Any, value: Any, words: str) -> None:
    extra = Extra()
    with pytest.raises(StateError, match=words):
        put(extra, value)
    assert "a" not in extra


def test_a_long_list_is_not_looked_at_again_with_each_assignment() -> None:
    """It would cost the loop milliseconds at every step. The next snapshot looks at it."""
    extra = Extra()
    extra["losses"] = [object()] * 5000

    with pytest.raises(StateError, match=r"ckpt\.extra\.losses"):
        capture({}, extra=extra)


# ---- what shares memory ---------------------------------------------------------------------------------------------

WEIGHT = torch.ones(3, 3)
BUFFER = torch.zeros(8)
ARRAY = numpy.zeros(4)
LIST = [1]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"best": {"weight": WEIGHT}}, r"ckpt\.extra\.best\['weight'\] is in the memory of model/weight.*clone\(\)"),
        ({"row": WEIGHT[1]}, r"ckpt\.extra\.row is in the memory of model/weight"),
        ({"as_array": WEIGHT.numpy()}, r"ckpt\.extra\.as_array is in the memory of model/weight"),
        ({"all": BUFFER, "first": BUFFER[:4]}, r"ckpt\.extra\.first shares memory with ckpt\.extra\.all"),
        ({"all": ARRAY, "some": (ARRAY[1:],)}, r"ckpt\.extra\.some\[0\] shares memory with ckpt\.extra\.all"),
        ({"lists": [LIST, LIST]}, r"ckpt\.extra\.lists\[1\] and ckpt\.extra\.lists\[0\] are one list"),
    ],
)
def test_what_a_resume_would_take_apart_is_told_of(extra: dict[str, Any], words: str) -> None:
    assert re.match(words, shared_in(extra, {"model/weight": WEIGHT}) or "")


def test_what_stays_as_it_is_is_not_told_of() -> None:
    extra = {
        "copy": WEIGHT.clone(),
        "twice": [BUFFER, BUFFER],
        "empty": [torch.zeros(0), torch.zeros(0)],
        "text": ["a", "a"],
        "odd": numpy.array(["a"]),
        "large": [0] * 2000 + [WEIGHT],
    }
    assert shared_in(extra, {"model/weight": WEIGHT}) is None
    assert shared_in({key: extra[key] for key in extra.keys() - {"large"}}, {"model/weight": WEIGHT}) is None


def test_a_program_is_told_at_its_next_snapshot_and_once() -> None:
    def program(life: Life) -> None:
        ckpt = life.begin()
        for _ in ckpt.steps(3):
            life.step(torch.randn(4, 4))
            ckpt.extra["best"] = life.model.state_dict()

    with pytest.warns(UserWarning, match=r"ckpt\.extra\.best.* is in the memory of model/0\.weight") as told:
        live(program)

    assert len(told) == 1
