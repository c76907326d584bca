"""SnapshotId, the keys of a run in a store, and their order.

Owns every key the harness ever writes: nothing else formats or parses one. The layout is docs/format.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_GENERATION = 10**15 - 1
LISTED_IN_ORDER = 10**7
"""Below this generation, the keys of all later ones come after its own in a list."""
MAX_STEP = 10**12 - 1
_GENERATION = r"[0-9]{8}|[1-9][0-9]{8,14}"  # eight digits, and more only for a number that needs them
_ID = re.compile(rf"({_GENERATION})-([0-9]{{12}})")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,99}")
_SEGMENT = re.compile(r"/([0-9]{6,})\.jsonl\Z")
_UNFIT = re.compile(r"[0-9]{8,}-([A-Za-z0-9_.=+-]+)\.unfit\.json")
_NONCE = re.compile(r"[0-9a-f]{8,32}")
_REHEARSAL = re.compile(r"([0-9a-f]{32})\.\d{8}T\d{6}Z\.json")


@dataclass(frozen=True, order=True)
class SnapshotId:
    """Names one snapshot of a run; ordered generation first (invariant I4).

    Attributes:
        generation: which start of the trainers made it; 1 and up.
        step: completed optimizer steps; 0 and up.
    """

    generation: int
    step: int

    def __post_init__(self) -> None:
        if not (1 <= self.generation <= MAX_GENERATION and 0 <= self.step <= MAX_STEP):
            raise ValueError(f"not a snapshot: generation {self.generation}, step {self.step}")

    def __str__(self) -> str:
        return f"{self.generation:08d}-{self.step:012d}"

    @classmethod
    def parse(cls, text: str) -> SnapshotId:
        """The inverse of `str`. Raises ValueError."""
        match = _ID.fullmatch(text)
        if match is None:
            raise ValueError(f"not a snapshot id: {text[:60]!r}")
        return cls(int(match[1]), int(match[2]))


def check_run_name(run: str) -> str:
    """Return `run` if it can be a key's first segment. Raises ValueError with what is allowed."""
    if not _RUN.fullmatch(run):
        raise ValueError(
            f"{run[:120]!r} cannot be a run's name: letters, digits and _.=+- (not first), at most 100 characters"
        )
    return run


def shard_name(rank: int, world_size: int, index: int) -> str:
    """Return the file name of one shard of one rank, e.g. "rank-00003-of-00008.00.safetensors"."""
    return f"rank-{rank:05d}-of-{world_size:05d}.{index:02d}.safetensors"


def file_name(rank: int, world_size: int, index: int) -> str:
    """Return the name of one file of the program's own, e.g. "rank-00000-of-00001.00012.file"."""
    return f"rank-{rank:05d}-of-{world_size:05d}.{index:05d}.file"


