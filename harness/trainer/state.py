"""Capture and restore of a tree of states, and of every random number generator.

Owns what a State is, how its tensors are named, and what must be equal before anything is loaded:

    {"model": Module, ...}  --capture-->  Captured(tree of small values with TensorRefs, tensors by name)
    {"model": Module, ...}  <--restore--  tree, tensors by name

A state's node in the tree is {"kind": Kind, "state": its state_dict, ...}. Tensors leave the state_dict and are named
by their path: "model/transformer.h.0.weight", "optimizer/state/0/exp_avg". One that is reached twice is stored once.

Nothing here draws a random number, or knows of slots, shards and steps. numpy is used only where the process has it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import enum
import hashlib
import importlib
import platform
import random
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.core import tree as trees
from harness.core.shard import TensorSpec
from harness.core.tree import EnumValue, TensorRef, format_path
from harness.errors import SnapshotCorrupt, StateError
from harness.trainer.copy import DTYPE_NAMES, TORCH_DTYPES, Pair, describe
from harness.trainer.copy_out import copy_out

_SHOWN: Final = 5
"""Differences named in one message; the rest are counted."""

_SAME_PROGRAM: Final = "resume with the program that wrote this snapshot, or start anew with --fresh or another --run"


class Kind(enum.StrEnum):
    """What a State is, and so how it is captured, compared and restored. The values are part of the format."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    STATE = "state"
    """Any other object with `state_dict` and `load_state_dict`."""
    TORCH_GENERATOR = "torch_generator"
    NUMPY_GENERATOR = "numpy_generator"
    PYTHON_GENERATOR = "python_generator"


@dataclass(frozen=True)
class Captured:
    """States at one moment. The tree is a copy; the tensors are the live ones, to be copied before training goes on.

    Attributes:
        tree: small state with a `TensorRef` where a tensor was; `harness.core.tree` encodes it.
        tensors: what goes into shards, by name; dense or not, on any device, always of a dtype that a shard can hold.
        frozen: names of parameters of modules that nobody trains: they require no gradient, and no optimizer has them.
            A hint for the layout, no promise: an EMA's parameters may be frozen and still change. What an optimizer has
            is never frozen, so that the two sides of a GAN, frozen in turns, have one layout.
    """

    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    frozen: frozenset[str]

    def specs(self) -> list[TensorSpec]:
        """The tensors as `plan_shards` wants them."""
        return [
            TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), frozen=name in self.frozen)
            for name, tensor in self.tensors.items()
        ]


def classify(name: str, state: object) -> Kind:
    """What `state` is.

    Args:
        name: what the user calls it, for messages.
        state: what the user gave.

    Raises:
        StateError: it is not a State; says what to give instead.
    """
    if isinstance(state, type):
        _refuse_state(name, state, "this is a class: give an object of it")
    if isinstance(state, nn.Module):
        return Kind.MODULE
    if isinstance(state, Optimizer):
        return Kind.OPTIMIZER
    if isinstance(state, LRScheduler):
        return Kind.SCHEDULER
    if isinstance(state, torch.Generator):
        return Kind.TORCH_GENERATOR
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(state, numpy.Generator):
        return Kind.NUMPY_GENERATOR
    if isinstance(state, random.SystemRandom):
        _refuse_state(name, state, "the operating system's generator has no state: use random.Random(seed)")
    if isinstance(state, random.Random):
        return Kind.PYTHON_GENERATOR
    can_save, can_load = (callable(getattr(state, method, None)) for method in ("state_dict", "load_state_dict"))
    if can_save and can_load:
        return Kind.STATE
    return _refuse_state(name, state, _state_remedy(state, can_save=can_save, can_load=can_load))


def flatten(states: Mapping[str, object]) -> dict[str, object]:
    """Every State by name; those in dicts, lists and tuples under dotted names such as "optimizers.0".

    Raises:
        StateError: something in it is not a State, or a key cannot be part of a name.
    """
    flat: dict[str, object] = {}
    for name, state in states.items():
        if not re.fullmatch(r"\w+", name):
            raise StateError(f"{name[:80]!r} cannot name a state: use letters, digits and underscores")
        if isinstance(state, (dict, list, tuple)):
            if not state:
                _refuse_state(name, state, "it is empty: give it when it holds something, or leave it out")
            inner = state if isinstance(state, dict) else {str(index): item for index, item in enumerate(state)}
            if not all(isinstance(key, str) for key in inner):
                _refuse_state(name, state, "its keys must be strings")
            try:
                flat |= {f"{name}.{key}": item for key, item in flatten(inner).items()}
            except RecursionError as err:
                raise StateError(f"{name}: it contains itself: give its states one by one") from err
        else:
            classify(name, state)
            flat[name] = state
    return flat


