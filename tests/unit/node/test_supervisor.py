"""The loop of `harness resume`: each row of the table with its waits, and what must never cost the exit code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from cloud.errors import Denied, Unavailable
from harness.core.messages import RunState, Status
from harness.node.actions import Actions
from harness.node.attempts import Ended
from harness.node.context import Context
from harness.node.exit_policy import Where
from harness.node.fleet_reporter import FleetReporter
from harness.node.notices import Notices
from harness.node.platform import Platform
from harness.node.supervisor import Supervisor, Terms
from tests.support.clock import FakeClock
from tests.support.node import RUNNING, FakeFleet, FakeLife, FakeRuns, FakeSignals, FakeSource

KILLED = Ended(137, 9)


class Node:
    """Everything around one supervisor."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.fleet, self.source, self.signals = FakeFleet(), FakeSource(self.clock), FakeSignals(self.clock)
        self.said: list[str] = []
        self.status: Status | None = None
        self.requeues: list[str | None] = []

    def supervise(
        self,
        runs: FakeRuns,
        where: Where = Where.FLEET,
        *,
        hooked: bool = True,
        max_crashes: int = 3,
        anew: bool = False,
        requeue: Callable[[], str | None] = lambda: None,
    ) -> int:
        fleet: Any = self.fleet if where is Where.FLEET else None
        platform = Platform(where, "here", fleet, hooked=hooked, job="42")
        object.__setattr__(platform, "requeue", lambda: self.requeues.append(requeue()) or self.requeues[-1])
        announcements = Notices((self.source,), self.clock)
        signals: Any = self.signals
        context = Context("a", signals, self.said.append, self.clock)
        reporter = FleetReporter(context, fleet, announcements, lambda: self.status)
        actions = Actions(context, platform, 90.0)
        terms = Terms(where, max_crashes, anew)
        self.supervisor = Supervisor(context, terms, actions, runs, announcements, reporter)
        return self.supervisor.run()

    def actions(self) -> list[str]:
        return [name for name in self.fleet.names() if name != "measure"]


@pytest.fixture
def node() -> Node:
    return Node()


# ---- each row -------------------------------------------------------------------------------------------------------


def test_a_finished_run_ends_the_job_in_its_group(node: Node) -> None:
    assert node.supervise(FakeRuns(0)) == 0
    assert node.actions() == ["finish", "complete"]


@pytest.mark.parametrize("code", [64, 70, 1, 137])
def test_a_failed_run_stops_the_fleet_and_people_are_told_why(node: Node, code: int) -> None:
    assert node.supervise(FakeRuns(code)) == code
    assert node.actions() == ["stop", "notify", "complete"]
    (_, subject, text) = node.fleet.calls[-2]
    assert subject == "run a: the fleet is stopped"
    assert f"exit code {code}" in text


def test_a_superseded_run_leaves_and_the_group_keeps_its_size(node: Node) -> None:
    assert node.supervise(FakeRuns(73)) == 73
    assert node.actions() == ["leave", "complete"]


@pytest.mark.parametrize("code", [0, 64, 70, 73, 74, 75, 1, 137])
def test_elsewhere_the_code_is_all_that_happens(node: Node, code: int) -> None:
    runs = FakeRuns(code)

    assert node.supervise(runs, Where.ELSEWHERE) == code
    assert (runs.starts, node.fleet.calls) == ([False], [])


@pytest.mark.parametrize("code", [74, 75])
def test_an_interrupted_slurm_job_is_requeued(node: Node, code: int) -> None:
    assert node.supervise(FakeRuns(code), Where.SLURM) == code
    assert node.requeues == [None]


@pytest.mark.parametrize("code", [0, 73, 64])
def test_no_other_slurm_job_is(node: Node, code: int) -> None:
    assert node.supervise(FakeRuns(code), Where.SLURM) == code
    assert node.requeues == []


