"""Digests: of batches, random states, tensors and plain values. Changes nothing and draws nothing."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from harness.trainer.state.kinds import is_array, is_tensor

_WEIGHTED: Final = 1 << 17
"""So many words have a weight each; of more, blocks of words have."""
_BLOCK: Final = 1024
_made_weights: Final = dict[torch.device, Tensor]()
"""1 MiB for each device."""


def digest(value: Any) -> str:
    """Return a digest of a batch, or of a random state: of all bytes of the tensors, arrays and plain values in it."""
    whole = hashlib.blake2b(digest_size=8)
    _add(whole, value)
    return whole.hexdigest()


def of_tensor(tensor: Tensor) -> str:
    """Return a digest of the bytes of a tensor; of a sparse or nested one, of those that it stores."""
    whole = hashlib.blake2b(digest_size=8)
    for part in _stored(tensor.detach()):
        dense = part.resolve_conj().resolve_neg().cpu().contiguous()
        if dense.nbytes:
            whole.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))
    return whole.hexdigest()


def weighted_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, for each tensor, a sum of its bytes that tells where they are. Reads each once, on its own device.

    Far cheaper than a digest, which needs the bytes on the CPU. Waits once for each device. Only of dense tensors.
    """
    with torch.no_grad():
        sums = {name: _weighted_sum(tensor) for name, tensor in tensors.items()}
    found: dict[str, int] = {}
    for device in {total.device for total in sums.values()}:
        names = [name for name, total in sums.items() if total.device == device]
        found |= dict(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
    return found


def _weighted_sum(tensor: Tensor) -> Tensor:
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    if whole < data.numel():
        words = torch.cat([words, data[whole:].to(torch.int64)])
    if words.numel() > _WEIGHTED:  # else the weights would take as much memory as the tensor
        blocks = words.numel() // _BLOCK * _BLOCK
        words = torch.cat([words[:blocks].view(-1, _BLOCK).sum(1), words[blocks:]])
    return (words * _weights(words.numel(), words.device)).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Return the first `count` odd numbers. To make them takes far longer than to multiply by them."""
    if count > _WEIGHTED:
        return torch.arange(1, 2 * count, 2, device=device)
    if device not in _made_weights:
        _made_weights[device] = torch.arange(1, 2 * _WEIGHTED, 2, device=device)
    return _made_weights[device][:count]


def bytes_of(tensor: Tensor) -> int:
    """Return how many bytes a tensor stores."""
    return sum(part.numel() * part.element_size() for part in _stored(tensor.detach()))


def _stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors in which a tensor is stored. A meta tensor stores nothing."""
    if tensor.is_meta:
        return ()
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.is_nested:
        return tensor.unbind()
    return (tensor,) if layout is torch.strided else (tensor.to_dense(),)


def _add(whole: Any, value: Any) -> None:
    if is_tensor(value) or is_array(value):
        tensor = value if is_tensor(value) else torch.from_numpy(value.copy()) if value.dtype != object else None
        if tensor is None:
            _add(whole, value.tolist())
        else:
            whole.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            whole.update(of_tensor(tensor).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            whole.update(repr(key).encode())
            _add(whole, item)
    elif isinstance(value, (list, tuple)):
        whole.update(f"{len(value)} ".encode())
        for item in value:
            _add(whole, item)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        whole.update(repr(value).encode())
    else:  # an object of the program's own, of which only its values are known
        whole.update(type(value).__qualname__.encode())
        _add(whole, {name: item for name, item in getattr(value, "__dict__", {}).items() if _is_plain(item)})


def _is_plain(value: Any) -> bool:
    plain = (bool, int, float, str, bytes, list, tuple, dict)
    return value is None or is_tensor(value) or is_array(value) or isinstance(value, plain)
