"""Read a run's journal: the segments that its agents have put into a store, and the lines in them.

Owns how both ends of a journal are found without listing all of it, and which lines show that a trainer was alive.
`agent/journal.py` writes the segments.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core import events
from harness.core.manifest import MAX_RECORD_BYTES
from harness.core.snapshot import RunKeys

MAX_SEGMENT_BYTES = 64 * 1024 * 1024
_READ_S = 60.0
_PAGE = 1000  # keys that a store lists at once
_LAST_SEGMENTS = 3  # are searched for the trainer's exit: the upload after it may take a while


def read_journal(store: ObjectStore, keys: RunKeys, generation: int | None = None) -> Iterator[events.Line]:
    """Yield the lines of a run's journal, of one generation or all, in key order. Foreign lines are skipped."""
    deadline = Deadline.after(_READ_S)
    prefix = keys.events if generation is None else f"{keys.events}{generation:08d}-"
    for info in store.list(prefix, deadline=deadline):
        yield from decode_segment(store.read(info.key, limit_bytes=MAX_RECORD_BYTES, deadline=deadline))


def last_lived_at(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> datetime.datetime | None:
    """Return when a generation's trainer was last known to be alive, by the newest sign in its journal and its clock.

    That is the time of its exit; if it died together with its agent, the time of the newest line. `None` if there is no
    journal.

    Raises:
        CloudError: the store could not be asked.
    """
    newest: list[str] = []
    for _first, last in segments(store, keys, generation, 0, _LAST_SEGMENTS, deadline):
        newest += last
    lines: list[events.Line] = []
    for key in sorted(newest)[-_LAST_SEGMENTS:]:
        lines += decode_segment(store.read(key, limit_bytes=MAX_SEGMENT_BYTES, deadline=deadline))
    left = [line for line in lines if isinstance(line.body, events.TrainerLeft)]
    told = (left or lines)[-1:]
    with contextlib.suppress(ValueError):
        return next((datetime.datetime.fromisoformat(line.at) for line in told), None)
    return None


def segments(
    store: ObjectStore, keys: RunKeys, generation: int, first: int, last: int, deadline: Deadline
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the keys of a generation's first and last segments, for each host that wrote some. No key appears twice.

    If an agent may not delete, a run of a year has two million segments: their numbers are searched, and not listed.

    Args:
        store: the store of the segments.
        keys: keys of the run.
        generation: the generation.
        first: greatest number of first segments.
        last: greatest number of last segments.
        deadline: for the whole.

    Raises:
        CloudError: the store could not be asked.
    """
    for folder in _folders(store, keys, generation, deadline):
        begins = _numbers(store, keys, folder, "", deadline)
        if not begins:
            continue
        ends = begins if len(begins) < _PAGE else _last_page(store, keys, folder, begins, deadline)
        newest = ends[-last:] if last else []
        oldest = [number for number in begins[:first] if number not in newest]
        yield [f"{folder}{number:08d}.jsonl" for number in oldest], [f"{folder}{number:08d}.jsonl" for number in newest]


def newest_segments(
    store: ObjectStore, keys: RunKeys, generation: int, known: Mapping[str, str], deadline: Deadline
) -> dict[str, str]:
    """Return the key of each host's newest segment of a generation, by the host's folder.

    Args:
        store: the store of the segments.
        keys: keys of the run.
        generation: the generation.
        known: what this has returned before: only newer segments are listed.
        deadline: for the whole.

    Raises:
        CloudError: the store could not be asked.
    """
    newest = dict(known)
    for folder in _folders(store, keys, generation, deadline):
        for info in store.list(folder, after=newest.get(folder, ""), deadline=deadline):
            if keys.parse_segment(info.key) is not None:
                newest[folder] = info.key
    return newest


def _folders(store: ObjectStore, keys: RunKeys, generation: int, deadline: Deadline) -> Iterator[str]:
    """Yield the folders of a generation's segments, one for each host, at the cost of one listing each."""
    prefix = after = keys.journal_of(generation)
    while page := list(islice(store.list(prefix, after=after, deadline=deadline), 1)):
        host, is_folder, _ = page[0].key[len(prefix) :].partition("/")
        after = f"{prefix}{host}/~" if is_folder else page[0].key  # behind every segment of this host
        if is_folder:
            yield f"{prefix}{host}/"


def _numbers(store: ObjectStore, keys: RunKeys, folder: str, after: str, deadline: Deadline) -> list[int]:
    """Return a page of segment numbers, ascending."""
    listed = islice(store.list(folder, after=after, deadline=deadline), _PAGE)
    return [number for info in listed if (number := keys.parse_segment(info.key)) is not None]


def _last_page(store: ObjectStore, keys: RunKeys, folder: str, begins: list[int], deadline: Deadline) -> list[int]:
    """Return `begins`, which is the first page, and the last segments, at least half a page of them."""
    known = begins[-1]

    def page(number: int) -> list[int]:
        return _numbers(store, keys, folder, f"{folder}{number:08d}.jsonl", deadline)

    stride = _PAGE
    while page(known + stride):  # double the stride until no segment follows
        known += stride
        stride *= 2
    beyond = known + stride
    while beyond - known > _PAGE // 2:  # there is one after `known`, and none after `beyond`
        middle = (known + beyond) // 2
        if page(middle):
            known = middle
        else:
            beyond = middle
    return [*begins, *page(max(begins[-1], known - _PAGE // 2))]


def decode_segment(segment: bytes) -> Iterator[events.Line]:
    """Yield the lines of a segment; foreign lines are skipped."""
    for data in segment.splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            yield events.decode_line(data)
