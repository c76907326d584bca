"""Spot-instance resilient training for PyTorch.

    from harness import Checkpointer

    ckpt = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in ckpt.epochs(10):
        for batch in ckpt.batches(loader):
            train_one_step(batch)

Names are loaded when they are first used: importing `harness` imports neither torch nor any cloud library, so that the
agent stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.errors import ConfigError, HarnessError, NoSpace, RunFinished, SnapshotCorrupt, StateError
    from harness.trainer.checkpointer import Checkpointer

    __version__: str
__all__ = [
    "Checkpointer",
    "ConfigError",
    "HarnessError",
    "NoSpace",
    "RunFinished",
    "SnapshotCorrupt",
    "StateError",
    "__version__",
]

_HOME = {
    "Checkpointer": "harness.trainer.checkpointer",
    "ConfigError": "harness.errors",
    "HarnessError": "harness.errors",
    "NoSpace": "harness.errors",
    "RunFinished": "harness.errors",
    "SnapshotCorrupt": "harness.errors",
    "StateError": "harness.errors",
}


def __getattr__(name: str) -> Any:
    import importlib.metadata

    if name == "__version__":
        return importlib.metadata.version("harness-spot")
    if name not in _HOME:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    if name == "Checkpointer":
        from harness import requirements

        requirements.check()
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
