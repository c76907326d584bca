from __future__ import annotations

import pytest

from cloud.errors import (
    Unavailable,
)
from harness.errors import SnapshotCorrupt
from harness.snapshots import fetch, records
from tests.support.protocol import (
    FOREVER,
    KEYS,
    Fault,
    ProtocolStore,
)
from tests.support.published import (
    FIRST,
    publish,
)


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("shard", [0, 1])
def test_a_damaged_shard_is_found(store: ProtocolStore, how: str, shard: int) -> None:
    publish(store, FIRST)
    manifest = records.read_manifest(store, KEYS, FIRST, FOREVER)
    assert fetch.verify(store, KEYS, manifest, FOREVER)
    key = KEYS.payload(manifest.directory, manifest.parts[0].shards[shard].name)
    store.damage(key, how)

    with pytest.raises(SnapshotCorrupt, match=key):
        fetch.verify(store, KEYS, manifest, FOREVER)


def test_a_store_that_is_down_proves_nothing_about_a_snapshot(store: ProtocolStore) -> None:
    publish(store, FIRST)
    manifest = records.read_manifest(store, KEYS, FIRST, FOREVER)

    with store.armed(Fault("down", 1)), pytest.raises(Unavailable):
        fetch.verify(store, KEYS, manifest, FOREVER)
