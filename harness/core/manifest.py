"""Claim, Part, Manifest, Done, Quarantine: encode, parse, and validate in one place.

Owns the JSON records of a run (docs/format.md is normative). A record that came out of `parse_*` is trusted from then
on; nothing else in the harness checks these fields again. Unknown fields are ignored, so that a later minor version can
add some; another `format` number is refused.

    shards ──▶ Part (one rank) ──▶ Manifest (all ranks) = the commit
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from harness.core.snapshot import RunKeys, SnapshotId, file_name, shard_name
from harness.errors import SnapshotCorrupt

FORMAT = 1
FORMAT_OF_RANKS = 2
"""Of parts and manifests of several ranks, or with files. All other records, and a single rank's, stay at format 1."""
MAX_RECORD_BYTES = 512 * 1024 * 1024
"""A record larger than this is not read: small state is small, even of a thousand ranks."""
MAX_STATE_BYTES = MAX_RECORD_BYTES // 2
"""Small state larger than this is not saved: what could be saved can be resumed."""
MAX_CHUNK_BYTES = 64 * 1024 * 1024
"""A reader holds several chunks in memory."""
MAX_SHARD_BYTES = 1024**5
MAX_PATH_BYTES = 4096
_CRC = re.compile(r"[0-9a-f]{16}")
_RUN_ID = re.compile(r"[0-9a-f]{32}")
STOPPED_EARLY = "stopped early"
"""The outcome of a run whose program left its outermost loop before its end, of its own accord."""
SET_ASIDE = "set aside: "
"""How the reason of a quarantine begins that the user asked for, by going back to an older snapshot."""
_OUTCOMES = frozenset({"finished", STOPPED_EARLY, "interrupted", "superseded", "failed", "stopped"})


class ForeignFormat(SnapshotCorrupt):
    """A record of another version of the format: not damaged, but this version cannot read it."""


class ShardEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One durable shard.

    Attributes:
        name: file name in the snapshot's directory.
        size: bytes.
        crc64nvme: of all bytes, 16 hex digits.
        chunk_bytes: bytes that each of `chunks` covers (the last may be shorter).
        chunks: CRC64NVME of each chunk, so that ranges can be verified while they arrive.
    """

    name: str
    size: int
    crc64nvme: str
    chunk_bytes: int
    chunks: tuple[str, ...]


class FileEntry(ShardEntry, frozen=True, kw_only=True):
    """One durable file of the program's own, kept as it is.

    Attributes:
        path: where it lies below the directory that is watched, with `/` between names.
    """

    path: str


class StoredPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an entry of a shard is, if it is not a whole tensor that all ranks share.

    Attributes:
        tensor: the tensor that it is a box of; empty for the entry's own name.
        whole: shape of that tensor; `None` if the entry is all of it.
        offset: where in that tensor the box begins, in each dimension.
        own: whether the tensor is this rank's alone, whatever other ranks have under its name.
    """

    tensor: str = ""
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    own: bool = False


def pieces_to_json(pieces: Mapping[str, StoredPiece]) -> dict[str, Any]:
    """Return entries of shards, by name, as plain values."""
    found: dict[str, Any] = msgspec.to_builtins(pieces)
    return found


