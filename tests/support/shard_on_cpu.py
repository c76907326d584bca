"""Accelerate shards a model on accelerators only, and on a CPU says nothing of it. Here it shards there too."""

from __future__ import annotations

import functools
from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor


def shard_on_cpu() -> None:
    """Have each Accelerator that is made with FSDP's plugin shard, in this process."""
    theirs = AcceleratorState.__init__

    @functools.wraps(theirs)
    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        theirs(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init
    state_dict_of = Accelerator.get_state_dict

    @functools.wraps(state_dict_of)
    def get_state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = state_dict_of(self, *args, **kwargs)
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}

    Accelerator.get_state_dict = get_state_dict
