"""What one of several ranks tells the agent of its tensors, and when it has to tell it again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.core.messages import Stores
from harness.trainer.staging.shares import Shares
from harness.trainer.state.capture import Captured


@pytest.fixture
def link() -> Any:
    sent: list[Any] = []
    return SimpleNamespace(stores=None, holds_wanted=False, sent=sent, send=lambda said, repeat: sent.append(said))


CAPTURED = Captured({}, {"w": torch.ones(2)}, frozenset())


def answer(link: Any, number: int) -> None:
    link.stores = Stores((), ("w",), (), number, "a")


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
