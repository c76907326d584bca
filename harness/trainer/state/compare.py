"""Compare: checks that the live states match the stored ones, before anything is loaded.

Owns every refusal to resume with another program than the one that wrote the snapshot. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from harness.core.tree import TensorRef
from harness.errors import SnapshotCorrupt, StateError
from harness.trainer.copy.to_slot import describe
from harness.trainer.state.capture import alias_of, check_tensor
from harness.trainer.state.entries import empty_buffers, takes
from harness.trainer.state.kinds import (
    SAME_PROGRAM,
    Kind,
    added_groups,
    classify,
    describe_parameters,
    is_tensor,
    plain_keys,
)
from harness.trainer.state.stored import Stored

_SHOWN: Final = 5
"""Differences named in one message; the rest are counted."""


def compare_state(name: str, state: Any, node: dict[str, Any], names: Mapping[int, str], stored: Stored) -> None:
    """Refuse a live state that does not match the stored one.

    Args:
        name: the state's name.
        state: the live state.
        node: the state's node of the stored tree.
        names: names of the modules' parameters, see `parameter_names`.
        stored: the stored tensors.

    Raises:
        StateError: they differ; names the path, both sides and the remedy.
        SnapshotCorrupt: the node does not fit the tensors, or is not one that `capture` made.
    """
    kind = classify(name, state)
    if node["kind"] != kind:
        raise StateError(f"{name}: stored is a {node['kind']}, live is a {kind.value}: {SAME_PROGRAM}")
    saved = node["state"]
    for ref in references(saved):
        stored.view(ref)
    match kind:
        case Kind.MODULE:
            _compare_module(name, state, mapping(name, saved), stored)
        case Kind.OPTIMIZER:
            _compare_optimizer(name, state, node, names)
        case Kind.SCHEDULER:
            _compare_scheduler(name, state, mapping(name, saved))
        case Kind.NUMPY_GENERATOR:
            live = state.bit_generator.state["bit_generator"]
            if mapping(name, saved).get("bit_generator") != live:
                raise StateError(f"{name}: stored is a {saved.get('bit_generator')}, live is a {live}: {SAME_PROGRAM}")


def _compare_module(name: str, module: nn.Module, saved: dict[str, Any], stored: Stored) -> None:
    live = module.state_dict()
    keys = plain_keys(module, live)
    empty = empty_buffers(module)
    compare_names(name, [plain for plain in saved if plain not in empty], list(keys.values()), "entry")
    differences = []
    reshaped: dict[str, Tensor] = {}
    first_live: dict[Hashable, str] = {}
    first_saved: dict[str, str] = {}
    for key, plain in keys.items():
        value, ref = live[key], saved[plain]
        if is_tensor(value) != isinstance(ref, TensorRef):
            differences.append(f"{plain}: a tensor on one side only")
        if not (is_tensor(value) and isinstance(ref, TensorRef)):
            continue
        check_tensor(value, [name, plain])
        there = stored.view(ref)
        if there.shape != value.shape or there.dtype != value.dtype:
            differences.append(f"{plain}: stored {describe(there)}, live {describe(value)}")
            reshaped[key] = there
        alias = alias_of(value)
        twin_live = plain if alias is None else first_live.setdefault(alias, plain)
        twin_saved = first_saved.setdefault(ref.name, plain)
        if twin_live != twin_saved:
            differences.append(f"{plain}: {_tie(twin_saved, plain, 'stored')}, {_tie(twin_live, plain, 'live')}")
    if differences and not (len(differences) == len(reshaped) and takes(module, reshaped)):
        raise StateError(f"{name} differs from the stored one: {_shown(differences, '; ')}: {SAME_PROGRAM}")


def _tie(twin: str, plain: str, side: str) -> str:
    return f"{side} tied to {twin}" if twin != plain else f"{side} on its own"


def _compare_optimizer(name: str, optimizer: Optimizer, node: dict[str, Any], names: Mapping[int, str]) -> None:
    saved, params = mapping(name, node["state"]), node.get("params")
    live_params = describe_parameters(optimizer, names)
    if not (isinstance(params, list) and all(isinstance(group, list) for group in params)):
        raise SnapshotCorrupt(f"{name}: the stored optimizer does not name its parameters")
    added = len(added_groups(node, len(live_params), set(names.values())))
    params = params[: len(params) - added]
    if len(params) != len(live_params):
        raise StateError(f"{name}.param_groups: stored {len(params)} groups, live {len(live_params)}: {SAME_PROGRAM}")
    for index, (there, here) in enumerate(zip(params, live_params, strict=True)):
        if len(there) != len(here):
            raise StateError(
                f"{name}.param_groups[{index}]: stored {len(there)} parameters, live {len(here)}; {SAME_PROGRAM}"
            )
        if there == here or (_is_reordered(there, here) and _takes_an_order(optimizer)):
            continue
        position, a, b = next((at, a, b) for at, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)
        raise StateError(
            f"{name}.param_groups[{index}].params[{position}]: stored {a}, live {b}: give the parameters in the same "
            f"order, and in a list (a set has another order in each start); {SAME_PROGRAM}"
        )
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(live_params) + added:
        return  # an optimizer with its own form of state_dict, which its load_state_dict checks
    for index, group in enumerate(groups[: len(params)]):
        # More may be stored: schedulers add options, and so do optimizers that count in `step` (Lamb). Loading takes
        # the stored group as it is. A group may lack a default: an optimizer outside torch.optim gets the default
        # `differentiable` in load_state_dict, which Accelerate calls in `prepare`, and its groups do not.
        where, written = f"{name}.param_groups[{index}]", sorted(mapping(name, group))
        expected = sorted(optimizer.defaults.keys() & optimizer.param_groups[index].keys())
        compare_names(where, written, expected, "option", more=True)


def _is_reordered(there: list[Any], here: list[Any]) -> bool:
    """Whether a group has the same parameters in another order, and each of them has a name."""
    return all(isinstance(param, str) for param in (*there, *here)) and sorted(there) == sorted(here)


def _takes_an_order(optimizer: Optimizer) -> bool:
    """Whether it can get its parameters in another order: it knows them by its groups alone, as torch's own do."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return False
    groups = [group["params"] for group in optimizer.param_groups]
    params = {id(param) for group in groups for param in group}
    listed = [value for value in vars(optimizer).values() if isinstance(value, (list, tuple))]
    return all(
        any(value is group for group in groups) or not any(id(item) in params for item in value) for value in listed
    )