@pytest.mark.parametrize("code", [73, 74, 75])
def test_a_program_s_own_code_is_no_outcome_of_ours(node: Node, code: int) -> None:
    """It was started again, or left, for ever."""
    failed = Ended(code, outcome="failed")

    assert node.supervise(FakeRuns(failed), Where.SLURM) == code
    assert node.requeues == []

    assert node.supervise(FakeRuns(failed)) == code
    assert node.actions() == ["stop", "notify", "complete"]
    assert f"exit code {code} (of the program itself)" in node.fleet.calls[-2][2]


def test_a_run_that_its_program_stopped_early_ends_the_job(node: Node) -> None:
    assert node.supervise(FakeRuns(Ended(0, outcome="stopped early"))) == 0
    assert node.actions() == ["finish", "complete"]


def test_a_job_that_slurm_does_not_requeue_keeps_its_code(node: Node) -> None:
    assert node.supervise(FakeRuns(75), Where.SLURM, requeue=lambda: "scontrol: Invalid job id") == 75
    assert "could not be requeued: scontrol: Invalid job id" in node.said[-1]


def test_a_run_that_somebody_else_has_finished_ends_the_job_too(node: Node) -> None:
    runs = FakeRuns(64)
    runs.is_over = True

    assert node.supervise(runs) == 64
    assert node.actions() == ["finish", "complete"]


# ---- waiting for the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [74, 75])
def test_an_instance_that_outlives_its_notice_by_a_minute_trains_on(node: Node, code: int) -> None:
    began = node.clock()
    node.source.spot(ends_at=began + 100.0, until=began + 160.0)
    runs = FakeRuns(code, 0)

    assert node.supervise(runs) == 0
    assert len(runs.starts) == 2
    assert 160.0 <= node.clock() - began < 170.0


def test_an_instance_that_still_waits_for_its_end_does_not_train(node: Node) -> None:
    node.source.spot(ends_at=node.clock() + 100.0)
    node.signals.asked_at[node.clock() + 150.0] = signal.SIGTERM
    runs = FakeRuns(75)

    assert node.supervise(runs) == 75
    assert len(runs.starts) == 1
    assert node.actions() == []


def test_a_withdrawn_notice_ends_the_wait_at_once(node: Node) -> None:
    began = node.clock()
    node.source.spot(ends_at=began + 100.0, until=began + 20.0)
    runs = FakeRuns(75, 0)

    assert node.supervise(runs) == 0
    assert node.clock() - began < 25.0
    assert "the notice was withdrawn: starting again" in node.said


def test_a_notice_that_was_withdrawn_while_the_run_left_is_not_waited_for(node: Node) -> None:
    began = node.clock()
    node.source.spot(ends_at=began + 100.0, until=began + 1.0)

    assert node.supervise(FakeRuns(75, 0)) == 0
    assert node.clock() - began < 10.0


def test_without_a_notice_it_is_a_minute(node: Node) -> None:
    began = node.clock()

    assert node.supervise(FakeRuns(75, 0)) == 0
    assert 60.0 <= node.clock() - began < 70.0


def test_a_service_that_stops_answering_withdraws_nothing(node: Node) -> None:
    began = node.clock()
    node.source.spot(ends_at=began + 100.0)
    spot = node.source.announces
    node.source.announces = lambda now: spot(now) if now < began + 5 else Unavailable("down")

    assert node.supervise(FakeRuns(75, 0)) == 0
    assert node.clock() - began >= 160.0


def test_where_the_group_ends_the_instance_the_hook_is_completed_and_nothing_is_started(node: Node) -> None:
    node.source.group()
    runs = FakeRuns(75)

    assert node.supervise(runs) == 75
    assert node.actions() == ["heartbeat", "complete"]
    assert len(runs.starts) == 1


def test_a_group_that_decides_during_the_wait_is_let_go_of(node: Node) -> None:
    began = node.clock()
    node.source.spot(ends_at=began + 100.0)
    spot = node.source.announces
    group = FakeSource(node.clock)
    group.group()
    node.source.announces = lambda now: spot(now) if now < began + 30 else group.announces(now)

    assert node.supervise(FakeRuns(75)) == 75
    assert node.actions() == ["complete"]


