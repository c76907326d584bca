"""Buckets: gives DistributedDataParallel its final gradient buckets before the first step.

DDP sums gradients bucket by bucket, and rebuilds its buckets once, after its first iteration, in the order in which
the gradients came. A resumed life begins with the first buckets again, and with three ranks or more sums its first
gradients in another order than the unbroken run did: the last bits differ, for good. So every life, the unbroken one
too, is led past that: one backward pass of zeros, parameter by parameter. The next forward builds the final buckets.

Owns which wrappers that is right for. It makes the collective calls of one backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_NEVER_SAME = "a resume differs from an unbroken run in the last bits"


def settle(states: Iterable[object]) -> list[str]:
    """Give each DDP among the states its final buckets. All ranks have to call it at the same place.

    Args:
        states: the states; flat.

    Returns:
        What to tell the user of wrappers that are left as they are, though a resume may then differ.
    """
    told = []
    for wrapper in _wrappers(states):
        if wrapper.find_unused_parameters or _has_begun(wrapper):
            continue  # it never rebuilds its buckets, or has done so already
        why = _why_not(wrapper)
        if why is None:
            _lead_past(wrapper)
        else:
            told.append(f"DistributedDataParallel {why}: with three ranks or more, {_NEVER_SAME}")
    return told


def _wrappers(states: Iterable[object]) -> list[Any]:
    modules = (state for state in states if isinstance(state, nn.Module))
    found = (child for module in modules for child in module.modules() if isinstance(child, DistributedDataParallel))
    return list(dict.fromkeys(found))


def _has_begun(wrapper: Any) -> bool:
    return bool(getattr(wrapper, "_has_rebuilt_buckets", False))


def _why_not(wrapper: Any) -> str | None:
    """Return why a backward pass of zeros would not be right; `None` if it is."""
    if getattr(wrapper, "static_graph", False):
        return "has static_graph=True, which counts its first iteration"
    if getattr(wrapper, "_comm_hooks", None):
        return "has a communication hook"
    if getattr(wrapper, "mixed_precision", None) is not None or getattr(wrapper, "_delay_all_reduce_params", None):
        return "has gradients of its own kind (mixed_precision, delayed all-reduce)"
    if any(_is_hooked(param) for param in _trained(wrapper)):
        return "has hooks on its gradients, or an optimizer in the backward pass"
    if not hasattr(getattr(wrapper, "reducer", None), "prepare_for_backward"):
        return "of this version of torch is not known"
    return None


def _is_hooked(param: Tensor) -> bool:
    return any(getattr(param, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def _trained(wrapper: Any) -> list[Tensor]:
    ignored = set(wrapper.parameters_to_ignore)
    named = wrapper.module.named_parameters()
    return [param for key, param in named if param.requires_grad and key not in ignored]


def _lead_past(wrapper: Any) -> None:
    """Have DDP see one backward pass, in the reverse order of its parameters. No gradient is left of it."""
    params = _trained(wrapper)
    before = [param.grad for param in params]
    for param in params:
        param.grad = None
    wrapper.reducer.prepare_for_backward([])
    for param in reversed(params):
        torch.autograd.backward(param, torch.zeros_like(param))
    for param, grad in zip(params, before, strict=True):
        param.grad = grad
