"""Judge: whether a candidate is a whole checkpoint, and if not, why.

Owns the order of the reasons. A checkpoint is whole if its adapter's marks say so, every file is whole by its own form,
no process has one open for writing, and nothing has changed between two looks. It takes all of that: a mark may come
too early (DeepSpeed's `latest`), and a file may be whole while its neighbour is not there yet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from harness.watch import shards
from harness.watch.adapter import Adapter, Index, Pointer
from harness.watch.look import Candidate, Look
from harness.watch.patterns import pattern
from harness.watch.sound import Sound, has_end

_QUIET_S = 30.0  # that a program lives on behind the first checkpoint, where nothing else shows that it has all files
_DIGITS = re.compile(r"[0-9]+")
_UNFINISHED = re.compile(r"(?:^|[._-])(?:tmp|temp|partial|incomplete|unfinished)(?:$|[._-])|\.orbax-checkpoint-tmp")


@dataclass(frozen=True)
class Lack:
    """Why a candidate is no whole checkpoint.

    Attributes:
        why: the end of a sentence about it.
        is_torn: whether that will not change once nothing writes any more; else it is only not known to be whole.
        is_passing: whether it lacks nothing but a moment in which it does not change.
    """

    why: str
    is_torn: bool = True
    is_passing: bool = False


@dataclass(frozen=True)
class Circumstances:
    """What is known beside the files.

    Attributes:
        before: the look before this one; `None` if nothing is running that could change them.
        writing: paths that a process has open for writing.
        ranks: how many ranks write; `None` if that is not known.
        shape: names of the files of the last whole checkpoint, without its numbers; empty if there is none.
        changed_s: seconds in which the program lived and a file did not change, by its path.
        is_named: whether the user has named the adapter: then a quiet time counts.
        ended_well: whether the program has ended, and not by an error.
    """

    before: Look | None = None
    writing: Collection[str] = ()
    ranks: int | None = None
    shape: frozenset[str] = frozenset()
    changed_s: Mapping[str, float] = field(default_factory=dict)
    is_named: bool = False
    ended_well: bool = False


def lack_of(
    candidate: Candidate, look: Look, adapter: Adapter, others: Sequence[Candidate], sound: Sound, known: Circumstances
) -> Lack | None:
    """Return why a candidate is not whole; `None` if it is.

    Args:
        candidate: what is judged.
        look: the directory.
        adapter: says what a whole one has.
        others: all candidates of this look.
        sound: looks into files.
        known: what is known beside the files.
    """
    inside = candidate.names
    torn = (
        _unfinished(candidate, look, adapter, inside)
        or _missing(candidate, look, adapter, inside)
        or _of_two_moments(candidate, adapter)
        or _without_ranks(adapter, inside, known.ranks)
        or _not_pointed_at(candidate, look, adapter, others)
        or _unsound(candidate, look, adapter, sound)
        or _of_another_shape(candidate, adapter, others, known)
    )
    if torn is not None:
        return Lack(torn)
    unknown = (
        _without_pointer(look, adapter)
        or _blind(candidate, look, adapter)
        or _one_of_several(candidate, adapter)
        or _first_of_its_shape(candidate, adapter, others, known)
        or _not_quiet(candidate, adapter, known)
    )
    if unknown is not None:
        return Lack(unknown, is_torn=False)
    passing = _in_flux(candidate, look, known)
    return None if passing is None else Lack(passing, is_torn=False, is_passing=True)


def shape_of(candidate: Candidate) -> frozenset[str]:
    """Return what is equal for all checkpoints of a training: the names of its files, with a `#` for each number.

    The second file of such a name has a `(2)` behind it, and so on: `rng_state_#.pth`, `rng_state_#.pth (2)`.
    """
    counts = Counter(_DIGITS.sub("#", candidate.inside(path)) for path in candidate.files)
    return frozenset(f"{name} ({n})" if n > 1 else name for name, most in counts.items() for n in range(1, most + 1))


def pointed(look: Look, pointer: Pointer) -> str | None:
    """Return what a pointer says; `None` if it is not there, or says nothing."""
    if pointer.is_link:
        return look.links.get(pointer.path)
    data = look.text(pointer.path, 4096)
    return (data.decode(errors="replace").strip() or None) if data is not None else None


def is_named_by(look: Look, pointer: Pointer, candidate: Candidate) -> bool:
    """Whether a pointer names a candidate."""
    match = pattern(pointer.says).match(pointed(look, pointer) or "")
    if match is None:
        return False
    numbers, name = candidate.match.numbers, match.texts.get("name", candidate.name)
    return name == candidate.name and all(numbers.get(field) == number for field, number in match.numbers.items())


def _unfinished(candidate: Candidate, look: Look, adapter: Adapter, inside: set[str]) -> str | None:
    if _UNFINISHED.search(candidate.name):
        return "has the name of one that is being written"
    for text in adapter.complete.has_not:
        wanted = pattern(text)
        if (sign := next((path for path in sorted(_names(candidate, look)) if wanted.match(path)), None)) is not None:
            return f"is being written, or was cut off: {sign} is there"
    for text in adapter.complete.beside_not:
        if (sign := _filled(text, candidate)) in look.files:
            return f"is being written, or was cut off: {sign} is there"
    unfinished = next((path for path in sorted(inside) if _UNFINISHED.search(path)), None)
    return None if unfinished is None else f"has a file that is being written: {unfinished}"


def _names(candidate: Candidate, look: Look) -> set[str]:
    """Return everything that lies in it, also what is left out."""
    if not candidate.is_directory:
        return set(look.files)
    return {path[len(candidate.name) + 1 :] for path in look.files if path.startswith(f"{candidate.name}/")}


def _missing(candidate: Candidate, look: Look, adapter: Adapter, inside: set[str]) -> str | None:
    there = _names(candidate, look)
    for text in adapter.complete.has:
        wanted = pattern(text)
        if not any(wanted.match(path) for path in there):
            return f"has no {text}"
    for index in adapter.complete.index:
        if (why := _missing_of(candidate, look, index, inside)) is not None:
            return why
    return None if candidate.files else "has no files"


def _of_two_moments(candidate: Candidate, adapter: Adapter) -> str | None:
    """Return a file that is newer than the one that is written last."""
    if not adapter.complete.newest:
        return None
    wanted, files = pattern(adapter.complete.newest), candidate.files
    written = max((seen.modified_ns for path, seen in files.items() if wanted.match(candidate.inside(path))), default=0)
    newer = next((path for path in sorted(files) if files[path].modified_ns > written), None)
    return None if newer is None else f"is being written, or was cut off: {newer} is newer than {wanted.text}"


def _missing_of(candidate: Candidate, look: Look, index: Index, inside: set[str]) -> str | None:
    """Return the first file that an index names, and that is not there or too short."""
    wanted, above = pattern(index.file), f"{candidate.name}/" if candidate.is_directory else ""
    for path in sorted(path for path in inside if wanted.match(path)):
        named = _named_in(look.text(above + path) or b"", index)
        if named is None:
            return f"has an index that cannot be read: {path}"
        folder = path.rpartition("/")[0]
        for name, least_bytes in sorted(named.items()):
            full = f"{folder}/{name}" if folder else name
            if full not in inside:
                return f"lacks {full}, which {path} names"
            if look.files[above + full].size < least_bytes:
                return f"has a file that is cut off: {full}, which has {least_bytes} bytes by {path}"
    return None


def _named_in(data: bytes, index: Index) -> dict[str, int] | None:
    """Return the files that an index names, with the bytes that each has at least; `None` if it cannot be read."""
    if index.form == "dcp":
        return shards.named_in(data)
    try:
        found = msgspec.json.decode(data).get(index.names)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AttributeError):
        return None
    named = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return {name: 0 for name in named if isinstance(name, str)}


def _without_ranks(adapter: Adapter, inside: set[str], ranks: int | None) -> str | None:
    """Return the rank of which a file is missing. A rank of a group, as with DeepSpeed's, may have several files."""
    marks = adapter.complete
    for text in marks.each_rank:
        found = _by_rank(text, inside)
        if not found and marks.each_rank_or_none:
            continue
        each = max(found.values(), default=1)
        expected = max(ranks or 0 if each == 1 else 0, max(found, default=-1) + 1)
        if missing := [rank for rank in range(expected) if found[rank] < each]:
            return f"lacks {'the' if each == 1 else 'a'} file of rank {missing[0]} ({text})"
        if found.total() < (ranks or 0):
            return f"has {found.total()} files of {ranks} ranks ({text})"
    return None


