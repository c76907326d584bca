"""Interruption notices about this instance, as far as they matter to the supervisor.

Owns the sources and their last answers. An agent sees notices as well, and sooner. The supervisor only asks whether one
is in force, until when, and whether it is the group that ends the instance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cloud.errors import CloudError
from cloud.notice import Clock, NoticeKind, NoticeSource


@dataclass(frozen=True)
class Outlook:
    """The end of the instance that the notices in force announce.

    Attributes:
        ends_at: when the instance ends, on the monotonic clock; `None` if no notice says so. A drain file has no
            end: no run is started while it is there.
        by_group: whether the Auto Scaling group ends it.
    """

    ends_at: float | None = None
    by_group: bool = False


class Notices:
    """Sources of notices, asked on demand. One thread.

    Args:
        sources: closed together with this object.
        clock: monotonic seconds.
    """

    def __init__(self, sources: Sequence[NoticeSource], clock: Clock = time.monotonic) -> None:
        self._sources, self._clock = sources, clock
        self._said: dict[str, Outlook] = {}
        self.seen = False
        """Whether an end was announced since `forget`."""

    @property
    def last(self) -> Outlook:
        """The result of the last `look`."""
        ends = [outlook.ends_at for outlook in self._said.values() if outlook.ends_at is not None]
        return Outlook(max(ends, default=None), any(outlook.by_group for outlook in self._said.values()))

    def look(self) -> Outlook:
        """Ask every source; if one does not answer, its last answer is still in force. Blocks for some seconds."""
        for source in self._sources:
            try:
                notices = [notice for notice in source.poll() if notice.kind is NoticeKind.INTERRUPT]
            except CloudError:  # the agent tells the user that a source does not answer
                continue
            ends = [
                math.inf if notice.while_it_stands or notice.deadline is None else notice.deadline.at
                for notice in notices
            ]
            by_group = any(notice.by_group for notice in notices)
            self._said[source.name] = Outlook(max(ends, default=None), by_group)
        self.seen |= self.last.ends_at is not None
        return self.last

    def forget(self) -> None:
        """Reset `seen`, because another attempt begins: earlier notices do not count for it."""
        self.seen = False

    def close(self) -> None:
        """Close every source."""
        for source in self._sources:
            source.close()
