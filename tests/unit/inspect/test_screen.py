"""One screen answers: is it safe, is it moving, what would a notice cost now?"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.core.messages import Forecast, RankStatus, RunState, Status
from harness.inspect.screen import screen

LIVE = Status(
    run="gpt", store="s3://bucket/x", local="/nvme", state=RunState.RUNNING, generation=3, run_id="r", claimed=True,
    step=12_345, step_age_s=0.4, local_step=12_300, durable_step=12_000, durable_age_s=41.0, bytes_copied=0,
    bytes_pending=0, estimate_s=None, deadline_s=None, notice=Forecast(120.0, 12.4, 0), finished_step=None,
    everything_durable=False, restarts=0, restart=None, unreachable=(), agent_pid=41, trainer_pid=42,
).fields()  # fmt: skip
STORED: dict[str, Any] = {
    "run": "gpt", "store": "/store", "state": "finished", "generation": 3, "step": 200, "local_step": None,
    "durable_step": 200, "latest": "x", "snapshots": 3, "quarantined": 0, "restart": None, "ended_at": "2026-11-25",
}  # fmt: skip


def shown(found: dict[str, Any], **changed: object) -> dict[str, str]:
    return dict(screen({**found, **changed}, None))


def test_a_run_that_is_well() -> None:
    assert screen(LIVE, "group: desired capacity 1, instances 1") == [
        ("run", "gpt is running on this machine (start 3, process 42)"),
        ("safe", "step 12 000 is durable, committed 41 s ago; step 12 300 is on this machine's disk"),
        ("moving", "step 12 345, reached 0.4 s ago"),
        ("notice", "of 120 s would cost nothing: saving takes 12 s"),
        ("store", "s3://bucket/x, local tier /nvme"),
        ("fleet", "group: desired capacity 1, instances 1"),
    ]


def test_why_what_a_program_has_written_is_not_saved() -> None:
    assert (
        shown(LIVE, unsaved="last.pt is cut off: it is not saved")["unsaved"] == "last.pt is cut off: it is not saved"
    )


def test_a_notice_that_would_cost_something() -> None:
    assert shown(LIVE, notice={"in_s": 120.0, "needs_s": 140.0, "lost_steps": 1345})["notice"] == (
        "of 120 s would cost 1 345 steps: saving takes 2.3 min"
    )


def test_a_notice_that_is_in_force() -> None:
    assert shown(LIVE, deadline_s=93.0, notice=None)["notice"] == "in force: its deadline is in 93 s"


def test_what_is_still_to_be_sent() -> None:
    assert shown(LIVE, bytes_pending=1_200_000_000, estimate_s=6.2)["saving"] == (
        "1.2 GB are still to be sent to the store, about 6.2 s"
    )


def test_nothing_is_safe_before_something_is_durable() -> None:
    first = shown(LIVE, durable_step=None, durable_age_s=None)

    assert first["safe"] == "nothing is durable yet; step 12 300 is on this machine's disk"
    assert shown(LIVE, durable_step=None, durable_age_s=None, local_step=None)["safe"] == "nothing is durable yet"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"step": None, "step_age_s": None}, "not yet: the training loop has not begun"),
        ({"step_age_s": 300.0}, "step 12 345, reached 5.0 min ago (does a step take this long?)"),
        ({"restarts": 2}, "step 12 345, reached 0.4 s ago; restarted in place 2 times"),
        ({"finished_step": 12_345}, "no: the last loop ended at step 12 345"),
    ],
)
def test_whether_it_is_moving(changed: dict[str, object], words: str) -> None:
    assert shown(LIVE, **changed)["moving"] == words


def rank(number: int, step: int | None = 7, *, pid: int | None = 41, late: bool = False) -> dict[str, Any]:
    return msgspec.to_builtins(RankStatus(number, pid, step, 63.0, waits=False, late=late))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([rank(0), rank(1)], "2, all at step 7"),
        ([rank(0, 1200), rank(1, 1199), rank(2, 1201)], "3, at steps 1 199 to 1 201"),
        ([rank(0), rank(1, 6, late=True)], "2, at steps 6 to 7; rank 1 is late: at step 6 for 63 s"),
        ([rank(0), rank(1, None)], "2; 1 of them are in their loops"),
        ([rank(0), rank(1, pid=None), rank(2, pid=None)], "3; not connected: 1, 2"),
    ],
)
def test_where_several_ranks_are(ranks: list[dict[str, Any]], words: str) -> None:
    assert shown(LIVE, ranks=ranks)["ranks"] == words
    assert "ranks" not in shown(LIVE, ranks=[])


def test_a_source_of_notices_that_does_not_answer_is_named() -> None:
    assert "ec2 does not answer: a notice could be missed" in shown(LIVE, unreachable=["ec2"])["notice"]
    assert "does not answer" not in shown(LIVE)["notice"]


def test_a_run_that_has_ended() -> None:
    assert screen(STORED, None) == [
        ("run", "gpt: finished (start 3, 2026-11-25)"),
        ("safe", "step 200 is durable (3 snapshots)"),
        ("store", "/store"),
    ]


def test_a_run_whose_end_nobody_saw_says_how_far_it_was() -> None:
    rows = shown(STORED, state="not running here", step=230, quarantined=1, ended_at=None)

    assert rows["safe"] == "step 200 is durable (3 snapshots, 1 quarantined)"
    assert rows["moving"] == "step 230 is the last one in its journal"
