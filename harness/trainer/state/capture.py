"""Capture: takes a tree of states apart into small values, and tensors by name. Copies no tensor.

Owns what a snapshot's tree looks like, and how its tensors are named; `restore.py` is the inverse.

    {"model": Module, ...}  --capture-->  Captured(tree of small values with TensorRefs, tensors by name)

Of several ranks, each captures what it has itself: of a DTensor its local part, with the place of that in the whole.

A state's node in the tree is {"kind": Kind, "state": its state_dict, ...}. Tensors leave the state_dict and are named
by their path: "model/transformer.h.0.weight", "optimizer/state/0/exp_avg". A tensor reached twice is stored once.

Nothing here draws a random number, or knows of slots, shards and steps. numpy is used only where the process has it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.core import tree as trees
from harness.core.pieces import Holding
from harness.core.shard import TensorSpec
from harness.core.tree import EnumValue, TensorRef, format_path
from harness.errors import StateError
from harness.trainer.copy.to_slot import DTYPE_NAMES
from harness.trainer.distributed.boxes import Box, box_of, is_dtensor, local_of
from harness.trainer.distributed.claims import Claims, LocalSteps
from harness.trainer.state.kinds import (
    Kind,
    by_name,
    classify,
    describe_parameters,
    flatten,
    is_array,
    is_tensor,
    name_of_function,
    names_of,
    parameter_names,
    plain_keys,
)
from harness.trainer.state.rng import arrays_to_bytes, tensor_bytes
from harness.trainer.state.unlisted import Unlisted

EXTRA: Final = "ckpt.extra"
"""The first part of the names of the tensors in the user's plain values."""

_PLAIN: Final = frozenset({Tensor, nn.Parameter, nn.Buffer})
"""The types of tensors that are stored as they are."""


@dataclass(frozen=True)
class Captured:
    """States at one moment. The tree is a copy; the tensors are the live ones, to be copied before training continues.

    Attributes:
        tree: small state with a `TensorRef` in place of each tensor; `harness.core.tree` encodes it.
        tensors: the tensors for the shards, by name; dense or not, on any device, always of a dtype that a shard can
            hold.
        frozen: names of untrained parameters of modules: they require no gradient, and no optimizer has them. A hint
            for the layout, no promise: an EMA's parameters may be frozen and still change. A parameter that an
            optimizer has is never frozen, so that the two sides of a GAN, frozen in turns, have one layout.
        extra: the user's plain values, in the same form as `tree`.
        devices: where tensors of `extra` are that are not on the CPU, by name.
        boxes: of several ranks: where a local tensor lies in the whole one, by name. Others are whole.
        holdings: of several ranks: how this one holds a tensor, by name. Others are its own.
        kept_equal: of several ranks: the parameters that a group of ranks keeps equal, and the index of that group.
        groups: those groups of ranks.
    """

    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    frozen: frozenset[str]
    extra: dict[Any, Any] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    kept_equal: dict[str, int] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()

    def specs(self) -> list[TensorSpec]:
        """Return the descriptions of the tensors that `plan_shards` needs."""
        return [
            TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), frozen=name in self.frozen)
            for name, tensor in self.tensors.items()
        ]


