"""The agent's words of the control page, as a trainer reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.agent.asking import Asking
from harness.agent.memory import SlotPool
from harness.agent.saves import Steps
from harness.ipc.slots import NO_SLOT, Ask, ControlPage, Request, Word
from tests.support.protocol import SLOT_BYTES


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool()
    yield pool
    pool.close()


@pytest.fixture
def asking(pool: SlotPool) -> Asking:
    return Asking(pool)


@pytest.fixture
def page(asking: Asking) -> Iterator[ControlPage]:
    """The trainer's mapping of it."""
    page = ControlPage(os.dup(asking.page_fd))
    yield page
    page.close()


def lay_out(asking: Asking, pool: SlotPool, slot_bytes: int) -> int:
    """The trainer has a layout, and is told its one slot."""
    asking.begin_layout(slot_bytes)
    wanted = pool.begin(slot_bytes, 1)
    (index,) = pool.finish(wanted, wanted.make())
    asking.end_layout()
    return index


def word(page: ControlPage, which: Word) -> tuple[int, int]:
    """Its value and its sequence number."""
    request = Request.decode(page.words[which])
    return request.value, request.sequence


def test_a_slot_is_granted_once_there_is_a_layout_and_stays_the_trainers(
    asking: Asking, page: ControlPage, pool: SlotPool
) -> None:
    asking.grant()
    assert word(page, Word.GRANT) == (0, 0)  # no word at all

    index = lay_out(asking, pool, SLOT_BYTES)
    asking.grant()

    granted = word(page, Word.GRANT)
    assert granted[0] == index
    assert pool.is_granted(index)
    asking.grant()
    assert word(page, Word.GRANT) == granted  # no news


def test_a_new_layout_takes_back_what_was_granted_of_the_old_one(
    asking: Asking, page: ControlPage, pool: SlotPool
) -> None:
    old = lay_out(asking, pool, SLOT_BYTES)
    asking.grant()

    asking.begin_layout(2 * SLOT_BYTES)
    asking.grant()  # slots that the trainer does not know yet are no slots to it
    assert word(page, Word.GRANT)[0] == NO_SLOT

    new = lay_out(asking, pool, 2 * SLOT_BYTES)
    assert old not in pool
    asking.grant()
    assert word(page, Word.GRANT)[0] == new


def test_a_seal_uses_the_grant_up_before_it_is_acknowledged(asking: Asking, page: ControlPage, pool: SlotPool) -> None:
    index = lay_out(asking, pool, SLOT_BYTES)
    asking.grant()

    asking.acknowledge(7)

    assert page.words[Word.TAKEN] == 7
    assert word(page, Word.GRANT)[0] == NO_SLOT
    assert not pool.is_granted(index)


def test_what_is_asked_is_news_once(asking: Asking, page: ControlPage) -> None:
    asking.ask(Ask.LEAVE)
    asking.ask(Ask.LEAVE)
    assert word(page, Word.ASK) == (Ask.LEAVE, 1)


def test_a_seal_answers_a_wish_for_a_snapshot_and_no_other(asking: Asking, page: ControlPage, pool: SlotPool) -> None:
    lay_out(asking, pool, SLOT_BYTES)
    assert not asking.may_ask  # nothing is granted
    asking.grant()
    assert asking.may_ask
    asking.reasons.add("save")
    asking.ask(Ask.SNAPSHOT)
    assert not asking.may_ask

    asking.answered()
    assert (word(page, Word.ASK)[0], asking.reasons) == (Ask.NOTHING, set())

    asking.ask(Ask.SNAPSHOT_AND_LEAVE)
    asking.answered()
    assert word(page, Word.ASK)[0] == Ask.SNAPSHOT_AND_LEAVE


def test_nothing_of_a_trainer_that_is_gone_is_left_to_the_next(
    asking: Asking, page: ControlPage, pool: SlotPool
) -> None:
    index = lay_out(asking, pool, SLOT_BYTES)
    asking.grant()
    asking.reasons.add("save")
    asking.ask(Ask.SNAPSHOT)
    page.words[Word.TRAINER_STEP] = 12

    asking.forget()
    asking.begin_again()

    assert asking.trainer_step is None
    assert (asking.reasons, asking.layout_bytes, pool.is_granted(index)) == (set(), None, False)
    assert (word(page, Word.ASK)[0], word(page, Word.GRANT)[0]) == (Ask.NOTHING, NO_SLOT)


def test_the_page_of_a_live_trainer_is_gone_on_with_and_tells_it_the_new_agent(asking: Asking) -> None:
    """Its sequence numbers go on: what the dead agent had asked and granted is void, and that is news."""
    theirs = ControlPage.create()
    theirs.words[Word.ASK] = Request(Ask.SNAPSHOT, 41).encode()
    theirs.words[Word.GRANT] = Request(3, 8).encode()
    theirs.words[Word.TRAINER_STEP] = 12 + 1

    asking.adopt(os.dup(theirs.fd), pid=4711)
    asking.tell_steps(Steps(local=11, durable=None))

    assert asking.trainer_step == 12
    assert theirs.words[Word.AGENT_PID] == 4711
    assert (word(theirs, Word.ASK), word(theirs, Word.GRANT)) == ((Ask.NOTHING, 42), (NO_SLOT, 9))
    assert (theirs.step_or_none(Word.LOCAL_STEP), theirs.step_or_none(Word.DURABLE_STEP)) == (11, None)
    theirs.close()