def capture(states: Mapping[str, object]) -> Captured:
    """Take every state apart into small values and tensors. Copies no tensor.

    Args:
        states: what the user gave, by name; may nest in dicts, lists and tuples.

    Raises:
        StateError: something in a state cannot be stored; names its path, its type and the remedy.
    """
    flat = flatten(states)
    names = _parameter_names(flat)
    walk = _Walk(_optimized(flat))
    tree = {name: _capture_state(name, state, names, walk) for name, state in flat.items()}
    return Captured(tree, walk.tensors, frozenset(walk.frozen))


def check_encoding(tree: Mapping[str, Any]) -> None:
    """Prove that small state comes back as it was, with its types. Done whenever a layout is planned.

    Raises:
        StateError: it would not; names the state.
    """
    for name, node in tree.items():
        if not trees.same(trees.loads(trees.dumps({name: node})), {name: node}):
            raise StateError(
                f"{name}: its state does not survive being stored: keep numbers, strings and tensors in it"
            )


def restore(states: Mapping[str, object], tree: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put states back to what `capture` saw. Compares all of them first: what differs is refused before any is changed.

    Modules are loaded in place, and so is what an optimizer of torch has made already; whatever else holds tensors gets
    copies, so `tensors` may be invalid afterwards. A copy goes to the device of the live tensor in its place; an
    optimizer moves its own to where it wants them.

    Args:
        states: live objects, made by the same program as those that were captured.
        tree: `Captured.tree`, decoded.
        tensors: the stored tensors by name; typically views into a slot.

    Raises:
        StateError: the live objects differ from the stored ones; names the path, both sides and the remedy.
        SnapshotCorrupt: the tree does not fit the tensors, or is not one that `capture` made.
    """
    flat = flatten(states)
    _compare_names("the snapshot", sorted(_mapping("the snapshot", tree)), sorted(flat), "state")
    names = _parameter_names(flat)
    stored = _Stored(tensors)
    for optimizer in flat.values():
        if isinstance(optimizer, Optimizer):
            stored.keep_off(param for group in optimizer.param_groups for param in group["params"])
    for name, state in flat.items():
        _compare_state(name, state, _node(name, tree[name]), names, stored)
    # Modules first: a tensor elsewhere that shared memory with a module's is tied to the live one again.
    order = sorted(flat, key=lambda name: not isinstance(flat[name], nn.Module))
    loads: dict[str, Callable[[], object]] = {}
    for name in order:
        with _refusals(name):
            loads[name] = _prepare(name, flat[name], tree[name], stored)
    stored.fill()
    for name, load in loads.items():
        with _refusals(name):
            load()


@contextlib.contextmanager
def _refusals(name: str) -> Iterator[None]:
    """What a state says against its stored form, as the user meets it."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as err:
        raise StateError(f"{name}: it refused its stored state ({err}): {_SAME_PROGRAM}") from err


# Random number generators --------------------------------------------------------------------------------------------


def capture_rng() -> dict[str, Any]:
    """The state of every global generator: Python, numpy if it is imported, torch on the CPU and on devices in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": _tensor_bytes(torch.get_rng_state())}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        state["numpy"] = _arrays_to_bytes(numpy_random.get_state(legacy=False))
    for device, module in _devices_in_use():
        state[device] = [_tensor_bytes(module.get_rng_state(index)) for index in range(module.device_count())]
    return state


def restore_rng(tree: object) -> None:
    """Put every global generator back. A device that this machine does not have is left out; `environment` tells.

    Raises:
        StateError: a generator refused its stored state.
        SnapshotCorrupt: `tree` is not one that `capture_rng` made.
    """
    if not isinstance(tree, dict) or not ({"python", "torch"} <= set(tree) <= {"python", "torch", "numpy", *_DEVICES}):
        raise SnapshotCorrupt("the stored state of the random number generators has unknown or missing parts")
    try:
        random.setstate(tree["python"])
        torch.set_rng_state(_bytes_tensor(tree["torch"]))
        if "numpy" in tree:
            numpy_random = importlib.import_module("numpy.random")
            numpy_random.set_state(_arrays_from_bytes(tree["numpy"], numpy_random.get_state(legacy=False)))
        for device in _DEVICES:
            module = getattr(torch, device)
            for index, state in enumerate(tree.get(device, [])[: module.device_count()]):
                module.set_rng_state(_bytes_tensor(state), index)
    except ImportError as err:
        raise StateError("the snapshot holds numpy's random state, and numpy is not installed: install it") from err
    except (RuntimeError, ValueError, TypeError, LookupError) as err:
        raise StateError(f"a random number generator refused its stored state ({err}): {_SAME_PROGRAM}") from err


def rng_fingerprint() -> bytes:
    """16 bytes that change when any global CPU generator draws. Costs 0.1 ms."""
    digest = hashlib.blake2b(_tensor_bytes(torch.get_rng_state()), digest_size=16)
    version, words, gauss = random.getstate()
    digest.update(array.array("Q", words))
    digest.update(repr((version, gauss)).encode())
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        digest.update(repr(_arrays_to_bytes(numpy_random.get_state(legacy=False))).encode())
    return digest.digest()


def environment() -> dict[str, str]:
    """What bit-identity depends on besides the program. Recorded with a snapshot; a difference is told on resuming."""
    numpy = sys.modules.get("numpy")
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__ if numpy is not None else "not imported",
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "interop_threads": str(torch.get_num_interop_threads()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    for device, module in _devices_in_use():
        count = module.device_count()
        # MPS names no devices: there is one, and it is the machine's.
        names = [module.get_device_name(index) if device != "mps" else "mps" for index in range(count)]
        facts[device] = ", ".join(names)
    if torch.cuda.is_available():
        facts["cuda_version"] = str(torch.version.cuda)
        facts["hip_version"] = str(torch.version.hip)
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["cudnn_deterministic"] = str(torch.backends.cudnn.deterministic)
        facts["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
    return facts


# Capturing -----------------------------------------------------------------------------------------------------------


def _capture_state(name: str, state: Any, names: Mapping[int, str], walk: _Walk) -> dict[str, Any]:
    kind = classify(name, state)
    path: list[str | int] = [name]
    node: dict[str, Any] = {"kind": kind.value}
    match kind:
        case Kind.MODULE:
            node["state"] = _capture_module(state, path, walk)
        case Kind.OPTIMIZER:
            node["state"] = walk.value(state.state_dict(), path)
            node["params"] = _describe_parameters(state, names)
        case Kind.TORCH_GENERATOR:
            node["state"] = _tensor_bytes(state.get_state())
        case Kind.NUMPY_GENERATOR:
            node["state"] = _arrays_to_bytes(state.bit_generator.state)
        case Kind.PYTHON_GENERATOR:
            node["state"] = walk.value(state.getstate(), path)
        case _:
            node["state"] = walk.value(state.state_dict(), path)
    return node


def _capture_module(module: nn.Module, path: list[str | int], walk: _Walk) -> dict[str, Any]:
    live = module.state_dict()
    frozen = {
        key
        for key, param in module.named_parameters(remove_duplicate=False)
        if not param.requires_grad and id(param) not in walk.optimized
    }
    captured = {}
    for key, plain in _plain_keys(module, live).items():
        path.append(plain)
        value = live[key]
        captured[plain] = walk.tensor(value, path, key in frozen) if _is_tensor(value) else walk.value(value, path)
        path.pop()
    return captured


def _optimized(flat: Mapping[str, object]) -> frozenset[int]:
    """Identities of the parameters that an optimizer has."""
    return frozenset(
        id(param)
        for state in flat.values()
        if isinstance(state, Optimizer)
        for group in state.param_groups
        for param in group["params"]
    )


class _Walk:
    """One pass over state_dicts: tensors are taken out, everything else is copied and found storable."""

    def __init__(self, optimized: frozenset[int]) -> None:
        self.optimized = optimized
        self.tensors: dict[str, Tensor] = {}
        self.frozen: set[str] = set()
        self._stored: dict[Hashable, str] = {}

    def value(self, value: Any, path: list[str | int]) -> Any:
        """A copy of `value` with a `TensorRef` for every tensor and array in it."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if _is_tensor(value):
            return self.tensor(value, path)
        if kind is dict or kind is OrderedDict or kind is Counter:
            items = ((self._inside(key, path, key), self._inside(item, path, key)) for key, item in value.items())
            return kind(items) if kind is not Counter else Counter(dict(items))
        if kind is list or kind is tuple:
            return kind([self._inside(item, path, index) for index, item in enumerate(value)])
        if isinstance(value, enum.Enum):
            return EnumValue(self._inside(value.value, path, "value"))
        if _is_array(value):
            return self._array(value, path)
        trees.encode(value, tuple(path))  # refuses what cannot be stored
        return kind(value) if kind in (set, bytearray) else value

    def tensor(self, tensor: Tensor, path: list[str | int], frozen: bool = False, prefix: str = "") -> TensorRef:
        """Put a tensor on the list, unless the very same memory is there under an earlier name."""
        _check_tensor(tensor, path)
        tensor = tensor.detach()
        order = _memory_order(tensor)
        alias = _alias(tensor)
        if (form := _stored_form(tensor)) is None:
            _refuse_tensor(path, f"a tensor of {tensor.dtype}", "store tensor.view(torch.uint8) instead")
        kind = prefix + ("complex" if form.dtype != tensor.dtype else "")
        name = self._stored.get(alias) if alias is not None else None
        if name is None:
            name = self._name(path)
            self.tensors[name] = form
            if frozen:
                self.frozen.add(name)
            if alias is not None:
                self._stored[alias] = name
        elif not frozen:
            self.frozen.discard(name)
        return TensorRef(name, DTYPE_NAMES[form.dtype], kind.removesuffix("-") or "plain", order)

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


def _check_tensor(tensor: Tensor, path: Sequence[str | int]) -> None:
    if nn.parameter.is_lazy(tensor):
        _refuse_tensor(path, "a lazy parameter without a shape", "run one batch through the module first")
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
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


def _stored_form(tensor: Tensor) -> Tensor | None:
    """The tensor as a shard can hold it: itself, or its real and imaginary parts; `None` where it cannot."""
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


def _alias(tensor: Tensor) -> Hashable | None:
    """Equal for tensors that are the same memory seen the same way. `None` for an empty one: no memory is shared."""
    if tensor.numel() == 0:
        return None
    where = (tensor.device, tensor.data_ptr())
    return *where, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _parameter_names(flat: Mapping[str, object]) -> dict[int, str]:
    """Names of all parameters of all modules, by the parameter's `id`."""
    names: dict[int, str] = {}
    for name, module in flat.items():
        if isinstance(module, nn.Module):
            params = dict(module.named_parameters(remove_duplicate=False))
            for key, plain in _plain_keys(module, params).items():
                names.setdefault(id(params[key]), f"{name}/{plain}")
    return names


def _describe_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[Any]]:
    """Per group, each parameter's name, or its shape where no captured module has it.

    An optimizer's state_dict knows its parameters by position only; loaded after a change of their order it would put
    every moment at the wrong parameter, without a word where the shapes are equal.
    """
    return [[names.get(id(param), list(param.shape)) for param in group["params"]] for group in optimizer.param_groups]


