"""The outcome of a run here, in a file for the process that started its agent: the exit code does not tell it."""

from __future__ import annotations

import json

from harness.core.policy.end import Outcome
from harness.ipc.runtime_dir import RuntimeDir


def write_outcome(runtime_dir: RuntimeDir, pid: int, outcome: Outcome) -> None:
    """Record how the agent with process `pid` ended, on this host. Raises OSError."""
    word = {"pid": pid, "outcome": outcome.name, "exit_code": int(outcome.exit_code)}
    draft = runtime_dir.outcome.with_suffix(f".{pid}")
    draft.touch(0o600)
    draft.write_text(json.dumps(word))
    draft.replace(runtime_dir.outcome)


def read_outcome(runtime_dir: RuntimeDir, pid: int) -> str | None:
    """Return the outcome's name that the agent with process `pid` recorded here; `None` if it recorded none."""
    try:
        word = json.loads(runtime_dir.outcome.read_text())
        return str(word["outcome"]) if word["pid"] == pid else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
