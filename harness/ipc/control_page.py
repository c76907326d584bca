"""The control page: values that agent and trainer exchange between two steps, without a system call.

Owns one page of 64-bit words in shared memory. Each word has one writer, and one method that writes it. An aligned
8-byte store is atomic on every machine that PyTorch runs on.

    AgentSide  ──COMMAND, GRANT, AT_STEP, AT_PLACE, ACKED, LOCAL_STEP, DURABLE_STEP, DEADLINE_NS, VOID, SET_STEP──▶
    AgentSide  ◀──TRAINER_STEP, HOLD──────────────────────────────────────────────────────────────────  TrainerSide

COMMAND and GRANT carry a sequence number, so that the other side sees that a value is new. They are two words because
they change independently: the agent grants a slot as soon as one is free, long before a snapshot is due, and the
command may change while the same slot stays granted. AT_STEP, AT_PLACE, HOLD, VOID and SET_STEP are of several ranks,
which meet at one place (`core/policy/meeting.py`); the first three repeat the sequence number of the command that they
belong to, so that none is taken for one about a later command, nor one half of a place for that of another.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import time
from dataclasses import dataclass

from harness.core.policy.meeting import Hold, Place, Where
from harness.ipc.pages import PAGE, keep_from_children

NO_SLOT = 255
_STEP_BITS = 40  # of AT_STEP: 10^12 steps; the rest is the end of the command's sequence number
_SEQUENCE = (1 << (64 - _STEP_BITS)) - 1
_MOST_PASSED = 127  # so many validations of one step are counted
_AT_BOUNDARY, _AT_FIRST, _AFTER_NONE = range(3)  # of AT_PLACE; behind one validation is 3, and so on


class Command(enum.IntEnum):
    """What the trainer has to do at its next boundary."""

    NOTHING = 0
    SNAPSHOT = 1
    """Take a snapshot into the granted slot."""
    SNAPSHOT_AND_LEAVE = 2
    """Take a snapshot as soon as a slot is granted, then leave the loop."""
    LEAVE = 3
    """Leave the loop without a new snapshot; the sealed ones count."""
    SNAPSHOT_AND_COMPARE = 4
    """Take a snapshot, and compare between ranks also what a wrapper keeps equal."""

    @classmethod
    def of(cls, news: int) -> Command:
        """Return the command in a COMMAND word."""
        return cls(news & 0xFF)

    @property
    def takes(self) -> bool:
        """Whether the trainer has to take a snapshot, and go on."""
        return self in (Command.SNAPSHOT, Command.SNAPSHOT_AND_COMPARE)

    @property
    def leaves(self) -> bool:
        """Whether the trainer has to leave its loop."""
        return self in (Command.SNAPSHOT_AND_LEAVE, Command.LEAVE)


class Word(enum.IntEnum):
    """Index of each word in the page. Steps are stored as step + 1, and 0 stands for none."""

    COMMAND = 0  # sequence << 8 | Command
    GRANT = 1  # sequence << 8 | slot, or NO_SLOT; that slot may be filled once for each new sequence
    AT_STEP = 2  # sequence of COMMAND << 40 | step + 1: where all ranks carry it out
    LOCAL_STEP = 3
    DURABLE_STEP = 4
    DEADLINE_NS = 5  # monotonic; 0 for none
    ACKED = 6  # sequence of the newest seal that the agent has noticed; until then the trainer fills no slot
    VOID = 7  # sequence of this rank's newest seal that was dropped, because there is no set for it
    TRAINER_STEP = 8  # completed optimizer steps
    HOLD = 9  # sequence of COMMAND << 16 | passed << 9 | entering << 8 | Hold: what this rank does about it
    SET_STEP = 10  # the newest step that all ranks have sealed
    AT_PLACE = 11  # sequence of COMMAND << 8 | which place of the step AT_STEP


_COMMAND, _TRAINER_STEP = int(Word.COMMAND), int(Word.TRAINER_STEP)  # an enum's member costs 60 ns a use


@dataclass(frozen=True)
class Request:
    """A decoded COMMAND or GRANT: `value` is a Command, or a slot's index."""

    value: int
    sequence: int

    def encode(self) -> int:
        """Return the word."""
        return self.sequence << 8 | self.value

    @classmethod
    def decode(cls, word: int) -> Request:
        """The inverse of `encode`."""
        return cls(word & 0xFF, word >> 8)


