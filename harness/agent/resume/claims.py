"""The generations of one agent: claimed in the store, watched for newer ones, and ended there.

Owns the list of these generations, and which one is the current one. Threads call the store; the main thread notes
their results, and alone writes a generation's number and identity.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial

from cloud.errors import CloudError, Unavailable
from cloud.notice import Deadline
from cloud.pool import Pool
from harness.agent.context import Context
from harness.agent.generation import Generation
from harness.agent.journal import Journal
from harness.agent.save.pipeline import SavePipeline
from harness.core import events
from harness.core.manifest import FORMAT, Claim
from harness.errors import SnapshotCorrupt
from harness.snapshots import commit, handover, records

CALL_S = 60.0
ASK_AGAIN_S = 2.0


class Claims:
    """The claims of one agent. Main thread only, except `put`."""

    def __init__(self, context: Context, command: Sequence[str], pipeline: SavePipeline, journal: Journal) -> None:
        """Claims nothing yet.

        Args:
            context: of the agent.
            command: the trainer's command line, which the claim remembers; without secrets.
            pipeline: which has the store.
            journal: of the agent; gets the number of the current generation.
        """
        self._context, self._command, self._pipeline, self._journal = context, tuple(command), pipeline, journal
        self.agent = secrets.token_hex(8)
        """This agent's identity, in its claims."""
        self.lock_id = ""
        """Names the lock that this agent holds; set once it does."""
        self.current = Generation(0, "", secrets.token_hex(8))
        self._all: list[Generation] = []
        self._closed = threading.Event()

    def begin(self, generation: Generation) -> None:
        """Make `generation` the current one."""
        self.current = generation
        self._all.append(generation)
        self._journal.generation = generation.number

    def add_late(self, generation: Generation, standing: Claim) -> None:
        """Note a generation whose claim came back too late: no trainer uses it, and `end` ends it with the others."""
        self._all.append(generation)
        self.note(generation, standing)

    def put(self, generation: Generation, deadline: Deadline, *, fresh: bool, joins: bool) -> Claim:
        """Claim a generation, under its number or a higher one. Blocks; from any thread. `note` takes the result.

        Args:
            generation: the one to claim.
            deadline: for the whole.
            fresh: whether the user has asked for a new run.
            joins: if another agent has the number, take over its run's identity. Only while nothing of ours exists.

        Raises:
            CloudError: the store could not be asked. Nothing is claimed, or the next attempt finds our own claim.
        """
        wanted = Claim(
            format=FORMAT,
            run_id=generation.run_id,
            generation=generation.number,
            nonce=generation.nonce,
            claimed_at=records.utc_now(),
            host=self._context.host,
            pid=os.getpid(),
            fresh=fresh,
            parent=generation.parent,
            command=self._command,
            named=self._context.settings.run_named,
            settings=self._context.settings.remembered(),
            agent=self.agent,
            lock_id=self.lock_id,
            continues=self._context.settings.continue_,
            back_to=self._context.settings.from_,
        )
        return commit.claim(self._pipeline.remote.store, self._context.keys, wanted, deadline, join=joins)

    def note(self, generation: Generation, standing: Claim) -> None:
        """Note that a generation is claimed. `standing` is its claim as it stands in the store."""
        generation.number, generation.run_id = standing.generation, standing.run_id
        self._journal.claimed = max(self._journal.claimed, generation.number)
        if generation is self.current:
            self._journal.generation = generation.number
        self._context.emit(events.Claimed(generation=generation.number, run_id=generation.run_id))
        generation.claimed.set()

    def put_later(
        self, generation: Generation, reason: str, denied: Callable[[CloudError], None], *, fresh: bool, joins: bool
    ) -> None:
        """Claim a generation in a thread, as soon as the store allows it. Returns at once.

        Args:
            generation: the one to claim.
            reason: why it was not claimed at once.
            denied: called in the main thread each time that the store denies the claim; the attempts continue.
            fresh: see `put`.
            joins: see `put`.
        """
        self._context.emit(events.ClaimDeferred(generation=generation.number, reason=reason))

        def attempt() -> None:
            while not self._closed.is_set():
                try:
                    standing = self.put(generation, Deadline.after(CALL_S), fresh=fresh, joins=joins)
                    return self._context.post(partial(self.note, generation, standing))
                except CloudError as err:
                    if not err.retryable:
                        self._context.post(partial(denied, err))
                self._closed.wait(ASK_AGAIN_S)
            return None

        self._context.thread("harness-claim", attempt)

    def watch_newer(self, superseded: Callable[[Claim], None]) -> None:
        """Watch, in a thread and until the end, for a newer claim of another agent, which then waits for us.

        Args:
            superseded: called in the main thread with each newer claim, once.
        """

        def look() -> None:
            told = 0
            while not self._closed.wait(handover.LOOK_S):
                generation, store = self.current, self._pipeline.remote.store
                if not generation.claimed.is_set():
                    continue
                # A store that is down is asked again, and reported by the tiers.
                with contextlib.suppress(CloudError, SnapshotCorrupt):
                    deadline = Deadline.after(CALL_S)
                    keys = self._context.keys
                    newer = handover.newer_claim(store, keys, generation.number, self.agent, deadline)
                    if newer is not None and newer.generation > told:
                        told = newer.generation  # look on: this claim is void if ours has a higher number by then
                        self._context.post(partial(superseded, newer))

        self._context.thread("harness-newer", look)

    def end(self, outcome: str, step: int | None, deadline: Deadline) -> None:
        """Record `outcome` for each generation that was claimed. Blocks.

        IMPORTANT: only when no tier can commit any more (I5).

        Raises:
            CloudError: it could not be recorded, or not in time.
        """
        store, keys = self._pipeline.remote.store, self._context.keys

        def record() -> None:
            for generation in self._all:
                if generation.claimed.is_set():
                    commit.end(store, keys, generation.number, generation.nonce, outcome, step, deadline)

        pool = Pool(1, "harness-end")
        try:
            pool.submit(record).result(max(0.0, deadline.remaining_s))
        except TimeoutError as err:
            raise Unavailable("it has not answered in time") from err
        finally:
            pool.shutdown()

    def close(self) -> None:
        """Stop claiming, and stop looking for newer claims."""
        self._closed.set()
