from __future__ import annotations

import copy
import enum
import inspect
import itertools
import math
import random
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from harness.core import tree as trees
from harness.core.shard import parse_header, plan_shards
from harness.errors import SnapshotCorrupt, StateError
from harness.trainer.copy.to_slot import DTYPE_NAMES, copy_into, views
from harness.trainer.state.capture import Captured, capture, check_encoding
from harness.trainer.state.environment import environment
from harness.trainer.state.kinds import Kind, classify, flatten
from harness.trainer.state.restore import restore
from harness.trainer.state.rng import capture_rng, restore_rng

# The way to a store and back --------------------------------------------------------------------------------------


def to_bytes(captured: Captured) -> tuple[bytes, list[bytearray]]:
    """What a snapshot of `captured` holds: small state, and files."""
    check_encoding(captured.tree)
    files = []
    for layout in plan_shards(captured.specs()):
        file = bytearray(layout.size)
        file[: len(layout.header)] = layout.header
        targets = views(file, [layout], [0])
        copy_into(targets, {name: captured.tensors[name] for name in targets})
        files.append(file)
    return trees.dumps(captured.tree), files


def from_bytes(stored: tuple[bytes, list[bytearray]], states: Mapping[str, object]) -> None:
    """Restore, then overwrite the slot: whoever still uses its memory is found out."""
    text, files = stored
    files = [bytearray(file) for file in files]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= views(file, [parse_header(bytes(file), len(file))], [0])
    before = trees.dumps(capture_rng())
    restore(states, trees.loads(text), tensors)
    assert trees.dumps(capture_rng()) == before
    for file in files:
        file[:] = b"\xa5" * len(file)


def carry(source: Mapping[str, object], target: Mapping[str, object]) -> None:
    before = trees.dumps(capture_rng())
    stored = to_bytes(capture(source))
    assert trees.dumps(capture_rng()) == before
    from_bytes(stored, target)


def identical(a: Any, b: Any) -> bool:
    """Equal with types, dtypes, shapes, strides and every bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return False
        raw = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(raw[0], raw[1])
    if isinstance(a, numpy.ndarray) and isinstance(b, numpy.ndarray):
        return (a.dtype, a.shape, a.strides, a.tobytes()) == (b.dtype, b.shape, b.strides, b.tobytes())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    return trees.same(a, b) or a == b


class Box:
    """A state that holds what it is given."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


# Training ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.hidden = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.norm(self.embed(tokens)))))
        return logits


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int, scheduler: Any = None) -> None:
    for step in range(first, first + steps):
        tokens = torch.arange(step, step + 8) % 7

        def closure(tokens: Tensor = tokens) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).float(), (tokens * 3) % 7)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.detach())
        elif scheduler is not None:
            scheduler.step()


def sparse_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 7, sparse=True))


def matrix_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7, bias=False))


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 0.1}],
    "Adam": [{"amsgrad": True}, {"lr": torch.tensor(0.01), "capturable": False, "foreach": False}, {"fused": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "LBFGS": [{"line_search_fn": None}, {"line_search_fn": "strong_wolfe"}],
    "Adagrad": [{"lr_decay": 0.1}],
}
NETS: dict[str, Callable[[int], nn.Module]] = {"SparseAdam": sparse_net, "Muon": matrix_net}


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in OPTIMIZERS for options in OPTIONS.get(name, [{}])]
)
def test_every_optimizer_of_torch_goes_on_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    make = NETS.get(name, Net)
    kind = getattr(torch.optim, name)
    model, fresh = make(0), make(1)
    optimizer, resumed = (kind(net.parameters(), **copy.deepcopy(options)) for net in (model, fresh))
    train(model, optimizer, 0, 3)

    carry({"model": model, "optimizer": optimizer}, {"model": fresh, "optimizer": resumed})

    assert identical(resumed.state_dict(), optimizer.state_dict())
    for net, opt in ((model, optimizer), (fresh, resumed)):
        train(net, opt, 3, 3)
    assert identical(fresh.state_dict(), model.state_dict())
    assert identical(resumed.state_dict(), optimizer.state_dict())


def halved(step: int) -> float:
    return 0.5**step


