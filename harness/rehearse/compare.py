"""Compare what two passes of a program wrote down, and name the first difference.

Owns what counts as a difference: the bytes of each batch, the random states, every tensor and small value after each
step; and which of the program's own variables differ, which may or may not matter. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.core.rehearsal import AnyLine, Finished, Handed, Interrupted, Resumed, Stepped

_RANDOM = {"python": "Python's random numbers", "numpy": "numpy's random numbers", "torch": "torch's random numbers"}


@dataclass(frozen=True)
class Difference:
    """The first difference between two passes.

    Attributes:
        step: the step after which it was found, or in which the batch was handed out.
        what: batch | random | state | steps.
        name: what differs, in words.
        library: whose random states differ.
        rank: which of several ranks; 0 for the only one.
        names: of all tensors and small values of the step that differ.
    """

    step: int
    what: str
    name: str
    library: str = ""
    rank: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variable:
    """A variable of the program that was another one in the interrupted pass.

    Attributes:
        step: the first step after which it was.
        name: its name and place.
        here: its value in the unbroken pass, or a digest.
        there: in the interrupted pass.
    """

    step: int
    name: str
    here: str
    there: str


@dataclass(frozen=True)
class Observed:
    """What a pass has shown.

    Attributes:
        step: its last step.
        batches: the number of batches that were handed out.
        finished: whether the program has reached its own end.
    """

    step: int
    batches: int
    finished: bool


def observed(lines: Sequence[AnyLine]) -> Observed:
    """Return what a pass has shown."""
    steps = [line.step for line in lines if isinstance(line, Stepped)]
    handed = sum(isinstance(line, Handed) for line in lines)
    return Observed(max(steps, default=0), handed, any(isinstance(line, Finished) for line in lines))


def unused(lines: Sequence[AnyLine]) -> frozenset[str]:
    """Return the libraries from whose global generator a pass has drawn nothing: their states do not matter."""
    states: dict[str, set[str]] = {}
    for line in lines:
        if isinstance(line, Stepped):
            for library, state in line.random.items():
                states.setdefault(library, set()).add(state)
    return frozenset(library for library, seen in states.items() if len(seen) == 1)


def without_seed(unbroken: Sequence[AnyLine], again: Sequence[AnyLine]) -> frozenset[str]:
    """Return the libraries whose random states are other ones in two unbroken passes from the first step on.

    A library from which no step draws is left out, except torch: a program draws its weights before its first step. If
    torch has a seed, what draws before that step is another one: then each that has none is named.
    """
    here, there = (next((line for line in lines if isinstance(line, Stepped)), None) for lines in (unbroken, again))
    if here is None or there is None:
        return frozenset()
    differing = frozenset(name for name, state in here.random.items() if there.random.get(name) != state)
    seed = _seed(unbroken)
    if seed is not None and seed == _seed(again):
        return differing - {"torch"}
    return differing - (unused(unbroken) - {"torch"})


def _seed(lines: Sequence[AnyLine]) -> int | None:
    return next((line.seed for line in lines if isinstance(line, Resumed)), None)


def first_of_ranks(
    unbroken: Mapping[int, Sequence[AnyLine]],
    other: Mapping[int, Sequence[AnyLine]],
    passed_over: Collection[str] = (),
    loose: Collection[str] = (),
) -> Difference | None:
    """Return the first difference of all ranks' lines; `None` if there is none. See `first_difference`."""
    found = []
    for rank, lines in unbroken.items():
        difference = first_difference(lines, other.get(rank, ()), passed_over, loose)
        if difference is not None:
            found.append(replace(difference, rank=rank))
    return min(found, key=lambda difference: (difference.step, difference.rank), default=None)


def first_difference(
    unbroken: Sequence[AnyLine],
    other: Sequence[AnyLine],
    passed_over: Collection[str] = (),
    loose: Collection[str] = (),
) -> Difference | None:
    """Return the first difference, in the order of the unbroken pass; `None` if there is none.

    Args:
        unbroken: lines of the unbroken pass.
        other: lines of all starts of the other pass, in order.
        passed_over: libraries whose random states are not compared.
        loose: names of tensors and small values that are not compared.
    """
    steps = _steps(other)
    for step, (handed, line) in _steps(unbroken).items():
        if step not in steps:
            return Difference(step, "steps", f"step {step} is missing, or has another number")
        there, again = steps[step]
        difference = _between_batches(step, handed, there) or _between(line, again, passed_over, loose)
        if difference is not None:
            return difference
    return _more_steps(unbroken, other)


