from __future__ import annotations

import pytest

from harness.core.policy.cadence import Cadence


@pytest.mark.parametrize(
    ("now", "last", "due"),
    [(159.9, None, False), (160.0, None, True), (160.0, 120.0, False), (180.0, 120.0, True), (1000.0, 120.0, True)],
)
def test_a_snapshot_is_due_so_long_after_the_start_of_the_last_one(now: float, last: float | None, due: bool) -> None:
    assert Cadence(60.0).due(now, last, since=100.0) is due