def _plain_keys(module: nn.Module, keys: Mapping[str, Any]) -> dict[str, str]:
    """Each key without what torch.compile, DistributedDataParallel and DataParallel put into it.

    By the modules that are there, not by the text of the key: a model may have a child called `module` of its own, as
    AveragedModel has.
    """
    wrappers = [
        (f"{path}." if path else "", inner)
        for path, child in module.named_modules(remove_duplicate=False)
        if (inner := _wrapped_as(child)) is not None
    ]
    if not wrappers:
        return {key: key for key in keys}
    wrappers.sort(key=lambda wrapper: -len(wrapper[0]))  # inner ones first: their paths hold the outer ones' prefixes
    plain = {}
    for key in keys:
        short = key
        for outer, inner in wrappers:
            if short.startswith(outer + inner):
                short = outer + short[len(outer) + len(inner) :]
        plain[key] = short
    return plain


def _wrapped_as(module: nn.Module) -> str | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module."
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds; without it nothing is compiled
    return "_orig_mod." if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


# Comparing -----------------------------------------------------------------------------------------------------------


class _Stored:
    """The stored tensors, checked against their references, and each copied out at most once, all of them in one go."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._waiting: list[Pair] = []
        self._offered: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def view(self, ref: TensorRef) -> Tensor:
        """The stored tensor in its live form: complex where it was; valid as long as the snapshot's bytes are."""
        tensor = self._tensors.get(ref.name)
        if tensor is None or TORCH_DTYPES.get(ref.dtype) is not tensor.dtype:
            raise SnapshotCorrupt(f"{ref.name}: no such {ref.dtype} tensor in the shards")
        if ref.kind.endswith("complex"):
            if not tensor.is_floating_point() or tensor.shape[-1:] != (2,):
                raise SnapshotCorrupt(f"{ref.name}: {describe(tensor)} is not pairs of reals")
            tensor = torch.view_as_complex(tensor)
        if ref.order and len(ref.order) != tensor.dim():
            raise SnapshotCorrupt(f"{ref.name}: an order of {len(ref.order)} dimensions for {describe(tensor)}")
        return tensor

    def copy(self, ref: TensorRef, like: Tensor | None) -> Tensor:
        """Room for a copy on the device of `like`, the same for the same memory; it has its content after `fill`.

        It is `like` itself where that was offered and is as the copy would be: new memory is dearer than the copy.
        """
        key = (ref.name, ref.kind)
        if key not in self._copies:
            view = self.view(ref)
            device = like.device if like is not None else view.device
            order = ref.order or tuple(range(view.dim()))
            place = sorted(range(len(order)), key=lambda dim: order[dim])

            def room(device: torch.device) -> Tensor:
                made = torch.empty([view.shape[dim] for dim in order], dtype=view.dtype, device=device)
                return made.permute(place)

            if like is not None and id(like) in self._offered and self._is_same_room(like, room(torch.device("meta"))):
                self._taken.add(like.untyped_storage().data_ptr())
                self._copies[key] = like
            else:
                self._copies[key] = room(device)
            self._waiting.append((self._copies[key], view))
        return self._copies[key]

    def offer(self, tensors: Iterable[Tensor]) -> None:
        """These are their owner's alone, who is going to be given them again: they may be filled where they are."""
        self._offered.update((id(tensor), tensor) for tensor in tensors)

    def keep_off(self, tensors: Iterable[Tensor]) -> None:
        """Nothing that was offered is filled where these are."""
        self._taken.update(_storages(tensors))

    def _is_same_room(self, live: Tensor, room: Tensor) -> bool:
        """Whether `live` is as `room` would be, with a storage to itself that nothing is copied into yet."""
        return (
            type(live) is Tensor
            and live.layout is torch.strided
            and not (live.requires_grad or live.is_inference() or live.is_conj() or live.is_neg())
            and (live.shape, live.dtype, live.stride()) == (room.shape, room.dtype, room.stride())
            and live.untyped_storage().nbytes() == live.nbytes > 0
            and live.untyped_storage().data_ptr() not in self._taken
        )

    def put(self, ref: TensorRef, live: Tensor) -> None:
        """After `fill`, a module's own tensor holds what is stored."""
        if (ref.name, ref.kind) not in self._copies:
            self._waiting.append((live, self.view(ref)))
            self.tie(ref, live)
            self.keep_off([live])

    def tie(self, ref: TensorRef, live: Tensor) -> None:
        """The copy of `ref` is `live`, which is a module's own."""
        self._copies.setdefault((ref.name, ref.kind), live)

    def fill(self) -> None:
        """Copy all that has been asked for."""
        copy_out(self._waiting)
        self._waiting.clear()


