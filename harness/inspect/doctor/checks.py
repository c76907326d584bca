"""`harness doctor`: find in seconds the problems that could cost a night of training.

Owns the list and the order of the checks, and the results that one check passes to another: the window, the state's
size, the rate. The checks themselves are in `host.py` (this machine), `store.py` (reach and permissions, by trying
them), `s3.py` (bucket only) and `capacity.py` (room and time). Leaves nothing behind.

    machine ─▶ metadata ─▶ window ─────────────────────┐
    store ─▶ permissions ─▶ rehearsed? ─▶ state's size ─▶ room ─▶ rate ─▶ does it fit?
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cloud.aws.metadata import Metadata, MetadataSession
from cloud.errors import CloudError
from cloud.notice import SPOT_NOTICE_S
from cloud.retry import RetryingStore
from cloud.store import CHUNK_BYTES, ObjectStore
from harness.config.settings import Settings
from harness.core.policy.drain import MARGIN_S
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError
from harness.inspect.doctor import host
from harness.inspect.doctor.capacity import (
    Rate,
    Window,
    check_apart,
    check_medium,
    check_room,
    incompressible,
    judge_pace,
    judge_upload,
    measure,
)
from harness.inspect.doctor.finding import Finding, Level, examined, failure, ok, one_line, warning
from harness.inspect.doctor.host import Host
from harness.inspect.doctor.s3 import Bucket, check_bucket, check_sums
from harness.inspect.doctor.store import (
    Ground,
    check_cleared,
    check_permissions,
    check_reach,
    check_rehearsed,
    ground,
    refused,
    state_bytes,
    try_cut_off,
    try_multipart,
)
from harness.snapshots.open import open_bucket, open_store

Stores = Callable[[str], ObjectStore]
_ERRORS = (ConfigError, CloudError, OSError, ImportError)  # S3 without boto3: `software` names what to install


class Examination:
    """All checks of one machine. `findings` yields each finding as soon as its check is made.

    Args:
        settings: the settings that a run would have.
        host: this machine.
        command: the program that a run would start. Was it rehearsed, is it torchrun?
        state_bytes: size of the state; `None` for the size of the run's newest snapshot.
        stores: opens a directory store by its location.
        open_bucket: opens an S3 store.
        open_metadata: opens a session to a metadata service by its URL.
    """

    def __init__(
        self,
        settings: Settings,
        host: Host,
        *,
        command: Sequence[str] = (),
        state_bytes: int | None = None,
        stores: Stores = open_store,
        open_bucket: Callable[[Settings], Bucket] = lambda settings: open_bucket(settings.store, settings),
        open_metadata: Callable[[str], Metadata] = MetadataSession,
    ) -> None:
        self._settings, self._host, self._command = settings, host, command
        self._keys = RunKeys(settings.run)
        self._stores, self._open_bucket, self._open_metadata = stores, open_bucket, open_metadata
        self._told_bytes = self._state_bytes = state_bytes
        self._window = Window(settings.grace_s, "a SIGTERM (grace_s)")
        self._rate: Rate | None = None

    def findings(self) -> Iterator[Finding]:
        """Make every check. Blocks for seconds, most of them to measure rates; every call has a deadline."""
        yield from self._look_at_machine()
        yield from self._visit_store()
        yield examined("memory", lambda: host.check_memory(self._host, self._settings, self._state_bytes))
        if self._settings.local is not None:
            yield from self._visit_local(self._settings.local)
        yield host.check_torchrun(self._host, self._command, self._drain_s(), self._settings.grace_s)

    def _look_at_machine(self) -> Iterator[Finding]:
        s3 = self._settings.store.startswith("s3://")
        yield host.check_software(self._host)
        yield host.check_kernel(self._host)
        yield host.check_open_files(self._host, s3=s3)
        yield examined("/dev/shm", lambda: host.check_shm(self._host))
        metadata = examined("metadata", lambda: host.check_metadata(self._host, self._settings, self._open_metadata))
        if metadata.level is Level.OK:
            self._window = Window(SPOT_NOTICE_S, "a spot notice")
        yield metadata

    # ---- the durable store --------------------------------------------------------------------------------------

    def _visit_store(self) -> Iterator[Finding]:
        location = self._settings.store
        try:
            if location.startswith("s3://"):
                with contextlib.closing(self._open_bucket(self._settings)) as bucket:
                    yield from self._try_bucket(bucket)
                return
            new = _missing(location)
            with _visited(location, self._stores) as store:
                reached = check_reach(store, self._keys, self._host.clock)
                yield replace(reached, what=f"{reached.what}; newly made: is its disk mounted?") if new else reached
                if reached.level is Level.OK:
                    yield from self._try_store(store)
        except _ERRORS as err:
            yield failure("store", one_line(err), "fix this, or name another --store")

    def _try_bucket(self, bucket: Bucket) -> Iterator[Finding]:
        store = RetryingStore(bucket)
        reached = check_reach(store, self._keys, self._host.clock)
        yield reached
        if reached.level is not Level.OK:
            return
        try:
            yield from check_bucket(bucket, self._keys, self._host.clock)
        except CloudError as err:  # e.g. s3:ListBucket has a condition that a request without a prefix fails
            yield replace(refused("bucket", err, store, self._keys), level=Level.WARNING)
        yield from self._try_store(store, bucket)

    def _try_store(self, store: ObjectStore, bucket: Bucket | None = None) -> Iterator[Finding]:
        settings, host = self._settings, self._host
        with ground(store, self._keys, host.clock) as place:
            if bucket is not None:
                yield examined("sums", lambda: check_sums(bucket, place.prefix, host.clock))
            works = set()
            for finding in check_permissions(place):
                works |= {finding.name} if finding.level is Level.OK else set()
                yield finding
            large = {"put", "delete"} <= works  # otherwise a large object would stay
            if large and bucket is not None:
                data = memoryview(incompressible(CHUNK_BYTES + 1))  # one byte more than a part holds
                yield try_multipart(place, data)
                yield try_cut_off(place, data)
            if self._command:
                yield check_rehearsed(store, self._keys, self._command, host.clock, settings.s3_endpoint)
            yield self._look_up_size(store)
            if bucket is None:
                directory, keep = Path(settings.store), settings.keep_last
                yield examined("durable", lambda: check_medium(host, "durable", directory, durable=True))
                yield examined("room", lambda: check_room(host, "room", store, self._keys, keep, self._state_bytes))
            if large:
                yield from self._measure(place)
            yield check_cleared(place)

    def _look_up_size(self, store: ObjectStore) -> Finding:
        why = "the run has no snapshot yet"
        if self._told_bytes is None:
            try:
                self._state_bytes = state_bytes(store, self._keys, self._host.clock)
            except CloudError as err:
                why = one_line(err)
        if self._state_bytes is None:
            return warning(
                "state",
                f"size unknown, so doctor cannot say whether it fits: {why}",
                "pass --state-gb: weights and optimizer, about 12 GB per billion parameters in fp32 with AdamW",
            )
        whose = "the newest snapshot's" if self._told_bytes is None else "from --state-gb"
        return ok("state", f"{self._state_bytes / 1e9:.3g} GB, {whose}")

    def _measure(self, place: Ground) -> Iterator[Finding]:
        try:
            self._rate = measure(place)
        except CloudError as err:
            yield refused("upload", err, place.store, self._keys)
            return
        yield judge_upload(self._rate, self._state_bytes, self._window)
        if self._settings.local is None:
            option, every_s = "--every-s", self._settings.every_s
        else:
            option, every_s = "--durable-every-s", self._settings.durable_every_s
        yield judge_pace("pace", "the store", self._rate, self._state_bytes, option, every_s)

    # ---- the local tier, and the time of a drain ----------------------------------------------------------------

    def _visit_local(self, location: str) -> Iterator[Finding]:
        settings, host, keys, directory = self._settings, self._host, self._keys, Path(location)
        size, keep = self._state_bytes, settings.keep_local
        yield examined("local disk", lambda: check_medium(host, "local disk", directory, durable=False))
        if "://" not in settings.store:
            yield examined("tiers", lambda: check_apart(Path(settings.store), directory))
        try:
            with _visited(location, self._stores) as store, ground(store, keys, host.clock) as place:
                yield check_room(host, "local room", store, keys, keep, size)
                yield judge_pace("local pace", "the local tier", measure(place), size, "--every-s", settings.every_s)
        except _ERRORS as err:
            yield failure("local tier", one_line(err), "name a writable directory with --local")

    def _drain_s(self) -> float:
        """Return how long a drain may take: the time for the upload if that is known, but at most the window."""
        if self._state_bytes is None or self._rate is None:
            return self._window.seconds
        return min(self._window.seconds, self._state_bytes / self._rate.bytes_s + MARGIN_S)


@contextlib.contextmanager
def _visited(location: str, stores: Stores) -> Generator[ObjectStore]:
    """Open a store while it is examined. Afterwards remove the directories that this has made."""
    missing = _missing(location)
    try:
        with contextlib.closing(stores(location)) as store:
            yield store
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # another process has put something there meanwhile
                path.rmdir()


def _missing(location: str) -> list[Path]:
    """Return the directories that opening a store at `location` would make, deepest first."""
    if "://" in location:
        return []
    return [path for path in (Path(location), *Path(location).parents) if not path.exists()]
