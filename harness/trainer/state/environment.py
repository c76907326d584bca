"""Environment: the facts, besides the program, on which bit-identity depends."""

from __future__ import annotations

import contextlib
import platform
import sys
from pathlib import Path

import torch

from harness.trainer.state.rng import devices_in_use


def environment() -> dict[str, str]:
    """Return the facts, besides the program, on which bit-identity depends.

    They are recorded with a snapshot. On a resume, the trainer tells the user each one that differs.
    """
    numpy = sys.modules.get("numpy")
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__ if numpy is not None else "not imported",
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "interop_threads": str(torch.get_num_interop_threads()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    for device, module in devices_in_use():
        count = module.device_count()
        # MPS names no devices: there is one, and it is the machine's.
        names = [module.get_device_name(index) if device != "mps" else "mps" for index in range(count)]
        facts[device] = ", ".join(names)
    if torch.cuda.is_available():
        facts["cuda_version"] = str(torch.version.cuda)
        facts["hip_version"] = str(torch.version.hip)
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["cudnn_deterministic"] = str(torch.backends.cudnn.deterministic)
        facts["cudnn_benchmark"] = str(torch.backends.cudnn.benchmark)
    return facts


def settle_threads() -> None:
    """Make torch choose the number of threads for the calling thread now. Call it where the training begins.

    torch chooses when a thread first computes on the CPU, and takes what any thread has set last. A DataLoader with
    `pin_memory` sets 1, in a thread of its own: in a training on a GPU, where the main thread hardly computes, the
    number, and with it the order of sums, would be 1 or that of the cores by chance.
    """
    torch.get_num_threads()


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
