"""The facts on which bit-identity depends are the same at each start of a program."""

from __future__ import annotations

import subprocess
import sys

# As a DataLoader with pin_memory does (with 1), in a training on a GPU, whose main thread hardly computes on the CPU.
PROGRAM = """
import threading
from harness.trainer.state.environment import environment
from harness.trainer.training import Training

Training({}, accumulate=1, on_interrupt="exit", seed_workers=True, inert=False)
import torch
other = threading.Thread(target=torch.set_num_threads, args=(7,))
other.start()
other.join()
print(environment()["threads"])
"""


def test_a_thread_of_a_loader_does_not_change_the_number_of_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.strip() not in ("", "7")
