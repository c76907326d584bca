"""A part of an agent without the agent: the context it needs, and loops that a test turns itself."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import Any

from harness.agent.context import Context
from harness.config.settings import Settings
from harness.core import events
from tests.support.protocol import KEYS


class Posts:
    """A loop that runs what was posted when a test says so."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, action: Callable[[], None]) -> None:
        self._posts.put(action)

    def run_one(self, timeout_s: float) -> None:
        """Run the next post, if one comes in time."""
        with contextlib.suppress(queue.Empty):
            self._posts.get(timeout=timeout_s)()


class AtOnce:
    """A loop that runs each post in the thread that posts it."""

    def post(self, action: Callable[[], None]) -> None:
        action()


def a_context(
    settings: Settings,
    loop: Any = None,
    *,
    emit: Callable[[events.Event], None] = lambda event: None,
    say: Callable[[str], None] = lambda words: None,
    on_bug: Callable[[BaseException], None] | None = None,
) -> Context:
    """As an agent makes it, for what is to be tested alone. A bug of a thread is raised in that thread, unless told."""

    def fail(err: BaseException) -> None:
        raise err

    return Context(settings, KEYS, "host", loop or AtOnce(), emit, say, on_bug or fail)