def _storages(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Where the memory of plain tensors begins; what has none of its own is left out."""
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta and not nn.parameter.is_lazy(tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a wrapper around others
                yield tensor.untyped_storage().data_ptr()


def _node(name: str, node: Any) -> dict[str, Any]:
    if not (isinstance(node, dict) and isinstance(node.get("kind"), str) and "state" in node):
        raise SnapshotCorrupt(f"{name}: the stored state is not one that capture made")
    return node


def _compare_state(name: str, state: Any, node: dict[str, Any], names: Mapping[int, str], stored: _Stored) -> None:
    kind = classify(name, state)
    if node["kind"] != kind:
        raise StateError(f"{name}: stored is a {node['kind']}, live is a {kind.value}: {_SAME_PROGRAM}")
    saved = node["state"]
    for ref in _references(saved):
        stored.view(ref)
    match kind:
        case Kind.MODULE:
            _compare_module(name, state, _mapping(name, saved), stored)
        case Kind.OPTIMIZER:
            _compare_optimizer(name, state, _mapping(name, saved), node.get("params"), names)
        case Kind.SCHEDULER:
            _compare_scheduler(name, state.state_dict(), _mapping(name, saved))
        case Kind.NUMPY_GENERATOR:
            live = state.bit_generator.state["bit_generator"]
            if _mapping(name, saved).get("bit_generator") != live:
                raise StateError(f"{name}: stored is a {saved.get('bit_generator')}, live is a {live}: {_SAME_PROGRAM}")


def _compare_module(name: str, module: nn.Module, saved: dict[str, Any], stored: _Stored) -> None:
    live = module.state_dict()
    plain_keys = _plain_keys(module, live)
    _compare_names(name, list(saved), list(plain_keys.values()), "entry")
    differences = []
    first_live: dict[Hashable, str] = {}
    first_saved: dict[str, str] = {}
    for key, plain in plain_keys.items():
        value, ref = live[key], saved[plain]
        if _is_tensor(value) != isinstance(ref, TensorRef):
            differences.append(f"{plain}: a tensor on one side only")
        if not (_is_tensor(value) and isinstance(ref, TensorRef)):
            continue
        _check_tensor(value, [name, plain])
        there = stored.view(ref)
        if there.shape != value.shape or there.dtype != value.dtype:
            differences.append(f"{plain}: stored {describe(there)}, live {describe(value)}")
        alias = _alias(value)
        twin_live = plain if alias is None else first_live.setdefault(alias, plain)
        twin_saved = first_saved.setdefault(ref.name, plain)
        if twin_live != twin_saved:
            differences.append(f"{plain}: {_tie(twin_saved, plain, 'stored')}, {_tie(twin_live, plain, 'live')}")
    if differences:
        raise StateError(f"{name} differs from the stored one: {_shown(differences, '; ')}: {_SAME_PROGRAM}")


def _tie(twin: str, plain: str, side: str) -> str:
    return f"{side} tied to {twin}" if twin != plain else f"{side} on its own"


_WRITTEN_LATER: Final = {"initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "param_names"}
"""What schedulers and torch itself write into an optimizer's groups, perhaps long after the start (SWALR)."""


def _compare_optimizer(
    name: str, optimizer: Optimizer, saved: dict[str, Any], params: Any, names: Mapping[int, str]
) -> None:
    live_params = _describe_parameters(optimizer, names)
    if not (isinstance(params, list) and all(isinstance(group, list) for group in params)):
        raise SnapshotCorrupt(f"{name}: the stored optimizer does not tell its parameters")
    if len(params) != len(live_params):
        raise StateError(f"{name}.param_groups: stored {len(params)} groups, live {len(live_params)}: {_SAME_PROGRAM}")
    for index, (there, here) in enumerate(zip(params, live_params, strict=True)):
        if len(there) != len(here):
            raise StateError(
                f"{name}.param_groups[{index}]: stored {len(there)} parameters, live {len(here)}; {_SAME_PROGRAM}"
            )
        for position, (a, b) in enumerate(zip(there, here, strict=True)):
            if a != b:
                raise StateError(
                    f"{name}.param_groups[{index}].params[{position}]: stored {a}, live {b}: "
                    f"give the parameters in the same order; {_SAME_PROGRAM}"
                )
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(live_params):
        return  # an optimizer with a state_dict of its own making, which its load_state_dict judges
    for index, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        written = set(_mapping(name, group)) - _WRITTEN_LATER
        expected = optimizer.defaults.keys() | (live.keys() & written)
        _compare_names(f"{name}.param_groups[{index}]", sorted(written), sorted(expected), "option")


def _compare_scheduler(name: str, live: Mapping[str, Any], saved: dict[str, Any]) -> None:
    _compare_names(name, list(saved), list(live), "value")
    here, there = live.get("_schedulers"), saved.get("_schedulers")
    if isinstance(here, list) and isinstance(there, list):  # SequentialLR, ChainedScheduler
        if len(here) != len(there):
            raise StateError(f"{name}: stored {len(there)} schedulers, live {len(here)}: {_SAME_PROGRAM}")
        for index, (a, b) in enumerate(zip(here, there, strict=True)):
            _compare_scheduler(f"{name}._schedulers[{index}]", a, _mapping(name, b))


def _compare_names(where: str, saved: Sequence[str], live: Sequence[str], what: str) -> None:
    only_saved = [name for name in saved if name not in set(live)]
    only_live = [name for name in live if name not in set(saved)]
    if not (only_saved or only_live):
        return
    parts = []
    if only_saved:
        parts.append(f"stored but not live: {_shown(only_saved)}")
    if only_live:
        parts.append(f"live but not stored: {_shown(only_live)}")
    raise StateError(f"{where}: not the same {what} names; {'; '.join(parts)}: {_SAME_PROGRAM}")


def _references(value: Any) -> Iterator[TensorRef]:
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _references(item)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SnapshotCorrupt(f"{name}: a {type(value).__name__} is stored where a state_dict was")
    return value


def _shown(items: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more


# Restoring -----------------------------------------------------------------------------------------------------------


def _prepare(name: str, state: Any, node: dict[str, Any], stored: _Stored) -> Callable[[], object]:
    """What gives a state its stored form, to be called once the tensors are copied."""
    saved = node["state"]
    path: list[str | int] = [name]
    match Kind(node["kind"]):
        case Kind.MODULE:
            return _prepare_module(state, saved, stored, path)
        case Kind.OPTIMIZER:
            return _prepare_optimizer(state, saved, stored, path)
        case Kind.TORCH_GENERATOR:
            return lambda: state.set_state(_bytes_tensor(saved))
        case Kind.NUMPY_GENERATOR:
            revived = _arrays_from_bytes(saved, state.bit_generator.state)
            return lambda: setattr(state.bit_generator, "state", revived)
        case Kind.PYTHON_GENERATOR:
            return lambda: state.setstate(saved)
        case _:
            return partial(state.load_state_dict, _revive(saved, state.state_dict(), stored, path))


def _prepare_module(
    module: nn.Module, saved: dict[str, Any], stored: _Stored, path: list[str | int]
) -> Callable[[], object]:
    """Its tensors are copied with all others; then it loads itself, for its hooks and whatever else it keeps."""
    live = module.state_dict()
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    state: OrderedDict[str, Any] = OrderedDict()
    for key, plain in _plain_keys(module, live).items():
        value = saved[plain]
        if key not in own or not isinstance(value, TensorRef):  # extra state, which a module may keep as it is given
            state[key] = _revive(value, live[key], stored, [*path, plain])
        elif _alias(live[key]) == _alias(own[key]) is not None:
            stored.put(value, live[key])
            state[key] = own[key]  # loading a tensor into itself costs nothing
        else:  # a hook gives out something else than what the module holds
            state[key] = stored.view(value)
            stored.tie(value, live[key])
    if hasattr(live, "_metadata"):
        state._metadata = live._metadata  # type: ignore[attr-defined]  # versions of the modules' own formats
    return partial(module.load_state_dict, state, strict=True)


def _prepare_optimizer(
    optimizer: Optimizer, saved: Any, stored: _Stored, path: list[str | int]
) -> Callable[[], object]:
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:  # which keeps what it is given
        values = [value for own in optimizer.state.values() if isinstance(own, dict) for value in own.values()]
        stored.offer(value for value in values if type(value) is Tensor)
    revived = _revive(saved, _with_devices(optimizer, saved, stored), stored, path)

    def load() -> None:
        optimizer.load_state_dict(revived)
        # load_state_dict casts floating-point state to the parameter's dtype: fp32 moments of a bf16 parameter lose
        # bits. The inner dicts of state_dict()["state"] are the optimizer's own, not copies.
        for index, values in optimizer.state_dict().get("state", {}).items():
            if isinstance(values, dict) and isinstance(revived.get("state", {}).get(index), dict):
                for key, value in revived["state"][index].items():
                    values[key] = _uncast(values.get(key), value)

    return load


def _with_devices(optimizer: Optimizer, saved: Any, stored: _Stored) -> dict[str, Any]:
    """The live state_dict, with a parameter wherever a fresh optimizer has nothing yet: its state will lie beside it.

    But for single numbers: a step count stays on the CPU unless the optimizer itself wants it elsewhere.
    """
    live = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    there = live.get("state")
    kept = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(there, dict) or not isinstance(kept, dict):
        return live
    beside = {
        index: {key: params[index] for key, value in values.items() if _is_large(value, stored)}
        for index, values in kept.items()
        if isinstance(index, int) and 0 <= index < len(params) and isinstance(values, dict) and index not in there
    }
    return {**live, "state": {**there, **beside}}


def _is_large(value: Any, stored: _Stored) -> bool:
    return isinstance(value, TensorRef) and stored.view(value).dim() > 0


def _uncast(loaded: Any, saved: Any) -> Any:
    """`saved` where loading has changed its type or dtype, on the device that loading has chosen."""
    if isinstance(saved, Tensor):
        if not isinstance(loaded, Tensor):
            return saved
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return type(saved)({key: _uncast(loaded.get(key), value) for key, value in saved.items()})
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)) and len(saved) == len(loaded):
        return type(saved)([_uncast(a, b) for a, b in zip(loaded, saved, strict=True)])
    return saved


