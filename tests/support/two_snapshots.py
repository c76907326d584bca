"""A run with two snapshots in its store, one of them in the local tier too."""

from __future__ import annotations

from pathlib import Path

from harness.config.settings import Settings
from harness.core.manifest import FORMAT, Claim
from harness.core.snapshot import SnapshotId
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content

FIRST, SECOND = SnapshotId(1, 10), SnapshotId(1, 20)


def publish_two(settings: Settings) -> Path:
    """The store's directory."""
    remote, local = open_store(settings.store), open_store(settings.local_tier or "")
    claim = Claim(format=FORMAT, run_id=RUN_ID, generation=1, nonce="a" * 16, claimed_at="", host="here", pid=1,
                  fresh=False, parent=None, command=(), named=True)  # fmt: skip
    commit.claim(remote, KEYS, claim, FOREVER)
    for name in (FIRST, SECOND):
        commit.publish(remote, KEYS, Content(name).staged(), "remote", FOREVER, lambda event: None)
    commit.publish(local, KEYS, Content(SECOND).staged(), "local", FOREVER, lambda event: None)
    return Path(settings.store)


def flip(store: Path, snapshot: SnapshotId) -> Path:
    path = next((store / "run" / "snapshots").glob(f"{snapshot}-*/*.01.safetensors"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    return path
