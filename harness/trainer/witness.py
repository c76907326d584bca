"""Witness: writes down what a program computes, and interrupts it where a rehearsal wants that.

Owns the digests of batches, random states, tensors and small values. There is one only in a rehearsal. It changes
nothing and draws nothing. An interruption takes the way of a real one: a signal to the agent, and its command.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from harness.core import rehearsal
from harness.core.rehearsal import AnyLine, Instructions
from harness.core.tree import TensorRef
from harness.trainer.digests import digest, of_tensor
from harness.trainer.state.capture import Captured
from harness.trainer.state.kinds import Kind, by_name
from harness.trainer.variables import Variables

_SHOWN = 60
_COMPARED = ("state", "requires_grad")
"""Parts of a state's node in the tree. The rest is about the capture, and not about the program."""
_PROGRESS = "progress"
"""A framework's own progress. It may copy what it restores, so two tensors may be one in an unbroken run only."""
_PLACES = f"{_PROGRESS}/state/own/places/"
"""Names of files in the progress of a framework, and times that it has measured: each start has other ones."""


class Witness:
    """The witness of one start."""

    def __init__(
        self, instructions: Instructions, variables: Variables, announce: Callable[[int], object], rank: int = 0
    ) -> None:
        """Open the file.

        Args:
            instructions: of this start.
            variables: of the program.
            announce: takes the number of a signal, and returns once the agent has answered with its command.
            rank: of this process. The first one interrupts all of them; each has a file of its own.
        """
        self._instructions, self._variables, self._announce = instructions, variables, announce
        self._interrupts = rank == 0
        file = Path(rehearsal.file_of(instructions.file, rank))
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._resumed = self._interrupted = self._over = False

    @classmethod
    def of(
        cls, environ: Mapping[str, str], variables: Variables, announce: Callable[[int], object], rank: int
    ) -> Witness | None:
        """Return the witness that the environment asks for; `None` outside of a rehearsal."""
        text = environ.get(rehearsal.VARIABLE)
        if text is None:
            return None
        return cls(msgspec.json.decode(text, type=Instructions), variables, announce, rank)

    def watch(self, batches: Iterator[Any], epoch: int | None, first: int, again: Callable[[], bool]) -> Iterator[Any]:
        """Yield the batches of a loop, and write down each.

        Args:
            batches: of the loop.
            epoch: of `ckpt.epochs`, or `None`.
            first: number of the first batch.
            again: whether the program is on its way to the place of the snapshot.
        """
        for number, batch in enumerate(batches, first):
            if not self._over:
                self._write(rehearsal.Handed(epoch, number, digest(batch), again()))
            yield batch

    def stepped(
        self,
        step: int,
        epoch: int | None,
        random: Mapping[str, Any],
        captured: Captured,
        optimizers: Mapping[str, bool] | None = None,
    ) -> None:
        """Write down a complete step; interrupt the program, if it is to be interrupted here.

        Args:
            step: completed steps.
            epoch: of `ckpt.epochs`, or `None`.
            random: the random states, by library.
            captured: the states.
            optimizers: whether each of them has stepped in this start, by name.
        """
        if self._over:  # several ranks may leave a step later
            return
        tree = {name: _by_name(node) for name, node in captured.tree.items()}
        names = _renamed(captured.tree, tree)
        digests = {name: of_tensor(tensor) for name, tensor in captured.tensors.items()}
        gradients = {name: digests[name] for name in _gradients(captured.tree.values())}
        progress = dict(_references(captured.tree.get(_PROGRESS), _PROGRESS))
        states = {
            names.get(name, name): text
            for name, text in digests.items()
            if not name.startswith(f"{_PROGRESS}/") and name not in gradients
        } | {path: digests[ref.name] for path, ref in progress.items()}
        listed = {name: {key: node[key] for key in _COMPARED if key in node} for name, node in tree.items()}
        leaves = _leaves({**listed, "ckpt.extra": captured.extra}, "")
        small = {path: text for path, text in leaves if not path.startswith(_PLACES)}
        drawn = {name: digest(state) for name, state in random.items()}
        last = self._over = step >= self._instructions.stop
        variables, objects = self._variables.look(thorough=last)
        trained = tuple(_trained(captured.tree.values()))
        line = rehearsal.Stepped(
            step, epoch, drawn, states | small, variables, objects, dict(optimizers or {}), gradients, trained
        )
        self._write(line)
        wanted = self._instructions.interruption
        if last:
            self._interrupt(step, "")
        elif wanted is not None and wanted.where in ("step", "resumed") and step >= wanted.step:
            self._interrupt(step, wanted.where)

    def entered(self, step: int, *, boundary: bool) -> None:
        """Write down that a validation begins; `boundary`: it could be resumed there."""
        self._write(rehearsal.Entered(step, boundary))
        self._interrupt_if(step, "evaluating")

    def inside(self, step: int) -> None:
        """Note that the program is inside a validation."""
        self._interrupt_if(step, "validation")

    def epoch_ended(self, epoch: int, step: int) -> None:
        """Write down that an epoch is over."""
        self._write(rehearsal.EpochEnded(epoch, step))

    def resumed(self, step: int) -> None:
        """Write down that the snapshot was restored, or the run has begun."""
        self._write(rehearsal.Resumed(step, torch.initial_seed()))

    def finished(self, step: int) -> None:
        """Write down that the program has reached its own end."""
        self._write(rehearsal.Finished(step))

    def _interrupt_if(self, step: int, where: str) -> None:
        wanted = self._instructions.interruption
        if wanted is not None and wanted.where == where and step >= wanted.step:
            self._interrupt(step, where)

    def _interrupt(self, step: int, where: str) -> None:
        if self._interrupted:
            return
        self._interrupted = True
        self._write(rehearsal.Interrupted(step, where))
        if self._interrupts:
            self._announce(signal.SIGTERM)

    def _write(self, line: AnyLine) -> None:
        os.write(self._file, rehearsal.encode_line(line))


