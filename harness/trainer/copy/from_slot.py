"""Slot to device: copies every tensor of a resume in one go.

Owns how the bytes of a slot get into live tensors: by threads, or through pinned memory. Knows neither state_dicts
nor the use of the tensors.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from harness.trainer.copy import to_slot
from harness.trainer.copy.to_slot import Pair

_PINNED_BYTES: Final = 32 * 1024 * 1024  # two buffers of this size: torch never frees pinned memory


def copy_out(pairs: Sequence[Pair]) -> None:
    """Copy a slot's tensors into live ones, on whatever devices they are. Blocks until all of it is done."""
    devices = {into.device for into, _ in pairs}
    for device in devices:
        here = [pair for pair in pairs if pair[0].device == device]
        if device.type == "cpu":
            _copy_here(here)
        elif device.type == "cuda":
            module = torch.get_device_module(device)
            with module.device(device):
                pinned = [torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
                through_pinned(here, [(buffer, module.Event()) for buffer in pinned])
                module.synchronize(device)
        else:
            _copy(here)


def through_pinned(pairs: Sequence[Pair], buffers: Sequence[tuple[Tensor, Any]]) -> None:
    """Copy to a device through pinned memory: while the device reads one buffer, the next one is filled.

    A copy from memory that is not pinned goes through one small buffer of the driver, and the processor waits for it.

    Args:
        pairs: live tensors on one device, each with its source.
        buffers: buffers on the CPU, each with a device event after which the buffer may be used again.
    """
    turns = itertools.cycle(buffers)
    for batch in _batches(pairs, len(buffers[0][0])):
        buffer, event = next(turns)
        event.synchronize()  # returns at once if it was never recorded
        staged = [(_carve(buffer, offset, source), source) for (_, source), offset in batch]
        _copy_here(staged)
        with torch.no_grad():
            for ((into, _), _), (stage, _) in zip(batch, staged, strict=True):
                into.copy_(stage, non_blocking=True)
        event.record()


def _copy_here(pairs: Iterable[Pair]) -> None:
    """Copy on the CPU with one thread per core, even if torch itself may use fewer: torchrun gives it one."""
    blocks, others = to_slot.split(pairs)
    to_slot.copy_blocks(blocks, len(os.sched_getaffinity(0)))
    _copy(others)


def _copy(pairs: Iterable[Pair]) -> None:
    with torch.no_grad():
        for into, source in pairs:
            into.copy_(source)


def _pieces(pairs: Iterable[Pair], size: int) -> Iterator[Pair]:
    """Yield the same copies in pieces of at most `size` bytes; a tensor with gaps stays whole."""
    for into, source in pairs:
        count = max(1, size // into.element_size())
        if into.numel() <= count or not (into.is_contiguous() and source.is_contiguous()):
            yield into, source
        else:
            flat, from_ = into.view(-1), source.view(-1)
            for begin in range(0, into.numel(), count):
                yield flat[begin : begin + count], from_[begin : begin + count]


def _batches(pairs: Sequence[Pair], size: int) -> Iterator[list[tuple[Pair, int]]]:
    """Yield groups of pieces that fit into a buffer of `size` bytes, each piece with its offset there."""
    batch: list[tuple[Pair, int]] = []
    end = 0
    for into, source in _pieces(pairs, size):
        needed = source.numel() * source.element_size()
        if needed > size:
            _copy([(into, source)])  # it has gaps, and is larger than a buffer
            continue
        if end + needed > size:
            yield batch
            batch, end = [], 0
        batch.append(((into, source), end))
        end += -(-needed // 64) * 64
    if batch:
        yield batch


def _carve(buffer: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of `like` in a buffer of bytes, at `offset`."""
    size = like.numel() * like.element_size()
    return buffer[offset : offset + size].view(like.dtype).view(like.shape)