def test_the_hook_is_completed_once_the_group_waits_for_it(node: Node) -> None:
    node.fleet.completes_at_try = 4

    assert node.supervise(FakeRuns(0)) == 0
    assert node.actions() == ["finish", *["complete"] * 4]


def test_a_group_that_never_waits_is_not_asked_for_ever(node: Node) -> None:
    node.fleet.completes_at_try = 10**6

    assert node.supervise(FakeRuns(0)) == 0
    assert 40 < node.fleet.names().count("complete") < 50


def test_without_a_hook_there_is_nothing_to_complete(node: Node) -> None:
    assert node.supervise(FakeRuns(0), hooked=False) == 0
    assert node.actions() == ["finish"]


# ---- told to leave --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_the_run_s_code_is_ours(node: Node, signum: int) -> None:
    node.signals.asked_at[node.clock() + 1.0] = signum
    runs = FakeRuns(75)
    runs.looks = 5

    assert node.supervise(runs) == 75
    assert node.signals.passed_on == [signum]
    assert node.actions() == []


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_who_is_told_to_leave_before_anything_was_started_starts_nothing(node: Node, signum: int, code: int) -> None:
    node.signals.asked = signum
    runs = FakeRuns()

    assert node.supervise(runs) == code
    assert runs.starts == []


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_who_dies_of_the_signal_itself_could_not_listen_yet_and_has_trained_nothing(
    node: Node, signum: int, code: int
) -> None:
    node.signals.asked_at[node.clock() + 1.0] = signum

    assert node.supervise(FakeRuns(Ended(128 + signum, signum)), Where.SLURM) == code
    assert node.requeues == ([] if signum == signal.SIGINT else [None])


@pytest.mark.parametrize(("at", "code"), [(0.0, 75), (2.5, 137)])
def test_a_slurm_job_that_is_told_to_leave_between_two_starts_is_requeued(node: Node, at: float, code: int) -> None:
    node.signals.asked_at[node.clock() + at] = signal.SIGTERM
    if not at:
        node.signals.asked = signal.SIGTERM
    runs = FakeRuns(KILLED)

    assert node.supervise(runs, Where.SLURM) == code
    assert node.requeues == [None]


def test_an_agent_that_dies_while_it_leaves_gives_no_reason_not_to_requeue(node: Node) -> None:
    node.signals.asked_at[node.clock() + 1.0] = signal.SIGTERM

    assert node.supervise(FakeRuns(KILLED), Where.SLURM) == 137
    assert node.requeues == [None]


def test_a_program_whose_agent_dies_while_it_leaves_is_not_abandoned(node: Node) -> None:
    node.signals.asked_at[node.clock() + 1.0] = signal.SIGTERM
    runs = FakeRuns(KILLED)
    seen, lives_on = FakeLife(KILLED), FakeLife(Ended(75), ours=False)
    runs.found = [None, seen, lives_on]

    assert node.supervise(runs) == 75
    assert (len(runs.starts), lives_on.closed) == (1, True)


# ---- agents that die ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", list(Where))
def test_a_dead_agent_is_started_again_with_back_off(node: Node, where: Where) -> None:
    began = node.clock()
    runs = FakeRuns(KILLED, KILLED, 0)

    assert node.supervise(runs, where) == 0
    assert len(runs.starts) == 3
    assert 3.0 <= node.clock() - began < 12.0, "1 and 2 seconds, and the lives"


@pytest.mark.parametrize("where", list(Where))
def test_after_n_deaths_without_progress_it_has_failed(node: Node, where: Where) -> None:
    runs = FakeRuns(*[KILLED] * 4)

    assert node.supervise(runs, where) == 137
    assert len(runs.starts) == 4
    assert node.actions() == (["stop", "notify", "complete"] if where is Where.FLEET else [])


def test_progress_in_the_store_forgives(node: Node) -> None:
    runs = FakeRuns(*[KILLED] * 10, 0)
    runs.durable = [10, 10, 10, 20, 20, 20, 30, 30, 30, 40]

    assert node.supervise(runs) == 0


