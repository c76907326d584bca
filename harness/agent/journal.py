"""The journal of one agent: typed events to listeners, and to the store in segments put once.

Owns the order and the segments; does not know what events mean. `snapshots/journal.py` reads the segments.
`emit` never blocks on the store: a thread puts a segment every 15 s (which is also the heartbeat) and whenever `flush`
asks. A store that is down costs nothing but memory for the lines that wait. About once an hour the small segments of
that hour are replaced by one that holds all their lines; otherwise a run of a year would leave two million objects.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence

from cloud.errors import AlreadyExists, CloudError, Denied
from cloud.notice import Deadline
from cloud.store import ObjectStore
from harness.core import events
from harness.core.snapshot import RunKeys

SEGMENT_S = 15.0
FOLDED, FOLDED_BYTES = 256, 4 * 1024 * 1024  # so many segments, or so many bytes, are folded into one segment
_PUT_S, _LIST_S = 10.0, 60.0

Listener = Callable[[events.Line], None]
Emit = Callable[[events.Event], None]


class Journal:
    """Thread-safe. Listeners run in the emitting thread, before `emit` returns."""

    def __init__(
        self,
        keys: RunKeys,
        host: str,
        *,
        listeners: Sequence[Listener] = (),
        heartbeat: Callable[[], events.Heartbeat],
    ) -> None:
        """Lines wait in memory until `start` names a store.

        Args:
            keys: of the run.
            host: part of the segments' keys.
            listeners: called with every line.
            heartbeat: makes the event that keeps a quiet journal alive.
        """
        self._keys, self._host, self._listeners, self._heartbeat = keys, host, listeners, heartbeat
        self.generation = 0
        """Generation of the lines; may be a guess while the store is down."""
        self.claimed = 0
        """Newest generation that is claimed in the store. Segments are put below it: a guess may be another agent's."""
        self._lock = threading.Lock()
        self._pending: list[events.Line] = []
        self._folder, self._segment = "", 0
        self._small: list[tuple[str, bytes]] = []
        """Segments of this journal that are not folded yet: keys and contents."""
        self._folds = True
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._put_lock = threading.Lock()

    def emit(self, event: events.Event) -> None:
        """Record `event` now."""
        line = events.Line(
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            mono=time.monotonic(),
            generation=self.generation,
            body=event,
        )
        with self._lock:
            self._pending.append(line)
        for listener in self._listeners:
            listener(line)

    def start(self, store: ObjectStore) -> None:
        """Begin to put segments into `store`, every 15 s and on `flush`."""
        self._thread = threading.Thread(target=self._run, args=(store,), name="harness-journal", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Ask for a segment soon. Does not wait."""
        self._wake.set()

    def close(self, wait_s: float = _PUT_S) -> None:
        """Put what is pending and end the thread; gives up after `wait_s`."""
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _run(self, store: ObjectStore) -> None:
        while not self._stop:
            asked = self._wake.wait(SEGMENT_S)
            self._wake.clear()
            if not asked:
                self.emit(self._heartbeat())
            self._put(store)
        self._put(store)

    def _key(self, store: ObjectStore) -> str:
        """Return the next segment's key: after all that an earlier agent of this generation has put on this host.

        Readers ask for what is newer than the last segment that they know. The earlier ones may be folded into one
        that has a greater number, so that the small numbers seem to be free.
        """
        folder = self._keys.journal(self.claimed, self._host, 0).rpartition("/")[0]
        if folder != self._folder:
            listed = store.list(f"{folder}/", deadline=Deadline.after(_LIST_S))
            numbers = [number for info in listed if (number := self._keys.parse_segment(info.key)) is not None]
            self._folder, self._segment = folder, max([self._segment, *(number + 1 for number in numbers)])
        key = self._keys.journal(self.claimed, self._host, self._segment)
        self._segment += 1
        return key

    def _put(self, store: ObjectStore) -> None:
        with self._lock:
            lines = list(self._pending)
        if not lines or self.claimed == 0:
            return
        data = b"".join(events.encode_line(line) for line in lines)
        try:
            while True:
                key = self._key(store)
                try:
                    store.put_if_absent(key, data, deadline=Deadline.after(_PUT_S))
                    break
                except AlreadyExists:  # an earlier agent of this generation on this host that is ending
                    self._folder = ""
        except CloudError:
            return  # the lines stay pending; the tiers report a store that is down
        with self._lock:
            del self._pending[: len(lines)]
        self._small.append((key, data))
        if len(self._small) >= FOLDED or sum(len(each) for _, each in self._small) >= FOLDED_BYTES:
            self._fold(store)

    def _fold(self, store: ObjectStore) -> None:
        """Put the lines of the small segments again as one segment, and delete those.

        A crash in between leaves lines twice, never none. So does a store that does not let us delete (the role of a
        fleet's instance does not); then folding is not tried again.
        """
        small, self._small = self._small, []
        if not self._folds:
            return
        deadline = Deadline.after(_LIST_S)
        try:
            key = self._key(store)
            small = [(each, data) for each, data in small if each.startswith(f"{self._folder}/")]
            if len(small) < 2:
                return
            store.put_if_absent(key, b"".join(data for _, data in small), deadline=deadline)
            for each, _ in small:
                store.delete(each, deadline=deadline)
        except Denied:
            self._folds = False
        except CloudError:
            pass  # the small ones stay