def pieces_from_json(value: Any) -> dict[str, StoredPiece]:
    """The inverse of `pieces_to_json`. Raises ValueError on anything else."""
    return msgspec.convert(value, dict[str, StoredPiece])


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a snapshot, as its agent made it durable: its shards and its small state.

    Attributes:
        format: `FORMAT`, or `FORMAT_OF_RANKS` if there are several ranks, or files.
        run_id: identity of the run, 32 hex digits; the same name in another store is another run.
        generation: which start of the trainers made it.
        step: completed optimizer steps.
        rank: this rank.
        world_size: how many ranks make the snapshot complete.
        directory: directory of the shards below `<run>/snapshots/`.
        parent: the snapshot that this generation resumed from, or `None` if it began at step 0.
        sealed_at: ISO 8601 UTC, for people; nothing is decided by it.
        shards: in file order.
        state: small state in the tagged encoding (`harness.core.tree`), still encoded.
        state_crc64nvme: of the exact bytes of `state`, 16 hex digits: a counter with a flipped bit is still JSON.
        environment: what bit-identity depends on, as text.
        pieces: entries of the shards, by name, that are not whole tensors which all ranks share. Of several ranks only.
        lacks: fields and states of the first part's small state that this rank does not have. Of several ranks only.
        files: files of the program's own, kept as they are: see `harness/watch`.
    """

    format: int
    run_id: str
    generation: int
    step: int
    rank: int
    world_size: int
    directory: str
    parent: str | None
    sealed_at: str
    shards: tuple[ShardEntry, ...]
    state: msgspec.Raw
    state_crc64nvme: str
    environment: dict[str, str] = {}
    pieces: dict[str, StoredPiece] | msgspec.UnsetType = msgspec.UNSET
    lacks: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    files: tuple[FileEntry, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def stored(self) -> tuple[ShardEntry, ...]:
        """All objects in the snapshot's directory that this names: shards, then files."""
        return self.shards if self.files is msgspec.UNSET else (*self.shards, *self.files)

    @property
    def id(self) -> SnapshotId:
        """The snapshot that this is a part of."""
        return SnapshotId(self.generation, self.step)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all shards and files."""
        return sum(entry.size for entry in self.stored)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The commit: names one directory and holds every rank's part, in rank order.

    A function of the parts alone, so that every agent writes the same bytes.
    """

    format: int
    run_id: str
    generation: int
    step: int
    directory: str
    parent: str | None
    parts: tuple[Part, ...]

    @property
    def id(self) -> SnapshotId:
        """The snapshot that this commits."""
        return SnapshotId(self.generation, self.step)

    @property
    def nonce(self) -> str:
        """The nonce in the directory's name, which is that of the generation's claim."""
        return self.directory.rpartition("-")[2]

    @property
    def payload_bytes(self) -> int:
        """Bytes of all shards and files of all ranks."""
        return sum(part.payload_bytes for part in self.parts)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The record of who started a generation. Never deleted: it also shows that a run exists.

    Attributes:
        format: `FORMAT`.
        run_id: identity of the run; a new one in the first claim and in a `fresh` one, copied by every later claim.
        generation: the number claimed.
        nonce: tells this claimant from one that raced for the same number.
        claimed_at: ISO 8601 UTC, for people.
        host: where the agent runs.
        pid: the agent's process.
        fresh: whether to ignore everything before this generation (`--fresh`).
        continues: whether it continues a run that its program had stopped early (`--continue`).
        back_to: the snapshot, by name or step, to which the user went back (`--from`). Earlier ends do not count.
        parent: the snapshot resumed from, where it was known when claiming.
        command: the trainer's command line.
        named: whether the user named the run, as opposed to the name of the script.
        settings: the configuration that a later start is compared with, as text.
        agent: tells one agent's generations (restarts in place) from another agent's.
        lock_id: the lock that the agent held: its holder now knows that this agent is dead. `place` in the record.
    """

    format: int
    run_id: str
    generation: int
    nonce: str
    claimed_at: str
    host: str
    pid: int
    fresh: bool
    parent: str | None
    command: tuple[str, ...]
    named: bool
    settings: dict[str, str] = {}
    agent: str = ""
    lock_id: str = msgspec.field(default="", name="place")
    continues: bool = False
    back_to: str | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The record of how a generation ended.

    Attributes:
        format: `FORMAT`.
        generation: the number.
        nonce: the claimant's.
        outcome: finished, stopped early, interrupted, superseded, failed or stopped.
        step: last durable step, or `None` if there was none.
        ended_at: ISO 8601 UTC, for people.
    """

    format: int
    generation: int
    nonce: str
    outcome: str
    step: int | None
    ended_at: str


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """The record of why a snapshot is not used any more: two independent reads have failed, or it was set aside."""

    format: int
    generation: int
    step: int
    reason: str
    found_at: str
    host: str


Record = Claim | Part | Manifest | Done | Quarantine
_T = TypeVar("_T", Claim, Part, Manifest, Done, Quarantine)


def encode(record: Record) -> bytes:
    """Return the record's bytes: JSON with fields in declared order, one trailing newline."""
    return msgspec.json.encode(record) + b"\n"


