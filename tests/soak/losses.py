"""What was trained, from the curves of every host, against the run that nothing has happened to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TAKES_EFFECT_S = 0.3  # a strike is noted a moment after it was done


@dataclass(frozen=True)
class Step:
    """One completed step of one life."""

    number: int
    bits: str  # loss and learning rate, as hexadecimal floats
    pid: int
    at: float


def read_curves(paths: Iterable[Path]) -> list[Step]:
    """Every step that was trained, repeated ones too, in the order of time."""
    steps = []
    for path in paths:
        for line in path.read_text().split("\n")[:-1]:  # the last line of a killed trainer may be torn
            number, loss, rate, pid, at = line.split()
            steps.append(Step(int(number), f"{loss} {rate}", int(pid), float(at)))
    return sorted(steps, key=lambda step: step.at)


def differences(steps: Sequence[Step], unbroken: Sequence[Step]) -> list[str]:
    """Where what was trained is not what the unbroken run trained; empty where every bit of every life is the same."""
    expected = {step.number: step.bits for step in unbroken}
    found = [
        f"step {step.number}: {step.bits} in process {step.pid}, unbroken {expected.get(step.number)}"
        for step in steps
        if expected.get(step.number) != step.bits
    ]
    missing = sorted(expected.keys() - {step.number for step in steps})
    return found + [f"step {number} was never trained" for number in missing]


def lost_by_cause(steps: Sequence[Step], struck_at: Sequence[tuple[float, str]]) -> dict[str, list[int]]:
    """Steps that each new trainer had to repeat, by what had happened last when the newest step was trained."""
    lost: dict[str, list[int]] = {}
    seen = {step.pid for step in steps[:1]}
    newest = steps[0] if steps else None
    for step in steps:
        if step.pid not in seen and newest is not None:
            seen.add(step.pid)
            before = [strike for strike in struck_at if strike[0] <= newest.at + TAKES_EFFECT_S]
            cause = max(before, default=(0.0, "nothing"))[1]
            lost.setdefault(cause, []).append(max(0, newest.number - (step.number - 1)))
        if newest is None or step.number >= newest.number:
            newest = step
    return lost


def words(lost: Sequence[int]) -> str:
    """The distribution, for people."""
    return f"median {statistics.median(lost):g}, most {max(lost)}, of {len(lost)}"
