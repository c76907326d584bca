"""All ranks seal the same step, or say why not, in whatever order they and the agent come to act."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.policy.meeting import Hold, Move, Uneven, View, agree, is_void, move


@dataclass
class Words:
    """A rank's page: one writer for each word."""

    step: int = 0
    ask: int = 0
    at: tuple[int, int] | None = None  # of which ask, and the step
    said: tuple[int, Hold] = (0, Hold.NONE)


@dataclass
class PlayedRank:
    """A rank that trains by itself, and meets when it is asked. `train` is one step; `look` is its boundary."""

    words: Words
    end: int
    leaves: bool = False
    sealed: list[int] = field(default_factory=list)
    holding: bool = False

    @property
    def over(self) -> bool:
        return self.words.step == self.end

    def act(self) -> None:
        """Make the next step unless it holds; then look, as at every boundary."""
        words = self.words
        if not self.holding and not self.over:
            words.step += 1
        if words.ask == 0:
            self.holding = False
            return
        agreed = words.at[1] if words.at is not None and words.at[0] == words.ask else None
        match move(words.step, agreed, self.sealed[-1] if self.sealed else None, last=self.over, leaves=self.leaves):
            case Move.HOLD:
                self.holding, words.said = True, (words.ask, Hold.LAST if self.over else Hold.HOLDS)
            case Move.GO_ON:
                self.holding, words.said = False, (words.ask, Hold.NONE)
            case Move.SEAL:
                self.sealed.append(words.step)
                self.holding, words.said = self.leaves, (words.ask, Hold.NONE)
            case Move.PASS:
                self.holding, words.said = False, (words.ask, Hold.PASSED)


class PlayedAgent:
    """Asks once, and again if it must. Each `act` touches one word of one rank."""

    def __init__(self, ranks: list[Words]) -> None:
        self.ranks = ranks
        self.ask = 0
        self.asks = 0
        self.agreed: int | None = None
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
            self.agreed = agree(self._views(), sealed=None)
            self._todo = list(self.ranks)
            return
        if self._todo:
            words = self._todo.pop()
            words.at = (self.ask, self.agreed or 0)
            return
        if is_void(self._views(), self.agreed or 0):
            self._begin()

    def _views(self) -> list[View]:
        return [View(w.step, w.said[1] if w.said[0] == self.ask else Hold.NONE) for w in self.ranks]


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
    agent = PlayedAgent([rank.words for rank in ranks])
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
    for _ in range(4 * end + 100):
        for actor in actors:
            actor.act()

    sealed = [rank.sealed[-1] for rank in ranks if rank.sealed]
    assert set(sealed) <= {end}
    assert not sealed or len(sealed) == len(ranks)


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
                words.said = (ask, Hold.HOLDS)
            else:
                words.said = (ask, Hold.NONE)
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
            of, said = rank.words.said
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
                rank.words.at = (ask, 8)
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
    assert agree([View(3), View(None)], sealed=None) is None


def test_ranks_that_all_stand_at_a_step_seal_that_one_unless_it_is_sealed() -> None:
    """All have entered a validation: there is no later boundary for minutes."""
    stand = [View(7, Hold.HOLDS), View(7, Hold.HOLDS)]

    assert agree(stand, sealed=5) == 7
    assert agree(stand, sealed=7) == 8
    assert agree([View(7, Hold.HOLDS), View(7)], sealed=5) == 8


def test_a_step_that_a_rank_has_passed_or_will_not_come_to_is_void() -> None:
    assert is_void([View(7, Hold.HOLDS), View(9, Hold.PASSED)], agreed=8)
    assert is_void([View(7, Hold.LAST), View(7)], agreed=8)
    assert is_void([View(7, at_end=True), View(7)], agreed=8)
    assert not is_void([View(8, Hold.LAST), View(7)], agreed=8)


def test_loops_of_different_lengths_are_named() -> None:
    with pytest.raises(Uneven, match="different steps: 7, 9"):
        agree([View(7, Hold.LAST), View(9, Hold.HOLDS)], sealed=None)
    assert agree([View(7, Hold.LAST), View(5)], sealed=None) == 7
