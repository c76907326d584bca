"""Variables: what the program itself holds at a boundary, beside the states that it gave to the Checkpointer.

Owns which variables a rehearsal compares: those of the user's own functions and modules that are under way, and what is
in them. It changes nothing and draws nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import itertools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from harness.trainer.digests import bytes_of, digest, of_tensor
from harness.trainer.loaders.generators import is_generator, states
from harness.trainer.state.kinds import is_array, is_tensor

_LARGE_BYTES = 64 << 20
_MANY = 10_000
_SHOWN = 60
_DEEPEST = 3
_HARNESS = Path(__file__).parents[1]
_LIBRARIES = tuple(f"/{name}/" for name in ("site-packages", "dist-packages"))
_STDLIB = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")})
_OPAQUE = (types.ModuleType, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, DataLoader)


class Variables:
    """The variables of one program."""

    def __init__(self, given: Mapping[str, object], loaders: Callable[[], Iterable[object]] = tuple) -> None:
        """Look at nothing yet.

        Args:
            given: the Checkpointer's states, by name. They are compared elsewhere.
            loaders: returns the loaders that its loops iterate over. It restores their positions, and the batches tell.
        """
        self._given, self._loaders = given, loaders

    def look(self, *, thorough: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Return the program's plain values, and its objects with a state of their own that were not given.

        Both are texts or digests, by the name of the variable and its place: `best in main() (train.py)`.

        Args:
            thorough: look at tensors of any size.
        """
        found = _Found(self._given, self._loaders(), sys.maxsize if thorough else _LARGE_BYTES)
        for name, state in self._given.items():
            if isinstance(state, nn.Module):
                found.attributes_of(name, state)
        modules = set[int]()
        for frame in _users_frames():
            code = frame.f_code
            file = PurePath(code.co_filename).name
            if code.co_name != "<module>":
                found.variables(frame.f_locals, f" in {code.co_qualname}() ({file})")
            if id(frame.f_globals) not in modules:
                modules.add(id(frame.f_globals))
                found.variables(frame.f_globals, f" ({file})")
        return found.values, found.objects


