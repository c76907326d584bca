"""CUDA runtime: what torch does not offer of it, so that the harness never disturbs the training's own calls.

While the training records a CUDA graph in the default mode (`cudaStreamCaptureModeGlobal`), calls of any other thread
spoil the recording: registering memory, copying, waiting for an event. A thread in relaxed mode is exempt; its streams
are its own, so nothing that it does is recorded. And a call that fails leaves its error to the thread's next call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed


def is_recording() -> bool:
    """Whether the calling thread's current stream records a CUDA graph: then nothing may wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Put the calling thread into relaxed mode, and at the end back into its own. Does nothing without CUDA."""
    runtime = _runtime()
    if runtime is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # swaps the two
    try:
        yield
    finally:
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def forget_error() -> None:
    """Take back the error of the calling thread's last call. torch would raise it at its own next call."""
    if (runtime := _runtime()) is not None:
        runtime.cudaGetLastError()


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded; `None` if it has loaded none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.partition("/")[2]
            if "libcudart" in path:
                return ctypes.CDLL(f"/{path}")
    return None
