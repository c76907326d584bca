"""`python` for scripts/resume.sh: the real one, but that `harness resume` waits for less long than a test.

python -m tests.support.resume_run -P -m harness resume …       what the script starts
"""

from __future__ import annotations

import functools
import os
import sys

import harness.node.actions
import harness.node.fleet_reporter
import harness.node.main
import harness.node.platform
from harness.cli.app import main
from harness.node.supervisor import Limits
from tests.support import delays

LONGER = float(os.environ.get("HARNESS_TEST_LONGER", "10"))
"""Limits that a machine must not miss where it only stands still for a moment: so many times the real ones."""
LIMITS = Limits(margin_s=0.3, let_go_s=0.3, tick_s=0.05, back_off_s=0.1)


def as_python(arguments: list[str]) -> None:
    """`python -P -m harness …`, with other limits."""
    assert arguments[:3] == ["-P", "-m", "harness"]
    delays.install(delays.NODE)
    harness.node.main.resume = functools.partial(harness.node.main.resume, limits=LIMITS)  # type: ignore[assignment]
    harness.node.fleet_reporter.LOOK_S = harness.node.fleet_reporter.ASK_S = harness.node.actions.LOOK_AGAIN_S = 0.1
    harness.node.actions.ACT_S = float(os.environ.get("HARNESS_TEST_ACT_S", harness.node.actions.ACT_S))
    harness.node.actions.NOTIFY_S = min(harness.node.actions.ACT_S, harness.node.actions.NOTIFY_S)
    harness.node.main._LOOK_AGAIN_S = 0.1
    harness.node.platform.METADATA_S *= LONGER
    harness.node.main.PATIENT_S = harness.node.platform.PATIENT_S = LONGER * harness.node.platform.PATIENT_S
    sys.argv = ["harness", *arguments[3:]]
    main()


if __name__ == "__main__":
    as_python(sys.argv[1:])
