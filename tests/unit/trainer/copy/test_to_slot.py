from __future__ import annotations

import contextlib
import mmap
import threading
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness.core.shard import DTYPE_BYTES, TensorSpec, plan_shards
from harness.errors import StateError
from harness.ipc.pages import address_of
from harness.ipc.slots import Slot, place_shards, slot_bytes
from harness.ipc.window import Window
from harness.trainer.copy import to_slot
from harness.trainer.copy.to_slot import DTYPE_NAMES, TORCH_DTYPES, copy_into, copy_through, views
from tests.support.patience import HANG_S


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8).tolist())


def slot_for(tensors: dict[str, Tensor], max_shard_bytes: int = 2**30) -> tuple[mmap.mmap, dict[str, Tensor]]:
    """A slot laid out for `tensors`, shards at multiples of 4096, and its views."""
    layouts = plan_shards(
        [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()],
        max_shard_bytes,
    )
    offsets, end = [], 0
    for layout in layouts:
        offsets.append(end)
        end += -(-layout.size // 4096) * 4096
    buffer = mmap.mmap(-1, max(end, 1))
    return buffer, views(buffer, layouts, offsets)


def zoo() -> dict[str, Tensor]:
    tensors = {str(dtype): random_bits(dtype, 8, 6) for dtype in DTYPE_NAMES}
    tensors |= {f"{dtype} transposed": random_bits(dtype, 8, 6).t() for dtype in DTYPE_NAMES}
    tensors |= {f"{dtype} scalar": random_bits(dtype) for dtype in DTYPE_NAMES}
    tensors |= {f"{dtype} empty": random_bits(dtype, 0, 3) for dtype in DTYPE_NAMES}
    complex_tensor = random_bits(torch.complex64, 5)
    return tensors | {
        "conjugated": complex_tensor.conj(),
        "negated": complex_tensor.conj().imag,
        "expanded": torch.ones(1).expand(4, 3),
        "sliced": torch.arange(20.0)[1::3],
        "with gradient": torch.ones(3, requires_grad=True),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


def pass_through(tensors: dict[str, Tensor], directory: Path, window_bytes: int, max_shard_bytes: int) -> bytes:
    """A slot on a disk after `tensors` went through a window into it, headers aside: there are none."""
    layouts = plan_shards(
        [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()],
        max_shard_bytes,
    )
    spans = place_shards([(str(layout.index), layout.size) for layout in layouts])
    slot = Slot.create(slot_bytes(spans, 0), directory)
    try:
        assert slot.on_disk
        copy_through(Window(slot, window_bytes), layouts, [span.offset for span in spans], tensors)
        return bytes(slot.buffer[4096:])
    finally:
        slot.close()


@pytest.mark.parametrize("max_shard_bytes", [2**30, 700])
@pytest.mark.parametrize("window_bytes", [4096, 8192, 2**20])
def test_what_passes_through_a_window_of_any_size_is_what_a_copy_into_memory_is(
    tmp_path: Path, window_bytes: int, max_shard_bytes: int
) -> None:
    tensors = zoo() | {"large": random_bits(torch.float32, 40, 100), "large and odd": random_bits(torch.uint8, 9001)}
    buffer, targets = slot_for(tensors, max_shard_bytes)
    copy_into(targets, tensors)

    passed = pass_through(tensors, tmp_path, window_bytes, max_shard_bytes)

    assert passed[: len(buffer)] == buffer[:]


def test_what_does_not_match_the_plan_does_not_pass(tmp_path: Path) -> None:
    layouts = plan_shards([TensorSpec("a", "F32", (3,))])
    slot = Slot.create(3 * 4096, tmp_path)

    for live in ({"a": torch.zeros(3, dtype=torch.float64)}, {"a": torch.zeros(3, 1)}, {"b": torch.zeros(3)}, {}):
        with pytest.raises(StateError):
            copy_through(Window(slot), layouts, [4096], live)
    slot.close()


def test_the_tables_of_dtypes_agree() -> None:
    assert TORCH_DTYPES.keys() == DTYPE_BYTES.keys()
    assert all(dtype.itemsize == DTYPE_BYTES[name] for name, dtype in TORCH_DTYPES.items())
    assert len(DTYPE_NAMES) == len(TORCH_DTYPES)


@pytest.mark.parametrize("max_shard_bytes", [2**30, 500])
def test_every_kind_of_tensor_arrives_bit_for_bit(max_shard_bytes: int) -> None:
    tensors = zoo()
    _, targets = slot_for(tensors, max_shard_bytes)

    copy_into(targets, tensors)

    for name, tensor in tensors.items():
        assert bits(targets[name]) == bits(tensor.detach()), name


def test_a_view_is_the_slot_s_own_memory() -> None:
    tensors = {"a": torch.arange(4.0)}
    buffer, targets = slot_for(tensors)

    copy_into(targets, tensors)

    assert buffer[4096 : 4096 + 16] == bits(tensors["a"])
    buffer[4096:4100] = b"\0\0\x80?"
    assert targets["a"][0] == 1.0


def test_copying_draws_no_gradient_and_leaves_the_sources() -> None:
    source = torch.ones(3, requires_grad=True)
    _, targets = slot_for({"a": source})

    copy_into(targets, {"a": source})

    assert not targets["a"].requires_grad
    assert source.grad is None
    assert source.requires_grad


def test_nothing_to_copy_is_nothing() -> None:
    copy_into({}, {})


@pytest.mark.parametrize(
    ("live", "words"),
    [
        ({"a": torch.ones(3, 1), "b": torch.ones(2)}, r"a is now float32 \[3, 1\]; .* float32 \[1, 3\]"),
        ({"a": torch.ones(3), "b": torch.ones(2)}, r"a is now float32 \[3\]"),
        ({"a": torch.ones(1, 3).double(), "b": torch.ones(2)}, r"a is now float64 \[1, 3\]"),
        ({"a": torch.ones(1, 3)}, "b and 0 more"),
        ({"a": torch.ones(1, 3), "b": torch.ones(2), "c": torch.ones(1)}, "c and 0 more"),
    ],
)
def test_a_tensor_that_changed_since_the_plan_is_refused_and_nothing_is_copied(
    live: dict[str, Tensor], words: str
) -> None:
    _, targets = slot_for({"a": torch.zeros(1, 3), "b": torch.zeros(2)})

    with pytest.raises(StateError, match=words):
        copy_into(targets, live)

    assert not any(target.any() for target in targets.values())


@pytest.mark.parametrize("offset", [-8, 4, 8])
def test_a_shard_that_does_not_fit_its_place_is_refused(offset: int) -> None:
    (layout,) = plan_shards([TensorSpec("a", "F32", (4,))])
    with pytest.raises(ValueError, match="a shard of 4112 bytes"):
        views(bytearray(layout.size), [layout], [offset])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_blocks_are_copied_piece_by_piece_and_whole(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end in the middle of elements and of tensors; small ones and strange ones are torch's."""
    monkeypatch.setattr(to_slot, "_PIECE_BYTES", 100_003)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensors = {
        "one block": torch.randn(300_000),
        "bytes": torch.randint(0, 255, (123_457,), dtype=torch.uint8),
        "exactly at the limit": torch.randn(32_768),
        "small": torch.randn(3),
        "empty": torch.empty(0),
        "transposed": torch.randn(400, 500).t(),
        "negated lazily": torch.randn(300, 400, dtype=torch.complex64).conj().imag,
        "a part": torch.randn(900, 300)[7:800],
    }
    targets = {name: torch.full(tuple(tensor.shape), 7, dtype=tensor.dtype) for name, tensor in tensors.items()}
    running = copying()

    copy_into(targets, tensors)

    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor), name
    assert copying() <= running


def copying() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("harness-copy")}


def test_an_interrupted_copy_leaves_nobody_behind_who_still_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the loop's own share. The other threads copied on, into a slot that was filled anew and sealed."""
    begun, interrupted = threading.Event(), threading.Event()
    by_others: list[int] = []

    def memmove(to: int, from_: int, size: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(HANG_S)
            interrupted.set()
            raise KeyboardInterrupt
        by_others.append(to)
        begun.set()
        assert interrupted.wait(HANG_S)

    monkeypatch.setattr(to_slot, "_PIECE_BYTES", 100_003)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("harness.trainer.copy.to_slot.ctypes.memmove", memmove)
    with pytest.raises(KeyboardInterrupt):
        copy_into({"a": torch.zeros(1_000_000)}, {"a": torch.ones(1_000_000)})
    for thread in threading.enumerate():
        if thread.name.startswith("harness-copy"):
            thread.join(HANG_S)

    assert len(by_others) == 1


def test_where_no_thread_can_be_started_the_loop_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts none at the end of the process, where a loop without an end of its own is saved last."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(to_slot, "threading", types.SimpleNamespace(Thread=Refused))
    targets = {"a": torch.zeros(5_000_000)}
    copy_into(targets, {"a": torch.ones(5_000_000)})

    assert bool(targets["a"].all())


def test_what_passed_through_a_window_is_on_the_disk_before_anybody_seals_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Window] = []
    monkeypatch.setattr(Window, "close", lambda window: closed.append(window))
    pass_through({"a": torch.ones(3)}, tmp_path, 4096, 2**30)

    assert len(closed) == 1


# Pinned memory. What a driver does with it: tests/gpu -----------------------------------------------------------------


class PlayedRuntime:
    """CUDA's functions for host memory, with what is registered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: dict[int, int] = {}
        self.forgotten = 0
        monkeypatch.setattr("torch.cuda.cudart", lambda: self)
        monkeypatch.setattr("torch.cuda.device", contextlib.nullcontext)
        monkeypatch.setattr("harness.trainer.copy.cuda_runtime.forget_error", self.forget)

    def forget(self) -> None:
        self.forgotten += 1

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        if any(at < address + size and address < at + length for at, length in self.registered.items()):
            return 712
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) is not None else 713


def test_what_is_pinned_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime(monkeypatch)
    with mmap.mmap(-1, 8192) as memory:
        unpin = to_slot.pin(memory, torch.device("cuda:0"))
        assert list(runtime.registered.values()) == [8192]
        unpin()
        unpin()

    assert runtime.registered == {}
    assert runtime.forgotten == 1  # the error of the second one


def test_a_registration_that_has_outlived_its_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime(monkeypatch)
    with mmap.mmap(-1, 8192) as memory:
        address = address_of(memory)
        runtime.registered[address] = 4096

        to_slot.pin(memory, torch.device("cuda:0"))

        assert runtime.registered == {address: 8192}
        assert runtime.forgotten == 1


def test_a_registration_in_the_middle_makes_memory_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PlayedRuntime(monkeypatch)
    with mmap.mmap(-1, 8192) as memory:
        runtime.registered[address_of(memory) + 4096] = 4096

        with pytest.raises(to_slot.MemoryTaken):
            to_slot.pin(memory, torch.device("cuda:0"))

        assert runtime.forgotten == 3


# A copy that begins before everything is known --------------------------------------------------------------------


def pairs_of(sources: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros_like(source), source) for source in sources]


def test_what_is_added_at_any_time_before_the_end_is_copied() -> None:
    large, gaps = torch.arange(100_000.0), torch.arange(20.0)[1::3]
    first, second = pairs_of([large, torch.ones(3)]), pairs_of([gaps, large.flip(0)])
    with to_slot.Copying() as copying:
        copying.add(first)
        copying.add([])
        copying.add(second)
        copying.finish()
    for target, source in first + second:
        assert torch.equal(target, source)


def test_a_large_tensor_in_memory_is_read_when_the_copy_finishes() -> None:
    """It may still change while other states are captured; the state_dict of all of them comes first."""
    large = torch.zeros(100_000)
    [(target, _)] = pairs = pairs_of([large])
    with to_slot.Copying() as copying:
        copying.add(pairs)
        large += 1
        copying.finish()
    assert torch.equal(target, torch.ones(100_000))


def test_a_copy_that_an_exception_ends_writes_nothing_afterwards() -> None:
    large = torch.ones(100_000)
    [(target, _)] = pairs = pairs_of([large])
    with contextlib.suppress(ArithmeticError), to_slot.Copying() as copying:
        copying.add(pairs)
        raise ArithmeticError
    assert not target.any()
