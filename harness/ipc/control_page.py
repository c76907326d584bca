"""The control page: what agent and trainer tell each other between two steps, without a system call.

Owns one page of 64-bit words in shared memory, and who writes which: each word has one writer, and one method that
writes it. An aligned 8-byte store is atomic on every machine that PyTorch runs on.

    AgentSide  ──COMMAND, GRANT, ACKED, LOCAL_STEP, DURABLE_STEP, DEADLINE_NS──▶  TrainerSide
    AgentSide  ◀──TRAINER_STEP───────────────────────────────────────────────── TrainerSide

COMMAND and GRANT carry a sequence number, so that the other side sees that they are news. They are two words because
they are two facts: a slot is granted as soon as one is free, long before a snapshot is due; and what is commanded may
change while the same slot stays granted.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import time
from dataclasses import dataclass

from harness.ipc.pages import PAGE, keep_from_children

NO_SLOT = 255


class Command(enum.IntEnum):
    """What the agent wants of the trainer at its next boundary."""

    NOTHING = 0
    SNAPSHOT = 1
    """Take a snapshot into the slot that is granted."""
    SNAPSHOT_AND_LEAVE = 2
    """Take one as soon as a slot is granted, then leave the loop."""
    LEAVE = 3
    """Leave the loop with what is sealed already."""

    @classmethod
    def of(cls, news: int) -> Command:
        """What a COMMAND word says."""
        return cls(news & 0xFF)

    @property
    def leaves(self) -> bool:
        """Whether the loop is to be left."""
        return self in (Command.SNAPSHOT_AND_LEAVE, Command.LEAVE)


class Word(enum.IntEnum):
    """Words of the page, by their place. Steps are kept as step + 1, and 0 stands for none."""

    COMMAND = 0  # sequence << 8 | Command
    GRANT = 1  # sequence << 8 | slot, or NO_SLOT; that slot may be filled once for each new sequence
    LOCAL_STEP = 3
    DURABLE_STEP = 4
    DEADLINE_NS = 5  # monotonic; 0 for none
    ACKED = 6  # sequence of the newest seal that the agent has taken notice of; until then the trainer fills no slot
    TRAINER_STEP = 8  # completed optimizer steps


_COMMAND, _TRAINER_STEP = int(Word.COMMAND), int(Word.TRAINER_STEP)  # an enum's member costs 60 ns a use


@dataclass(frozen=True)
class Request:
    """A decoded COMMAND or GRANT: `value` is a Command, or a slot's index."""

    value: int
    sequence: int

    def encode(self) -> int:
        """The word."""
        return self.sequence << 8 | self.value

    @classmethod
    def decode(cls, word: int) -> Request:
        """The inverse of `encode`."""
        return cls(word & 0xFF, word >> 8)


class _Page:
    """The mapped words."""

    def __init__(self, fd: int | None) -> None:
        """Map the memfd `fd`, which this side owns from now on; `None` for a page that nobody has on the other side."""
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
    """What the agent writes, and reads of its trainer. The main thread's, but for `trainer_step`."""

    @classmethod
    def create(cls) -> AgentSide:
        """A new page, all zero."""
        fd = os.memfd_create("harness-control", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE)
        return cls(fd)

    @property
    def trainer_step(self) -> int | None:
        """Steps that the trainer has completed; `None` before its loop. From any thread."""
        return self._step(Word.TRAINER_STEP)

    def forget_step(self) -> None:
        """The trainer that wrote the step is gone: the next one has made none."""
        self.words[Word.TRAINER_STEP] = 0

    def command(self, command: Command) -> None:
        """To be followed at the next boundary; news each time."""
        self._write(Word.COMMAND, command)

    def grant(self, index: int | None) -> None:
        """The slot that may be filled, or none; news each time."""
        self._write(Word.GRANT, NO_SLOT if index is None else index)

    def acknowledge(self, sequence: int) -> None:
        """Every seal up to number `sequence` is known: from now on a grant counts again."""
        self.words[Word.ACKED] = sequence

    def tell_steps(self, local: int | None, durable: int | None) -> None:
        """The newest committed steps."""
        for word, step in ((Word.LOCAL_STEP, local), (Word.DURABLE_STEP, durable)):
            self.words[word] = 0 if step is None else step + 1

    def tell_deadline(self, at: float) -> None:
        """Until when the trainer may wait, monotonic seconds."""
        self.words[Word.DEADLINE_NS] = int(at * 1e9)

    def _write(self, word: Word, value: int) -> None:
        """Under a new sequence number, so that the trainer sees that it is news."""
        self.words[word] = Request(value, Request.decode(self.words[word]).sequence + 1).encode()


class TrainerSide(_Page):
    """What the trainer writes, and reads of its agent. Never blocks."""

    def completed(self, step: int) -> int:
        """Tell that `step` is complete; what `news` is now. The whole cost of a normal step."""
        words = self.words
        words[_TRAINER_STEP] = step + 1
        return words[_COMMAND]

    @property
    def news(self) -> int:
        """Another number whenever the agent has written a command."""
        return self.words[_COMMAND]

    @property
    def command(self) -> Command:
        """What is wanted at the next boundary."""
        return Command.of(self.words[_COMMAND])

    def granted(self, used: int, sealed: int) -> Request | None:
        """The slot that may be filled now, with its grant's sequence; `None` while there is none.

        A grant that was written before the agent took notice of the last seal may be for the very slot that it is about
        to read; so none counts until then.

        Args:
            used: the grant that was used last.
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

    @property
    def time_is_up(self) -> bool:
        """Whether the deadline that the agent has told, if any, has passed."""
        deadline_ns = self.words[Word.DEADLINE_NS]
        return bool(deadline_ns) and time.monotonic_ns() >= deadline_ns
