"""How long a test may take: one table for all of them, and one number that scales it.

Nothing else in tests/ has a limit. A test waits for what happens, or for the death of who would do it; pytest's limit
ends what never does. Only where that limit does not reach, in a thread or in a teardown, a wait ends by itself, later.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

PATIENCE = float(os.environ.get("HARNESS_TEST_PATIENCE", "1"))
"""All limits times so much: for a machine that is slow, or very busy."""

LIMITS_S = {
    "": 60,
    "gpu": 400,
    "integrations": 400,
    "model": 400,
    "node": 400,
    "power": 400,
    "process": 400,
    "ranks": 480,
    "soak": 600,
    "terraform": 480,  # whoever asks first for the applied module waits for the apply
}
"""How long a test may take, by folder: more than twice what the longest one takes while the others run beside it."""

MANY_EXAMPLES = 20
"""So much longer may tests/model take with one of the larger profiles."""

NIGHTLY = 3
"""So much longer may a case take that waits for the night."""

HANG_S = 1500 * PATIENCE
"""When a thread or a teardown gives up: after every test's limit."""


def limit_s(folder: str, *, many_examples: bool, is_nightly: bool) -> float:
    """Return how long a test of a folder of tests/ may take."""
    longer = MANY_EXAMPLES if many_examples and folder == "model" else NIGHTLY if is_nightly else 1
    return LIMITS_S.get(folder, LIMITS_S[""]) * longer * PATIENCE


@contextlib.contextmanager
def telling(what: Callable[[], object]) -> Iterator[None]:
    """Wait inside of it: whatever ends the wait too early, and be it the test's limit, says `what` there was."""
    try:
        yield
    except BaseException as err:
        err.add_note(f"there was: {what()}")
        raise
