"""Trainings whose resume is not exact, each for one of the usual reasons. No harness can know that from a boundary."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tests.support.loops import BATCHES, EPOCHS, Job, Style

_lives = itertools.count()


def local_average(job: Job) -> None:
    """A running average in a local variable scales the loss."""
    ckpt = job.checkpointer(**job.states)
    average = 1.0
    for _epoch in ckpt.epochs(EPOCHS):
        for (x,) in ckpt.batches(job.loader):
            average = 0.9 * average + 0.1 * job.step(x * average)


def counted_by_python(job: Job) -> None:
    """Every second batch is weighted, by a number of Python's enumerate."""
    ckpt = job.checkpointer(**job.states)
    for _epoch in ckpt.epochs(EPOCHS):
        for number, (x,) in enumerate(ckpt.batches(job.loader)):
            job.step(x * (1 + number % 2))


def drawn_before(job: Job) -> None:
    """The next batch is drawn one step ahead, the first one before the loop."""
    ckpt = job.checkpointer(**job.states)
    x = torch.randn(4, 16)
    for _step in ckpt.steps(EPOCHS * BATCHES):
        job.step(x)
        x = torch.randn(4, 16)


def unknown_loader(job: Job) -> None:
    """Batches come from an iterator that the Checkpointer does not know."""
    ckpt = job.checkpointer(**job.states)
    batches = itertools.cycle(list(job.loader))
    for _step in ckpt.steps(EPOCHS * BATCHES):
        (x,) = next(batches)
        job.step(x)


def forgotten_optimizer(job: Job) -> None:
    """The optimizer was not given, so its moments begin anew."""
    ckpt = job.checkpointer(model=job.model)
    for _epoch in ckpt.epochs(EPOCHS):
        for (x,) in ckpt.batches(job.loader):
            job.step(x)


def forgotten_average(job: Job) -> None:
    """A teacher that was not given is part of the loss."""
    teacher = nn.Linear(16, 1)
    ckpt = job.checkpointer(**job.states)
    for _step in ckpt.steps(EPOCHS * BATCHES):
        x = torch.randn(4, 16)
        with torch.no_grad():
            teacher.weight.lerp_(job.model[0].weight.mean(0, keepdim=True), 0.5)
            x = x + teacher(x)
        job.step(x)


def of_itself(job: Job) -> None:
    """Something else in each process, as with an operation that is not deterministic."""
    job.model[0].weight.data += next(_lives) * 1e-3
    ckpt = job.checkpointer(**job.states)
    for _step in ckpt.steps(EPOCHS * BATCHES):
        job.step(torch.randn(4, 16))


INEXACT: dict[str, Style] = {
    style.__name__: style
    for style in (
        local_average,
        counted_by_python,
        drawn_before,
        unknown_loader,
        forgotten_optimizer,
        forgotten_average,
    )
}
