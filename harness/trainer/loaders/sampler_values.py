"""Sampler values: what a sampler counts as it is iterated over, such as its epochs, from which it derives its order.

Owns which plain values of a loader's samplers are kept: those that change while they are iterated over. What the
program sets between two iterations (`set_epoch`) it sets again after a resume. Of tensors and lists that it changes
there, nothing is known: they are told of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor
from torch.utils.data import Sampler

from harness.trainer.state.kinds import is_array

_PLAIN: Final = (int, float, str, bool, type(None))


class SamplerValues:
    """The values of one loader's samplers. Holds no reference to the loader: see `_Order` in `dataloader.py`."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        """Note how they are now. `roots`: the parts of a loader, by name."""
        self._samplers = dict(_samplers(roots))
        self._first = self._now()
        self._begun = self._first
        self._counted: set[str] = set()
        self._large = self._versions()

    def begin(self) -> None:
        """Note that an iteration begins: what changes from now on, the sampler itself changes."""
        self._begun = self._now()

    def note(self) -> None:
        """Note what has changed since the iteration began."""
        now = self._now()
        self._counted |= {path for path in now.keys() & self._begun.keys() if now[path] != self._begun[path]}
        self._large = self._versions()

    def kept(self) -> dict[str, Any]:
        """Return the values that the samplers themselves have ever changed, by their paths."""
        now = self._now()
        return {path: now[path] for path in sorted(self._counted) if path in now}

    def set(self, values: Mapping[str, Any]) -> None:
        """Set what `kept` returned, and others that have changed to what they were at first."""
        self._counted |= values.keys()
        self._put({path: values.get(path, self._first.get(path)) for path in self._counted})

    def set_back(self, before: Mapping[str, Any]) -> None:
        """Set what `everything` returned, but for what is something else than a plain value now."""
        self._put(before)

    def everything(self) -> dict[str, Any]:
        """Return all plain values, by their paths."""
        return self._now()

    def changed_outside(self) -> str | None:
        """Return the path of a tensor, an array or a list that the program has changed since the last iteration."""
        before, self._large = self._large, self._versions()
        return next((path for path, version in self._large.items() if before.get(path, version) != version), None)

    def _put(self, values: Mapping[str, Any]) -> None:
        now = self._now()
        for path in values.keys() & now.keys():
            if now[path] != values[path]:
                setattr(self._owner(path), path.rpartition(".")[2], values[path])

    def _now(self) -> dict[str, Any]:
        return {path: value for path, value in self._attributes() if type(value) in _PLAIN}

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {
            path: (id(value), value._version if isinstance(value, Tensor) else 0)
            for path, value in self._attributes()
            if (isinstance(value, (Tensor, list)) or is_array(value)) and not hasattr(self._owner(path), "set_epoch")
        }

    def _owner(self, path: str) -> Any:
        return self._samplers[path.rpartition(".")[0]]

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for owner, sampler in self._samplers.items():
            yield from ((f"{owner}.{name}", value) for name, value in getattr(sampler, "__dict__", {}).items())


def _samplers(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the samplers of a loader, and those inside of them, each once."""
    queue = [(part, roots[part]) for part in ("sampler", "batch_sampler") if roots.get(part) is not None]
    seen: set[int] = set()
    for path, sampler in queue:
        if id(sampler) not in seen:
            seen.add(id(sampler))
            yield path, sampler
            parts = getattr(sampler, "__dict__", {}).items()
            queue += [(f"{path}.{name}", part) for name, part in parts if isinstance(part, Sampler)]
