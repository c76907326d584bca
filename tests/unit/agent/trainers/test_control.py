"""The agent's words of the control page, as a trainer reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.agent.save.pipeline import Steps
from harness.agent.save.slot_pool import SlotPool
from harness.agent.trainers.control import TrainerControl
from harness.ipc.control_page import NO_SLOT, AgentSide, Command, Request, TrainerSide, Word
from tests.support.protocol import SLOT_BYTES


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool()
    yield pool
    pool.close()


@pytest.fixture
def control(pool: SlotPool) -> TrainerControl:
    return TrainerControl(pool)


@pytest.fixture
def page(control: TrainerControl) -> Iterator[TrainerSide]:
    """The trainer's mapping of it."""
    page = TrainerSide(os.dup(control.page_fd))
    yield page
    page.close()


def lay_out(control: TrainerControl, pool: SlotPool, slot_bytes: int) -> int:
    """The trainer has a layout, and is told its one slot."""
    control.begin_layout(slot_bytes)
    wanted = pool.begin(slot_bytes, 1)
    (index,) = pool.finish(wanted, wanted.make())
    control.end_layout()
    return index


def word(page: TrainerSide, which: Word) -> tuple[int, int]:
    """Its value and its sequence number."""
    request = Request.decode(page.words[which])
    return request.value, request.sequence


def test_a_slot_is_granted_once_there_is_a_layout_and_stays_the_trainers(
    control: TrainerControl, page: TrainerSide, pool: SlotPool
) -> None:
    control.grant()
    assert word(page, Word.GRANT) == (0, 0)  # no word at all

    index = lay_out(control, pool, SLOT_BYTES)
    control.grant()

    granted = word(page, Word.GRANT)
    assert granted[0] == index
    assert pool.is_granted(index)
    control.grant()
    assert word(page, Word.GRANT) == granted  # no news


def test_a_new_layout_takes_back_what_was_granted_of_the_old_one(
    control: TrainerControl, page: TrainerSide, pool: SlotPool
) -> None:
    old = lay_out(control, pool, SLOT_BYTES)
    control.grant()

    control.begin_layout(2 * SLOT_BYTES)
    control.grant()  # slots that the trainer does not know yet are no slots to it
    assert word(page, Word.GRANT)[0] == NO_SLOT

    new = lay_out(control, pool, 2 * SLOT_BYTES)
    assert old not in pool
    control.grant()
    assert word(page, Word.GRANT)[0] == new


def test_a_seal_uses_the_grant_up_before_it_is_acknowledged(
    control: TrainerControl, page: TrainerSide, pool: SlotPool
) -> None:
    index = lay_out(control, pool, SLOT_BYTES)
    control.grant()

    control.acknowledge(7)

    assert page.words[Word.ACKED] == 7
    assert word(page, Word.GRANT)[0] == NO_SLOT
    assert not pool.is_granted(index)


def test_what_is_asked_is_news_once(control: TrainerControl, page: TrainerSide) -> None:
    control.command(Command.LEAVE)
    control.command(Command.LEAVE)
    assert word(page, Word.COMMAND) == (Command.LEAVE, 1)


def test_a_seal_answers_a_wish_for_a_snapshot_and_no_other(
    control: TrainerControl, page: TrainerSide, pool: SlotPool
) -> None:
    lay_out(control, pool, SLOT_BYTES)
    assert not control.may_ask  # nothing is granted
    control.grant()
    assert control.may_ask
    control.command(Command.SNAPSHOT)
    assert not control.may_ask

    control.answered()
    assert word(page, Word.COMMAND)[0] == Command.NOTHING

    control.command(Command.SNAPSHOT_AND_LEAVE)
    control.answered()
    assert word(page, Word.COMMAND)[0] == Command.SNAPSHOT_AND_LEAVE


def test_nothing_of_a_trainer_that_is_gone_is_left_to_the_next(
    control: TrainerControl, page: TrainerSide, pool: SlotPool
) -> None:
    index = lay_out(control, pool, SLOT_BYTES)
    control.grant()
    control.command(Command.SNAPSHOT)
    page.completed(12)

    control.forget()
    control.begin_again()

    assert control.trainer_step is None
    assert (control.layout_bytes, pool.is_granted(index)) == (None, False)
    assert (word(page, Word.COMMAND)[0], word(page, Word.GRANT)[0]) == (Command.NOTHING, NO_SLOT)


def test_the_page_of_a_live_trainer_is_gone_on_with(control: TrainerControl) -> None:
    """Its sequence numbers go on: what the dead agent had commanded and granted is void, and that is news."""
    dead = AgentSide.create()
    for _ in range(41):
        dead.command(Command.SNAPSHOT)
    for _ in range(8):
        dead.grant(3)
    theirs = TrainerSide(os.dup(dead.fd))
    theirs.completed(12)

    control.adopt(os.dup(theirs.fd))
    control.tell_steps(Steps(local=11, durable=None))

    assert control.trainer_step == 12
    assert (word(theirs, Word.COMMAND), word(theirs, Word.GRANT)) == ((Command.NOTHING, 42), (NO_SLOT, 9))
    assert (theirs.local_step, theirs.durable_step) == (11, None)
    theirs.close()
    dead.close()
