"""Several ranks as their agent sees them, each by the page that it writes on: what they say is played."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cloud.testing.memory import MemoryStore
from harness.agent.context import Context
from harness.agent.save.pipeline import SavePipeline
from harness.agent.trainers.ranks import Connection, Ranks
from harness.core.policy.meeting import Hold
from harness.ipc.control_page import TrainerSide


class PlayedRanks:
    """All are connected, and none has made a step.

    Attributes:
        pipeline: of their run, with a store in memory.
        ranks: of the agent.
        pages: what each rank sees of the agent, and says to it.
    """

    def __init__(self, context: Context, count: int) -> None:
        self.pipeline = SavePipeline(context, lambda _: MemoryStore(), lambda steps: None)
        self.ranks = Ranks(context, self.pipeline.pool)
        self.ranks.expect(count)
        self.pages: Sequence[TrainerSide] = [TrainerSide(os.dup(rank.control.page_fd)) for rank in self.ranks]
        for rank in self.ranks:
            self.connect(rank.number)

    def connect(self, number: int) -> None:
        """Its process is there, again."""
        self.ranks.of(number).connection = Connection(None, 100 + number, -1)  # type: ignore[arg-type]

    def at(self, *steps: int, hold: Hold | None = None) -> None:
        """Each has completed so many steps; with `hold`, all say that about the present command."""
        for page, step in zip(self.pages, steps, strict=True):
            page.completed(step)
            if hold is not None:
                page.say(page.news, hold)

    def close(self) -> None:
        """Close all pages, and the store."""
        for page in self.pages:
            page.close()
        self.pipeline.close_stores()
