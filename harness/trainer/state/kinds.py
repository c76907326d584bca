"""Kinds: the kinds of States, and the names of their parameters.

Owns which objects are states, the remedy for those that are not, and names that a wrapper around a module does not
change. Reads states and changes none; knows nothing of snapshots.
"""

from __future__ import annotations

import enum
import random
import re
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.errors import StateError

SAME_PROGRAM: Final = "resume with the program that wrote this snapshot, or start over with --fresh or another --run"
"""The remedy if the live state does not match the stored one."""
_WITH_KERAS: Final = (
    "do not compile the model, and use an optimizer of torch, or watch what BackupAndRestore writes "
    "(harness run --watch)"
)


class Kind(enum.StrEnum):
    """The kind of a State: how it is captured, compared and restored. The values are part of the format."""

    MODULE = "module"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    STATE = "state"
    """Any other object with `state_dict` and `load_state_dict`."""
    TORCH_GENERATOR = "torch_generator"
    NUMPY_GENERATOR = "numpy_generator"
    PYTHON_GENERATOR = "python_generator"


def classify(name: str, state: object) -> Kind:
    """Return the kind of `state`.

    Args:
        name: the user's name for it, for messages.
        state: the user's object.

    Raises:
        StateError: it is not a State; says what to give instead.
    """
    if isinstance(state, type):
        _refuse_state(name, state, "this is a class: give an object of it")
    if isinstance(state, nn.Module):
        if _is_of_keras(state, "Model") and _is_of_keras(getattr(state, "optimizer", None), "Optimizer"):
            _refuse_state(name, state, f"it is compiled, and its optimizer is not in its state_dict: {_WITH_KERAS}")
        return Kind.MODULE
    if isinstance(state, Optimizer):
        return Kind.OPTIMIZER
    if isinstance(state, LRScheduler):
        return Kind.SCHEDULER
    if isinstance(state, torch.Generator):
        return Kind.TORCH_GENERATOR
    if is_numpy_generator(state):
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
    """Return every State by name; those in dicts, lists and tuples under dotted names such as "optimizers.0".

    A flat mapping is returned unchanged.

    Raises:
        StateError: something in it is not a State, a key cannot be part of a name, or two states have one name.
    """
    flat: dict[str, object] = {}
    for name, state in states.items():
        if not re.fullmatch(r"\w+(\.\w+)*", name):
            raise StateError(f"{name[:80]!r} cannot name a state: use letters, digits and underscores")
        if isinstance(state, (dict, list, tuple)):
            if not state:
                _refuse_state(name, state, "it is empty: give it when it holds something, or leave it out")
            inner = state if isinstance(state, dict) else {str(index): item for index, item in enumerate(state)}
            if not all(isinstance(key, str) for key in inner):
                _refuse_state(name, state, "its keys must be strings")
            try:
                found = {f"{name}.{key}": item for key, item in flatten(inner).items()}
            except RecursionError as err:
                raise StateError(f"{name}: it contains itself: give its states one by one") from err
        else:
            classify(name, state)
            found = {name: state}
        if twice := sorted(flat.keys() & found.keys()):
            raise StateError(f"two states are named {twice[0]}: give one of them another name")
        flat |= found
    return flat


_Held = TypeVar("_Held")
_MOST_ITEMS: Final = 1000
"""Longer lists in a state are data, and not looked into."""


def held_by(state: object, kind: type[_Held]) -> dict[str, _Held]:
    """Return the objects of a kind that a state holds, by path: attributes, and items of lists and dicts among them."""
    found: dict[str, _Held] = {}
    for name, value in getattr(state, "__dict__", {}).items():
        items: Mapping[Any, Any] = {name: value}
        if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
            items = {f"{name}.{index}": item for index, item in enumerate(value)}
        elif isinstance(value, dict) and len(value) <= _MOST_ITEMS:
            items = {f"{name}.{key}": item for key, item in value.items()}
        found |= {path: item for path, item in items.items() if isinstance(item, kind)}
    return found


def optimizers_in(states: Iterable[object]) -> list[Optimizer]:
    """Return the torch optimizers among states, and those that states hold."""
    found = []
    for state in states:
        found += [state] if isinstance(state, Optimizer) else []
        found += held_by(state, Optimizer).values()
    return found


def parameter_names(flat: Mapping[str, object]) -> dict[int, str]:
    """Return the names of all parameters of all modules, by the parameter's `id`."""
    names: dict[int, str] = {}
    for name, module in flat.items():
        if isinstance(module, nn.Module):
            params = dict(module.named_parameters(remove_duplicate=False))
            for key, plain in plain_keys(module, params).items():
                names.setdefault(id(params[key]), f"{name}/{plain}")
    return names


