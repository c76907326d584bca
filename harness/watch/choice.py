"""Choice: by which adapter a program's directory is judged, while the program runs.

Owns the rule. The first file that looks like a checkpoint may be none, and many programs have files of such names. So a
guess gives way: to the table of a framework, and to another guess that explains what has been written since.
"""

from __future__ import annotations

from collections.abc import Collection

from harness.watch.adapter import Adapter, built_in
from harness.watch.look import Candidate, Look, Seen, candidates, recognized
from harness.watch.sound import Sound

_REWRITTEN = 2  # times that the same file was found whole, with other content


class Choice:
    """The adapter of one program. One thread."""

    def __init__(self, sound: Sound) -> None:
        """Choose nothing yet. `sound` looks into files."""
        self._sound = sound
        self._before: Candidate | None = None
        self._states = set[frozenset[Seen]]()
        self._is_rewritten = False

    def begin(self, adapter: Adapter | None, step: int) -> None:
        """Begin with another program.

        Args:
            adapter: of what it goes on from; `None` if that is not known.
            step: of the snapshot that it goes on from.
        """
        self._before, self._states = None, set()
        # The second snapshot of one file shows that it is written again and again, whichever program has begun it.
        self._is_rewritten = adapter is not None and adapter.checkpoint.files_are == "one" and step > 1

    def of(self, look: Look, before: Adapter | None, known: Collection[Seen], *, has_taken: bool) -> Adapter | None:
        """Return the adapter to use from now on; `None` if nothing is recognized.

        Args:
            look: the directory.
            before: the adapter so far.
            known: files that are not new.
            has_taken: whether a checkpoint was taken by the adapter so far.
        """
        if before is not None and has_taken and not before.general:
            return before
        there = recognized(look, built_in())
        first = next(iter(there), None)
        if first is None or not first.general:
            return first or before
        if before is not None and not before.general:
            return before
        for one in there:
            if one.checkpoint.files_are == "one" and self._is_written_again(look, one):
                return one
        if before not in there or (not _has_new(look, before, known) and _has_new(look, first, known)):
            return first
        return before

    def _is_written_again(self, look: Look, adapter: Adapter) -> bool:
        """Whether the only file of its kind has been whole before, with other content: a program goes on from that."""
        found = candidates(look, adapter)[-1]
        if self._before is not None and found.seen == self._before.seen and self._is_sound(look, found):
            self._states.add(found.seen)
        self._before = found
        self._is_rewritten = self._is_rewritten or len(self._states) >= _REWRITTEN
        return self._is_rewritten

    def _is_sound(self, look: Look, candidate: Candidate) -> bool:
        return all(self._sound.why_not(look.root, path, seen) is None for path, seen in candidate.files.items())


def _has_new(look: Look, adapter: Adapter | None, known: Collection[Seen]) -> bool:
    found = [] if adapter is None else candidates(look, adapter)
    return any(not one.seen <= set(known) for one in found)