def _by_name(node: dict[str, Any]) -> dict[str, Any]:
    """Return a state's node; that of an optimizer with parameters by name: a set has another order in each start."""
    if node["kind"] != Kind.OPTIMIZER or not isinstance(node["state"], dict):
        return node
    state = by_name(node["state"], node["params"]) or node["state"]
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return node
    groups = [{**group, "params": sorted(group["params"], key=str)} for group in groups]
    return {**node, "state": {**state, "param_groups": groups}}


def _renamed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return the new name of each tensor of an optimizer, by its name in the capture."""
    paths = zip(_paths(before), _paths(after), strict=True)
    return {old: new for (old, ref), (new, _) in paths if ref.name == old}


def _paths(tree: Mapping[str, Any]) -> Iterator[tuple[str, TensorRef]]:
    for name, node in tree.items():
        if node["kind"] == Kind.OPTIMIZER:
            yield from _references(node["state"], name)


def _trained(nodes: Iterable[Any]) -> Iterator[str]:
    """Yield the names of the parameters that the nodes of optimizers have."""
    groups = (group for node in nodes for group in node.get("params", ()))
    yield from (param for group in groups for param in group if isinstance(param, str))


def _gradients(nodes: Iterable[Any]) -> Iterator[str]:
    """Yield the names of the gradients in the nodes of states, and in those of the modules that they hold."""
    for node in nodes:
        yield from (ref.name for ref in node.get("grads", {}).values() if ref.name.endswith("/grad"))
        yield from _gradients(node.get("modules", {}).values())


def _references(value: Any, path: str) -> Iterator[tuple[str, TensorRef]]:
    """Yield path and reference of each tensor in a captured tree, also where two paths have the same one."""
    if isinstance(value, TensorRef):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _references(item, f"{path}/{key}")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of each small value in a captured tree."""
    if isinstance(value, TensorRef):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and len(value) <= _SHOWN:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    elif isinstance(value, (list, tuple, bytes, bytearray, set)):
        yield path, digest(value if isinstance(value, (list, tuple)) else repr(value))
    else:
        yield path, repr(value)[:_SHOWN]
