"""How a program differs from itself, and what of that matters."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from harness.core.rehearsal import AnyLine, Handed, Stepped
from harness.rehearse.itself import Itself, of_itself


def run(*states: Mapping[str, str], batches: str = "same", optimizers: bool = True) -> dict[int, list[AnyLine]]:
    """The lines of a pass with these states after its steps, of which an optimizer trains `model/weight`."""
    lines: list[AnyLine] = []
    for step, state in enumerate(states, 1):
        lines.append(Handed(None, step, batches))
        trained = ("model/weight",) if optimizers else ()
        lines.append(Stepped(step, None, {}, dict(state), optimizers={"adam": True}, trained=trained))
    return {0: lines}


A = {"model/weight": "1", "adam/state/0": "1", "model/table": "a", "ckpt.extra/begun": "10:00"}


def test_what_differs_while_all_else_is_the_same_is_loose() -> None:
    one, other = run(A, A), run(A | {"model/table": "b"}, A | {"model/table": "c", "ckpt.extra/begun": "11:00"})

    assert of_itself(one, other, ()) == Itself(loose=("model/table", "ckpt.extra/begun"))


@pytest.mark.parametrize("name", ["model/weight", "adam/state/0"])
@pytest.mark.parametrize("steps", [(True, True), (False, True)])
def test_what_an_optimizer_trains_matters_at_once_and_later(name: str, steps: tuple[bool, bool]) -> None:
    changes = [{"model/table": "b"} | ({name: "2"} if changed else {}) for changed in steps]

    found = of_itself(run(A, A), run(*(A | change for change in changes)), ())

    assert found.loose == ()
    assert found.difference is not None
    assert "model/table" in found.difference.names


def test_other_batches_matter() -> None:
    found = of_itself(run(A), run(A | {"model/table": "b"}, batches="others"), ())

    assert found.difference is not None
    assert found.loose == ()


def test_nothing_is_loose_in_a_program_without_an_optimizer() -> None:
    """It may train by hand whatever differs."""
    found = of_itself(run(A, optimizers=False), run(A | {"model/table": "b"}, optimizers=False), ())

    assert found.difference is not None
    assert found.loose == ()
