"""Look: what lies in a watched directory at one moment, and which of it is a checkpoint by an adapter's names.

Owns the walk, which goes into no directory by a link, and the grouping of files into candidates. Judges nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import msgspec

from harness.core.manifest import is_inside
from harness.core.snapshot import MAX_STEP
from harness.watch.adapter import WITHIN_EPOCH, Adapter
from harness.watch.ours import is_ours
from harness.watch.patterns import Match, pattern

_MOST_JSON = 64 << 20
_MOST_STEPS = 1 << 40  # of an epoch
_MOST_ORDER = 1 << 62  # a record has room for 64 bits
_DIGITS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Seen:
    """A file at one moment.

    Attributes:
        size: bytes.
        modified_ns: when its content changed last.
        inode: device and number: another one is another file under the same name.
    """

    size: int
    modified_ns: int
    inode: tuple[int, int]

    @classmethod
    def of(cls, found: os.stat_result) -> Seen:
        """Return what a `stat` says."""
        return cls(found.st_size, found.st_mtime_ns, (found.st_dev, found.st_ino))


@dataclass(frozen=True)
class Look:
    """A watched directory at one moment.

    Attributes:
        root: the directory.
        files: every regular file below it, by its path; also what a link leads to, if that is one.
        links: every symbolic link, by its path, and where it leads.
        folders: every directory.
        odd: what no snapshot can hold, by its path, and what it is; in place of bytes that are no text, the path has
            lone surrogates.
    """

    root: Path
    files: Mapping[str, Seen]
    links: Mapping[str, str]
    folders: frozenset[str]
    odd: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, root: Path) -> Look:
        """Look now. A directory that is not there is empty; what vanishes meanwhile is left out."""
        files: dict[str, Seen] = {}
        links: dict[str, str] = {}
        folders: set[str] = set()
        odd: dict[str, str] = {}
        for path, found in _walk(root, ""):
            if isinstance(found, str):
                odd[path] = found
            elif stat.S_ISLNK(found.st_mode):
                with contextlib.suppress(OSError):
                    links[path] = str((root / path).readlink())
                    target = (root / path).stat()
                    if stat.S_ISREG(target.st_mode):
                        files[path] = Seen.of(target)
            elif stat.S_ISDIR(found.st_mode):
                folders.add(path)
            elif stat.S_ISREG(found.st_mode):
                files[path] = Seen.of(found)
            else:
                odd[path] = "is neither a file nor a directory"
        return cls(root, files, links, frozenset(folders), odd)

    def text(self, path: str, limit: int = _MOST_JSON) -> bytes | None:
        """Return what stands in a small file; `None` if it is gone or large."""
        try:
            with (self.root / path).open("rb") as file:
                data = file.read(limit + 1)
        except OSError:
            return None
        return data if len(data) <= limit else None


def _walk(root: Path, below: str) -> Iterator[tuple[str, os.stat_result | str]]:
    """Yield each entry, with what it is; or with why it cannot be known."""
    try:
        entries = sorted(os.scandir(root / below), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as err:
        yield below, f"cannot be read ({err.strerror})"
        return
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        if is_ours(entry.name):
            continue
        if not is_inside(path):
            yield path, "has a name that is no UTF-8, or too long"
            continue
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        yield path, found
        if stat.S_ISDIR(found.st_mode):
            yield from _walk(root, path)


@dataclass(frozen=True)
class Candidate:
    """What is a checkpoint by its names.

    Attributes:
        name: path of its directory, or of its first file.
        is_directory: whether it is a directory.
        match: what its name says.
        order: candidates are in this order: by step, by epoch and step, or by when they were written.
        is_dated: whether nothing tells its order but when it was written.
        step: its number; `None` if nothing says it, or if no snapshot can have such a step: a time may be a number.
        files: its files, by their paths in the watched directory.
        shared: files beside it that belong to it as well.
        links: its links that lead to something in it, by their paths. Of another one to a file, `files` has the bytes.
        folders: its directories that are empty.
        odd: paths of what cannot be kept, and why.
    """

    name: str
    is_directory: bool
    match: Match
    order: int
    is_dated: bool
    step: int | None
    files: Mapping[str, Seen]
    shared: Mapping[str, Seen]
    links: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    odd: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all of its files."""
        return sum(seen.size for seen in (*self.files.values(), *self.shared.values()))

    @property
    def seen(self) -> frozenset[Seen]:
        """All of its files, whatever their names are: a file may be renamed."""
        return frozenset((*self.files.values(), *self.shared.values()))

    @property
    def why_odd(self) -> str:
        """Why it cannot be kept, as the end of a sentence; empty if it can."""
        if not self.odd:
            return ""
        path, why = min(self.odd.items())
        shown = os.fsencode(path).decode(errors="backslashreplace")
        return f"has a part that cannot be kept: {shown}, which {why}"

    @property
    def names(self) -> set[str]:
        """The paths of its files and links below the checkpoint."""
        return {self.inside(path) for path in (*self.files, *self.links)}

    def inside(self, path: str) -> str:
        """Return a path below the watched directory as one below the checkpoint."""
        return path[len(self.name) + 1 :] if self.is_directory else path


