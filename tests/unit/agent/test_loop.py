"""What the loop does with several descriptors that are readable at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from harness.agent.loop import Loop


@pytest.fixture
def readable() -> Iterator[Callable[[], int]]:
    """Makes descriptors that can be read."""
    with contextlib.ExitStack() as stack:

        def make() -> int:
            read, write = os.pipe()
            stack.callback(os.close, read)
            os.write(write, b"x")
            os.close(write)
            return read

        yield make


@pytest.mark.parametrize("again", [False, True], ids=["closed", "its number in use again"])
def test_what_an_action_has_closed_is_not_acted_on(again: bool, readable: Callable[[], int]) -> None:
    """A dead rank's descriptor and its connection are readable at once, and so are those of other dead ranks."""
    loop, acted = Loop(), list[str]()
    first, second, new = readable(), readable(), readable()

    def close(own: int, other: int) -> None:
        acted.append("closed the other")
        loop.forget(own)
        loop.forget(other)
        os.dup2(new, other)  # closes it, and has its number at once
        if again:
            loop.watch(other, lambda: acted.append("acted on the new one"))

    loop.watch(first, lambda: close(first, second))
    loop.watch(second, lambda: close(second, first))

    loop.wait(0)
    assert acted == ["closed the other"]
    loop.wait(0)
    assert acted[1:] == ["acted on the new one"] * again
