"""Record: what a snapshot of files says about itself, in its small state.

Owns its fields. A later start reads it before any file is fetched: it decides whether a local checkpoint is newer, and
what a whole one looks like.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from harness.core.manifest import is_inside
from harness.errors import SnapshotCorrupt


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A checkpoint that was taken as a snapshot.

    Attributes:
        adapter: name of the table by which it was recognized.
        name: path of its directory, or of its first file.
        is_directory: whether it is a directory.
        step: of the snapshot.
        order: what decides which of two checkpoints is newer: the step, or when it was written.
        texts: what its name says, by field: pointers are written from it.
        ranks: how many ranks wrote it, if that was known.
        shape: names of its files, without their numbers.
        modified_ns: when its last file was written; Unix time.
        links: symbolic links in it that lead to something in it, by their paths, as of files.
        folders: paths of directories in it that are empty.
    """

    adapter: str
    name: str
    is_directory: bool
    step: int
    order: int
    texts: dict[str, str]
    ranks: int | None
    shape: tuple[str, ...]
    modified_ns: int
    links: dict[str, str] = {}
    folders: tuple[str, ...] = ()


class _State(msgspec.Struct, frozen=True):
    step: int
    watch: Record


_STATES = msgspec.json.Decoder(_State)


def encode(record: Record) -> bytes:
    """Return the small state of the snapshot."""
    return msgspec.json.encode(_State(record.step, record))


def decode(state: bytes | msgspec.Raw) -> Record:
    """Return the record in a small state. Raises SnapshotCorrupt if it is a Checkpointer's."""
    try:
        record = _STATES.decode(bytes(state)).watch
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise SnapshotCorrupt(f"it is no snapshot of files: {err}") from err
    leads_to = (os.path.normpath(PurePosixPath(path).parent / to) for path, to in record.links.items())
    for path in (*record.links, *leads_to, *record.folders):
        if not (is_inside(path) and path.startswith(f"{record.name}/")):
            raise SnapshotCorrupt(f"it has a link or a directory that leads out of {record.name}: {path[:200]!r}")
    return record


def is_of_files(state: Mapping[str, Any]) -> bool:
    """Whether a decoded small state is that of a snapshot of files."""
    return "watch" in state
