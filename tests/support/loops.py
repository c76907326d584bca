"""One small training in every style of loop that the public API knows; the styles must survive a kill alike.

    python -m tests.support.loops STYLE --curve FILE [--final FILE]
    python -m tests.support.loops --all DIRECTORY      every style, each into DIRECTORY/STYLE.curve and .final

Each optimizer step appends `step loss` to the curve, so a lost, repeated or different step shows.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness import Checkpointer
from tests.support import delays
from tests.support.patient import patient

EPOCHS, BATCHES = 3, 6


def happens(what: str) -> None:
    """An event of a training, named by `what`, is about to be: tests put something else here."""


class Job:
    """Model, optimizer, data, and a step that draws dropout from the global RNG."""

    def __init__(self, curve: Path) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.BatchNorm1d(64), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.loader = DataLoader(TensorDataset(torch.randn(BATCHES * 4, 16)), batch_size=4, shuffle=True)
        self.curve = curve.open("a", buffering=1)
        self.ckpt: Checkpointer | None = None
        self.states = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def checkpointer(self, **options: Any) -> Checkpointer:
        """The Checkpointer of this training."""
        self.ckpt = patient(Checkpointer(**options))
        return self.ckpt

    def step(self, x: torch.Tensor, *, update: bool = True) -> float:
        """One batch; with `update` an optimizer step at its end."""
        happens("step")
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def note(self, label: object, loss: float) -> None:
        """A line of the curve; none while a step runs again whose result is dropped."""
        if self.ckpt is not None and self.ckpt.replaying:
            return
        self.curve.write(f"{label} {loss.hex()}\n")

    def evaluate(self) -> float:
        """A validation phase that draws from the global RNG, as a shuffled loader would."""
        happens("validation")
        self.model.eval()
        with torch.no_grad():
            loss = float(self.model(torch.randn(8, 16)).mean())
        self.model.train()
        return loss

    def validate(self, ckpt: Checkpointer, name: str) -> None:
        """One such phase, as the harness is told of it."""
        with ckpt.evaluating():
            self.note(f"validation-{name}", self.evaluate())


def epochs(job: Job) -> None:
    """The loop of the README: epochs, batches, a scheduler, a validation phase."""
    ckpt = job.checkpointer(**job.states)
    for epoch in ckpt.epochs(EPOCHS):
        for index, (x,) in enumerate(ckpt.batches(job.loader)):
            del index
            loss = job.step(x)
            job.note(ckpt.step_count + 1, loss)
        job.scheduler.step()
        job.validate(ckpt, f"{epoch}")


def steps(job: Job) -> None:
    """Data drawn from RNG."""
    ckpt = job.checkpointer(**job.states)
    for step in ckpt.steps(EPOCHS * BATCHES):
        job.note(step + 1, job.step(torch.randn(4, 16)))


def by_hand(job: Job) -> None:
    """resume() and step()."""
    ckpt = job.checkpointer(**job.states)
    for step in range(ckpt.resume(), EPOCHS * BATCHES):
        job.note(step + 1, job.step(torch.randn(4, 16)))
        ckpt.step()


def plain_loader(job: Job) -> None:
    """An ordinary loop over an instrumented loader."""
    ckpt = job.checkpointer(loader=job.loader, **job.states)
    for _epoch in range(EPOCHS):
        for (x,) in job.loader:
            job.note(ckpt.step_count + 1, job.step(x))
            ckpt.step()
        job.scheduler.step()


def loader_in_epochs(job: Job) -> None:
    """The same inside ckpt.epochs."""
    ckpt = job.checkpointer(loader=job.loader, **job.states)
    for _epoch in ckpt.epochs(EPOCHS):
        for (x,) in job.loader:
            job.note(ckpt.step_count + 1, job.step(x))
            ckpt.step()
        job.scheduler.step()


def batches_alone(job: Job) -> None:
    """batches() in a plain loop over epochs: the end is the end of the process."""
    ckpt = job.checkpointer(**job.states)
    for _epoch in range(EPOCHS):
        for (x,) in ckpt.batches(job.loader):
            job.note(ckpt.step_count + 1, job.step(x))
        job.scheduler.step()


def two_phases(job: Job) -> None:
    """Pre-training, then fine-tuning with another loader."""
    ckpt = job.checkpointer(**job.states)
    for _epoch in ckpt.epochs(2):
        for (x,) in ckpt.batches(job.loader):
            job.note(ckpt.step_count + 1, job.step(x))
    other = DataLoader(TensorDataset(torch.ones(BATCHES * 4, 16)), batch_size=4, shuffle=True)
    for _epoch in ckpt.epochs(1):
        for (x,) in ckpt.batches(other):
            job.note(ckpt.step_count + 1, job.step(x))


def two_loops(job: Job) -> None:
    """Two loops in an epoch."""
    ckpt = job.checkpointer(**job.states)
    other = DataLoader(TensorDataset(torch.ones(8, 16)), batch_size=4)
    for _epoch in ckpt.epochs(EPOCHS):
        for loader in (job.loader, other):
            for (x,) in ckpt.batches(loader):
                job.note(ckpt.step_count + 1, job.step(x))


def accumulated(job: Job) -> None:
    """Two batches a step, said by accumulate=, with an optimizer step that is sometimes skipped."""
    ckpt = job.checkpointer(accumulate=2, **job.states)
    for _epoch in ckpt.epochs(EPOCHS):
        for micro, (x,) in enumerate(ckpt.batches(job.loader)):
            last = micro % 2 == 1
            loss = job.step(x, update=last and ckpt.step_count % 3 != 2)
            if last:
                job.optimizer.zero_grad()
                job.note(ckpt.step_count + 1, loss)


def extra(job: Job) -> None:
    """Plain values in ckpt.extra, and a list of it that the program holds."""
    ckpt = job.checkpointer(**job.states)
    best = ckpt.extra.setdefault("best", float("inf"))
    losses = ckpt.extra.setdefault("losses", [])
    assert best == float("inf") or ckpt.resumed_from is not None
    for step in ckpt.steps(EPOCHS * BATCHES):
        losses.append(job.step(torch.randn(4, 16)))
        ckpt.extra["best"] = min(ckpt.extra["best"], losses[-1])
        job.note(step + 1, ckpt.extra["best"] + sum(ckpt.extra["losses"]))


def counted_in_extra(job: Job) -> None:
    """Counters in ckpt.extra, of starts, epochs, and what happens in a step before a validation."""
    ckpt = job.checkpointer(**job.states)
    ckpt.extra["starts"] = ckpt.extra.get("starts", 0) + 1
    ckpt.extra.setdefault("epochs", 0)
    losses = ckpt.extra.setdefault("losses", [])
    for _epoch in ckpt.epochs(EPOCHS):
        ckpt.extra["epochs"] += 1
        for number, (x,) in ckpt.enumerate(job.loader):
            losses.append(job.step(x))
            if number % 2 == 1:
                job.validate(ckpt, f"{ckpt.epoch}.{number}")  # known before the place is reached
            job.note(f"{ckpt.extra['epochs']}.{len(losses)}", sum(losses))


def growing(job: Job) -> None:
    """A layer is added in the middle; a program that starts again after that adds it before its loop."""

    def grow() -> None:
        layer = nn.Linear(1, 1)
        job.model.append(layer)
        job.optimizer.add_param_group({"params": list(layer.parameters())})

    del job.states["scheduler"]
    ckpt = job.checkpointer(**job.states)
    if ckpt.extra.setdefault("grown", False):
        grow()
    for step in ckpt.steps(EPOCHS * BATCHES):
        if step == 4:
            grow()
            ckpt.extra["grown"] = True
        job.note(step + 1, job.step(torch.randn(4, 16)))


def reshaping(job: Job) -> None:
    """A buffer changes its shape in the middle; a program that starts again after that makes it of that shape."""
    job.model.register_buffer("history", torch.zeros(3))
    ckpt = job.checkpointer(**job.states)
    job.model.history = torch.zeros(ckpt.extra.setdefault("length", 3))
    for step in ckpt.steps(EPOCHS * BATCHES):
        if step == 4:
            job.model.history = torch.cat([job.model.history, torch.arange(50.0)])
            ckpt.extra["length"] = len(job.model.history)
        loss = job.step(torch.randn(4, 16))
        job.model.history[step % 3] += loss
        job.note(step + 1, loss + float(job.model.history.sum()))


def validated_inside(job: Job) -> None:
    """A validation every two batches, and one at the end of the epoch; a snapshot is wanted just before each."""
    ckpt = job.checkpointer(**job.states)
    for epoch in ckpt.epochs(EPOCHS):
        for (x,) in ckpt.batches(job.loader):
            job.note(ckpt.step_count + 1, job.step(x))
            if ckpt.step_count % 2 == 1:
                ckpt.save()
                job.validate(ckpt, f"in-{ckpt.step_count}")
        ckpt.save()
        job.validate(ckpt, f"end-{epoch}")


def saved_at_validations(job: Job) -> None:
    """The same; snapshots are taken on the way into those at the end of an epoch, and nowhere else."""
    ckpt = job.checkpointer(**job.states)
    for epoch in ckpt.epochs(EPOCHS):
        for (x,) in ckpt.batches(job.loader):
            job.note(ckpt.step_count + 1, job.step(x))
            if ckpt.step_count % 2 == 1:
                job.validate(ckpt, f"in-{ckpt.step_count}")
        for name in ("one", "two"):
            ckpt.save(wait=True)
            job.validate(ckpt, f"{name}-{epoch}")
            job.step(torch.randn(4, 16))


def steps_validated_inside(job: Job) -> None:
    """The same in a loop of ckpt.steps."""
    ckpt = job.checkpointer(**job.states)
    for step in ckpt.steps(EPOCHS * BATCHES):
        job.note(step + 1, job.step(torch.randn(4, 16)))
        if step % 2 == 1:
            ckpt.save()
            job.validate(ckpt, f"{step}")


def by_hand_validated_inside(job: Job) -> None:
    """The same in a loop by hand."""
    ckpt = job.checkpointer(**job.states)
    for step in range(ckpt.resume(), EPOCHS * BATCHES):
        job.note(step + 1, job.step(torch.randn(4, 16)))
        if step % 2 == 1:
            ckpt.save()
            job.validate(ckpt, f"{step}")
        ckpt.step()


def plain_loader_validated_inside(job: Job) -> None:
    """The same in an ordinary loop over an instrumented loader, and one at the end of the epoch."""
    ckpt = job.checkpointer(loader=job.loader, **job.states)
    for epoch in range(EPOCHS):
        for (x,) in job.loader:
            job.note(ckpt.step_count + 1, job.step(x))
            if ckpt.step_count % 2 == 1:
                ckpt.save()
                job.validate(ckpt, f"in-{ckpt.step_count}")
            ckpt.step()
        ckpt.save()
        job.validate(ckpt, f"end-{epoch}")


def numbered(job: Job) -> None:
    """Batches with their numbers, on which something depends; the epochs' numbers begin at 1."""
    ckpt = job.checkpointer(**job.states)
    for epoch in ckpt.epochs(1, EPOCHS + 1):
        for number, (x,) in ckpt.enumerate(job.loader):
            job.note(f"{epoch}.{number}", job.step(x, update=(number + 1) % 2 == 0))
            assert (ckpt.epoch, ckpt.batch) == (epoch, number)
        assert ckpt.batch is None


