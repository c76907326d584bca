"""The loop of the agent's main thread: it waits for descriptors and posts, and runs their actions.

Owns the selector and the queue of posts; does not know the actions. Every change of the agent's state starts here: with
a descriptor that has become readable, or an action that another thread, or a signal handler, has posted.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
from collections.abc import Callable


class Loop:
    """The loop. Everything except `post` is for the main thread."""

    def __init__(self) -> None:
        """Start with posts alone; no other descriptor is watched yet."""
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self.watch(self._wake_read, self._on_wake)

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the main thread soon. From any thread, and from signal handlers."""
        self._posts.put(action)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def watch(self, fd: int, act: Callable[[], None]) -> None:
        """Call `act` whenever `fd` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, act)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`. Call it before `fd` is closed."""
        self._selector.unregister(fd)

    def wait(self, timeout_s: float) -> None:
        """Wait until a descriptor is readable or something is posted; act on the descriptors. Posts stay.

        A descriptor that an action before it has closed is left alone, also where another one has its number by then.
        """
        for key, _mask in self._selector.select(timeout_s):
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def run_posts(self) -> None:
        """Run the posted actions, in their order."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._posts.get_nowait()()

    @property
    def nothing_posted(self) -> bool:
        """Whether no post waits to be run."""
        return self._posts.empty()

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