def combine_parts(parts: Sequence[Part]) -> Manifest:
    """Return the manifest of complete `parts` (I11: one step, one generation, one directory, every rank once).

    Raises:
        SnapshotCorrupt: the parts do not make one snapshot.
    """
    ordered = tuple(sorted(parts, key=lambda part: part.rank))
    if not ordered:
        raise SnapshotCorrupt("no parts")
    first = ordered[0]
    manifest = Manifest(
        format=first.format,
        run_id=first.run_id,
        generation=first.generation,
        step=first.step,
        directory=first.directory,
        parent=first.parent,
        parts=ordered,
    )
    return _check_manifest(manifest, "parts")


def parse_claim(data: bytes, key: str) -> Claim:
    """Parse and validate a claim. Raises SnapshotCorrupt, naming `key`."""
    claim = _decode(data, _CLAIMS, key)
    _require(claim.generation >= 1, key, "generation")
    _require(bool(_RUN_ID.fullmatch(claim.run_id)), key, "run_id")
    return claim


def parse_done(data: bytes, key: str) -> Done:
    """Parse and validate the record of an end. Raises SnapshotCorrupt, naming `key`."""
    done = _decode(data, _ENDS, key)
    _require(done.outcome in _OUTCOMES, key, "outcome")
    return done


def parse_quarantine(data: bytes, key: str) -> Quarantine:
    """Parse and validate a quarantine record. Raises SnapshotCorrupt, naming `key`."""
    return _decode(data, _QUARANTINES, key)


def parse_part(data: bytes, key: str) -> Part:
    """Parse and validate one rank's part. Raises SnapshotCorrupt, naming `key`."""
    return _check_part(_decode(data, _PARTS, key), key)


def parse_manifest(data: bytes, keys: RunKeys, snapshot: SnapshotId) -> Manifest:
    """Parse and validate the manifest that stands under `keys.commit(snapshot)`.

    Raises:
        SnapshotCorrupt: it is not valid JSON of this format, a field is missing or impossible, it is another
            snapshot's, or it names anything outside its own directory.
    """
    key = keys.commit(snapshot)
    manifest = _check_manifest(_decode(data, _MANIFESTS, key), key)
    _require(manifest.id == snapshot, key, f"it says that it is {manifest.id}")
    return manifest


# Made here, once: msgspec learns a type when it first decodes one, and crashes if two threads have it do so at once.
_HEADS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CLAIMS = msgspec.json.Decoder(Claim)
_ENDS = msgspec.json.Decoder(Done)
_QUARANTINES = msgspec.json.Decoder(Quarantine)
_PARTS = msgspec.json.Decoder(Part)
_MANIFESTS = msgspec.json.Decoder(Manifest)
_FORMATS: dict[object, tuple[int, ...]] = dict.fromkeys((Part, Manifest), (FORMAT, FORMAT_OF_RANKS))


def _decode(data: bytes, decoder: msgspec.json.Decoder[_T], key: str) -> _T:
    try:
        head = _HEADS.decode(data)
        number: Any = msgspec.json.decode(head["format"]) if "format" in head else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise SnapshotCorrupt(f"{key}: not a JSON object: {err}") from err
    if number not in _FORMATS.get(decoder.type, (FORMAT,)):
        raise ForeignFormat(
            f"{key}: format {number!r}; this version reads format {FORMAT}, "
            f"and {FORMAT_OF_RANKS} of several ranks or files. "
            "Written by another version of the harness?"
        )
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise SnapshotCorrupt(f"{key}: {err}") from err


def _check_manifest(manifest: Manifest, key: str) -> Manifest:
    _require(bool(manifest.parts), key, "no parts")
    world = manifest.parts[0].world_size
    ranks = tuple(part.rank for part in manifest.parts)
    _require(ranks == tuple(range(world)), key, f"parts of ranks {ranks[:16]}, expected all of 0..{world - 1} in order")
    for part in manifest.parts:
        _check_part(part, key)
        same = (part.format, part.run_id, part.generation, part.step, part.world_size, part.directory, part.parent) == (
            manifest.format,
            manifest.run_id,
            manifest.generation,
            manifest.step,
            world,
            manifest.directory,
            manifest.parent,
        )
        _require(same, key, f"the part of rank {part.rank} belongs to another snapshot")
    return manifest


