"""Device to slot: tensors as views into shared memory, and the one copy that a snapshot costs the training loop.

Owns the table of torch dtypes that a shard can hold, and every byte that moves between a slot and a tensor. Knows
neither state_dicts nor how a slot is made: a slot is a writable buffer, or a window to copy through, and the offsets of
its shards.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch import Tensor

from harness.core.shard import Placed, ShardLayout
from harness.errors import StateError
from harness.ipc.pages import PAGE
from harness.ipc.window import Window
from harness.trainer.copy import cuda_runtime

Pair = tuple[Tensor, Tensor]
"""A target and its source, of one shape and dtype."""

Block = tuple[int, int, int]
"""A copy of memory: address of the target, address of the source, number of bytes."""

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    }
)
"""torch's dtype for each name of a dtype in safetensors."""

_BLOCK_BYTES: Final = 128 * 1024  # a smaller tensor is left to torch, which copies it with one thread
_PIECE_BYTES: Final = 8 * 1024 * 1024
_MOST_THREADS: Final = 8  # more threads do not copy faster
_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context
_ALREADY_REGISTERED: Final = 712  # cudaErrorHostMemoryAlreadyRegistered

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})
"""safetensors' name for each dtype of torch. Other dtypes cannot be stored."""


def views(buffer: Any, layouts: Sequence[ShardLayout], offsets: Sequence[int]) -> dict[str, Tensor]:
    """Return every tensor of some shards as a view into `buffer`. Nothing is copied; writing to one writes the slot.

    Args:
        buffer: a contiguous buffer (mmap, memoryview, bytearray). Each view keeps it open; torch warns if it is
            read-only, since nothing prevents a write through a view.
        layouts: the shards in it.
        offsets: where each shard's file begins in `buffer`; multiples of 8.

    Raises:
        ValueError: a shard does not fit into the buffer there.
    """
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    for layout, base in zip(layouts, offsets, strict=True):
        if base < 0 or base % 8 or base + layout.size > data.numel():
            raise ValueError(f"a shard of {layout.size} bytes at {base} in a buffer of {data.numel()}")
        for placed in layout.tensors:
            start = base + placed.offset
            flat = data[start : start + placed.size]
            found[placed.name] = flat.view(TORCH_DTYPES[placed.dtype]).reshape(placed.shape)
    return found


