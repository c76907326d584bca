"""What a rehearsal writes down of each step, and what of it is no difference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core.rehearsal import VARIABLE, Instructions, Resumed, Stepped, decode_lines
from harness.trainer.driven import PROGRESS
from harness.trainer.state.capture import capture
from harness.trainer.variables import Variables
from harness.trainer.witness import Witness
from tests.support.played_agent import BATCHES, Program, no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


class State:
    """An object with a state_dict."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


Seen = Callable[..., dict[str, str]]


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    """Returns what is written down of a state of that name."""
    files = (tmp_path / str(number) for number in itertools.count())

    def look(name: str, **state: Any) -> dict[str, str]:
        file = next(files)
        witness = Witness(Instructions(str(file), stop=10), Variables({}), lambda signum: None)
        witness.stepped(1, None, {}, capture({name: State(state)}))
        (line,) = decode_lines(file.read_bytes())
        assert isinstance(line, Stepped)
        return line.state

    return look


def test_the_progress_of_a_framework_that_copies_what_it_restores_is_the_same(seen: Seen) -> None:
    one, equal, other = torch.ones(2), torch.ones(2), torch.zeros(2)
    assert seen(PROGRESS, own={"score": one, "best": one}) == seen(PROGRESS, own={"score": one, "best": equal})
    assert seen(PROGRESS, own={"score": one, "best": one}) != seen(PROGRESS, own={"score": one, "best": other})
    assert seen(PROGRESS, own={"score": one, "best": one}) != seen(PROGRESS, own={"score": one})


def test_what_is_in_several_tensors_of_a_progress_is_all_written_down(seen: Seen) -> None:
    found = seen(PROGRESS, own={"kept": [torch.ones(1), {"a": torch.zeros(1)}]})
    assert {path for path in found if "kept" in path} == {f"{PROGRESS}/state/own/kept/{end}" for end in ("0", "1/a")}


def test_places_of_a_progress_are_no_difference_and_its_other_values_are(seen: Seen) -> None:
    first = seen(PROGRESS, own={"places": {"paths": ["/a"]}, "epoch": 1})
    assert first == seen(PROGRESS, own={"places": {"paths": ["/b"]}, "epoch": 1})
    assert first != seen(PROGRESS, own={"places": {"paths": ["/a"]}, "epoch": 2})


def test_parameters_of_an_optimizer_in_another_order_are_no_difference(tmp_path: Path) -> None:
    """As one of a set of parameters has them, in each start."""
    model = torch.nn.Linear(2, 3)
    found = []
    for params in ([model.weight, model.bias], [model.bias, model.weight]):
        optimizer = torch.optim.Adam(params)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        optimizer.step()
        file = tmp_path / str(len(found))
        witness = Witness(Instructions(str(file), stop=10), Variables({}), lambda signum: None)
        witness.stepped(1, None, {}, capture({"model": model, "optimizer": optimizer}))
        (line,) = decode_lines(file.read_bytes())
        assert isinstance(line, Stepped)
        found.append(line.state)
    assert found[0] == found[1]
    assert "optimizer/state/model/weight/exp_avg" in found[0]


def test_a_tie_of_a_state_that_the_script_gives_is_a_difference(seen: Seen) -> None:
    one, equal = torch.ones(2), torch.ones(2)
    assert seen("model", a=one, b=one) != seen("model", a=one, b=equal)


class Wrapper(torch.optim.SGD):
    """Stands for another optimizer, and never steps itself, as that of Lightning's Fabric."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = optimizer.__dict__ | {"inner": optimizer}


def test_which_optimizers_have_stepped_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines"
    monkeypatch.setenv(VARIABLE, f'{{"file": "{file}", "stop": 9}}')
    other = torch.nn.Linear(2, 1)
    late = torch.optim.SGD(other.parameters(), lr=0.1)
    program = Program(other=other, late=late, wrapped=Wrapper(late))

    for step in program.ckpt.steps(3):
        program.train()
        if step == 1:
            other(torch.ones(1, 2)).sum().backward()
            late.step()

    steps = [line for line in decode_lines(file.read_bytes()) if isinstance(line, Stepped)]
    assert [line.optimizers for line in steps] == [
        {"optimizer": True, "late": False, "wrapped": False},
        {"optimizer": True, "late": True, "wrapped": True},
        {"optimizer": True, "late": True, "wrapped": True},
    ]


def test_torchs_seed_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines"
    monkeypatch.setenv(VARIABLE, f'{{"file": "{file}", "stop": 9}}')
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        for _ in Program().ckpt.steps(1):
            pass

    assert decode_lines(file.read_bytes())[0] == Resumed(0, 1234)


class Loader(State):
    """Knows its own position."""

    def __init__(self) -> None:
        super().__init__({"position": 0})

    def __iter__(self) -> Iterator[Any]:
        for position, batch in enumerate(BATCHES, 1):
            self._state = {"position": position}
            yield batch


def test_a_loader_with_a_state_over_which_a_loop_iterates_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lines"
    monkeypatch.setenv(VARIABLE, f'{{"file": "{file}", "stop": 9}}')
    given, other = Loader(), Loader()
    program = Program()

    for _ in program.ckpt.batches(given):
        program.train()
    next(iter(other))

    steps = [line for line in decode_lines(file.read_bytes()) if isinstance(line, Stepped)]
    assert len(steps) == len(BATCHES)
    assert {name.split()[0] for line in steps for name in line.objects} == {"other"}
