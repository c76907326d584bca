"""What several ranks hold: who stores what, and what a comparison changes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from harness.agent.trainers.holdings import Difference, Holdings
from harness.core.manifest import StoredPiece
from harness.core.messages import HeldTensor, Holds, Rows, Stores
from harness.core.pieces import label
from harness.errors import StateError
from harness.ipc.slots import SlotRecord

FORMS = {"w": (4, 2), "v": (4, 2), "b": (3,)}


def shared(name: str, rows: int = 4, *, group: int | None = None) -> HeldTensor:
    return HeldTensor(name, "F32", (rows, 2), "shared", group=group)


def shard(name: str, offset: int, rows: int, whole: int = 4) -> HeldTensor:
    return HeldTensor(name, "F32", (rows, 2), "shared", (whole, 2), (offset, 0))


def other(name: str, how: str) -> HeldTensor:
    return HeldTensor(name, "F32", (3,), how)


def told(*tables: list[HeldTensor], number: int = 1, groups: tuple[tuple[int, ...], ...] = ()) -> Holdings:
    holdings = Holdings()
    for rank, table in enumerate(tables):
        holdings.tell(rank, Holds(tuple(table), number, groups))
    return holdings


def test_nothing_is_assigned_before_all_ranks_have_told() -> None:
    holdings = told([shared("w")])
    assert holdings.news(2) == {}
    holdings.tell(1, Holds((shared("w"),), 7))

    news = holdings.news(2)
    assert [news[rank].rows for rank in range(2)] == [(Rows("w", 0, 2),), (Rows("w", 2, 4),)]
    assert [news[rank].number for rank in range(2)] == [1, 7]
    assert (news[0].compared, news[0].kept_equal) == ((), ("w",))


def test_what_has_not_changed_is_no_news() -> None:
    holdings = told([shared("w"), other("own", "own")], [shared("w")])
    assert len(holdings.news(2)) == 2
    assert holdings.news(2) == {}

    holdings.tell(0, Holds((shared("w"),), 2))

    news = holdings.news(2)
    assert news[0] == Stores((Rows("w", 0, 2),), (), (), ("w",), 2, holdings.assignment)
    assert set(news) == {0, 1}, "the other one stores less now"


def test_an_assignment_is_named_by_what_is_stored() -> None:
    holdings = told([shared("w")], [shared("w")])
    assert holdings.assignment == ""
    stores = holdings.news(2)
    before = holdings.assignment
    assert {one.assignment for one in stores.values()} == {before}
    assert before != ""

    holdings.tell(0, Holds((shared("w"), other("own", "own")), 2))
    holdings.news(2)
    assert holdings.assignment != before

    again = told([shared("w")], [shared("w")])
    again.news(2)
    assert again.assignment == before, "to another agent as well"


def test_tables_of_different_steps_are_told_again_and_fit_then() -> None:
    holdings = told([shard("w", 0, 2), shard("grad", 0, 2)], [shard("w", 2, 2)])
    assert holdings.news(2) == {}
    assert holdings.take_wanted()
    assert not holdings.take_wanted(), "asked once"

    holdings.tell(0, Holds((shard("w", 0, 2),), 2))
    assert len(holdings.news(2)) == 2, "it fits as soon as it does"


def test_a_rank_whose_old_table_fitted_again_is_asked_when_it_does_not_any_more() -> None:
    """It has no reason of its own to tell it again."""
    holdings = told([shard("w", 0, 2), shard("grad", 0, 2)], [shard("w", 2, 2)])
    holdings.news(2)
    holdings.take_wanted()
    holdings.tell(1, Holds((shard("w", 2, 2), shard("grad", 2, 2)), 2))
    assert len(holdings.news(2)) == 2

    holdings.tell(1, Holds((shard("w", 2, 2),), 3))
    assert holdings.news(2) == {}
    assert holdings.take_wanted()


def test_tables_that_never_fit_are_an_error_that_names_the_tensor() -> None:
    tables = [[shard("w", 0, 2)], [shard("w", 1, 2)]]
    holdings = told(*tables)
    for number in (2, 3):
        assert holdings.news(2) == {}
        assert holdings.take_wanted()
        holdings.tell(0, Holds(tuple(tables[0]), number))
        assert holdings.news(2) == {}
        assert not holdings.take_wanted(), "the other one has yet to tell"
        holdings.tell(1, Holds(tuple(tables[1]), number))
    with pytest.raises(StateError, match=r"^w: .*overlaps"):
        holdings.news(2)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ([shared("v", group=0)], r"^w: .*\[4, 2\] on rank 0 and missing on rank 1"),
        ([shared("w", 5, group=0)], r"^w: .*\[4, 2\] on rank 0 and F32 \[5, 2\] on rank 1"),
        ([], "^w: .*missing on rank 1"),
    ],
)
def test_ranks_that_keep_other_parameters_equal_are_named(second: list[HeldTensor], what: str) -> None:
    holdings = told([shared("w", group=0)], second, groups=((0, 1),))
    for number in (2, 3):
        assert holdings.news(2) == {}
        holdings.tell(0, Holds((shared("w", group=0),), number, ((0, 1),)))
        holdings.tell(1, Holds(tuple(second), number, ((0, 1),)))
    with pytest.raises(StateError, match=what):
        holdings.news(2)


def test_two_groups_may_have_different_parameters() -> None:
    groups = ((0, 1), (2, 3))
    first, second = [shared("a", group=0)], [shared("b", group=1)]
    assert len(told(first, first, second, second, groups=groups).news(4)) == 4


def judged(holdings: Holdings, *sums: dict[str, int], own: tuple[str, ...] = ()) -> tuple[list[Difference], bool]:
    """What follows from a snapshot in which each rank tells these sums, and stores `own` for itself alone."""
    pieces = {name: StoredPiece(own=True) for name in own}
    return holdings.judge(
        [
            SlotRecord(
                step=1,
                rank=rank,
                world_size=len(sums),
                generation=1,
                shards=(),
                state="{}",
                environment={},
                sealed_at="",
                pieces=pieces,
                sums={label(name, None, FORMS[name]): value for name, value in told.items()},
            )
            for rank, told in enumerate(sums)
        ]
    )


def test_what_may_be_equal_is_shared_once_it_was_found_to_be() -> None:
    holdings = told([other("b", "maybe")], [other("b", "maybe")])
    assert [stores.own for stores in holdings.news(2).values()] == [("b",), ("b",)]

    assert judged(holdings, {"b": 5}, {"b": 5}, own=("b",)) == ([], True)

    news = holdings.news(2)
    assert [stores.rows for stores in news.values()] == [(Rows("b", 0, 2),), (Rows("b", 2, 3),)]
    assert (news[0].compared, news[0].kept_equal) == (("b",), ()), "in every snapshot"
    assert judged(holdings, {"b": 5}, {"b": 6}) == ([Difference("b", (1,))], True)
    assert [stores.own for stores in holdings.news(2).values()] == [("b",), ("b",)]


def test_what_may_be_equal_and_is_not_is_no_difference() -> None:
    holdings = told([other("b", "maybe")], [other("b", "maybe")])
    holdings.news(2)
    assert judged(holdings, {"b": 5}, {"b": 6}, own=("b",)) == ([], True)
    assert holdings.news(2)[0].compared == (), "it is not looked at again"


def test_what_may_be_equal_for_one_rank_is_compared_in_every_snapshot() -> None:
    news = told([shared("w")], [replace(shared("w"), how="maybe")]).news(2)
    assert [(stores.compared, stores.kept_equal) for stores in news.values()] == [(("w",), ())] * 2


def test_what_has_got_another_shape_on_one_rank_is_each_rank_s_own() -> None:
    holdings = told([other("b", "maybe")], [other("b", "maybe")])
    holdings.news(2)
    judged(holdings, {"b": 5}, {"b": 5}, own=("b",))

    holdings.tell(1, Holds((replace(other("b", "maybe"), shape=(4,)),), 2))

    assert [stores.own for stores in holdings.news(2).values()] == [("b",), ("b",)]


def test_what_was_said_to_be_equal_and_is_not_is_each_rank_s_own_from_now_on() -> None:
    holdings = told(*[[shared("w"), shared("v")]] * 3)
    holdings.news(3)

    assert judged(holdings, {"w": 1, "v": 2}, {"w": 1, "v": 2}, {"w": 4, "v": 2}) == ([Difference("w", (2,))], True)

    assert all(stores.own == ("w",) and stores.kept_equal == ("v",) for stores in holdings.news(3).values())


def test_a_rank_that_has_nothing_in_common_does_not_keep_others_from_being_compared() -> None:
    holdings = told([shared("w")], [shared("w")], [other("own", "own")])
    holdings.news(3)
    assert judged(holdings, {"w": 1}, {"w": 2}, {}) == ([Difference("w", (1,))], True)


def test_what_only_some_ranks_have_compared_is_not_known_to_be_equal() -> None:
    """An agent that died may not have told all of them to."""
    holdings = told(*[[other("b", "maybe")]] * 3)
    holdings.news(3)
    assert judged(holdings, {"b": 5}, {"b": 5}, {}, own=("b",)) == ([], False)
    assert judged(holdings, {"b": 5}, {"b": 6}, {}) == ([Difference("b", (1,))], True), "and shows if it is not"


def test_what_a_wrapper_keeps_equal_is_compared_twice_at_first_and_seldom_later() -> None:
    holdings = told([shared("w")], [shared("w")])
    compared = []
    for _ in range(34):
        compared.append(holdings.compares)
        judged(holdings, *([{"w": 1}, {"w": 1}] if holdings.compares else [{}, {}]))
    assert [number for number, is_due in enumerate(compared) if is_due] == [0, 1, 16, 32]


def test_a_snapshot_that_should_have_been_compared_and_was_not_does_not_count() -> None:
    holdings = told([shared("w")], [shared("w")])
    judged(holdings, {"w": 1}, {"w": 1})
    judged(holdings, {}, {})
    assert holdings.compares
