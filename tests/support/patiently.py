"""Runs a script of somebody else's with a training that is patient: see `patient.py`.

python -m tests.support.patiently examples/with_accelerate.py --epochs 3
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.support.patient import all_patient

if __name__ == "__main__":
    all_patient()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
