"""Order: the checks that a sampler whose order is drawn again gives the same batches as before the snapshot.

Owns which of torch's samplers draw everything at once, and the errors. Draws nothing itself.
"""

from __future__ import annotations

import operator
import zlib
from typing import Any

import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from harness.errors import StateError

_DRAW_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def draws_at_once(sampler: Any) -> bool:
    """Whether this sampler is known to draw its whole order at the first index."""
    return type(sampler) in _DRAW_AT_ONCE


def fingerprint(indices: Any) -> int | None:
    """Return a checksum of a batch of indices, the same in any process; `None` if they are neither numbers nor text.

    Only the last batch that was handed out is compared. A running checksum of all would cost 0.8 µs a batch of 32 (two
    cores, torch 2.13), and a shuffle that differs anywhere differs there.
    """
    if isinstance(indices, torch.Tensor):
        indices = indices.tolist()
    try:
        plain = [index if isinstance(index, str) else operator.index(index) for index in indices]
    except TypeError:
        return None
    return zlib.crc32(repr(plain).encode())


def ends_early(name: str, what: str, before: int, now: int) -> StateError:
    """Return the error for a loader that ends before the snapshot's position. `what`: what was counted."""
    return StateError(
        f"{name} had given {before} {what} when the snapshot was taken, and has {now} now: the data, the sampler or the"
        " batch size has changed; resume with the old ones, or start a new run"
    )


def other_order(name: str) -> StateError:
    """Return the error for a loader whose order is not that of the snapshot."""
    return StateError(
        f"{name} gives other batches than before the snapshot: the data, the sampler or the batch size has changed, or"
        " the sampler draws from a source that cannot be restored; resume with the old ones, or have the sampler draw"
        " from a generator that is an attribute of it"
    )


def draws_in_turns(name: str, sampler: Any) -> StateError:
    """Return the error for a sampler that draws from the global RNG after its first index."""
    return StateError(
        f"the sampler of {name} ({type(sampler).__name__}) draws from the global RNG between batches, in turns with the"
        " training loop, so its order cannot be replayed: give the sampler a generator of its own as an attribute, or"
        " have it draw its whole order at once"
    )


def varies(name: str) -> StateError:
    """Return the error for a loader with `in_order=False`."""
    return StateError(f"{name} has in_order=False, so its order of batches varies: remove in_order=False")
