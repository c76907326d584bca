"""`harness rehearse`, and `harness run --from`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.world import ROOT, World

SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from harness import Checkpointer

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=4, shuffle=True)
ckpt = Checkpointer(model=model, optimizer=optimizer)
average = 1.0
for epoch in ckpt.epochs(3):
    for (x,) in ckpt.batches(loader):
        loss = model(x).square().mean()
        average = 0.9 * average + 0.1 * float(loss.detach())
        if "weighted" in sys.argv:
            loss = loss * average
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with ckpt.evaluating():
        pass
torch.save(model.state_dict(), sys.argv[1] + "/final.pt")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def rehearse(world: World, *command: str | Path) -> tuple[int, dict[str, object], str]:
    """Exit code, verdict and what was said."""
    process = world.start(*world.harness("rehearse", *world.named(), "--json", "--", *command))
    code = process.wait()
    return code, json.loads(process.stdout or "{}"), process.stderr


@pytest.mark.nightly
@pytest.mark.long("seven starts of a program that imports torch", minutes=1)
def test_a_script_that_resumes_exactly_is_said_to(world: World, script: Path) -> None:
    code, verdict, said = rehearse(world, "python", script, "{out}")

    assert code == 0, said
    assert verdict["identical"] is True
    assert len(verdict["interrupted_at"]) == 5  # type: ignore[arg-type]
    assert "bit-identical at step 15" in said

    run = world.run_harness(command=["python", script, str(world.store)])
    assert run.wait() == 0
    assert "rehearsed: identical at step 15" in run.stderr


@pytest.mark.long("seven starts of a program that imports torch", minutes=1)
def test_the_example_resumes_exactly_at_every_kind_of_place(world: World) -> None:
    small = ("--epochs", "3", "--steps-per-epoch", "4", "--width", "16", "--layers", "1")
    code, verdict, said = rehearse(world, "python", ROOT / "examples" / "gpt.py", *small)

    assert code == 0, said
    assert verdict["identical"] is True
    assert len(verdict["interrupted_at"]) == 5  # type: ignore[arg-type]
    assert verdict["not_reached"] == []


@pytest.mark.long("seven starts of two ranks that import torch", minutes=1)
def test_several_ranks_are_compared_at_every_step(world: World) -> None:
    ranks = [*world.torchrun(2), "tests.support.rank_trainer", "--curve", "{out}/curve", "--final", "{out}/final"]
    code, verdict, said = rehearse(world, *ranks)

    assert code == 0, said
    assert verdict["identical"] is True
    assert "bit-identical at step 36" in said


@pytest.mark.long("eight starts of a program that imports torch", minutes=1)
def test_a_local_variable_is_found(world: World, script: Path) -> None:
    code, verdict, said = rehearse(world, "python", script, "{out}", "weighted")

    assert code == 70, said
    assert verdict["identical"] is False
    assert verdict["differs_from_itself"] is None
    assert "DIFFERENT" in said
    assert "  average (train.py): " in said
    assert [each["name"] for each in verdict["variables"]].count("average (train.py)") == 1  # type: ignore[attr-defined]
    assert "a value in a local variable" in said


@pytest.mark.sample
def test_a_program_without_a_checkpointer_is_told_so(world: World) -> None:
    code, _, said = rehearse(world, "python", "-c", "print('hello')")

    assert code == 64
    assert "made no Checkpointer" in said
    assert "hello" in said


@pytest.mark.sample
def test_a_run_goes_back_and_never_prefers_what_it_has_left(world: World) -> None:
    command = world.tiny("--every-steps", "4", steps=12)
    assert world.run_harness("--keep-last", "9", command=command).wait() == 0
    before = world.survey().commits

    back = world.run_harness("--from", str(before[0].step), command=[*command, "--raise-at", "5"])
    assert back.wait() == 1
    assert f"goes back to snapshot {before[0]}" in back.stderr
    assert world.survey().quarantined == frozenset(before[1:])

    world.curve.unlink()
    again = world.run_harness(command=command)
    assert again.wait() == 0, again.stderr
    assert world.steps_of_curve()[0] == before[0].step + 1, "and not after the newest that was left"
    assert all(world.manifest(snapshot).exists() for snapshot in before)


@pytest.mark.sample
def test_a_snapshot_that_does_not_exist_changes_nothing(world: World) -> None:
    command = world.tiny("--every-steps", "4", steps=12)
    assert world.run_harness("--keep-last", "9", command=command).wait() == 0

    refused = world.run_harness("--from", "99", command=command)

    assert refused.wait() == 64
    assert "no snapshot 99" in refused.stderr
    assert not world.survey().quarantined
    assert world.survey().finished_at == 12, "and it is still over"


@pytest.mark.sample
def test_a_run_that_died_while_it_went_back_does_so_at_its_next_start(world: World) -> None:
    """Elsewhere the same command runs without --from, and would have preferred the newest of the bad stretch."""
    command = world.tiny("--every-steps", "4", steps=12)
    assert world.run_harness("--keep-last", "9", command=command).wait() == 0
    first, *newer = world.survey().commits
    assert world.run_harness("--from", str(first), command=[*command, "--raise-at", "5"]).wait() == 1
    for left in newer[1:]:
        (world.store / world.run / "quarantine" / f"{left}.json").unlink()  # it had not come so far

    world.curve.unlink()
    again = world.run_harness(command=command)
    assert again.wait() == 0, again.stderr
    assert world.steps_of_curve()[0] == first.step + 1
    assert world.survey().quarantined == frozenset(newer)
