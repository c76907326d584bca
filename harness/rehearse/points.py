"""Choose where to interrupt a program, from what it did unbroken: in an epoch, at its end, around a validation.

Owns the choice, and the words for a place. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.core.rehearsal import AnyLine, Entered, EpochEnded, Interruption, Stepped
from harness.core.words import listed

RESUMED = "resumed"


@dataclass(frozen=True)
class Plan:
    """The interruptions of one rehearsal.

    Attributes:
        interruptions: in the order in which the program reaches them.
        missing: what the program did not come to in so many steps, in words.
    """

    interruptions: tuple[Interruption, ...]
    missing: tuple[str, ...]


def choose(lines: Sequence[AnyLine], stop: int, at: Sequence[int] = ()) -> Plan:
    """Return where to interrupt the program.

    Args:
        lines: of the unbroken pass.
        stop: the last step.
        at: steps that the user wants; empty for a choice.
    """
    steps = [line.step for line in lines if isinstance(line, Stepped) and line.step < stop]
    learned = _first_steps(lines)
    if at:
        wanted = {Interruption(step) for step in at if step < stop}
        return Plan(tuple(sorted(wanted, key=_order)), _not_learned(learned, wanted))
    if not steps:
        return Plan((), ("a step to interrupt",))
    ends = [line.step for line in lines if isinstance(line, EpochEnded) and 0 < line.step < stop]
    entered = [line.step for line in lines if isinstance(line, Entered) and 0 < line.step < stop]
    middles = [step for step in steps if step not in ends] or steps
    middle = middles[len(middles) // 3]
    wanted = {Interruption(middle)}
    late = max((first for first in learned.values() if first is not None and first < stop), default=0)
    if late > middle:  # a program that fills a buffer first, or trains its models in turns
        behind = [step for step in steps if step >= late]
        wanted.add(Interruption(behind[len(behind) // 3]))
    if any(step > middle for step in steps):
        wanted.add(Interruption(middle + 1, RESUMED))
    if ends:
        wanted.add(Interruption(ends[0]))
    if entered:
        wanted.add(Interruption(entered[0], "evaluating"))
        wanted.add(Interruption(entered[1 if len(entered) > 1 else 0], "validation"))
    missing = [what for what, found in (("the end of an epoch", ends), ("a validation", entered)) if not found]
    return Plan(tuple(sorted(wanted, key=_order)), (*missing, *_not_learned(learned, wanted)))


def in_words(interruption: Interruption, epoch_ends: Sequence[int] = ()) -> str:
    """Return a place in words: "7", "13 (validation)", "20 (end of an epoch)"."""
    notes = {
        "evaluating": "on the way into a validation",
        "validation": "in a validation",
        RESUMED: "right after a resume",
        "step": "the end of an epoch" if interruption.step in epoch_ends else "",
    }
    note = notes[interruption.where]
    return f"{interruption.step} ({note})" if note else str(interruption.step)


def _first_steps(lines: Sequence[AnyLine]) -> dict[str, int | None]:
    """Return the step in which each optimizer has stepped first, by name; `None` if it never has."""
    found: dict[str, int | None] = {}
    for line in [line for line in lines if isinstance(line, Stepped)]:
        for name, has_stepped in line.optimizers.items():
            if found.get(name) is None:
                found[name] = line.step if has_stepped else None
    return found


def _not_learned(learned: Mapping[str, int | None], wanted: Collection[Interruption]) -> tuple[str, ...]:
    """Return, in words, of which optimizers no interruption shows whether what they have changed comes back."""
    last = max((interruption.step for interruption in wanted), default=0)
    names = [name for name, first in learned.items() if first is None or first > last]
    return (f"a step of {listed(names)} before an interruption: use more --steps",) if names else ()


def _order(interruption: Interruption) -> tuple[int, int]:
    return interruption.step, ("resumed", "step", "evaluating", "validation").index(interruption.where)
