"""`harness resume`: composition root.

Owns which parts there are and how they are put together. If a run cannot even be started, it informs the platform, too.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cloud.aws.instance import Instance, tag
from cloud.aws.metadata import MetadataSession
from cloud.aws.notices import Ec2Source
from cloud.host.notices import DrainFileSource
from cloud.notice import Deadline, NoticeSource
from harness.agent.log import Log
from harness.config.settings import Settings
from harness.core.words import count
from harness.errors import ConfigError, ExitCode
from harness.inspect import preview
from harness.node.actions import Actions
from harness.node.attempts import adopt_orphans
from harness.node.boot import describe_node
from harness.node.context import Context
from harness.node.decision import note_decision
from harness.node.exit_policy import Act, Where, consequence, ending_of
from harness.node.fitness import choose_test, run_test
from harness.node.fleet_reporter import FleetReporter
from harness.node.guards import MOST_UNFIT, Guards
from harness.node.job import Job, Request, metadata_url, resolve_job
from harness.node.notices import Notices
from harness.node.platform import GROUP_VARIABLE, PATIENT_S, Platform, find_instance, find_platform, open_metadata
from harness.node.run_status import RunStatus
from harness.node.secrets import read_secrets
from harness.node.signals import Signals
from harness.node.supervisor import Limits, Supervisor, Terms

_LOOKS, _LOOK_AGAIN_S = 15, 4.0


def resume(request: Request, self_test: str | None, limits: Limits = Limits()) -> int:  # noqa: B008  frozen
    """Start the run or resume it, as often as needed; return the exit code of the last `harness run`.

    Args:
        request: what the user asked for.
        self_test: a command that tests the machine; `None` for the default one.
        limits: time limits (for tests).

    Raises:
        ConfigError: nothing could be started; a fleet is stopped before this is raised.
    """
    log = Log()
    try:
        return _resume(request, self_test, limits, log.say)
    finally:
        log.close(1.0)


def _resume(request: Request, self_test: str | None, limits: Limits, say: Callable[[str], None]) -> int:
    signals = Signals()
    signals.install()
    metadata = open_metadata(metadata_url(request))
    instance = find_instance(metadata, request.environ)
    try:
        job = _job(request, metadata if instance else None)
        test = choose_test(self_test, request.environ)
        told = {**describe_node(instance, job.environ), **read_secrets(job.environ, say)}
        job = replace(job, environ={**job.environ, **told})
    except ConfigError as err:
        run = str(request.flags.get("run") or request.environ.get("HARNESS_RUN") or "")
        with _opened(_patiently(metadata, instance, request.environ, run, signals, say)) as platform:
            context = Context(run, signals, say)
            reporter = FleetReporter(context, platform.fleet, Notices(()), lambda: None)
            if _cannot_start(err, platform, reporter, Actions(context, platform, limits.let_go_s)):
                note_decision(request.environ, "stopped the fleet: it cannot be started", say)
        raise
    run = job.settings.run
    with _opened(_patiently(metadata, instance, job.environ, run, signals, say)) as platform:
        say(f"{platform.where.value}: {platform.words}")
        announcements = Notices(_sources(job.settings, metadata))
        runs = RunStatus(job, lambda: reporter.generation)
        context = Context(run, signals, say)
        reporter = FleetReporter(context, platform.fleet, announcements, runs.ask)
        actions = Actions(context, platform, limits.let_go_s)
        signals.heard = runs.leaves
        # A terminal's Ctrl-C ends the test as well, and says nothing about the machine.
        if test and (why := run_test(test, signals)) is not None and signals.asked is None:
            reporter.ended(failed=True)
            if _unfit(f"the self-test failed: {why}", platform, actions, Guards(job.settings), say):
                note_decision(request.environ, "the self-test failed", say)
            return int(ExitCode.BUG)
        adopt_orphans()
        terms = Terms(platform.where, job.settings.max_crashes, job.anew, limits)
        supervisor = Supervisor(context, terms, actions, runs, announcements, reporter)
        try:
            code = supervisor.run()
            if supervisor.decided and not _is_lost(platform, job.environ):
                note_decision(request.environ, f"nothing is left to do, exit code {code}", say)
            return code
        except ConfigError as err:
            if _cannot_start(err, platform, reporter, actions):
                note_decision(request.environ, "stopped the fleet: it cannot be started", say)
            raise
        finally:
            announcements.close()


@dataclass(frozen=True)
class DryRun:
    """What `resume` would start with on this machine."""

    run: str
    store: str
    platform: str
    command: tuple[str, ...]
    found: preview.Preview

    @property
    def code(self) -> int:
        """0, or the exit code with which `resume` would refuse to start."""
        return int(self.found.refused or ExitCode.FINISHED)

    def to_json(self) -> dict[str, Any]:
        """Return the result for machines."""
        about = {"run": self.run, "store": self.store, "place": self.platform, "command": list(self.command)}
        return about | self.found.to_json()

    def lines(self) -> list[str]:
        """Return the result for people, line by line."""
        used, why = self.found.used, self.found.why
        snapshot = f"{used.snapshot}, step {count(used.step)}, {used.tier} tier" if used is not None else "none"
        lines = [
            ("run", f"{self.run}, store {self.store}"),
            ("place", self.platform),
            ("snapshot", f"{snapshot}: {why}"),
        ]
        lines += [("rejected", f"{row.snapshot}, {row.tier} tier: {row.reason}") for row in self.found.rejected]
        lines += [("note", note) for note in self.found.notes]
        lines.append(("command", shlex.join(self.command)))
        return [f"{name:<9} {text}" for name, text in lines]


def dry_run(request: Request) -> DryRun:
    """Return what `resume` would start with on this machine. Changes nothing anywhere.

    Raises:
        ConfigError: `resume` would not even start.
        SnapshotCorrupt: the run's newest claim cannot be read.
        CloudError: the store cannot be asked.
    """
    metadata = open_metadata(metadata_url(request))
    instance = find_instance(metadata, request.environ)
    job = _job(request, metadata if instance else None)
    settings = job.settings
    with _opened(find_platform(metadata, instance, job.environ, settings.run)) as platform:
        where = f"{platform.where.value}: {platform.words}"
    return DryRun(settings.run, settings.store, where, job.command, preview.preview(settings))


def _cannot_start(err: ConfigError, platform: Platform, reporter: FleetReporter, actions: Actions) -> bool:
    """Do what follows. Return whether a fleet was stopped."""
    reporter.ended(failed=True)
    done = actions.do(consequence(ending_of(err.exit_code), platform.where).actions, str(err))
    return done and platform.where is Where.FLEET


def _unfit(why: str, platform: Platform, actions: Actions, guards: Guards, say: Callable[[str], None]) -> bool:
    """Have this instance replaced; or the fleet stopped, if too many in a row cannot train. Return whether it is."""
    say(why)
    if platform.fleet is None:
        return False
    if (count := guards.unfit(platform.fleet.instance.id, why)) >= MOST_UNFIT:
        return actions.do((Act.STOP, Act.COMPLETE), f"{why}. It is instance number {count} in a row that cannot train")
    return actions.replace(why)


def _is_lost(platform: Platform, environ: Mapping[str, str]) -> bool:
    """Whether this should be an instance of a fleet, which was not found: then no decision has ended it."""
    return bool(environ.get(GROUP_VARIABLE)) and platform.where is Where.ELSEWHERE


def _job(request: Request, metadata: MetadataSession | None) -> Job:
    deadline = Deadline.after(PATIENT_S)  # for all tags together; a laptop is not asked
    return resolve_job(request, lambda key: tag(metadata, key, deadline))


def _sources(settings: Settings, metadata: MetadataSession | None) -> list[NoticeSource]:
    sources: list[NoticeSource] = []
    if metadata is not None:
        sources.append(Ec2Source(metadata))
    if settings.drain_file:
        sources.append(DrainFileSource(Path(settings.drain_file), settings.grace_s))
    return sources


def _patiently(
    metadata: MetadataSession | None,
    instance: Instance | None,
    environ: Mapping[str, str],
    run: str,
    signals: Signals,
    say: Callable[[str], None],
) -> Platform:
    """Find the platform. If a group is named, ask again: an instance that does not know its group is never ended.

    Just after a boot the metadata service may hang, or have no credentials yet. A run would not get any either.
    """
    platform = find_platform(metadata, instance, environ, run)
    for _ in range(_LOOKS if environ.get(GROUP_VARIABLE) and metadata is not None else 0):
        if platform.where is not Where.ELSEWHERE or signals.asked is not None:
            break
        say(f"{platform.words}: asking again in {_LOOK_AGAIN_S:g} s")
        signals.pause(_LOOK_AGAIN_S)
        instance = instance or find_instance(metadata, environ)
        platform = find_platform(metadata, instance, environ, run)
    return platform


@contextlib.contextmanager
def _opened(platform: Platform) -> Generator[Platform]:
    try:
        yield platform
    finally:
        if platform.fleet is not None:
            platform.fleet.close()
