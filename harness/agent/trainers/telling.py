"""What the agent tells the ranks of its trainer, besides the words on their control pages.

Owns the messages to connected Checkpointers: what they resume, what each stores, and what has gone wrong for all of
them. A rank that has died meanwhile is left out: its pidfd is about to report that. Main thread of the agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from harness.agent.resume.startup import Finding, Startup
from harness.agent.trainers.ranks import Ranks
from harness.core import messages
from harness.core.messages import ToTrainer
from harness.core.policy.meeting import Uneven
from harness.errors import StateError
from harness.ipc.channel import MAX_FDS, Channel, ChannelClosed

MOST_OF_HEADER = 1 << 20  # characters of small state that are sent ahead of the tensors; more of it is in the slot only


class Telling:
    """Messages to the ranks."""

    def __init__(self, ranks: Ranks, startup: Startup) -> None:
        """Tell nothing yet.

        Args:
            ranks: receive the messages.
            startup: knows what is resumed.
        """
        self._ranks, self._startup = ranks, startup

    def resume(self) -> None:
        """Tell each rank what it resumes, as far as that is known."""
        for rank in self._ranks:
            if rank.connection is not None:
                with contextlib.suppress(ChannelClosed):
                    self._resume(rank.number, rank.connection.channel)

    def _resume(self, rank: int, channel: Channel) -> None:
        """Tell one rank. Several get the slots of all of them: a shared tensor may lie in any."""
        startup, world_size = self._startup, len(self._ranks)
        generation = startup.generation.info  # it may not have been known yet when the trainer said hello
        if startup.finding is Finding.NOTHING:
            channel.send(messages.ResumeNone(generation))
        elif startup.finding is Finding.FAILED:
            channel.send(messages.ResumeFailed(type(startup.error).__name__, str(startup.error)))
        elif startup.finding is Finding.READY and (point := startup.point) is not None:
            if len(point.slots) != world_size:  # the share of one rank is no state to train on
                why = f"snapshot {point.id} is of {len(point.slots)} ranks, and this run has {world_size}"
                return channel.send(messages.ResumeFailed("StateError", why))
            fds = [slot.fd for slot in point.slots]
            while len(fds) > MAX_FDS:
                channel.send(messages.ResumeSlots(), fds[:MAX_FDS])
                del fds[:MAX_FDS]
            channel.send(messages.ResumeReady(str(point.id), point.tier, point.verified, generation), fds)
        elif (header := startup.header) is not None and len(header.records) == world_size:
            record = header.records[rank]
            if len(record.state) <= MOST_OF_HEADER:
                text = record.encode().decode()
                channel.send(messages.ResumeHeader(str(header.copy.id), header.copy.tier, text, generation))
        return None

    def superseded(self) -> None:
        """Tell the ranks that the run is superseded: their parent process may see only their own exit code."""
        self._all(messages.Superseded())

    def uneven(self, why: Uneven) -> None:
        """Tell the ranks that their loops end at different steps: the one that waits for the others raises it."""
        self._ranks.meeting.close()
        self._all(messages.NoMeeting("StateError", f"{why}: give all ranks as many batches (drop_last=True)"))

    def left(self, numbers: Collection[int]) -> None:
        """Tell ranks that wait to take a last snapshot together that these have left their loops, and will not come.

        What is wanted of all of them cannot be had any more.
        """
        waiting = [rank for rank in self._ranks if rank.control.at_end]
        if not (numbers and waiting):
            return
        self._ranks.reasons.clear()
        if self._ranks.meeting.is_open:
            self._ranks.meeting.ask_again()
        which = f"rank {min(numbers)} has left its loop, and takes no snapshot any more"
        for rank in waiting:
            rank.control.at_end = False
            if rank.connection is not None:
                with contextlib.suppress(ChannelClosed):
                    rank.connection.channel.send(
                        messages.NoMeeting("StateError", f"{which}: before a break, call ckpt.save() on all ranks")
                    )

    def stores(self) -> None:
        """Tell each rank what it stores, if that has changed, once all have told what they hold."""
        ranks, holdings = self._ranks, self._ranks.holdings
        try:
            news = holdings.news(len(ranks))
        except StateError as err:
            return self._all(messages.NoSlots("StateError", str(err)))
        for number, stores in news.items():
            if (connection := ranks.of(number).connection) is not None:
                with contextlib.suppress(ChannelClosed):
                    connection.channel.send(stores)
        if wanted := holdings.take_wanted():
            self._all(messages.HoldsWanted())
        if news or wanted:
            ranks.plan_again(range(len(ranks)) if wanted else news)  # no other rank has a reason to plan again
        return None

    def _all(self, message: ToTrainer) -> None:
        for connection in self._ranks.connections:
            with contextlib.suppress(ChannelClosed):
                connection.channel.send(message)
