"""The words between two steps: who writes them, and what the other side makes of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.policy.meeting import Hold, Place, Where
from harness.ipc.control_page import AgentSide, Command, Request, Said, TrainerSide, Word
from tests.support.forks import seen_in_a_fork


@pytest.fixture
def agent() -> Iterator[AgentSide]:
    page = AgentSide.create()
    yield page
    page.close()
    page.close()


@pytest.fixture
def trainer(agent: AgentSide) -> Iterator[TrainerSide]:
    page = TrainerSide(os.dup(agent.fd))
    yield page
    page.close()


@given(st.sampled_from(list(Command)), st.integers(0, 2**56 - 1))
def test_a_request_survives_its_word(command: Command, sequence: int) -> None:
    word = Request(command, sequence).encode()

    assert 0 <= word < 2**64
    assert Request.decode(word) == Request(command, sequence)
    assert Command.of(word) is command


def test_the_words_are_pinned() -> None:
    assert {word.name: word.value for word in Word} == {
        "COMMAND": 0, "GRANT": 1, "AT_STEP": 2, "LOCAL_STEP": 3, "DURABLE_STEP": 4, "DEADLINE_NS": 5, "ACKED": 6,
        "VOID": 7, "TRAINER_STEP": 8, "HOLD": 9, "SET_STEP": 10, "AT_PLACE": 11,
    }  # fmt: skip
    assert {command.name: command.value for command in Command} == {
        "NOTHING": 0, "SNAPSHOT": 1, "SNAPSHOT_AND_LEAVE": 2, "LEAVE": 3, "SNAPSHOT_AND_COMPARE": 4,
    }  # fmt: skip


# ---- several ranks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        Place(0),
        Place(1, Where.FIRST),
        *(Place(10**12 - 2, Where.AFTER, passed) for passed in (0, 1, 127)),
    ],
)
def test_an_agreed_place_belongs_to_one_command(agent: AgentSide, trainer: TrainerSide, place: Place) -> None:
    """A rank that sees a later command must not take the earlier one's place for its own."""
    agent.command(Command.SNAPSHOT)
    first = trainer.news
    assert trainer.agreed(first) is None
    agent.agree(place)
    assert trainer.agreed(first) == place

    agent.command(Command.SNAPSHOT)

    assert trainer.agreed(trainer.news) is None


def test_what_a_rank_has_said_may_count_for_the_next_command_until_it_takes_it_back(
    agent: AgentSide, trainer: TrainerSide
) -> None:
    agent.command(Command.SNAPSHOT_AND_LEAVE)
    said_of = trainer.news
    trainer.say(said_of, Hold.HOLDS)

    agent.command(Command.SNAPSHOT_AND_LEAVE, keeps_word=True)
    assert agent.said.hold is Hold.HOLDS
    trainer.say(said_of, Hold.NONE)
    assert agent.said.hold is Hold.NONE
    trainer.say(said_of, Hold.HOLDS)
    agent.command(Command.SNAPSHOT_AND_LEAVE)
    assert agent.said.hold is Hold.NONE


def test_a_command_for_a_step_has_it_from_the_first_look(agent: AgentSide, trainer: TrainerSide) -> None:
    agent.command(Command.SNAPSHOT, at=Place(20))
    assert trainer.agreed(trainer.news) == Place(20)


def test_half_a_place_is_none(agent: AgentSide, trainer: TrainerSide) -> None:
    """The two words of a place may be seen in any order."""
    agent.command(Command.SNAPSHOT, at=Place(20, Where.AFTER, 2))
    before = agent.words[Word.AT_STEP], agent.words[Word.AT_PLACE]
    agent.command(Command.SNAPSHOT, at=Place(21))
    after = agent.words[Word.AT_STEP], agent.words[Word.AT_PLACE]

    for agent.words[Word.AT_STEP], agent.words[Word.AT_PLACE] in ((before[0], after[1]), (after[0], before[1])):
        assert trainer.agreed(trainer.news) is None


@pytest.mark.parametrize(("passed", "read"), [(0, 0), (127, 127), (128, 127)])
@pytest.mark.parametrize("entering", [False, True])
@pytest.mark.parametrize("hold", Hold)
def test_what_a_rank_says_is_about_one_command(
    agent: AgentSide, trainer: TrainerSide, hold: Hold, entering: bool, passed: int, read: int
) -> None:
    agent.command(Command.SNAPSHOT)
    assert agent.said.hold is Hold.NONE
    trainer.say(trainer.news, hold, entering=entering, passed=passed)
    assert agent.said == Said(agent.asked, hold, entering, read)

    agent.command(Command.SNAPSHOT_AND_LEAVE)

    assert agent.said.hold is Hold.NONE


@pytest.mark.parametrize("step", [None, 0, 1, 10**12])
def test_a_step_knows_none_from_0(agent: AgentSide, trainer: TrainerSide, step: int | None) -> None:
    agent.tell_steps(local=None, durable=step)
    assert (trainer.local_step, trainer.durable_step) == (None, step)

    if step is not None:
        trainer.completed(step)
    assert agent.trainer_step == step
    agent.forget_step()
    assert agent.trainer_step is None


def test_a_command_is_news_each_time_it_is_written(agent: AgentSide, trainer: TrainerSide) -> None:
    seen = [trainer.news]
    for command in (Command.SNAPSHOT, Command.NOTHING, Command.SNAPSHOT):
        agent.command(command)
        assert trainer.command is command
        assert trainer.completed(1) == trainer.news
        seen.append(trainer.news)

    assert len(set(seen)) == len(seen)


def test_a_grant_counts_once_and_only_if_it_was_written_after_the_last_seal(
    agent: AgentSide, trainer: TrainerSide
) -> None:
    assert trainer.granted(used=0, sealed=0) is None  # no grant at all
    agent.grant(7)
    first = trainer.granted(used=0, sealed=0)
    assert first is not None
    assert first.value == 7
    assert trainer.granted(used=first.sequence, sealed=0) is None
    assert trainer.granted(used=0, sealed=1) is None, "it may be for the slot that the agent is about to read"

    agent.grant(None)
    agent.acknowledge(1)
    assert trainer.granted(used=first.sequence, sealed=1) is None
    agent.grant(7)
    second = trainer.granted(used=first.sequence, sealed=1)
    assert second is not None
    assert (second.value, second.sequence > first.sequence) == (7, True)


def test_time_is_up_once_a_deadline_that_was_told_has_passed(agent: AgentSide, trainer: TrainerSide) -> None:
    assert not trainer.time_is_up
    agent.tell_deadline(1e9)  # in decades
    assert not trainer.time_is_up
    agent.tell_deadline(1e-9)
    assert trainer.time_is_up


def test_a_page_that_no_agent_has_commands_nothing_and_a_fork_may_use_it() -> None:
    page = TrainerSide(None)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if page.completed(3) == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (page.command, page.granted(0, 0), page.time_is_up) == (Command.NOTHING, None, False)
    page.close()


def test_a_forked_worker_does_not_see_the_page(agent: AgentSide) -> None:
    assert "harness-control" in Path("/proc/self/maps").read_text()
    assert not seen_in_a_fork("harness-control")
