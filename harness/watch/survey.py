"""Survey: what a watched directory holds while no program writes there: which checkpoints are whole, which are torn.

Owns the choice of the adapter, and the judgement of all candidates at a start. `watcher.py` looks while a program runs.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from harness.watch.adapter import Adapter, Pointer, built_in, named
from harness.watch.judge import Circumstances, Lack, is_named_by, lack_of, pointed, shape_of
from harness.watch.look import Candidate, Look, Seen, candidates, modified_ns, recognized
from harness.watch.patterns import pattern
from harness.watch.record import Record
from harness.watch.sound import Sound


@dataclass(frozen=True)
class Judged:
    """A candidate and what it lacks; `None` if it is a whole checkpoint."""

    candidate: Candidate
    lack: Lack | None

    @property
    def paths(self) -> list[str]:
        """What has to be moved to move it away: its directory, or its own files."""
        return [self.candidate.name] if self.candidate.is_directory else sorted(self.candidate.files)


@dataclass(frozen=True)
class Survey:
    """A watched directory at rest.

    Attributes:
        look: the directory.
        adapter: by which it was judged; `None` if nothing in it is known.
        others: other adapters whose names are there.
        judged: all candidates, the newest last.
    """

    look: Look
    adapter: Adapter | None
    others: tuple[Adapter, ...] = ()
    judged: tuple[Judged, ...] = ()

    @classmethod
    def of(cls, root: Path, name: str | None, record: Record | None = None) -> Survey:
        """Judge what lies in a directory now. Reads the ends of its files.

        Args:
            root: the directory.
            name: the adapter that the user has named, if any.
            record: of the newest snapshot, which tells what a whole checkpoint looks like; `None` if there is none.

        Raises:
            ConfigError: there is no such adapter.
        """
        look = Look.at(root)
        wanted = name or ("" if record is None else record.adapter)
        found = [named(wanted)] if wanted else recognized(look, built_in())
        if not name and wanted and found[0].general:  # it was a guess
            found = [one for one in recognized(look, built_in()) if not one.general] or found
        if not found:
            return cls(look, None)
        adapter, sound, known = found[0], Sound(), Circumstances(is_named=bool(name))
        if record is not None and record.adapter == adapter.name:
            known = replace(known, ranks=record.ranks, shape=frozenset(record.shape))
        all_of_them, judged = candidates(look, adapter), []
        for candidate in all_of_them:
            lack = lack_of(candidate, look, adapter, all_of_them, sound, known)
            judged.append(Judged(candidate, lack))
            if lack is None:
                known = replace(known, shape=shape_of(candidate))
        return cls(look, adapter, tuple(found[1:]), tuple(judged))

    @property
    def newest_whole(self) -> Candidate | None:
        """The newest whole checkpoint."""
        return next((one.candidate for one in reversed(self.judged) if one.lack is None), None)

    def not_whole_after(self, order: int) -> list[Judged]:
        """Return what is newer than this, and torn or not known to be whole."""
        return [one for one in self.judged if one.lack is not None and one.candidate.order > order]

    @property
    def is_dated(self) -> bool:
        """Whether nothing tells the order of what lies there but when it was written."""
        return any(one.candidate.is_dated for one in self.judged)

    @property
    def seen(self) -> frozenset[Seen]:
        """The files of all candidates."""
        return frozenset[Seen]().union(*(one.candidate.seen for one in self.judged))

    def pointers_without(self, gone: Collection[Judged]) -> list[str]:
        """Return the paths of the pointers that lead nowhere once these are gone.

        One that names none of the checkpoints, such as `release` in Megatron's tracker, is not among them.
        """
        left = [one.candidate for one in self.judged if one not in gone]
        paths = {path for one in gone for path in one.paths}
        pointers = () if self.adapter is None else self.adapter.pointers
        return [one.path for one in pointers if self._leads_nowhere(one, left, paths)]

    def _leads_nowhere(self, pointer: Pointer, left: Collection[Candidate], gone: Collection[str]) -> bool:
        says = pointed(self.look, pointer)
        if says is None or pattern(pointer.says).match(says) is None:
            return False
        if any(is_named_by(self.look, pointer, one) for one in left):
            return False
        return says in gone or not (self.look.root / pointer.path).parent.joinpath(says).exists()

    @property
    def pointers_astray(self) -> list[Pointer]:
        """The pointers that name no whole checkpoint."""
        whole = [one.candidate for one in self.judged if one.lack is None]
        pointers = () if self.adapter is None else self.adapter.pointers
        return [one for one in pointers if not any(is_named_by(self.look, one, each) for each in whole)]


def record_of(candidate: Candidate, adapter: Adapter, step: int, ranks: int | None) -> Record:
    """Return what a snapshot of this checkpoint says about itself.

    Args:
        candidate: the checkpoint.
        adapter: by which it was recognized.
        step: of the snapshot: the checkpoint's own, or its number if it tells none.
        ranks: how many ranks wrote it; `None` if that is not known.
    """
    return Record(
        adapter=adapter.name,
        name=candidate.name,
        is_directory=candidate.is_directory,
        step=step,
        order=candidate.order,
        texts=dict(candidate.match.texts),
        ranks=ranks,
        shape=tuple(sorted(shape_of(candidate))),
        modified_ns=modified_ns({**candidate.files, **candidate.shared}),
        links=dict(candidate.links),
        folders=candidate.folders,
    )


def saved_at(record: Record) -> str:
    """Return when a checkpoint's last file was written, ISO 8601 UTC."""
    return datetime.datetime.fromtimestamp(record.modified_ns / 1e9, datetime.UTC).isoformat(timespec="milliseconds")
