"""One run, on this host and in its store: find it, start it, and ask how it ended.

Owns what the supervisor has to know of a run; decides nothing. Nothing is written here: agents do that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.agent.outcome import read_outcome
from harness.config.settings import SOCKET_VARIABLE
from harness.core.messages import RunState, Status
from harness.core.snapshot import RunKeys
from harness.errors import ConfigError, ExitCode, SnapshotCorrupt
from harness.ipc.client import AgentSilent, ask_status
from harness.ipc.runtime_dir import RuntimeDir
from harness.node.attempts import FoundAttempt, RunAttempt, StartedAttempt, left_behind
from harness.node.exit_policy import code_of
from harness.node.guards import Guards
from harness.node.job import Job
from harness.snapshots import records
from harness.snapshots.open import open_existing_store
from harness.watch import processes

STORE_S = 20.0


class RunStatus:
    """See `harness.node.supervisor.Runs`.

    Args:
        job: what to run.
        generation: returns the generation that was seen last, in case no agent answers any more.
    """

    def __init__(self, job: Job, generation: Callable[[], int | None]) -> None:
        self._job, self._generation = job, generation
        self._strangers = frozenset(left_behind())  # an entrypoint's daemons, say: they were there before us

    def ask(self) -> Status | None:
        """See `harness.node.attempts.AskStatus`."""
        try:
            return ask_status(self._job.settings)
        except AgentSilent:
            return None

    def leaves(self) -> bool:
        """Return whether the run's agent here is leaving already."""
        status = self.ask()
        return status is not None and status.state in (RunState.DRAINING, RunState.DONE)

    def find(self) -> RunAttempt | None:
        """See `Runs`. A watched program starts no agent, so one without an agent is no run."""
        if self.orphans():
            return None
        answer, pids = self.ask(), self._left_behind()
        return FoundAttempt(self.ask, self._outcome, pids, answer) if answer is not None or pids else None

    def orphans(self) -> list[int]:
        """See `Runs`."""
        if self._job.settings.watch is None:
            return []
        try:
            if ask_status(self._job.settings) is not None:
                return []
        except AgentSilent:
            return []  # it is there
        marked = processes.marked(SOCKET_VARIABLE, str(self._runtime_dir.socket))
        return processes.alive(sorted({*marked, *self._left_behind()}))

    def send(self, pids: Sequence[int], signum: int) -> None:
        """See `Runs`."""
        processes.send(pids, signum)

    def _left_behind(self) -> list[int]:
        return [pid for pid in left_behind() if pid not in self._strangers]

    def start(self, *, anew: bool) -> RunAttempt:
        """See `Runs`."""
        return StartedAttempt(self._job.arguments(anew=anew), self._job.environ, self._said)

    def durable_step(self) -> int | None:
        """See `Runs`."""
        known = self._survey()
        return known.commits[-1].step if known is not None and known.commits else None

    def over(self) -> bool:
        """See `Runs`."""
        known = self._survey()
        return known is not None and (known.finished_at is not None or known.stopped_early is not None)

    def superseded(self) -> int:
        """See `Runs`."""
        return Guards(self._job.settings).superseded()

    def _said(self, pid: int) -> str | None:
        """Return the outcome that the agent with this pid recorded here. It can be read while the store is down."""
        return read_outcome(self._runtime_dir, pid)

    def _outcome(self, generation: int | None) -> int | None:
        """Return how a found run ended, as an exit code; `None` if unknown, or if it is to be started again."""
        number, known = generation or self._generation(), self._survey()
        if known is None or known.last_claim is None or number is None:
            return None
        newest = known.last_claim
        if newest.generation > number and newest.lock_id and newest.lock_id != self._lock_id():
            return int(ExitCode.SUPERSEDED)
        return code_of(known.done.outcome if known.done is not None and newest.generation >= number else None)

    def _lock_id(self) -> str:
        """Return the lock that claims of this host's agents name."""
        runtime_dir = self._runtime_dir
        try:
            lock = os.open(runtime_dir.directory / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return runtime_dir.identity(lock)
        finally:
            os.close(lock)

    @property
    def _runtime_dir(self) -> RuntimeDir:
        settings = self._job.settings
        return RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)

    def _survey(self) -> records.Survey | None:
        settings = self._job.settings
        try:
            store = open_existing_store(settings.store, settings)
            return records.survey(store, RunKeys(settings.run), Deadline.after(STORE_S))
        except (CloudError, SnapshotCorrupt, ConfigError):
            return None
