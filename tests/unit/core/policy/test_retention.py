from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.policy.retention import retain
from harness.core.snapshot import SnapshotId


def ids(*names: str) -> list[SnapshotId]:
    return [SnapshotId(*map(int, name.split("-"))) for name in names]


FIVE = ids("1-10", "1-20", "2-15", "2-25", "3-26")


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "verified", "pinned", "doomed"),
    [
        (1, None, [], [], []),
        (1, None, ["3-26"], [], ["1-10", "1-20", "2-15", "2-25"]),
        (2, None, ["3-26"], [], ["1-10", "1-20", "2-15"]),
        (9, None, ["3-26"], [], []),
        (1, None, ["2-15"], [], ["1-10", "1-20"]),
        (1, None, ["1-10"], [], []),
        (1, 10, ["3-26"], [], ["2-15", "2-25"]),
        (1, None, ["3-26"], ["1-10"], ["1-20", "2-15", "2-25"]),
        (1, None, ["9-99"], [], []),
    ],
)
def test_what_may_go(
    keep_last: int, keep_every: int | None, verified: list[str], pinned: list[str], doomed: list[str]
) -> None:
    found = retain(FIVE, keep_last=keep_last, keep_every=keep_every, verified=ids(*verified), pinned=ids(*pinned))

    assert found == ids(*doomed)


def test_step_0_is_no_milestone() -> None:
    assert retain(ids("1-0", "1-1"), keep_last=1, keep_every=10, verified=ids("1-1")) == ids("1-0")


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        retain(FIVE, keep_last=0, keep_every=None, verified=FIVE)


some_ids = st.sets(st.builds(SnapshotId, st.integers(1, 4), st.integers(0, 30)), max_size=12)


@given(some_ids, st.integers(1, 5), st.none() | st.integers(1, 10), some_ids, some_ids)
def test_the_newest_verified_one_and_everything_newer_always_stays(
    committed: set[SnapshotId],
    keep_last: int,
    keep_every: int | None,
    verified: set[SnapshotId],
    pinned: set[SnapshotId],
) -> None:
    doomed = retain(list(committed), keep_last=keep_last, keep_every=keep_every, verified=verified, pinned=pinned)

    assert doomed == sorted(doomed)
    assert set(doomed) <= committed - pinned - set(sorted(committed)[-keep_last:])
    good = committed & verified
    assert not doomed or max(doomed) < max(good)
    assert not keep_every or not any(doom.step and doom.step % keep_every == 0 for doom in doomed)


@given(some_ids, st.integers(1, 5), some_ids)
def test_retiring_twice_retires_nothing_more(
    committed: set[SnapshotId], keep_last: int, verified: set[SnapshotId]
) -> None:
    doomed = retain(list(committed), keep_last=keep_last, keep_every=None, verified=verified)
    left = committed - set(doomed)

    assert retain(list(left), keep_last=keep_last, keep_every=None, verified=verified & left) == []