def other_variables(
    unbroken: Sequence[AnyLine], interrupted: Sequence[AnyLine], again: Sequence[AnyLine] = ()
) -> list[Variable]:
    """Return the program's variables that an interruption has changed, the first ones first.

    What differs before the first interruption already (a clock, a path) is of another kind, and so is what differs in
    two unbroken passes.

    Args:
        unbroken: lines of the unbroken pass.
        interrupted: of the interrupted one.
        again: of another unbroken one, if there is one.
    """
    return _others(unbroken, interrupted, again, lambda line: line.variables)


def other_objects(
    unbroken: Sequence[AnyLine], interrupted: Sequence[AnyLine], again: Sequence[AnyLine] = ()
) -> list[Variable]:
    """Return, likewise, the objects with a state of their own that were not given to the Checkpointer."""
    return _others(unbroken, interrupted, again, lambda line: line.objects)


def _others(
    unbroken: Sequence[AnyLine],
    interrupted: Sequence[AnyLine],
    again: Sequence[AnyLine],
    of: Callable[[Stepped], Mapping[str, str]],
) -> list[Variable]:
    here = {line.step: of(line) for line in unbroken if isinstance(line, Stepped)}
    passed_over, found, resumed = set[str](), dict[str, Variable](), False
    for other in [line for line in again if isinstance(line, Stepped)]:
        wanted_there = here.get(other.step, {})
        passed_over |= {name for name, value in of(other).items() if wanted_there.get(name, value) != value}
    for line in interrupted:
        resumed |= isinstance(line, Interrupted)
        if not isinstance(line, Stepped):
            continue
        for name, value in of(line).items():
            wanted = here.get(line.step, {}).get(name, value)
            if wanted != value and not resumed:
                passed_over.add(name)
            elif wanted != value and name not in passed_over:
                found.setdefault(name, Variable(line.step, name, wanted, value))
    return list(found.values())


def _more_steps(unbroken: Sequence[AnyLine], other: Sequence[AnyLine]) -> Difference | None:
    here, there = observed(unbroken), observed(other)
    if here.step != there.step:
        return Difference(min(here.step, there.step), "steps", f"{there.step} steps were made, instead of {here.step}")
    return None


def _between(line: Stepped, again: Stepped, passed_over: Collection[str], loose: Collection[str]) -> Difference | None:
    for library, drawn in line.random.items():
        if library not in passed_over and again.random.get(library) != drawn:
            return Difference(line.step, "random", random_in_words(library), library)
    # Each start finds out by itself which gradients no step reads any more. If one that matters is missing, the weights
    # differ.
    known = line.gradients.keys() & again.gradients.keys()
    before, after = ({name: each.gradients[name] for name in line.gradients if name in known} for each in (line, again))
    changed = _changed(line.state | before, again.state | after, loose)
    return Difference(line.step, "state", in_words(changed), names=changed) if changed else None


def random_in_words(library: str) -> str:
    """Return the words for a library's global generator."""
    return _RANDOM.get(library, f"the random numbers of {library}")


def _changed(before: Mapping[str, str], after: Mapping[str, str], loose: Collection[str]) -> tuple[str, ...]:
    """Return the names whose values differ; tensors first, since small values often only follow them."""
    return tuple(name for name in {**before, **after} if before.get(name) != after.get(name) and name not in loose)


def in_words(names: Sequence[str]) -> str:
    """Return the first of several names, and how many more there are."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0].replace('/', '.')}{more}"


def _between_batches(step: int, handed: Sequence[Handed], there: Sequence[Handed]) -> Difference | None:
    """Compare the batches of one step."""
    for one, other in zip(handed, there, strict=False):
        if one.digest != other.digest:
            return Difference(step, "batch", _batch_in_words(one))
    if len(handed) != len(there):
        words = "no batch" if not there else f"{len(there)} batches" if len(there) > 1 else "one batch"
        return Difference(step, "batch", f"{words} instead of {len(handed)}")
    return None


def _steps(lines: Sequence[AnyLine]) -> dict[int, tuple[list[Handed], Stepped]]:
    """Return the batches and the end of each step, in order."""
    found: dict[int, tuple[list[Handed], Stepped]] = {}
    handed: list[Handed] = []
    for line in lines:
        if isinstance(line, Handed) and not line.again:
            handed.append(line)
        elif isinstance(line, Stepped):
            found.setdefault(line.step, (handed, line))
            handed = []
    return found


def _batch_in_words(line: Handed) -> str:
    return f"batch {line.number}" + ("" if line.epoch is None else f" of epoch {line.epoch}")
