"""What a rehearsal tells the trainer, and what the trainer tells it: as types, one JSON object per line.

Owns the instructions of one start of the program, and the lines that its trainer writes. `harness.trainer.witness`
writes them; `harness.rehearse` compares those of an unbroken program with those of an interrupted one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

OUT = "{out}"
"""Stands for a folder of each pass, in the command of a rehearsal."""
VARIABLE = "HARNESS_WITNESS"
"""Environment variable with the instructions."""


class Interruption(msgspec.Struct, frozen=True, order=True):
    """A place at which one start of the program is interrupted, as by a notice.

    Attributes:
        step: completed steps; the first boundary with at least so many counts.
        where: step (after it), evaluating (on the way into a validation), validation (inside of it), or resumed (at the
            first boundary after a resume).
    """

    step: int
    where: str = "step"


class Instructions(msgspec.Struct, frozen=True):
    """The instructions of one start.

    Attributes:
        file: the file to which lines are appended.
        stop: the step at which it ends at the latest.
        interruption: where it is interrupted before; `None` for nowhere.
    """

    file: str
    stop: int
    interruption: Interruption | None = None


def file_of(file: str, rank: int) -> str:
    """Return the file to which a rank appends its lines: the first one's is `file`."""
    return f"{file}.{rank}" if rank else file


class Line(msgspec.Struct, frozen=True, tag_field="line", tag=str.lower):
    """A line of the trainer."""


class Handed(Line, frozen=True):
    """A loop has handed out a batch.

    Attributes:
        epoch: of `ckpt.epochs`; `None` outside of it.
        number: the number of the batch in its loop, from 0.
        digest: of its bytes.
        again: whether the program is on its way to the place of the snapshot, and gets the batch again.
    """

    epoch: int | None
    number: int
    digest: str
    again: bool = False


class Stepped(Line, frozen=True):
    """A step is complete.

    Attributes:
        step: completed steps.
        epoch: see `Handed`.
        random: digests of the random states, by library.
        state: digests of tensors, and small values, by name.
        variables: texts of the program's own variables, by name and place.
        objects: digests of objects that have a state, and were not given to the Checkpointer, by name, place and type.
        optimizers: whether each has stepped in this start, by name.
        gradients: digests of those that a later step may read, as far as the trainer knows that, by name.
        trained: names of the parameters that optimizers among the states have, as far as modules there have them.
    """

    step: int
    epoch: int | None
    random: dict[str, str]
    state: dict[str, str]
    variables: dict[str, str] = {}
    objects: dict[str, str] = {}
    optimizers: dict[str, bool] = {}
    gradients: dict[str, str] = {}
    trained: tuple[str, ...] = ()


class Entered(Line, frozen=True):
    """A validation begins.

    Attributes:
        step: completed steps.
        boundary: whether an interruption there can be resumed there.
    """

    step: int
    boundary: bool


class EpochEnded(Line, frozen=True):
    """An epoch of `ckpt.epochs` is over, after so many steps."""

    epoch: int
    step: int


class Resumed(Line, frozen=True):
    """A snapshot of this step was restored; without one, the program has begun at step 0.

    Attributes:
        step: completed steps.
        seed: the one that torch's global generator got last; each start draws one for itself if the program sets none.
    """

    step: int
    seed: int | None = None


class Interrupted(Line, frozen=True):
    """The interruption was announced here, or the last step was reached, if `where` is empty."""

    step: int
    where: str


class Finished(Line, frozen=True):
    """The program has reached its own end, after so many steps."""

    step: int


AnyLine = Handed | Stepped | Entered | EpochEnded | Resumed | Interrupted | Finished


class Record(msgspec.Struct, frozen=True):
    """The result of a rehearsal, as it is kept with the run.

    Attributes:
        identical: whether the interrupted program was bit-identical to the unbroken one.
        places: the places of the interruptions, in words.
        step: the step at which the two were compared last.
        command: the program's words, see `words_of`; `{out}` in one stands for any text.
    """

    identical: bool
    places: tuple[str, ...]
    step: int
    command: tuple[str, ...]

    def fits(self, words: Sequence[str]) -> bool:
        """Whether a program with these words is the one that was rehearsed, with the same configuration."""
        return len(words) == len(self.command) and all(
            re.fullmatch(".*".join(map(re.escape, wanted.split(OUT))), word, re.DOTALL)
            for wanted, word in zip(self.command, words, strict=True)
        )

    @property
    def in_words(self) -> str:
        """The result in one line."""
        places = ", ".join(self.places)
        if self.identical:
            return f"rehearsed: identical at step {self.step} after interruptions at steps {places}"
        return f"rehearsed, and NOT identical after interruptions at steps {places}: see harness rehearse"


def encode_line(line: AnyLine) -> bytes:
    """Return a line with its newline."""
    return msgspec.json.encode(line) + b"\n"


def decode_lines(data: bytes) -> list[AnyLine]:
    """Return the complete lines in `data`. Raises ValueError if one of them is none that `encode_line` made."""
    return [_LINES.decode(line) for line in data.split(b"\n")[:-1]]


def parse_record(data: bytes) -> Record:
    """Return the record in `data`. Raises ValueError if there is none."""
    return _RECORDS.decode(data)


_LINES: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)
_RECORDS = msgspec.json.Decoder(Record)