def endless(job: Job) -> None:
    """As many steps as it takes."""
    ckpt = job.checkpointer(**job.states)
    for step in ckpt.steps():
        job.note(step + 1, job.step(torch.randn(4, 16)))
        if step == 9:
            break


def shuffled_by_hand(job: Job) -> None:
    """The order of an epoch is drawn before its loop, as is what all epochs use."""
    ckpt = job.checkpointer(**job.states)
    (data,) = job.loader.dataset.tensors  # type: ignore[attr-defined]
    noise = torch.randn(1, 16)
    for _epoch in ckpt.epochs(EPOCHS):
        order = torch.randperm(len(data))
        for step in ckpt.steps(BATCHES):
            job.note(ckpt.step_count + 1, job.step(data[order[step * 4 : step * 4 + 4]] + noise))
        scale = torch.rand(())
        for (x,) in ckpt.batches(job.loader):
            job.note(ckpt.step_count + 1, job.step(x * scale))


def critics(job: Job) -> None:
    """Three steps for each batch, with what was drawn before them, and one after them."""
    ckpt = job.checkpointer(**job.states)
    for _epoch in ckpt.epochs(2):
        for (x,) in ckpt.batches(job.loader):
            noise = torch.randn(4, 16)
            for _ in ckpt.steps(3):
                job.note(ckpt.step_count + 1, job.step(x + noise * torch.rand(())))
            job.note(f"{ckpt.step_count} outer", job.step(x))


