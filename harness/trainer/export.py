"""A torch file of an exported snapshot: `python -m harness.trainer.export IMAGE FILE`, small state on stdin.

Owns what a decoded value becomes in a file that `torch.load(weights_only=True)` opens. It is a process of its own,
started by `harness export`: whoever reads stores has no torch. IMAGE is a safetensors file whose bytes were verified.

Tensors are views into the mapped image, so that memory holds none of them. They are row-major: their order in memory
(`TensorRef.order`) matters to nobody who loads them into something live.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from harness.core import tree
from harness.core.shard import Placed, header_bytes, parse_header
from harness.core.tree import EnumValue, TensorRef
from harness.core.words import printable
from harness.errors import HarnessError, SnapshotCorrupt, StateError
from harness.trainer.copy.to_slot import TORCH_DTYPES, describe


def export(image: Path, document: bytes, file: Path) -> None:
    """Write `document` with its tensors as a torch file, and see that it opens.

    Tied weights are one tensor in the file too. What `weights_only` has no word for becomes what is nearest: a numpy
    array a tensor, a numpy scalar a number, an enum member its value, a frozenset a set.

    Args:
        image: a safetensors file in a shard's layout, with every tensor that `document` refers to.
        document: small state, as `harness.core.tree` encodes it.
        file: written whole; what was in it is gone.

    Raises:
        SnapshotCorrupt: `document` and `image` do not fit.
        StateError: it holds something that a torch file cannot, or numpy is missing.
        OSError: `file` cannot be written.
    """
    value = _plain(tree.loads(document), _read(image))
    try:
        with file.open("wb") as opened:  # by its name, torch would name what is in it by that too
            torch.save(value, opened)
        torch.load(file, weights_only=True, mmap=True)
    except UnpicklingError as err:
        raise StateError(
            f"small state holds a value that torch.load refuses ({str(err)[-200:]!r}): export to a .safetensors file, "
            "or one state with --only"
        ) from err
    except RuntimeError as err:  # torch's word for a full disk too
        raise HarnessError(f"torch could not write the file: {err}") from err


def _read(image: Path) -> dict[str, Tensor]:
    """Every tensor as a view into the file, each with a storage of its own: torch.save writes whole storages."""
    size = image.stat().st_size
    with image.open("rb") as opened:
        # Private pages: torch has no read-only tensors, and what is written to one of these reaches no file.
        data = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
    layout = parse_header(data[: header_bytes(data[:8], size)], size)
    return {placed.name: _view(data, placed) for placed in layout.tensors}


def _view(data: mmap.mmap, placed: Placed) -> Tensor:
    dtype = TORCH_DTYPES[placed.dtype]
    if not placed.size:
        return torch.empty(placed.shape, dtype=dtype)
    count = placed.size // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=placed.offset).reshape(placed.shape)


def _plain(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A decoded value of types that `torch.load(weights_only=True)` knows."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytearray):
        return value
    if kind is bytes:
        return value or bytearray()  # empty bytes are pickled as a call that weights_only refuses
    if kind is TensorRef:
        return _tensor(value, tensors)
    if kind is EnumValue:
        return _plain(value.value, tensors)
    if kind in (dict, OrderedDict, Counter):
        return kind({_key(key, tensors): _plain(item, tensors) for key, item in value.items()})
    if kind in (list, tuple, set):
        return kind([_plain(item, tensors) for item in value])
    if kind is frozenset:
        return {_key(item, tensors) for item in value}
    return value.item()  # a numpy scalar: nothing else is left of the closed set


def _key(key: Any, tensors: Mapping[str, Tensor]) -> Any:
    plain = _plain(key, tensors)
    try:
        hash(plain)
    except TypeError as err:
        raise StateError(f"a {type(key).__name__} is a key in small state, and a torch file cannot hold that") from err
    return plain


def _tensor(ref: TensorRef, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors.get(ref.name)
    if tensor is None or TORCH_DTYPES.get(ref.dtype) is not tensor.dtype:
        raise SnapshotCorrupt(f"{ref.name[:120]!r}: no such {ref.dtype[:20]} tensor")
    if not ref.kind.endswith("complex"):
        return tensor
    if not tensor.is_floating_point() or tensor.shape[-1:] != (2,):
        raise SnapshotCorrupt(f"{ref.name[:120]!r}: {describe(tensor)} is not pairs of reals")
    return torch.view_as_complex(tensor)


def main(arguments: list[str]) -> int:
    """One export; the exit code."""
    image, file = map(Path, arguments)
    try:
        export(image, sys.stdin.buffer.read(), file)
    except (HarnessError, OSError) as err:
        sys.stderr.write(f"{printable(str(err))}\n")
        return err.exit_code if isinstance(err, HarnessError) else HarnessError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