def _by_rank(text: str, inside: set[str]) -> Counter[int]:
    """Return how many files there are of each rank; one without a number is of rank 0."""
    wanted = pattern(text)
    return Counter(match.numbers.get("rank", 0) for path in inside if (match := wanted.match(path)) is not None)


def _not_pointed_at(candidate: Candidate, look: Look, adapter: Adapter, others: Sequence[Candidate]) -> str | None:
    """Return that the pointer, which is changed last, names an earlier one."""
    for pointer in adapter.pointers:
        if not pointer.is_last:
            continue
        says = pointed(look, pointer)
        if says is None:
            continue
        by = next((one for one in others if is_named_by(look, pointer, one)), None)
        match = pattern(pointer.says).match(says)
        order = by.order if by is not None else None if match is None else match.numbers.get("step")
        if order is None:
            return f"is not named by {pointer.path}, which says {says[:60]!r}"
        if order < candidate.order:
            return f"is not named by {pointer.path} yet, which says {says[:60]!r}"
    return None


def _without_pointer(look: Look, adapter: Adapter) -> str | None:
    missing = next((one.path for one in adapter.pointers if one.is_last and pointed(look, one) is None), None)
    return None if missing is None else f"is not named by {missing}, which is not there, or empty"


def _filled(text: str, candidate: Candidate) -> str | None:
    try:
        return pattern(text).fill({**candidate.match.texts, "name": candidate.name})
    except ValueError:
        return None


