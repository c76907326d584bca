"""What the trainer relies on in torch that torch promises to no one: said at the start if a version has it no more.

Owns the list. `docs/versions.md` has the same one, of all libraries, with what each name is used for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.data import dataloader

from harness.errors import ConfigError

_NAMES: Mapping[str, tuple[object, tuple[str, ...]]] = {
    "torch": (torch, ("_foreach_copy_",)),
    "Tensor": (torch.Tensor, ("_version", "_indices", "_values")),
    "Module": (
        nn.Module(),
        ("_non_persistent_buffers_set", "_buffers", "_load_from_state_dict", "_load_state_dict_pre_hooks"),
    ),
    "DataLoader": (dataloader.DataLoader, ("_get_iterator", "_index_sampler")),
    "the iterator of a DataLoader": (
        getattr(dataloader, "_MultiProcessingDataLoaderIter", None),
        ("_shutdown_workers",),
    ),
}


@functools.cache
def check_torch() -> None:
    """Raise ConfigError if this torch lacks a name that the trainer needs."""
    gone = [
        f"{owner}.{name}" for owner, (holder, names) in _NAMES.items() for name in names if not hasattr(holder, name)
    ]
    if gone:
        raise ConfigError(
            f"torch {torch.__version__} is too new for this version of the harness, which needs {', '.join(gone)}: "
            "use an older torch, or a newer harness"
        )
