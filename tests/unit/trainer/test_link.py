"""The trainer's side of the seam, with agents that this test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config import SOCKET_VARIABLE, Settings
from harness.ipc import channel as ipc
from harness.ipc.channel import Channel
from harness.ipc.slots import ControlPage
from harness.trainer.link import Link

WAIT_S = 30.0


class Agents:
    """Whoever listens at `path`: takes a trainer in, and dies when it is told."""

    def __init__(self, path: Path) -> None:
        self._listener = ipc.listen(path)
        self._page = ControlPage.create()
        self.greeted: list[Channel] = []

    def greet(self) -> None:
        """Answer the next trainer's hello."""
        channel = Channel(self._listener.accept()[0])
        channel.receive()
        fields: dict[str, Any] = {
            "life": {}, "restarts": 0, "detached": True, "command": ["train.py"], "sequence": 0,
            "settings": Settings(store="/store", run="run").to_json(),
        }  # fmt: skip
        channel.send("welcome", [self._page.fd], **fields)
        self.greeted.append(channel)

    def close(self) -> None:
        for channel in self.greeted:
            channel.close()
        self._listener.close()
        self._page.close()


@pytest.mark.parametrize("begun", [False, True])
def test_an_agent_that_could_not_be_started_is_not_the_last_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: bool
) -> None:
    """A host under load takes its time: what is trained meanwhile must be saved in the end."""
    path = tmp_path / "socket"
    agents = Agents(path)
    threading.Thread(target=agents.greet, daemon=True).start()
    link = Link(None, ["train.py"], {SOCKET_VARIABLE: str(path)})
    if begun:
        link.begin()
    patience: list[float] = []
    replaced = threading.Event()

    def start_agent(*_: Any, wait_s: float) -> Channel:
        patience.append(wait_s)
        if len(patience) < 3:
            raise ConnectionError("no agent came up")
        threading.Thread(target=agents.greet, daemon=True).start()
        channel = ipc.connect(path)
        assert channel is not None
        return channel

    monkeypatch.setattr("harness.trainer.link.ipc.start_agent", start_agent)
    say: Callable[[str], None] = lambda text: replaced.set()  # noqa: E731
    monkeypatch.setattr("harness.trainer.link._say", say)

    agents.greeted[0].close()  # it dies

    assert replaced.wait(WAIT_S)
    assert not link.gone
    assert len(patience) == 3
    assert min(patience) >= 45.0
    link.close()
    link._thread.join(WAIT_S)
    link.close_in_child()  # its descriptors are this process's
    agents.close()
