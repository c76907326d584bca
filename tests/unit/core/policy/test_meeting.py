"""All ranks seal the same step, or say why not, in whatever order they and the agent come to act."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.policy.meeting import Hold, Move, Place, Uneven, View, Where, agree, is_void, move


@dataclass
class Words:
    """A rank's page: one writer for each word."""

    step: int = 0
    ask: int = 0
    at: tuple[int, Place] | None = None  # of which ask, and the place
    said: tuple[int, Hold, bool, int] = (0, Hold.NONE, False, 0)  # and whether it enters a validation, and how many


@dataclass
class PlayedRank:
    """A rank that trains by itself, and meets when it is asked.

    A step is a string of places: `b` its boundary, `v` the entry of a validation, which is over at the next place.
    """

    words: Words
    end: int
    leaves: bool = False
    places: str = "b"
    looks_late: bool = (
        False  # not at a validation before the boundary, as in the body of a loop, unless it has to leave
    )
    sealed: list[tuple[int, str]] = field(default_factory=list)  # a step, and the places of it that were still to come
    holding: bool = False
    at: int = 0

    @property
    def here(self) -> str:
        return "e" if self.over else self.places[self.at]

    @property
    def over(self) -> bool:
        return self.words.step == self.end and self.at == len(self.places)

    @property
    def passed(self) -> int:
        return self.places[: self.at].count("v")

    def _go(self) -> None:
        if self.over:
            return
        self.at += 1
        if self.at == len(self.places) and self.words.step < self.end:
            self.words.step, self.at = self.words.step + 1, 0

    def act(self) -> None:
        """Go to the next place unless it holds; then look, as at every place."""
        words = self.words
        if not self.holding:
            self._go()
        is_early = self.here == "v" and "b" in self.places[self.at :]
        if words.ask == 0 or (self.looks_late and not self.leaves and is_early):
            self.holding = False
            return
        agreed = words.at[1] if words.at is not None and words.at[0] == words.ask else None
        sealed = self.sealed[-1][0] if self.sealed else None
        enters = self.here == "v"
        done = move(
            words.step,
            agreed,
            sealed,
            last=self.over,
            leaves=self.leaves,
            entering=enters,
            passed=self.passed,
        )
        hold = Hold.NONE
        match done:
            case Move.HOLD:
                hold = Hold.LAST if self.over else Hold.HOLDS
            case Move.SEAL:
                self.sealed.append((words.step, self.places[self.at :]))
            case Move.PASS:
                hold = Hold.PASSED
        self.holding = done is Move.HOLD or (done is Move.SEAL and self.leaves)
        words.said = (words.ask, hold, enters, self.passed)


class PlayedAgent:
    """Asks once, and again if it must. Each `act` touches one word of one rank."""

    def __init__(self, ranks: list[Words], *, leaves: bool = False) -> None:
        self.ranks, self.leaves = ranks, leaves
        self.ask = 0
        self.asks = 0
        self.agreed: Place | None = None
        self._todo: list[Words] = []
        self._begin()

    def _begin(self) -> None:
        self.ask += 1
        self.asks += 1
        self.agreed = None
        self._todo = list(self.ranks)

    def act(self) -> None:
        if self.agreed is None:
            if self._todo:
                self._todo.pop().ask = self.ask
                return
            self.agreed = agree(self._views(), sealed=None, leaves=self.leaves)
            self._todo = list(self.ranks)
            return
        if self._todo:
            words = self._todo.pop()
            words.at = (self.ask, self.agreed)
            return
        if is_void(self._views(), self.agreed.step):
            self._begin()

    def _views(self) -> list[View]:
        return [
            View(words.step, words.said[1], entering=words.said[2], passed=words.said[3])
            if words.said[0] == self.ask
            else View(words.step)
            for words in self.ranks
        ]


def let_all_act(agent: PlayedAgent, ranks: list[PlayedRank], *, rounds: int) -> None:
    """Give everybody their turn, until nothing changes any more; or as many rounds, if that is sooner."""

    def situation() -> tuple[object, ...]:
        of_ranks = [(rank.at, rank.holding, len(rank.sealed), *vars(rank.words).values()) for rank in ranks]
        return agent.ask, agent.agreed, len(agent._todo), *of_ranks

    before = None
    for _ in range(rounds):
        now = situation()
        if now == before:
            return
        before = now
        for actor in (agent, *ranks):
            actor.act()


