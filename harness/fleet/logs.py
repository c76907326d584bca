"""The lines of a fleet's log, as they come: each once, and a word where another instance goes on.

Owns what is new: CloudWatch is asked again and again for the same stretch of time, since lines arrive late.
"""

from __future__ import annotations

from collections.abc import Iterable

from cloud.aws.console import LogLine

_LATE_MS = 30_000  # a line may be there so long after a later one


class Tail:
    """Follows a log group.

    Args:
        since_ms: where to begin, in milliseconds since 1970.
    """

    def __init__(self, since_ms: int) -> None:
        self._newest_ms = self._begin_ms = since_ms
        self._shown: dict[str, int] = {}
        self._instance = ""

    @property
    def since_ms(self) -> int:
        """From when on lines are wanted."""
        return max(self._begin_ms, self._newest_ms - _LATE_MS)

    def new(self, lines: Iterable[LogLine]) -> list[str]:
        """Return what was not shown yet."""
        found = []
        for line in lines:
            if line.id in self._shown:
                continue
            self._shown[line.id] = line.at_ms
            self._newest_ms = max(self._newest_ms, line.at_ms)
            if line.stream != self._instance:
                self._instance = line.stream
                found.append(f"==> {line.stream} <==")
            found.append(line.text.rstrip("\n"))
        self._shown = {id_: at_ms for id_, at_ms in self._shown.items() if at_ms >= self.since_ms}
        return found
