"""Checks of a store: reach and permissions. Each permission is tried, not read from a policy.

Owns one function for each check, and the objects that the checks write: all of them lie in one directory below
`<run>/snapshots/`, whose name no snapshot can have, and all of them are deleted afterwards, whatever failed. Knows any
ObjectStore; `s3.py` has the checks that only S3 needs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cloud.digest import crc64nvme
from cloud.errors import AlreadyExists, CloudError, Denied, Full, NotFound
from cloud.notice import Clock, Deadline
from cloud.store import ObjectStore
from harness.config.program import digest_of, words_of
from harness.core.snapshot import RunKeys
from harness.errors import SnapshotCorrupt
from harness.inspect.doctor.finding import Finding, Level, failure, ok, one_line, warning
from harness.snapshots import records

REACH_S = 5.0
TRIALS_S = 8.0
CLEAN_S = 5.0
_BODY = b"harness doctor"


# ---- reach ----------------------------------------------------------------------------------------------------------


def check_reach(store: ObjectStore, keys: RunKeys, clock: Clock) -> Finding:
    """Check whether the run's records can be listed, as every start does first."""
    deadline = Deadline.after(REACH_S, clock)
    try:
        for prefix in (keys.generations, keys.events):
            next(iter(store.list(prefix, deadline=deadline)), None)
        commits = sum(1 for _ in store.list(keys.commits, deadline=deadline))
    except CloudError as err:
        return refused("store", err, store, keys)
    return ok("store", f"{store.url} answers; run {keys.run!r} has {commits or 'no'} snapshot{'s' * (commits != 1)}")


def state_bytes(store: ObjectStore, keys: RunKeys, clock: Clock) -> int | None:
    """Return the bytes of the run's newest snapshot, or `None` if it has none that can be read. Raises CloudError."""
    deadline = Deadline.after(REACH_S, clock)
    found = [keys.parse_commit(info.key) for info in store.list(keys.commits, deadline=deadline)]
    for snapshot in sorted((snapshot for snapshot in found if snapshot is not None), reverse=True)[:2]:
        with contextlib.suppress(SnapshotCorrupt, NotFound):
            return records.read_manifest(store, keys, snapshot, deadline).payload_bytes
    return None


def check_rehearsed(
    store: ObjectStore, keys: RunKeys, command: Sequence[str], clock: Clock, s3_endpoint: str | None = None
) -> Finding:
    """Check whether `harness rehearse` has shown that the program resumes exactly."""
    endpoint = () if s3_endpoint is None else ("--s3-endpoint", s3_endpoint)
    remedy = "harness rehearse " + shlex.join(("--store", store.url, "--run", keys.run, *endpoint, "--", *command))
    try:
        record = records.read_rehearsal(store, keys, digest_of(command), Deadline.after(REACH_S, clock))
    except (CloudError, SnapshotCorrupt) as err:
        return warning("rehearsed", f"not known: {one_line(err)}", remedy)
    if record is None:
        return warning("rehearsed", "not shown yet that this program resumes exactly", remedy)
    if not record.identical:
        return warning("rehearsed", record.in_words, remedy)
    if not record.fits(words_of(command)):
        return warning("rehearsed", f"{record.in_words}, but with other arguments", remedy)
    return ok("rehearsed", record.in_words.removeprefix("rehearsed: "))


# ---- permissions ----------------------------------------------------------------------------------------------------


@dataclass
class Ground:
    """The directory in which a store is tried. The rest of the harness ignores it.

    Attributes:
        store: the store that is tried.
        keys: keys of the run.
        prefix: start of every key in this directory.
        clock: monotonic seconds.
        used: keys that may hold something.
    """

    store: ObjectStore
    keys: RunKeys
    prefix: str
    clock: Clock
    used: list[str] = field(default_factory=list)

    def key(self, name: str) -> str:
        """Return a key in this directory, and remember it for `clear`: the reply to a put may be lost."""
        key = self.prefix + name
        if key not in self.used:
            self.used.append(key)
        return key

    def clear(self) -> list[str]:
        """Delete everything and give up every upload. Return the keys that are left, or may be."""
        if not self.used:
            return []
        deadline = Deadline.after(CLEAN_S, self.clock)
        with contextlib.suppress(CloudError):  # left by a probe, or by a try whose reply was lost
            self.used += self._remains(deadline)
        for key in (used := list(dict.fromkeys(self.used))):
            for remove in (self.store.abandon, self.store.delete):
                with contextlib.suppress(CloudError):
                    remove(key, deadline=deadline)
        self.used.clear()
        try:
            return self._remains(deadline)
        except CloudError:
            return used

    def _remains(self, deadline: Deadline) -> list[str]:
        remains = [info.key for info in self.store.list(self.prefix, deadline=deadline)]
        with contextlib.suppress(Denied):
            remains += self.store.unfinished(self.prefix, deadline=deadline)
        return remains