@given(
    starts=st.lists(st.integers(0, 1000), min_size=2, max_size=5),
    turns=st.lists(st.integers(0, 5), max_size=400),
    leaves=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_all_ranks_seal_one_step_however_far_they_are_apart(
    starts: list[int], turns: list[int], *, leaves: bool
) -> None:
    ranks = [PlayedRank(Words(step=start), end=100_000, leaves=leaves) for start in starts]
    agent = PlayedAgent([rank.words for rank in ranks], leaves=leaves)
    actors = [agent, *ranks]

    for turn in turns:
        actors[turn % len(actors)].act()
    for _ in range(3 * (max(starts) + len(turns)) + 100):  # from here on everybody gets their turn
        for actor in actors:
            actor.act()
        if all(rank.sealed for rank in ranks):
            break

    assert len({tuple(rank.sealed) for rank in ranks}) == 1, [rank.sealed for rank in ranks]
    assert len(ranks[0].sealed) == 1
    assert not leaves or len({rank.words.step for rank in ranks}) == 1, "nobody leaves before all have sealed it"
    assert agent.asks == 1, "whoever has seen the ask holds: nobody passes the step"


@given(starts=st.lists(st.integers(0, 50), min_size=2, max_size=5), turns=st.lists(st.integers(0, 5), max_size=200))
@settings(deadline=None, max_examples=200)
def test_ranks_that_make_their_last_step_seal_it(starts: list[int], turns: list[int]) -> None:
    end = max(starts)
    ranks = [PlayedRank(Words(step=start), end=end) for start in starts]
    agent = PlayedAgent([rank.words for rank in ranks])
    actors = [agent, *ranks]

    for turn in turns:
        actors[turn % len(actors)].act()
    let_all_act(agent, ranks, rounds=4 * end + 100)

    sealed = [rank.sealed[-1][0] for rank in ranks if rank.sealed]
    assert set(sealed) <= {end}
    assert not sealed or len(sealed) == len(ranks)


@given(
    places=st.sampled_from(["vb", "bv", "vbv", "bvv", "vvb", "vvbvv"]),
    validate=st.sampled_from(["all", "all", "rank 0"]),
    starts=st.lists(st.integers(0, 20), min_size=2, max_size=4),
    more=st.integers(0, 3),
    turns=st.lists(st.integers(0, 4), max_size=300),
    leaves=st.booleans(),
    looks_late=st.booleans(),
)
@settings(deadline=None, max_examples=1000)
def test_ranks_do_not_part_over_a_validation(
    places: str,
    validate: str,
    starts: list[int],
    more: int,
    turns: list[int],
    *,
    leaves: bool,
    looks_late: bool,
) -> None:
    """One that repeats a validation after a resume, while the others do not, waits in its collectives for ever."""
    end = max(starts) + more
    ranks = [
        PlayedRank(
            Words(step=start),
            end=end,
            leaves=leaves,
            places=places if validate == "all" or number == 0 else "b",
            looks_late=looks_late,
        )
        for number, start in enumerate(starts)
    ]
    agent = PlayedAgent([rank.words for rank in ranks], leaves=leaves)
    actors = [agent, *ranks]

    for turn in turns:
        actors[turn % len(actors)].act()
    let_all_act(agent, ranks, rounds=20 * (end + 1) + 200)

    assert all(rank.sealed for rank in ranks), "the set is complete"
    last = [rank.sealed[-1] for rank in ranks if rank.places == places]
    assert len({rank.sealed[-1][0] for rank in ranks}) == 1, last
    assert len({ahead.count("v") for _, ahead in last}) == 1, last


# ---- leaving where all stand ----------------------------------------------------------------------------------------

LEAVE = -1


@dataclass
class StandingRank:
    """A rank at a boundary whose step is sealed. Each `yield` is a moment at which others may act."""

    words: Words = field(default_factory=Words)
    ended: str = ""

    def run(self) -> Iterator[None]:
        words = self.words
        while not self.ended:
            ask = words.ask
            yield
            at = words.at
            yield
            if ask == LEAVE:
                self.ended = "left"
            elif at is None or at[0] != ask:
                words.said = (ask, Hold.HOLDS, False, 0)
            else:
                words.said = (ask, Hold.NONE, False, 0)
                yield
                if words.ask == ask:
                    self.ended = "went on"
            yield


def standing_agent(ranks: list[StandingRank]) -> Iterator[None]:
    """As `harness/agent/trainers/meeting.py`: have all leave where they stand, or go on, but never some of them."""
    ask, kept, agreed = 1, 1, False

    def write(value: int) -> Iterator[None]:
        for rank in ranks:
            rank.words.ask = value
            yield

    yield from write(ask)
    while not all(rank.ended for rank in ranks):
        stand = []
        for rank in ranks:
            of, said, *_ = rank.words.said
            stand.append(of in (ask, kept) and said is Hold.HOLDS)
            yield
        if all(stand) and agreed:
            ask, kept, agreed = ask + 1, ask, False
            yield from write(ask)
        elif all(stand):
            yield from write(LEAVE)
            return
        elif not agreed:
            agreed = True
            for rank in ranks:
                rank.words.at = (ask, Place(8))
                yield


@given(turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=5, max_size=20))
@settings(deadline=None, max_examples=1000)
def test_all_leave_where_they_stand_or_all_go_on(turns: list[tuple[int, int]]) -> None:
    """One that goes on while others leave hangs in a collective without them."""
    ranks = [StandingRank() for _ in range(2)]
    actors = [standing_agent(ranks), *(rank.run() for rank in ranks)]

    for who, moments in turns:
        for _ in range(moments):
            next(actors[who], None)
    for _ in range(100):
        for actor in actors:
            next(actor, None)

    assert len({rank.ended for rank in ranks}) == 1, [rank.ended for rank in ranks]
    assert ranks[0].ended


