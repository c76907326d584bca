"""The small state of a rank is what differs from the first rank's, and comes back whole."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.small_state import join, split
from harness.errors import SnapshotCorrupt

NAMES = st.sampled_from(["step", "rng", "persistent", "loaders", "a"])
VALUES = st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
STATES = st.dictionaries(NAMES, VALUES) | st.just({"$": "dict", "items": []})
SMALL = st.builds(
    lambda fields, states: fields if states is None else fields | {"states": states},
    st.dictionaries(NAMES, VALUES),
    st.none() | STATES,
)


@given(SMALL, SMALL)
def test_what_is_split_is_joined_again(first: dict[str, object], other: dict[str, object]) -> None:
    mine, theirs = msgspec.json.encode(first), msgspec.json.encode(other)

    differing, lacks = split(mine, theirs)
    whole = join(mine, differing, lacks)

    assert msgspec.json.decode(whole) == other
    assert split(mine, whole) == (differing, lacks), "what was joined is stored as the same bytes again"


def test_equal_states_take_no_room() -> None:
    first = {"step": 7, "states": {"model": {"w": 1}, "loader": 3}, "rng": "a"}
    other = {"step": 7, "states": {"model": {"w": 1}, "loader": 4}, "rng": "b"}

    differing, lacks = split(msgspec.json.encode(first), msgspec.json.encode(other))

    assert msgspec.json.decode(differing) == {"states": {"loader": 4}, "rng": "b"}
    assert lacks == ()


def test_what_a_rank_lacks_is_named() -> None:
    first = {"step": 7, "persistent": ["a"], "states": {"model": 1, "ema": 2, "persistent": 3}}
    other = {"step": 7, "states": {"model": 1, "persistent": 3}}

    differing, lacks = split(msgspec.json.encode(first), msgspec.json.encode(other))

    assert lacks == ("persistent", "states/ema")
    assert msgspec.json.decode(join(msgspec.json.encode(first), differing, lacks)) == other


@pytest.mark.parametrize("state", [b"[]", b"", b"{", b'"a"', b"\xff"])
def test_anything_else_is_corrupt(state: bytes) -> None:
    with pytest.raises(SnapshotCorrupt):
        split(b"{}", state)
