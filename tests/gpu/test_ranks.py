"""Several ranks on one GPU, noticed and killed: bit-identical. Needs a GPU; says so when there is none.

gloo carries what the ranks exchange: NCCL refuses two ranks on one device.
"""

from __future__ import annotations

import pytest

from tests.ranks.test_bit_identity import FAST, check_identical, command
from tests.support.world import World

pytestmark = [pytest.mark.gpu, pytest.mark.long("several lives of ranks that import torch and start CUDA, 10 s each")]


@pytest.mark.parametrize("divide", ["ddp", "fsdp"])
def test_what_ended_early_goes_on_bit_identical(divide: str, worlds: tuple[World, World]) -> None:
    unbroken, other = worlds
    whole = unbroken.run_harness("--every-s", "1000", command=command(unbroken, divide, "--device", "cuda"))
    assert whole.wait() == 0, whole.stderr

    for at, code in [(["--at", "Published:1:kill-rank,Published:2:terminate"], 75), ([], 0)]:
        process = other.run_rigged(*FAST, *at, command=command(other, divide, "--device", "cuda"))
        assert process.wait() == code, process.stderr
        other.wait_gone()

    check_identical(other, unbroken, divide)
    other.check_commits()
