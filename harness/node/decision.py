"""The decision: a file that says that `harness resume` has ended because it had nothing left to do here.

A service that runs it looks for the file afterwards (`scripts/stop-fleet.sh --unless-decided`): a supervisor that was
killed, or could not stop its fleet, leaves none, and then something else has to stop an idle, paid instance.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

VARIABLE: Final = "HARNESS_DECISION"


def note_decision(environ: Mapping[str, str], text: str, say: Callable[[str], None]) -> None:
    """Write the decision to the file that `HARNESS_DECISION` names; does nothing without it."""
    path = environ.get(VARIABLE)
    if not path:
        return
    try:
        part = Path(f"{path}.new")
        part.write_text(f"{text}\n")
        part.replace(path)
    except OSError as err:
        say(f"{VARIABLE}: {path}: {os.strerror(err.errno or 0)}: the fleet may be stopped because of it")