def candidates(look: Look, adapter: Adapter) -> list[Candidate]:
    """Return all candidates, the newest last."""
    layout = adapter.checkpoint
    shared = {
        path: seen for path, seen in look.files.items() if path not in look.links and _fits_one(layout.shared, path)
    }
    found = _directories(look, adapter) if layout.directory else _file_groups(look, adapter)
    kept = []
    for name, match, files in found:
        files = {path: seen for path, seen in files.items() if path not in shared}
        if files or layout.directory:
            number = _number_of(look, adapter, name, match)
            step = number if number is not None and number <= MAX_STEP else None
            order = _order_of(match, adapter, number)
            written = modified_ns(files) if order is None else order
            one = Candidate(name, bool(layout.directory), match, written, order is None, step, files, shared)
            kept.append(_with_links(one, look, layout.leave_out) if layout.directory else one)
    return sorted(kept, key=lambda candidate: (candidate.order, candidate.name))


def _with_links(candidate: Candidate, look: Look, leave_out: tuple[str, ...]) -> Candidate:
    """Return a directory with its links, its empty directories, and what cannot be kept of it."""
    begin = f"{candidate.name}/"

    def below(paths: Iterable[str]) -> list[str]:
        kept = (path for path in paths if path.startswith(begin))
        return sorted(path for path in kept if not _fits_one(leave_out, path[len(begin) :]))

    links, odd = dict[str, str](), {path: look.odd[path] for path in below(look.odd)}
    for path in below(look.links):
        to = os.path.normpath(PurePosixPath(path).parent / look.links[path])
        is_there = to in look.files or to in look.folders or to in look.links
        if to.startswith(begin) and is_there:
            links[path] = look.links[path]
        elif path not in look.files:
            odd[path] = "is a link to no file, and to nothing in the checkpoint"
    files = {path: seen for path, seen in candidate.files.items() if path not in links}
    full = {above for path in (*files, *links, *odd, *below(look.folders)) for above in _above(path)}
    empty = tuple(path for path in below(look.folders) if path not in full)
    return replace(candidate, files=files, links=links, folders=empty, odd=odd)


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def modified_ns(files: Mapping[str, Seen]) -> int:
    """Return when the last of these files was written."""
    return max((seen.modified_ns for seen in files.values()), default=0)


def recognized(look: Look, adapters: Mapping[str, Adapter]) -> list[Adapter]:
    """Return the adapters whose names there are in a directory, those that explain most of its files first."""
    scores: list[tuple[bool, int, int, str]] = []
    for name, adapter in adapters.items():
        if adapter.by_name:
            continue
        found = candidates(look, adapter)
        marked = [one for one in found if _is_marked(one, look, adapter)]
        if marked:
            explained = {path for one in marked for path in (*one.files, *one.shared)}
            marks = len(adapter.complete.has) + len(adapter.complete.each_rank) + 2 * len(adapter.pointers)
            scores.append((adapter.general, -len(explained), -marks, name))
    return [adapters[name] for *_, name in sorted(scores)]


