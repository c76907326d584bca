"""Several trainings in one process, one after the other, without `harness run`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.world import World

pytestmark = pytest.mark.long("two starts of a program that imports torch, and four agents")

SCRIPT = """
import os, signal, sys, time, torch
import harness
from torch import nn

for rate in (0.1, 0.2, 0.3):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    try:
        ckpt = harness.Checkpointer(run=f"rate-{rate}", model=model, optimizer=optimizer)
    except harness.RunFinished as why:
        print(f"{rate} is over: {why}")
        continue
    resumed = ckpt.resumed_from and ckpt.resumed_from.step
    for step in ckpt.steps(4):
        if (rate, step) == (0.2, 2) and "leave" in sys.argv:
            os.kill(os.getpid(), signal.SIGTERM)
            while not ckpt._training.page.command.leaves:
                time.sleep(0.01)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if (rate, step) == (0.3, 1):
            ckpt.save()
            break
    print(f"{rate} from {resumed} to {ckpt.step_count}")
"""


def test_after_an_interruption_a_sweep_skips_what_is_over_and_resumes_the_rest(world: World, tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(SCRIPT)
    settings = {"HARNESS_STORE": str(world.store), "HARNESS_METADATA": "off"}

    first = world.start(sys.executable, script, "leave", env=settings)
    assert first.wait() == 75, first.stderr
    assert first.stdout.decode().splitlines() == ["0.1 from None to 4"]
    again = world.start(sys.executable, script, env=settings)
    assert again.wait() == 0, again.stderr
    skipped, *rest = again.stdout.decode().splitlines()
    assert skipped.startswith("0.1 is over: run 'rate-0.1' finished at step 4: --fresh")
    assert rest == ["0.2 from 3 to 4", "0.3 from None to 2"]

    once_more = world.start(sys.executable, script, env=settings)
    assert once_more.wait() == 0, once_more.stderr
    assert [line.split(":")[0] for line in once_more.stdout.decode().splitlines()] == [
        "0.1 is over",
        "0.2 is over",
        "0.3 is over",
    ]
    assert "run 'rate-0.3' was stopped early by its own program" in once_more.stdout.decode()
