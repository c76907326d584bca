"""The trainer's side of the seam: one connection, one thread, the slots that the agent sent; replaces a dead agent.

Owns the socket, the control page and the mapped slots in the trainer's process; knows neither tensors nor loops. The
thread only listens and maps memory: the loop reads one word of the control page and never waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness.errors
from harness.config.settings import SOCKET_VARIABLE, Settings
from harness.core import messages
from harness.core.messages import GenerationInfo
from harness.core.restart import Span
from harness.core.words import printable, without_secrets
from harness.errors import AgentGone, ConfigError, HarnessError
from harness.ipc.channel import Channel, ChannelClosed, Received, connect
from harness.ipc.control_page import TrainerSide
from harness.ipc.process import start_agent
from harness.ipc.runtime_dir import RuntimeDir
from harness.ipc.slots import Slot, SlotRecord
from harness.trainer.ranks import ALONE, Rank
from harness.trainer.replacements import Replacements
from harness.trainer.voice import say

WAIT_NOTE_S = 3.0
_PART_S = 10.0  # how long the end of the process waits while a dead agent is being replaced
_ANSWER_S = 10.0  # a live agent answers its socket within milliseconds; a frozen one never does
_LOOK_S = 0.05
_START_S = 45.0  # until an agent listens: on a loaded host, importing Python modules takes long


@dataclass(frozen=True)
class ResumeHeader:
    """The snapshot that is about to be resumed, known as soon as its small state is."""

    snapshot: str
    tier: str
    record: SlotRecord


@dataclass(frozen=True)
class Ready:
    """Sealed slots with the tensors to restore.

    Attributes:
        snapshot: its name.
        tier: where it was found.
        verified: whether its digests were compared.
        slots: of all ranks, in order.
        rank: this one.
    """

    snapshot: str
    tier: str
    verified: bool
    slots: tuple[Slot, ...]
    rank: int = 0

    @property
    def slot(self) -> Slot:
        """This rank's own."""
        return self.slots[self.rank]

    def close(self) -> None:
        """Close the slots, which are the agent's again."""
        for slot in self.slots:
            slot.close()