def test_a_store_that_does_not_answer_is_no_progress(node: Node) -> None:
    runs = FakeRuns(*[KILLED] * 4)
    runs.durable = [10, None, None, None]

    assert node.supervise(runs) == 137


def test_an_interruption_clears_the_count(node: Node) -> None:
    assert node.supervise(FakeRuns(KILLED, KILLED, KILLED, 75, KILLED, KILLED, KILLED, 0)) == 0


def test_a_program_that_outlives_its_agent_is_waited_for_and_no_other_is_started(node: Node) -> None:
    runs = FakeRuns(KILLED)
    seen, lives_on = FakeLife(KILLED), FakeLife(Ended(0), ours=False)
    runs.found = [None, seen, lives_on]

    assert node.supervise(runs) == 0
    assert len(runs.starts) == 1
    assert (seen.closed, lives_on.closed) == (True, True)
    assert node.actions() == ["finish", "complete"]


def test_a_run_that_was_left_behind_here_is_waited_for_not_run_into(node: Node) -> None:
    runs = FakeRuns(0)
    runs.found = [FakeLife(Ended(None), ours=False)]  # it ended, and nothing says how

    assert node.supervise(runs) == 0
    assert runs.starts == [False]


@pytest.mark.parametrize(
    ("ends_by", "sent"),
    [(signal.SIGTERM, [signal.SIGTERM]), (signal.SIGKILL, [signal.SIGTERM, signal.SIGKILL])],
)
def test_a_watched_program_whose_agent_has_died_is_ended_and_started_again(
    node: Node, ends_by: signal.Signals, sent: list[signal.Signals]
) -> None:
    runs = FakeRuns(Ended(137, 9), 0)
    runs.ends_by = {ends_by}
    start = runs.start

    def leaves_an_orphan(*, anew: bool) -> FakeLife:
        runs.orphaned = [41] if not runs.starts else []
        return start(anew=anew)

    runs.start = leaves_an_orphan  # type: ignore[method-assign]
    assert node.supervise(runs) == 0
    assert runs.sent == [((41,), signum) for signum in sent]
    assert len(runs.starts) == 2
    assert "the program that it watched is ended, since nothing would save it: 41" in " ".join(node.said)


def test_what_an_earlier_supervisor_and_its_agent_have_left_is_ended_before_a_start(node: Node) -> None:
    runs = FakeRuns(0)
    runs.orphaned = [41]

    assert node.supervise(runs) == 0
    assert runs.sent == [((41,), signal.SIGTERM)]


def test_a_run_that_was_found_and_given_up_on_is_no_interruption(node: Node) -> None:
    runs = FakeRuns()
    runs.found = [FakeLife(Ended(None), ours=False)]

    assert node.supervise(runs, max_crashes=0) == 70
    assert node.actions() == ["stop", "notify", "complete"]


def test_a_run_that_was_started_here_at_the_same_moment_stops_no_fleet(node: Node) -> None:
    runs = FakeRuns(64)
    runs.found = [None, FakeLife(Ended(0), ours=False), FakeLife(Ended(73), ours=False)]

    assert node.supervise(runs) == 73
    assert node.actions() == ["leave", "complete"]


def test_ctrl_c_ends_the_wait_for_somebody_else_s_run_and_nothing_more(node: Node) -> None:
    runs = FakeRuns()
    runs.found = [FakeLife(Ended(0), looks=1000, ours=False)]
    node.signals.asked_at[node.clock() + 3.0] = signal.SIGINT

    assert node.supervise(runs, Where.ELSEWHERE) == 130
    assert runs.starts == []


# ---- fresh ----------------------------------------------------------------------------------------------------------


def test_a_run_begins_anew_once(node: Node) -> None:
    runs = FakeRuns(75, 0)

    node.supervise(runs, anew=True)

    assert runs.starts == [True, False]


def test_an_agent_that_died_after_its_claim_has_begun_anew_already(node: Node) -> None:
    node.status = replace(RUNNING, claimed=True)
    runs = FakeRuns(KILLED, 0)

    node.supervise(runs, anew=True)

    assert runs.starts == [True, False]


