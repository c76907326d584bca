"""Itself: how a program differs from itself, as two unbroken passes of it show.

Owns which of these differences explain that a resume is not exact, and which change nothing: random numbers that no
step draws, memory that is never initialised. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from harness.core.rehearsal import AnyLine, Stepped
from harness.rehearse.compare import Difference, first_of_ranks, without_seed


@dataclass(frozen=True)
class Itself:
    """What two unbroken passes have shown.

    Attributes:
        difference: the first one; `None` if none matters.
        passed_over: libraries whose random numbers are other ones in each pass.
        unseeded: libraries to name as those that have no seed.
        loose: names of tensors and small values that are other ones in each pass, while all else is the same.
    """

    difference: Difference | None = None
    passed_over: frozenset[str] = frozenset()
    unseeded: frozenset[str] = frozenset()
    loose: tuple[str, ...] = ()


def of_itself(
    unbroken: Mapping[int, Sequence[AnyLine]], again: Mapping[int, Sequence[AnyLine]], passed_over: Collection[str]
) -> Itself:
    """Return how a program differs from itself.

    Args:
        unbroken: the lines of each rank in one pass.
        again: in another one.
        passed_over: libraries whose random states are not compared.
    """
    found, libraries = first_of_ranks(unbroken, again, passed_over), set[str]()
    while found is not None and found.library:  # drawn without a seed, which may not matter
        libraries.add(found.library)
        found = first_of_ranks(unbroken, again, {*passed_over, *libraries})
    passed = frozenset(libraries)
    if found is None:
        return Itself(None, passed, passed)
    if loose := _loose(unbroken, again, {*passed_over, *libraries}, found):
        return Itself(None, passed, passed, loose)
    return Itself(found, passed, without_seed(unbroken[0], again[0]))


def _loose(
    unbroken: Mapping[int, Sequence[AnyLine]],
    again: Mapping[int, Sequence[AnyLine]],
    passed_over: Collection[str],
    found: Difference | None,
) -> tuple[str, ...]:
    """Return the names of what differs by itself; none if anything else differs, or what an optimizer trains."""
    steps = [line for lines in unbroken.values() for line in lines if isinstance(line, Stepped)]
    trained = {name for line in steps for name in line.trained}
    optimizers = tuple({f"{name}/" for line in steps for name in line.optimizers})
    loose: tuple[str, ...] = ()
    while found is not None:
        matters = not found.names or any(name in trained or name.startswith(optimizers) for name in found.names)
        if matters or not trained:
            return ()
        loose += found.names
        found = first_of_ranks(unbroken, again, passed_over, loose)
    return loose
