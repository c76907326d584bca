"""`python -m harness.agent SETTINGS-JSON COMMAND-JSON PID`: a detached agent, started by a Checkpointer of that pid."""

from __future__ import annotations

import json
import os
import sys

from harness.agent.log import open_missing_descriptors
from harness.agent.main import Agent
from harness.config.program import Program
from harness.config.settings import Settings
from harness.core.words import printable
from harness.errors import HarnessError
from harness.ipc.process import heed_children


def main(arguments: list[str]) -> int:
    """Run a detached agent until its trainer is gone and everything is saved. Returns the exit code."""
    open_missing_descriptors()
    heed_children()
    settings = Settings.from_json(arguments[0])
    try:
        script, starter = tuple(json.loads(arguments[1])), int(arguments[2])
        return Agent(settings, Program(environ=os.environ, script=script, starter=starter)).run()
    except HarnessError as err:
        sys.stderr.write(f"harness: error: {printable(str(err))}\n")
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
