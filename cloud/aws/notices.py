"""Ec2Source: what EC2 announces to the instance itself, as Notices.

Owns the three paths that matter, what their answers mean, and when the instance really ends. Knows no HTTP (that is
`metadata.py`) and decides nothing.

    spot/instance-action               {"action": "terminate", "time": "…Z"}   INTERRUPT at that time
    autoscaling/target-lifecycle-state Terminated                              INTERRUPT; EC2 names no time
    events/recommendations/rebalance   {"noticeTime": "…Z"}                    REBALANCE

Both INTERRUPT paths are asked: an instance that is ended by its Auto Scaling group or by a user gets no spot notice.
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

"""EC2's usual lead: what is assumed when something was announced and its time cannot be read."""

AT_ONCE_S = 5.0
"""For what may happen any moment: a hibernation, which begins with its notice, and a time that has passed already."""

LAPSED_S = 60.0
"""So long past its time an announcement was not carried out: EC2 can fail to end an instance, and leave it standing."""

MAX_LEAD_S = 3600.0
"""EC2 gives two minutes. A notice further ahead than this was read off a broken clock."""

POLL_S = 1.0
"""How long one poll may take, all paths together."""

Reader = Callable[[Answer, float], Notice | None]


class Ec2Source:
    """Polls the metadata service. Never gives up: every poll asks again, whatever the last one met. For one thread.

    A deadline is fixed when its announcement is first seen. It is the announced time minus the *service's* time (its
    `Date` header), counted from now on the monotonic clock: the host's own wall clock may be wrong by hours.

    Args:
        metadata: the service; closed with this source.
        clock: monotonic seconds.
        wall_clock: the host's time, used only where the service does not tell its own.
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
        """Every announcement in force. See `NoticeSource.poll`.

        A path that fails does not hide the others' news, and what it last announced stays in force: only an answer
        withdraws. Paths that there was no time for come first in the next poll, so that a hanging one starves none.

        Raises:
            Unavailable: no path was answered, or a path failed that may hide the only news. What was in force
                before still is.
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
            # First those that had no turn, last those that used theirs up.
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
            # Whatever answers 200 here means the end. Its words are no part of the id: they may change with every poll.
            return self._interrupt("ec2 spot", "unreadable", SPOT_NOTICE_S, answer, asked_at)
        if answer.served_at is not None and (answer.served_at - at).total_seconds() > LAPSED_S:
            return None  # by the service's own clock: the host's may be wrong
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
    """A JSON object's members; of anything else, none."""
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
