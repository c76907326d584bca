"""The trainer's side of the seam, with agents that this test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config import SOCKET_VARIABLE, Settings
from harness.ipc import channel as ipc
from harness.ipc.channel import Channel, Message
from harness.ipc.slots import ControlPage, Word
from harness.trainer.link import Link

WAIT_S = 30.0


class Agents:
    """Whoever listens at `path`: takes a trainer in, and dies when it is told. Each has a control page of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = ipc.listen(path)
        self.greeted: list[Channel] = []
        self.pages: list[ControlPage] = []
        self.hellos: list[Message] = []

    def greet(self, sequence: int = 0) -> None:
        """Answer the next trainer's hello; `sequence` is the last seal that this agent knows of."""
        channel = Channel(self._listener.accept()[0])
        self.hellos.append(channel.receive())
        fields: dict[str, Any] = {
            "life": {"number": len(self.hellos)}, "restarts": 0, "detached": True, "command": ["train.py"],
            "sequence": sequence, "settings": Settings(store="/store", run="run").to_json(),
        }  # fmt: skip
        self.pages.append(ControlPage.create())
        channel.send("welcome", [self.pages[-1].fd], **fields)
        self.greeted.append(channel)

    def connect(self, sequence: int = 0) -> Link:
        """A trainer's link to the first of them."""
        threading.Thread(target=self.greet, args=[sequence], daemon=True).start()
        return Link(None, ["train.py"], {SOCKET_VARIABLE: str(self.path)})

    def start(self, *_: Any, wait_s: float) -> Channel:
        """What a trainer does whose agent is dead."""
        threading.Thread(target=self.greet, daemon=True).start()
        channel = ipc.connect(self.path)
        assert channel is not None
        return channel

    def find_nothing(self) -> None:
        """The newest agent tells that there is nothing to resume."""
        self.greeted[-1].send("resume-none", life={"number": len(self.hellos)})

    def close(self, link: Link) -> None:
        link.close()
        link._thread.join(WAIT_S)
        link.close_in_child()  # its descriptors are this process's
        for channel in self.greeted:
            channel.close()
        self._listener.close()
        for page in self.pages:
            page.close()


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    return Agents(tmp_path / "socket")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once another agent has come for one that died."""
    event = threading.Event()
    say: Callable[[str], None] = lambda text: event.set()  # noqa: E731
    monkeypatch.setattr("harness.trainer.link._say", say)
    return event


@pytest.mark.parametrize("begun", [False, True])
def test_an_agent_that_could_not_be_started_is_not_the_last_word(
    monkeypatch: pytest.MonkeyPatch, agents: Agents, replaced: threading.Event, begun: bool
) -> None:
    """A host under load takes its time: what is trained meanwhile must be saved in the end."""
    link = agents.connect()
    if begun:
        agents.find_nothing()
        link.wait_ready()
    patience: list[float] = []

    def start_agent(*arguments: Any, wait_s: float) -> Channel:
        patience.append(wait_s)
        if len(patience) < 3:
            raise ConnectionError("no agent came up")
        return agents.start(*arguments, wait_s=wait_s)

    monkeypatch.setattr("harness.trainer.link.ipc.start_agent", start_agent)

    agents.greeted[0].close()  # it dies

    assert replaced.wait(WAIT_S)
    assert not link.gone
    assert len(patience) == 3
    assert min(patience) >= 45.0
    agents.close(link)


def test_an_agent_that_dies_before_it_has_found_anything_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, agents: Agents, replaced: threading.Event
) -> None:
    """Its count of seals and its control page were kept: no grant ever counted, and the end was never durable."""
    monkeypatch.setattr("harness.trainer.link.ipc.start_agent", agents.start)
    link = agents.connect(sequence=5)

    agents.greeted[0].close()
    assert replaced.wait(WAIT_S)
    agents.find_nothing()

    assert link.wait_ready() is None
    assert agents.hellos[1]["life"] is None
    assert link.sequence == 0
    agents.pages[1].words[Word.DURABLE_STEP] = 7
    assert link.page.words[Word.DURABLE_STEP] == 7
    agents.close(link)


def test_from_the_resume_point_on_another_agent_goes_on_with_what_the_dead_one_had(
    monkeypatch: pytest.MonkeyPatch, agents: Agents, replaced: threading.Event
) -> None:
    """A trainer that restores does not look at its agent: the page that it then trains on must not change under it."""
    monkeypatch.setattr("harness.trainer.link.ipc.start_agent", agents.start)
    link = agents.connect(sequence=5)
    agents.find_nothing()
    link.wait_ready()
    page = link.page

    agents.greeted[0].close()
    assert replaced.wait(WAIT_S)

    assert agents.hellos[1]["life"] == {"number": 1}
    assert link.page is page
    assert link.sequence == 5
    agents.close(link)
