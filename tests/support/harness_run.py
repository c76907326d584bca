"""`harness run` with something up its sleeve: kills and signals at named events, stores and services that fail.

    python -m tests.support.harness_run --at Published:2:kill-agent --store DIR --run NAME -- python train.py

Options come in pairs; those of `harness run` are passed on. Beside them:

    --at EVENT:NTH:ACTION[,...]  when EVENT is emitted for the NTH time: kill-trainer, kill-agent or kill-both (real
                                 SIGKILLs, from inside, at exactly that line), kill-rank (the last of several ranks),
                                 kill-ranks (all of them),
                                 terminate (SIGTERM to the agent), or
                                 terminate-group (to its process group: trainer and DataLoader workers as well), or
                                 release (nothing but FILE, see below);
                                 EVENT@remote and EVENT@local count those of one tier
    --release FILE               a file that the first kill creates: a trainer that holds waits for it (beside it,
                                 `terminate` creates one: see tests.support.ending)
    --answer-s SECONDS           how long an answer of the metadata service may take
    --fail VERB:N[-M]            calls N to M of the store's VERB fail as if it were down
    --notices WORD[,...]         what each poll of a source says: rebalance, interrupt, nothing, down; the last stays
    --back-off-s, --heartbeat-s, --blind-after-s SECONDS    instead of the real ones, which are longer than a test
    --look-s, --await-s SECONDS  how often the older agent of a handover looks for a newer one, and the newer one waits
    --take-over-s SECONDS        how long a start waits for another agent of this host to end
    --silent-s SECONDS           how long a store may take nothing until that is told
    --hello-s SECONDS            how long a program may be without a Checkpointer until it is told so
    --failed-s SECONDS           how long ranks without a launcher, or without one of them, may live on
    --late-s SECONDS             how long a rank may be at one step while others wait, until it is named
    --first-answer-s, --read-s SECONDS   how long a start waits for the store; how long a reply of S3 may take
    --watch-look-s SECONDS       between two looks at a watched directory
    --watch-stands-s SECONDS     how long a reason keeps a program from being saved until it is told
    --earlier-s SECONDS          how long a start waits for processes of an earlier one that use the watched directory
    --attempts N                 calls of a store at most until it counts as down
    --part-bytes BYTES           of a multipart upload
    --clock-offset-s SECONDS     this host's wall clock is ahead by so much
    --memory BYTES               what is left of this machine's memory, instead of 8 GB
    --fresh yes                  as --fresh
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import keyword
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloud.s3.client
import cloud.s3.store
import harness.agent.journal
import harness.agent.main
import harness.agent.notices.poller
import harness.agent.resume.finder
import harness.agent.resume.startup
import harness.agent.save.slot_pool
import harness.agent.save.tier
import harness.agent.server
import harness.agent.trainers.lateness
import harness.agent.trainers.restarts
import harness.agent.trainers.session
import harness.agent.trainers.siblings
import harness.agent.watching
import harness.snapshots.handover
import harness.watch.watcher
from cloud.aws.metadata import MetadataSession
from cloud.errors import Unavailable, call_with_retry
from cloud.notice import Deadline, Notice, NoticeKind
from cloud.store import ObjectStore
from harness.agent.main import Agent
from harness.config.program import Program
from harness.config.settings import Settings, resolve
from harness.core import events
from harness.core.policy.end import EndTimes
from harness.core.policy.restart import after_crash
from harness.errors import HarnessError
from harness.snapshots.open import open_soon
from tests.support import delays, ending
from tests.support.stores import FaultyStore

LONGER = 10
"""Limits that a machine must not miss where it only stands still for a moment: so many times the real ones."""
MEMORY_BYTES = 8 * 10**9
"""What is free in a test that says nothing about it: how much its developer's machine has left must not matter."""
_NUMBERS: dict[str, type] = {
    "every_s": float, "durable_every_s": float, "grace_s": float, "handover_s": float, "upload_bytes_s": float,
    "every_steps": int, "max_crashes": int, "keep_last": int, "keep_local": int, "slots": int,
}  # fmt: skip
_SECONDS: dict[str, tuple[ModuleType, str]] = {
    "heartbeat-s": (harness.agent.journal, "SEGMENT_S"),
    "blind-after-s": (harness.agent.notices.poller, "BLIND_AFTER_S"),
    "look-s": (harness.snapshots.handover, "LOOK_S"),
    "await-s": (harness.snapshots.handover, "AWAIT_S"),
    "take-over-s": (harness.agent.server, "_TAKE_OVER_S"),
    "silent-s": (harness.agent.save.tier, "SILENT_S"),
    "hello-s": (harness.agent.trainers.lateness, "HELLO_S"),
    "failed-s": (harness.agent.trainers.siblings, "_FAILED_S"),
    "late-s": (harness.agent.trainers.lateness, "LATE_S"),
    "first-answer-s": (harness.agent.resume.startup, "FIRST_ANSWER_S"),
    "earlier-s": (harness.agent.watching, "EARLIER_S"),
    "watch-look-s": (harness.watch.watcher, "LOOK_S"),
    "watch-stands-s": (harness.watch.watcher, "_STANDS_S"),
    "read-s": (cloud.s3.client, "READ_S"),
}


