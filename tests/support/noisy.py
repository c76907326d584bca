"""Data of which each visit is another: a resumed run has it again only if the generators of the worker are restored."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Points of a line, each visit with other noise, drawn in the worker from two libraries."""

    def __init__(self, items: int, width: int) -> None:
        """Have `items` points of `width` numbers each."""
        self._items, self._width = items, width

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((self._width,), index / self._items) + 0.1 * torch.randn(self._width) + random.random() * 0.1
        return x, x.sum().reshape(1)
