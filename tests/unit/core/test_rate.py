from __future__ import annotations

import pytest

from harness.core.rate import Rate


def rate(*samples: float, window: int = 32) -> Rate:
    made = Rate(window)
    for per_s in samples:
        made.add(int(per_s * 10), 10.0)
    return made


def test_nothing_is_claimed_before_anything_was_measured() -> None:
    assert Rate().per_s is None
    assert rate(0.0).per_s is None  # no bytes: a stalled transfer has no speed, and tells none


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([100], 100), ([300, 100, 200], 100), (range(1, 11), 1), (range(1, 12), 2), (range(1, 21), 2), (range(1, 31), 3)],
)
def test_nine_times_out_of_ten_it_is_faster(samples: list[int], expected: int) -> None:
    assert rate(*samples).per_s == expected


def test_what_was_slow_long_ago_is_forgotten() -> None:
    assert rate(1, 100, 100, 100, window=3).per_s == 100


def test_a_moment_is_not_infinitely_fast() -> None:
    made = Rate()
    made.add(5, 0.0)
    assert made.per_s == 5e6