@dataclass
class At:
    """A listener of the journal that does something at one line."""

    event: str
    nth: int
    action: str
    release: Path | None
    agent: Agent | None = None
    seen: int = 0
    tier: str = ""

    @classmethod
    def parse(cls, text: str, release: Path | None) -> At:
        wanted, nth, action = text.split(":")
        event, _, tier = wanted.partition("@")
        assert event in {kind.__name__ for kind in events.Event.__subclasses__()}, f"no such event: {event}"
        return cls(event, int(nth), action, release, tier=tier)

    def __call__(self, line: events.Line) -> None:
        """Called by the journal, in the thread in which the event happens."""
        if type(line.body).__name__ != self.event or (self.tier and getattr(line.body, "tier", "") != self.tier):
            return
        self.seen += 1
        if self.seen != self.nth:
            return
        assert self.agent is not None
        child = self.agent.trainer.child
        os.write(2, f"test: {self.action} at {self.event} {self.nth}\n".encode())
        if self.action == "terminate":
            ending.tell()
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self.action == "terminate-group":
            os.killpg(0, signal.SIGTERM)
            return
        if self.release is not None:
            self.release.touch()
        if self.action in ("kill-rank", "kill-ranks"):
            for connection in self.agent._ranks.connections[-1 if self.action == "kill-rank" else 0 :]:
                os.kill(connection.pid, signal.SIGKILL)
        if self.action in ("kill-trainer", "kill-both"):
            assert child is not None, f"no trainer lives at {self.event} {self.nth}"
            os.kill(child.pid, signal.SIGKILL)
        if self.action in ("kill-agent", "kill-both"):
            os.kill(os.getpid(), signal.SIGKILL)


class ScriptedSource:
    """A NoticeSource that says one word after the other, and then the last one for ever."""

    name = "script"
    lead_s: float | None = None
    expected = True

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)

    def poll(self) -> Sequence[Notice]:
        """See `NoticeSource.poll`."""
        word = self._words.pop(0) if len(self._words) > 1 else self._words[0]
        if word == "down":
            raise Unavailable("injected")
        if word == "rebalance":
            return (Notice("r", NoticeKind.REBALANCE, "script", None),)
        if word == "interrupt":
            return (Notice("i", NoticeKind.INTERRUPT, "script", Deadline.after(30.0 * LONGER)),)
        return ()

    def close(self) -> None:
        """Nothing to give up."""


