from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from cloud.notice import Notice
from harness.agent.notices.registry import Notices
from harness.config.settings import Settings
from tests.support.context import a_context


class Hanging:
    """A source that does not come back from a question."""

    name = "hanging"
    lead_s: float | None = None
    expected = True

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def poll(self) -> Sequence[Notice]:
        self.let_go.wait()
        return ()

    def close(self) -> None:
        self.let_go.set()


def test_a_signal_is_told_once_and_at_once_whatever_hangs(tmp_path: Path) -> None:
    told, source = list[str](), Hanging()
    settings = Settings(store="memory", run="run", runtime_dir=str(tmp_path))
    notices = Notices(a_context(settings), [source], lambda notice: told.append(notice.source))
    notices.start()
    for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        notices.received(signum)

    assert told == ["signal SIGTERM", "signal SIGHUP"]
    source.let_go.set()
    notices.close()
