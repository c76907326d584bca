"""Restore: puts live states back to the moment when `capture` saw them.

    {"model": Module, ...}  <--restore--  tree, tensors by name

Owns how each kind of state takes its stored form; `compare.py` owns what must be equal before that.
"""

from __future__ import annotations

import contextlib
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.core.tree import EnumValue, TensorRef, format_path
from harness.errors import StateError
from harness.trainer.state.capture import alias_of
from harness.trainer.state.compare import compare_names, compare_state, mapping, node_of
from harness.trainer.state.entries import empty_buffers
from harness.trainer.state.kinds import (
    SAME_PROGRAM,
    Kind,
    by_position,
    describe_parameters,
    flatten,
    is_tensor,
    name_of_function,
    parameter_names,
    plain_keys,
)
from harness.trainer.state.rng import arrays_from_bytes, bytes_tensor
from harness.trainer.state.stored import Pieces, Stored
from harness.trainer.state.unlisted import Unlisted


def restore(
    states: Mapping[str, object],
    tree: dict[str, Any],
    tensors: Mapping[str, Tensor | Pieces],
    unlisted: Unlisted | None = None,
) -> None:
    """Put states back to what `capture` saw. Compares all of them first: a difference raises before any is changed.

    Modules are loaded in place, and so are tensors that a torch optimizer has made already. All other states get
    copies, so `tensors` may be invalid afterwards. A copy goes to the device of the live tensor that it replaces; an
    optimizer moves its own to the device that it needs.

    Args:
        states: live objects, made by the same program as the captured ones.
        tree: `Captured.tree`, decoded.
        tensors: the stored tensors by name; typically views into a slot.
        unlisted: restores what is not in the state_dicts.

    Raises:
        StateError: the live objects differ from the stored ones; names the path, both sides and the remedy.
        SnapshotCorrupt: the tree does not fit the tensors, or is not one that `capture` made.
    """
    flat = flatten(states)
    compare_names("the snapshot", sorted(mapping("the snapshot", tree)), sorted(flat), "state")
    names = parameter_names(flat)
    stored = Stored(tensors)
    for optimizer in flat.values():
        if isinstance(optimizer, Optimizer):
            stored.keep_off(param for group in optimizer.param_groups for param in group["params"])
    for name, state in flat.items():
        compare_state(name, state, node_of(name, tree[name]), names, stored)
    # Modules first: another state's tensor that shared memory with a module's is tied to the live one again.
    order = sorted(flat, key=lambda name: not isinstance(flat[name], nn.Module))
    loads: list[tuple[str, Callable[[], object]]] = []
    for name in order:
        with _refusals(name):
            state, node = flat[name], tree[name]
            if isinstance(state, Optimizer):
                _put_in_order(state, node["params"], names)
            if unlisted is not None and isinstance(state, Optimizer):
                unlisted.prepare_optimizer(name, state, node)
            loads.append((name, _prepare(name, state, node, stored, names)))
            if unlisted is not None and isinstance(state, nn.Module):
                loads.append((name, unlisted.prepare_module(name, state, node, stored)))
            elif unlisted is not None and "modules" in node:
                loads.append((name, unlisted.prepare_object(name, state, node, stored)))
    stored.fill()
    for name, load in loads:
        with _refusals(name):
            load()


def restore_values(values: Any, tensors: Mapping[str, Tensor | Pieces], devices: Mapping[str, str]) -> Any:
    """Return a captured tree of plain values in its live form. Its tensors and arrays are copies.

    Args:
        values: the tree, decoded.
        tensors: the stored tensors by name.
        devices: where tensors were that were not on the CPU, by name. On a machine without it, they stay on the CPU.
    """
    stored = Stored(tensors, {name: device for name, device in devices.items() if _has(device)})
    live = _revive(values, None, stored, ["ckpt.extra"])
    stored.fill()
    return live


def _has(device: str) -> bool:
    kind, _, index = device.partition(":")
    module = {"cuda": torch.cuda, "xpu": torch.xpu}.get(kind)
    return module is not None and module.is_available() and int(index or 0) < module.device_count()


@contextlib.contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn the error of a state that refuses its stored form into a StateError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as err:
        raise StateError(f"{name}: it refused its stored state ({err}): {SAME_PROGRAM}") from err


def _prepare(
    name: str, state: Any, node: dict[str, Any], stored: Stored, names: Mapping[int, str]
) -> Callable[[], object]:
    """Return the call that gives a state its stored form, to be made once the tensors are copied."""
    saved = node["state"]
    path: list[str | int] = [name]
    match Kind(node["kind"]):
        case Kind.MODULE:
            return _prepare_module(state, saved, stored, path)
        case Kind.OPTIMIZER:
            if isinstance(saved, dict):
                saved = by_position(saved, describe_parameters(state, names))
            return _prepare_optimizer(state, saved, stored, path)
        case Kind.TORCH_GENERATOR:
            return lambda: state.set_state(bytes_tensor(saved))
        case Kind.NUMPY_GENERATOR:
            revived = arrays_from_bytes(saved, state.bit_generator.state)
            return lambda: setattr(state.bit_generator, "state", revived)
        case Kind.PYTHON_GENERATOR:
            return lambda: state.setstate(saved)
        case _:
            return partial(state.load_state_dict, _revive(saved, state.state_dict(), stored, path))