def steps_in_steps(job: Job) -> None:
    """Loops in a loop without epochs, the second with what was drawn after the first."""
    ckpt = job.checkpointer(**job.states)
    for outer in ckpt.steps(3):
        for inner in ckpt.steps(2):
            job.note(f"{outer}.{inner} first", job.step(torch.randn(4, 16)))
        noise = torch.randn(4, 16)
        for inner in ckpt.steps(2):
            job.note(f"{outer}.{inner} second", job.step(noise + torch.randn(4, 16)))


def batches_in_batches(job: Job) -> None:
    """Another loader's epoch for each batch, with a validation after it."""
    ckpt = job.checkpointer(**job.states)
    other = DataLoader(TensorDataset(torch.ones(8, 16)), batch_size=4, shuffle=True)
    for _epoch in ckpt.epochs(2):
        for (x,) in ckpt.batches(job.loader):
            for (y,) in ckpt.batches(other):
                job.note(ckpt.step_count + 1, job.step(x + y))
            job.validate(ckpt, f"{ckpt.step_count}")
            job.note(f"{ckpt.step_count} outer", job.step(x))


def three_deep(job: Job) -> None:
    """Steps in batches in steps."""
    ckpt = job.checkpointer(**job.states)
    for outer in ckpt.steps(2):
        for number, (x,) in ckpt.enumerate(job.loader):
            noise = torch.randn(4, 16)
            for inner in ckpt.steps(2):
                job.note(f"{outer}.{number}.{inner}", job.step(x + noise))