@contextlib.contextmanager
def ground(store: ObjectStore, keys: RunKeys, clock: Clock) -> Generator[Ground]:
    """Make a new ground. Clear it at the end, if the caller has not done so."""
    place = Ground(store, keys, f"{keys.snapshots}doctor-{secrets.token_hex(8)}/", clock)
    try:
        yield place
    finally:
        place.clear()


def check_permissions(place: Ground) -> Iterator[Finding]:
    """Try each call that a run makes. All but `put` need an object that `put` has made."""
    deadline = Deadline.after(TRIALS_S, place.clock)
    put = try_put(place, deadline)
    yield put
    if put.level is not Level.OK:
        yield warning("other calls", "not tried: there is no object to try them with", "fix put first")
        return
    for attempt in (try_put_if_absent, try_get, try_stat, try_list, try_delete):
        yield attempt(place, deadline)


def try_put(place: Ground, deadline: Deadline) -> Finding:
    """Try a plain put."""

    def attempt() -> Finding:
        receipt = place.store.put(place.key("object"), memoryview(_BODY), deadline=deadline)
        if (receipt.size, receipt.crc64nvme) != (len(_BODY), crc64nvme(_BODY)):
            return failure("put", "the receipt does not match the bytes that were put", _look_elsewhere(place.store))
        return ok("put", f"under {place.keys.snapshots}")

    return _tried("put", place, attempt)


def try_put_if_absent(place: Ground, deadline: Deadline) -> Finding:
    """Try the call by which every commit is made: the second put of a key must be refused."""
    name = "put if absent"
    unguarded = failure(
        name,
        "this store ignores If-None-Match, so it cannot keep two agents of one run apart",
        "use a store that honours it, as AWS S3 does; until then the harness writes nothing there",
    )

    def attempt() -> Finding:
        key = place.key("absent")
        try:
            place.store.put_if_absent(key, _BODY, deadline=deadline)
        except Denied as err:
            if "If-None-Match" in str(err):  # the message of an S3 store that was probed
                return unguarded
            raise
        try:
            place.store.put_if_absent(key, _BODY + b" again", deadline=deadline)
        except AlreadyExists:
            return ok(name, "the second put was refused")
        return unguarded

    return _tried(name, place, attempt)


def try_get(place: Ground, deadline: Deadline) -> Finding:
    """Check whether the bytes that were put come back."""

    def attempt() -> Finding:
        into = bytearray(len(_BODY))
        place.store.get(place.key("object"), memoryview(into), deadline=deadline)
        if into != _BODY:
            return failure("get", "the bytes that came back are not those that were put", _look_elsewhere(place.store))
        return ok("get", "the same bytes came back")

    return _tried("get", place, attempt)


def try_stat(place: Ground, deadline: Deadline) -> Finding:
    """Check the size and the checksum that the store reports."""

    def attempt() -> Finding:
        info = place.store.stat(place.key("object"), deadline=deadline)
        if info.size != len(_BODY) or info.crc64nvme not in (None, crc64nvme(_BODY)):
            return failure("stat", "the store reports another size or checksum", _look_elsewhere(place.store))
        if info.crc64nvme is None:
            return ok(
                "stat", "the size is right; the store keeps no checksum, so snapshots are read back to verify them"
            )
        return ok("stat", "size and CRC64NVME are right")

    return _tried("stat", place, attempt)


def try_list(place: Ground, deadline: Deadline) -> Finding:
    """Check whether an object is listed right after its put: resume depends on it."""

    def attempt() -> Finding:
        listed = [info.key for info in place.store.list(place.prefix, deadline=deadline)]
        if place.key("object") not in listed:
            return failure(
                "list", "what was just put is not listed", "the harness needs a store with list-after-write: S3 has it"
            )
        return ok("list", "what was just put is listed")

    return _tried("list", place, attempt)


def try_delete(place: Ground, deadline: Deadline) -> Finding:
    """Check whether objects can be deleted, as retention does."""

    def attempt() -> Finding:
        key = place.key("object")
        place.store.delete(key, deadline=deadline)
        if key in [info.key for info in place.store.list(place.prefix, deadline=deadline)]:
            return failure("delete", "what was deleted is still listed", _look_elsewhere(place.store))
        return ok("delete", "what was deleted is gone")

    return _tried("delete", place, attempt)