class Ramp:
    """A callable object: its attributes are part of a LambdaLR's state."""

    def __init__(self, slope: float) -> None:
        self.slope = slope

    def __call__(self, step: int) -> float:
        return 1 / (1 + self.slope * step)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, halved),
    "LambdaLR of an object": lambda opt: lr_scheduler.LambdaLR(opt, Ramp(0.1)),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, halved),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [2, 4, 4]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 4),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, 1.0, 5),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 5),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 5),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, 2, scale_fn=halved),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=0.5),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(opt, 5)], [2]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.MultiStepLR(opt, [3])]
    ),
    "SWALR": lambda opt: SWALR(opt, 0.01, 4),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert kinds - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


def trainer(scheduler: str, seed: int) -> dict[str, Any]:
    model = Net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[scheduler](optimizer)}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # of SequentialLR itself, in torch 2.6
def test_every_scheduler_of_torch_goes_on_bit_for_bit(name: str) -> None:
    live, fresh = trainer(name, 0), trainer(name, 1)
    train(live["model"], live["optimizer"], 0, 3, live["scheduler"])

    carry(live, fresh)

    for run in (live, fresh):
        train(run["model"], run["optimizer"], 3, 3, run["scheduler"])
    assert identical(fresh["scheduler"].state_dict(), live["scheduler"].state_dict())
    assert identical(fresh["optimizer"].state_dict(), live["optimizer"].state_dict())
    assert identical(fresh["model"].state_dict(), live["model"].state_dict())


class Annealed(lr_scheduler.LRScheduler):
    """A scheduler with a function of torch in its state, as torch's own SWALR until 2.6."""

    def __init__(self, optimizer: torch.optim.Optimizer, function: Callable[..., Tensor]) -> None:
        self.function = function
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [self.function(torch.tensor(group["lr"])).item() for group in self.optimizer.param_groups]


def test_a_function_of_torch_is_stored_by_its_name_and_another_one_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    relu, other = Annealed(optimizer, nn.functional.relu), Annealed(optimizer, nn.functional.elu)
    fresh = Annealed(optimizer, nn.functional.relu)
    relu.last_epoch = 7

    assert capture({"scheduler": relu}).tree["scheduler"]["state"]["function"] == "torch.nn.functional.relu"
    carry({"scheduler": relu}, {"scheduler": fresh})
    assert (fresh.last_epoch, fresh.function) == (7, nn.functional.relu)
    with pytest.raises(StateError, match=r"function: stored torch\.nn\.functional\.relu, live torch.*elu"):
        carry({"scheduler": relu}, {"scheduler": other})
    with pytest.raises(StateError, match="function: cannot store"):
        capture({"scheduler": Annealed(optimizer, lambda rate: rate)})


def test_fp32_moments_of_a_bf16_parameter_keep_their_bits() -> None:
    model, fresh = (nn.Linear(4, 4).bfloat16() for _ in range(2))
    optimizer, resumed = (torch.optim.AdamW(net.parameters()) for net in (model, fresh))
    train_once = model(torch.ones(1, 4, dtype=torch.bfloat16)).sum()
    train_once.backward()
    optimizer.step()
    for values in optimizer.state.values():
        values["exp_avg"] = torch.rand(values["exp_avg"].shape)
        values["nested"] = {"moment": [torch.rand(3)], "mode": "fast"}

    carry({"model": model, "optimizer": optimizer}, {"model": fresh, "optimizer": resumed})

    assert identical(resumed.state_dict(), optimizer.state_dict())