def inner_by_hand(job: Job) -> None:
    """Steps of the Checkpointer in a loop by hand."""
    ckpt = job.checkpointer(**job.states)
    done = ckpt.resume()
    while done < 20:
        noise = torch.randn(4, 16)
        for _ in ckpt.steps(2):
            job.note(ckpt.step_count + 1, job.step(noise))
        job.note(ckpt.step_count + 1, job.step(torch.randn(4, 16)))
        ckpt.step()
        done = ckpt.step_count


def given_loader_in_steps(job: Job) -> None:
    """next() on the loader that the Checkpointer has, whose iterator is made before the loop."""
    ckpt = job.checkpointer(loader=job.loader, **job.states)
    batches = iter(job.loader)
    for step in ckpt.steps(EPOCHS * BATCHES):
        try:
            (x,) = next(batches)
        except StopIteration:
            batches = iter(job.loader)
            (x,) = next(batches)
        job.note(step + 1, job.step(x))


def given_loader_begun_inside(job: Job) -> None:
    """The same, and the first iterator is made in the loop."""
    ckpt = job.checkpointer(loader=job.loader, **job.states)
    batches = None
    for step in ckpt.steps(EPOCHS * BATCHES):
        batches = batches or iter(job.loader)
        x = next(batches, None)
        if x is None:
            batches = iter(job.loader)
            x = next(batches)
        job.note(step + 1, job.step(x[0]))


def given_loader_by_hand(job: Job) -> None:
    """The same in a loop by hand."""
    ckpt = job.checkpointer(loader=job.loader, **job.states)
    done, batches = ckpt.resume(), iter(job.loader)
    while done < EPOCHS * BATCHES:
        try:
            (x,) = next(batches)
        except StopIteration:
            batches = iter(job.loader)
            (x,) = next(batches)
        job.note(done + 1, job.step(x))
        ckpt.step()
        done = ckpt.step_count