def _is_marked(candidate: Candidate, look: Look, adapter: Adapter) -> bool:
    """Whether a candidate has the marks by which the adapter knows a whole checkpoint: names alone are alike."""
    marks = adapter.complete
    if adapter.checkpoint.files_are == "one" and len(candidate.files) > 1:
        return False
    there = candidate.names if candidate.is_directory else {*look.files}
    demanded = marks.has if marks.each_rank_or_none else (*marks.has, *marks.each_rank)
    if not all(any(_fits(text, path) for path in there) for text in demanded):
        return False
    last = [pointer.path for pointer in adapter.pointers if pointer.is_last]
    return all(path in look.files or path in look.links for path in last)


def _directories(look: Look, adapter: Adapter) -> Iterator[tuple[str, Match, dict[str, Seen]]]:
    wanted, leave_out = pattern(adapter.checkpoint.directory), adapter.checkpoint.leave_out
    for folder in look.folders:
        if (match := wanted.match(folder)) is None:
            continue
        inside = {
            path: seen
            for path, seen in look.files.items()
            if path.startswith(f"{folder}/") and not _fits_one(leave_out, path[len(folder) + 1 :])
        }
        yield folder, match, inside


def _file_groups(look: Look, adapter: Adapter) -> Iterator[tuple[str, Match, dict[str, Seen]]]:
    groups: dict[object, tuple[Match, dict[str, Seen]]] = {}
    for path, seen in look.files.items():
        if path in look.links:
            continue
        for text in adapter.checkpoint.files:
            match = pattern(text).match(path)
            if match is None or _fits_one(adapter.checkpoint.leave_out, path):
                continue
            numbers = tuple(sorted((field, number) for field, number in match.numbers.items() if field != "rank"))
            digits = tuple(_DIGITS.findall(path)) if "time" in match.texts else ()
            key = {"parts": (numbers, digits), "each": path, "one": ()}[adapter.checkpoint.files_are]
            groups.setdefault(key, (match, {}))[1][path] = seen
            break
    for match, files in groups.values():
        kept = _unnumbered(files) if adapter.general and adapter.checkpoint.files_are == "one" else files
        yield min(kept), match, kept


def _unnumbered(files: dict[str, Seen]) -> dict[str, Seen]:
    """Return the only file of several whose name has no number: the others are kept beside it, one for each step."""
    found = {path: seen for path, seen in files.items() if not _DIGITS.search(path)}
    return found if len(found) == 1 else files


def _number_of(look: Look, adapter: Adapter, name: str, match: Match) -> int | None:
    how = adapter.checkpoint.step
    if how == WITHIN_EPOCH:
        return None
    if ":" in how:
        file, _, field = how.partition(":")
        return _field_of(look.text(f"{name}/{file}" if adapter.checkpoint.directory else file), field)
    return match.numbers.get(how or "step")


def _order_of(match: Match, adapter: Adapter, number: int | None) -> int | None:
    if adapter.checkpoint.step == WITHIN_EPOCH:
        number = match.numbers["epoch"] * _MOST_STEPS + match.numbers["step"]
    return None if number is None or number > _MOST_ORDER else number


def _field_of(data: bytes | None, field: str) -> int | None:
    try:
        value = msgspec.json.decode(data or b"null")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found = value.get(field) if isinstance(value, dict) else None
    return found if isinstance(found, int) and found >= 0 else None


def _fits(text: str, path: str) -> bool:
    return pattern(text).match(path) is not None


def _fits_one(texts: tuple[str, ...], path: str) -> bool:
    return any(_fits(text, path) for text in texts)