# ---- one decision ---------------------------------------------------------------------------------------------------


def test_a_rank_before_its_loop_is_waited_for() -> None:
    assert agree([View(3), View(None)], sealed=None, leaves=False) is None


def test_ranks_that_all_stand_at_a_step_seal_that_one_unless_it_is_sealed() -> None:
    """All have entered a validation: there is no later boundary for minutes."""
    stand = [View(7, Hold.HOLDS, entering=True), View(7, Hold.HOLDS, entering=True)]

    assert agree(stand, sealed=5, leaves=False) == Place(7, Where.AFTER, 0)
    assert agree(stand, sealed=7, leaves=False) == Place(8)
    assert agree([View(7, Hold.HOLDS), View(7)], sealed=5, leaves=False) == Place(8)


def test_a_rank_before_a_validation_goes_on_to_one_that_is_behind_it() -> None:
    """The one has waited for the others in vain, and entered alone: nothing in the validation made it wait."""
    apart = [View(7, Hold.HOLDS, entering=True), View(7, Hold.HOLDS, passed=1)]

    agreed = agree(apart, sealed=5, leaves=False)

    assert agreed == Place(7, Where.AFTER, 1)
    assert move(7, agreed, 5, last=False, leaves=False, entering=True) is Move.GO_ON
    assert move(7, agreed, 5, last=False, leaves=False, passed=1) is Move.SEAL
    assert move(8, agreed, 5, last=False, leaves=False) is Move.PASS


def test_a_rank_that_is_behind_the_validation_that_all_were_to_save_before_says_so() -> None:
    agreed = Place(7, Where.AFTER, 0)

    assert move(7, agreed, 5, last=False, leaves=False, passed=1) is Move.PASS
    assert move(7, agreed, 5, last=True, leaves=False, passed=1) is Move.PASS


def test_ranks_at_one_boundary_seal_it_though_one_has_validated_alone() -> None:
    agreed = agree([View(7, Hold.HOLDS, passed=1), View(7, Hold.HOLDS)], sealed=5, leaves=True)

    assert agreed == Place(7)
    assert {move(7, agreed, 5, last=False, leaves=True, passed=passed) for passed in (0, 1)} == {Move.SEAL}


def test_before_all_leave_a_snapshot_is_not_left_for_after_a_validation() -> None:
    for leaves, done in ((True, Move.SEAL), (False, Move.GO_ON)):
        agreed = agree([View(7), View(6)], sealed=5, leaves=leaves)
        assert agreed is not None
        assert agreed.step == 8
        assert move(8, agreed, 5, last=False, leaves=leaves, entering=True) is done


def test_a_step_that_a_rank_has_passed_or_will_not_come_to_is_void() -> None:
    assert is_void([View(7, Hold.HOLDS), View(9, Hold.PASSED)], agreed=8)
    assert is_void([View(7, Hold.LAST), View(7)], agreed=8)
    assert is_void([View(7, at_end=True), View(7)], agreed=8)
    assert not is_void([View(8, Hold.LAST), View(7)], agreed=8)


def test_loops_of_different_lengths_are_named() -> None:
    with pytest.raises(Uneven, match="different steps: 7, 9"):
        agree([View(7, Hold.LAST), View(9, Hold.HOLDS)], sealed=None, leaves=False)
    assert agree([View(7, Hold.LAST), View(5)], sealed=None, leaves=False) == Place(7, Where.AFTER, 0)