def validated_first(job: Job) -> None:
    """A validation every third batch, before the step: with what the batch has drawn."""
    ckpt = job.checkpointer(**job.states)
    for _epoch in ckpt.epochs(EPOCHS):
        for number, (x,) in ckpt.enumerate(job.loader):
            noise = torch.randn(4, 16)
            if number % 3 == 0:
                job.validate(ckpt, f"{ckpt.step_count}")
            job.note(ckpt.step_count + 1, job.step(x + noise))


def unfreezing(job: Job) -> None:
    """The first layer is trained from the second epoch on, by a group of the optimizer that is added then."""
    first = job.model[0]
    first.requires_grad_(False)
    job.optimizer = torch.optim.AdamW(job.model[2:].parameters(), lr=1e-2)
    ckpt = job.checkpointer(model=job.model, optimizer=job.optimizer)
    for epoch in ckpt.epochs(EPOCHS):
        if epoch == 1:
            first.requires_grad_(True)
            job.optimizer.add_param_group({"params": list(first.parameters()), "lr": 1e-3})
        for (x,) in ckpt.batches(job.loader):
            job.note(ckpt.step_count + 1, job.step(x))
        job.note(f"trained-{epoch}", float(first.weight.requires_grad))


def gan(job: Job) -> None:
    """Two optimizers; the second one steps every third batch, on what it has accumulated until then."""
    made = nn.Linear(16, 16)
    maker = torch.optim.SGD(made.parameters(), lr=0.05)
    ckpt = job.checkpointer(made=made, maker=maker, **job.states)
    for _epoch in ckpt.epochs(EPOCHS):
        for number, (x,) in ckpt.enumerate(job.loader):
            job.optimizer.zero_grad()
            real = (job.model(x) - 1).square().mean()
            real.backward()
            job.optimizer.step()
            job.model.requires_grad_(False)
            fooled = job.model(made(x)).square().mean()
            fooled.backward()
            if number % 3 == 2:
                maker.step()
                maker.zero_grad()
            job.model.requires_grad_(True)
            job.note(ckpt.step_count + 1, float((real + fooled).detach()) + float(made.weight.detach().sum()))


def momentum_of_gradients(job: Job) -> None:
    """Gradients are never set to zero, but halved: what is left of them is part of the next step."""
    ckpt = job.checkpointer(**job.states)
    for step in ckpt.steps(EPOCHS * BATCHES):
        job.note(step + 1, job.step(torch.randn(4, 16), update=False))
        job.optimizer.step()
        for param in job.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)


def kept_gradients(job: Job) -> None:
    """Gradients are never set to zero: they add up to a momentum without decay."""
    for group in job.optimizer.param_groups:
        group["lr"] = 1e-4
    ckpt = job.checkpointer(model=job.model, optimizer=job.optimizer)
    for step in ckpt.steps(EPOCHS * BATCHES):
        job.note(step + 1, job.step(torch.randn(4, 16), update=False))
        job.optimizer.step()


def zeroed_in_place(job: Job) -> None:
    """A layer that is used every third step only; its gradients are zero meanwhile, and its weights decay."""
    rare = nn.Linear(16, 16)
    job.optimizer.add_param_group({"params": list(rare.parameters())})
    del job.states["scheduler"]
    ckpt = job.checkpointer(rare=rare, **job.states)
    for step in ckpt.steps(EPOCHS * BATCHES):
        x = torch.randn(4, 16)
        job.optimizer.zero_grad(set_to_none=False)
        loss = job.step(rare(x) if step % 3 == 0 else x, update=False)
        job.optimizer.step()
        job.note(step + 1, loss + float(rare.weight.detach().sum()))


def accumulated_and_validated(job: Job) -> None:
    """Three batches a step, with a validation between two of them."""
    ckpt = job.checkpointer(**job.states)
    for _epoch in ckpt.epochs(EPOCHS):
        for number, (x,) in ckpt.enumerate(job.loader):
            loss = job.step(x, update=number % 3 == 2)
            job.note(f"{ckpt.epoch}.{number}", loss)
            if number % 3 == 1:
                job.validate(ckpt, f"{ckpt.epoch}.{number}")