def _prepare_module(
    module: nn.Module, saved: dict[str, Any], stored: Stored, path: list[str | int]
) -> Callable[[], object]:
    """Have the module's tensors copied with all others; the returned call runs its load hooks and loads the rest."""
    live = module.state_dict()
    own: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    state: OrderedDict[str, Any] = OrderedDict()
    for key, plain in plain_keys(module, live).items():
        value = saved[plain]
        if key not in own or not isinstance(value, TensorRef):  # extra state: a module may keep the very object
            state[key] = _revive(value, live[key], stored, [*path, plain])
        elif alias_of(live[key]) == alias_of(own[key]) is not None and own[key].shape == stored.view(value).shape:
            stored.put(value, live[key])
            state[key] = own[key]  # loading a tensor into itself costs nothing
        else:  # a hook of state_dict returns another tensor than the module's; or loading changes the shape
            state[key] = stored.copy(value, live[key])  # a copy: hooks may write to it
    like = next(module.parameters(), None)
    made = {plain: where for plain, where in empty_buffers(module).items() if plain in saved}
    state |= {key: stored.copy(saved[plain], like) for plain, (key, _, _) in made.items()}
    if hasattr(live, "_metadata"):
        state._metadata = live._metadata  # type: ignore[attr-defined]  # versions of the modules' own formats

    def load() -> None:
        for key, owner, leaf in made.values():
            owner._buffers[leaf] = state[key]
        with torch.no_grad():  # a hook may change its argument in place, and here that is the module's own tensor
            module.load_state_dict(state, strict=True)

    return load


def _put_in_order(optimizer: Optimizer, params: list[list[Any]], names: Mapping[int, str]) -> None:
    """Give an optimizer's groups their parameters in the stored order: those of a set have another one in each start.

    Not the other way round: what an optimizer has of all parameters together (LBFGS) is in the order of its groups.
    """
    for group, there in zip(optimizer.param_groups, params, strict=False):  # groups that were added are still to come
        here = {names.get(id(param)): param for param in group["params"]}
        if all(isinstance(name, str) for name in there) and list(here) != there:
            group["params"][:] = [here[name] for name in there]


def _prepare_optimizer(optimizer: Optimizer, saved: Any, stored: Stored, path: list[str | int]) -> Callable[[], object]:
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:  # which keeps the tensors that it gets
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


def _with_devices(optimizer: Optimizer, saved: Any, stored: Stored) -> dict[str, Any]:
    """Return the live state_dict, with a parameter in place of each state tensor that a new optimizer does not have.

    So the restored tensor goes to the parameter's device. Single numbers are left out: a step count stays on the CPU
    unless the optimizer itself moves it.
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


def _is_large(value: Any, stored: Stored) -> bool:
    return isinstance(value, TensorRef) and stored.view(value).dim() > 0


def _uncast(loaded: Any, saved: Any) -> Any:
    """Return `saved` if loading has changed its type or dtype, on the device that loading has chosen."""
    if isinstance(saved, Tensor):
        if not isinstance(loaded, Tensor):
            return saved
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return type(saved)({key: _uncast(loaded.get(key), value) for key, value in saved.items()})
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)) and len(saved) == len(loaded):
        return type(saved)([_uncast(a, b) for a, b in zip(loaded, saved, strict=True)])
    return saved


def _revive(value: Any, live: Any, stored: Stored, path: list[str | int]) -> Any:
    """Return a stored tree in its live form: tensors and arrays copied, enum members and functions found in `live`."""
    if isinstance(value, TensorRef):
        copy = stored.copy(value, live if is_tensor(live) else None)
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
    if (name := name_of_function(live)) is not None:
        if value != name:
            raise StateError(f"{format_path(path)}: stored {value}, live {name}: {SAME_PROGRAM}")
        return live
    return value


def _enum_member(value: Any, live: Any, path: Sequence[str | int]) -> enum.Enum:
    if not isinstance(live, enum.Enum):
        raise StateError(
            f"{format_path(path)}: an enum member with value {value!r} is stored, and the live object has none there, "
            "so its class is unknown: set one before resuming, or keep its .value in the state"
        )
    return type(live)(value)


def _enum_key(key: EnumValue, live: Mapping[Any, Any], path: Sequence[str | int]) -> enum.Enum:
    member = next((item for item in live if isinstance(item, enum.Enum)), None)
    return _enum_member(key.value, member, path)
