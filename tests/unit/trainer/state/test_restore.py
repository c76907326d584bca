"""From a slot into live tensors: whatever way the bytes take, they arrive, and they arrive in the tensors there are."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.trainer.copy import from_slot as module
from harness.trainer.copy import to_slot
from harness.trainer.copy.from_slot import copy_out, through_pinned
from harness.trainer.copy.to_slot import Pair
from harness.trainer.state.capture import capture
from harness.trainer.state.restore import restore
from tests.support.patience import HANG_S


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """As under torchrun."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_slot, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(to_slot, "_PIECE_BYTES", 4096)


def pairs() -> list[Pair]:
    """All kinds: large, empty, a number, with gaps, another order, complex, a bool, a NaN with a payload."""
    odd = torch.tensor([0x7FC0_1234, 0x7F80_0001], dtype=torch.int32).view(torch.float32)
    sources = [
        torch.arange(50_001, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.tensor(7, dtype=torch.int64),
        torch.randn(64, 64),
        torch.randn(2, 3, 5, 7),
        torch.randn(9, dtype=torch.complex64),
        torch.tensor([True, False, True]),
        odd,
    ]
    into = [torch.zeros_like(source) for source in sources]
    into[3] = torch.zeros(64, 128)[:, ::2]
    into[4] = torch.zeros_like(sources[4], memory_format=torch.channels_last)
    return list(zip(into, sources, strict=True))


def check(copied: list[Pair]) -> None:
    for into, source in copied:
        as_bytes = [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in (into, source)]
        assert as_bytes[0] == as_bytes[1]


@pytest.mark.usefixtures("one_torch_thread", "small_pieces")
def test_every_tensor_arrives_bit_for_bit_through_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    both = threading.Barrier(2, timeout=HANG_S)
    real, before = ctypes.memmove, set(threading.enumerate())

    def noting(*block: int) -> None:
        if len(threads) < 2:
            threads.add(threading.current_thread().name)
            both.wait()
        real(*block)

    monkeypatch.setattr(to_slot.ctypes, "memmove", noting)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    wanted = pairs()
    copy_out(wanted)

    check(wanted)
    assert len(threads) == 2, "torch's own setting is for the training"
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("harness-copy")]


@pytest.mark.usefixtures("one_torch_thread", "small_pieces")
def test_a_copy_that_cannot_be_is_told() -> None:
    with pytest.raises(RuntimeError):
        copy_out([*pairs(), (torch.zeros(3), torch.zeros(4))])


def test_nothing_to_copy_is_nothing() -> None:
    copy_out([])
    through_pinned([], [(torch.empty(64, dtype=torch.uint8), None)])


class Event:
    """A device's: what it was asked, in order."""

    def __init__(self, number: int, told: list[tuple[int, str]]) -> None:
        self._number, self._told = number, told

    def synchronize(self) -> None:
        self._told.append((self._number, "wait"))

    def record(self) -> None:
        self._told.append((self._number, "record"))


@pytest.mark.parametrize("size", [64, 4096, 1 << 20])
def test_through_pinned_memory_every_tensor_arrives_and_no_buffer_is_used_before_it_is_free(size: int) -> None:
    told: list[tuple[int, str]] = []
    wanted = pairs()

    through_pinned(wanted, [(torch.empty(size, dtype=torch.uint8), Event(number, told)) for number in range(2)])

    check(wanted)
    turns = [(number, what) for number in (0, 1) for what in ("wait", "record")]
    assert told == (turns * len(told))[: len(told)]
    assert told


def restored(saved: object, live: object) -> None:
    captured = capture({"it": saved})
    restore({"it": live}, captured.tree, {name: tensor.clone() for name, tensor in captured.tensors.items()})


def test_a_module_s_tensors_stay_where_they_are() -> None:
    saved, live = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    saved(torch.randn(8, 4))
    weight, before = live.weight, live.weight.data_ptr()

    restored(saved, live)

    assert live.weight is weight
    assert live.weight.data_ptr() == before
    assert torch.equal(live.running_mean, saved.running_mean)  # type: ignore[arg-type]


