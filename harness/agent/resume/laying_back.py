"""Laying back: the checkpoint that a watched program goes on from, in its own directory. Nothing there is overwritten.

Owns the decision between what lies there and what the store has. `watch/place.py` changes the directory. Blocks on disk
and network; one thread at a time.

    what is there, whole and not older ─▶ it stays;   else ─▶ the snapshot is fetched and laid back
    what is there, torn and newer than that ─▶ moved into a folder of ours
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cloud.notice import Deadline
from harness.agent.context import Context
from harness.agent.resume.finder import FETCH_S, Copy, Finder, Records, again
from harness.agent.resume_point import ResumePoint
from harness.core.manifest import Manifest
from harness.core.policy.copying import patience_s
from harness.errors import ConfigError, NoSpace
from harness.snapshots.candidates import StoredCopy
from harness.watch.adapter import Adapter, built_in
from harness.watch.lineage import Lineage
from harness.watch.look import Candidate, modified_ns
from harness.watch.ours import FETCHED, folder_of
from harness.watch.place import fetch_files, files_of, move_aside, point_to, put_in_place
from harness.watch.record import Record, decode
from harness.watch.survey import Judged, Survey
from harness.watch.watcher import Taken, taken_of


@dataclass(frozen=True)
class Laid:
    """What a program finds in its directory when it is started.

    Attributes:
        adapter: by which it is judged; `None` while that is not known.
        taken: what of it is in a snapshot.
        checkpoint: path of the newest whole checkpoint; `None` if there is none.
    """

    adapter: Adapter | None = None
    taken: Taken = field(default_factory=Taken)
    checkpoint: Path | None = None


class CheckpointFinder(Finder):
    """Finds the newest usable snapshot of files, and lays it back. What is there stays if it is not older."""

    looks_ahead = False

    def __init__(self, context: Context, run_id: str, root: Path, name: str | None, *, goes_back: bool) -> None:
        """Prepare; nothing is read yet.

        Args:
            context: of the agent.
            run_id: the identity that a snapshot must have to count.
            root: the watched directory.
            name: the adapter that the user has named, if any.
            goes_back: whether what is newer than the snapshot is not wanted.
        """
        super().__init__(context.keys, run_id, context.host, context.emit)
        self._say, self._root, self._name, self._goes_back = context.say, root, name, goes_back
        self._lineage = Lineage(root)
        self.laid = Laid()
        """What `find` has left in the directory."""

    def find(self, copies: Sequence[Copy], head: Callable[[Copy, Records], None]) -> ResumePoint | None:
        """As `Finder.find`. Without a snapshot, what is there stays, but for what is torn."""
        point = super().find(copies, head)
        if point is None:
            there = Survey.of(self._root, self._name)
            self._leave(there, there.newest_whole)
            self._lineage.forget()
            self.laid = Laid(there.adapter, Taken(), self._path_of(there.newest_whole))
        return point

    def _from_store(self, copy: StoredCopy, manifest: Manifest) -> ResumePoint:
        began_at = time.monotonic()
        files_of(manifest)
        record = decode(manifest.parts[0].state)
        if self._name is None and record.adapter not in built_in():
            raise ConfigError(f"snapshot {copy.id} was taken by an adapter of your own: name its file with --watch-as")
        there = Survey.of(self._root, self._name, record)
        whole, age = self._newest(there, record)
        stays = not self._goes_back and whole is not None and age >= 0
        if stays and whole is not None:
            self._leave(there, whole)
            self._note_kept(copy, record, whole, is_newer=age > 0)
        else:
            self._lay_back(copy, manifest, record, there)
        seconds = self._emit_fetched(copy, 0 if stays else manifest.payload_bytes, began_at, verified=not stays)
        return ResumePoint(copy.id, copy.tier, (), (), (), True, seconds, manifest)

    def _newest(self, there: Survey, record: Record) -> tuple[Candidate | None, int]:
        """Return the newest whole checkpoint there, and whether it is older (-1) or newer (1) than a snapshot.

        0 if it is the snapshot. Where only times tell the order, those of another machine's clock do not count.
        """
        whole = there.newest_whole
        if whole is None or not _is_of(there, record):
            return whole, -1 if whole is None or modified_ns(whole.files) < record.modified_ns else 1
        standing = self._lineage.standing(record.order) if whole.is_dated else None
        if standing is None:
            return whole, (whole.order > record.order) - (whole.order < record.order)
        all_of_them = [one.candidate for one in there.judged if one.lack is None]
        newest = max(all_of_them, key=lambda one: (standing.age(one.seen), one.order))
        return newest, standing.age(newest.seen)

    def _note_kept(self, copy: StoredCopy, record: Record, whole: Candidate, *, is_newer: bool) -> None:
        there = Survey.of(self._root, self._name, record)
        unsure = [one.candidate.seen for one in there.not_whole_after(whole.order)]
        older = there.seen.difference(*unsure)
        taken = taken_of(whole, record, older)
        if is_newer:
            self._say(f"{whole.name} is newer than snapshot {copy.id}: the program goes on from what it has")
            is_same, older = _is_of(there, record), older - whole.seen
            order = record.order if is_same else -1  # before all of it, if it is of another adapter
            taken = replace(taken, order=order, files=frozenset(), older=older) if is_same else Taken(step=record.step)
        if whole.is_dated and self._lineage.standing(record.order) is None:
            self._lineage.begin(record.order, () if is_newer else whole.seen, older)
        self.laid = Laid(there.adapter, taken, self._path_of(whole))

    def _lay_back(self, copy: StoredCopy, manifest: Manifest, record: Record, there: Survey) -> None:
        deadline = Deadline.after(patience_s(manifest.payload_bytes, FETCH_S))
        try:
            with self._unless_retired(copy):
                into = folder_of(self._root) / FETCHED
                fetch_files(into, copy.store, self._keys, manifest, lambda: deadline, retry=again)
            order = _order_in(there, record)
            is_same = _is_of(there, record)  # else only what is torn is known to be worse than the snapshot
            newer = there.not_whole_after(-1 if is_same and there.is_dated else order)
            self._move([one for one in newer if is_same or (one.lack is not None and one.lack.is_torn)])
            if self._goes_back or (is_same and there.is_dated):
                left = [one for one in there.judged if one.candidate.order > order]
                folder = move_aside(self._root, [path for one in left for path in one.paths], "newer")
                self._told(folder, f"{len(left)} newer checkpoints")
            pointers = there.adapter.pointers if is_same and there.adapter is not None else ()
            put_in_place(self._root, record, pointers, [file.path for file in files_of(manifest)])
        except OSError as err:
            raise NoSpace(f"snapshot {copy.id} cannot be laid back into {self._root}: {err.strerror}") from err
        back = Survey.of(self._root, self._name, record)
        whole = next((one.candidate for one in back.judged if one.candidate.name == record.name), None)
        taken = Taken(record.order, record.step, frozenset(), frozenset(record.shape), record.ranks, back.seen)
        self.laid = Laid(back.adapter, taken, self._root / record.name)
        if whole is not None:
            self.laid = replace(self.laid, taken=taken_of(whole, record, back.seen))
        if back.is_dated:
            self._lineage.begin(record.order, () if whole is None else whole.seen, back.seen)

    def _leave(self, there: Survey, whole: Candidate | None) -> None:
        """Let the program go on from what is there: it takes the greatest number, or what a pointer names."""
        newer = there.not_whole_after(-1 if whole is None else whole.order)
        torn = [one for one in newer if one.lack is not None and one.lack.is_torn]
        if whole is None:  # pointers first: a torn checkpoint that nothing names is not looked for
            folder = move_aside(self._root, there.pointers_without(torn), "torn")
            self._told(folder, "what named the newest checkpoint, and leads nowhere")
        self._move(torn)
        if whole is not None:
            for pointer in there.pointers_astray:
                point_to(self._root, pointer, whole.match.texts, whole.name)

    def _move(self, judged: Sequence[Judged]) -> None:
        for one in judged:
            assert one.lack is not None, "it is not whole"
            folder = move_aside(self._root, one.paths, "torn")
            self._told(folder, f"{one.candidate.name} is no whole checkpoint, since it {one.lack.why}")

    def _told(self, folder: Path | None, what: str) -> None:
        if folder is not None:
            self._say(f"{what}: moved to {folder}")

    def _path_of(self, candidate: Candidate | None) -> Path | None:
        return None if candidate is None else self._root / candidate.name


def _is_of(there: Survey, record: Record) -> bool:
    """Whether what lies in the directory is judged by the adapter of a snapshot: else their orders say nothing."""
    return there.adapter is not None and there.adapter.name == record.adapter


def _order_in(there: Survey, record: Record) -> int:
    """Return the order of a snapshot among what lies there: before all of it, if it is of another adapter."""
    return record.order if _is_of(there, record) else -1
