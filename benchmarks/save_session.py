"""The training script that bench_save.py measures: one state, and everybody saves it in turn, round after round.

Runs under `harness run`, so that its Checkpointer and the agent are those of a user. Before each save the whole state
has changed, as it has in a training. In each round everybody is measured twice: alone, for the stall, the time until
durable and the CPU of the whole machine; and beside a training loop, for what that loop loses. Before each the disk is
idle, and the agent has nothing left to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from circumstances import ROOT
from gpt_state import Size, State, gpt_state
from limits import THREADS, Limits, direct_writes, have_memory
from peers import ASYNCHRONOUS, SAVE_PEERS, Durable, one_process_group
from processes import Quiet, machine_cpu_s

sys.path.insert(0, str(ROOT))

from harness import Checkpointer

OURS = "ours"
PATIENCE_S = 120.0
POLL_S = 0.001
BASELINE_S = 0.6
MEMORY_FOR = 2  # times the state: somebody's own, and the page cache's


class Contender(Protocol):
    """Somebody who saves."""

    def save(self, state: State, target: Path) -> Durable: ...

    def boundary(self) -> None: ...

    def settle(self, meanwhile: Callable[[], None]) -> None: ...


@dataclass
class Figures:
    """What was measured of one contender, a number for each round.

    Attributes:
        stall_s: how long the save blocks.
        durable_s: from the beginning of the save.
        cpu_s_per_gb: of the whole machine, until durable.
        lost_s: training time lost until durable.
        lost_after_s: what it costs in all, where something is left to do afterwards.
        cpu_after_s_per_gb: likewise.
    """

    stall_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    lost_after_s: list[float] = field(default_factory=list)
    cpu_after_s_per_gb: list[float] = field(default_factory=list)


class Peer:
    """One of the others."""

    def __init__(self, name: str, directory: Path) -> None:
        self._peer = SAVE_PEERS[name](directory)
        self.save = self._peer.save
        self.close = self._peer.close

    def boundary(self) -> None: ...

    def settle(self, meanwhile: Callable[[], None]) -> None: ...


class Ours:
    """The Checkpointer, and the agent that is this process's parent."""

    def __init__(self, state: State) -> None:
        self._ckpt = Checkpointer(accumulate=1, model=state.model, optimizer=state.optimizer)
        self._ckpt.resume()
        self.boundary = self._ckpt.step
        self._ckpt.save()  # the first boundaries plan the layout, and pass until there is a slot

        def train() -> None:
            self.boundary()
            time.sleep(POLL_S)

        _wait(lambda: self._ckpt.durable_step is not None, train)

    def save(self, _state: State, _target: Path) -> Durable:
        self._ckpt.save()
        self._ckpt.step()
        step = self._ckpt.step_count

        def durable() -> bool:
            reached = self._ckpt.durable_step or 0
            if reached > step:
                raise AssertionError(f"the snapshot of step {step} was taken at {reached}: no slot was free")
            return reached == step

        return durable

    def settle(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the agent has read back what it wrote, deleted what is old, and does nothing any more."""
        quiet = Quiet(os.getppid())
        while not quiet():
            meanwhile()


@dataclass(frozen=True)
class Trained:
    """So many steps in so many seconds."""

    seconds: float
    steps: int

    def lost_s(self, step_s: float) -> float:
        """Beyond what they take while nobody saves."""
        return self.seconds - self.steps * step_s


class Training:
    """A training loop that keeps the cores busy with arithmetic, as one on a CPU does."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._batch = torch.rand(64, 1024)

    def step(self) -> None:
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run(self, seconds: float) -> Trained:
        """Train, while nobody saves."""
        count, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            self.step()
            count += 1
        return Trained(took, count)


class Session:
    """The state, and how a save of it is measured."""

    def __init__(self, state: State, directory: Path) -> None:
        self._state, self._directory = state, directory
        self._training = Training()
        self._gb = state.bytes / 1e9
        self._baselines: list[Trained] = []
        self._trained: dict[str, list[tuple[Trained, Trained]]] = {}

    def alone(self, contender: Contender, figures: Figures) -> None:
        self._begin()
        cpu, began = machine_cpu_s(), time.perf_counter()
        durable = contender.save(self._state, self._directory / "target")
        figures.stall_s.append(time.perf_counter() - began)
        _wait(durable, lambda: time.sleep(POLL_S))
        figures.durable_s.append(time.perf_counter() - began)
        figures.cpu_s_per_gb.append((machine_cpu_s() - cpu) / self._gb)
        contender.settle(lambda: time.sleep(POLL_S))
        figures.cpu_after_s_per_gb.append((machine_cpu_s() - cpu) / self._gb)
        self._end()

    def while_training(self, name: str, contender: Contender) -> None:
        self._begin()
        self._baselines.append(self._training.run(BASELINE_S))
        steps = 0
        began = time.perf_counter()

        def train() -> None:
            nonlocal steps
            self._training.step()
            contender.boundary()
            steps += 1

        durable = contender.save(self._state, self._directory / "target")
        _wait(durable, train)
        until_durable = Trained(time.perf_counter() - began, steps)
        contender.settle(train)
        in_all = Trained(time.perf_counter() - began, steps)
        self._trained.setdefault(name, []).append((until_durable, in_all))
        self._end()

    def forget(self) -> None:
        """What was trained so far warmed up."""
        self._baselines.clear()
        self._trained.clear()

    def judge(self, results: dict[str, Figures]) -> list[float]:
        """Note what each lost; what a second is said to lose in which nobody saves: the error of it all."""
        step_s = statistics.median(trained.seconds / trained.steps for trained in self._baselines)
        for name, pairs in self._trained.items():
            results[name].lost_s = [until_durable.lost_s(step_s) for until_durable, _ in pairs]
            results[name].lost_after_s = [in_all.lost_s(step_s) for _, in_all in pairs]
        return [trained.lost_s(step_s) / trained.seconds for trained in self._baselines]

    def _begin(self) -> None:
        self._state.update()  # else ours would find what it has stored already, and write nothing
        os.sync()
        have_memory(MEMORY_FOR * self._state.bytes)

    def _end(self) -> None:
        shutil.rmtree(self._directory / "target", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("size", type=Size.parse)
    parser.add_argument("rounds", type=int)
    parser.add_argument("peers", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    with one_process_group():
        found = measure(options.directory, options.size, options.rounds, options.peers)
    written = options.directory / "result.part"
    written.write_text(json.dumps(found))
    written.rename(options.directory / "result.json")


def measure(directory: Path, size: Size, rounds: int, names: list[str]) -> dict[str, object]:
    """What `bench_save.py` reads: bytes, limits, figures by contender, and who is not here."""
    state = gpt_state(size)
    contenders: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    for name in names:  # before ours: one of them forks
        try:
            contenders[name] = Peer(name, directory)
        except ImportError as err:
            absent[name] = f"not installed: {err}"
    contenders[OURS] = Ours(state)
    limits, session = Limits(state.bytes), Session(state, directory)
    direct = direct_writes(directory)
    results = {name: Figures() for name in contenders}
    copy_s: list[float] = []
    write_s: list[float] = []
    for number in range(rounds + 1):
        if number == 1:  # the first round faults memory in, makes plans, and is not counted
            results = {name: Figures() for name in contenders}
            session.forget()
            copy_s, write_s = [], []
        os.sync()
        have_memory(MEMORY_FOR * state.bytes)
        copy_s.append(limits.copy_s())
        if direct:
            write_s.append(limits.write_s(directory / "limit"))
            (directory / "limit").unlink()
        for name, contender in contenders.items():
            session.alone(contender, results[name])
            if name == OURS or name in ASYNCHRONOUS:
                session.while_training(name, contender)
            else:
                results[name].lost_s.append(results[name].stall_s[-1])
    for contender in contenders.values():
        if isinstance(contender, Peer):
            contender.close()
    error = session.judge(results)
    figures = {name: vars(found) for name, found in results.items()}
    limits_s = {"copy_s": copy_s, "write_s": write_s}
    return {"bytes": state.bytes, **limits_s, "error": error, "figures": figures, "absent": absent}


def _wait(durable: Durable, meanwhile: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not durable():
        meanwhile()
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not durable after {PATIENCE_S:g} s")


if __name__ == "__main__":
    main()
