"""Ec2Source: announcements that EC2 makes to the instance itself, as Notices.

Owns the three paths that matter, the meaning of their answers, and when the instance really ends. Knows no HTTP
(`metadata.py` does) and decides nothing.

    spot/instance-action               {"action": "terminate", "time": "…Z"}   INTERRUPT at that time
    autoscaling/target-lifecycle-state Terminated                              INTERRUPT; EC2 names no time
    events/recommendations/rebalance   {"noticeTime": "…Z"}                    REBALANCE

Both INTERRUPT paths are polled: an instance that its Auto Scaling group or a user ends gets no spot notice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from cloud.aws.metadata import Answer, Metadata
from cloud.errors import CloudError
from cloud.notice import SPOT_NOTICE_S, Clock, Deadline, Notice, NoticeKind

AT_ONCE_S = 5.0
"""Seconds assumed for an end that may come at once: a hibernation, or an announced time that has passed already.

A hibernation begins with its notice.
"""

LAPSED_S = 60.0
"""Seconds after its time at which an announcement counts as not carried out: EC2 can fail to end an instance."""

MAX_LEAD_S = 3600.0
"""EC2 gives two minutes. A notice that is further ahead than this is the result of a broken clock."""

POLL_S = 1.0
"""Seconds that one poll may take, all paths together."""

Reader = Callable[[Answer, float], Notice | None]


class Ec2Source:
    """Polls the metadata service. Never gives up: every poll asks again, whatever the last error was. For one thread.

    A deadline is fixed when its announcement is first seen. It is the announced time minus the *service's* time (its
    `Date` header), counted from now on the monotonic clock: the host's own wall clock may be wrong by hours.

    Args:
        metadata: the service; closed with this source.
        clock: monotonic seconds.
        wall_clock: the host's time, used only if the service does not send its own.
        expected: see `NoticeSource`.
    """

    name = "ec2"
    lead_s: float | None = SPOT_NOTICE_S

    def __init__(
        self,
        metadata: Metadata,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        *,
        expected: bool = True,
    ) -> None:
        self.expected = expected
        self._metadata = metadata
        self._clock = clock
        self._wall_clock = wall_clock
        self._readers: dict[str, Reader] = {
            "spot/instance-action": self._spot,
            "autoscaling/target-lifecycle-state": self._autoscaling,
            "events/recommendations/rebalance": self._rebalance,
        }
        self._order = list(self._readers)
        self._in_force: dict[str, Notice] = {}

    def poll(self) -> Sequence[Notice]:
        """Return every announcement in force. See `NoticeSource.poll`.

        A path that fails does not hide the announcements of others, and its own last announcement stays in force: only
        an answer withdraws one. Paths for which there was no time come first in the next poll, so that a hanging path
        does not starve the others.

        Raises:
            Unavailable: no path was answered, or a path failed that may hide the only announcement. Announcements
                that were in force before still are.
        """
        budget = Deadline.after(POLL_S, self._clock)
        failures: list[CloudError] = []
        unanswered = []
        for path in self._order:
            if failures and budget.expired:
                unanswered.append(path)
                continue
            try:
                self._ask(path, budget)
            except CloudError as err:
                failures.append(err)
                unanswered.append(path)
        if failures:
            # First the paths that had no turn, last those that failed.
            asked = [path for path in self._order if path not in unanswered]
            self._order = [*unanswered[len(failures) :], *asked, *unanswered[: len(failures)]]
            if not self._in_force or not asked:
                raise failures[0]
        return [self._in_force[path] for path in self._readers if path in self._in_force]

    def close(self) -> None:
        """Close the session. Idempotent."""
        self._metadata.close()

    def _ask(self, path: str, budget: Deadline) -> None:
        asked_at = self._clock()  # before the answer: a deadline is better too early than too late
        answer = self._metadata.get(f"meta-data/{path}", deadline=budget)
        notice = self._readers[path](answer, asked_at) if answer is not None else None
        if notice is None:
            self._in_force.pop(path, None)
        elif path not in self._in_force or self._in_force[path].id != notice.id:
            self._in_force[path] = notice

    def _spot(self, answer: Answer, asked_at: float) -> Notice | None:
        fields = _fields(answer.text)
        action, at = fields.get("action"), _instant(fields.get("time"))
        if not isinstance(action, str) or at is None:
            # Any 200 here means the end. Its text is not part of the id, since it may change with every poll.
            return self._interrupt("ec2 spot", "unreadable", SPOT_NOTICE_S, answer, asked_at)
        if answer.served_at is not None and (answer.served_at - at).total_seconds() > LAPSED_S:
            return None  # judged by the service's own clock: the host's may be wrong
        remaining_s = self._remaining_s(at, answer)
        if action == "hibernate":
            remaining_s = AT_ONCE_S
        return self._interrupt("ec2 spot", f"{action} {at.isoformat()}", remaining_s, answer, asked_at)

    def _autoscaling(self, answer: Answer, asked_at: float) -> Notice | None:
        if answer.text.strip() != "Terminated":
            return None  # InService, Standby, Detached, Warmed:…: the instance stays
        notice = self._interrupt("ec2 autoscaling", "Terminated", SPOT_NOTICE_S, answer, asked_at)
        return replace(notice, by_group=True)

    def _rebalance(self, answer: Answer, asked_at: float) -> Notice:
        at = _instant(_fields(answer.text).get("noticeTime"))
        what = at.isoformat() if at else "unreadable"
        return Notice(f"ec2 rebalance {what}", NoticeKind.REBALANCE, "ec2 rebalance", None, _words(answer))

    def _interrupt(self, source: str, what: str, remaining_s: float, answer: Answer, asked_at: float) -> Notice:
        deadline = Deadline(asked_at + remaining_s, self._clock)
        return Notice(f"{source} {what}", NoticeKind.INTERRUPT, source, deadline, _words(answer))

    def _remaining_s(self, at: datetime, answer: Answer) -> float:
        remaining_s = (at - (answer.served_at or self._wall_clock())).total_seconds()
        return SPOT_NOTICE_S if remaining_s > MAX_LEAD_S else max(remaining_s, AT_ONCE_S)


def _fields(text: str) -> dict[str, object]:
    """Return the members of a JSON object; an empty dict if `text` is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _instant(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _words(answer: Answer) -> str:
    return answer.text[:200]
