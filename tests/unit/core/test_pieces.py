"""Who stores what: every element once, evenly, whatever the order in which the ranks are told."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.pieces import Held, Holding, Piece, assign, balance
from harness.errors import StateError

SHAPES = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 9), st.sampled_from(["BF16", "F32", "F64"])), min_size=1, max_size=20
)


def whole(name: str, shape: tuple[int, ...], dtype: str = "F32") -> Piece:
    return Piece(name, (0,) * len(shape), shape, shape, dtype)


def box(name: str, offset: tuple[int, ...], shape: tuple[int, ...], of: tuple[int, ...]) -> Piece:
    return Piece(name, offset, shape, of, "F32")


def shared(*pieces: Piece) -> list[Held]:
    return [Held(piece, Holding.SHARED) for piece in pieces]


def elements(piece: Piece) -> set[tuple[int, ...]]:
    spans = [range(begin, begin + count) for begin, count in zip(piece.offset, piece.shape, strict=True)]
    return set(itertools.product(*spans))


def assert_each_element_once(stored: list[list[Piece]], of: list[Piece]) -> None:
    for tensor in {piece.name: piece for piece in of}.values():
        found = [one for pieces in stored for piece in pieces if piece.name == tensor.name for one in elements(piece)]
        assert sorted(found) == sorted(elements(whole(tensor.name, tensor.whole)))


@given(world=st.integers(1, 8), shapes=SHAPES)
@settings(deadline=None)
def test_what_all_hold_is_stored_once_and_evenly(world: int, shapes: list[tuple[int, int, str]]) -> None:
    tensors = [whole(f"t{number}", (rows, width), size) for number, (rows, width, size) in enumerate(shapes)]

    stored = assign([shared(*tensors)] * world)

    assert_each_element_once(stored, tensors)
    assert {piece.name for pieces in stored for piece in pieces} == {tensor.name for tensor in tensors}
    total, row = sum(tensor.bytes for tensor in tensors), max(tensor.row_bytes for tensor in tensors)
    assert all(total / world - row <= mine <= total / world + row for mine in balance(stored).values())


@given(world=st.integers(2, 6), shapes=SHAPES, seed=st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_the_tables_does_not_matter(world: int, shapes: list[tuple[int, int, str]], seed: object) -> None:
    tensors = shared(*(whole(f"t{number}", (rows, width), size) for number, (rows, width, size) in enumerate(shapes)))
    mixed = [list(tensors) for _ in range(world)]
    for table in mixed:
        seed.shuffle(table)  # type: ignore[attr-defined]

    assert assign(mixed) == assign([tensors] * world)


def test_a_shard_is_stored_by_its_holder_and_evens_out_what_all_hold() -> None:
    """Rank 0 holds nine of ten rows of a DTensor, and both hold a tensor of twelve."""
    first, second = box("w", (0, 0), (9, 4), (10, 4)), box("w", (9, 0), (1, 4), (10, 4))
    norm = whole("norm", (12, 4))

    stored = assign([shared(first, norm), shared(second, norm)])

    assert_each_element_once(stored, [first, norm])
    assert balance(stored) == {0: 11 * 16, 1: 11 * 16}


def test_replicas_of_shards_are_shared_out_among_their_holders() -> None:
    """Two groups of two, as HSDP has them: no placement is needed to see it."""
    upper, lower = box("w", (0, 0), (4, 8), (8, 8)), box("w", (4, 0), (4, 8), (8, 8))

    stored = assign([shared(upper), shared(lower), shared(upper), shared(lower)])

    assert_each_element_once(stored, [upper])
    assert set(balance(stored).values()) == {2 * 8 * 4}


def test_uneven_and_empty_shards_and_scalars() -> None:
    """Ten rows on 2 x 2: 3, 2, 3, 2; a rank with none; a step that all have."""
    rows = [(0, 3), (3, 2), (5, 3), (8, 2)]
    tables = [shared(box("w", (at, 0), (count, 2), (10, 2)), whole("step", ())) for at, count in rows]
    tables.append(shared(box("w", (10, 0), (0, 2), (10, 2)), whole("step", ())))

    stored = assign(tables)

    assert_each_element_once(stored, [whole("w", (10, 2)), whole("step", ())])


def test_what_is_a_rank_s_own_is_stored_by_each() -> None:
    mean = Held(whole("running_mean", (8,)), Holding.OWN)

    assert assign([[mean], [mean]]) == [[mean.piece], [mean.piece]]


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ([shared(whole("w", (4, 2))), shared(whole("w", (4, 3)))], "w: its ranks do not have the same tensor"),
        (
            [shared(box("w", (0,), (3,), (5,))), shared(box("w", (2,), (3,), (5,)))],
            "w: what its ranks hold of it overlaps",
        ),
        ([shared(box("w", (0,), (2,), (5,))), shared(box("w", (3,), (2,), (5,)))], "or leaves some of it out"),
        ([shared(box("w", (0,), (2,), (4,))), shared(box("w", (0,), (2,), (4,)))], "or leaves some of it out"),
    ],
)
def test_pieces_that_do_not_make_the_tensor_are_refused_by_its_name(tables: list[list[Held]], why: str) -> None:
    with pytest.raises(StateError, match=why):
        assign(tables)
