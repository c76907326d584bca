"""What one of several ranks tells the agent of its tensors, and when it has to tell it again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.messages import Stores
from harness.core.pieces import label
from harness.trainer.distributed.boxes import Box
from harness.trainer.staging.shares import Shares
from harness.trainer.state.capture import Captured


@pytest.fixture
def link() -> Any:
    sent: list[Any] = []
    return SimpleNamespace(stores=None, holds_wanted=False, sent=sent, send=lambda said, repeat: sent.append(said))


CAPTURED = Captured({}, {"w": torch.ones(2)}, frozenset())


def answer(link: Any, number: int) -> None:
    link.stores = Stores((), ("w",), (), (), number, "a")


def test_a_table_is_told_once_and_entries_come_with_the_answer_to_it(link: Any) -> None:
    shares = Shares(link)
    shares.tell(CAPTURED)
    shares.tell(CAPTURED)
    assert [each.number for each in link.sent] == [1]
    assert shares.entries(CAPTURED) is None
    answer(link, 1)
    assert shares.stale
    entries = shares.entries(CAPTURED)
    assert entries is not None
    assert [entry.name for entry in entries] == ["w"]
    assert not shares.stale


def test_a_rank_that_is_asked_again_tells_it_again_whatever_else_it_has_heard(link: Any) -> None:
    """The agent asks, and the table of another rank makes the old ones fit: both messages come between two calls."""
    shares = Shares(link)
    shares.tell(CAPTURED)
    link.stores, link.holds_wanted = None, True
    answer(link, 1)
    assert shares.entries(CAPTURED) is None
    assert shares.stale
    shares.tell(CAPTURED)
    assert [each.number for each in link.sent] == [1, 2]
    answer(link, 2)
    assert shares.entries(CAPTURED) is not None
    assert not shares.stale


def test_what_no_wrapper_keeps_equal_is_compared_in_every_snapshot(link: Any) -> None:
    shares = Shares(link)
    shares.tell(CAPTURED)
    assert shares.sums(CAPTURED, thoroughly=True) == {}
    link.stores = Stores((), (), ("m",), ("w",), 1, "a")
    captured = Captured({}, {"w": torch.ones(2), "m": torch.ones(3, 2)}, frozenset())
    shares.entries(captured)

    assert list(shares.sums(captured, thoroughly=False)) == [label("m", None, (3, 2))]
    assert set(shares.sums(captured, thoroughly=True)) == {label("m", None, (3, 2)), label("w", None, (2,))}


def test_the_same_elements_in_another_order_are_not_equal(link: Any) -> None:
    """Each rank's permutation of the same rows, for example."""
    shares = Shares(link)
    shares.tell(CAPTURED)
    link.stores = Stores((), (), ("order",), (), 1, "a")
    sums = []
    for order in (torch.arange(6), torch.arange(6).flip(0)):
        captured = Captured({}, {"order": order}, frozenset())
        shares.entries(captured)
        sums.append(shares.sums(captured, thoroughly=False))
    assert sums[0] != sums[1]


def test_a_rank_s_part_of_a_tensor_may_be_empty(link: Any) -> None:
    """There are more ranks than rows."""
    shares = Shares(link)
    shares.tell(CAPTURED)
    link.stores = Stores((), (), ("w",), (), 1, "a")
    captured = Captured({}, {"w": torch.empty(0, 2)}, frozenset(), boxes={"w": Box((3, 2), (3, 0), (0, 2))})
    shares.entries(captured)
    assert shares.sums(captured, thoroughly=False) == {label("w", (3, 0), (0, 2)): 0}