def _revive(value: Any, live: Any, stored: _Stored, path: list[str | int]) -> Any:
    """A stored tree as the live object made it: tensors and arrays copied out, enum members found in `live`."""
    if isinstance(value, TensorRef):
        copy = stored.copy(value, live if _is_tensor(live) else None)
        return copy.numpy() if value.kind.startswith("numpy") else copy
    if isinstance(value, EnumValue):
        return _enum_member(_revive(value.value, None, stored, path), live, path)
    if isinstance(value, dict):
        live = live if isinstance(live, dict) else {}
        items = {}
        for key, item in value.items():
            there = key if not isinstance(key, EnumValue) else _enum_key(key, live, path)
            items[there] = _revive(item, live.get(there), stored, [*path, str(key)])
        return type(value)(items)
    if isinstance(value, (list, tuple)):
        live = live if isinstance(live, (list, tuple)) else ()
        return type(value)(
            [
                _revive(item, live[index] if index < len(live) else None, stored, [*path, index])
                for index, item in enumerate(value)
            ]
        )
    return value


def _enum_member(value: Any, live: Any, path: Sequence[str | int]) -> enum.Enum:
    if not isinstance(live, enum.Enum):
        raise StateError(
            f"{format_path(path)}: an enum member with value {value!r} is stored, and the live object has none there "
            "to tell its class: set one before resuming, or keep its .value in the state"
        )
    return type(live)(value)


