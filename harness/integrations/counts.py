"""Counts: what a program's own classes count beside a framework's states, as TRL's trainers do between two logs.

Owns which attributes of an object those are, how they come into a snapshot and back, and the warnings of what does not.
Knows no framework.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import operator
import re
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

_MOST: Final = 10_000
_MOST_CHARACTERS: Final = 1 << 20
_MOST_BYTES: Final = 64 << 20
"""The most values, characters of texts, and bytes of tensors of one attribute: what has more is the program's data."""
_LEAST_BYTES: Final = 4096
_TENSOR: Final = "\0tensor"
"""Stands with its place in the packed bytes where a tensor was."""
_CONTAINER: Final = "\0container"
"""Stands with its kind, its argument and its items where a deque or a defaultdict was."""
_FACTORIES: Final[dict[str, Any]] = {kind.__name__: kind for kind in (int, float, list, dict)}
"""What makes the values of a defaultdict that can be stored by name."""
_PLAIN: Final = (int, float, bool, type(None))
_MEASURED: Final = re.compile("(^|_)(runtime|(samples|steps|tokens)_per_second|time)$")
"""Names of what depends on the clock, as transformers and TRL have them."""


class Counts:
    """The attributes of one object that the program's own class sets, and that change during a training.

    An attribute is stored if it is a number, a tensor, or a list, tuple, dict or deque of numbers, texts and tensors,
    and if no function of the framework's class assigns to that attribute, or one of the program's own classes does,
    too. What has not changed since the training began the program makes again. A text or a truth value that changes is
    not stored: it mostly tells of something that only this process has, such as a connection. Of that, and of others
    that cannot be stored, the user is warned.
    """

    def __init__(self, owner: Any, base: type, warn: Callable[[str], None], known: Iterable[str] = ()) -> None:
        """Look at the classes of an object. Its attributes are first looked at by `begin`.

        Args:
            owner: the object.
            base: the framework's class, which knows its own counts.
            warn: shows a warning to the user.
            known: names of what else the framework has in such an object.
        """
        self._owner, self._warn = owner, warn
        self._known: frozenset[str] | None = None
        if type(owner) is not base:
            own = [kind for kind in type(owner).__mro__ if kind not in base.__mro__]
            self._known = _assigned_in(base.__mro__).difference(_assigned_in(tuple(own))).union(known)
        self._begun: dict[str, Any] | None = None
        self._hidden: dict[str, Any] = {}
        self._changed: set[str] = set()
        self._told = False

    @property
    def are_there(self) -> bool:
        """Whether the object is of a class of the program's own."""
        return self._known is not None

    def begin(self) -> None:
        """Note how they are now: the first time, before anything is trained or restored."""
        if self._begun is None:
            self._begun = {name: _copied(value, _Seen) for name, value, is_kept in self._all() if is_kept}
            self._hidden = {name: _sketch(value) for name, value, is_kept in self._all() if not is_kept}

    def changed(self) -> dict[str, Any]:
        """Return those that are not as they were, copied but for tensors. Warn, once, of one that is not stored."""
        begun = self._begun or {}
        found = {}
        for name, value, is_kept in self._all():
            if not is_kept:
                self._look_at_hidden(name, value)
            elif (kind := _unmade(begun.get(name), value)) is not None:
                self._tell(name, f"it has a {kind} that was not there when the training began: make it in __init__")
            elif name in self._changed or name not in begun or not _is_same(begun[name], value):
                self._changed.add(name)
                found[name] = _copied(value)
        return found

    def restore(self, values: Mapping[str, Any]) -> None:
        """Give the object what `changed` has returned. Its own lists, dicts and deques are filled, and not replaced."""
        for name, value in values.items():
            self._changed.add(name)
            setattr(self._owner, name, _filled(getattr(self._owner, name, None), value))

    def _look_at_hidden(self, name: str, value: Any) -> None:
        was_stored = (self._begun or {}).get(name) is not None
        was_another = name in self._hidden and self._hidden[name] != _sketch(value)
        if was_stored or was_another:  # what was not there, or `None`, is mostly made at need
            self._tell(
                name,
                f"what is stored are numbers, and lists and dicts of fewer than {_MOST} numbers, texts and tensors "
                f"without a gradient, with less than {_MOST_CHARACTERS >> 20} MiB of texts and {_MOST_BYTES >> 20} MiB "
                "of tensors",
            )

    def _tell(self, name: str, why: str) -> None:
        if not self._told:
            self._told = True
            self._warn(f"{type(self._owner).__name__}.{name} changes, and a resume resets it: {why}")

    def _all(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield name and value of each attribute of the program's own, and whether it is stored."""
        if self._known is None:
            return
        for name, value in list(vars(self._owner).items()):
            if name not in self._known:
                yield name, value, not isinstance(value, (str, bool)) and _is_plain(value)


class Looks:
    """Warns, once, of an object that changes its numbers and texts, and has no way to show them."""

    _LOOKS = 3

    def __init__(self, warn: Callable[[str], None], remedy: str) -> None:
        """Look at nothing yet.

        Args:
            warn: shows a warning to the user.
            remedy: what to do about it.
        """
        self._warn, self._remedy = warn, remedy
        self._before: dict[int, dict[str, Any]] = {}
        self._looks = 0

    def look(self, objects: Iterable[Any]) -> None:
        """Look at objects, at a boundary: at the first few only."""
        if self._looks >= self._LOOKS:
            return
        self._looks += 1
        for each in objects:
            now = {name: value for name, value in vars(each).items() if isinstance(value, (int, float, str))}
            before = self._before.setdefault(id(each), now)
            changed = sorted(name for name, value in now.items() if before.get(name, value) != value)
            if changed:
                self._looks = self._LOOKS
                self._warn(f"{type(each).__name__}.{changed[0]} changes, and a resume resets it: {self._remedy}")
                return


@functools.cache
def _assigned_in(kinds: tuple[type, ...]) -> frozenset[str]:
    """Return the names of all attributes to which the functions of classes assign, of the object that they are of."""
    found: set[str] = set()
    for kind in kinds:
        for member in vars(kind).values():
            for function in (member, *(getattr(member, name, None) for name in ("fget", "fset", "__func__"))):
                plain = inspect.unwrap(function) if callable(function) else None
                if isinstance(plain, types.FunctionType) and plain.__code__.co_argcount:
                    found |= _assigned_by(plain.__code__, plain.__code__.co_varnames[0])
    return frozenset(found)


def _assigned_by(code: types.CodeType, owner: str) -> set[str]:
    """Return the names of the attributes that a function, or one inside of it, assigns of one of its variables."""
    found: set[str] = set()
    written = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for at, each in enumerate(written):
        # `x.a = …` ends by loading x and storing a; `x.a += …` begins by loading x, a copy of it, and then a.
        stores = each.opname == "STORE_ATTR" and _loads(written[at - 1], owner)
        adds = each.opname == "LOAD_ATTR" and written[at - 1].opname == "COPY" and _loads(written[at - 2], owner)
        if stores or adds:
            found.add(each.argval)
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType) and owner in each.co_freevars)
    return found.union(*(_assigned_by(each, owner) for each in inner))