def _unsound(candidate: Candidate, look: Look, adapter: Adapter, sound: Sound) -> str | None:
    for path, seen in (*candidate.files.items(), *candidate.shared.items()):
        if (why := sound.why_not(look.root, path, seen)) is not None:
            return f"has a file that {why}: {path}"
    return None


def _blind(candidate: Candidate, look: Look, adapter: Adapter) -> str | None:
    """Return a file that may be cut off without a sign of it, where no mark says that all is written."""
    marks = adapter.complete
    if marks.has or marks.index or marks.each_rank or marks.quiet_s or adapter.pointers:
        return None
    blind = next((path for path in sorted(candidate.files) if not has_end(look.root / path)), None)
    return None if blind is None else f"has nothing that shows that {blind} is whole"


def _one_of_several(candidate: Candidate, adapter: Adapter) -> str | None:
    if adapter.checkpoint.files_are != "one" or len(candidate.files) < 2:
        return None
    first, second, *_ = sorted(candidate.files)
    return f"is not the only one: nothing shows whether {first} and {second} are of one moment"


def _is_marked_last(adapter: Adapter) -> bool:
    """Whether something comes last, so that a checkpoint that has it is whole."""
    marks = adapter.complete
    comes_last = not marks.early and not marks.late
    return comes_last and bool(marks.has or any(pointer.is_last for pointer in adapter.pointers))


def _of_another_shape(
    candidate: Candidate, adapter: Adapter, others: Sequence[Candidate], known: Circumstances
) -> str | None:
    """Return a file that the checkpoint before had, and this one lacks. One with a mark that comes last is believed.

    So is one after which the program has begun another, or has ended well: what it writes may have changed.
    """
    is_over = known.before is not None and any(other.order > candidate.order for other in others)
    if _is_marked_last(adapter) or is_over or known.ended_well:
        return None
    missing = sorted(known.shape - shape_of(candidate))
    return f"lacks {missing[0]}, which the one before has" if missing else None


def _first_of_its_shape(
    candidate: Candidate, adapter: Adapter, others: Sequence[Candidate], known: Circumstances
) -> str | None:
    """Return that files may be missing of which nothing is known yet: the next checkpoint begins after all of them."""
    marks = adapter.complete
    told = bool(marks.has or marks.each_rank or marks.index or adapter.pointers)
    is_told = told and not marks.late and (not marks.early or _has_all_ranks(candidate, adapter, known.ranks))
    if is_told or known.shape or known.ended_well or (not told and adapter.checkpoint.files_are != "parts"):
        return None
    if any(other.order > candidate.order for other in others):
        return None
    outlived = all(known.changed_s.get(path, 0.0) >= _QUIET_S for path in candidate.files)
    if (told or known.is_named) and outlived:
        return None
    return "is the first one: whether it has all of its files shows with the next one"


def _has_all_ranks(candidate: Candidate, adapter: Adapter, ranks: int | None) -> bool:
    """Whether the files of all ranks are counted, so that a mark that may come before them does not matter."""
    inside = candidate.names
    if any("{rank}" in text and _fits_unnumbered(text, inside) for text in adapter.complete.each_rank):
        return True  # it is named as that of the only rank
    if ranks is None:
        return False
    return ranks == 1 or any(_by_rank(text, inside).total() >= ranks for text in adapter.complete.each_rank)


def _fits_unnumbered(text: str, inside: set[str]) -> bool:
    matches = (pattern(text).match(path) for path in inside)
    return any(match is not None and "rank" not in match.numbers for match in matches)


def _in_flux(candidate: Candidate, look: Look, known: Circumstances) -> str | None:
    paths = (*candidate.files, *candidate.shared)
    if (written := next((path for path in paths if path in known.writing), None)) is not None:
        return f"is being written: {written} is open"
    if known.before is None:
        return None
    changed = next((path for path in paths if known.before.files.get(path) != look.files.get(path)), None)
    changed = changed or next(
        (path for path, to in candidate.links.items() if known.before.links.get(path) != to), None
    )
    return None if changed is None else f"has just changed: {changed}"


def _not_quiet(candidate: Candidate, adapter: Adapter, known: Circumstances) -> str | None:
    quiet_s = adapter.complete.quiet_s
    if not quiet_s:
        return None
    moved = [path for path in candidate.files if known.changed_s.get(path, 0.0) < quiet_s]
    return f"has changed in the last {quiet_s:g} s: {moved[0]}" if moved else None
