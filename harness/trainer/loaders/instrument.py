"""Instrument: makes a loader resumable, so that an interrupted iteration continues with the very next batch.

Owns which loaders can be resumed exactly, and which file does it: `dataloader.py` replays a DataLoader, `own_state.py`
asks a loader that knows its position, `sequence.py` counts, `accelerate.py` follows a loader that fetches ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from harness.errors import StateError
from harness.trainer.loaders.accelerate import AccelerateLoader, is_prepared
from harness.trainer.loaders.dataloader import TorchLoader
from harness.trainer.loaders.hook import UNWRAP, InstrumentedLoader, instruments_of
from harness.trainer.loaders.order import varies
from harness.trainer.loaders.own_state import OwnStateLoader
from harness.trainer.loaders.sequence import SequenceLoader


def instrument(
    loader: Any,
    name: str,
    capture_rng: Callable[[], Any],
    restore_rng: Callable[[Any], None],
    seed_workers: bool = True,
) -> InstrumentedLoader:
    """Make the iteration of `loader` resumable. For a loader that was instrumented before, return the same object.

    Args:
        loader: a map-style DataLoader, also one that Accelerate has prepared; anything with `state_dict` and
            `load_state_dict`, such as torchdata's StatefulDataLoader, whose own state is used; or a sequence.
        name: see `InstrumentedLoader.name`.
        capture_rng: returns the state of every global RNG as a plain tree. Draws nothing.
        restore_rng: takes such a tree.
        seed_workers: seed the RNG of data workers for every batch. Without it random numbers drawn in workers are
            torch's, and differ after a resume.

    Raises:
        StateError: the loader cannot be resumed exactly; says why, and the remedy.
    """
    if (instrumented := instruments_of(loader)) is not None:
        return instrumented
    if is_prepared(loader):
        return AccelerateLoader(
            loader,
            name,
            lambda inside, name: instrument(inside, name, capture_rng, restore_rng, seed_workers),
            restore_rng,
        )
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
            raise varies(name)
        return OwnStateLoader(loader, name, capture_rng, restore_rng)
    if isinstance(loader, DataLoader):
        return TorchLoader(loader, name, capture_rng, restore_rng, seed_workers)
    if isinstance(loader, Sequence):
        return SequenceLoader(loader, name, capture_rng, restore_rng)
    if hasattr(loader, "batch_sampler"):  # what Lightning's Fabric makes of a DataLoader
        raise StateError(f"{name} is a {type(loader).__name__}, which stands for a DataLoader: {UNWRAP}")
    raise StateError(
        f"{name} is a {type(loader).__name__}: an exact position is known for a DataLoader, a sequence, and an object"
        " with state_dict and load_state_dict; wrap it in one of them, or use ckpt.steps(n) if it draws its data from"
        " RNG"
    )
