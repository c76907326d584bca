"""What a start goes on from: `extra` of another snapshot, put into what the program holds already."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from harness.trainer.resuming import refill


def test_containers_that_the_program_holds_get_the_other_content() -> None:
    live: dict[str, Any] = {"losses": [3, 2, 1], "best": {"step": 3, "of": [3]}, "new": 1}
    losses, best, of = live["losses"], live["best"], live["best"]["of"]

    refill(live, {"losses": [3, 2], "best": {"step": 2, "of": [2, 2]}, "old": (1,)})

    assert live == {"losses": [3, 2], "best": {"step": 2, "of": [2, 2]}, "old": (1,)}
    assert live["losses"] is losses
    assert live["best"] is best
    assert live["best"]["of"] is of


def test_what_is_of_another_type_is_another_object() -> None:
    live: dict[str, Any] = {"a": [1], "b": {"x": 1}, "c": [[1], 2]}

    refill(live, {"a": {"y": 1}, "b": OrderedDict(x=1), "c": [2, [1], 3]})

    assert live == {"a": {"y": 1}, "b": OrderedDict(x=1), "c": [2, [1], 3]}
    assert type(live["b"]) is OrderedDict