def lbfgs(job: Job) -> None:
    """An optimizer that calls the model several times a step, and whose state grows."""
    layer = nn.Linear(16, 1)
    job.model = nn.Sequential(layer)
    optimizer = torch.optim.LBFGS(job.model.parameters(), lr=0.1, max_iter=3, history_size=4)
    ckpt = job.checkpointer(model=job.model, optimizer=optimizer)
    for step in ckpt.steps(EPOCHS * BATCHES):
        happens("step")
        x = torch.randn(4, 16)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (job.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        job.note(step + 1, float(optimizer.step(closure).detach()))


def growing_history(job: Job) -> None:
    """A tensor in ckpt.extra that grows at every step."""
    ckpt = job.checkpointer(**job.states)
    ckpt.extra.setdefault("losses", torch.zeros(0))
    for step in ckpt.steps(EPOCHS * BATCHES):
        loss = job.step(torch.randn(4, 16))
        ckpt.extra["losses"] = torch.cat([ckpt.extra["losses"], torch.tensor([loss] * 500)])
        job.note(step + 1, float(ckpt.extra["losses"].sum()))


def averaged(job: Job) -> None:
    """A running average in a buffer that is not persistent, and one in a tensor of ckpt.extra that the script holds."""
    job.model.register_buffer("average", torch.zeros(64, 16), persistent=False)
    ckpt = job.checkpointer(**job.states)
    mean = ckpt.extra.setdefault("mean", torch.zeros(16))
    for step in ckpt.steps(EPOCHS * BATCHES):
        loss = job.step(torch.randn(4, 16))
        weight = job.model[0].weight.detach()
        job.model.average = job.model.average * 0.9 + weight * 0.1
        mean.lerp_(weight.mean(0), 0.1)
        job.note(step + 1, loss + float(job.model.average.sum()) + float(mean.sum()))


Style = Callable[[Job], None]

STYLES: dict[str, Style] = {
    style.__name__: style
    for style in (
        epochs,
        steps,
        by_hand,
        plain_loader,
        loader_in_epochs,
        batches_alone,
        two_phases,
        two_loops,
        accumulated,
        extra,
        growing,
        reshaping,
    )
}
VALIDATED: dict[str, Style] = {
    style.__name__: style
    for style in (
        validated_inside,
        saved_at_validations,
        steps_validated_inside,
        by_hand_validated_inside,
        plain_loader_validated_inside,
    )
}
"""Those with a validation inside a loop."""
INSIDE: dict[str, Style] = {
    style.__name__: style
    for style in (
        numbered,
        endless,
        shuffled_by_hand,
        critics,
        steps_in_steps,
        batches_in_batches,
        three_deep,
        inner_by_hand,
        given_loader_in_steps,
        given_loader_begun_inside,
        given_loader_by_hand,
        validated_first,
        counted_in_extra,
    )
}
"""Those with loops in loops, and with something that is drawn around them."""
BESIDE: dict[str, Style] = {
    style.__name__: style
    for style in (
        unfreezing,
        gan,
        momentum_of_gradients,
        kept_gradients,
        zeroed_in_place,
        accumulated_and_validated,
        lbfgs,
        growing_history,
        averaged,
    )
}
"""Those with state that is in no state_dict."""


def digest(module: nn.Module) -> str:
    """Of every weight and buffer."""
    whole = hashlib.blake2b(digest_size=16)
    for tensor in _tensors(module):
        whole.update(tensor.detach().numpy().tobytes())
    return whole.hexdigest()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.state_dict().values()


def train(style: str, curve: Path, final: Path | None) -> None:
    """Train in one style."""
    job = Job(curve)
    (STYLES | VALIDATED | INSIDE | BESIDE)[style](job)
    if final:
        final.write_text(digest(job.model))


def main() -> None:
    """Train in one style, or in all, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("style", choices=[*STYLES, *VALIDATED, *INSIDE, *BESIDE], nargs="?")
    parser.add_argument("--all", type=Path)
    parser.add_argument("--curve", type=Path)
    parser.add_argument("--final", type=Path)
    options = parser.parse_args()
    delays.install(delays.TRAINER)
    if options.all:
        for style in (*STYLES, *VALIDATED, *INSIDE, *BESIDE):
            train(style, options.all / f"{style}.curve", options.all / f"{style}.final")
    else:
        train(options.style, options.curve, options.final)


if __name__ == "__main__":
    main()