def capture(
    states: Mapping[str, object],
    unlisted: Unlisted | None = None,
    extra: Mapping[Any, Any] | None = None,
    *,
    sure: bool = True,
    alone: bool = True,
    local_steps: LocalSteps | None = None,
    found: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> Captured:
    """Take every state apart into small values and tensors. Copies no tensor.

    All calls of the states' own code come first; what is found after them does not change until this returns.

    Args:
        states: the user's states, by name; may nest in dicts, lists and tuples.
        unlisted: captures what is not in the state_dicts.
        extra: the user's plain values.
        sure: whether gradients are captured of which it is not known yet whether they matter. Not for a layout.
        alone: whether there are no other ranks.
        local_steps: of several ranks: the wrappers that this one has trained by itself.
        found: called with the tensors of each state as soon as they are known; these will be in `tensors`.

    Raises:
        StateError: something in a state cannot be stored; names its path, its type and the remedy.
    """
    flat = flatten(states)
    live = {name: _live(name, state) for name, state in flat.items()}
    names = parameter_names(flat)  # behind `state_dict`, which FSDP2 gives the parameters back that the optimizer has
    walk = _Walk(_optimized(flat), None if alone else Claims(flat, local_steps))
    tree, given = {}, 0
    for name, state in flat.items():
        tree[name] = _capture_state(name, state, live[name], names, walk)
        if unlisted is not None and isinstance(state, nn.Module):
            tree[name] |= unlisted.capture_module(name, state, walk, sure=sure)
        elif unlisted is not None and isinstance(state, Optimizer):
            tree[name] |= unlisted.capture_optimizer(name, state)
        elif unlisted is not None and tree[name]["kind"] == Kind.STATE:
            tree[name] |= unlisted.capture_object(name, state, walk, sure=sure)
        if found is not None:
            found(dict(itertools.islice(walk.tensors.items(), given, None)))
            given = len(walk.tensors)
    before = set(walk.tensors)
    kept = walk.value(dict(extra or {}), [EXTRA])
    devices = {
        name: str(tensor.device)
        for name, tensor in walk.tensors.items()
        if name not in before and tensor.device.type != "cpu"
    }
    return Captured(
        tree,
        walk.tensors,
        frozenset(walk.frozen),
        kept,
        devices,
        walk.boxes,
        walk.holdings,
        walk.kept_equal,
        () if walk.claims is None else walk.claims.groups,
    )


def check_value(value: Any, path: Sequence[str | int]) -> None:
    """Raise StateError if a plain value cannot be stored; names its path, its type and the remedy."""
    _Walk(frozenset()).value(value, list(path))


def check_encoding(tree: Mapping[str, Any]) -> None:
    """Prove that small state decodes to what was encoded, with its types. Called whenever a layout is planned.

    Raises:
        StateError: a state does not; names it.
    """
    for name, node in tree.items():
        if not trees.same(trees.loads(trees.dumps({name: node})), {name: node}):
            raise StateError(
                f"{name}: its state does not survive being stored: keep numbers, strings and tensors in it"
            )


def _live(name: str, state: Any) -> Any:
    """Return a state's own state_dict; `None` for a generator of random numbers."""
    generators = (Kind.TORCH_GENERATOR, Kind.NUMPY_GENERATOR, Kind.PYTHON_GENERATOR)
    return None if classify(name, state) in generators else state.state_dict()


def _capture_state(name: str, state: Any, live: Any, names: Mapping[int, str], walk: _Walk) -> dict[str, Any]:
    kind = classify(name, state)
    path: list[str | int] = [name]
    node: dict[str, Any] = {"kind": kind.value}
    match kind:
        case Kind.MODULE:
            node["state"] = _capture_module(state, live, path, walk)
        case Kind.OPTIMIZER:
            params = describe_parameters(state, names)
            node["state"] = _capture_optimizer(state, live, path, params, walk)
            node["params"] = params
        case Kind.TORCH_GENERATOR:
            node["state"] = tensor_bytes(state.get_state())
        case Kind.NUMPY_GENERATOR:
            node["state"] = arrays_to_bytes(state.bit_generator.state)
        case Kind.PYTHON_GENERATOR:
            node["state"] = walk.value(state.getstate(), path)
        case _:
            node["state"] = walk.value(live, path)
    return node


def _capture_optimizer(
    optimizer: Optimizer, live: dict[str, Any], path: list[str | int], params: list[list[Any]], walk: _Walk
) -> Any:
    if walk.claims is None:
        return walk.value(live, path)
    named = by_name(live, params)
    if named is None:  # it has its own form of state_dict
        return walk.value(live, path)
    in_order = [param for group in optimizer.param_groups for param in group["params"]]
    holders = dict(zip(names_of(params), in_order, strict=True))
    state = {}
    for key, values in named["state"].items():
        with walk.held_as(holders.get(key)):
            state[key] = walk.value(values, [*path, "state", key])
    return {**walk.value({**named, "state": {}}, path), "state": state}


def _capture_module(module: nn.Module, live: dict[str, Any], path: list[str | int], walk: _Walk) -> dict[str, Any]:
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    frozen = {
        key
        for key, param in module.named_parameters(remove_duplicate=False)
        if not param.requires_grad and id(param) not in walk.optimized
    }
    captured = {}
    for key, plain in plain_keys(module, live).items():
        path.append(plain)
        value = live[key]
        with walk.held_as(own.get(key), itself=True):
            captured[plain] = walk.tensor(value, path, key in frozen) if is_tensor(value) else walk.value(value, path)
        if is_tensor(value) and 0 in value.stride() and _is_expanded(value):
            _refuse_tensor(path, "an expanded buffer, whose entries share memory", "make it with expand(...).clone()")
        path.pop()
    return captured


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _optimized(flat: Mapping[str, object]) -> frozenset[int]:
    """Return the identities of the parameters that an optimizer has."""
    return frozenset(
        id(param)
        for state in flat.values()
        if isinstance(state, Optimizer)
        for group in state.param_groups
        for param in group["params"]
    )


class _Walk:
    """One pass over state_dicts, which takes tensors out, and copies everything else and checks that it is storable."""

    def __init__(self, optimized: frozenset[int], claims: Claims | None = None) -> None:
        self.optimized = optimized
        self.claims = claims
        self.boxes: dict[str, Box] = {}
        self.holdings: dict[str, Holding] = {}
        self.kept_equal: dict[str, int] = {}
        self._holding = Holding.OWN
        self._group: int | None = None
        self.tensors: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self._stored: dict[int, list[tuple[Tensor, str]]] = {}  # tensors and their names, by address

    def value(self, value: Any, path: list[str | int]) -> Any:
        """Return a copy of `value` with a `TensorRef` for every tensor and array in it."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if is_tensor(value):
            return self.tensor(value, path)
        if kind is dict or kind is OrderedDict or kind is Counter:
            items = (
                (key if type(key) is str else self._inside(key, path, key), self._inside(item, path, key))
                for key, item in value.items()
            )
            return kind(items) if kind is not Counter else Counter(dict(items))
        if kind is list or kind is tuple:
            return kind([self._inside(item, path, index) for index, item in enumerate(value)])
        if isinstance(value, enum.Enum):
            return EnumValue(self._inside(value.value, path, "value"))
        if is_array(value):
            return self._array(value, path)
        if (name := name_of_function(value)) is not None:
            return name
        trees.encode(value, tuple(path))  # raises if it cannot be stored
        return kind(value) if kind in (set, bytearray) else value

    def tensor(self, tensor: Tensor, path: list[str | int], frozen: bool = False, prefix: str = "") -> TensorRef:
        """Return a reference to a tensor; add it to `tensors`, unless the very same memory is there by another name."""
        check_tensor(tensor, path)
        box, tensor = (None, tensor.detach()) if type(tensor) in _PLAIN else _taken_apart(tensor, path)
        order = _memory_order(tensor)
        if (form := _stored_form(tensor)) is None:
            _refuse_tensor(path, f"a tensor of {tensor.dtype}", "store tensor.view(torch.uint8) instead")
        kind = prefix + ("complex" if form.dtype != tensor.dtype else "")
        there = self._stored.setdefault(tensor.data_ptr(), []) if tensor.numel() else []
        alias = alias_of(tensor) if there else None
        name = next((name for stored, name in there if alias_of(stored) == alias), None)
        if name is None:
            name = self._name(path)
            self.tensors[name] = form
            if box is not None:
                self.boxes[name] = box if form is tensor else box.of_pairs
            self.holdings[name] = self._holding if box is None else Holding.SHARED
            if self._group is not None:
                self.kept_equal[name] = self._group
            if frozen:
                self.frozen.add(name)
            there.append((tensor, name))
        elif not frozen:
            self.frozen.discard(name)
        return TensorRef(name, DTYPE_NAMES[form.dtype], kind.removesuffix("-") or "plain", order)

    @contextlib.contextmanager
    def held_as(self, holder: Tensor | None, *, itself: bool = False) -> Iterator[None]:
        """Say of tensors that they are as equal on all ranks as `holder` is, a parameter or a buffer of a module.

        Args:
            holder: the parameter or buffer; `None` if none is known.
            itself: whether the tensor is that parameter or buffer, and not an optimizer's state of it.
        """
        if holder is not None and self.claims is not None:
            self._holding = self.claims.of(holder)
            self._group = self.claims.group_of(holder) if itself else None
        try:
            yield
        finally:
            self._holding, self._group = Holding.OWN, None

    def _inside(self, value: Any, path: list[str | int], key: Any) -> Any:
        if len(path) >= trees.MAX_DEPTH:
            raise StateError(
                f"{format_path(path[:6])}… is nested more than {trees.MAX_DEPTH} deep, or contains itself: "
                "keep a flat record of it in the state instead"
            )
        path.append(key if type(key) in (str, int) else repr(key)[:80])
        copied = self.value(value, path)
        path.pop()
        return copied

    def _array(self, array: Any, path: list[str | int]) -> TensorRef:
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy(order="K")  # torch has neither read-only tensors nor negative strides
        try:
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):
            _refuse_tensor(
                path, f"a numpy array of {array.dtype}", "store numbers in the machine's byte order, or a list"
            )
        return self.tensor(tensor, path, prefix="numpy-")

    def _name(self, path: Sequence[str | int]) -> str:
        name = base = "/".join(map(str, path))
        copies = 1
        while name in self.tensors:  # keys 1 and "1" in one dict
            copies += 1
            name = f"{base}~{copies}"
        return name


def check_tensor(tensor: Tensor, path: Sequence[str | int]) -> None:
    """Raise StateError for a tensor that no shard can hold, or that has no shape yet."""
    if type(tensor) not in _PLAIN and is_dtensor(tensor):
        return check_tensor(local_of(tensor), path)
    if nn.parameter.is_lazy(tensor):
        _refuse_tensor(path, "a lazy parameter without a shape", "run one batch through the module first")
    if type(tensor) not in _PLAIN:
        kind = type(tensor)
        remedy = "store the plain tensors that it is made of, and make it again in load_state_dict()"
        _refuse_tensor(path, f"a {kind.__module__}.{kind.__qualname__}", remedy)
    if tensor.is_quantized:
        _refuse_tensor(path, "a quantized tensor", "store its int_repr(), scale and zero point")
    if tensor.is_nested:
        _refuse_tensor(path, "a nested tensor", "store its values and its offsets")
    if tensor.layout is not torch.strided:
        _refuse_tensor(path, f"a tensor of layout {tensor.layout}", "store its indices and its values, or to_dense()")
    if tensor.is_meta:
        _refuse_tensor(path, "a tensor on the meta device", "give the model its weights first: model.to_empty(...)")
    return None


def _taken_apart(tensor: Any, path: list[str | int]) -> tuple[Box | None, Tensor]:
    """Return this rank's part of a tensor, and where it lies in the whole one if it is part of a DTensor."""
    return (box_of(tensor, path), local_of(tensor)) if is_dtensor(tensor) else (None, tensor.detach())


def _stored_form(tensor: Tensor) -> Tensor | None:
    """Return the form of the tensor that a shard can hold: itself, or its real and imaginary parts; `None` if none."""
    if tensor.dtype in DTYPE_NAMES:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    return None


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_contiguous():
        return ()
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def alias_of(tensor: Tensor) -> Hashable | None:
    """Return a key that is equal for tensors with the same memory, seen the same way; `None` for an empty tensor."""
    if type(tensor) not in _PLAIN and is_dtensor(tensor):
        return alias_of(local_of(tensor))
    if tensor.numel() == 0:
        return None
    where = (tensor.device, tensor.data_ptr())
    return *where, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _refuse_tensor(path: Sequence[str | int], what: str, remedy: str) -> NoReturn:
    raise StateError(f"{format_path(path)}: cannot store {what}; {remedy}")