def test_an_agent_that_died_before_its_claim_has_not(node: Node) -> None:
    node.status = replace(RUNNING, claimed=False)
    runs = FakeRuns(KILLED, 0)

    node.supervise(runs, anew=True)

    assert runs.starts == [True, True]


# ---- a fleet that cannot be reached ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Denied("autoscaling:… is missing"), Unavailable("Throttling")])
@pytest.mark.parametrize(("code", "call"), [(0, "finish"), (73, "leave"), (64, "stop")])
def test_a_call_that_fails_costs_no_exit_code_and_people_are_told(
    node: Node, error: Denied | Unavailable, code: int, call: str
) -> None:
    node.fleet.failing = {call: error}

    assert node.supervise(FakeRuns(code)) == code
    assert str(error) in " ".join(node.said)
    (_, subject, text) = next(made for made in node.fleet.calls if made[0] == "notify")
    assert subject.startswith("run a: could not ")
    assert str(error) in text
    assert node.fleet.names().count("notify") == 1, "the fleet is not said to be stopped"


def test_nothing_that_fails_anywhere_costs_the_exit_code(node: Node) -> None:
    names = ("finish", "stop", "leave", "complete", "notify", "measure", "heartbeat", "protect")
    node.fleet.failing = {name: Denied(f"{name} is not allowed") for name in names}
    node.status = replace(RUNNING, state=RunState.DRAINING)

    assert node.supervise(FakeRuns(75, 70)) == 70
    assert "stop the fleet: stop is not allowed" in node.said


def test_a_watcher_with_a_bug_ends_no_training(node: Node) -> None:
    node.status = object()  # type: ignore[assignment]

    assert node.supervise(FakeRuns(0)) == 0
    assert any("AttributeError" in said for said in node.said)


# ---- loops between machines -----------------------------------------------------------------------------------------


def test_a_duel_stops_the_fleet(node: Node) -> None:
    runs = FakeRuns(73)
    runs.superseded_times = 4

    assert node.supervise(runs) == 73
    assert node.actions() == ["stop", "notify", "complete"]
    assert "start number 4 within an hour" in node.fleet.calls[-2][2]


def test_a_few_handovers_are_no_duel(node: Node) -> None:
    runs = FakeRuns(73)
    runs.superseded_times = 3

    node.supervise(runs)

    assert node.actions() == ["leave", "complete"]


def test_an_instance_that_the_group_replaces_fights_no_duel(node: Node) -> None:
    node.source.group()
    runs = FakeRuns(73)
    runs.superseded_times = 9

    node.supervise(runs)

    assert "stop" not in node.actions()


def test_an_instance_that_ends_before_it_was_in_service_is_given_up(node: Node) -> None:
    node.fleet.launching = True

    node.supervise(FakeRuns(0))

    assert node.actions() == ["finish", "abandon", "complete"]


# ---- the decision, by which whoever watches us tells an end from a death ---------------------------------------------


@pytest.mark.parametrize("code", [0, 64, 70, 73])
def test_an_end_after_which_nothing_is_left_to_do_is_a_decision(node: Node, code: int) -> None:
    node.supervise(FakeRuns(code))

    assert node.supervisor.decided


@pytest.mark.parametrize(("code", "call"), [(0, "finish"), (73, "leave"), (64, "stop")])
def test_a_fleet_that_could_not_be_told_is_none(node: Node, code: int, call: str) -> None:
    node.fleet.failing = {call: Unavailable("no answer")}

    node.supervise(FakeRuns(code))

    assert not node.supervisor.decided


def test_to_leave_when_told_is_one(node: Node) -> None:
    node.signals.asked = signal.SIGTERM

    node.supervise(FakeRuns())

    assert node.supervisor.decided


def test_a_supervisor_that_dies_has_decided_nothing(node: Node) -> None:
    class Broken(FakeRuns):
        def start(self, *, anew: bool) -> FakeLife:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        node.supervise(Broken())

    assert not node.supervisor.decided
