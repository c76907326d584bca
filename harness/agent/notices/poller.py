"""NoticeSources → one stream of new and withdrawn notices. Never gives up, and reports an unreachable source.

Owns a thread for each source, which asks it about once a second. Edge-triggered: a notice is reported once, however
often it is seen. A source that fails, or that hangs in a call, does not hide the others.
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
    unreachable: bool = False
    answered: bool = False
    failures: int = 0
    next_at: float = 0.0
    asked_at: float | None = None
    """Since when it is being asked; `None` between two calls."""

    @property
    def is_missed(self) -> bool:
        """Whether its silence is worth a report: it should answer here, or has answered before."""
        return self.source.expected or self.answered


class Poller:
    """Calls `on_notice` and `on_withdrawn` from its own threads."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        emit: Callable[[events.Event], None],
        on_notice: Callable[[Notice], None],
        on_withdrawn: Callable[[Notice], None],
        on_bug: Callable[[BaseException], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is asked before `start`."""
        self._watched = [_Watched(source) for source in sources]
        self._emit, self._on_notice, self._on_withdrawn, self._on_bug = emit, on_notice, on_withdrawn, on_bug
        self._clock = clock
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._run, args=(watched,), name=f"harness-poller-{watched.source.name}", daemon=True
            )
            for watched in self._watched
        ]

    def start(self) -> None:
        """Start asking."""
        for thread in self._threads:
            thread.start()

    def close(self, wait_s: float = 2.0) -> None:
        """Stop, and close every source. A source that hangs is left alone after `wait_s`."""
        self._stop.set()
        give_up_at = time.monotonic() + wait_s
        for watched, thread in zip(self._watched, self._threads, strict=True):
            if thread.is_alive():
                thread.join(max(0.0, give_up_at - time.monotonic()))
            watched.source.close()

    def tell_silence(self) -> None:
        """Report that a source has not answered for a while, once until it does: its own thread hangs. Any thread."""
        now = self._clock()
        for watched in self._watched:
            with self._lock:
                asked_at = watched.asked_at
                if watched.unreachable or asked_at is None or now - asked_at < BLIND_AFTER_S:
                    continue
                watched.unreachable = True
            self._tell(watched, f"no answer for {now - asked_at:.0f} s")

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Names of the sources that should answer, and do not."""
        return tuple(each.source.name for each in self._watched if each.unreachable and each.is_missed)

    @property
    def lead_s(self) -> float | None:
        """Seconds that a notice of the sources that answer leaves, at best; `None` if no source knows."""
        answer = [each.source.lead_s for each in self._watched if each.answered and not each.unreachable]
        return max((lead_s for lead_s in answer if lead_s is not None), default=None)

    def tick(self) -> None:
        """Ask every source whose turn it is, once, in this thread."""
        for watched in self._watched:
            self._ask_if_due(watched)

    def _run(self, watched: _Watched) -> None:
        try:
            while not self._stop.is_set():
                started = self._clock()
                self._ask_if_due(watched)
                self._stop.wait(max(0.05, POLL_S - (self._clock() - started)))
        except Exception as err:  # noqa: BLE001  the thread's root: an agent that cannot hear a notice must not continue
            self._on_bug(err)

    def _ask_if_due(self, watched: _Watched) -> None:
        if self._clock() >= watched.next_at:
            self._ask(watched)

    def _ask(self, watched: _Watched) -> None:
        watched.asked_at = self._clock()
        try:
            notices = {notice.id: notice for notice in watched.source.poll()}
        except CloudError as err:
            self._failed(watched, err)
            return
        finally:
            watched.asked_at = None
        with self._lock:
            was_unreachable, watched.unreachable = watched.unreachable, False
        if was_unreachable:
            self._emit(events.SourceBack(source=watched.source.name))
        watched.answered, watched.failing_since, watched.failures, watched.next_at = True, None, 0, 0.0
        for gone in set(watched.in_force) - set(notices):
            self._on_withdrawn(watched.in_force.pop(gone))
        for id_, notice in notices.items():
            if id_ not in watched.in_force:
                watched.in_force[id_] = notice
                self._on_notice(notice)

    def _tell(self, watched: _Watched, reason: str) -> None:
        self._emit(events.SourceBlind(source=watched.source.name, reason=reason, expected=watched.is_missed))

    def _failed(self, watched: _Watched, err: CloudError) -> None:
        now = self._clock()
        watched.failures += 1
        if watched.failing_since is None:
            watched.failing_since = now
        with self._lock:
            tell = not watched.unreachable and now - watched.failing_since >= BLIND_AFTER_S
            watched.unreachable |= tell
        if tell:
            self._tell(watched, str(err))
        if watched.unreachable:  # somewhere without the service, such as a laptop, it is asked less and less often
            watched.next_at = now + min(BACKOFF_CAP_S, watched.failures * POLL_S)