def _loads(instruction: dis.Instruction, variable: str) -> bool:
    """Whether the last that an instruction does is to load a variable: newer ones load two, or store one first."""
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return ("LOAD_FAST" in instruction.opname or instruction.opname == "LOAD_DEREF") and names[-1] == variable


def _is_plain(value: Any) -> bool:
    """Whether a value can be stored: of what it consists, and how much of that it has."""
    left, left_characters, left_bytes, waiting = _MOST, _MOST_CHARACTERS, _MOST_BYTES, [value]
    while waiting:
        item = waiting.pop()
        left -= 1
        if isinstance(item, dict) and all(type(key) in (str, int) for key in itertools.islice(item, left)):
            waiting.extend(itertools.islice(item.values(), left))
        elif type(item) in (list, tuple, deque):
            waiting.extend(itertools.islice(item, left))
        elif type(item) is str:
            left_characters -= len(item)
        elif type(item) is Tensor and not item.requires_grad and item.layout is torch.strided:
            left_bytes -= item.nbytes
        elif type(item) not in _PLAIN:
            return False
        if min(left, left_characters, left_bytes) <= 0:
            return False
    return True


def _sketch(value: Any) -> Any:
    """Return what tells, without a look into it, that a value which is not stored is another one."""
    return value if isinstance(value, (str, bool)) else len(value) if isinstance(value, (list, dict, deque)) else None