@dataclass(frozen=True)
class RunKeys:
    """The keys of one run in any store, local and remote alike.

    Attributes:
        run: the run's name, the first segment of every key.
    """

    run: str

    def claim(self, generation: int) -> str:
        """Return the key of a generation's claim; put-if-absent, never deleted, remote store only."""
        return f"{self.run}/generations/{generation:08d}.json"

    def done(self, generation: int) -> str:
        """Return the key of the record of how a generation ended; put-if-absent."""
        return f"{self.run}/generations/{generation:08d}.done.json"

    @property
    def generations(self) -> str:
        """Prefix of claims and ends."""
        return f"{self.run}/generations/"

    @property
    def commits(self) -> str:
        """Prefix of manifests: a snapshot exists iff its manifest is here (I1)."""
        return f"{self.run}/commits/"

    @property
    def snapshots(self) -> str:
        """Prefix of payloads."""
        return f"{self.run}/snapshots/"

    @property
    def quarantine(self) -> str:
        """Prefix of the records that say why a snapshot is not usable."""
        return f"{self.run}/quarantine/"

    @property
    def events(self) -> str:
        """Prefix of the journal."""
        return f"{self.run}/events/"

    @property
    def rehearsals(self) -> str:
        """Prefix of the results of rehearsals."""
        return f"{self.run}/rehearsals/"

    def rehearsal(self, digest: str, at: str) -> str:
        """Return the key of the result of rehearsing the script with this digest.

        Args:
            digest: of the script.
            at: when it was rehearsed, in UTC: YYYYMMDDTHHMMSSZ. The keys of one script are in the order of time.
        """
        return f"{self.rehearsals}{digest}.{at}.json"

    def commit(self, snapshot: SnapshotId) -> str:
        """Return the key of a manifest: its presence is the commit."""
        return f"{self.commits}{snapshot}.json"

    def quarantined(self, snapshot: SnapshotId) -> str:
        """Return the key of the record that says that a snapshot is unusable, and why."""
        return f"{self.quarantine}{snapshot}.json"

    def directory(self, snapshot: SnapshotId, nonce: str) -> str:
        """Return the directory of one attempt at a snapshot; the nonce keeps two claimants' payloads apart."""
        if not _NONCE.fullmatch(nonce):
            raise ValueError(f"not a nonce: {nonce[:40]!r}")
        return f"{snapshot}-{nonce}"

    def payload(self, directory: str, name: str) -> str:
        """Return the key of one file in a snapshot's directory."""
        return f"{self.snapshots}{directory}/{name}"

    def part(self, directory: str, rank: int, world_size: int) -> str:
        """Return the key of one rank's part; put-if-absent, after its shards."""
        return self.payload(directory, f"rank-{rank:05d}-of-{world_size:05d}.json")

    def journal(self, generation: int, host: str, segment: int) -> str:
        """Return the key of one segment of the journal; put once."""
        return f"{self.journal_of(generation)}{host}/{segment:08d}.jsonl"

    def journal_of(self, generation: int) -> str:
        """Return the prefix of one generation's segments, of all hosts."""
        return f"{self.events}{generation:08d}-"

    def unfit(self, generation: int, instance: str) -> str:
        """Return the key of the record that an instance could not train, after `generation` starts of the run."""
        return f"{self.journal_of(generation)}{instance}.unfit.json"

    def parse_unfit(self, key: str) -> str | None:
        """Return the instance that such a record names, or `None` for a foreign object."""
        match = _UNFIT.fullmatch(key[len(self.events) :]) if key.startswith(self.events) else None
        return None if match is None else match[1]

    def is_ours(self, key: str) -> bool:
        """Return whether the harness makes keys of this form. Other keys below the run's name are foreign."""
        parsers = (
            self.parse_commit,
            self.parse_claim,
            self.parse_done,
            self.parse_quarantined,
            self.parse_segment,
            self.parse_unfit,
            self.parse_directory,
            self.parse_rehearsal,
        )
        return any(parse(key) is not None for parse in parsers)

    def parse_segment(self, key: str) -> int | None:
        """Return the number of a segment of the journal, or `None` for a foreign object."""
        match = _SEGMENT.search(key) if key.startswith(self.events) else None
        return None if match is None else int(match[1])

    def parse_commit(self, key: str) -> SnapshotId | None:
        """Return the snapshot that a key under `commits` names, or `None` for a foreign object."""
        return _parse(key, self.commits, ".json")

    def parse_quarantined(self, key: str) -> SnapshotId | None:
        """Return the snapshot that a key under `quarantine` names, or `None` for a foreign object."""
        return _parse(key, self.quarantine, ".json")

    def parse_rehearsal(self, key: str) -> str | None:
        """Return the digest of the script that a key under `rehearsals` names, or `None` for a foreign object."""
        match = _REHEARSAL.fullmatch(key.removeprefix(self.rehearsals)) if key.startswith(self.rehearsals) else None
        return None if match is None else match[1]

    def parse_claim(self, key: str) -> int | None:
        """Return the generation that a claim's key names, or `None` (ends and foreign objects)."""
        return _parse_generation(key, self.generations, ".json")

    def parse_done(self, key: str) -> int | None:
        """Return the generation that an end's key names, or `None`."""
        return _parse_generation(key, self.generations, ".done.json")

    def parse_directory(self, key: str) -> tuple[SnapshotId, str] | None:
        """Return the snapshot and directory that a payload's key lies in, or `None` for a foreign object."""
        if not key.startswith(self.snapshots):
            return None
        directory = key[len(self.snapshots) :].split("/", 1)[0]
        snapshot, _, nonce = directory.rpartition("-")
        if not _NONCE.fullmatch(nonce):
            return None
        try:
            return SnapshotId.parse(snapshot), directory
        except ValueError:
            return None


def _parse(key: str, prefix: str, suffix: str) -> SnapshotId | None:
    if not (key.startswith(prefix) and key.endswith(suffix)):
        return None
    try:
        return SnapshotId.parse(key[len(prefix) : -len(suffix)])
    except ValueError:
        return None


def _parse_generation(key: str, prefix: str, suffix: str) -> int | None:
    if not (key.startswith(prefix) and key.endswith(suffix)):
        return None
    digits = key[len(prefix) : -len(suffix)]
    return int(digits) if re.fullmatch(_GENERATION, digits) and int(digits) > 0 else None
