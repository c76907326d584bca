"""The sources of notices (signals, a file, the instance), combined into one stream of notices for one agent.

Owns the list of a run's sources, and the poller that asks them; decides nothing about their notices. The main thread
reports a signal at once, so that a source that hangs cannot hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cloud.host.notices import DrainFileSource, SignalSource
from cloud.notice import Notice, NoticeSource
from harness.agent.context import Context
from harness.agent.notices.poller import Poller
from harness.config.settings import Settings
from harness.core import events


class Notices:
    """The notices of one agent, reported from `start` on."""

    def __init__(
        self, context: Context, sources: Sequence[NoticeSource] | None, on_notice: Callable[[Notice], None]
    ) -> None:
        """Prepare; no source is asked yet.

        Args:
            context: of the agent.
            sources: in addition to signals and the drain file; `None` for the instance metadata service.
            on_notice: called in the main thread with each notice, once.
        """
        settings = context.settings
        self._grace_s, self._on_notice = settings.grace_s, on_notice
        self._signals = SignalSource(settings.grace_s)
        heard: list[NoticeSource] = []
        if settings.drain_file:
            heard.append(DrainFileSource(Path(settings.drain_file), settings.grace_s))
        heard += _metadata_sources(settings.metadata) if sources is None else sources
        self._poller = Poller(
            heard,
            context.emit,
            lambda notice: context.post(partial(on_notice, notice)),
            lambda notice: context.emit(events.NoticeWithdrawn(source=notice.source)),
            context.on_bug,
        )

    def start(self) -> None:
        """Start asking."""
        self._poller.start()

    def close(self) -> None:
        """Stop asking."""
        self._poller.close(0.5)

    def received(self, signum: int) -> None:
        """Report a signal as a notice, once for each kind, before this returns. Main thread."""
        before = self._signals.poll()
        self._signals.received(signum)
        for notice in self._signals.poll()[len(before) :]:
            self._on_notice(notice)

    def tell_silence(self) -> None:
        """Report, once each time, that a source does not answer."""
        self._poller.tell_silence()

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Names of the sources that should answer, and do not."""
        return self._poller.unreachable

    @property
    def window_s(self) -> float:
        """Seconds that a notice leaves here, at best."""
        return self._poller.lead_s or self._grace_s


def _metadata_sources(url: str) -> list[NoticeSource]:
    """Return the instance's metadata service; an empty list if it is switched off."""
    if url == "off":
        return []
    from cloud.aws.firmware import is_ec2
    from cloud.aws.metadata import MetadataSession
    from cloud.aws.notices import Ec2Source

    somebody_named_it = url != Settings.metadata
    return [Ec2Source(MetadataSession(url), expected=is_ec2() or somebody_named_it)]
