"""Runs a script of somebody else's with a training that is patient: see `patient.py`.

    python -m tests.support.patiently examples/with_accelerate.py --epochs 3
    python -m tests.support.patiently examples/watch_torch_save.py --await-commits FOLDER

The second saves by itself: with --await-commits it stays behind its first torch.save, until one more snapshot than
there was is committed in FOLDER, or the agent has died.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from tests.support.patient import all_patient

AWAIT = "--await-commits"


def await_a_commit(folder: Path) -> None:
    """Make the first torch.save of this process wait until one snapshot more is committed in `folder`."""
    before, save, agent = len(list(folder.glob("*.json"))), torch.save, os.getppid()

    def save_and_wait(*args: Any, **options: Any) -> None:
        save(*args, **options)
        torch.save = save
        while len(list(folder.glob("*.json"))) == before and os.getppid() == agent:
            threading.Event().wait(0.002)

    torch.save = save_and_wait


if __name__ == "__main__":
    all_patient()
    if AWAIT in sys.argv:
        at = sys.argv.index(AWAIT)
        await_a_commit(Path(sys.argv[at + 1]))
        del sys.argv[at : at + 2]
    if "ACCELERATE_USE_FSDP" in os.environ:  # by `accelerate launch --use_fsdp`
        from tests.support.shard_on_cpu import shard_on_cpu

        shard_on_cpu()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
