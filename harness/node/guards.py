"""Guards against loops between machines, which none of them can see alone: they are counted in the run's store.

Owns what is counted, and how many are too many. Nothing here is needed to train: a store that does not answer counts
as nothing, and the machine goes on as if it were the first.

    the self-test fails ─▶ the group starts another instance ─▶ its self-test fails ─▶ …
    superseded ─▶ the instance ends, the group starts another ─▶ which supersedes the one before ─▶ …
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Final

import msgspec

from cloud.errors import AlreadyExists, CloudError
from cloud.notice import Deadline
from harness.config.settings import Settings
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError, SnapshotCorrupt
from harness.snapshots import records
from harness.snapshots.open import open_existing_store, open_store

MOST_UNFIT: Final = 3
"""Instances in a row whose self-test failed, after which the fleet is stopped."""
MOST_SUPERSEDED: Final = 4
"""Starts of a run that were superseded within `LATELY`, after which the fleet is stopped."""
LATELY: Final = datetime.timedelta(hours=1)
STORE_S = 20.0
_LOOKED_AT = 3 * MOST_SUPERSEDED  # generations, newest first: restarts in place are generations, too


class Guards:
    """What the store of one run has counted.

    Args:
        settings: of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._keys = settings, RunKeys(settings.run)

    def unfit(self, instance: str, why: str) -> int:
        """Note that an instance cannot train. Return how many in a row could not: since the run was last started.

        Args:
            instance: its id.
            why: for people.

        Returns:
            1 or more; 0 if the store does not answer.
        """
        deadline = Deadline.after(STORE_S)
        try:
            store = open_store(self._settings.store, self._settings)
            generation = max(self._numbers(deadline), default=0)
            record = {"instance": instance, "generation": generation, "reason": why[:1000], "at": records.utc_now()}
            with contextlib.suppress(AlreadyExists):  # the same instance, at its next boot
                store.put_if_absent(
                    self._keys.unfit(generation, instance), msgspec.json.encode(record), deadline=deadline
                )
            prefix = self._keys.journal_of(generation)
            return sum(self._keys.parse_unfit(info.key) is not None for info in store.list(prefix, deadline=deadline))
        except (CloudError, ConfigError):
            return 0

    def superseded(self) -> int:
        """Return how many starts of the run were superseded within the last hour, by the clocks of their machines."""
        deadline = Deadline.after(STORE_S)
        try:
            store, since = open_existing_store(self._settings.store, self._settings), _now() - LATELY
            newest = sorted(self._numbers(deadline, ended=True), reverse=True)[:_LOOKED_AT]
            ends = [records.read_done(store, self._keys, number, deadline) for number in newest]
        except (CloudError, ConfigError, SnapshotCorrupt):
            return 0
        return sum(end.outcome == "superseded" and _instant(end.ended_at) > since for end in ends)

    def _numbers(self, deadline: Deadline, *, ended: bool = False) -> list[int]:
        """Return the generations that were claimed, or that have ended. Raises CloudError, ConfigError."""
        parse = self._keys.parse_done if ended else self._keys.parse_claim
        store = open_existing_store(self._settings.store, self._settings)
        listed = store.list(self._keys.generations, deadline=deadline)
        return [number for info in listed if (number := parse(info.key)) is not None]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _instant(text: str) -> datetime.datetime:
    """Return the instant of a record; one that cannot be read is long ago."""
    with contextlib.suppress(ValueError):
        found = datetime.datetime.fromisoformat(text)
        return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)
    return datetime.datetime.min.replace(tzinfo=datetime.UTC)
