"""Tests that take minutes begin first, one with each worker."""

from __future__ import annotations

import pytest

from tests.support.order import dealt


@pytest.mark.parametrize(
    ("long", "others", "workers", "order"),
    [
        ("", "abc", 3, "abc"),
        ("LM", "abcd", 1, "LMabcd"),
        ("LM", "abcd", 2, "abcLMd"),
        ("LM", "abcd", 3, "abLcMd"),
        ("XYZ", "abcdef", 3, "abcXZdYef"),
        ("L", "ab", 3, "aLb"),
        ("LMN", "", 3, "LNM"),
        ("LMNO", "a", 3, "aLNMO"),
    ],
)
def test_the_part_of_each_worker_begins_with_its_share(long: str, others: str, workers: int, order: str) -> None:
    assert "".join(dealt(long, others, workers)) == order