def _compare_scheduler(name: str, scheduler: Any, saved: dict[str, Any]) -> None:
    own = not type(scheduler).__module__.startswith("torch.")  # the user's own may keep values that it has only later
    compare_names(name, list(saved), list(scheduler.state_dict()), "value", more=own)
    here, there = getattr(scheduler, "_schedulers", None), saved.get("_schedulers")
    if isinstance(here, (list, tuple)) and isinstance(there, list):  # SequentialLR, ChainedScheduler
        if len(here) != len(there):
            raise StateError(f"{name}: stored {len(there)} schedulers, live {len(here)}: {SAME_PROGRAM}")
        for index, (inner, state) in enumerate(zip(here, there, strict=True)):
            _compare_scheduler(f"{name}._schedulers[{index}]", inner, mapping(name, state))


def compare_names(where: str, saved: Sequence[str], live: Sequence[str], what: str, *, more: bool = False) -> None:
    """Raise StateError if one side has names that the other side lacks; with `more`, the stored side may have more."""
    only_saved = [name for name in saved if name not in set(live)]
    only_live = [name for name in live if name not in set(saved)]
    if not only_live and (more or not only_saved):
        return
    parts = []
    if only_saved:
        parts.append(f"stored but not live: {_shown(only_saved)}")
    if only_live:
        parts.append(f"live but not stored: {_shown(only_live)}")
    raise StateError(f"{where}: not the same {what} names; {'; '.join(parts)}: {SAME_PROGRAM}")


def references(value: Any) -> Iterator[TensorRef]:
    """Yield the tensors to which a stored tree of small values refers."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from references(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from references(item)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Return `value`, a stored dict. Raises SnapshotCorrupt for anything else."""
    if not isinstance(value, dict):
        raise SnapshotCorrupt(f"{name}: a {type(value).__name__} is stored where a state_dict was")
    return value


def node_of(name: str, node: Any) -> dict[str, Any]:
    """Return `node`, a stored state's node of the tree. Raises SnapshotCorrupt for anything else."""
    if not (isinstance(node, dict) and isinstance(node.get("kind"), str) and "state" in node):
        raise SnapshotCorrupt(f"{name}: the stored state is not one that capture made")
    return node


def _shown(items: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return separator.join(items[:_SHOWN]) + more