def _enum_key(key: EnumValue, live: Mapping[Any, Any], path: Sequence[str | int]) -> enum.Enum:
    member = next((item for item in live if isinstance(item, enum.Enum)), None)
    return _enum_member(key.value, member, path)


# Small pieces --------------------------------------------------------------------------------------------------------

_DEVICES: Final = ("cuda", "xpu", "mps")


def _devices_in_use() -> Iterator[tuple[str, Any]]:
    """Kinds of devices that this process has begun to use. Asking must not begin it: that costs device memory."""
    for device in ("cuda", "xpu"):
        module = getattr(torch, device)
        if module.is_initialized():
            yield device, module
    if torch.backends.mps.is_available():
        yield "mps", torch.mps


def _tensor_bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())  # a generator's state: uint8, contiguous, on the CPU


def _bytes_tensor(state: object) -> Tensor:
    if not (isinstance(state, bytes) and len(state) > 0):
        raise SnapshotCorrupt("a generator's state is stored as something else than bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _arrays_to_bytes(state: Any) -> Any:
    """A numpy generator's state with bytes for arrays; the rest are ints, floats and names."""
    if isinstance(state, dict):
        return {key: _arrays_to_bytes(value) for key, value in state.items()}
    return state.tobytes() if _is_array(state) else state


def _arrays_from_bytes(state: Any, live: Any) -> Any:
    """The inverse, with the dtypes of the live generator's state."""
    if isinstance(live, dict):
        return {key: _arrays_from_bytes(state[key], value) for key, value in live.items()}
    return sys.modules["numpy"].frombuffer(state, live.dtype) if _is_array(live) else state


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _refuse_tensor(path: Sequence[str | int], what: str, remedy: str) -> NoReturn:
    raise StateError(f"{format_path(path)}: cannot store {what}; {remedy}")


def _refuse_state(name: str, state: object, remedy: str) -> NoReturn:
    kind = state if isinstance(state, type) else type(state)
    raise StateError(f"{name}: a {kind.__module__}.{kind.__qualname__} is not a state; {remedy}")


def _state_remedy(state: object, *, can_save: bool, can_load: bool) -> str:
    if can_save or can_load:
        return f"it lacks {'load_state_dict()' if can_save else 'state_dict()'}: add it"
    if _is_tensor(state) or _is_array(state):
        return "keep it in an object with state_dict() and load_state_dict(), for example as a buffer of a module"
    if state is None or isinstance(state, (bool, int, float, str, bytes)):
        return "put plain values into ckpt.extra"
    if isinstance(state, torch.utils.data.DataLoader):
        return "give it as loader=, or run the loop over ckpt.batches(loader)"
    return "give an object with state_dict() and load_state_dict(), or put plain values into ckpt.extra"
