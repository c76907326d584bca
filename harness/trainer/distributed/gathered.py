"""Gathered: has FSDP2 give back, at each boundary, the parameters that it has kept gathered.

After a forward pass that no backward pass follows (a validation, a generation) FSDP2 keeps the parameters of the root
gathered, and the next forward pass begins with them. `state_dict()` gives them back: on the rank that calls it, and no
other. Ranks lay out their slots at boundaries of their own, so one rank would gather again in its next forward pass
where another does not, and their collectives would no longer match. So all ranks give them back at all boundaries,
whether there is anything to capture or not; then a capture changes nothing that a rank could tell from another.

Owns which modules these are. It makes no collective call; the next forward pass makes those of any first one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from torch import nn

_FSDP: Final = "torch.distributed.fsdp"


def sharded(states: Iterable[object]) -> tuple[Any, ...]:
    """Return the modules among the states, or in an object among them, that `fully_shard` has divided. Each once."""
    fsdp = sys.modules.get(_FSDP)
    if fsdp is None:
        return ()
    children = (child for state in states for module in _modules(state) for child in module.modules())
    return tuple(dict.fromkeys(child for child in children if isinstance(child, fsdp.FSDPModule)))


def _modules(state: object) -> Iterator[nn.Module]:
    """Yield a state that is a module; of another one those that it holds, as a class around a model and more does."""
    if isinstance(state, nn.Module):
        yield state
        return
    for value in vars(state).values() if hasattr(state, "__dict__") else ():
        held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
        yield from (inner for inner in held if isinstance(inner, nn.Module))
