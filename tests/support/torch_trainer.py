"""A small real training on harness.Checkpointer: all that has to be exact after a resume, in a second on one core.

An MLP with dropout, AdamW, a cosine schedule, gradient accumulation, a shuffled DataLoader whose workers augment at
random, and a validation phase. It writes `step loss` in full precision for each step to --curve, and the final tensors
to --final.

    python -m tests.support.torch_trainer --curve curve.txt --final final.txt [--workers 0 | 2 | persistent]

    --workers spawn | forkserver        2 of them that are not forked, as everywhere else from Python 3.14 on
    --optimizer sgd                     with momentum, instead of AdamW
    --overlap                           copy during the next step what is large enough for it, as with --hidden 1024
    --hold-at STEP --hold-until FILE    stay after that step, listening, until FILE exists
    --phase-at EPOCH --hold-until FILE  a long phase after that epoch, with nothing but safe points, until FILE exists
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness import Checkpointer
from harness.trainer.validation import Validations
from tests.support import delays
from tests.support.noisy import Noisy
from tests.support.patient import patient

EPOCHS = 3
ITEMS, BATCH, ACCUMULATE, WIDTH = 48, 4, 2, 16
WORKERS = ("0", "2", "persistent", "spawn", "forkserver")
STEPS = EPOCHS * ITEMS // BATCH // ACCUMULATE


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--final", type=Path, required=True)
    parser.add_argument("--workers", choices=WORKERS, default="0")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--only-the-end", action="store_true", help="no validation begins with a snapshot")
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--phase-at", type=int)
    parser.add_argument("--hold-until", type=Path)
    return parser.parse_args()


def loader(workers: str) -> DataLoader[tuple[Tensor, Tensor]]:
    """The shuffled training data."""
    return DataLoader(
        Noisy(ITEMS, WIDTH),
        batch_size=BATCH,
        shuffle=True,
        num_workers=0 if workers == "0" else 2,
        persistent_workers=workers == "persistent",
    )


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """All that was trained, by name."""
    yield from model.state_dict().items()
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in sorted(state.items()):
            yield f"{index}.{name}", value


def main() -> None:
    """Train; leave as the Checkpointer says."""
    told = options()
    delays.install(delays.TRAINER)
    torch.set_num_threads(1)
    multiprocessing.set_start_method(told.workers if told.workers in ("spawn", "forkserver") else "fork")
    torch.manual_seed(1)
    random.seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, told.hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(told.hidden, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if told.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data, validation = loader(told.workers), DataLoader(Noisy(ITEMS, WIDTH), batch_size=BATCH)
    ckpt = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, overlap=told.overlap or None)
    patient(ckpt, hold_at=told.hold_at, hold_until=told.hold_until)
    with told.curve.open("a") as curve:
        if told.only_the_end:
            Validations.begins_with_one = lambda *_, **__: False  # type: ignore[method-assign]
        for epoch in ckpt.epochs(EPOCHS):
            model.train()
            micro, total = 0, 0.0
            for x, y in ckpt.batches(data):
                loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
                loss.backward()
                micro, total = micro + 1, total + loss.item()
                if micro % ACCUMULATE == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    step = ckpt.step_count + 1
                    curve.write(f"{step} {total.hex()}\n")
                    curve.flush()
                    total = 0.0
            with ckpt.evaluating(), torch.no_grad():
                model.eval()
                for x, y in validation:
                    nn.functional.mse_loss(model(x), y)
            while epoch == told.phase_at and not told.hold_until.exists():
                ckpt.safe_point()
                threading.Event().wait(0.01)
    told.final.write_text("".join(f"{name} {value.tolist()}\n" for name, value in tensors(model, optimizer)))


if __name__ == "__main__":
    sys.exit(main())