class _Seen:
    """A tensor as it was; does not keep it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = weakref.ref(tensor), _version_of(tensor)

    def is_still(self, tensor: Any) -> bool:
        """Whether a tensor is this one, and nothing was written to it."""
        return isinstance(tensor, Tensor) and self._tensor() is tensor and self._version == _version_of(tensor)


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def _form(value: Any) -> tuple[type, Any] | None:
    """Return the kind of a container, and what it is made with; `None` if a snapshot cannot make one again."""
    if type(value) is deque:
        return deque, value.maxlen
    if type(value) is defaultdict:
        factory = value.default_factory
        return (defaultdict, factory) if factory is None or factory in _FACTORIES.values() else None
    return (type(value), None) if type(value) in (list, tuple, dict, Counter, OrderedDict) else None


def _copied(value: Any, of_tensor: Callable[[Tensor], Any] = lambda tensor: tensor) -> Any:
    """Return a copy in containers of the same form, or in plain dicts, with what a function returns for each tensor."""
    if isinstance(value, dict):
        kind, argument = _form(value) or (dict, None)
        copy = defaultdict(argument) if kind is defaultdict else kind()
        for key, item in value.items():
            copy[key] = _copied(item, of_tensor)
        return copy
    if type(value) is deque:
        return deque((_copied(item, of_tensor) for item in value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(_copied(item, of_tensor) for item in value)
    return of_tensor(value) if isinstance(value, Tensor) else value


def _is_same(before: Any, now: Any) -> bool:
    """Whether a value is as it was when it was copied with each tensor `_Seen`."""
    if isinstance(before, _Seen):
        return before.is_still(now)
    if isinstance(before, dict) and isinstance(now, dict):
        is_alike = _form(before) == (_form(now) or (dict, None)) and list(before) == list(now)
        return is_alike and all(_is_same(before[key], item) for key, item in now.items())
    if isinstance(before, (list, tuple, deque)) and isinstance(now, (list, tuple, deque)):
        return _form(before) == _form(now) and len(before) == len(now) and all(map(_is_same, before, now))
    return type(before) is type(now) and bool(before == now)


def _unmade(before: Any, now: Any) -> str | None:
    """Return the kind of a container in a value that a resume would not have; `None` if there is none.

    Args:
        before: what the program makes in its place before the training begins, as it was copied then.
        now: the value.
    """
    if isinstance(now, dict):
        is_there = isinstance(before, dict)
        if _form(now) is None and not is_there:
            return type(now).__name__
        if _form(now) is None and isinstance(now, defaultdict):
            return None  # the one that is there makes what is in it
        inner = ((before.get(key) if is_there else None, item) for key, item in now.items())
    elif type(now) in (list, tuple, deque):
        inner = ((None, item) for item in now)
    else:
        return None
    return next((kind for kind in itertools.starmap(_unmade, inner) if kind is not None), None)


def _filled(current: Any, value: Any) -> Any:
    """Return a value, in the container that was there, or that is made for its key, if it is of that kind."""
    if isinstance(current, dict) and type(value) in (dict, type(current)):
        makes = isinstance(current, defaultdict) and current.default_factory is not None
        filled = {key: _filled(current[key] if makes else current.get(key), item) for key, item in value.items()}
        current.clear()
        current.update(filled)
        return current
    if isinstance(current, deque) and (isinstance(value, list) or _form(current) == _form(value)):
        current.clear()  # a list is what older snapshots have
        current.extend(value)
        return current
    return value.to(current.device) if isinstance(current, Tensor) and isinstance(value, Tensor) else value


# ---- tensors ---------------------------------------------------------------------------------------------------------


def pack(values: Any, device: torch.device) -> dict[str, Any]:
    """Return values with their tensors in a few others, one for each device, whose sizes seldom change.

    A snapshot whose tensors are as many and as large as the last one's is taken without a new layout of its slots; a
    list of losses has one more at each step. Copies the tensors on their devices, without waiting for it.

    Args:
        values: dicts and lists of plain values and tensors.
        device: one that there is a tensor for in any case, beside the CPU.
    """
    found: dict[torch.device, list[Tensor]] = {torch.device("cpu"): [], device: []}
    ends = dict.fromkeys(found, 0)

    def place(tensor: Tensor) -> dict[str, list[Any]]:
        raw = tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        begin = ends.setdefault(tensor.device, 0)
        found.setdefault(tensor.device, []).append(raw)
        ends[tensor.device] += len(raw)
        index = list(found).index(tensor.device)
        return {_TENSOR: [index, begin, len(raw), str(tensor.dtype), list(tensor.shape), tensor.device.type]}

    with torch.no_grad():
        placed = _written(_copied(values, place))
        packed = []
        for at, parts in found.items():
            size = max(_LEAST_BYTES, 1 << (ends[at] - 1).bit_length())
            packed.append(torch.cat([*parts, torch.zeros(size - ends[at], dtype=torch.uint8, device=at)]))
    return {"values": placed, "packed": packed}


def _written(value: Any) -> Any:
    """Return a copy in the containers that a tree has."""
    if isinstance(value, dict):
        items = {key: _written(item) for key, item in value.items()}
        if type(value) is not defaultdict:
            return items if type(value) is dict else type(value)(items)
        names = (name for name, factory in _FACTORIES.items() if factory is value.default_factory)
        return {_CONTAINER: ["defaultdict", next(names, None), items]}
    if isinstance(value, deque):
        return {_CONTAINER: ["deque", value.maxlen, [_written(item) for item in value]]}
    return type(value)(map(_written, value)) if isinstance(value, (list, tuple)) else value


def unpack(tree: Mapping[str, Any]) -> Any:
    """Return what `pack` was given. A tensor comes to a device of its kind, if there is one here; else to the CPU."""
    packed: list[Tensor] = tree["packed"]

    def tensor_at(index: int, begin: int, size: int, dtype: str, shape: list[int], kind: str) -> Tensor:
        raw = packed[index][begin : begin + size].clone()
        made = raw.view(getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return made.to(kind) if accelerator is not None and accelerator.type == kind else made

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            if (at := value.get(_TENSOR)) is not None:
                return tensor_at(*at)
            if (container := value.get(_CONTAINER)) is None:
                return type(value)({key: placed(item) for key, item in value.items()})
            kind, argument, items = container
            if kind == "deque":
                return deque(placed(items), argument)
            return defaultdict(_FACTORIES.get(argument), placed(items))
        return type(value)(map(placed, value)) if isinstance(value, (list, tuple)) else value

    return placed(tree["values"])


# ---- times ----------------------------------------------------------------------------------------------------------


def take_times(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[list[Any]]:
    """Take the times that were measured out of a tree: no two runs have the same. Yield where each was, and it.

    Args:
        tree: dicts and lists; `None` comes where a time was.
        path: of the tree, in a larger one.
    """
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if isinstance(key, str) and _MEASURED.search(key) is not None and _is_measured(value):
            yield [[*path, key], value]
            tree[key] = None
        elif isinstance(value, (dict, list)):
            yield from take_times(value, (*path, key))


def put_times_back(tree: Any, times: list[list[Any]]) -> None:
    """Put the times back that `take_times` has taken."""
    for (*path, last), value in times:
        functools.reduce(operator.getitem, path, tree)[last] = value


def _is_measured(value: Any) -> bool:
    """Whether a value in a tree is a time, or a list or a deque of times."""
    items = value.get(_CONTAINER, [None])[-1] if isinstance(value, dict) else value
    return isinstance(items, float) or (isinstance(items, list) and all(isinstance(item, float) for item in items))
