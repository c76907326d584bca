"""A training whose state is large and whose arithmetic is cheap: what the memory of a host is to be too small for.

python -m tests.support.large_trainer --mb 200 --steps 12 --final final.txt

--hold-at STEP --hold-until FILE   stay after that step, listening, until FILE exists
--more-mb MB --more-at STEP    as an evaluation may, it takes so much more memory at one step, in each life
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import Checkpointer
from tests.support import delays
from tests.support.patient import patient


class Large(nn.Module):
    """Some megabytes in tensors of odd sizes, one of them in no memory order of its own."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        rows = megabytes * 1_000_000 // 4 // 4
        for number in range(3):
            self.register_buffer(f"rows_{number}", torch.arange(rows + number, dtype=torch.int32))
        self.register_buffer("turned", torch.arange(rows // 7 * 7, dtype=torch.int32).reshape(7, -1).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def train_once(self) -> None:
        """Every number becomes another; whole ones, so that nothing depends on how many threads do it."""
        for tensor in self.buffers():
            tensor.mul_(3).sub_(1).remainder_(65_521)


def digest(tensors: dict[str, Tensor]) -> str:
    """Of every tensor, by name."""
    return "".join(
        f"{name} {zlib.crc32(memoryview(tensor.contiguous().numpy()))}\n" for name, tensor in tensors.items()
    )


def main() -> None:
    """Train; leave as the Checkpointer says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--final", type=Path, required=True)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--hold-until", type=Path)
    parser.add_argument("--more-mb", type=int, default=0)
    parser.add_argument("--more-at", type=int)
    told = parser.parse_args()
    delays.install(delays.TRAINER)
    torch.set_num_threads(1)
    model = Large(told.mb)
    ckpt = patient(Checkpointer(model=model), hold_at=told.hold_at, hold_until=told.hold_until)
    for _ in ckpt.steps(told.steps):
        model.train_once()
        if ckpt.step_count + 1 == told.more_at:
            torch.ones(told.more_mb * 1_000_000, dtype=torch.uint8)
    told.final.write_text(digest(model.state_dict()))


if __name__ == "__main__":
    sys.exit(main())
