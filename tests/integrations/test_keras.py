"""Keras on torch: a loop of one's own continues bit for bit; what keeps its optimizer to itself is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.installed import environment_of
from tests.support.world import World, steps_said

pytestmark = [pytest.mark.nightly, pytest.mark.long("several lives of a real training")]

PROGRAM = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import hashlib, sys
import keras, torch
from harness import Checkpointer

kind, curve, final = sys.argv[1:]
keras.utils.set_random_seed(0)
x = torch.randn(40, 8)
rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(rows, 4, shuffle=True)
layers = keras.layers
model = keras.Sequential(
    [keras.Input((8,)), layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(1)]
)
if kind == "compiled":
    model.compile("adam", "mse")
optimizer = keras.optimizers.Adam(1e-3) if kind == "keras" else torch.optim.AdamW(model.parameters(), 1e-3)
loss_of = keras.losses.MeanSquaredError()
ckpt = Checkpointer(model=model, optimizer=optimizer)
for epoch in ckpt.epochs(2):
    for inputs, labels in ckpt.batches(loader):
        loss = loss_of(labels, model(inputs, training=True))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        with open(curve, "a") as file:
            print(ckpt.step_count, float(loss).hex(), file=file)
weights = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
with open(final, "w") as file:
    file.write(hashlib.sha256(weights).hexdigest())
"""


@pytest.fixture
def python(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """The command of the program, which waits at each step for what is due."""
    program = world.root / "train.py"
    program.write_text(PROGRAM)
    path = environment_of("keras", tmp_path_factory)["PYTHONPATH"]
    return ["env", f"PYTHONPATH={path}", sys.executable, "-m", "tests.support.patiently", program]


def test_a_loop_of_one_s_own_continues_bit_for_bit(world: World, python: list[str | Path]) -> None:
    fast = ("--back-off-s", "0.05", "--every-steps", "4")
    process = world.run_rigged(
        *fast, "--at", "Published:2:terminate", command=[*python, "loop", world.curve, world.final]
    )
    assert process.wait() == 75, process.stderr
    host = world.elsewhere()
    process = host.run_rigged(
        *fast, "--at", "Published:1:kill-trainer", command=[*python, "loop", host.curve, host.final]
    )
    assert process.wait() == 0, process.stderr
    assert len(steps_said(process.stderr, "Restored")) == 2, process.stderr

    curve, final = world.root / "unbroken-curve", world.root / "unbroken-final"
    process = world.start(*python, "loop", curve, final, env={"HARNESS": "off"})
    assert process.wait() == 0, process.stderr
    trained = [line for each in (world, host) for line in each.curve.read_text().splitlines()]
    assert set(trained) == set(curve.read_text().splitlines())
    assert host.final.read_text() == final.read_text()


@pytest.mark.parametrize("kind", ["keras", "compiled"])
def test_an_optimizer_that_keras_keeps_is_refused_with_the_remedy(
    kind: str, world: World, python: list[str | Path]
) -> None:
    process = world.run_rigged(command=[*python, kind, world.curve, world.final])
    assert process.wait() != 0
    assert "use an optimizer of torch, or watch what BackupAndRestore writes" in process.stderr
    assert not world.curve.exists()
