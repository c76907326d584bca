"""The examples with several processes, as somebody would run them first: unbroken, and interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from tests.support.world import ROOT, World

pytestmark = pytest.mark.long("two trainings on several ranks")


@pytest.mark.parametrize(
    ("script", "options"),
    [pytest.param("ddp.py", ["2"], marks=pytest.mark.nightly), ("fsdp2.py", ["--steps", "30"])],
)
def test_an_example_that_is_interrupted_has_the_unbroken_one_s_curve(
    script: str, options: Sequence[str], world: World
) -> None:
    def start(name: str, *rigged: str) -> tuple[int, str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        world.run = name
        patiently = ["-m", "tests.support.patiently", ROOT / "examples" / script]
        command = [*torchrun, *patiently, *options, "--curve", world.root / name]
        process = world.run_rigged("--every-s", "1000", "--every-steps", "5", *rigged, command=command)
        return process.wait(), process.stderr

    assert start("unbroken")[0] == 0
    code, said = start("broken", "--at", "Published:2:terminate")
    assert code == 75, said
    code, said = start("broken")
    assert code == 0, said

    unbroken = (world.root / "unbroken").read_text().splitlines()
    broken = (world.root / "broken").read_text().splitlines()
    assert len(broken) >= len(unbroken) > 20
    assert set(broken) == set(unbroken)
