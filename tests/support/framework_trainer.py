"""What small trainings by a framework have in common: their options, and what makes them comparable.

Each writes lines in full precision to CURVE while it trains, and what it holds at the end to FINAL.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.core import rehearsal
from tests.support import delays
from tests.support.patient import all_patient


def options_of(modes: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of every such program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--final", type=Path, required=True)
    parser.add_argument("--mode", choices=tuple(modes), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--plain", action="store_true")
    return parser


def prepare(options: argparse.Namespace) -> None:
    """Have this process compute the same in every run, and its steps belong to the test."""
    delays.install(delays.TRAINER)
    if not options.plain and rehearsal.VARIABLE not in os.environ:  # a rehearsal decides by itself what belongs to it
        all_patient()
    torch.set_num_threads(1)
    if options.device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)


def write_final(model: nn.Module, path: Path, *, is_sharded: bool = False) -> None:
    """Write a sum of each tensor of a model; of the whole of one that ranks hold together, and so all call this."""
    assert any(isinstance(param, DTensor) for param in model.parameters()) == is_sharded
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in sorted(model.state_dict().items())
    }
    sums = {
        name: hashlib.blake2b(value.detach().cpu().numpy().tobytes(), digest_size=8).hexdigest()
        for name, value in whole.items()
    }
    path.write_text("\n".join(f"{name} {digest}" for name, digest in sums.items()))
