"""Several agents of one run at every interleaving: threads of which exactly one moves, and only when the test says so.

Each agent runs real protocol code over a `SteppedStore`. Before every call of the store, and in every pause, it stands
still and gives the baton back to the test, which chooses who makes the next call and what becomes of that call. So the
order of all effects is a list of `Move`s: nothing depends on the operating system's scheduler, and a schedule that
found something is written down, replayed and shrunk. Time is the world's own and passes only while somebody pauses.

    test ──move──▶ actor's thread: this call's effect ──▶ local work ──▶ stands before its next call ──baton──▶ test
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cloud.errors import CloudError, OutcomeUnknown, Unavailable
from cloud.notice import Deadline
from cloud.store import ObjectInfo, ObjectStore, Progress, Receipt, Source
from tests.support.patience import HANG_S
from tests.support.protocol import KEYS, Crash

RETRIES = 9  # that a RetryingStore makes of one call
_T = TypeVar("_T")

FATES = ("die before", "die after", "lose reply", "lose reply late", "fail", "cut before", "cut after")
"""What may become of a call.

`die before`, `die after`: the process ends before or after the call's effect. `lose reply`: the effect happens, and an
error is raised. `lose reply late`: an error is raised, and the effect happens when the test says so (a request that was
still on its way when its sender gave up). `fail`: an error, no effect, once. `cut before`, `cut after`: as `fail` and
`lose reply`, and the store stays out of reach until the retries of this call are used up.
"""


@dataclass(frozen=True)
class Call:
    """What an actor is about to do: a verb of the store, or "pause", and what kind of object it concerns."""

    verb: str
    key: str = ""

    @property
    def kind(self) -> str:
        """How a schedule names it: "put manifest", "delete shard", "list commits", "pause"."""
        if self.verb in ("pause", "start"):
            return self.verb
        if self.verb == "list":
            return f"list {self.key.split('/')[1]}"
        return f"{self.verb} {kind_of(self.key)}"


def kind_of(key: str) -> str:
    """What an object is, by its key."""
    if KEYS.parse_commit(key) is not None:
        return "manifest"
    if KEYS.parse_claim(key) is not None:
        return "claim"
    if KEYS.parse_done(key) is not None:
        return "done"
    if KEYS.parse_quarantined(key) is not None:
        return "quarantine"
    if key.startswith(KEYS.events):
        return "journal"
    return "part" if key.endswith(".json") else "shard"


class Actor:
    """A thread that lives a life in single steps, and rests between them."""

    def __init__(self, name: str, life: Callable[[], None]) -> None:
        """`life` begins with the first move."""
        self.name = name
        self.wakes_at = 0.0
        self.stands_at: Call | None = Call("start")
        self.died = False
        self.in_flight: list[Callable[[], object]] = []
        self._life, self._fate = life, ""
        self._error: BaseException | None = None
        self._mine, self._tests = threading.Lock(), threading.Lock()  # whose is locked waits for the baton
        self._mine.acquire()
        self._tests.acquire()
        self._thread = threading.Thread(target=self._run, name=f"actor-{name}", daemon=True)
        self._cut = 0

    @property
    def begun(self) -> bool:
        """Whether it has been moved at all."""
        return self._thread.ident is not None

    @property
    def over(self) -> bool:
        """Whether its life has ended, one way or another."""
        return self.stands_at is None

    def move(self, fate: str = "") -> None:
        """Let it make the call that it stands before, with this fate, and go on to the next one. Test's thread.

        Raises:
            BaseException: what ended its life, if that was neither its end nor a `Crash`.
        """
        assert not self.over, f"{self.name} has ended already"
        self._fate = fate
        if not self.begun:
            self._thread.start()
        else:
            self._mine.release()
        assert self._tests.acquire(timeout=HANG_S), f"{self.name} hangs after {self.stands_at}"
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def kill(self) -> None:
        """End its life where it stands. Test's thread."""
        if not self.begun:
            self.stands_at, self.died = None, True
        while not self.over:
            self.move("die before")

    def land(self) -> None:
        """Let the oldest request that was on its way arrive; nobody hears the answer. Test's thread."""
        if self.in_flight:
            effect = self.in_flight.pop(0)
            with contextlib.suppress(CloudError):
                effect()

    def pause(self, until: float = 0.0) -> None:
        """Stand still until moved; `wakes_at` tells the test until when, by the test's clock. Its own thread."""
        self.wakes_at = until
        if self._stand(Call("pause")).startswith("die"):
            raise Crash

    def call(self, call: Call, effect: Callable[[], _T]) -> _T:
        """Make one call of a store as the test wishes. Its own thread."""
        changes = call.verb in ("put", "delete")
        if self._cut:
            self._cut -= 1
            raise Unavailable("injected: out of reach")
        fate = self._stand(call)
        if fate == "die before":
            raise Crash
        if fate in ("fail", "cut before") or (fate and not changes and fate != "die after"):
            self._cut = RETRIES if fate.startswith("cut") else 0
            raise Unavailable("injected: not done")
        if fate == "lose reply late":
            self.in_flight.append(effect)
            raise OutcomeUnknown("injected: still on its way, and nobody knows")
        result = effect()
        if fate == "die after":
            raise Crash
        if fate in ("lose reply", "cut after"):
            self._cut = RETRIES if fate == "cut after" else 0
            raise OutcomeUnknown("injected: done, and nobody knows")
        return result

    def _stand(self, call: Call) -> str:
        self.stands_at = call
        self._tests.release()
        assert self._mine.acquire(timeout=HANG_S), "nobody moves this actor any more"
        return self._fate

    def _run(self) -> None:
        try:
            self._life()
        except Crash:
            self.died = True
        except BaseException as err:  # noqa: BLE001  the thread's root: the test raises it
            self._error, self.died = err, True
        self.stands_at = None
        self._tests.release()


