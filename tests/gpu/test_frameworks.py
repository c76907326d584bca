"""Frameworks on a CUDA device, in half precision, noticed and killed: bit-identical. Needs a GPU; else it says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.framework_lives import check_same, live
from tests.support.world import ROOT, World

pytestmark = [pytest.mark.gpu, pytest.mark.long("several lives of a training that imports a framework and starts CUDA")]

LIVES = [("Published:2:terminate", 75), ("Published:1:kill-trainer,Published:3:terminate", 75), ("", 0)]
ACCELERATE = ["tests.support.patiently", ROOT / "examples" / "with_accelerate.py", "--mixed-precision", "fp16"]
TRANSFORMERS = ["tests.support.hf_trainer", "--device", "cuda", "--mode"]
LIGHTNING = ["tests.support.lightning_trainer", "--device", "cuda", "--mode"]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(ACCELERATE, id="accelerate"),
        *[pytest.param([*TRANSFORMERS, mode], id=f"transformers-{mode}") for mode in ("plain", "evaluate", "workers")],
        *[pytest.param([*LIGHTNING, mode], id=f"lightning-{mode}") for mode in ("validate", "manual", "workers")],
    ],
)
def test_what_ended_early_goes_on_bit_identical(
    program: list[str | Path], worlds: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    unbroken, other = worlds

    def command(world: World) -> list[str | Path]:
        return [sys.executable, "-m", *program, "--curve", world.curve, "--final", world.final]

    whole = unbroken.run_harness("--every-s", "1000", command=command(unbroken))
    assert whole.wait() == 0, whole.stderr
    live(other, command(other), LIVES)
    check_same(other, unbroken)
