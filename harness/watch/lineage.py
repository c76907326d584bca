"""Lineage: which snapshots a watched directory has given or was given, and which files were there by then.

Owns a file in our folder, for checkpoints whose names tell no order. When such a file was written says nothing: the
clock of the machine that wrote the snapshot may have been ahead, or this one's is behind. So what decides at a start is
whether a file was there already when the snapshot was taken, or laid back; if it was not, it was written since.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.watch.look import Seen
from harness.watch.ours import LINEAGE, folder_of

Trace = tuple[int, int, int]
"""Inode, size and time of a file. The number of its device may be another one after a reboot."""


class _Line(msgspec.Struct, frozen=True):
    order: int
    files: tuple[Trace, ...]
    beside: tuple[Trace, ...]


_LINES = msgspec.json.Decoder(_Line)


@dataclass(frozen=True)
class Standing:
    """What lay in a directory when a snapshot was taken there, or laid back.

    Attributes:
        files: the snapshot's own files.
        known: all files, also of earlier ones; `None` if that was elsewhere: nothing here is newer then.
    """

    files: frozenset[Trace] = frozenset()
    known: frozenset[Trace] | None = frozenset()

    def age(self, files: Collection[Seen]) -> int:
        """Return whether files are older than the snapshot (-1), are the snapshot (0), or were written since (1)."""
        traces = {_trace(seen) for seen in files}
        if traces == self.files:
            return 0
        return -1 if self.known is None or traces <= self.known else 1


class Lineage:
    """What is known of one directory's snapshots. Where that cannot be written, nothing is known."""

    def __init__(self, root: Path) -> None:
        """Read nothing yet."""
        self._path = folder_of(root) / LINEAGE

    def begin(self, order: int, files: Collection[Seen], beside: Collection[Seen]) -> None:
        """Forget the snapshots before, since the directory goes on from this one.

        Args:
            order: of the snapshot.
            files: its files as they lie in the directory; none if it does not lie there.
            beside: other files there that are not newer.
        """
        self.forget()
        self.add(order, files, beside)

    def add(self, order: int, files: Collection[Seen], beside: Collection[Seen]) -> None:
        """Note a snapshot that this directory gives, before it is one. As `begin`, but what came before stays known."""
        line = msgspec.json.encode(_Line(order, tuple(map(_trace, files)), tuple(map(_trace, beside))))
        try:
            with self._path.open("ab") as file:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.forget()

    def forget(self) -> None:
        """Forget all snapshots."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def standing(self, order: int) -> Standing | None:
        """Return what lay here at the snapshot of this order; `None` if nothing is known of this directory.

        One that is not known, and not older than all that are, was taken elsewhere: another machine went on from what
        this directory had given.
        """
        known, lines = set[Trace](), self._lines()
        for line in lines:
            known |= {*line.files, *line.beside}
            if line.order == order:
                return Standing(frozenset(line.files), frozenset(known))
        if not lines:
            return None
        return Standing() if order < lines[0].order else Standing(known=None)

    def _lines(self) -> list[_Line]:
        try:
            data = self._path.read_bytes()
        except OSError:
            return []
        found = []
        for line in data.splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # the last one may be cut off
                found.append(_LINES.decode(line))
        return found


def _trace(seen: Seen) -> Trace:
    return seen.inode[1], seen.size, seen.modified_ns
