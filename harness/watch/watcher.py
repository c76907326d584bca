"""Watcher: looks at a directory while a program writes there, and sets each whole checkpoint aside.

Owns one thread, and the newest checkpoint that was set aside. Knows no snapshots: it reports what it has.

    a look each second ─▶ the newest candidates ─▶ whole? ─▶ set aside ─▶ `found`
    the program has ended ─▶ one last look ─▶ `settled`
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloud.priority import Background
from harness.watch import processes
from harness.watch.adapter import Adapter
from harness.watch.aside import Changed, Kept, set_aside, sweep
from harness.watch.choice import Choice
from harness.watch.judge import Circumstances, Lack, lack_of, shape_of
from harness.watch.lineage import Lineage
from harness.watch.look import Candidate, Look, Seen, candidates
from harness.watch.record import Record
from harness.watch.sound import Sound, is_of_weights
from harness.watch.survey import record_of

LOOK_S = 1.0
"""Seconds between two looks. A checkpoint is taken once nothing in it has changed from one to the next."""
_HOT_S = 0.2  # after the program was asked to save
_IN_VAIN = 3  # looks at a checkpoint that has just changed each time, until two come close together, and closer
_LEAST_S = 0.02  # between them, at last
_SHARE = 0.1  # of the time, at most, that looks at a directory of very many files take
_SURVIVORS_S = 5.0  # how long processes of a program that has ended are waited for; then they are killed, if it died
_STANDS_S = 60.0  # after so long, it is logged why nothing newer is saved
_DIGITS = re.compile(r"[0-9]+")
_NOT_BELOW_BYTES = 256 << 20  # of the disk, that a copy leaves free


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint that was set aside.

    Attributes:
        record: what it is.
        kept: its files.
        seconds: how long setting it aside took.
    """

    record: Record
    kept: Kept
    seconds: float


@dataclass(frozen=True)
class Taken:
    """The newest checkpoint that is known: nothing older is set aside.

    Attributes:
        order: see `Candidate`.
        step: of its snapshot.
        files: what it consisted of.
        shape: see `shape_of`; empty if it is not known.
        ranks: how many ranks wrote it; `None` if that is not known.
        older: files of all else that lay there when the program began, and is not newer. When they were written does
            not tell that: another machine's clock may have set their times.
    """

    order: int = -1
    step: int = -1
    files: frozenset[tuple[str, Seen]] = frozenset()
    shape: frozenset[str] = frozenset()
    ranks: int | None = None
    older: frozenset[Seen] = frozenset()