def copy_into(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy live tensors into a slot, in one pass. Blocks the training step; nothing else does.

    Sources may be on any device, non-contiguous, conjugated or negated lazily; on the CPU nothing is allocated.

    Args:
        targets: the result of `views` for the slot.
        tensors: the live tensors, by the same names.

    Raises:
        StateError: a tensor was added, removed, or changed its shape or dtype since the layout was planned. Nothing was
            copied.
    """
    check(targets, tensors)
    _copy((targets[name], tensors[name]) for name in targets)


def copy_through(
    window: Window, layouts: Sequence[ShardLayout], offsets: Sequence[int], tensors: Mapping[str, Tensor]
) -> None:
    """Copy live tensors into a slot on a disk, a window at a time. Blocks the training step for as long as that takes.

    A source that is not contiguous needs its size in memory once more while it is copied.

    Args:
        window: the window into the slot.
        layouts: the shards in it.
        offsets: where each shard's file begins in the slot; multiples of 4096.
        tensors: the live tensors, by the layouts' names.

    Raises:
        StateError: as `copy_into`.
        OSError: the disk failed; the slot is void.
    """
    check({placed.name: placed for layout in layouts for placed in layout.tensors}, tensors)
    data = torch.frombuffer(window.buffer, dtype=torch.uint8)
    pairs: list[Pair] = []
    start = end = 0  # the range of the slot that the window holds
    for layout, base in zip(layouts, offsets, strict=True):
        for placed in layout.tensors:
            at, stop = base + placed.offset, base + placed.offset + placed.size
            flat = tensors[placed.name].reshape(-1)
            size = flat.element_size()
            while at < stop:
                if at != end or end - _page(start) == window.size:
                    _copy(pairs)
                    window.write(start, end)
                    pairs, start = [], at
                until = min(stop, _page(start) + window.size)
                first = (at - base - placed.offset) // size
                target = data[at - _page(start) : until - _page(start)].view(flat.dtype)
                pairs.append((target, flat[first : first + target.numel()]))
                at = end = until
    _copy(pairs)
    window.write(start, end)
    window.close()


class Copying:
    """A copy into a slot: of what lies on a device it begins as it is added, of what lies in memory at `finish`.

    As a context manager: afterwards nothing writes into the slot, whatever has happened.
    """

    def __init__(self) -> None:
        """Nothing is added yet."""
        self._blocks: deque[Block] = deque()
        self._devices: set[torch.device] = set()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the devices."""
        self._wait()

    def add(self, pairs: Iterable[Pair]) -> None:
        """Copy these too. On the CPU nothing is allocated, and small tensors and those with gaps are copied at once.

        Args:
            pairs: targets and sources that `matches`. Sources may be conjugated or negated lazily.
        """
        blocks, others = split(pairs)
        self._blocks += blocks
        if others:
            self._devices |= {source.device for _, source in others if source.device.type != "cpu"}
            with torch.no_grad():
                plain = [source if source.device.type == "cpu" else _resolved(source) for _, source in others]
                torch._foreach_copy_([target for target, _ in others], plain, non_blocking=True)

    def finish(self) -> None:
        """Have everything copied. Blocks."""
        copy_blocks(self._blocks, torch.get_num_threads())
        self._wait()

    def _wait(self) -> None:
        """A non-blocking copy is over only after this. It waits for the copy's stream, not for other streams."""
        while self._devices:
            device = self._devices.pop()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            else:
                torch.accelerator.synchronize(device)


def matches(target: Tensor, source: Tensor) -> bool:
    """Whether two tensors have one shape and dtype: a foreach copy casts and broadcasts silently."""
    return target.shape == source.shape and target.dtype == source.dtype


def check(planned: Mapping[str, Tensor | Placed], tensors: Mapping[str, Tensor]) -> None:
    """Raise StateError unless the live tensors have the names, shapes and dtypes of the plan."""
    if planned.keys() != tensors.keys():
        odd = sorted(planned.keys() ^ tensors.keys())
        raise StateError(f"{odd[0]} and {len(odd) - 1} more tensors were added or removed since the layout was planned")
    for name, plan in planned.items():
        source = tensors[name]
        dtype = plan.dtype if isinstance(plan, Tensor) else TORCH_DTYPES[plan.dtype]
        if tuple(source.shape) != tuple(plan.shape) or source.dtype != dtype:
            raise StateError(
                f"{name} is now {describe(source)}; the layout was planned for {_describe(dtype, plan.shape)}"
            )


def _copy(pairs: Iterable[Pair]) -> None:
    with Copying() as copying:
        copying.add(pairs)
        copying.finish()


def _resolved(tensor: Tensor) -> Tensor:
    """Apply a lazy conjugation or negation on the device: torch would do it on the CPU, before the bytes are there."""
    return tensor.resolve_conj().resolve_neg()


def split(pairs: Iterable[Pair]) -> tuple[deque[Block], list[Pair]]:
    """Return the blocks for `copy_blocks`, in pieces, and the pairs left to torch: small, with gaps, or on a device."""
    blocks: deque[Block] = deque()
    others: list[Pair] = []
    for target, source in pairs:
        if source.nbytes >= _BLOCK_BYTES and _is_plain_copy(target, source):
            to, from_ = target.data_ptr(), source.data_ptr()
            for start in range(0, source.nbytes, _PIECE_BYTES):
                blocks.append((to + start, from_ + start, min(_PIECE_BYTES, source.nbytes - start)))
        else:
            others.append((target, source))
    return blocks, others


def copy_blocks(blocks: deque[Block], most_threads: int) -> None:
    """Copy blocks of memory, with at most `most_threads` threads, each of which takes the next piece when it is free.

    torch's own copy divides each tensor among its threads and waits for all of them, hundreds of times. While the cores
    are busy (as with DataLoader workers), it waits each time for a thread that does not get a core. Then it takes 5 to
    7 times as long as a flat copy, and this function 1.2 times.
    """
    threads = [
        threading.Thread(target=_copy_some, args=(blocks,), name=f"harness-copy-{number}")
        for number in range(1, min(most_threads, _MOST_THREADS, len(blocks)))
    ]
    started = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads: a limit, or Python 3.12 at the end of the process
            for thread in threads:
                thread.start()
                started.append(thread)
        _copy_some(blocks)
    finally:
        blocks.clear()  # after Ctrl-C: no thread may still write when the slot is filled again
        for thread in started:
            thread.join()


def _copy_some(blocks: deque[Block]) -> None:
    """Take blocks off `blocks` and copy them, until none is left. Does not hold the GIL."""
    with contextlib.suppress(IndexError):
        while True:
            ctypes.memmove(*blocks.popleft())


def _is_plain_copy(target: Tensor, source: Tensor) -> bool:
    both_here = source.device.type == "cpu" and target.device.type == "cpu"
    same = source.dtype == target.dtype and source.shape == target.shape
    return both_here and same and is_block(source) and is_block(target)


def is_block(tensor: Tensor) -> bool:
    """Whether a tensor's values are the bytes of one block of memory, in row-major order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


class MemoryTaken(RuntimeError):
    """Other memory is registered with CUDA at an address that is ours now: a copy to it would go astray."""


def pin(buffer: Any, device: torch.device) -> Callable[[], None]:
    """Register `buffer` as pinned memory: a copy from a CUDA device into it runs at full speed, without waiting.

    Takes some tenths of a second per GB, without the GIL. The memory is pinned for every CUDA device of the process.
    Does not spoil a CUDA graph that another thread records meanwhile.

    Args:
        buffer: a writable buffer that begins and ends at a page.
        device: a device that is in use, so that this makes no context on another one.

    Returns:
        A function that unpins the memory; call it before the memory is unmapped.

    Raises:
        MemoryTaken: memory that was unmapped while it was registered had (a part of) this address. `buffer` cannot be
            the target of a copy from a CUDA device, pinned or not.
        RuntimeError: the driver refuses for another reason; copies are slower then.
    """
    data = torch.frombuffer(buffer, dtype=torch.uint8)
    address, runtime = data.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register() -> int:
        code = int(runtime.cudaHostRegister(address, data.numel(), _REGISTER_PORTABLE))
        if code != 0:
            cuda_runtime.forget_error()
        return code

    with cuda_runtime.relaxed(), torch.cuda.device(device):
        code = register()
        if code == _ALREADY_REGISTERED:  # what was there before is unmapped: its registration is worth nothing
            if int(runtime.cudaHostUnregister(address)) != 0:
                cuda_runtime.forget_error()
            code = register()
    if code == _ALREADY_REGISTERED:
        raise MemoryTaken(f"cudaHostRegister of {data.numel()} bytes: error {code}")
    if code != 0:
        raise RuntimeError(f"cudaHostRegister of {data.numel()} bytes: error {code}")

    def unpin() -> None:
        with cuda_runtime.relaxed(), torch.cuda.device(device):
            if int(runtime.cudaHostUnregister(address)) != 0:  # not ours to say: the memory goes away
                cuda_runtime.forget_error()

    return unpin


def _page(offset: int) -> int:
    return offset // PAGE * PAGE


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape for messages: "float32 [3, 4]"."""
    return _describe(tensor.dtype, tensor.shape)


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
