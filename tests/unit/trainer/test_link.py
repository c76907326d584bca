"""The trainer's side of the seam, with agents that this test plays."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import SOCKET_VARIABLE, Settings
from harness.core import messages
from harness.core.messages import GenerationInfo, Hello
from harness.errors import AgentGone, ConfigError, SnapshotCorrupt
from harness.ipc.channel import Channel, connect, listen
from harness.ipc.control_page import AgentSide
from harness.ipc.runtime_dir import RuntimeDir
from harness.ipc.slots import Slot, SlotRecord
from harness.trainer.link import Link
from tests.support.patience import HANG_S


class Agents:
    """Whoever listens at `path`: takes a trainer in, and dies when it is told. Each has a control page of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = listen(path)
        self.greeted: list[Channel] = []
        self.pages: list[AgentSide] = []
        self.hellos: list[Hello] = []
        self._links: list[Link] = []
        self._threads: list[threading.Thread] = []

    def greet(self, sequence: int = 0) -> None:
        """Answer the next trainer's hello; `sequence` is the last seal that this agent knows of."""
        channel = Channel(self._listener.accept()[0])
        hello = channel.receive().message
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        settings = Settings(store="/store", run="run").to_json()
        welcome = messages.Welcome(self.generation, 0, settings, True, ("train.py", "--api-key=abc"), sequence)
        self.pages.append(AgentSide.create())
        self.greeted.append(channel)  # before the trainer, welcomed, can ask who greeted it
        channel.send(welcome, [self.pages[-1].fd])

    @property
    def generation(self) -> GenerationInfo:
        """Which the newest agent has begun."""
        return GenerationInfo(len(self.hellos), "a" * 32, "b" * 16)

    def connect(self, sequence: int = 0) -> Link:
        """A trainer's link to the first of them."""
        self._greet_soon(sequence)
        self._links.append(Link(None, ["train.py"], {SOCKET_VARIABLE: str(self.path)}))
        return self._links[-1]

    def start(self, *_: Any, wait_s: float) -> Channel:
        """What a trainer does whose agent is dead."""
        self._greet_soon()
        channel = connect(self.path)
        assert channel is not None
        return channel

    def find_nothing(self) -> None:
        """The newest agent tells that there is nothing to resume."""
        self.greeted[-1].send(messages.ResumeNone(self.generation))

    def close(self) -> None:
        """Whatever a test has left open."""
        for link in self._links:
            link.close()
            link._thread.join(HANG_S)
            link.close_in_child()  # its descriptors are this process's
        for thread in self._threads:
            thread.join(HANG_S)
        for channel in self.greeted:
            channel.close()
        self._listener.close()
        for page in self.pages:
            page.close()

    def _greet_soon(self, sequence: int = 0) -> None:
        self._threads.append(threading.Thread(target=self.greet, args=[sequence], daemon=True))
        self._threads[-1].start()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path / "socket")
    yield agents
    agents.close()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once another agent has come for one that died."""
    event = threading.Event()
    say: Callable[..., None] = lambda text, **_: event.set()  # noqa: E731
    monkeypatch.setattr("harness.trainer.link.say", say)
    return event


def test_whoever_listens_in_the_agent_s_place_and_is_none_is_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(str(path))
        stranger.listen()

        with pytest.raises(ConfigError, match=f"{path} .*cannot be used"):
            Link(None, ["train.py"], {SOCKET_VARIABLE: str(path)})


def test_an_agent_that_replaces_another_shows_no_secret_in_its_own_command_line(
    monkeypatch: pytest.MonkeyPatch, agents: Agents, replaced: threading.Event
) -> None:
    told = list[list[str]]()

    def start_agent(place: Any, arguments: list[str], *_: Any, wait_s: float) -> Channel:
        told.append(arguments)
        return agents.start(wait_s=wait_s)

    monkeypatch.setattr("harness.trainer.link.start_agent", start_agent)
    agents.connect()
    agents.greeted[0].close()
    replaced.wait(HANG_S)

    assert "***" in told[0][1]
    assert "abc" not in told[0][1]


LIVE = messages.Status(
    run="run",
    store="/store",
    local=None,
    state=messages.RunState.RUNNING,
    generation=1,
    run_id="a" * 32,
    claimed=True,
    step=3,
    local_step=None,
    durable_step=None,
    durable_age_s=None,
    bytes_copied=0,
    bytes_pending=0,
    estimate_s=None,
    deadline_s=None,
    finished_step=None,
    everything_durable=False,
    restarts=0,
    restart=None,
    unreachable=(),
    agent_pid=1,
    trainer_pid=2,
)


def test_an_agent_that_ends_while_it_is_greeted_is_replaced(
    monkeypatch: pytest.MonkeyPatch, agents: Agents, tmp_path: Path
) -> None:
    """Its trainer was killed and is started again at once: when it was asked, it did not know of that death yet."""
    settings = Settings(store="/store", run="run", runtime_dir=str(tmp_path / "run"))
    place = RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)
    place.prepare()
    listener = listen(place.socket)

    def ends() -> None:
        with contextlib.closing(Channel(listener.accept()[0])) as channel:
            channel.receive()
            channel.send(LIVE)
            listener.close()
            place.socket.unlink()
            assert isinstance(channel.receive().message, Hello)

    dying = threading.Thread(target=ends)
    dying.start()
    monkeypatch.setattr("harness.trainer.link.start_agent", agents.start)
    link = Link(settings, ["train.py"], {})
    dying.join()
    agents._links.append(link)
    assert link.generation == agents.generation


def test_what_a_store_says_in_an_error_moves_no_cursor(agents: Agents) -> None:
    link = agents.connect()
    agents.greeted[0].send(messages.ResumeFailed("SnapshotCorrupt", "its reason: \x1b[2J"))

    with pytest.raises(SnapshotCorrupt) as raised:
        link.wait_head()
    assert str(raised.value) == r"its reason: \x1b[2J"


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

    monkeypatch.setattr("harness.trainer.link.start_agent", start_agent)

    agents.greeted[0].close()  # it dies

    assert replaced.wait(HANG_S)
    assert not link.gone
    assert len(patience) == 3
    assert min(patience) >= 45.0


def test_an_agent_that_dies_before_it_has_found_anything_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, agents: Agents, replaced: threading.Event
) -> None:
    """Its count of seals and its control page were kept: no grant ever counted, and the end was never durable."""
    monkeypatch.setattr("harness.trainer.link.start_agent", agents.start)
    link = agents.connect(sequence=5)

    agents.greeted[0].close()
    assert replaced.wait(HANG_S)
    agents.find_nothing()

    assert link.wait_ready() is None
    assert agents.hellos[1].generation is None
    assert link.sequence == 0
    agents.pages[1].tell_steps(local=None, durable=7)
    assert link.page.durable_step == 7


def test_from_the_resume_point_on_another_agent_goes_on_with_what_the_dead_one_had(
    monkeypatch: pytest.MonkeyPatch, agents: Agents, replaced: threading.Event
) -> None:
    """A trainer that restores does not look at its agent: the page that it then trains on must not change under it."""
    monkeypatch.setattr("harness.trainer.link.start_agent", agents.start)
    link = agents.connect(sequence=5)
    agents.find_nothing()
    link.wait_ready()
    page = link.page

    agents.greeted[0].close()
    assert replaced.wait(HANG_S)

    assert agents.hellos[1].generation == GenerationInfo(1, "a" * 32, "b" * 16)
    assert link.page is page
    assert link.sequence == 5


def test_the_last_word_waits_for_the_agent_that_is_just_taken_on_and_hears_what_the_dead_one_did_not(
    monkeypatch: pytest.MonkeyPatch, agents: Agents
) -> None:
    """Its work may be durable by then, so that nothing else keeps the process: a finished run was not known as such."""
    starting, go_on = threading.Event(), threading.Event()

    def start_agent(*arguments: Any, wait_s: float) -> Channel:
        starting.set()
        assert go_on.wait(HANG_S)
        return agents.start(*arguments, wait_s=wait_s)

    monkeypatch.setattr("harness.trainer.link.start_agent", start_agent)
    link = agents.connect()
    agents.find_nothing()
    link.wait_ready()
    agents.greeted[0].close()
    assert starting.wait(HANG_S)
    link.send(messages.Finished(9), repeat=True)

    threading.Timer(0.2, go_on.set).start()
    link.part(exception=False)

    said = [agents.greeted[1].receive().message for _ in range(3)]
    assert said == [messages.Attached(), messages.Finished(9), messages.Bye(exception=False)]


def test_what_is_asked_while_an_agent_is_taken_on_comes_after_what_is_repeated(
    monkeypatch: pytest.MonkeyPatch, agents: Agents
) -> None:
    """An agent that hears of an older layout last makes slots that the trainer has given up, and no others."""
    asked = threading.Event()

    def ask(_text: str, **_: Any) -> None:
        asked.set()

    class Repeated(dict[Any, Any]):
        def items(self) -> Any:
            threading.Thread(target=lambda: (link.ask_slots(2), done.set()), daemon=True).start()
            return super().items()

    done = threading.Event()
    monkeypatch.setattr("harness.trainer.link.start_agent", agents.start)
    monkeypatch.setattr("harness.trainer.link.say", ask)
    link = agents.connect()
    agents.find_nothing()
    link.wait_ready()
    link.ask_slots(1)
    link._repeat = Repeated(link._repeat)

    agents.greeted[0].close()
    assert asked.wait(HANG_S)
    assert done.wait(HANG_S)

    said = [agents.greeted[1].receive().message for _ in range(3)]
    assert said == [messages.Attached(), messages.Layout(1, 1), messages.Layout(2, 2)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # and its traceback is printed
def test_a_thread_that_dies_of_a_slot_it_cannot_map_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, agents: Agents
) -> None:
    """Where address space is limited, say. The loop waited for ever, or trained on unsaved without a word."""
    said: list[str] = []

    def cannot(fd: int) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("harness.trainer.link.say", lambda text, **_: said.append(text))
    monkeypatch.setattr("harness.trainer.link.Slot", cannot)
    link = agents.connect()

    ready = messages.ResumeReady("g1-s1", "memory", True, agents.generation)
    agents.greeted[0].send(ready, [agents.pages[0].fd])

    with pytest.raises(AgentGone, match="Cannot allocate memory"):
        link.wait_ready()
    assert link.gone
    assert "nothing is being saved any more" in said[0]


def slots_of_a_fork(link: Link) -> set[str]:
    """The slots of which a forked worker, which outlives them, has a descriptor."""
    gc.collect()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            link.close_in_child()
            slots = {str(fd.stat().st_ino) for fd in Path("/proc/self/fd").iterdir() if "harness-slot" in _target(fd)}
            os.write(write, " ".join(slots).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        return set(answer.read().split())


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):  # the directory's own
        return str(link.readlink())
    return ""


def test_a_forked_worker_keeps_no_slot_s_memory(agents: Agents) -> None:
    """Nor that of one which is just coming, or is resumed from: a worker lives for days."""
    link, mapping, go_on = agents.connect(), threading.Event(), threading.Event()
    others = slots_of_a_fork(link)  # what other tests of this process have left
    for number in range(2):
        slot = Slot.create(8 << 20)
        if number == 0:
            slot.seal(SlotRecord(1, 0, 1, 1, (), "{}", {}, ""), 1)
            agents.greeted[0].send(messages.ResumeReady("1-1", "memory", True, agents.generation), [slot.fd])
            link.wait_ready()
        else:
            link.ask_slots(8 << 20, lambda _: (mapping.set(), go_on.wait(HANG_S)))
            agents.greeted[0].send(messages.Slots((0,), 1), [slot.fd])
            assert mapping.wait(HANG_S)
        slot.close()
    try:
        assert slots_of_a_fork(link) <= others
        link.drop_ready()
        assert slots_of_a_fork(link) <= others
    finally:
        go_on.set()