def test_moments_in_another_memory_order_keep_it() -> None:
    model, fresh = (nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last) for _ in range(2))
    optimizer, resumed = (torch.optim.Adam(net.parameters()) for net in (model, fresh))
    model(torch.rand(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    assert not optimizer.state[model.weight]["exp_avg"].is_contiguous()

    carry({"model": model, "optimizer": optimizer}, {"model": fresh, "optimizer": resumed})

    assert identical(resumed.state_dict(), optimizer.state_dict())
    assert identical(fresh.state_dict(), model.state_dict())


# Modules ----------------------------------------------------------------------------------------------------------


def test_tensors_are_named_by_their_path_and_tied_ones_are_stored_once() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 0, 1)

    captured = capture({"model": model, "optimizer": optimizer})

    assert "model/embed.weight" in captured.tensors
    assert "model/head.weight" not in captured.tensors
    assert "optimizer/state/0/exp_avg" in captured.tensors
    assert captured.tree["model"]["state"]["head.weight"] == trees.TensorRef("model/embed.weight", "F32")
    assert captured.tensors["model/embed.weight"].data_ptr() == model.embed.weight.data_ptr()


def test_tied_weights_are_still_tied_after_a_restore() -> None:
    model, fresh = Net(0), Net(1)
    carry({"model": model}, {"model": fresh})
    assert fresh.head.weight is fresh.embed.weight
    assert identical(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("tied_live", [True, False])
def test_a_tie_that_only_one_side_has_is_refused(tied_live: bool) -> None:
    tied, untied = Net(0), Net(1)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    source, target = (untied, tied) if tied_live else (tied, untied)
    with pytest.raises(StateError, match=r"model differs.*head\.weight: .*tied to embed\.weight"):
        carry({"model": source}, {"model": target})


def test_parameters_without_gradient_are_frozen_and_buffers_are_not() -> None:
    model = Net()
    model.hidden.requires_grad_(False)
    assert capture({"model": model}).frozen == {"model/hidden.weight"}


def test_what_an_optimizer_has_is_not_frozen_though_it_requires_no_gradient_just_now() -> None:
    """The two sides of a GAN are frozen in turns: the layout stays."""
    model = Net()
    model.hidden.requires_grad_(False)
    optimizer = torch.optim.SGD(model.hidden.parameters(), lr=0.1)
    assert capture({"model": model, "optimizer": optimizer}).frozen == frozenset()


def test_freezing_and_unfreezing_are_other_layouts() -> None:
    model = Net()
    trained = capture({"model": model}).specs()
    model.hidden.requires_grad_(False)
    frozen = capture({"model": model}).specs()
    model.hidden.requires_grad_(True)
    assert frozen != trained
    assert capture({"model": model}).specs() == trained


def test_a_tensor_that_is_tied_to_a_trained_one_is_not_frozen() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(2), requires_grad=False)
            self.b = nn.Parameter(self.a.detach())

    assert capture({"model": Twice()}).frozen == frozenset()


class Counted(nn.Linear):
    """A module with extra state and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = None
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_a_module_comes_back() -> None:
    model, fresh = Counted(), Counted()
    model.extra = {"seen": (1, 2), "scale": torch.tensor([1.5]), 3: Counter({1: 2})}
    carry({"model": model}, {"model": fresh})
    assert identical(fresh.extra, model.extra)


def test_averaged_models_and_their_counters_come_back() -> None:
    def build(seed: int) -> dict[str, Any]:
        model = Net(seed)
        return {"model": model, "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)}

    live, fresh = build(0), build(1)
    live["ema"].update_parameters(live["model"])
    carry(live, fresh)
    for run in (live, fresh):
        with torch.no_grad():
            run["model"].hidden.weight.mul_(2)
        run["ema"].update_parameters(run["model"])
    assert identical(fresh["ema"].state_dict(), live["ema"].state_dict())
    assert "module.embed.weight" in capture(live).tree["ema"]["state"]


def test_data_parallel_is_captured_under_plain_names_and_restored_into_either_form() -> None:
    plain, wrapped = Net(0), nn.DataParallel(Net(1))
    optimizer, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, wrapped))
    carry({"model": plain, "optimizer": optimizer}, {"model": wrapped, "optimizer": other})
    assert identical(wrapped.module.state_dict(), plain.state_dict())

    another = Net(2)
    carry({"model": wrapped}, {"model": another})
    assert identical(another.state_dict(), plain.state_dict())


def test_a_compiled_model_is_captured_under_plain_names_and_restored_into_either_form() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.module = inner

    plain = Outer(Net(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own imports
        compiled: Any = torch.compile(nn.DataParallel(Outer(torch.compile(Net(1)))))
    assert "_orig_mod.module.module._orig_mod.embed.weight" in compiled.state_dict()

    carry({"model": plain}, {"model": compiled})
    again = Outer(Net(2))
    carry({"model": compiled}, {"model": again})

    assert identical(again.state_dict(), plain.state_dict())
    assert "model/module.embed.weight" in capture({"model": compiled}).tensors


# Everything else that is a state ----------------------------------------------------------------------------------


def test_a_grad_scaler_comes_back() -> None:
    live, fresh = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    live.scale(torch.ones(1))
    live.update(4.0)
    carry({"scaler": live}, {"scaler": fresh})
    assert fresh.state_dict() == live.state_dict()
    assert fresh.get_scale() == 4.0


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


def contents() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    complex_tensor = torch.randn(3, 4, dtype=torch.complex128, generator=generator)
    shared = torch.arange(3.0)
    return {
        "nested": {"list": [torch.ones(2), (torch.zeros(()), {"deep": torch.empty(0, 3)})], 1: "int", "1": "str"},
        "same names": {1: torch.ones(1), "1": torch.zeros(1)},
        "ordered": OrderedDict(b=torch.ones(1), a=2),
        "counter": Counter({1: 2, "x": 3}),
        "set": {1, "a"},
        "bytes": bytearray(b"\0\1"),
        "numbers": [math.inf, -0.0, 2**80, numpy.float32(0.1), True, None],
        "complex128": complex_tensor,
        "complex128 transposed": complex_tensor.t(),
        "complex64": complex_tensor.to(torch.complex64),
        "fortran": torch.arange(6.0).reshape(2, 3).t(),
        "shared": [shared, shared],
        "arrays": {
            dtype: numpy.arange(6).reshape(2, 3).astype(dtype)
            for dtype in ("bool", "int8", "uint16", "uint64", "float16", "float64", "complex64", "complex128")
        },
        "array in Fortran order": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        "array scalar": numpy.array(1.5),
        "zoo": {
            name: torch.randint(0, 2, (4 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
            for dtype, name in DTYPE_NAMES.items()
        },
    }


def test_everything_that_a_state_may_hold_comes_back() -> None:
    live, fresh = Box(**contents()), Box()
    carry({"box": live}, {"box": fresh})
    assert identical(fresh.values, live.values)
    assert fresh.values["shared"][0] is fresh.values["shared"][1]


def test_lazily_conjugated_read_only_and_reversed_values_come_back_plain() -> None:
    array = numpy.arange(4.0)[::-1]
    read_only = numpy.arange(3)
    read_only.flags.writeable = False
    tensor = torch.randn(3, dtype=torch.complex128)
    fresh = Box()
    carry({"box": Box(a=array, b=read_only, c=tensor.conj(), d=tensor.to(torch.complex64).conj())}, {"box": fresh})
    assert fresh.values["a"].tolist() == [3, 2, 1, 0]
    assert fresh.values["b"].tolist() == [0, 1, 2]
    assert torch.equal(fresh.values["c"], tensor.conj())
    assert torch.equal(fresh.values["d"], tensor.to(torch.complex64).conj())


def test_what_was_captured_is_a_copy_but_for_its_tensors() -> None:
    box = Box(seen=[1], names={"a"}, raw=bytearray(b"a"))
    captured = capture({"box": box})
    box.values["seen"].append(2)
    box.values["names"].add("b")
    box.values["raw"][0] = 0
    assert captured.tree["box"]["state"] == {"seen": [1], "names": {"a"}, "raw": bytearray(b"a")}


def test_an_enum_member_is_found_in_the_live_object() -> None:
    fresh = Box(mode=Mode.FAST, per_mode={Mode.FAST: 0})
    carry({"box": Box(mode=Mode.SAFE, per_mode={Mode.SAFE: 1, Mode.FAST: 2})}, {"box": fresh})
    assert fresh.values == {"mode": Mode.SAFE, "per_mode": {Mode.SAFE: 1, Mode.FAST: 2}}


def test_an_enum_member_without_a_live_counterpart_is_refused() -> None:
    with pytest.raises(StateError, match=r"box\.mode: an enum member with value 'safe'.*keep its \.value"):
        carry({"box": Box(mode=Mode.SAFE)}, {"box": Box(mode=None)})


def test_a_tensor_that_aliases_a_parameter_aliases_it_again() -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    box, other = Box(weight=model.weight.detach()), Box()
    carry({"box": box, "model": model}, {"box": other, "model": fresh})
    assert other.values["weight"].data_ptr() == fresh.weight.data_ptr()


def test_tensors_are_told_state_by_state_and_each_once() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    told: list[dict[str, Tensor]] = []

    captured = capture(
        {"model": model, "tied": model, "optimizer": optimizer}, found=lambda tensors: told.append(dict(tensors))
    )

    assert [sorted({name.partition("/")[0].partition(".")[0] for name in one}) for one in told] == [
        ["model"],
        [],
        ["optimizer"],
    ]
    names = [name for one in told for name in one]
    assert sorted(names) == sorted(captured.tensors)
    assert all(captured.tensors[name] is tensor for one in told for name, tensor in one.items())


def test_generators_go_on_where_they_were() -> None:
    def build(seed: int) -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(seed),
            "pcg": numpy.random.default_rng(seed),
            "mt": numpy.random.Generator(numpy.random.MT19937(seed)),
            "philox": numpy.random.Generator(numpy.random.Philox(seed)),
            "sfc": numpy.random.Generator(numpy.random.SFC64(seed)),
            "python": random.Random(seed),
        }

    def draw(run: dict[str, Any]) -> list[Any]:
        return [
            torch.rand(3, generator=run["torch"]).tolist(),
            *[run[name].random(3).tolist() for name in ("pcg", "mt", "philox", "sfc")],
            run["python"].gauss(0, 1),
        ]

    live, fresh = build(0), build(1)
    draw(live)
    carry(live, fresh)
    assert draw(fresh) == draw(live)


def test_another_bit_generator_is_refused() -> None:
    with pytest.raises(StateError, match="rng: stored is a PCG64, live is a MT19937"):
        carry({"rng": numpy.random.default_rng(0)}, {"rng": numpy.random.Generator(numpy.random.MT19937(0))})


def test_states_in_containers_have_dotted_names() -> None:
    live = {"nets": {"g": nn.Linear(1, 1), "d": [nn.Linear(2, 1)]}, "boxes": (Box(a=1), Box(a=2))}
    fresh = {"nets": {"g": nn.Linear(1, 1), "d": [nn.Linear(2, 1)]}, "boxes": (Box(), Box())}
    assert list(flatten(live)) == ["nets.g", "nets.d.0", "boxes.0", "boxes.1"]
    assert "nets.d.0/weight" in capture(live).tensors
    carry(live, fresh)
    assert identical(fresh["nets"]["d"][0].state_dict(), live["nets"]["d"][0].state_dict())
    assert [box.values for box in fresh["boxes"]] == [{"a": 1}, {"a": 2}]


def test_what_is_flat_already_is_captured_and_restored_as_it_is() -> None:
    """A Checkpointer flattens what it is given, once: one with a list of optimizers was refused by the second time."""
    live, fresh = (flatten({"boxes": [Box(), {"inner": Box()}]}) for _ in range(2))
    live["boxes.0"].values["a"] = 1  # type: ignore[attr-defined]

    carry(live, fresh)

    assert list(flatten(live)) == ["boxes.0", "boxes.1.inner"]
    assert fresh["boxes.0"].values == {"a": 1}  # type: ignore[attr-defined]


def test_two_states_of_one_name_are_refused() -> None:
    with pytest.raises(StateError, match=r"two states are named a\.b"):
        flatten({"a.b": Box(), "a": {"b": Box()}})


# What cannot be captured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (3, "ckpt.extra"),
        (None, "ckpt.extra"),
        (torch.ones(1), "buffer of a module"),
        (numpy.ones(1), "state_dict"),
        (random.SystemRandom(), r"random\.Random\(seed\)"),
        (nn.Linear, "give an object of it"),
        (lambda: 0, "state_dict"),
        (torch.utils.data.DataLoader([1]), "loader="),
        (type("Half", (), {"state_dict": lambda self: {}})(), r"lacks load_state_dict\(\)"),
        ({}, "empty"),
        ([3], r"thing\.0|0: a builtins\.int"),
        ({1: Box()}, "keys must be strings"),
        ({"a/b": Box()}, "cannot name a state"),
    ],
)
def test_what_is_not_a_state_is_refused_with_the_remedy(state: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        flatten({"thing": state})


def test_what_keras_trains_by_itself_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Linear):
        optimizer: object = None

    class Optimizer:
        pass

    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(Model=Model, Optimizer=Optimizer))
    model = Model(1, 1)
    assert flatten({"model": model}) == {"model": model}
    model.optimizer = Optimizer()
    with pytest.raises(StateError, match=r"model: .*it is compiled.*optimizer of torch.*BackupAndRestore"):
        flatten({"model": model})
    with pytest.raises(StateError, match=r"adam: .*optimizer of torch.*BackupAndRestore"):
        flatten({"adam": model.optimizer})


def test_every_kind_of_state_is_told_apart() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = {
        Kind.MODULE: model,
        Kind.OPTIMIZER: optimizer,
        Kind.SCHEDULER: lr_scheduler.StepLR(optimizer, 1),
        Kind.STATE: Box(),
        Kind.TORCH_GENERATOR: torch.Generator(),
        Kind.NUMPY_GENERATOR: numpy.random.default_rng(0),
        Kind.PYTHON_GENERATOR: random.Random(0),
    }
    assert {kind: classify("x", state) for kind, state in kinds.items()} == {kind: kind for kind in kinds}


class Odd(Tensor):
    """A tensor subclass, as DTensor and the quantized ones are."""


def cycle() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, r"box\.a\[0\]: cannot store a builtins\.function; keep the name"),
        (sys.stderr, r"box\.a\[0\]: cannot store a .*; keep plain values"),
        (Box(), r"box\.a\[0\]: cannot store a .*Box; call its state_dict"),
        (torch.Size([1]), r"box\.a\[0\]: .*torch\.Size; its type would be lost: use a plain tuple"),
        ({(1, 2): object()}, r"box\.a\[0\]\['\(1, 2\)'\]"),
        (cycle(), "contains itself"),
        (torch.ones(2).as_subclass(Odd), r"box\.a\[0\]: cannot store a .*Odd"),
        (torch.ones(2).to_sparse(), r"box\.a\[0\]: .*layout torch\.sparse_coo; .*to_dense"),
        (torch.ones(2, device="meta"), r"box\.a\[0\]: .*meta device"),
        (torch.empty(4, dtype=torch.bits8), r"box\.a\[0\]: .*bits8; store .*uint8"),
        (nn.LazyLinear(2).weight, r"box\.a\[0\]: .*lazy.*run one batch"),
        (numpy.array(["a"]), r"box\.a\[0\]: cannot store a numpy array of <U1"),
        (numpy.ones(2, ">f4"), r"box\.a\[0\]: .*byte order"),
        (numpy.ma.masked_array([1.0]), r"box\.a\[0\]: cannot store"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_path_and_the_remedy(value: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        capture({"box": Box(a=[value])})


def test_an_expanded_buffer_is_refused_when_it_is_captured_and_not_when_it_is_restored() -> None:
    """torch cannot load into one: a run was saved for days that nobody could resume."""
    module = nn.Module()
    module.register_buffer("one", torch.arange(3).expand(1, -1))  # what transformers do; nothing is twice here
    capture({"module": module})
    module.register_buffer("many", torch.ones(1).expand(4, 3))

    with pytest.raises(StateError, match=r"module.*many.*expanded buffer.*clone\(\)"):
        capture({"module": module})


def test_a_lazy_model_is_refused_until_a_batch_went_through() -> None:
    with pytest.raises(StateError, match=r"model\.0\.weight.*run one batch"):
        capture({"model": nn.Sequential(nn.LazyLinear(2))})


# What cannot be restored ------------------------------------------------------------------------------------------


def layers(*sizes: int, **options: Any) -> nn.Module:
    return nn.Sequential(*[nn.Linear(a, b, **options) for a, b in itertools.pairwise(sizes)])


@pytest.mark.parametrize(
    ("live", "words"),
    [
        (layers(2, 2), r"model: .*stored but not live: 1\.weight, 1\.bias"),
        (layers(2, 2, 2, 2), r"model: .*live but not stored: 2\.weight, 2\.bias"),
        (layers(2, 2, 3), r"1\.weight: stored float32 \[2, 2\], live float32 \[3, 2\]"),
        (layers(2, 2, 2).double(), r"0\.weight: stored float32 \[2, 2\], live float64 \[2, 2\]"),
        (Box(), "model: stored is a module, live is a state"),
    ],
)
def test_a_changed_model_is_refused_and_left_as_it_was(live: Any, words: str) -> None:
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(StateError, match=words) as caught:
        carry({"model": layers(2, 2, 2)}, {"model": live})
    assert "--fresh" in str(caught.value)
    assert identical(dict(live.state_dict()), dict(before))


def test_a_state_that_came_or_went_is_refused() -> None:
    with pytest.raises(StateError, match="stored but not live: ema; live but not stored: box"):
        carry({"model": Box(), "ema": Box()}, {"model": Box(), "box": Box()})


@pytest.mark.parametrize("make", [partial(torch.optim.Adam, lr=0.1), torch.optim.LBFGS])
def test_an_optimizer_with_its_parameters_in_another_order_goes_on_as_it_was(make: Any) -> None:
    """As one of a set of parameters has them, in each start."""
    saved, unbroken, live = Net(), Net(), Net(seed=1)
    stopped, optimizer, resumed = (
        make(saved.parameters()),
        make(unbroken.parameters()),
        make([*live.parameters()][::-1]),
    )
    train(saved, stopped, 0, 3)
    train(unbroken, optimizer, 0, 3)

    carry({"model": saved, "optimizer": stopped}, {"model": live, "optimizer": resumed})

    train(live, resumed, 3, 3)
    train(unbroken, optimizer, 3, 3)
    assert identical(live.state_dict(), unbroken.state_dict())
    assert identical(resumed.state_dict(), optimizer.state_dict())


class Listing(torch.optim.SGD):
    """Has a list of its own of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.ours = [param for group in self.param_groups for param in group["params"]]


class Loading(torch.optim.SGD):
    """Loads in a way of its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("make", [Listing, partial(Loading, lr=0.1)])
def test_an_optimizer_that_may_know_its_parameters_order_is_refused_with_another_one(make: Any) -> None:
    model, live = nn.Linear(2, 2), nn.Linear(2, 2)
    states = {"model": model, "optimizer": make([model.weight, model.bias])}
    with pytest.raises(StateError, match=r"params\[0\]: stored model/weight, live model/bias: .*a set has another"):
        carry(states, {"model": live, "optimizer": make([live.bias, live.weight])})


def test_parameters_without_names_are_refused_in_another_order() -> None:
    a, b, c, d = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([a, b, c, d.bias])
    with pytest.raises(StateError, match=r"params\[0\]: stored \[1\], live \[2\]"):
        carry({"model": d, "optimizer": optimizer}, {"model": d, "optimizer": torch.optim.SGD([b, a, c, d.bias])})


def adam(*groups: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": group} for group in groups])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda a, b: adam([a, b]), "param_groups: stored 2 groups, live 1"),
        (lambda a, b: adam([a], [b, nn.Parameter(torch.ones(1))]), r"param_groups\[1\]: stored 1 parameters, live 2"),
        (lambda a, b: adam([b], [a]), r"param_groups\[0\]\.params\[0\]: stored model/weight, live model/bias"),
        (
            lambda a, b: torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1),
            r"param_groups\[0\]: .*stored but not live: amsgrad, betas.*live but not stored: dampening, momentum",
        ),
    ],
)
def test_a_changed_optimizer_is_refused_and_the_model_is_left_as_it_was(build: Any, words: str) -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = adam([model.weight], [model.bias])
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(StateError, match=words):
        carry(
            {"model": model, "optimizer": optimizer},
            {"model": fresh, "optimizer": build(fresh.weight, fresh.bias)},
        )
    assert identical(fresh.state_dict(), before)


class Counting(torch.optim.SGD):
    """Adds an option to its groups as it steps, as Lamb of timm does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def test_an_option_that_an_optimizer_adds_as_it_steps_comes_back() -> None:
    live, fresh = Net(0), Net(1)
    run, again = (Counting(model.parameters(), lr=0.1) for model in (live, fresh))
    train(live, run, 0, 3)

    carry({"model": live, "optimizer": run}, {"model": fresh, "optimizer": again})

    assert again.param_groups[0]["steps"] == 3


class Plain(torch.optim.Optimizer):
    """Has no option of torch's own, as most optimizers outside torch.optim."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def test_an_optimizer_that_was_given_a_state_as_it_was_prepared_is_the_same() -> None:
    """Accelerate gives each its own state, and torch adds an option to the optimizer's defaults there."""
    live, fresh = Net(0), Net(1)
    run, again = (Plain(model.parameters()) for model in (live, fresh))
    for prepared in (run, again):
        prepared.load_state_dict(prepared.state_dict())
    train(live, run, 0, 3)
    run.param_groups[0]["lr"] = 0.5

    carry({"model": live, "optimizer": run}, {"model": fresh, "optimizer": again})

    assert again.param_groups[0]["lr"] == 0.5


class Late(lr_scheduler.LRScheduler):
    """Has a value only from its second epoch on."""

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch > 1:
            self.warm = True
        return list(self.base_lrs)


@pytest.mark.parametrize("inside", [False, True])
def test_a_value_that_a_scheduler_of_ones_own_has_only_later_comes_back(inside: bool) -> None:
    def made(seed: int) -> tuple[dict[str, Any], Late]:
        model = Net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        late = Late(optimizer)
        scheduler = lr_scheduler.ChainedScheduler([late], optimizer) if inside else late
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, late

    (live, _), (fresh, late) = made(0), made(1)
    train(live["model"], live["optimizer"], 0, 3, live["scheduler"])

    carry(live, fresh)

    assert late.warm is True
    assert fresh["scheduler"].state_dict() == live["scheduler"].state_dict()


@pytest.mark.parametrize(("stored", "live"), [("StepLR", "OneCycleLR"), ("SequentialLR", "ChainedScheduler")])
def test_another_scheduler_is_refused(stored: str, live: str) -> None:
    with pytest.raises(StateError, match=r"(optimizer|scheduler).*stored but not live"):
        carry(trainer(stored, 0), trainer(live, 0))


def test_an_object_that_refuses_its_state_is_named() -> None:
    with pytest.raises(StateError, match=r"scaler: it refused its stored state \(.*empty"):
        carry({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, {"scaler": torch.amp.GradScaler("cpu")})


@pytest.mark.parametrize(
    "tree",
    [
        [1],
        {"model": 1},
        {"model": {"kind": "module"}},
        {"model": {"kind": "module", "state": [1]}},
        {"model": {"kind": "module", "state": {"weight": trees.TensorRef("none", "F32"), "bias": 1}}},
        {"model": {"kind": "module", "state": {"weight": trees.TensorRef("w", "F64"), "bias": 1}}},
        {"model": {"kind": "module", "state": {"weight": trees.TensorRef("w", "F32", "complex"), "bias": 1}}},
        {"model": {"kind": "module", "state": {"weight": trees.TensorRef("w", "F32", "plain", (0,)), "bias": 1}}},
    ],
)
def test_a_tree_that_capture_cannot_have_made_is_corrupt(tree: Any) -> None:
    with pytest.raises(SnapshotCorrupt):
        restore({"model": nn.Linear(3, 3)}, tree, {"w": torch.ones(3, 3)})


# Global random numbers --------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(2).tolist()]


def test_every_global_generator_goes_on_where_it_was() -> None:
    draws()
    tree = trees.loads(trees.dumps(capture_rng()))
    expected = draws()
    draws()
    restore_rng(tree)
    assert draws() == expected


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand, lambda: torch.rand(1)])
def test_every_draw_changes_what_is_captured_and_capturing_does_not(draw: Callable[[], object]) -> None:
    before = trees.dumps(capture_rng())
    assert trees.dumps(capture_rng()) == before
    draw()
    assert trees.dumps(capture_rng()) != before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"torch": b""}, SnapshotCorrupt),
        ({"torch": "text"}, SnapshotCorrupt),
        ({"torch": b"short"}, StateError),
        ({"python": (3, (1,), None)}, StateError),
        ({"python": 1}, StateError),
        ({"numpy": {"bit_generator": "MT19937"}}, StateError),
        ({"quantum": b"x"}, SnapshotCorrupt),
    ],
)
def test_a_damaged_random_state_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        restore_rng({**capture_rng(), **change})


def test_a_random_state_that_is_no_dict_is_refused() -> None:
    with pytest.raises(SnapshotCorrupt):
        restore_rng([1])


def test_a_device_that_is_not_here_is_left_out() -> None:
    tree = capture_rng()
    expected = draws()
    restore_rng({**tree, "xpu": [b"state of another machine"]})
    assert draws() == expected


def test_the_environment_is_text_and_says_what_computes() -> None:
    facts = environment()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in facts.items())
