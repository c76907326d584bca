"""What counts as a step, and what is to be done after it: no agent, no tensor, no loop."""

from __future__ import annotations

import pytest

from harness.ipc.control_page import AgentSide, Command, TrainerSide
from harness.trainer.boundary import Boundary, Decision
from harness.trainer.position import Position


class Loop:
    """A boundary, and the words of an agent."""

    def __init__(self, *, accumulate: int | None = None, sees_optimizers: bool = True) -> None:
        self.boundary = Boundary(accumulate=accumulate, sees_optimizers=sees_optimizers)
        self.agent, self.place = AgentSide.create(), Position()
        self.page = TrainerSide(self.agent.fd)
        self.sealed: int | None = None

    def batch(self, *, steps: bool = True) -> bool:
        """One batch, in which an optimizer steps; whether that was a step of ours."""
        self.boundary.optimizer_stepped |= steps
        if not self.boundary.ends_step(self.place):
            return False
        self.boundary.step += 1
        return True

    def looks(self) -> bool:
        return self.page.news != self.boundary.seen or self.boundary.step == self.boundary.next_due

    def decide(self) -> Decision:
        return self.boundary.decide(self.page.news, self.sealed)

    def carry_out(self, *, slot: bool = True, pending: bool = False) -> Decision:
        """Decide, and do it; without a slot, no snapshot can be taken."""
        decision = self.decide()
        taken = decision.saves and slot
        if taken and not pending:
            self.sealed = self.boundary.step
        self.boundary.done(self.page.news, decision, taken=taken, pending=pending)
        return decision


@pytest.fixture
def loop() -> Loop:
    made = Loop()
    made.boundary.rest()
    return made


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_a_batch_in_which_no_optimizer_steps_is_none(loop: Loop) -> None:
    assert [loop.batch(steps=steps) for steps in (True, False, True)] == [True, False, True]


def test_where_no_optimizer_is_known_each_batch_is_a_step() -> None:
    assert Loop(sees_optimizers=False).batch(steps=False)


def test_accumulation_counts_batches_whatever_steps() -> None:
    loop = Loop(accumulate=3)

    assert [loop.batch(steps=False) for _ in range(6)] == [False, False, True] * 2


@pytest.mark.parametrize(
    ("accumulate", "stepped", "step"), [(None, True, 1), (None, False, 0), (2, False, 0), (1, False, 1)]
)
def test_a_loop_that_is_broken_off_counts_the_step_that_was_made(
    accumulate: int | None, stepped: bool, step: int
) -> None:
    loop = Loop(accumulate=accumulate)
    loop.boundary.optimizer_stepped = stepped
    loop.boundary.broken_off(loop.place)

    assert loop.boundary.step == step


# ---- what is due ----------------------------------------------------------------------------------------------------


def test_a_normal_step_looks_at_nothing(loop: Loop) -> None:
    loop.batch()

    assert not loop.looks()


def test_a_word_of_the_agent_is_answered_once(loop: Loop) -> None:
    loop.agent.command(Command.SNAPSHOT)
    loop.batch()
    assert loop.looks()
    assert loop.carry_out() == Decision(saves=True, asked=True)

    loop.batch()
    assert not loop.looks()
    assert loop.decide() == Decision(), "it asks again only after a new seal"


def test_without_a_slot_it_is_tried_at_each_step_until_there_is_one(loop: Loop) -> None:
    loop.agent.command(Command.SNAPSHOT)
    loop.batch()
    loop.carry_out(slot=False)
    for _ in range(3):
        loop.batch()
        assert loop.looks()
        assert loop.carry_out(slot=False).saves
    loop.batch()
    loop.carry_out()
    loop.batch()

    assert loop.sealed == 5
    assert not loop.looks()


def test_what_is_asked_at_a_step_that_is_sealed_is_taken_at_the_next_one(loop: Loop) -> None:
    loop.batch()
    loop.sealed = 1
    loop.agent.command(Command.SNAPSHOT)
    loop.carry_out()
    loop.batch()

    assert loop.looks()
    assert loop.decide().saves


def test_every_so_many_steps_a_snapshot_is_due_without_a_word(loop: Loop) -> None:
    loop.boundary.every_steps = 3
    loop.boundary.look_soon()
    saved = []
    for _ in range(9):
        loop.batch()
        if loop.looks() and loop.carry_out().saves:
            saved.append(loop.boundary.step)

    assert saved == [3, 6, 9]


def test_a_rehearsal_looks_at_every_step_of_several_ranks_too(loop: Loop) -> None:
    loop.boundary.always = True
    looked = []
    for _ in range(3):
        loop.batch()
        looked.append(loop.looks())
        loop.boundary.attended(loop.page.news, None)

    assert looked == [False, True, True]  # the first one: whatever it is looked at for in a real run


def test_while_a_thread_copies_the_next_step_is_looked_at(loop: Loop) -> None:
    loop.agent.command(Command.SNAPSHOT)
    loop.batch()
    loop.carry_out(pending=True)
    loop.batch()

    assert loop.looks()


def test_a_snapshot_that_the_program_wants_is_taken_at_the_next_boundary_and_waited_for_once(loop: Loop) -> None:
    loop.boundary.want(wait=True)
    loop.batch()
    assert loop.carry_out() == Decision(saves=True, waits=True)
    loop.batch()

    assert loop.decide() == Decision()


def test_a_wish_to_wait_stands_until_it_is_taken(loop: Loop) -> None:
    loop.boundary.want(wait=True)
    loop.batch()
    loop.carry_out(slot=False)
    loop.batch()

    assert loop.decide() == Decision(saves=True, waits=True)


@pytest.mark.parametrize(("command", "saves"), [(Command.SNAPSHOT_AND_LEAVE, True), (Command.LEAVE, False)])
def test_who_is_to_leave_does_that_before_everything_else(loop: Loop, command: Command, saves: bool) -> None:
    loop.boundary.every_steps = 1
    loop.boundary.want(wait=True)
    loop.agent.command(command)
    loop.batch()

    assert loop.decide() == Decision(leaves=True, saves=saves)


def test_a_signal_has_the_next_boundary_looked_at_whatever_the_word_is(loop: Loop) -> None:
    loop.boundary.hurry()
    loop.batch()

    assert loop.looks()
