"""What a snapshot of Lightning's fit has beside tensors. Whole trainings are tests/integrations."""

from __future__ import annotations

import copy
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from harness.integrations.lightning_progress import with_paths, without_paths

STRINGS = st.sampled_from(["", "min", "val/loss", "/a/last.ckpt", "/a/b/epoch=1.ckpt", "/"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), STRINGS),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(STRINGS, inner),
        st.dictionaries(STRINGS, inner).map(OrderedDict),
    ),
)


@given(VALUES)
def test_paths_that_are_taken_out_come_back(value: object) -> None:
    paths = list[str]()
    before = copy.deepcopy(value)
    without = without_paths(value, paths)
    assert value == before
    assert not any(path in repr(without) for path in paths if len(path) > 1)
    found = with_paths(without, paths)
    assert (found, repr(found)) == (value, repr(value))


def test_the_paths_of_a_model_checkpoint_are_taken_out_of_keys_and_values() -> None:
    paths = list[str]()
    state = {"monitor": "val/loss", "best": "/run/best.ckpt", "kept": {"/run/best.ckpt": 1.0, "/run/last.ckpt": 2.0}}
    without = without_paths(state, paths)
    assert paths == ["/run/best.ckpt", "/run/last.ckpt"]
    other = without_paths({**state, "best": "/x/best.ckpt", "kept": {"/x/best.ckpt": 1.0, "/x/last.ckpt": 2.0}}, [])
    assert without == other
