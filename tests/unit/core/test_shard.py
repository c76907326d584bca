from __future__ import annotations

import json
import random
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.shard import (
    ALIGNMENT,
    DTYPE_BYTES,
    MAX_FROZEN_SHARD_BYTES,
    MAX_HEADER_BYTES,
    Placed,
    ShardLayout,
    TensorSpec,
    header_bytes,
    parse_header,
    plan_shards,
)
from harness.errors import SnapshotCorrupt


def file_of(header: Any, data_bytes: int = 0, *, pad: bool = True) -> bytes:
    """A shard with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_layout_is_pinned() -> None:
    specs = [TensorSpec("b", "F32", (3,)), TensorSpec("s", "I64", ()), TensorSpec("a", "F32", (4, 4))]

    (layout,) = plan_shards(specs)

    text = (
        b'{"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[4,4],"data_offsets":[8,72]},'
        b'"b":{"dtype":"F32","shape":[3],"data_offsets":[72,84]}}'
    )
    assert layout == ShardLayout(
        index=0,
        header=struct.pack("<Q", 4088) + text.ljust(4088),
        tensors=(
            Placed("s", "I64", (), 4096, 8),
            Placed("a", "F32", (4, 4), 4104, 64),
            Placed("b", "F32", (3,), 4168, 12),
        ),
        size=4180,
    )


def test_within_an_element_size_multiples_of_a_cache_line_come_first_then_large_ones_then_names() -> None:
    shapes = {"scalar": (), "odd": (100,), "z64": (16,), "a64": (16,), "big64": (32,)}
    (layout,) = plan_shards([TensorSpec(name, "F32", shape) for name, shape in shapes.items()])

    assert [placed.name for placed in layout.tensors] == ["big64", "a64", "z64", "odd", "scalar"]


def test_frozen_tensors_have_shards_of_their_own_that_keep_their_numbers() -> None:
    frozen = [TensorSpec("frozen", "F32", (8,), frozen=True)]
    before = plan_shards([*frozen, TensorSpec("w", "F32", (8,))])
    after = plan_shards([*frozen, TensorSpec("w", "F32", (8,)), TensorSpec("m", "F64", (8,))])

    assert [[placed.name for placed in layout.tensors] for layout in after] == [["frozen"], ["m", "w"]]
    assert before[0] == after[0]
    assert [layout.index for layout in after] == [0, 1]


def test_a_shard_ends_at_its_limit_and_a_larger_tensor_has_its_own() -> None:
    sizes = {"huge": 300, "a": 60, "b": 40, "c": 30, "d": 10}
    layouts = plan_shards([TensorSpec(name, "U8", (size,)) for name, size in sizes.items()], max_shard_bytes=100)

    assert [[placed.name for placed in layout.tensors] for layout in layouts] == [["huge"], ["a", "b"], ["c", "d"]]


def test_frozen_tensors_have_smaller_shards_so_that_one_that_changes_costs_little() -> None:
    specs = [TensorSpec(f"{index}", "U8", (MAX_FROZEN_SHARD_BYTES // 2,), frozen=True) for index in range(4)]
    trained = [TensorSpec(f"t{index}", "U8", (MAX_FROZEN_SHARD_BYTES // 2,)) for index in range(4)]

    assert [len(layout.tensors) for layout in plan_shards([*specs, *trained])] == [2, 2, 4]


def test_no_tensors_need_no_shards() -> None:
    assert plan_shards([]) == ()


@pytest.mark.parametrize(
    "specs",
    [
        [TensorSpec("a", "F32", ()), TensorSpec("a", "F64", ())],
        [TensorSpec("__metadata__", "F32", ())],
        [TensorSpec("a", "F33", ())],
        [TensorSpec("a", "F32", (-1,))],
        [TensorSpec("a", "F32", (2**40, 2**40))],
        [TensorSpec("\ud800", "F32", ())],
    ],
)
def test_a_plan_of_the_impossible_is_refused(specs: list[TensorSpec]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the type is the rule
        plan_shards(specs)


specs_lists = st.lists(
    st.builds(
        TensorSpec,
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 20), max_size=3).map(tuple),
        st.booleans(),
    ),
    unique_by=lambda spec: spec.name,
    max_size=20,
)


@settings(max_examples=150)
@given(specs_lists, st.integers(1, 20_000), st.randoms(use_true_random=False))
def test_every_plan_is_aligned_without_holes_complete_and_readable(
    specs: list[TensorSpec], limit: int, rng: random.Random
) -> None:
    layouts = plan_shards(specs, limit)

    frozen = {spec.name for spec in specs if spec.frozen}
    placed = [placed for layout in layouts for placed in layout.tensors]
    assert sorted((p.name, p.dtype, p.shape, p.size) for p in placed) == sorted(
        (s.name, s.dtype, s.shape, s.size) for s in specs
    )
    for index, layout in enumerate(layouts):
        end = len(layout.header)
        assert end % ALIGNMENT == 0
        for p in layout.tensors:
            assert p.offset == end
            assert p.offset % DTYPE_BYTES[p.dtype] == 0
            end += p.size
        assert layout.size == end
        assert end - len(layout.header) <= limit or sum(p.size > 0 for p in layout.tensors) == 1
        assert len({p.name in frozen for p in layout.tensors}) == 1
        assert parse_header(layout.header, layout.size, index) == layout
    shuffled = list(specs)
    rng.shuffle(shuffled)
    assert plan_shards(shuffled, limit) == layouts


def test_the_safetensors_library_sees_the_same_tensors() -> None:
    torch.manual_seed(1)
    tensors = {
        "f64": torch.randn(3, 5, dtype=torch.float64),
        "f32": torch.randn(()),
        "bf16": torch.randn(7).bfloat16(),
        "f16": torch.randn(1, 2, 3).half(),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "fp8z": torch.randn(9).to(torch.float8_e5m2fnuz),
        "c64": torch.randn(3, dtype=torch.complex64),
        "i8": torch.arange(5, dtype=torch.int8),
        "u16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
        "u64": torch.tensor([1, 2, 3], dtype=torch.uint64),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        'é/ "quoted"': torch.ones(1),
    }
    names = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}
    specs = [TensorSpec(name, names[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]

    (layout,) = plan_shards(specs)
    file = layout.header + b"".join(raw(tensors[p.name]) for p in layout.tensors)

    assert len(file) == layout.size
    loaded = safetensors.torch.load(file)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert raw(loaded[name]) == raw(tensor)


def test_every_dtype_is_one_that_safetensors_knows_with_that_size() -> None:
    for dtype, size in DTYPE_BYTES.items():
        (layout,) = plan_shards([TensorSpec("t", dtype, (3,))])
        loaded = safetensors.torch.load(layout.header + bytes(3 * size))
        assert loaded["t"].nbytes == 3 * size


def test_a_header_of_a_foreign_writer_is_read_when_its_data_is_aligned() -> None:
    file = file_of({"__metadata__": {"format": "pt"}, "b": entry(offsets=[8, 16]), "a": entry(offsets=[0, 8])}, 16)

    layout = parse_header(file[: header_bytes(file[:8], len(file))], len(file), index=3)

    assert [(p.name, p.offset) for p in layout.tensors] == [("a", ALIGNMENT), ("b", ALIGNMENT + 8)]
    assert layout.index == 3


HOSTILE: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 0),
    "seven bytes": (bytes(7), 0),
    "ends inside its header": (struct.pack("<Q", 4088) + b"{}", 0),
    "a length of 2**64 - 1": (b"\xff" * 8, 0),
    "a length over the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1), 10**9),
    "no header": (struct.pack("<Q", 0), 0),
    "not a brace first": (file_of(b" {}"), 0),
    "a list": (file_of(b"[]"), 0),
    "not UTF-8": (file_of(b'{"\xff":1}'), 0),
    "not JSON": (file_of(b'{"a":'), 0),
    "text after the JSON": (file_of(b"{}x"), 0),
    "deep nesting": (file_of(b'{"a":' * 100_000), 0),
    "deep list": (file_of(b'{"a":' + b"[" * 100_000), 0),
    "data not at a page": (file_of({"a": entry()}, 8, pad=False), 0),
    "a name twice": (
        file_of(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", 8),
        0,
    ),
    "a field twice": (file_of(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8), 0),
    "a number for an entry": (file_of({"a": 1}), 0),
    "a field missing": (file_of({"a": {"dtype": "F32", "shape": [2]}}, 8), 0),
    "a field too many": (file_of({"a": {**entry(), "code": ""}}, 8), 0),
    "an unknown dtype": (file_of({"a": entry("F33")}, 8), 0),
    "a dtype that is a list": (file_of({"a": entry(["F32"])}, 8), 0),
    "a shape of floats": (file_of({"a": entry(shape=[2.0])}, 8), 0),
    "a shape of booleans": (file_of({"a": entry(shape=[True, True], offsets=[0, 4])}, 4), 0),
    "a negative dimension": (file_of({"a": entry(shape=[-2])}, 8), 0),
    "two negative dimensions": (file_of({"a": entry(shape=[-2, -1])}, 8), 0),
    "an overflow": (file_of({"a": entry(shape=[2**62, 4])}, 8), 0),
    "an overflow times zero": (file_of({"a": entry(shape=[2**62, 4, 0], offsets=[0, 0])}), 0),
    "an endless integer": (
        file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}', 8),
        0,
    ),
    "a NaN": (file_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8), 0),
    "three offsets": (file_of({"a": entry(offsets=[0, 8, 8])}, 8), 0),
    "offsets backwards": (file_of({"a": entry(offsets=[8, 0])}, 8), 0),
    "offsets below zero": (file_of({"a": entry(offsets=[-8, 0])}, 8), 0),
    "a size that is not the shape's": (file_of({"a": entry(offsets=[0, 4])}, 4), 0),
    "a hole at the start": (file_of({"a": entry(offsets=[8, 16])}, 16), 0),
    "a hole between": (file_of({"a": entry(), "b": entry(offsets=[16, 24])}, 24), 0),
    "an overlap": (file_of({"a": entry(), "b": entry(offsets=[4, 12])}, 12), 0),
    "the same bytes twice": (file_of({"a": entry(), "b": entry()}, 8), 0),
    "data missing": (file_of({"a": entry()}, 7), 0),
    "data too long": (file_of({"a": entry()}, 9), 0),
    "data of no tensor": (file_of({}, 1), 0),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), 0),
    "metadata a list": (file_of({"__metadata__": []}), 0),
    "not aligned": (file_of({"b": entry("U8", [1], [0, 1]), "a": entry(offsets=[1, 9])}, 9), 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_shard_is_corrupt_and_nothing_worse(name: str) -> None:
    file, more = HOSTILE[name]
    with pytest.raises(SnapshotCorrupt):
        parse_header(file, len(file) + more)


def test_too_short_a_prefix_is_the_caller_s_mistake() -> None:
    file = file_of({"a": entry()}, 8)
    assert header_bytes(file[:8], len(file)) == ALIGNMENT
    with pytest.raises(ValueError, match="100 bytes given of a header of 4096"):
        parse_header(file[:100], len(file))


@settings(max_examples=200)
@given(st.data())
def test_a_flipped_byte_in_a_header_never_escapes_as_another_error(data: st.DataObject) -> None:
    (layout,) = plan_shards(
        [TensorSpec("a", "F32", (4, 2)), TensorSpec("b", "BF16", (3,)), TensorSpec("c", "U8", (0,))]
    )
    header = bytearray(layout.header)
    header[data.draw(st.integers(0, 180))] = data.draw(st.integers(0, 255))
    try:
        parsed = parse_header(bytes(header) + bytes(layout.size - len(header)), layout.size)
    except SnapshotCorrupt:
        return
    assert sum(placed.size for placed in parsed.tensors) == layout.size - len(layout.header)
