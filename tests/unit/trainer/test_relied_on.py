"""A torch that lacks what the trainer needs of it is refused at the start, in one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

import harness
from harness.errors import ConfigError
from harness.trainer.relied_on import check_torch


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    check_torch.cache_clear()
    yield
    check_torch.cache_clear()


def test_this_torch_has_all_of_it() -> None:
    check_torch()


def test_a_name_that_is_gone_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DataLoader, "_get_iterator")
    with pytest.raises(
        ConfigError, match=rf"torch {torch.__version__[:3]}.* needs DataLoader\._get_iterator: use an older"
    ):
        harness.Checkpointer(model=torch.nn.Linear(1, 1), run="never")
