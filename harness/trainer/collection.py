"""Collection: whether the garbage collector is at work, when code of ours runs as it ends an abandoned iterator.

Such code must not ask torch for a random state: until Python 3.12 a collection may begin in the middle of
`torch.get_rng_state`, which holds the generator's lock then, and a second call would wait for it without end.
"""

from __future__ import annotations

import gc
import threading

_at_work: set[int] = set()  # threads


def is_collecting() -> bool:
    """Whether this thread runs because the garbage collector ends something."""
    return threading.get_ident() in _at_work


def _note(phase: str, _info: dict[str, int]) -> None:
    if phase == "start":
        _at_work.add(threading.get_ident())
    else:
        _at_work.discard(threading.get_ident())


gc.callbacks.append(_note)