class Watcher:
    """One thread that looks. `begin`, `program_ended`, `hurry` and `close` from any other."""

    def __init__(
        self,
        root: Path,
        found: Callable[[Checkpoint], None],
        say: Callable[[str], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        """Nothing is looked at before `begin`.

        Args:
            root: the watched directory.
            found: called, in the watcher's thread, with each checkpoint that was set aside. Its receiver lets it go.
            say: logs a message to the user.
            on_bug: called with the exception that ended the thread unexpectedly.
        """
        self._root, self._found, self._say, self._on_bug = root, found, say, on_bug
        self._condition = threading.Condition()
        self._adapter: Adapter | None = None
        self._is_named = False
        self._taken = Taken()
        self._pid: int | None = None
        self._ended: bool | None = None
        self._is_last = False
        self._leaves_s: float | None = None
        self._mark: tuple[str, str] | None = None
        self._hurries = self._closing = self._looks = False
        self._began = False
        self._sound, self._lineage = Sound(), Lineage(root)
        self._choice = Choice(self._sound)
        self._before: Look | None = None
        self._changed_at: dict[str, tuple[Seen, float]] = {}
        self._family: list[int] = []
        self._ranks: int | None = None
        self._there: frozenset[tuple[str, Seen]] | None = None
        """Files that lay there when the newest checkpoint was taken, or when the program began."""
        self._number = 0
        self._why = ""
        self._passed_over = ""
        self._passing = 0
        self._said = set[str]()
        self._stands = "", 0.0
        """A reason without its numbers, and since when it stands."""
        self._background = Background()

    # ---- from other threads -----------------------------------------------------------------------------------------

    def begin(
        self, adapter: Adapter | None, taken: Taken, pid: int, *, is_named: bool, mark: tuple[str, str] | None = None
    ) -> None:
        """Look from now on, at what a program writes.

        Args:
            adapter: by which it is judged; `None` to find out.
            taken: what is known already.
            pid: of the program.
            is_named: whether the user has named the adapter.
            mark: a variable, and its value, in the environment of every process that the program starts, and of no
                other.
        """
        with self._condition:
            self._adapter, self._taken, self._pid, self._is_named = adapter, taken, pid, is_named
            self._mark = mark
            self._ended, self._before, self._family, self._ranks = None, None, [], None
            self._there, self._passed_over = None, ""
            self._choice.begin(adapter, taken.step)
            self._changed_at.clear()
            if not self._began:
                self._began = True
                threading.Thread(target=self._run, name="harness-watch", daemon=True).start()
            self._condition.notify_all()

    def program_ended(self, *, well: bool, is_last: bool, leaves_s: float | None = None) -> None:
        """Look once more, and then no more until the next program.

        Args:
            well: it says that it has reached its end.
            is_last: whether no other will be started here: then nothing writes to its files any more.
            leaves_s: how long processes that live on may take to end, since the run is interrupted; then they are
                killed. `None` if it is not.
        """
        with self._condition:
            if self._pid is not None:
                self._ended, self._is_last, self._leaves_s = well, is_last, leaves_s
            self._condition.notify_all()

    def hurry(self) -> None:
        """Look more often, at full speed: the program was asked to save."""
        with self._condition:
            self._hurries = True
            self._background.urgent = True
            self._condition.notify_all()

    @property
    def settled(self) -> bool:
        """Whether nothing is looked at, and nothing will be before the next program."""
        with self._condition:
            return self._pid is None

    @property
    def adapter(self) -> Adapter | None:
        """By which the directory is judged; `None` while nothing in it is known."""
        return self._adapter

    @property
    def step(self) -> int | None:
        """Of the newest checkpoint that was set aside or laid back; `None` if there is none."""
        return None if self._taken.step < 0 else self._taken.step

    @property
    def why(self) -> str:
        """Why the newest thing that was written is not saved; empty if it is, or if there is none."""
        return self._why or self._passed_over

    def close(self) -> None:
        """Stop soon."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._background.begin()
        try:
            sweep(self._root)
            look_s = 0.0
            while self._await_look(look_s / _SHARE):
                began, ended = time.monotonic(), self._ended
                if ended is not None and self._outlived():
                    self._look(None)  # something may still write: nothing may change until the last look
                    threading.Event().wait(LOOK_S)
                self._look(ended)
                if ended is None and self._passing >= _IN_VAIN:
                    self._look_between()
                look_s = time.monotonic() - began
                if ended is not None:
                    with self._condition:
                        self._pid = None
        except Exception as err:  # noqa: BLE001  the thread's root: a bug here must end the agent, not hang it
            self._on_bug(err)

    def _outlived(self) -> bool:
        """Wait for the processes of a program that has ended. Return whether some live on.

        They do not live on beside the next program, which would write to the same files: ranks that have lost their
        launcher are killed after a while. Nor do they where the run is interrupted: what they would write is not saved.
        Those of a program that has ended well are left alone.
        """
        if self._leaves_s is not None:
            self._have_them_leave(self._leaves_s)
        self._family = sorted({*self._family, *self._marked()})
        give_up_at = time.monotonic() + _SURVIVORS_S
        while lives := processes.alive(self._family):
            if time.monotonic() > give_up_at:
                break
            threading.Event().wait(0.05)
        if (
            lives
            and not self._ended
            and self._leaves_s is None
            and not self._is_last
            and (ours := processes.alive(self._marked()))
        ):
            self._say(f"processes that have outlived the program are killed: {', '.join(map(str, ours))}")
            processes.kill(ours)
            lives = processes.alive(lives)
        self._family = lives
        return bool(lives)

    def _have_them_leave(self, within_s: float) -> None:
        """End what a program has left, such as the one that a shell script had started. Look meanwhile.

        One that writes gets half of the time to do so. Only then it gets the signal that ends most programs.
        """
        give_up_at, asked = time.monotonic() + within_s / 2, False
        while (lives := processes.alive(self._marked())) and not self._closing:
            is_over = time.monotonic() > give_up_at
            if asked and is_over:
                self._say(f"processes that have outlived the program are killed: {', '.join(map(str, lives))}")
                return processes.kill(lives)
            if not asked and (is_over or not processes.open_for_writing(lives, self._root)):
                give_up_at, asked = time.monotonic() + within_s / 2, True
                self._say(f"processes that have outlived the program get SIGTERM: {', '.join(map(str, lives))}")
                processes.send(lives, signal.SIGTERM)
            self._look(None)
            threading.Event().wait(0.05)
        return None

    def _marked(self) -> list[int]:
        return [] if self._mark is None else processes.marked(*self._mark)

    def _await_look(self, at_least_s: float) -> bool:
        with self._condition:
            wait_s = max(_HOT_S if self._hurries else LOOK_S, at_least_s)
            self._condition.wait_for(
                lambda: self._closing or (self._pid is not None and self._ended is not None), wait_s
            )
            self._condition.wait_for(lambda: self._closing or self._pid is not None)
            return not self._closing

    def _look_between(self) -> None:
        """Look again soon, at a program that writes the same checkpoint again and again: between two of its writes."""
        gap_s = max(LOOK_S / 2.0 ** min(10, self._passing - _IN_VAIN + 1), _LEAST_S)
        with self._condition:
            self._condition.wait_for(lambda: self._closing or self._ended is not None, gap_s)
        self._look(None)

    def _look(self, ended: bool | None) -> None:
        """Look once. `ended`: whether the program has ended, and well; `None` while it lives."""
        look = Look.at(self._root)
        there = frozenset(look.files.items())
        self._there = there if self._there is None else self._there
        self._recognize(look, self._there)
        if self._adapter is None:
            self._tell_what_stands(self._unknown(look))
            self._before = look
            return
        found = self._in_order(candidates(look, self._adapter))
        newer = [one for one in found if self._is_newer(one)]
        late = [one for one in found if self._is_late(one)]
        known = self._circumstances(look, ended) if newer or late else Circumstances()
        if not known.shape:
            whole = (
                one for one in reversed(newer[:-1]) if not lack_of(one, look, self._adapter, found, self._sound, known)
            )
            known = replace(known, shape=next(map(shape_of, whole), frozenset()))
        self._why, passing = "", False
        for candidate in reversed(newer):
            lack = lack_of(candidate, look, self._adapter, found, self._sound, known)
            lack = lack or self._take(candidate, self._adapter, found)
            if lack is None:
                self._there, late, self._passed_over = there, [], ""
                break
            self._why = self._why or f"{candidate.name} {lack.why}"
            passing = passing or lack.is_passing
        self._passing = self._passing + 1 if passing else 0
        self._tell_what_stands(self._why and f"{self._why}: it is not saved so far")
        for candidate in late:
            if not lack_of(candidate, look, self._adapter, found, self._sound, known):
                self._pass_over(candidate)
        self._before = look
        self._sound.forget_others({(path, seen) for path, seen in look.files.items()})

    def _recognize(self, look: Look, there: frozenset[tuple[str, Seen]]) -> None:
        """Choose the adapter by what lies there, unless the user has named it."""
        before, taken = self._adapter, self._taken
        if self._is_named:
            return
        known = {seen for _, seen in there | taken.files} | taken.older
        found = self._choice.of(look, before, known, has_taken=taken.order >= 0)
        if found is None or found == before:
            return
        self._adapter = found
        if before is not None:
            self._say(f"{self._root}: {found.title} (adapter {found.name}); it was taken for {before.name} so far")
            older = taken.older.union(seen for _, seen in taken.files)
            self._taken = Taken(step=taken.step, older=older)  # they are in another order

    def _unknown(self, look: Look) -> str:
        """Return that the program has written weights in a layout that no adapter knows; empty if it has not."""
        if not any(is_of_weights(path) for path, _ in look.files.items() - (self._there or set())):
            return ""
        why = "nothing there is known as a checkpoint, and nothing is saved"
        return f"weights are written to {self._root}, but {why}: see harness watch {self._root}"

    def _tell_what_stands(self, words: str) -> None:
        """Say, once for each kind of reason, why nothing newer was saved for a while: it may be so until the end."""
        kind, now = _DIGITS.sub("#", words), time.monotonic()
        if kind != self._stands[0] or self._passing:
            self._stands = kind, now
        elif kind and kind not in self._said and now - self._stands[1] >= _STANDS_S:
            self._said.add(kind)
            self._say(words)

    def _in_order(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return candidates in their order. Those without a number are newer if they are not known, by no clock."""
        taken = self._taken
        known = taken.older.union(seen for _, seen in taken.files)
        newest, ordered = taken.order, list[Candidate]()
        for one in found:
            if not one.is_dated:
                ordered.append(one)
            elif one.seen <= known:
                ordered.append(replace(one, order=min(one.order, taken.order)))
            else:
                newest = max(one.order, newest + 1)
                ordered.append(replace(one, order=newest))
        return sorted(ordered, key=lambda candidate: (candidate.order, candidate.name))

    def _is_newer(self, candidate: Candidate) -> bool:
        return candidate.order > self._taken.order and not _files_of(candidate) <= self._taken.files

    def _is_late(self, candidate: Candidate) -> bool:
        """Whether a candidate is not newer by its number, but was written behind the newest one that is known."""
        assert self._there is not None, "it was set at the first look"
        is_older = candidate.order <= self._taken.order and not candidate.is_dated
        return is_older and not _files_of(candidate) <= self._there | self._taken.files

    def _pass_over(self, candidate: Candidate) -> None:
        """Say, once for each checkpoint that is taken, that what the program writes has no greater number."""
        if not self._passed_over:
            self._passed_over = (
                f"{candidate.name} was written behind the checkpoint that was saved last, but its number is not greater"
            )
            causes = "the program did not go on from its checkpoint, or its numbers are no steps (see docs/watch.md)"
            self._say(f"{self._passed_over}: it is not saved. Either {causes}")

    def _circumstances(self, look: Look, ended: bool | None) -> Circumstances:
        assert self._pid is not None, "there is a program"
        now = time.monotonic()
        if ended is None:
            outlived = set(processes.alive(self._family))  # their parent has ended: they are no descendants any more
            self._family = sorted({*processes.family(self._pid), *outlived})
            self._ranks = processes.world_size(self._family) or self._ranks
        changed = {path: (seen, now) for path, seen in look.files.items()}
        for path, (seen, at) in self._changed_at.items():
            if path in changed and changed[path][0] == seen:
                changed[path] = (seen, at)
        self._changed_at = changed if ended is None else {}
        return Circumstances(
            before=None if ended is not None and not self._family else self._before or _EMPTY,
            writing=processes.open_for_writing(self._family, self._root),
            ranks=self._ranks,
            shape=self._taken.shape if self._taken.ranks in (None, self._ranks) else frozenset(),
            changed_s={path: now - at for path, (_, at) in self._changed_at.items()},
            is_named=self._is_named,
            ended_well=bool(ended),
        )

    def _take(self, candidate: Candidate, adapter: Adapter, found: Sequence[Candidate]) -> Lack | None:
        """Set a whole candidate, one of those that were found, aside. Return why that was not possible."""
        if candidate.odd:
            return self._told(candidate, candidate.why_odd, once="odd")
        files = {**candidate.files, **candidate.shared}
        is_at_rest = self._ended is not None and self._is_last and not self._family
        may_link = is_at_rest or not adapter.checkpoint.rewritten
        self._number += 1
        began = time.monotonic()
        try:
            if not may_link and not self._has_room(candidate):
                return self._told(candidate, "cannot be set aside for its upload: the disk has no room")
            name = f"{os.getpid()}-{self._number}"
            kept = set_aside(self._root, files, name, may_link=may_link, given_up=lambda: self._closing)
        except (Changed, InterruptedError) as err:
            return Lack(f"could not be set aside: {err}", is_torn=False, is_passing=True)
        except OSError as err:
            return self._told(candidate, f"could not be set aside: {err.strerror}")
        step = candidate.step
        if step is None or step <= self._taken.step:
            step = max(self._taken.step, 0) + 1
        record = record_of(candidate, adapter, step, self._ranks)
        older = self._taken.older.union(seen for _, seen in self._taken.files)
        if candidate.is_dated:
            older = older.union(*(one.seen for one in found if one.is_dated and one.order < candidate.order))
            self._lineage.add(candidate.order, candidate.seen, older - self._taken.older)
        self._taken = Taken(candidate.order, step, _files_of(candidate), shape_of(candidate), self._ranks, older)
        self._found(Checkpoint(record, kept, time.monotonic() - began))
        return None

    def _has_room(self, candidate: Candidate) -> bool:
        """Whether a copy leaves the program some room. Where the blocks can be shared, it takes none."""
        disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize - candidate.bytes > _NOT_BELOW_BYTES

    def _told(self, candidate: Candidate, why: str, once: str = "") -> Lack:
        """Say once why a checkpoint is not saved; with `once`, not again of each one that comes."""
        words = f"{candidate.name} {why}"
        if (key := once or words) not in self._said:
            self._said.add(key)
            self._say(f"{words}: it is not saved")
        return Lack(why, is_torn=False)


_EMPTY = Look(Path(), {}, {}, frozenset())


def _files_of(candidate: Candidate) -> frozenset[tuple[str, Seen]]:
    return frozenset({**candidate.files, **candidate.shared}.items())


def taken_of(candidate: Candidate, record: Record, older: frozenset[Seen] = frozenset()) -> Taken:
    """Return what is known of a checkpoint that lies in the directory as a snapshot has it, by its record.

    Args:
        candidate: the checkpoint.
        record: of its snapshot.
        older: see `Taken`.
    """
    order = max(candidate.order, record.order) if candidate.is_dated else candidate.order
    return Taken(order, record.step, _files_of(candidate), frozenset(record.shape), record.ranks, older)
