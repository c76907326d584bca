"""What the bucket holds, against what retention promises. Looks from outside: the keys, the manifests, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from cloud.notice import Deadline
from harness.config.settings import Settings
from harness.core.manifest import Manifest
from harness.core.snapshot import RunKeys, SnapshotId
from harness.snapshots import records
from harness.snapshots.open import open_existing_store
from tests.soak.hosts import RUN
from tests.support.s3_server import steer

READ_S = 30.0


@dataclass(frozen=True)
class Promise:
    """What is kept."""

    keep_last: int
    keep_every: int

    def is_milestone(self, snapshot: SnapshotId) -> bool:
        return snapshot.step > 0 and snapshot.step % self.keep_every == 0


@dataclass(frozen=True)
class Found:
    """The bucket at one moment.

    Attributes:
        commits: what can be used.
        surplus: commits that the next retirement deletes: neither of the newest, nor a milestone.
        being_written: objects above Latest, of a snapshot that is not committed yet.
        garbage: objects of snapshots at or below Latest that no manifest names: the next sweep takes them.
        uploads: keys of unfinished multipart uploads.
        probes: what a probe of the store that was killed within its milliseconds has left, nine bytes or an empty
            upload. Nobody takes that away, so it is told and allowed. AWS's own S3 is never probed.
        wrong: what must never be.
    """

    commits: list[SnapshotId]
    surplus: list[SnapshotId]
    being_written: list[str]
    garbage: list[str]
    uploads: list[str]
    probes: list[str]
    wrong: list[str]

    @property
    def is_exact(self) -> bool:
        return not (self.surplus or self.being_written or self.garbage or self.uploads or self.wrong)

    def words(self) -> str:
        facts = {
            "beyond retention": [str(snapshot) for snapshot in self.surplus],
            "above Latest": self.being_written,
            "garbage": self.garbage,
            "unfinished uploads": self.uploads,
            "left by killed probes": self.probes,
            "wrong": self.wrong,
        }
        return "; ".join(f"{name}: {', '.join(those)}" for name, those in facts.items() if those) or "exact"


class Bucket:
    """The run's part of a bucket, and what else is there."""

    def __init__(self, url: str, store: str, promise: Promise) -> None:
        self._url, self._promise, self._keys = url, promise, RunKeys(RUN)
        self._prefix = store.removeprefix("s3://").partition("/")[2] + "/"
        self._store = open_existing_store(store, Settings(store=store, run=RUN, s3_endpoint=url))
        self._manifests: dict[SnapshotId, Manifest] = {}

    def look(self, durable: set[str], quarantined: set[str]) -> Found:
        """List it now. `durable`: every snapshot that was ever told to be; those of them that are milestones stay.

        Raises:
            NotFound: a snapshot was retired while its manifest was being read.
        """
        keys, found = self._keys, steer(self._url, "objects")
        unfinished = [upload["key"].removeprefix(self._prefix) for upload in steer(self._url, "uploads")]
        objects = {key.removeprefix(self._prefix): size for key, size in found.items()}
        probe = f"{keys.snapshots}probe-"
        probes = sorted(key for key in [*objects, *unfinished] if key.startswith(probe))
        uploads = sorted(set(unfinished) - set(probes))
        all_commits = sorted(filter(None, map(keys.parse_commit, objects)))
        commits = [snapshot for snapshot in all_commits if str(snapshot) not in quarantined]
        newest = commits[-self._promise.keep_last :]
        wrong = [] if len(newest) == self._promise.keep_last else [f"only {len(newest)} commits"]
        wrong += [
            f"{snapshot} is gone: a milestone"
            for snapshot in map(SnapshotId.parse, sorted(durable - quarantined))
            if self._promise.is_milestone(snapshot) and snapshot not in commits
        ]
        named = set()
        for snapshot in all_commits:
            manifest = self._manifest(snapshot)
            for part in manifest.parts:
                named.add(keys.part(manifest.directory, part.rank, part.world_size))
                for shard in part.shards:
                    named.add(key := keys.payload(manifest.directory, shard.name))
                    if objects.get(key) != shard.size:
                        wrong.append(f"{key}: {objects.get(key)} bytes, {shard.size} are committed")
        being_written: list[str] = []
        garbage: list[str] = []
        for key in objects.keys() - named - set(probes):
            directory = keys.parse_directory(key)
            if directory is not None:
                (being_written if not commits or directory[0] > commits[-1] else garbage).append(key)
            elif not any(map(key.startswith, (keys.commits, keys.generations, keys.events, keys.quarantine))):
                wrong.append(f"{key} belongs to nobody")
        surplus = [s for s in commits if s not in newest and not self._promise.is_milestone(s)]
        return Found(commits, surplus, sorted(being_written), sorted(garbage), uploads, probes, wrong)

    def _manifest(self, snapshot: SnapshotId) -> Manifest:
        if snapshot not in self._manifests:
            deadline = Deadline.after(READ_S)
            self._manifests[snapshot] = records.read_manifest(self._store, self._keys, snapshot, deadline)
        return self._manifests[snapshot]