def _check_part(part: Part, key: str) -> Part:
    _require(part.format in (FORMAT, FORMAT_OF_RANKS), key, "format")
    try:
        snapshot = part.id
        if part.parent is not None:
            SnapshotId.parse(part.parent)
    except ValueError as err:
        raise SnapshotCorrupt(f"{key}: {err}") from err
    _require(bool(_RUN_ID.fullmatch(part.run_id)), key, "run_id")
    _require(bool(_CRC.fullmatch(part.state_crc64nvme)), key, "state_crc64nvme")
    _require(0 <= part.rank < part.world_size <= 100_000, key, f"rank {part.rank} of {part.world_size}")
    named = RunKeys("r").parse_directory(f"r/snapshots/{part.directory}/x")
    _require(named == (snapshot, part.directory), key, f"directory {part.directory[:80]!r} is not this snapshot's")
    for index, shard in enumerate(part.shards):
        expected = shard_name(part.rank, part.world_size, index)
        _require(shard.name == expected, key, f"shard {shard.name[:80]!r}, expected {expected}")
        _check_shard(shard, key)
    if part.format == FORMAT_OF_RANKS:
        _check_pieces(part, key)
        _check_files(part, key)
    else:
        _require(part.world_size == 1, key, f"format {FORMAT} with several ranks")
        _require(part.files is msgspec.UNSET, key, f"format {FORMAT} with files")
    return part


def _check_files(part: Part, key: str) -> None:
    """Raise SnapshotCorrupt unless each file has its name, and a place of its own below the directory."""
    files = () if part.files is msgspec.UNSET else part.files
    for index, entry in enumerate(files):
        expected = file_name(part.rank, part.world_size, index)
        _require(entry.name == expected, key, f"file {entry.name[:80]!r}, expected {expected}")
        _check_entry(entry, key, least=0)
        _require(is_inside(entry.path), key, f"path {entry.path[:80]!r}")
    paths = {entry.path for entry in files}
    folders = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    _require(len(paths) == len(files) and not paths & folders, key, "two files have one path")


def is_inside(path: str) -> bool:
    """Whether a path, as a record has it, leads to a place below the directory that it is relative to."""
    names = path.split("/")
    plain = all(name not in ("", ".", "..") for name in names) and "\0" not in path
    try:
        return plain and len(path.encode()) <= MAX_PATH_BYTES
    except UnicodeEncodeError:  # not text, in the file system that it comes from
        return False


def _check_pieces(part: Part, key: str) -> None:
    has_files = part.files is not msgspec.UNSET
    _require(part.pieces is not msgspec.UNSET or has_files, key, "a part of several ranks without pieces")
    pieces = {} if part.pieces is msgspec.UNSET else part.pieces
    for name, piece in pieces.items():
        whole, offset = piece.whole, piece.offset
        if piece.own or whole is None or offset is None:
            right = piece.own and not piece.tensor and whole is None and offset is None
        else:
            inside = all(0 <= begin <= size < 2**63 for begin, size in zip(offset, whole, strict=False))
            right = bool(piece.tensor) and len(whole) == len(offset) and inside
        _require(right, key, f"piece {name[:80]!r}")


def _check_shard(shard: ShardEntry, key: str) -> None:
    _check_entry(shard, key, least=8)


def _check_entry(shard: ShardEntry, key: str, *, least: int) -> None:
    _require(least <= shard.size <= MAX_SHARD_BYTES, key, f"{shard.name}: size {shard.size}")
    _require(1 <= shard.chunk_bytes <= MAX_CHUNK_BYTES, key, f"{shard.name}: chunk_bytes {shard.chunk_bytes}")
    count = -(-shard.size // shard.chunk_bytes)
    _require(len(shard.chunks) == count, key, f"{shard.name}: {len(shard.chunks)} chunks, expected {count}")
    _require(all(_CRC.fullmatch(crc) for crc in (shard.crc64nvme, *shard.chunks)), key, f"{shard.name}: digest")


def _require(condition: bool, key: str, what: str) -> None:
    if not condition:
        raise SnapshotCorrupt(f"{key}: not a valid record: {what}")
