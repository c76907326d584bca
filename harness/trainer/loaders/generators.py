"""Generators: finds, records, sets and seeds the random number generators that a loader's parts hold.

Owns which kinds exist (torch's, Python's, numpy's two) and how deep the search goes. The global generators are not
included: `state/rng.py` has those. Does not import numpy: a process without numpy has no numpy generator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from harness.errors import StateError
from harness.trainer.state.kinds import SAME_PROGRAM
from harness.trainer.state.rng import check_positions, tensor_bytes

_MOST_OBJECTS = 2000
_MOST_DEPTH = 6  # dataset → .dataset (Subset) → .transform → .transforms (Compose) → [0] → .generator
_MOST_ITEMS = 64  # a list of transforms has fewer, a list of samples has more
_PARTS = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_OPAQUE = (type, types.ModuleType, torch.Tensor)


def generators_in(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return every generator that `roots` hold as attributes and items, nearest first, by the path to it.

    So do their functions, in their closures, and those of a module that their functions and methods name.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue = deque((path, root, 0) for path, root in roots.items())
    while queue and len(seen) < _MOST_OBJECTS:
        path, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_generator(value):
            found[path] = value
        elif depth < _MOST_DEPTH:
            queue.extend((path + step, part, depth + 1) for step, part in _parts(value))
    return found


def states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the generators as plain trees, by path."""
    return {path: _state(generator) for path, generator in generators.items()}


def roots_of(loader: Any) -> dict[str, Any]:
    """Return the parts of a DataLoader that may hold generators, for `generators_in`."""
    return {part: getattr(loader, part) for part in _PARTS}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any], name: str) -> None:
    """Set generators to `states`; `name` is that of the object that holds them. Leaves those without a state alone.

    Raises:
        StateError: a generator is not there, or refused its state.
    """
    for path, state in states.items():
        if path not in generators:
            raise StateError(
                f"the snapshot has the state of a generator at {name}.{path}, and there is none: create it together"
                " with the object that holds it, not later"
            )
        try:
            set_state(generators[path], state)
        except (RuntimeError, ValueError, TypeError, LookupError) as err:
            raise StateError(
                f"the generator at {name}.{path} refused its stored state ({err}): {SAME_PROGRAM}"
            ) from err


def make_missing(roots: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Make the generators that have a state in `states` and that an object makes only when it first draws.

    Only where that object keeps it as an attribute that is None or not there yet, and only kinds of ours.
    """
    for path in states.keys() - generators_in(roots).keys():
        root, *names = path.split(".")
        owner = roots.get(root)
        for name in names[:-1]:
            owner = getattr(owner, name, None)
        made = _made_for(states[path])
        if made is not None and names and owner is not None and getattr(owner, names[-1], None) is None:
            with contextlib.suppress(AttributeError, TypeError):  # one that takes no attributes
                setattr(owner, names[-1], made)


def _made_for(state: Any) -> Any:
    """Return a new generator of the kind that has such a state; `None` if there is none."""
    if isinstance(state, bytes):
        return torch.Generator()
    if isinstance(state, tuple):
        return random.Random()
    kind = state.get("bit_generator") if isinstance(state, dict) else None
    if kind not in _BIT_GENERATORS:
        return None
    numpy_random = importlib.import_module("numpy.random")
    legacy = "has_gauss" in state
    return numpy_random.RandomState() if legacy else numpy_random.Generator(getattr(numpy_random, kind)())


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state from `states`. Raises ValueError, TypeError or LookupError if it is not its state."""
    check_positions(state)
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif _is_numpy(generator, "Generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def reseed(generator: Any, word: int) -> None:
    """Seed a generator with 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(word)
    elif isinstance(generator, random.Random):
        generator.seed(word)
    elif _is_numpy(generator, "Generator"):
        generator.bit_generator.state = type(generator.bit_generator)(word).state
    else:
        generator.seed(halves(word))


def word_of(text: str) -> int:
    """Return 64 bits that depend on `text` alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def halves(word: int) -> list[int]:
    """Return a 64-bit word as two of 32 bits, which numpy's legacy generator needs."""
    return [word & 0xFFFFFFFF, word >> 32]


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, _OPAQUE):
        return []
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, list | tuple):
        return [(f"[{index}]", part) for index, part in enumerate(value)] if len(value) <= _MOST_ITEMS else []
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(f".{name}", _content(cell)) for name, cell in cells] + _globals_of(_looked_at(value)[1])
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [(f".{name}", getattr(value, name)) for name in ("func", "args", "keywords")]
    slots, names = _looked_at(type(value))
    parts = [(f".{key}", part) for key, part in getattr(value, "__dict__", {}).items()]
    parts += [(f".{name}", getattr(value, name, None)) for name in slots]
    return parts + _globals_of(names)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


_Names: TypeAlias = tuple[tuple[dict[str, Any], str], ...]
"""Names of variables of a module, each with the module's variables."""
_KNOWN: weakref.WeakKeyDictionary[Any, tuple[tuple[str, ...], _Names]] = weakref.WeakKeyDictionary()
"""What `_looked_at` has returned: the search is repeated at each snapshot."""


def _looked_at(code: type | types.FunctionType) -> tuple[tuple[str, ...], _Names]:
    """Return the slots of a class, and the variables of modules that its methods which read data name; or a function's.

    Functions, classes and modules among these are left out.
    """
    known = _KNOWN.get(code)
    if known is None:
        names: list[str] = []
        functions: list[Any] = [code]
        if isinstance(code, type):
            slots = [vars(each).get("__slots__", ()) for each in code.__mro__]
            names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
            functions = [getattr(code, name, None) for name in ("__getitem__", "__getitems__", "__call__", "__iter__")]
        known = _KNOWN[code] = (
            tuple(name for name in names if name not in ("__dict__", "__weakref__")),
            tuple(name for each in functions if isinstance(each, types.FunctionType) for name in _names_in(each)),
        )
    return known


def _names_in(function: types.FunctionType) -> _Names:
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    variables = function.__globals__
    return tuple(
        (variables, name)
        for name in function.__code__.co_names
        if name in variables and not isinstance(variables[name], code)
    )


def _globals_of(names: _Names) -> list[tuple[str, Any]]:
    """Return the generators among the variables of modules; but for torch's own, which is among the global ones."""
    found = ((f".{name}", variables.get(name)) for variables, name in names)
    return [(name, each) for name, each in found if is_generator(each) and each is not torch.default_generator]


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers, of torch, numpy or Python."""
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    return _is_numpy(value, "Generator") or _is_numpy(value, "RandomState")


def _is_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy.random, kind))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return tensor_bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return generator.getstate()
    if _is_numpy(generator, "Generator"):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _without_arrays(value: Any) -> Any:
    """Return a numpy generator's state with lists in place of arrays; numpy accepts that form too."""
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