@dataclass(frozen=True)
class Said:
    """A decoded HOLD.

    Attributes:
        sequence: of the command that it is about.
        hold: what the rank does about it.
        entering: whether the rank is at the entry of a validation.
        passed: the validations of its step that it has entered before, up to 127.
    """

    sequence: int
    hold: Hold
    entering: bool = False
    passed: int = 0

    def encode(self) -> int:
        """Return the word."""
        return self.sequence << 16 | min(self.passed, _MOST_PASSED) << 9 | self.entering << 8 | self.hold

    @classmethod
    def decode(cls, word: int) -> Said:
        """The inverse of `encode`."""
        return cls(word >> 16, Hold(word & 0xFF), bool(word >> 8 & 1), word >> 9 & 0x7F)


def _place_byte(place: Place) -> int:
    match place.where:
        case Where.BOUNDARY:
            return _AT_BOUNDARY
        case Where.FIRST:
            return _AT_FIRST
        case Where.AFTER:
            return _AFTER_NONE + min(place.passed, _MOST_PASSED)


def _place(step: int, byte: int) -> Place:
    if byte >= _AFTER_NONE:
        return Place(step, Where.AFTER, byte - _AFTER_NONE)
    return Place(step, Where.FIRST if byte == _AT_FIRST else Where.BOUNDARY)


class _Page:
    """The mapped page, as 64-bit words."""

    def __init__(self, fd: int | None) -> None:
        """Map the memfd `fd`, which this side owns from now on; `None` for a page without another side."""
        self.fd = -1 if fd is None else fd
        self._map = bytearray(PAGE) if fd is None else mmap.mmap(fd, PAGE)
        if isinstance(self._map, mmap.mmap):
            keep_from_children(self._map)
        self.words = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Close the descriptor and unmap. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.words.release()
        if isinstance(self._map, mmap.mmap):
            with contextlib.suppress(BufferError):
                self._map.close()

    def _step(self, word: Word) -> int | None:
        value = self.words[word]
        return value - 1 if value else None


