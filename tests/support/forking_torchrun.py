"""torchrun whose ranks are forks of it: they need not import torch, which is most of a short life.

    python -m tests.support.forking_torchrun RANKS [--preload transformers]… MODULE ARGUMENTS…

The launcher is torch's own, by the function that torchrun calls. Only the ranks are no new interpreters; what depends
on that is tested with torchrun as it is (`test_examples.py`).
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(module: str, arguments: Sequence[str]) -> None:
    """What each rank does."""
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as err:  # the launcher waits for a function's return
        if err.code:
            raise


def main() -> int:
    """Import what every rank needs, and launch them; torchrun's exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--preload", action="append", default=["torch._dynamo"])  # the first optimizer imports it
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    told = parser.parse_args()
    for module in told.preload:
        importlib.import_module(module)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=told.ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="forked",
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(config, rank)(told.module, told.arguments)
    except ChildFailedError as err:
        print(err, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