class Halved(nn.Module):
    """Gives out something else than what it holds, and takes that back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_state_dict_post_hook(self._halve)
        self.register_load_state_dict_pre_hook(self._double)

    @staticmethod
    def _halve(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2

    @staticmethod
    def _double(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2


def test_a_module_that_gives_out_another_form_loads_that_form() -> None:
    saved, live = Halved(), Halved()

    restored(saved, live)

    assert torch.equal(live.weight, saved.weight)


class Counting(nn.Linear):
    """Wants to be asked when it is loaded."""

    loads = 0

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self.loads += 1
        super()._load_from_state_dict(*arguments, **options)


def test_a_module_still_loads_itself() -> None:
    saved, live = Counting(2, 2), Counting(2, 2)

    restored(saved, live)

    assert live.loads == 1
    assert torch.equal(live.weight, saved.weight)


def test_a_fresh_optimizer_gets_its_moments_and_counts() -> None:
    model = nn.Linear(3, 2)
    saved, live = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(nn.Linear(3, 2).parameters())
    model(torch.randn(4, 3)).sum().backward()
    saved.step()

    restored(saved, live)

    there, here = saved.state_dict()["state"], live.state_dict()["state"]
    assert here[0].keys() == there[0].keys()
    assert all(torch.equal(here[index][key], there[index][key]) for index in there for key in there[index])


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has moments, of numbers that no other one has."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def moments(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], Tensor]:
    return {(index, key): value for index, own in optimizer.state_dict()["state"].items() for key, value in own.items()}


def check_moments(here: torch.optim.Optimizer, there: torch.optim.Optimizer) -> None:
    assert moments(here).keys() == moments(there).keys()
    assert all(torch.equal(value, moments(there)[key]) for key, value in moments(here).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_that_are_there_already_stay_where_they_are(dtype: torch.dtype) -> None:
    saved, live = (stepped(nn.Linear(3, 2, dtype=dtype)) for _ in range(2))
    before = {key: value.data_ptr() for key, value in moments(live).items()}

    restored(saved, live)

    check_moments(live, saved)
    assert {key: value.data_ptr() for key, value in moments(live).items()} == before


def test_moments_of_another_dtype_or_order_are_made_anew() -> None:
    saved, live = stepped(nn.Conv2d(3, 4, 2)), stepped(nn.Conv2d(3, 4, 2))
    weight = live.param_groups[0]["params"][0]
    live.state[weight]["exp_avg"] = live.state[weight]["exp_avg"].double()
    live.state[weight]["exp_avg_sq"] = live.state[weight]["exp_avg_sq"].to(memory_format=torch.channels_last)

    restored(saved, live)

    check_moments(live, saved)
    assert live.state[weight]["exp_avg"].dtype is torch.float32
    assert live.state[weight]["exp_avg_sq"].is_contiguous()


def test_moments_that_lie_in_each_other_or_in_a_parameter_are_made_anew() -> None:
    saved, live = stepped(nn.Linear(3, 3, bias=False)), stepped(nn.Linear(3, 3, bias=False))
    (weight,) = live.param_groups[0]["params"]
    untouched = weight.detach().clone()
    own = live.state[weight]
    own["exp_avg"] = weight.data
    own["max_exp_avg_sq"] = own["exp_avg_sq"]
    saved.state[saved.param_groups[0]["params"][0]]["max_exp_avg_sq"] = torch.randn(3, 3)

    restored(saved, live)

    check_moments(live, saved)
    assert torch.equal(weight, untouched)


class Swapping(torch.optim.SGD):
    """Clears what it has before it reads what it is given."""

    def load_state_dict(self, state_dict: Any) -> None:
        for own in self.state.values():
            own["momentum_buffer"].zero_()
        super().load_state_dict(state_dict)


def test_an_optimizer_that_loads_in_a_way_of_its_own_is_given_copies() -> None:
    models = nn.Linear(3, 2), nn.Linear(3, 2)
    saved, live = (Swapping(model.parameters(), momentum=0.9) for model in models)
    for optimizer, model in zip((saved, live), models, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    restored(saved, live)

    check_moments(live, saved)
    assert all(value.any() for value in moments(live).values())


class HalvedInPlace(nn.Module):
    """Gives out twice what it holds, and halves in place what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Buffer(torch.arange(4.0))
        self.register_state_dict_post_hook(
            lambda _, out, prefix, __: out.update({f"{prefix}held": self.held.detach() * 2})
        )
        self.register_load_state_dict_pre_hook(lambda _, given, prefix, *__: given[f"{prefix}held"].div_(2))


class ClampedInPlace(nn.Module):
    """Clamps in place what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Parameter(torch.arange(4.0))
        self.register_load_state_dict_pre_hook(lambda _, given, prefix, *__: given[f"{prefix}held"].clamp_(0, 9))


@pytest.mark.parametrize("module", [HalvedInPlace, ClampedInPlace])
def test_a_hook_that_writes_to_what_it_is_given_writes_neither_to_the_slot_nor_in_vain(
    module: type[nn.Module],
) -> None:
    """The slot may be read by a tier just then; and a parameter that is given as itself is a leaf."""
    captured = capture({"model": module()})
    slot = {name: tensor.clone() for name, tensor in captured.tensors.items()}
    live = module()
    with torch.no_grad():
        live.held.fill_(7)  # type: ignore[operator, union-attr]

    restore({"model": live}, captured.tree, slot)

    assert torch.equal(live.held, torch.arange(4.0))  # type: ignore[arg-type]
    assert all(torch.equal(slot[name], tensor) for name, tensor in captured.tensors.items())
