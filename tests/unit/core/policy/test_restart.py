from __future__ import annotations

import pytest

from harness.core.policy.restart import GiveUp, Restart, after_crash


@pytest.mark.parametrize(
    ("crashes", "progressed", "connected", "decision"),
    [
        (0, False, True, Restart(1.0, 1)),
        (1, False, True, Restart(2.0, 2)),
        (2, False, True, Restart(4.0, 3)),
        (3, False, True, GiveUp(4)),
        (3, True, True, Restart(1.0, 1)),
        (0, False, False, GiveUp(1)),
        (2, True, False, GiveUp(3)),
    ],
)
def test_crashes_without_progress_are_forgiven_so_often(
    crashes: int, progressed: bool, connected: bool, decision: Restart | GiveUp
) -> None:
    assert after_crash(crashes=crashes, progressed=progressed, connected=connected, max_crashes=3) == decision


def test_none_forgiven_means_none() -> None:
    assert after_crash(crashes=0, progressed=False, connected=True, max_crashes=0) == GiveUp(1)


def test_the_pause_before_a_restart_is_capped() -> None:
    found = after_crash(crashes=50, progressed=False, connected=True, max_crashes=100)

    assert found == Restart(60.0, 51)