class AgentSide(_Page):
    """The agent's side of the page. For the main thread only, except `trainer_step`."""

    _also_of = -1
    """The command, by its sequence number, of which what the rank said counts for the present one."""

    @classmethod
    def create(cls) -> AgentSide:
        """Create a new page, all zero."""
        fd = os.memfd_create("harness-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE)
        return cls(fd)

    @property
    def trainer_step(self) -> int | None:
        """Steps that the trainer has completed; `None` before its loop. From any thread."""
        return self._step(Word.TRAINER_STEP)

    def forget_step(self) -> None:
        """Clear the step, because the trainer that wrote it is gone; the next one has completed none."""
        self.words[Word.TRAINER_STEP] = 0

    def command(self, command: Command, at: Place | None = None, *, keeps_word: bool = False) -> None:
        """Write the command for the next boundary; each call makes it new.

        Args:
            command: what to do.
            at: of several ranks, the place at which all do it.
            keeps_word: what the rank has said about the command before counts for this one, until it takes it back.
        """
        self._also_of = self.asked if keeps_word else -1
        if at is not None:
            self._agree(self.asked + 1, at)  # first: a rank that sees the command need not wait for its place
        self._write(Word.COMMAND, command)

    @property
    def asked(self) -> int:
        """The sequence number of the present command."""
        return Request.decode(self.words[Word.COMMAND]).sequence

    def agree(self, place: Place) -> None:
        """Write the place at which all ranks carry out the present command."""
        self._agree(self.asked, place)

    def _agree(self, sequence: int, place: Place) -> None:
        self.words[Word.AT_PLACE] = Request(_place_byte(place), sequence).encode()
        self.words[Word.AT_STEP] = (sequence & _SEQUENCE) << _STEP_BITS | (place.step + 1)

    @property
    def said(self) -> Said:
        """What the rank says about the present command."""
        said = Said.decode(self.words[Word.HOLD])
        return said if said.sequence in (self.asked, self._also_of) else Said(self.asked, Hold.NONE)

    def grant(self, index: int | None) -> None:
        """Grant the slot that may be filled, or none; each call makes it new."""
        self._write(Word.GRANT, NO_SLOT if index is None else index)

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge every seal up to number `sequence`: from now on the trainer follows grants again."""
        self.words[Word.ACKED] = sequence

    def tell_steps(self, local: int | None, durable: int | None) -> None:
        """Publish the newest committed steps."""
        for word, step in ((Word.LOCAL_STEP, local), (Word.DURABLE_STEP, durable)):
            self.words[word] = 0 if step is None else step + 1

    def tell_void(self, sequence: int) -> None:
        """Publish that the rank's seal of this number was dropped."""
        self.words[Word.VOID] = max(sequence, self.words[Word.VOID])

    def tell_set(self, step: int | None) -> None:
        """Publish the newest step that all ranks have sealed; `None` for none."""
        self.words[Word.SET_STEP] = 0 if step is None else step + 1

    def tell_deadline(self, at: float | None) -> None:
        """Publish the time until which the trainer may wait, in monotonic seconds; `None` for no limit."""
        self.words[Word.DEADLINE_NS] = 0 if at is None else int(at * 1e9)

    def _write(self, word: Word, value: int) -> None:
        """Write `value` under a new sequence number, so that the trainer sees that it is new."""
        self.words[word] = Request(value, Request.decode(self.words[word]).sequence + 1).encode()


class TrainerSide(_Page):
    """The trainer's side of the page. Never blocks."""

    def completed(self, step: int) -> int:
        """Publish that `step` is complete, and return `news`. This is the whole cost of a normal step."""
        words = self.words
        words[_TRAINER_STEP] = step + 1
        return words[_COMMAND]

    @property
    def news(self) -> int:
        """A number that changes whenever the agent writes a command."""
        return self.words[_COMMAND]

    @property
    def command(self) -> Command:
        """The agent's command for the next boundary."""
        return Command.of(self.words[_COMMAND])

    def agreed(self, news: int) -> Place | None:
        """Return the place at which all ranks carry out the command in `news`; `None` while it is not agreed."""
        word, sequence = self.words[Word.AT_STEP], Request.decode(news).sequence
        which = Request.decode(self.words[Word.AT_PLACE])
        if not word or word >> _STEP_BITS != sequence & _SEQUENCE or which.sequence != sequence:
            return None
        return _place((word & ((1 << _STEP_BITS) - 1)) - 1, which.value)

    def say(self, news: int, hold: Hold, *, entering: bool = False, passed: int = 0) -> None:
        """Publish what this rank does about the command in `news`, and at which place of its step. See `Said`."""
        self.words[Word.HOLD] = Said(Request.decode(news).sequence, hold, entering, passed).encode()

    def granted(self, used: int, sealed: int) -> Request | None:
        """Return the slot that may be filled now, with its grant's sequence; `None` while there is none.

        A grant that the agent wrote before it noticed the last seal may name the slot that it is about to read. So no
        grant counts until the agent has acknowledged that seal. It withdraws the grant first, but a CPU may let this
        side see the two stores the other way round: so the grant that was used last does not count either.

        Args:
            used: sequence number of the grant that was used last.
            sealed: sequence number of the last seal.
        """
        if self.words[Word.ACKED] < sealed:
            return None
        request = Request.decode(self.words[Word.GRANT])
        return None if request.sequence == used or request.value == NO_SLOT else request

    @property
    def local_step(self) -> int | None:
        """The newest step that is committed on this machine."""
        return self._step(Word.LOCAL_STEP)

    @property
    def durable_step(self) -> int | None:
        """The newest step that is committed in the store."""
        return self._step(Word.DURABLE_STEP)

    def is_void(self, sequence: int) -> bool:
        """Return whether this rank's newest seal, by its number, was dropped: it will never be durable."""
        return bool(sequence) and self.words[Word.VOID] >= sequence

    @property
    def set_step(self) -> int | None:
        """The newest step that all ranks have sealed: that snapshot counts."""
        return self._step(Word.SET_STEP)

    @property
    def time_is_up(self) -> bool:
        """Whether the deadline that the agent has published, if any, has passed."""
        deadline_ns = self.words[Word.DEADLINE_NS]
        return bool(deadline_ns) and time.monotonic_ns() >= deadline_ns