class Link:
    """The trainer's connection to the agent. Created before anything else; lives as long as the process."""

    def __init__(
        self, settings: Settings | None, script: Sequence[str], environ: Mapping[str, str], rank: Rank = ALONE
    ) -> None:
        """Connect to the agent of `harness run`, or start one. Blocks until it answers.

        Of several ranks, the first on this machine starts it, and the others wait for it.

        Args:
            settings: for an agent that has to be started; `None` under `harness run`.
            script: this process's command line, for the agent to record.
            environ: the environment: it names the agent's socket, and a new agent inherits it.
            rank: which of the ranks this process is.

        Raises:
            ConfigError: the run is being trained already, or it is finished (RunFinished).
            AgentGone: no agent answers.
        """
        self._environ = environ
        self.rank = rank
        self._script = without_secrets(script)  # every user of this host can read an agent's command line
        self._condition = threading.Condition()
        self._head: ResumeHeader | None = None
        self._earlier: tuple[Slot, ...] = ()  # of a snapshot in more slots than one message has
        self._ready: Ready | None = None
        self._nothing = False
        self._error: HarnessError | None = None
        self._slots: dict[int, Slot] = {}
        self._arriving: list[Slot] = []  # they are still being mapped, which takes time
        self._slot_error: HarnessError | None = None
        self._no_meeting: HarnessError | None = None
        self.stores: messages.Stores | None = None
        """Of several ranks: what this one stores, as the agent has said it last."""
        self.holds_wanted = False
        """Whether the agent has asked for another `Holds` from this rank; set to false when it is sent."""
        self.when_told: Callable[[], object] = bool
        """Called in the link's thread once the agent has said something that the next boundary has to look at."""
        self._prepare: Callable[[Slot], None] | None = None
        self._signals: list[int] = []
        self._replacements = Replacements()
        self._layout_number = 0
        self._closing = False
        self._begun = False
        self._repeat: dict[type[messages.AnyMessage], messages.AnyMessage] = {}
        self._repeating = threading.Lock()  # no message is sent before an older one of its kind is repeated
        self._in_touch = threading.Event()  # not set while a dead agent is being replaced
        self._in_touch.set()
        self._poke_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.detached = False
        self.gone = False
        self.superseded = False
        self._waits: list[Span] = []
        self._channel = channel = self._connect(settings)
        try:
            greeted = self._greet(channel)
        except AgentGone:
            if SOCKET_VARIABLE in environ:
                raise
            channel.close()  # it was ending, and did not know that yet: its trainer had just died
            self._channel = channel = self._connect(settings)
            greeted = self._greet(channel)
        self._join(*greeted)
        self._thread = threading.Thread(target=self._listen, name="harness-link", daemon=True)
        self._thread.start()

    # ---- calls of the Checkpointer ----------------------------------------------------------------------------------

    def send(self, message: messages.AnyMessage, *, repeat: bool = False) -> None:
        """Send the agent a message. It is lost if the agent is dying; with `repeat`, the next agent gets it again."""
        with self._repeating if repeat else contextlib.nullcontext(), contextlib.suppress(ChannelClosed):
            if repeat:
                self._repeat[type(message)] = message
            self._channel.send(message)

    def stepped(self, step: int, wanted_at: float) -> None:
        """Tell the agent that the first step is complete, and where the time went: the breakdown of a restart.

        Args:
            step: the number of that step.
            wanted_at: when this process was ready to restore the snapshot, in monotonic seconds.
        """
        self.send(messages.FirstStep(step, time.monotonic(), tuple(self._waits), wanted_at))

    def forget(self, kind: type[messages.AnyMessage]) -> None:
        """Do not repeat the message of this kind to the next agent: it is no longer true."""
        with self._repeating:
            self._repeat.pop(kind, None)

    def poke(self, signum: int) -> None:
        """Have the link's thread tell the agent about a signal. Safe to call from a signal handler."""
        self._signals.append(signum)
        os.eventfd_write(self._poke_fd, 1)

    def wait_head(self) -> ResumeHeader | None:
        """Block until the agent has told which snapshot is resumed; `None` if none. Raises what the agent reported."""
        self._wait(
            lambda: self._head is not None or self._ready is not None or self._nothing,
            "the agent to decide what to resume",
        )
        return self._head

    def wait_ready(self) -> Ready | None:
        """Block until the tensors are in a slot and verified; `None` if there is nothing to resume.

        If the agent dies before this returns, a new agent looks for the resume point again. If it dies later, the new
        one continues this generation, on the same `page`.
        """

        def known() -> bool:  # under the lock of `_has_begun`: either that forgets the answer, or this keeps it
            self._begun = self._begun or self._ready is not None or self._nothing
            return self._begun

        self._wait(known, "the snapshot")
        return self._ready

    def drop_ready(self) -> None:
        """Close the slot of the snapshot, which is restored: the slot is the agent's again."""
        with self._condition:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.close()

    def granted(self, used: int, sealed: int) -> tuple[int, Slot] | None:
        """Return the grant and the slot that may be filled now; `None` if no slot is granted. Never blocks.

        Args:
            used: the grant that was used last.
            sealed: sequence number of the last seal.
        """
        request = self.page.granted(used, sealed)
        slot = None if request is None else self._slots.get(request.value)
        return None if request is None or slot is None else (request.sequence, slot)

    def index_of(self, slot: Slot) -> int:
        """Return the index by which the agent knows `slot`."""
        return next(index for index, held in self._slots.items() if held is slot)

    def ask_slots(self, size: int, prepare: Callable[[Slot], None] | None = None) -> None:
        """Ask the agent for slots of `size` bytes each. Does not wait.

        The link's thread calls `prepare` with each slot, after its pages are mapped and before it can be granted.
        """
        with self._condition:
            self._slot_error, self._prepare = None, prepare
            self._layout_number += 1
            old, self._slots = self._slots, {}
        for slot in old.values():
            slot.close()
        self.send(messages.Layout(size, self._layout_number), repeat=True)

    def check_meeting(self) -> None:
        """Raise, once, what the agent has told of the ranks, if they will never come to one step."""
        error, self._no_meeting = self._no_meeting, None
        if error is not None:
            raise error

    @property
    def slot_error(self) -> HarnessError | None:
        """The error because of which there are no slots, if any."""
        return self._slot_error

    def part(
        self, *, exception: bool, early: bool = False, hopeless: bool = False, process_lives: bool = False
    ) -> None:
        """Say goodbye to the agent. Blocks while a dead agent is being replaced.

        Otherwise the messages that the new agent must get would be lost with this process: it would not know that the
        run is finished.

        Args:
            exception: the program ends by an exception, or by an exit code that means failure.
            early: the program left its outermost loop before its end.
            hopeless: it ends by an exception that would occur again if the same program were started again.
            process_lives: the process continues without this link, which releases everything it holds.
        """
        self._in_touch.wait(_PART_S)
        self._tell_signals()
        self.send(messages.Bye(exception, early, hopeless, process_lives))
        self.close()
        if process_lives:
            self._let_go()

    def close(self) -> None:
        """Stop the link's thread. The agent notices the end of the process by itself."""
        self._closing = True
        os.eventfd_write(self._poke_fd, 1)

    def _let_go(self) -> None:
        self._thread.join(_PART_S)
        self._channel.close()
        self.drop_ready()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def close_in_child(self) -> None:
        """Close, in a forked child, every descriptor that would hide the trainer's death or keep a slot's memory."""
        self._channel.close()
        slots = [*self._slots.values(), *self._arriving]
        if self._ready is not None:
            slots += self._ready.slots
        slots += self._earlier
        for fd in (self._poke_fd, self.page.fd, *(slot.fd for slot in slots)):
            with contextlib.suppress(OSError):
                os.close(fd)

    # ---- thread -----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._hear()
        except Exception as err:  # a thread's root: without this the loop would wait forever
            self._give_up(f"{type(err).__name__}: {err}")
            self._in_touch.set()
            raise

    def _hear(self) -> None:
        while not self._closing:
            readable, _, _ = select.select([self._channel.fileno(), self._poke_fd], [], [])
            if self._poke_fd in readable:
                os.eventfd_read(self._poke_fd)
                self._tell_signals()
            if self._channel.fileno() in readable:
                try:
                    self._on_message(self._channel.receive())
                except ChannelClosed:
                    self._in_touch.clear()
                    replaced = self._replace()
                    self._in_touch.set()
                    if not replaced:
                        return

    def _tell_signals(self) -> None:
        with contextlib.suppress(IndexError):  # until the list is empty; two threads may do this at once
            while True:
                self.send(messages.SignalReceived(self._signals.pop(0)))

    def _on_message(self, received: Received) -> None:
        message, to_fill = received.message, isinstance(received.message, messages.Slots)
        slots = self._arriving = [Slot(fd) for fd in received.fds]
        for slot in slots:
            slot.populate(to_write=to_fill)  # a slot to resume from is only read
            if to_fill and self._prepare is not None:
                self._prepare(slot)
        with self._condition:
            self._take_note(message, slots)
            self._arriving = []
            self._condition.notify_all()

    def _take_note(self, message: messages.AnyMessage, slots: Sequence[Slot]) -> None:
        match message:
            case messages.ResumeHeader(snapshot, tier, record, generation):
                self.generation = generation
                self._head = ResumeHeader(snapshot, tier, SlotRecord.decode(record.encode()))
            case messages.ResumeSlots():
                self._earlier = (*self._earlier, *slots)
            case messages.ResumeReady(snapshot, tier, verified, generation):
                self.generation = generation
                self._ready = Ready(snapshot, tier, verified, (*self._earlier, *slots), self.rank.number)
                self._earlier = ()
                if self._head is None and (found := self._ready.slot.record()) is not None:
                    self._head = ResumeHeader(snapshot, tier, found)
            case messages.ResumeNone(generation):
                self.generation, self._nothing = generation, True
            case messages.ResumeFailed(error, text):
                self._error = _error_from(error, text)
            case messages.Slots(indexes, number):
                given_up = number != self._layout_number  # another layout was asked for meanwhile
                for slot in slots if given_up else self._slots.values():
                    slot.close()
                if not given_up:
                    self._slots = dict(zip(indexes, slots, strict=True))
            case messages.NoSlots(error, text):
                self._slot_error = _error_from(error, text)
            case messages.Stores() as stores:
                self.stores = stores
                self.when_told()
            case messages.HoldsWanted():
                self.stores, self.holds_wanted = None, True
                self.when_told()
            case messages.NoMeeting(error, text):
                self._no_meeting = _error_from(error, text)
            case messages.Superseded():
                self.superseded = True

    def _replace(self) -> bool:
        """Replace a dead agent: start another, hand over the generation, the page and the slots. Training continues."""
        self._replacements.note_lost()
        why: Exception = AgentGone("agents die, one after another")
        while not self._closing and self._error is None:  # if it reported why it ends, another would report the same
            if (pause_s := self._replacements.next_pause_s()) is None:
                break
            time.sleep(pause_s)
            self._channel.close()
            try:
                channel = self._hand_on() if self._has_begun() else self._start_over()
            except (AgentGone, OSError) as err:  # it died as well, or none can be started at the moment
                why = err
            except HarnessError as err:
                why = err
                break
            else:
                self._begin_with(channel)
                return True
        else:
            self.gone = True
            return False
        self._give_up(f"the agent died and cannot be replaced. {why}")
        return False

    def _begin_with(self, channel: Channel) -> None:
        """Go on with another agent: repeat what the dead one may not have heard."""
        self._replacements.note_begun()
        with self._repeating:
            self._channel = channel
            self.send(messages.Attached())
            for kind, message in self._repeat.items():
                if kind is not messages.Layout or not self._slots:
                    self.send(message)
        say("the agent died; a new one has taken over")

    def _give_up(self, reason: str) -> None:
        """Do without an agent: training continues, and every wait for the agent ends with `AgentGone`."""
        self.gone = True
        say(f"nothing is being saved any more: {reason}", each=True)
        with self._condition:
            self._error = AgentGone(reason)
            self._condition.notify_all()

    def _has_begun(self) -> bool:
        """Whether the trainer has what it resumes. If not, forget the answer: the next agent looks again."""
        with self._condition:
            if not self._begun:
                self._head, self._ready, self._nothing = None, None, False
            return self._begun

    def _hand_on(self) -> Channel:
        """Start an agent that continues this generation, with its control page and its slots."""
        channel = self._start_agent({**self._environ, "HARNESS_ATTACH": "1"})
        with self._condition:
            slots = dict(self._slots)
        fds = [self.page.fd, *(slot.fd for slot in slots.values())]
        welcome, page = self._greet(channel, self.generation, tuple(slots), fds)
        os.close(page)  # a second descriptor of our own control page, which the new agent uses now
        self._note_welcome(welcome)
        return channel

    def _start_over(self) -> Channel:
        """Start an agent that looks for the resume point again: nothing was restored yet."""
        channel = self._start_agent(self._environ)
        self._join(*self._greet(channel))
        return channel

    def _start_agent(self, environ: Mapping[str, str]) -> Channel:
        if not self.rank.is_first_here:
            return self._wait_for_agent()
        arguments = [self._settings.to_json(), json.dumps(list(self._script))]
        return start_agent(self._runtime_dir, arguments, environ, wait_s=_START_S)

    def _wait_for_agent(self) -> Channel:
        """Connect to the agent that the first rank on this machine starts, once that rank is connected.

        Raises:
            ConnectionError: it has not come.
        """
        give_up_at = time.monotonic() + _START_S + _ANSWER_S
        while time.monotonic() < give_up_at and not self._signals:  # told to end: there will be none
            channel = connect(self._runtime_dir.socket, _ANSWER_S)
            if channel is not None:
                if not self._busy_elsewhere(channel):
                    channel.socket.settimeout(None)
                    return channel
                channel.close()
            time.sleep(_LOOK_S)
        raise ConnectionError(f"{self.rank}: no agent has come; the first rank on this machine starts it")

    # ---- connecting -------------------------------------------------------------------------------------------------

    def _connect(self, settings: Settings | None) -> Channel:
        if path := self._environ.get(SOCKET_VARIABLE):
            self._runtime_dir = RuntimeDir(Path(path).parent)
            try:
                channel = connect(Path(path))
            except OSError as err:
                raise ConfigError(f"the agent at {path} ({SOCKET_VARIABLE}) cannot be used: {err}") from err
            if channel is None:
                raise AgentGone(f"no agent listens at {path} ({SOCKET_VARIABLE}): has `harness run` ended?")
            return channel
        assert settings is not None, "without harness run the settings come from the Checkpointer"
        self._runtime_dir = RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)
        try:
            self._runtime_dir.prepare()
            channel = connect(self._runtime_dir.socket, _ANSWER_S)
            if channel is not None and (not self.rank.is_first_here or self._busy_elsewhere(channel)):
                channel.close()
                channel = None
        except TimeoutError as err:
            raise ConfigError(
                f"the agent of run {settings.run!r} on this host does not answer{self._runtime_dir.holder()}: is it "
                "stopped (kill -CONT), or frozen by its cgroup? Let it continue, or end it (kill -KILL)"
            ) from err
        except OSError as err:
            raise ConfigError(
                f"no agent can listen in {self._runtime_dir.directory}: {err}; "
                "HARNESS_RUNTIME_DIR names another directory"
            ) from err
        if channel is not None:
            channel.socket.settimeout(None)
            return channel
        try:
            self._settings = settings
            return self._start_agent(self._environ)
        except ConnectionError as err:
            raise ConfigError(str(err)) from err

    def _busy_elsewhere(self, channel: Channel) -> bool:
        """Whether that agent is ending: it saves what its dead trainer sealed, and then a new agent takes over."""
        with contextlib.suppress(ChannelClosed):
            channel.send(messages.AskStatus())
            status = channel.receive().message
            return not isinstance(status, messages.Status) or status.trainer_pid is None
        return True

    def _greet(
        self,
        channel: Channel,
        generation: GenerationInfo | None = None,
        indexes: tuple[int, ...] = (),
        fds: Sequence[int] = (),
    ) -> tuple[messages.Welcome, int]:
        """Send hello; return the agent's answer and the control page's descriptor. Raises ConfigError if refused."""
        try:
            rank, size = self.rank.number, self.rank.world_size
            channel.send(messages.Hello(messages.PROTOCOL, rank, size, generation, indexes), fds)
            answer = channel.receive()
        except ChannelClosed as err:
            raise AgentGone(f"the agent ended before it answered: {err}") from err
        match answer.message:
            case messages.Welcome() as welcome:
                return welcome, answer.fds[0]
            case messages.Refused(why):
                raise ConfigError(why)
        raise ConfigError("the agent and the trainer use different versions of the harness")

    def _join(self, welcome: messages.Welcome, page: int) -> None:
        """Begin a generation with this agent: take its control page and its count of the seals."""
        self.page, self.sequence = TrainerSide(page), welcome.sequence
        self._note_welcome(welcome)

    def _note_welcome(self, welcome: messages.Welcome) -> None:
        self.generation = welcome.generation
        self.restarts, self.detached = welcome.restarts, welcome.detached
        self._script = without_secrets(welcome.command)
        self._settings = Settings.from_json(welcome.settings)

    @property
    def settings(self) -> Settings:
        """The run's settings, as the agent sent them."""
        return self._settings

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        began_at = time.monotonic()
        note_at = began_at + WAIT_NOTE_S
        with self._condition:
            while not condition():
                if self._error is not None:
                    raise self._error
                if time.monotonic() >= note_at:
                    say(f"waiting for {what}")
                    note_at = time.monotonic() + 10 * WAIT_NOTE_S
                self._condition.wait(0.2)
        self._waits.append((began_at, time.monotonic()))


def _error_from(error: str, message: str) -> HarnessError:
    kind, words = getattr(harness.errors, error, HarnessError), printable(message)
    return kind(words) if issubclass(kind, HarnessError) else HarnessError(words)