class _Found:
    def __init__(self, given: Mapping[str, object], loaders: Iterable[object], most_bytes: int) -> None:
        self.values: dict[str, str] = {}
        self.objects: dict[str, str] = {}
        self._most_bytes = most_bytes
        self._seen = {id(each) for each in (*given.values(), *loaders)}
        for state in given.values():
            if isinstance(state, nn.Module):
                self._seen |= {id(part) for part in (*state.modules(), *state.parameters())}

    def attributes_of(self, name: str, module: nn.Module) -> None:
        """Look at what the modules that are not torch's own keep as plain attributes."""
        for path, part in module.named_modules(prefix=name):
            if not type(part).__module__.startswith("torch.nn."):
                self._attributes(part, path, " (an attribute of a module)", _DEEPEST)

    def variables(self, variables: Mapping[str, Any], place: str) -> None:
        """Look at the variables of a function or a module."""
        for name, value in list(variables.items()):
            if not name.startswith("__"):
                self._look_at(name, value, place, 0)

    def _look_at(self, name: str, value: Any, place: str, depth: int) -> None:
        text = None
        with contextlib.suppress(Exception):  # an object of the program may refuse anything: then it is unknown
            text = None if is_generator(value) else self._text(value)
        if text is not None:
            self.values[f"{name}{place}"] = text
        elif isinstance(value, _OPAQUE) or type(value).__module__.startswith("harness.") or self._was_seen(value):
            pass
        elif (state := _state_of(value)) is not None:
            if state and _bytes_in(state) <= self._most_bytes:
                self.objects[f"{name}{place}, {_with_article(type(value).__name__)},"] = digest(state)
        elif depth < _DEEPEST and (_is_users_own(type(value)) or _is_environment(value)):
            self._attributes(value, name, place, depth + 1)

    def _attributes(self, value: Any, name: str, place: str, depth: int) -> None:
        for key, item in list(getattr(value, "__dict__", {}).items()):
            if not key.startswith("_") or (_is_environment(item) and depth < _DEEPEST):
                self._look_at(f"{name}.{key}", item, place, depth)

    def _was_seen(self, value: object) -> bool:
        seen = id(value) in self._seen
        self._seen.add(id(value))
        return seen

    def _text(self, value: Any) -> str | None:
        """Return a text that is equal only for equal values; `None` if nothing is known about the value."""
        if value is None or isinstance(value, (bool, int, float, complex, enum.Enum, PurePath, itertools.count)):
            return repr(value)
        if isinstance(value, (str, bytes)):
            return _shortened(repr(value))
        if is_tensor(value) or is_array(value):
            return self._of_tensor(value)
        if type(value).__module__ == "numpy" and hasattr(value, "item"):
            return repr(value.item())
        if isinstance(value, Mapping):
            items = sorted(value.items(), key=lambda item: repr(item[0]))  # what a library restores has another order
            return self._of_items("dict", (each for item in items for each in item), len(value))
        if isinstance(value, (set, frozenset)):
            return self._of_items("set", sorted(value, key=repr), len(value))
        if isinstance(value, (list, tuple, deque)):
            return self._of_items(type(value).__name__, value, len(value))
        return None

    def _of_tensor(self, value: Any) -> str | None:
        if _bytes_in(value) > self._most_bytes:
            return None
        if is_tensor(value) and value.numel() == 1:
            return repr(value.item())
        kind = "tensor" if is_tensor(value) else "array"
        return f"{kind} of {'x'.join(map(str, value.shape))} #{of_tensor(value) if is_tensor(value) else digest(value)}"

    def _of_items(self, kind: str, items: Any, count: int) -> str | None:
        """Return a text for what a container holds. Of an item about which nothing is known, only its type counts."""
        if count > _MANY and self._most_bytes != sys.maxsize:
            return None
        texts = [self._text(item) or type(item).__name__ for item in items]
        whole = f"{kind}({', '.join(texts)})"
        return whole if len(whole) <= _SHOWN else f"{kind} of {count} #{digest(whole)}"


def _users_frames() -> Iterator[types.FrameType]:
    """Yield the frames of the user's own code that are under way in this thread, the innermost first."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" or _is_users_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@functools.cache
def _is_users_file(name: str) -> bool:
    """Whether a file of code is the user's own: of no installed library, not Python's, and not ours."""
    if name.startswith("<") or _HARNESS in Path(name).parents:
        return False
    return not any(part in name for part in _LIBRARIES) and not name.startswith(_STDLIB)


def _is_users_own(kind: type) -> bool:
    """Whether a class is the user's own, or holds nothing but attributes."""
    if kind.__module__ == "__main__" or issubclass(kind, argparse.Namespace | types.SimpleNamespace):
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and _is_users_file(file)


def _is_environment(value: object) -> bool:
    """Whether a value looks like an environment of reinforcement learning."""
    return all(hasattr(type(value), name) for name in ("step", "reset", "action_space"))


def _state_of(value: Any) -> Any:
    """Return the state of an object that has one, of a generator of random numbers too; `None` if it has none."""
    if is_generator(value):
        return states({"": value})
    if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
        return None
    with contextlib.suppress(Exception):  # of the user's own making, or not ready yet: then it is left out
        return value.state_dict()
    return None


def _bytes_in(value: Any) -> int:
    if is_tensor(value):
        return bytes_of(value)
    if is_array(value):
        return int(value.nbytes)
    if isinstance(value, Mapping):
        return sum(map(_bytes_in, value.values()))
    return sum(map(_bytes_in, value)) if isinstance(value, (list, tuple)) else 0


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}… #{digest(text)}"


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].upper() in 'AEIOU' else 'a'} {name}"
