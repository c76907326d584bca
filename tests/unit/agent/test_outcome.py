from __future__ import annotations

from pathlib import Path

from harness.agent.outcome import read_outcome, write_outcome
from harness.core.policy.end import Outcome
from harness.ipc.runtime_dir import RuntimeDir


def test_an_outcome_is_recorded_for_one_process(tmp_path: Path) -> None:
    runtime_dir = RuntimeDir(tmp_path)
    assert read_outcome(runtime_dir, 7) is None
    write_outcome(runtime_dir, 7, Outcome("failed", 75))
    assert (read_outcome(runtime_dir, 7), read_outcome(runtime_dir, 8)) == ("failed", None)
    runtime_dir.outcome.write_text("[]")
    assert read_outcome(runtime_dir, 7) is None