def rig(options: dict[str, str]) -> None:
    """Take the options out that replace a constant of the agent, and lengthen what only a stalled machine exceeds."""
    delays.install(delays.AGENT)
    for name in ("_IN_TIME", "_AT_ONCE"):
        times = getattr(harness.agent.main, name)
        setattr(harness.agent.main, name, EndTimes(*(LONGER * each for each in dataclasses.astuple(times))))
    harness.agent.trainers.session.ATTACH_S *= LONGER
    if seconds := options.pop("back-off-s", None):
        harness.agent.trainers.restarts.after_crash = functools.partial(after_crash, first_delay_s=float(seconds))  # type: ignore[attr-defined]
    for name, (module, constant) in _SECONDS.items():
        if seconds := options.pop(name, None):
            setattr(module, constant, float(seconds))
    if seconds := options.pop("answer-s", None):
        _default(MetadataSession.__init__, timeout_s=float(seconds))
    if seconds := options.pop("reread-s", None):
        harness.agent.resume.finder.PAUSES_S = (float(seconds),) * len(harness.agent.resume.finder.PAUSES_S)  # type: ignore[assignment]
    if count := options.pop("attempts", None):
        _default(call_with_retry, attempts=int(count))
    if count := options.pop("part-bytes", None):
        _default(cloud.s3.store.S3Store.__init__, part_bytes=int(count))
    if seconds := options.pop("clock-offset-s", None):
        set_clock_ahead(float(seconds))
    free = int(options.pop("memory", MEMORY_BYTES))
    harness.agent.save.slot_pool.available_bytes = lambda: free


def _default(function: Callable[..., Any], **values: Any) -> None:
    """Give keyword-only parameters of `function` other defaults, whoever has imported it."""
    assert function.__kwdefaults__.keys() >= values.keys()
    function.__kwdefaults__.update(values)


def set_clock_ahead(offset_s: float) -> None:
    """Every reading of the wall clock in this process is ahead; the monotonic clock is what it is."""
    real_time = time.time

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return super().now(tz) + datetime.timedelta(seconds=offset_s)

    time.time = lambda: real_time() + offset_s
    datetime.datetime = Ahead  # type: ignore[misc]


def opener(fail: str | None, settings: Settings) -> Callable[[str], ObjectStore]:
    """Opens stores as an agent does; the run's own fails as told."""

    def say(text: str) -> None:
        os.write(2, f"harness: {text}\n".encode())

    def open_(wanted: str) -> ObjectStore:
        store = open_soon(wanted, settings, say)
        if fail is None or wanted != settings.store:
            return store
        verb, calls = fail.split(":")
        first, _, last = calls.partition("-")
        return FaultyStore(store, verb, fail_on=tuple(range(int(first), int(last or first) + 1)))  # type: ignore[return-value]

    return open_


def main(arguments: list[str]) -> int:
    """Run; the exit code."""
    split = arguments.index("--")
    pairs, command = arguments[:split], arguments[split + 1 :]
    options = {pairs[i].removeprefix("--"): pairs[i + 1] for i in range(0, len(pairs), 2)}
    release = Path(options.pop("release")) if "release" in options else None
    if release is not None:
        ending.prepare(release.with_name("ending"))
    at = [At.parse(text, release) for text in options.pop("at", "").split(",") if text]
    fresh = options.pop("fresh", None)
    fail, notices = options.pop("fail", None), options.pop("notices", None)
    rig(options)
    names = {name: f"{name}_" if keyword.iskeyword(name) else name.replace("-", "_") for name in options}
    flags: dict[str, Any] = {names[name]: value for name, value in options.items()}
    flags = {name: _NUMBERS.get(name, str)(value) for name, value in flags.items()} | {"fresh": fresh and True}
    settings = resolve(flags, os.environ, Path.cwd(), script=None)
    try:
        agent = Agent(
            settings,
            Program(command, os.environ),
            listeners=at,
            sources=None if notices is None else [ScriptedSource(notices.split(","))],
            stores=opener(fail, settings),
        )
        for listener in at:
            listener.agent = agent
        return agent.run()
    except HarnessError as err:
        sys.stderr.write(f"harness: error: {err}\n")
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
