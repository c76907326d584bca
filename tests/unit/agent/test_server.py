"""Who may come in where an agent listens."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from harness.agent import server
from harness.agent.generation import Generation
from harness.agent.loop import Loop
from harness.agent.server import Server
from harness.config.settings import Settings
from harness.core.events import AgentReplaced, Event
from harness.core.messages import AnyMessage, AskStatus, Training
from harness.core.policy.end import Outcome
from harness.errors import ConfigError
from harness.ipc.channel import MAX_FDS, Channel, Received, connect
from harness.ipc.slots import Slot
from tests.support.context import a_context
from tests.support.needs import lacking
from tests.support.patience import HANG_S

NOBODY = 65534
GENERATION = Generation(3, "run-id", "00000000000000ab")
ASK = f"""
import os, pathlib, sys
from harness.core.events import AgentReplaced, Event
from harness.core.messages import AskStatus
from harness.ipc.channel import Channel, ChannelClosed
import socket
os.setuid({NOBODY})
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
try:
    Channel(sock).send(AskStatus())
    print(Channel(sock).receive().message)
except ChannelClosed:
    print("hung up on")
"""


class Scene:
    """Where an agent listens, and what was said there."""

    def __init__(self, directory: Path) -> None:
        settings = Settings(store="memory", run="run", runtime_dir=str(directory))
        self.loop, self.heard = Loop(), queue.SimpleQueue[AnyMessage]()
        nobody: Any = None  # takes over no slots
        self.server = Server(a_context(settings, self.loop), nobody, self._answer)

    def _answer(self, channel: Channel, received: Received) -> None:
        self.heard.put(received.message)
        channel.send(Training())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It listens, served as the main loop does."""
        self.server.open(lambda: False)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                self.loop.wait(HANG_S)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self.loop.post(lambda: None)
            thread.join(HANG_S)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="harness-") as directory:  # short: a socket's path ends at 107 bytes
        made = Scene(Path(directory))
        yield made
        made.server.close()


def test_what_an_agent_makes_on_its_host_is_its_users_alone(scene: Scene) -> None:
    scene.server.open(lambda: False)
    scene.server.leave_word(Outcome("finished", 0))

    place = scene.server.address.parent
    modes = {path.name: path.stat().st_mode & 0o777 for path in place.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_place_that_is_not_this_users_is_refused_with_the_remedy(scene: Scene) -> None:
    scene.server.address.parent.parent.chmod(0o777)

    with pytest.raises(ConfigError, match=r"others may write to .*; HARNESS_RUNTIME_DIR names another directory"):
        scene.server.open(lambda: False)


@pytest.mark.root
def test_another_user_is_hung_up_on_and_this_one_is_heard(scene: Scene) -> None:
    """What keeps others out is the mode of the directory; this is for where a file system has none."""
    if os.geteuid() != 0:
        lacking("root", "to become somebody else")
    with scene.running():
        for path in (scene.server.address.parent.parent, scene.server.address.parent, scene.server.address):
            path.chmod(0o777)

        stranger = subprocess.run(
            [sys.executable, "-c", ASK, str(scene.server.address)], stdout=-1, text=True, check=True
        )
        ours = connect(scene.server.address)
        assert ours is not None
        ours.send(AskStatus())

        assert stranger.stdout == "hung up on\n"
        assert scene.heard.get(timeout=HANG_S) == AskStatus()
        ours.close()


def test_half_a_message_holds_nobody_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was stopped in the middle of one stopped the agent as well: it saved nothing, and heard nothing."""
    monkeypatch.setattr(server, "_HALF_A_MESSAGE_S", 0.01)
    with scene.running():
        frozen, ours = connect(scene.server.address), connect(scene.server.address)
        assert frozen is not None
        assert ours is not None
        frozen.socket.send(b"x")
        ours.send(AskStatus())

        assert scene.heard.get(timeout=HANG_S) == AskStatus()
        assert frozen.socket.recv(1) == b"", "hung up on"
        frozen.close()
        ours.close()


class Holder:
    """What a pipeline holds, for a handover."""

    def __init__(self, slots: dict[int, Slot]) -> None:
        self.pool, self.generations, self.settled = slots, dict.fromkeys(slots, GENERATION), False

    def handed_over(self) -> list[tuple[int, Generation]]:
        return list(self.generations.items())

    def adopt(self, index: int, slot: Slot, generation: Generation, *, ends: bool) -> None:
        self.pool[index], self.generations[index] = slot, generation
        assert ends

    def note_all_taken(self) -> None:
        self.settled = True


def memory_of(holder: Holder) -> list[int]:
    return [os.fstat(slot.fd).st_ino for slot in holder.pool.values()]


@pytest.mark.parametrize("count", [0, 1, MAX_FDS, MAX_FDS + 1, 2 * MAX_FDS + 3])
def test_slots_are_handed_over_however_many_there_are(tmp_path: Path, count: int) -> None:
    """Nine ranks have eighteen, and one message carries sixteen descriptors: the next agent died of that."""
    older, newer = Holder({index: Slot.create(4096) for index in range(count)}), Holder({})
    events = list[Event]()
    settings = Settings(store="memory", run="run", runtime_dir=str(tmp_path))
    before, after = (
        Server(a_context(settings, Loop(), emit=events.append), cast("Any", holder), cast("Any", None))
        for holder in (older, newer)
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before.hand_over(Channel(theirs))
        while after._on_takeover_answer(Channel(ours).receive()):
            assert not newer.settled

    assert newer.settled
    assert [(index, made.info) for index, made in newer.handed_over()] == [
        (index, GENERATION.info) for index in range(count)
    ]
    assert memory_of(newer) == memory_of(older)
    assert events == ([AgentReplaced(slots=count)] if count else [])
    for slot in (*older.pool.values(), *newer.pool.values()):
        slot.close()
