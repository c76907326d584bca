"""A script that saves by torch.save, and knows nothing of the harness. `harness run --watch` makes it survive.

    harness run --watch out -- python examples/watch_torch_save.py --out out

It writes OUT/last.pt every 200 steps, and once more when it is asked to end by SIGTERM. It goes on from that file.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

BATCH, SAVE_EVERY = 64, 200


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: points, and how far each is from the origin."""
    x = torch.rand(BATCH, 2, generator=torch.Generator().manual_seed(step)) * 2 - 1
    return x, x.norm(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--curve", type=Path, help="gets a line `step loss` for each step")
    parser.add_argument("--final", type=Path, help="gets the weights")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "last.pt"

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = 0
    if path.exists():
        saved = torch.load(path)
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])

    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    while step < options.steps:
        x, y = batch_of(step)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if options.curve:
            with options.curve.open("a") as curve:
                print(step, loss.item().hex(), file=curve)
        if step % SAVE_EVERY == 0 or asked:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "random": torch.get_rng_state()}, path)
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
        if asked:
            return
    if options.final:
        safetensors.torch.save_file(model.state_dict(), options.final)


if __name__ == "__main__":
    main()
