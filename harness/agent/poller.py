"""NoticeSources → one stream of new and withdrawn notices. Never gives up, and says when it is blind.

Owns one thread that asks every source about once a second. Edge-triggered: a notice is told once, however often it is
seen. A source that fails does not hide the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cloud.errors import CloudError
from cloud.notice import Notice, NoticeSource
from harness.core import events

POLL_S = 1.0
BACKOFF_CAP_S = 5.0
BLIND_AFTER_S = 5.0


@dataclass
class _Watched:
    source: NoticeSource
    in_force: dict[str, Notice] = field(default_factory=dict)
    failing_since: float | None = None
    blind: bool = False
    answered: bool = False
    failures: int = 0
    next_at: float = 0.0


class Poller:
    """Calls `on_notice` and `on_withdrawn` from its own thread."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        emit: Callable[[events.Event], None],
        on_notice: Callable[[Notice], None],
        on_withdrawn: Callable[[Notice], None],
        fatal: Callable[[BaseException], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is asked before `start`."""
        self._watched = [_Watched(source) for source in sources]
        self._emit, self._on_notice, self._on_withdrawn, self._fatal = emit, on_notice, on_withdrawn, fatal
        self._clock = clock
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="harness-poller", daemon=True)

    def start(self) -> None:
        """Start asking."""
        self._thread.start()

    def wake(self) -> None:
        """Ask again at once (a signal has arrived)."""
        self._wake.set()

    def close(self, wait_s: float = 2.0) -> None:
        """Stop, and close every source."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)
        for watched in self._watched:
            watched.source.close()

    @property
    def blind(self) -> list[str]:
        """Names of the sources that do not answer."""
        return [watched.source.name for watched in self._watched if watched.blind]

    def answers(self, name: str) -> bool:
        """Whether the source of this name has answered, and still does."""
        return any(each.source.name == name and each.answered and not each.blind for each in self._watched)

    def tick(self) -> None:
        """Ask every source whose turn it is, once; all of them after a `wake`."""
        woken = self._wake.is_set()
        self._wake.clear()  # before asking: a wake that comes meanwhile is for the next turn
        for watched in self._watched:
            if woken or self._clock() >= watched.next_at:
                self._ask(watched)

    def _run(self) -> None:
        try:
            while not self._stop:
                started = self._clock()
                self.tick()
                self._wake.wait(max(0.05, POLL_S - (self._clock() - started)))
        except Exception as err:  # noqa: BLE001  the thread's root: an agent that cannot hear a notice must not go on
            self._fatal(err)

    def _ask(self, watched: _Watched) -> None:
        try:
            notices = {notice.id: notice for notice in watched.source.poll()}
        except CloudError as err:
            self._failed(watched, err)
            return
        if watched.blind:
            self._emit(events.SourceBack(source=watched.source.name))
        watched.answered = True
        watched.blind, watched.failing_since, watched.failures = False, None, 0
        watched.next_at = 0.0
        for gone in set(watched.in_force) - set(notices):
            self._on_withdrawn(watched.in_force.pop(gone))
        for id_, notice in notices.items():
            if id_ not in watched.in_force:
                watched.in_force[id_] = notice
                self._on_notice(notice)

    def _failed(self, watched: _Watched, err: CloudError) -> None:
        now = self._clock()
        watched.failures += 1
        if watched.failing_since is None:
            watched.failing_since = now
        if not watched.blind and now - watched.failing_since >= BLIND_AFTER_S:
            watched.blind = True
            self._emit(events.SourceBlind(source=watched.source.name, reason=str(err)))
        if watched.blind:  # somewhere without the service, such as a laptop, it is not asked every second for ever
            watched.next_at = now + min(BACKOFF_CAP_S, watched.failures * POLL_S)
