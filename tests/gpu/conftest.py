"""Every test here needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.support.needs import lacking


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        lacking("cuda")
