"""Two and three agents of one run at every interleaving: nothing durable is lost, no torn commit stays.

Every agent runs the real protocol against one remote store: claim, wait for the older ones, resume, publish, verify,
retire, sweep, hand over, end. A schedule says who makes the next call of the store, how much time passes before, and
what becomes of the call: it does not come through, its process dies with it, its reply is lost. An agent that is not
moved for long is one that was stopped, and wakes up late. At every moment:

    I1, I3   the shards that a manifest names are there *and stay there*. Only one who commits late while another
             deletes leaves a torn commit, until either has looked again; never the newest. It stays, and is passed
             over, where the one who was to look died, or where the request came when its sender had given up on it
    I2, I6   as in ProtocolStore; a good snapshot is deleted only if something newer was verified
    I4, I13  what an agent believed durable can be resumed by a newcomer, or something newer can
    I5       nobody commits under its own generation after its `done`; no resume point is fixed before every older
             generation has ended or was silent for long; after a handover it is the older one's last snapshot
    I9       claims are unique, and each is its claimant's
    I12      the newest good snapshot is never called damaged
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.core.snapshot import SnapshotId
from tests.support.agents import HOUR_S, WHOLE_LIST, Life, Move, Run
from tests.support.interleave import FATES

KINDS = (
    "put claim", "put shard", "put part", "put manifest", "read manifest", "delete manifest", "delete part",
    "delete shard", "put quarantine", "put done", "list generations", "list commits", "list snapshots", "pause", "end",
)  # fmt: skip
WHERE_IT_MATTERS = ("put part", "put manifest", "delete manifest", "delete part", "delete shard", "pause")
a_life = st.builds(
    Life,
    snapshots=st.integers(1, 3),
    keep_last=st.integers(1, 2),
    keep_every=st.none() | st.integers(1, 3),
    upkeep=st.sampled_from([True, True, True, False]),
    restarts=st.sampled_from([False, False, True]),
    same_host=st.booleans(),
    leaves=st.booleans(),
    clock_s=st.sampled_from([0.0, HOUR_S, -1e6]),
    wall_s=st.sampled_from([0.0, HOUR_S, -HOUR_S]),
)
a_move = st.builds(
    Move,
    who=st.sampled_from([0, 0, 1, 1, 2]),
    until=st.one_of(st.sampled_from(KINDS), st.sampled_from(WHERE_IT_MATTERS), st.integers(1, 12)),
    fate=st.sampled_from([*[""] * 24, "mute", "speak", "land", *FATES]),
    seconds=st.sampled_from([0.0, 0.0, 0.0, 5.0, 20.0, 60.0, HOUR_S]),
)
moves = st.lists(a_move, min_size=8, max_size=40)  # a list without a lower bound is a short one


@pytest.mark.long("200 schedules")
@settings(max_examples=2 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(
    lives=st.lists(a_life, min_size=2, max_size=3),
    page=st.sampled_from([WHOLE_LIST, 3, 1]),
    stops=st.booleans(),
    moves=moves,
)
def test_nothing_durable_is_lost_and_nothing_torn_stays(
    lives: list[Life], page: int, stops: bool, moves: list[Move]
) -> None:
    Run(lives, page, stops=stops).play(moves)


OLD, NEW = 0, 1
STOPPED_BEFORE_ITS_PART = [Move(OLD, "pause"), Move(OLD, "put part"), Move(OLD, fate="mute")]


def test_a_late_commit_of_what_a_newer_generation_has_swept_is_taken_back() -> None:
    run = Run([Life(), Life()])
    run.play([*STOPPED_BEFORE_ITS_PART, Move(NEW, "end"), Move(OLD, "end")])
    assert SnapshotId(1, 2) not in run.committed()


def test_a_commit_in_the_middle_of_the_sweep_is_taken_back_by_the_sweeper() -> None:
    run = Run([Life(), Life(keep_last=2)])
    run.play([*STOPPED_BEFORE_ITS_PART, Move(NEW, "delete shard"), Move(OLD, "pause"), Move(NEW, "end")])
    assert SnapshotId(1, 2) not in run.committed()


def test_what_is_finished_while_it_is_being_retired_goes_with_it() -> None:
    """The older one was stopped between its two listings, and takes what is being retired for the newest there is."""
    run = Run([Life(upkeep=False), Life()], stops=True)
    run.play([Move(OLD, "list snapshots"), Move(NEW, "delete part"), Move(OLD, "end")])
    assert SnapshotId(2, 1) not in run.committed()


def test_a_newcomer_resumes_what_the_older_one_made_durable_last_before_it_left() -> None:
    run = Run([Life(snapshots=9), Life()])
    run.play([Move(OLD, "pause"), Move(NEW, "pause"), Move(NEW, "pause")])
    assert run.agents[OLD].left == "superseded"
    assert run.agents[NEW].parent == str(max(name for name in run.promised if name.generation == 1))


def test_a_newcomer_waits_for_an_older_one_that_is_slow_and_heard() -> None:
    run = Run([Life(), Life()])
    with run.on_stage():
        for move in [Move(OLD, "put part"), *[Move(NEW, "pause", seconds=10.0)] * 30]:
            run.make(move)
        assert run.agents[NEW].parent is None
        assert not run.agents[NEW].actor.over


def test_a_newcomer_goes_on_without_an_older_one_that_is_not_heard_any_more() -> None:
    run = Run([Life(), Life()])
    with run.on_stage():
        for move in [*STOPPED_BEFORE_ITS_PART, Move(NEW, "put manifest")]:
            run.make(move)
        assert run.agents[NEW].parent == str(SnapshotId(1, 1))


calm = st.builds(
    Move,
    who=st.integers(0, 2),
    until=st.one_of(st.sampled_from([kind for kind in KINDS if kind != "end"]), st.integers(1, 12)),
    fate=st.sampled_from(["", "", "", "mute", "speak", "fail", "lose reply"]),
    seconds=st.sampled_from([0.0, 5.0, 60.0]),
)


@settings(max_examples=settings().max_examples // 4, suppress_health_check=[HealthCheck.too_slow])
@given(moves=st.lists(calm, max_size=20))
def test_of_several_that_were_started_by_mistake_the_newest_survives(moves: list[Move]) -> None:
    run = Run([Life(snapshots=1000, upkeep=False)] * 3)
    with run.on_stage():
        for move in moves:
            run.make(move)
        run.go_on(run.agents, rounds=15)
        alive = [agent for agent in run.agents if not agent.actor.over]
        assert [agent.generations[-1:] for agent in alive] == [[max(run.owners)]]
        assert all(agent.left == "superseded" for agent in run.agents if agent not in alive)


@settings(max_examples=settings().max_examples // 4, suppress_health_check=[HealthCheck.too_slow])
@given(lives=st.lists(a_life, min_size=2, max_size=2), moves=moves)
def test_clocks_that_are_apart_change_nothing(lives: list[Life], moves: list[Move]) -> None:
    traces = []
    for clocks_s in [(0.0, 0.0), (HOUR_S, -1e6)]:
        shifted = zip(lives, clocks_s, strict=True)
        run = Run([dataclasses.replace(life, clock_s=clock_s, wall_s=-clock_s) for life, clock_s in shifted])
        run.play(moves)
        traces.append(run.trace)
    assert traces[0] == traces[1]


def test_two_that_begin_a_run_at_the_same_moment_agree_which_run_it_is() -> None:
    run = Run([Life(), Life()], new_run_id=lambda number: f"{number + 1:032x}")
    run.play([Move(OLD, "put claim"), Move(NEW, "put claim")])