def try_multipart(place: Ground, data: memoryview) -> Finding:
    """Try a put of more bytes than one part holds."""

    def attempt() -> Finding:
        deadline = Deadline.after(TRIALS_S, place.clock)
        key = place.key("parts")
        receipt = place.store.put(key, data, deadline=deadline)
        found = place.store.stat(key, deadline=deadline)
        if found.size != len(data) or found.crc64nvme not in (None, receipt.crc64nvme):
            return failure("multipart", "the store holds other bytes than were sent", _look_elsewhere(place.store))
        return ok("multipart", f"{len(data) / 1e6:.0f} MB in parts")

    return _tried("multipart", place, attempt)


def try_cut_off(place: Ground, data: memoryview) -> Finding:
    """Check whether a start can give up the uploads that a dead instance left: begin an upload and cut it off.

    Never a failure: an upload that is not given up costs money, but loses no snapshot.
    """

    def attempt() -> Finding:
        deadline = Deadline.after(TRIALS_S, place.clock)
        store = place.store
        store.unfinished(place.prefix, deadline=deadline)  # if this is denied, do not begin an upload that would stay
        key = place.key("cut-off")
        with contextlib.suppress(_CutOff):
            store.put(key, data, deadline=deadline, progress=_cut_off)
        seen = store.unfinished(place.prefix, deadline=deadline)
        store.abandon(key, deadline=deadline)
        if key not in seen or key in store.unfinished(place.prefix, deadline=deadline):
            return warning(
                "cut-off uploads",
                "the store cannot list them, or does not give them up",
                "make sure that the store deletes them by itself: set a lifecycle rule, or ask its owner",
            )
        others = store.unfinished(place.keys.snapshots, deadline=deadline)
        told = f"has {len(others)}: its next start gives them up" if others else "has none"
        return ok("cut-off uploads", f"can be listed and given up; this run {told}")

    found = _tried("cut-off uploads", place, attempt)
    return replace(found, level=Level.WARNING) if found.level is Level.FAILURE else found


class _CutOff(Exception):
    """Ends an upload in the middle, as the end of an instance does."""


def _cut_off(sent: int, **_: object) -> None:
    raise _CutOff


def check_cleared(place: Ground) -> Finding:
    """Clear the ground, and report what is left."""
    left = place.clear()
    if not left:
        return ok("clean-up", "nothing is left from these checks")
    where = f"{place.store.url}/{place.prefix}"
    remedy = f"rm -r {where}"
    if where.startswith("s3://"):
        remedy = f"aws s3 rm --recursive {where}, and aws s3api abort-multipart-upload for uploads"
    return warning("clean-up", f"{len(left)} objects or uploads may be left from these checks", remedy)


def _tried(name: str, place: Ground, attempt: Callable[[], Finding]) -> Finding:
    """Return what `attempt` finds. An error of the store is a failure: a run would get the same error."""
    try:
        return attempt()
    except CloudError as err:
        return refused(name, err, place.store, place.keys)


def refused(name: str, err: CloudError, store: ObjectStore, keys: RunKeys) -> Finding:
    """Return the failure for an error of the store, with a remedy: the error's own if it has one."""
    what = one_line(err)
    if isinstance(err, Full):
        return failure(name, what, "make room, or name another --store")
    if not store.url.startswith("s3://"):
        mode = f"user {os.getuid()} must be able to write there: chown or chmod it, mount it rw, or use another --store"
        return failure(name, what, mode if isinstance(err, Denied) else "check that the file system is mounted")
    if not isinstance(err, Denied):
        return failure(
            name,
            what,
            "if this persists, check the bucket's name, the endpoint and the route to it (proxy, gateway endpoint)",
        )
    what, _, remedy = what.rpartition("; ")  # cloud/s3/errors.py names the action that is missing
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    below = "/".join(word for word in (prefix, keys.run) if word)
    if remedy.startswith("allow s3:List"):
        remedy += f' on arn:aws:s3:::{bucket} for the prefix "{below}/*"'
    elif remedy.startswith("allow s3:"):
        remedy += f" on arn:aws:s3:::{bucket}/{below}/*"
    return failure(name, what or remedy, remedy)


def _look_elsewhere(store: ObjectStore) -> str:
    return f"do not use {store.url} for training: a store must not do this"