def describe_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[Any]]:
    """Return, for each group, each parameter's name, or its shape if no captured module has it.

    An optimizer's state_dict knows its parameters by position only. Loaded after a change of their order, it would give
    every moment to the wrong parameter, without an error if the shapes are equal.
    """
    return [[names.get(id(param), list(param.shape)) for param in group["params"]] for group in optimizer.param_groups]


def names_of(params: list[list[Any]]) -> list[str | int]:
    """Return the name of each parameter of an optimizer, in order; its position if it has none."""
    every = [param for group in params for param in group]
    return [param if isinstance(param, str) else position for position, param in enumerate(every)]


def by_name(state_dict: Mapping[str, Any], params: list[list[Any]]) -> dict[str, Any] | None:
    """Return an optimizer's state_dict with the names of parameters in place of their positions.

    Args:
        state_dict: the optimizer's.
        params: see `describe_parameters`.

    Returns:
        `None` if it has another form than that of torch's own optimizers.
    """
    return _renamed(state_dict, dict(enumerate(names_of(params))))


def by_position(saved: Mapping[str, Any], params: list[list[Any]]) -> dict[str, Any]:
    """The inverse of `by_name`: return what `load_state_dict` takes. Unchanged if the positions are there already."""
    found = _renamed(saved, {name: position for position, name in enumerate(names_of(params))})
    return dict(saved) if found is None else found


def _renamed(state_dict: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any] | None:
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return None
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return None
    if not all(key in names for key in (*state, *(param for group in groups for param in group["params"]))):
        return None
    return {
        **state_dict,
        "state": {names[key]: values for key, values in state.items()},
        "param_groups": [{**group, "params": [names[param] for param in group["params"]]} for group in groups],
    }


def added_groups(node: Mapping[str, Any], live: int, known: Collection[str]) -> list[list[str]]:
    """Return the parameters' names of the groups that were added during the training, if a start has none of them.

    Args:
        node: an optimizer's node in the stored tree.
        live: the number of groups that the live optimizer has.
        known: names of all parameters of all live modules.
    """
    missing: list[list[Any]] = node["params"][live:] if node.get("groups") == live else []
    names = [name for group in missing for name in group]
    return missing if all(isinstance(name, str) and name in known for name in names) else []


def plain_keys(module: nn.Module, keys: Mapping[str, Any]) -> dict[str, str]:
    """Return each key without the prefixes of wrappers: torch.compile, (Distributed)DataParallel, checkpoint_wrapper.

    The wrapper modules decide, not the text of the key: a model may have a child of its own called `module`, as
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
    if _is_checkpoint_wrapper(module):
        return "_checkpoint_wrapped_module."
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds; without it nothing is compiled
    return "_orig_mod." if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def _is_checkpoint_wrapper(module: nn.Module) -> bool:
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return wrappers is not None and isinstance(module, wrappers.CheckpointWrapper)


def _is_of_keras(state: object, name: str) -> bool:
    keras = sys.modules.get("keras")  # without the import there is none
    return keras is not None and isinstance(state, getattr(keras, name, ()))


def is_tensor(value: object) -> bool:
    """Whether `value` is a tensor of torch."""
    return isinstance(value, Tensor)


def name_of_function(value: object) -> str | None:
    """Return the full name of a function that is torch's own, such as SWALR of torch 2.6 has in its state."""
    if isinstance(value, types.FunctionType) and value.__module__.startswith("torch."):
        return f"{value.__module__}.{value.__qualname__}"
    return None


def is_numpy_generator(value: object) -> bool:
    """Whether `value` is a generator of numpy. Does not import numpy."""
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator)


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array. Does not import numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def _refuse_state(name: str, state: object, remedy: str) -> NoReturn:
    kind = state if isinstance(state, type) else type(state)
    raise StateError(f"{name}: a {kind.__module__}.{kind.__qualname__} is not a state; {remedy}")


def _state_remedy(state: object, *, can_save: bool, can_load: bool) -> str:
    if can_save or can_load:
        return f"it lacks {'load_state_dict()' if can_save else 'state_dict()'}: add it"
    if is_tensor(state) or is_array(state):
        return "keep it in an object with state_dict() and load_state_dict(), for example as a buffer of a module"
    if _is_of_keras(state, "Optimizer"):
        return _WITH_KERAS
    if state is None or isinstance(state, (bool, int, float, str, bytes)):
        return "put plain values into ckpt.extra"
    if isinstance(state, torch.utils.data.DataLoader):
        return "give it as loader=, or run the loop over ckpt.batches(loader)"
    return "give an object with state_dict() and load_state_dict(), or put plain values into ckpt.extra"
