"""The main job with the harness that is installed in this environment: noticed, killed, resumed, and compared.

    python -P tests/versions/main_job.py

Needs nothing of the checkout: -P keeps it off the path. A script as in the README is trained unbroken, and then once
more, with a notice and a kill; its losses and its model have to be the same. Says where the harness came from.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

SCRIPT = """
import hashlib, os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from harness import Checkpointer

torch.manual_seed(0)
x = torch.randn(240, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)

ckpt = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
for epoch in ckpt.epochs(3):
    for i, (x, y) in ckpt.enumerate(loader):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = epoch * len(loader) + i + 1
        with open("curve", "a") as curve:
            print(step, loss.item().hex(), file=curve)
        if os.path.exists(f"end-at-{step}"):
            os.rename(f"end-at-{step}", f"ended-at-{step}")
            how = open(f"ended-at-{step}").read()
            os.kill(os.getppid(), signal.SIGTERM) if how == "notice" else os.killpg(0, signal.SIGKILL)
    scheduler.step()
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
open("model", "w").write(hashlib.sha256(weights).hexdigest())
"""


def train(folder: Path) -> int:
    """Start the run, or resume it. Returns how it ended."""
    command = [sys.executable, "-P", "-m", "harness", "run", "--store", "store", "--run", "a", "--every-steps", "4"]
    return subprocess.run([*command, "--", sys.executable, "train.py"], cwd=folder, start_new_session=True).returncode


def main() -> None:
    """Train three times, and compare."""
    print(f"the harness of {Path(harness.__file__).parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        unbroken, broken = Path(name, "unbroken"), Path(name, "broken")
        for folder in (unbroken, broken):
            folder.mkdir()
            (folder / "train.py").write_text(SCRIPT)
        (broken / "end-at-17").write_text("notice")
        (broken / "end-at-50").write_text("kill")
        os.environ["OMP_NUM_THREADS"] = "1"
        ends = [train(unbroken), train(broken), train(broken), train(broken)]
        lines = {folder: set((folder / "curve").read_text().splitlines()) for folder in (unbroken, broken)}
        same = (unbroken / "model").read_text() == (broken / "model").read_text()
    told = {
        "ended": ends == [0, 75, -signal.SIGKILL, 0],
        "losses": lines[unbroken] == lines[broken] and len(lines[unbroken]) == 90,
        "model": same,
    }
    print(json.dumps({"ends": ends, **told}))
    if not all(told.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
