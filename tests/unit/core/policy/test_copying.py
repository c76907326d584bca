from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st

from harness.core.policy.copying import Copied, Rates, copy_patience_s, should_probe

GB = 10**9


@pytest.mark.parametrize(("copying_s", "pays", "needs_s"), [(3.0, True, 5.0), (8.0, True, 10.0), (40.0, False, 10.0)])
def test_what_a_store_copies_more_slowly_than_we_send_is_sent_where_time_counts(
    copying_s: float, pays: bool, needs_s: float
) -> None:
    """A snapshot that would have fitted was given up, or was late, for copies that saved nothing but traffic."""
    rates = Rates(store_bytes_s=GB, copied=Copied(8 * GB, copying_s))

    assert rates.copies_pay is pays
    assert rates.send_s(10 * GB) == needs_s


def test_a_store_that_has_copied_nothing_yet_is_asked_to() -> None:
    """A notice after the first snapshot of a run: of the second one 95 % are there."""
    assert Rates().copies_pay
    assert Rates(store_bytes_s=GB, copied=Copied(0, 0.1)).copies_pay


rates = st.none() | st.floats(1e-3, 1e12)


@pytest.mark.parametrize(
    ("in_vain", "passed", "looks"),
    [(0, 0, True), (2, 0, True), (3, 0, False), (3, 14, False), (3, 15, True), (1000, 14, False), (1000, 15, True)],
)
def test_where_nothing_was_ever_found_it_is_rarely_looked(in_vain: int, passed: int, looks: bool) -> None:
    assert should_probe(in_vain, passed) is looks


def test_a_copy_has_as_long_as_sending_would_take_and_half_of_the_time_at_most() -> None:
    assert copy_patience_s(0, math.inf) == 10.0
    assert copy_patience_s(GB, math.inf) == 30.0
    assert copy_patience_s(GB, 40.0) == 20.0


def test_what_was_copied_of_a_larger_snapshot_makes_no_plan_shorter_than_nothing() -> None:
    assert Rates(store_bytes_s=GB, copied=Copied(10 * GB, 1.0)).send_s(GB) == 1.0