class SteppedStore:
    """An ObjectStore whose every call is one step of an actor. A listing is one call for every page."""

    def __init__(self, inner: ObjectStore, actor: Actor, page: int) -> None:
        """`page`: keys that one call of a listing gives; what changes between two pages is seen, or not."""
        self.inner, self._actor, self._page = inner, actor, page
        self.url = inner.url

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        return self._call("put", key, lambda: self.inner.put(key, source, deadline=deadline, progress=progress))

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        self._call("put", key, lambda: self.inner.put_if_absent(key, data, deadline=deadline))

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        self._call("put", key, lambda: self.inner.copy(source, key, expected, deadline=deadline))

    def delete(self, key: str, *, deadline: Deadline) -> None:
        self._call("delete", key, lambda: self.inner.delete(key, deadline=deadline))

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        self._call("read", key, lambda: self.inner.get(key, into, offset=offset, deadline=deadline))

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        return self._call("read", key, lambda: self.inner.read(key, limit_bytes=limit_bytes, deadline=deadline))

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        return self._call("stat", key, lambda: self.inner.stat(key, deadline=deadline))

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        def next_page(behind: str) -> list[ObjectInfo]:
            found = self.inner.list(prefix, after=behind, deadline=deadline)
            return list(itertools.islice(found, self._page))

        def pages(behind: str) -> Iterator[ObjectInfo]:
            while True:
                page = self._call("list", prefix, functools.partial(next_page, behind))
                yield from page
                if len(page) < self._page:
                    return
                behind = page[-1].key

        return pages(after)

    def unfinished(self, prefix: str, *, deadline: Deadline) -> list[str]:
        return self._call("list", prefix, lambda: self.inner.unfinished(prefix, deadline=deadline))

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        self._call("delete", key, lambda: self.inner.abandon(key, deadline=deadline))

    def local_path(self, key: str) -> Path | None:
        return self.inner.local_path(key)

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def reserve(self, size: int) -> None:
        self.inner.reserve(size)

    def close(self) -> None:
        """Nothing: the store is everybody's."""

    def _call(self, verb: str, key: str, effect: Callable[[], _T]) -> _T:
        return self._actor.call(Call(verb, key), effect)
