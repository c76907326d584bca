"""Runs a script of somebody else's with a training that is patient: see `patient.py`.

python -m tests.support.patiently examples/with_accelerate.py --epochs 3
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.support.patient import all_patient

if __name__ == "__main__":
    all_patient()
    if "ACCELERATE_USE_FSDP" in os.environ:  # by `accelerate launch --use_fsdp`
        from tests.support.shard_on_cpu import shard_on_cpu

        shard_on_cpu()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
