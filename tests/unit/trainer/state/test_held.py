"""What a state holds: optimizers and modules in an object of the user's own, and optimizers that no state is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader

from tests.support.broken_off import Life, Program, check_goes_on, live, rows
from tests.support.played_agent import no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


class Several:
    """Several optimizers as one."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.inner: Any = optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        return [*self.inner]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> Any:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, state: Any) -> None:
        for optimizer, inner in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(inner)


class ByName(Several):
    """The same, in a dict."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.inner = dict(zip("ab", optimizers, strict=True))

    @property
    def optimizers(self) -> list[Optimizer]:
        return [*self.inner.values()]


class Trainer:
    """A model and its optimizer in one object."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.models, self.optimizer = [model], optimizer

    def state_dict(self) -> Any:
        return {"model": self.models[0].state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.models[0].load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def accumulating(life: Life, optimizer: Any) -> Any:
    loader = DataLoader(rows(24), batch_size=4, shuffle=True)
    ckpt = life.begin(optimizer=optimizer)
    for _ in ckpt.epochs(3):
        for number, (x,) in ckpt.enumerate(loader):
            life.loss(x).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return life.outcome


@pytest.mark.parametrize("kind", [Several, ByName])
def test_gradients_that_wait_for_one_of_several_optimizers_in_an_object_are_kept(kind: type[Several]) -> None:
    """One steps in each batch, and the other one in every second."""

    def program(life: Life) -> Any:
        quick, slow = SGD([*life.model[0].parameters()], lr=0.01), Adam(life.model[2].parameters(), lr=0.01)
        loader = DataLoader(rows(24), batch_size=4, shuffle=True)
        ckpt = life.begin(optimizer=kind(quick, slow))
        for _ in ckpt.epochs(2):
            for number, (x,) in ckpt.enumerate(loader):
                life.loss(x).backward()
                quick.step()
                quick.zero_grad()
                if number % 2:
                    slow.step()
                    slow.zero_grad()
        return life.outcome

    check_goes_on(program, (1, 3, 4, 9))


def test_steps_of_several_optimizers_in_an_object_are_counted() -> None:
    def program(life: Life) -> Any:
        return accumulating(life, Several(SGD(life.model.parameters(), lr=0.01)))

    assert live(program)[1] == 9
    check_goes_on(program, (2, 4))


def test_an_object_that_holds_a_model_keeps_what_is_in_no_state_dict() -> None:
    def program(life: Life) -> Any:
        life.model.register_buffer("count", torch.zeros(()), persistent=False)
        loader = DataLoader(rows(24), batch_size=4, shuffle=True)
        ckpt = life.begin_with(trainer=Trainer(life.model, life.optimizer))
        for epoch in ckpt.epochs(3):
            for number, (x,) in ckpt.enumerate(loader):
                if (epoch, number) == (0, 1):
                    life.model[2].weight.requires_grad_(False)
                    life.model[1].eval()
                life.loss(x * (1 + life.model.count)).backward()
                life.model.count += 0.01
                if number % 2:
                    life.optimizer.step()
                    life.optimizer.zero_grad()
        return life.outcome

    check_goes_on(program, (1, 2, 4, (2, 4)))


class Sharp(Optimizer):
    """Steps with another optimizer, which it does not save, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.inner = SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


def sharp(*, gives_inner: bool) -> Program:
    def program(life: Life) -> Any:
        life.optimizer = Sharp(life.model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(life.optimizer, 2, 0.5)
        inner = {"inner": life.optimizer.inner} if gives_inner else {}
        ckpt = life.begin_with(model=life.model, **inner, optimizer=life.optimizer, scheduler=scheduler)
        for _ in ckpt.steps(6):
            life.step(torch.randn(4, 4))
            scheduler.step()
        return life.outcome

    return program


def test_an_optimizer_that_another_one_holds_and_does_not_save_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"optimizer\.inner has a state of its own, .*by name, before optimizer"):
        live(sharp(gives_inner=False))


def test_with_the_remedy_it_goes_on() -> None:
    check_goes_on(sharp(gives_inner=True), (2, 4))


def forgotten(life: Life) -> None:
    other = Adam([nn.Parameter(torch.ones(1))], lr=0.01)
    ckpt = life.begin()
    for _ in ckpt.steps(3):
        other.step()
        life.step(torch.randn(4, 4))


def of_a_second_stage(life: Life) -> None:
    ckpt = life.begin()
    for _ in ckpt.epochs(1):
        for _ in ckpt.steps(2):
            life.step(torch.randn(4, 4))
    life.optimizer = Adam(life.model.parameters(), lr=0.01)
    for _ in ckpt.epochs(1):
        for _ in ckpt.steps(3):
            life.step(torch.randn(4, 4))


@pytest.mark.parametrize("program", [forgotten, of_a_second_stage])
def test_an_optimizer_that_steps_and_is_in_no_state_is_told_of(program: Program) -> None:
    with pytest.warns(UserWarning, match=r"an optimizer steps that was not given to the Checkpointer \(Adam\)"):
        live(program)


def test_an_optimizer_that_lives_for_one_step_alone_is_not_told_of() -> None:
    """As in the inner loop of a meta-learning."""

    def program(life: Life) -> None:
        ckpt = life.begin()
        for _ in ckpt.steps(3):
            inner = SGD([nn.Parameter(torch.ones(1))], lr=0.01)
            for _ in range(3):
                inner.step()
            life.step(torch.randn(4, 4))

    live(program)


def with_a_lone_weight(others: Callable[[Tensor], dict[str, Any]]) -> Program:
    def program(life: Life) -> None:
        weight = torch.zeros(4, 1, requires_grad=True)
        optimizer = SGD([weight], lr=0.1)
        ckpt = life.begin_with(optimizer=optimizer, **others(weight))
        for _ in ckpt.steps(2):
            (torch.randn(2, 4) @ weight).sum().backward()
            optimizer.step()

    return program


def test_parameters_that_no_state_has_are_told_of() -> None:
    with pytest.warns(UserWarning, match="optimizer updates 1 parameters that are in no module among the states"):
        live(with_a_lone_weight(lambda _: {}))


class Box:
    """Saves what `copied` makes of a tensor."""

    def __init__(self, tensor: Tensor, copied: Callable[[Tensor], Any] = Tensor.clone) -> None:
        self.tensor, self._copied = tensor, copied

    def state_dict(self) -> Any:
        return {"kept": self._copied(self.tensor.detach()), "elapsed": 0.0, "seen": [0.0] * 4}

    def load_state_dict(self, state: Any) -> None:
        self.tensor.data.copy_(torch.as_tensor(state["kept"]))


@pytest.mark.parametrize(
    "copied", [Tensor.clone, Tensor.numpy, Tensor.tolist, lambda tensor: tuple(map(tuple, tensor.tolist()))]
)
def test_parameters_of_which_an_object_of_the_users_own_saves_a_copy_are_not_told_of(copied: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live(with_a_lone_weight(lambda weight: {"box": Box(weight, copied)}))


def test_parameters_of_which_no_object_of_the_users_own_saves_a_copy_are_told_of() -> None:
    """As of SAC, whose log_alpha is a tensor alone, with an environment among the states."""
    others = Box(torch.zeros(4, 1))  # equal to the weight before its first step
    with pytest.warns(UserWarning, match="1 parameters that are .*, and box does not save their values: a resume"):
        live(with_a_lone_weight(lambda _: {"box": others}))


def with_a_temperature(kept: Callable[[Tensor], Any]) -> Program:
    def program(life: Life) -> None:
        log_alpha = torch.zeros(1, requires_grad=True)
        optimizer = SGD([log_alpha], lr=0.1)
        ckpt = life.begin_with(optimizer=optimizer, world=Box(torch.zeros(1)))
        for _ in ckpt.steps(2):
            (log_alpha * torch.randn(1)).sum().backward()
            optimizer.step()
            ckpt.extra["kept"] = kept(log_alpha.detach())

    return program


@pytest.mark.parametrize("kept", [Tensor.clone, Tensor.item])
def test_parameters_of_which_the_extra_values_hold_a_copy_are_not_told_of(kept: Callable[[Tensor], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live(with_a_temperature(kept))


def test_parameters_that_the_extra_values_had_at_first_are_told_of() -> None:
    with pytest.warns(UserWarning, match="optimizer updates 1 parameters"):
        live(with_a_temperature(lambda _: 0.0))


def test_parameters_are_looked_at_once_their_optimizer_has_stepped() -> None:
    def program(life: Life) -> None:
        weight = torch.zeros(4, 1, requires_grad=True)
        optimizer = SGD([weight], lr=0.1)
        ckpt = life.begin_with(optimizer=optimizer, box=Box(torch.zeros(4, 1)))
        for step in ckpt.steps(4):
            ckpt.save()
            if step == 3:
                (torch.randn(2, 4) @ weight).sum().backward()
                optimizer.step()
                learned.append(step)

    learned: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        live(program)
    assert learned
    assert ["updates 1 parameters" in str(warning.message) for warning in caught] == [True]
