"""The home of a fleet: where its variables and Terraform's state are, and how any machine finds them.

Owns these places. In the run's bucket, below `fleets/RUN/`: the variables and the state, so that no laptop is needed to
stop a fleet that costs money. On this machine: a copy of the module, and which bucket it is.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from cloud.aws.console import STORE_TAG, Console
from cloud.errors import CloudError, NotFound
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.errors import ConfigError
from harness.fleet.definition import FILE, Definition
from harness.snapshots.open import open_existing_store

CALL_S = 60.0
_FOLDER, _VARIABLES, _STATE = "fleets", "variables.json", "terraform.tfstate"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Home:
    """Where a fleet's variables and state are.

    Attributes:
        run: the run's name.
        region: of the fleet and its bucket.
        folder: on this machine.
        bucket: `None` until there is one.
    """

    run: str
    region: str
    folder: Path
    bucket: str | None = None

    @classmethod
    def of(cls, run: str, region: str) -> Home:
        """Return the home of a fleet that nothing is known of yet."""
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
        return cls(run, region, state / "harness" / "fleets" / region / run)

    @property
    def name(self) -> str:
        """Of the Auto Scaling group, and the beginning of every other name in AWS."""
        return f"harness-{self.run}"

    @property
    def state_key(self) -> str:
        """Where the state is in the bucket."""
        return f"{_FOLDER}/{self.run}/{_STATE}"

    def in_bucket(self, bucket: str) -> Home:
        """Return this home with a bucket, which this machine remembers from now on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / "home.json.new"
        draft.write_text(json.dumps({"bucket": bucket}) + "\n")
        draft.replace(self.folder / "home.json")  # whole or not at all: it leads to a fleet that costs money
        return replace(self, bucket=bucket)

    def load(self) -> Definition | None:
        """Return the variables, of the bucket or else of this machine; `None` if there are none.

        Raises:
            ConfigError: they cannot be read.
            CloudError: the bucket cannot be asked.
        """
        if self.bucket is not None and (kept := self.load_from_bucket()) is not None:
            return kept
        path = self.folder / "terraform" / FILE
        return Definition.from_json(path.read_bytes(), str(path)) if path.is_file() else None

    def load_from_bucket(self) -> Definition | None:
        """Return the variables that the bucket has. Raises as `load` does."""
        try:
            data = self._store().read(_VARIABLES, limit_bytes=_MOST_BYTES, deadline=Deadline.after(CALL_S))
        except NotFound:
            return None
        return Definition.from_json(data, f"s3://{self.bucket}/{_FOLDER}/{self.run}/{_VARIABLES}")

    def save(self, definition: Definition) -> None:
        """Keep the variables in the bucket. Raises CloudError."""
        self._store().put(_VARIABLES, memoryview(definition.to_json()), deadline=Deadline.after(CALL_S))

    def upload(self, archive: Path, digest: str) -> str:
        """Keep a run's code in the bucket, beside all earlier ones; return its address. Raises CloudError."""
        address = f"s3://{self.bucket}/sources/{self.run}"
        key = f"packed/{digest}.tar.gz"
        store, deadline = open_existing_store(address), Deadline.after(3600.0)
        try:
            if store.stat(key, deadline=deadline).size == archive.stat().st_size:
                return f"{address}/{key}"
        except NotFound:
            pass
        store.put(key, archive, deadline=deadline)
        return f"{address}/{key}"

    def forget(self) -> None:
        """Remove what this machine knows, after everything else is gone."""
        (self.folder / "home.json").unlink(missing_ok=True)
        (self.folder / "terraform" / FILE).unlink(missing_ok=True)

    def _store(self) -> ObjectStore:
        return open_existing_store(f"s3://{self.bucket}/{_FOLDER}/{self.run}")


def find(run: str, region: str, bucket: str | None, console: Console) -> Home:
    """Find the home of a run's fleet: by what is given, by this machine, by the group's tags, by the bucket's name.

    Returns:
        A home without a bucket if there is no trace of one.

    Raises:
        ConfigError: several buckets have a fleet of this run.
        CloudError: AWS cannot be asked.
    """
    home = Home.of(run, region)
    if bucket is not None:
        return home.in_bucket(bucket)
    if (record := home.folder / "home.json").is_file():
        return replace(home, bucket=str(json.loads(record.read_text())["bucket"]))
    for group in console.groups(Deadline.after(CALL_S), home.name):
        if (store := group.tags.get(STORE_TAG, "")).startswith("s3://"):
            return home.in_bucket(store.removeprefix("s3://").partition("/")[0])
    known = [name for name in console.buckets(_bucket_prefix(run), Deadline.after(CALL_S)) if _has_fleet(home, name)]
    if len(known) > 1:
        raise ConfigError(f"several buckets have a fleet of {run}: {', '.join(known)}. Name one with --bucket")
    return home.in_bucket(known[0]) if known else home


def _bucket_prefix(run: str) -> str:
    """Return what the module's new bucket is named by: terraform/aws/bucket.tf."""
    return f"harness-{run.lower().replace('_', '-')}"[:36].removesuffix("-") + "-"


def _has_fleet(home: Home, bucket: str) -> bool:
    try:
        return replace(home, bucket=bucket).load_from_bucket() is not None
    except CloudError:  # of another region, or not ours to read
        return False
