"""The typed events that everything reports through: one JSON line each, in the journal and to listeners.

Owns what can happen and its fields; knows neither where lines go nor what the time is. `status`, the log on stderr and
the demo's table are all folds over these. Sizes are bytes, durations seconds.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

import msgspec

from harness.core.words import printable


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True, omit_defaults=True):
    """Base of every event; the class name is the tag in JSON."""

    def fields(self) -> dict[str, object]:
        """Return the event as a document, without its name."""
        return msgspec.structs.asdict(self)


class AgentStarted(Event, frozen=True):
    """An agent is up: the first event of a journal."""

    run: str
    store: str
    local: str | None
    host: str
    pid: int
    detached: bool = False


class NodeBooted(Event, frozen=True):
    """The node of a fleet that this agent runs on.

    Attributes:
        instance: its id.
        instance_type: "g6e.xlarge".
        zone: its availability zone.
        spot: whether it is a spot instance.
        booted_at: ISO 8601 UTC, when its kernel began; `None` if unknown.
        parts_s: where the time until the run was started went, by name: `system` (the operating system, and fetching
            the scripts), `disks`, `source`, `environment`. Empty if unknown.
    """

    instance: str
    instance_type: str
    zone: str
    spot: bool
    booted_at: str | None = None
    parts_s: dict[str, float] = {}


NODE_VARIABLE = "HARNESS_NODE"
"""The environment variable that tells an agent about its node: a `NodeBooted` in JSON."""


class Claimed(Event, frozen=True):
    """The agent has claimed a generation in the store."""

    generation: int
    run_id: str


class ClaimDeferred(Event, frozen=True):
    """The store could not be asked: training continues under a number that the agent claims later."""

    generation: int
    reason: str


class Located(Event, frozen=True):
    """The resume point is chosen."""

    snapshot: str
    tier: str


class NothingToResume(Event, frozen=True):
    """There is no snapshot of this run anywhere: it starts at step 0, and the log says so."""

    reason: str


class Fetched(Event, frozen=True):
    """A snapshot's shards are in a slot."""

    snapshot: str
    tier: str
    bytes: int
    seconds: float
    verified: bool


class Rejected(Event, frozen=True):
    """A snapshot that looked newest was not used; `reason` says why."""

    snapshot: str
    tier: str
    reason: str


class Quarantined(Event, frozen=True):
    """A snapshot was marked unusable in the store."""

    snapshot: str
    reason: str


class TrainerStarted(Event, frozen=True):
    """The trainer's process was spawned."""

    pid: int
    restarts: int


class TrainerConnected(Event, frozen=True):
    """A Checkpointer has said hello."""

    pid: int
    rank: int


class Restored(Event, frozen=True):
    """The trainer has restored the snapshot into its live state."""

    snapshot: str
    step: int
    seconds: float


class FirstStep(Event, frozen=True):
    """The first optimizer step of this generation is complete.

    Attributes:
        step: its number.
        seconds: since the agent started, or since the trainer's previous end if it was restarted in place.
    """

    step: int
    seconds: float


class Restarted(Event, frozen=True):
    """Where the time from the previous attempt's end to the first step of this one went. The parts sum to `total_s`.

    The agent's work while the trainer imports counts only as far as the trainer waited for it.

    Attributes:
        step: the first one of this attempt.
        snapshot: the one that was resumed; `None` if there was none yet.
        tier: where it was found.
        total_s: the sum of the parts.
        detect_s: from the end of the previous attempt to the start of this one, back-off and capacity included. `None`
            if that end is unknown: the total then begins with the start of this one.
        start_s: the agent, and the program's own way to its loop: Python, torch, model, data.
        wait_s: the program's wait for what it resumes: the store's answer, older generations, bytes and their digests.
        first_step_s: restoring the snapshot into the live state, and the first step.
        fetching_s: not a part: how long the fetch took in all, whether the trainer waited or not.
    """

    step: int
    snapshot: str | None
    tier: str | None
    total_s: float
    detect_s: float | None
    start_s: float
    wait_s: float
    first_step_s: float
    fetching_s: float

    def words(self) -> str:
        """Return one line for people."""
        since = "the start" if self.detect_s is None else "the end of the previous attempt"
        parts = [
            ("detect", self.detect_s), ("start", self.start_s), ("wait", self.wait_s), ("first step", self.first_step_s)
        ]  # fmt: skip
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds is not None)
        beside_s = self.fetching_s - self.wait_s
        beside = f"; {beside_s:.1f} s of fetching overlapped with the start" if beside_s >= 0.05 else ""
        return f"{self.total_s:.1f} s from {since} to step {self.step}: {told}{beside}"


class SlotsReady(Event, frozen=True):
    """Room for snapshots is allocated.

    Attributes:
        slots: how many.
        bytes: of each.
        on_disk: whether they are on a disk, for want of memory: the training loop waits for it at each snapshot.
    """

    slots: int
    bytes: int
    on_disk: bool = False


class Due(Event, frozen=True):
    """A snapshot was requested; `reason` says why."""

    reason: str


class Agreed(Event, frozen=True):
    """Several ranks will take the snapshot at this step; `seconds` is how long the agreement took."""

    step: int
    seconds: float


class Sealed(Event, frozen=True):
    """A snapshot is complete in memory; of several ranks, the share of `rank`.

    Attributes:
        step: completed optimizer steps.
        bytes: of its tensors.
        stall_s: how long the training loop waited for it.
        rank: whose share it is; `None` if there is one rank only.
    """

    step: int
    bytes: int
    stall_s: float
    rank: int | None = None


class SetAside(Event, frozen=True):
    """A checkpoint that a watched program has written is whole, and was set aside to be uploaded.

    Attributes:
        step: its step, or its number if its name tells none.
        name: its path in the watched directory.
        bytes: of its files.
        how: "reflink", "link" or "copy".
        seconds: how long that took.
    """

    step: int
    name: str
    bytes: int
    how: str
    seconds: float


class RankLate(Event, frozen=True):
    """The other ranks wait for this one.

    Attributes:
        rank: its number.
        step: its completed steps; `None` if it has created no Checkpointer, or has not begun its loop.
        age_s: for how long that has not changed.
        agreed: the step at which all ranks are to take a snapshot; `None` if none is agreed.
    """

    rank: int
    age_s: float
    step: int | None = None
    agreed: int | None = None


class RanksDiffer(Event, frozen=True):
    """A tensor that all ranks should have alike is another one on some of them: each stores its own from now on.

    Attributes:
        step: of the snapshot that showed it, which is not used.
        tensor: name of the tensor.
        ranks: those whose bytes are not those of the first rank that has it.
    """

    step: int
    tensor: str
    ranks: tuple[int, ...]


class ShardStored(Event, frozen=True):
    """One shard is durable in a tier.

    Attributes:
        tier: "local" or "remote".
        step: the snapshot's.
        name: the shard's.
        bytes: its size.
        how: "sent"; "copied" by the store itself from the snapshot before; "kept" if it was there already.
    """

    tier: str
    step: int
    name: str
    bytes: int
    how: str = "sent"


class NotCopied(Event, frozen=True):
    """A store did not copy a shard that it should hold already. The agent sends it instead."""

    tier: str
    step: int
    name: str
    reason: str


class PartStored(Event, frozen=True):
    """One rank's part is durable in a tier."""

    tier: str
    step: int
    rank: int = 0


class Published(Event, frozen=True):
    """The manifest is in the tier: the snapshot exists there.

    Attributes:
        tier: "local" or "remote".
        snapshot: its name.
        step: completed optimizer steps.
        bytes: of all shards.
        seconds: since it was sealed.
        copied: bytes of those shards that the store copied by itself; they were not sent.
    """

    tier: str
    snapshot: str
    step: int
    bytes: int
    seconds: float
    copied: int = 0


class Verified(Event, frozen=True):
    """A committed snapshot was read back and is what was committed."""

    tier: str
    snapshot: str


class SaveFailed(Event, frozen=True):
    """A tier could not save a snapshot. Training continues; the tier tries again."""

    tier: str
    step: int
    reason: str
    retry_in_s: float | None


class StoreSilent(Event, frozen=True):
    """A store takes no byte of a snapshot for a while. Training continues; the call ends by itself, or is repeated."""

    tier: str
    step: int
    seconds: float


class Behind(Event, frozen=True):
    """Snapshots are due faster than a tier can save, read back and retire them: they come less often from now on."""

    tier: str


class GivenUp(Event, frozen=True):
    """An upload in flight made way for a newer snapshot: both would not have become durable in time."""

    tier: str
    step: int


class Retired(Event, frozen=True):
    """A snapshot was deleted by the retention rule."""

    tier: str
    snapshot: str


class UpkeepFailed(Event, frozen=True):
    """Verification, retention or reservation failed; the tier tries it again after the next snapshot."""

    tier: str
    reason: str


class NoticeSeen(Event, frozen=True):
    """An announcement about this instance. `in_s` is the time left, when known."""

    kind: str
    source: str
    in_s: float | None
    detail: str = ""


class NoticeWithdrawn(Event, frozen=True):
    """An announcement is no longer in force."""

    source: str


class SourceBlind(Event, frozen=True):
    """A source of notices does not answer: a notice could be missed.

    Attributes:
        source: its name.
        reason: why.
        expected: false if it should not answer here, and never has: the metadata service outside a cloud.
    """

    source: str
    reason: str
    expected: bool = True


class SourceBack(Event, frozen=True):
    """A source of notices answers again (or for the first time)."""

    source: str


class StoreBlind(Event, frozen=True):
    """The store does not answer at a start. The agent asks again, and concludes nothing meanwhile."""

    store: str
    reason: str


class NeverFits(Event, frozen=True):
    """At the measured rates no notice leaves enough time for a snapshot to become durable: only periodic ones count.

    Attributes:
        bytes: of one snapshot.
        store_bytes_s: measured.
        needs_s: from the boundary to durable.
        window_s: what a notice leaves.
    """

    bytes: int
    store_bytes_s: float
    needs_s: float
    window_s: float


class HandoverAwaited(Event, frozen=True):
    """An older generation may still commit: the resume point is not fixed before it has ended or fallen silent.

    Attributes:
        generation: the older one.
        host: where it runs, as far as its claim tells.
        silence_s: how long its journal has to be silent if it does not say that it ended.
    """

    generation: int
    host: str
    silence_s: float


class HandoverOver(Event, frozen=True):
    """Every older generation has ended or is silent: the newest commit is the resume point. The wait took `seconds`."""

    seconds: float


class SupersededBy(Event, frozen=True):
    """A newer generation asks for the run: this one makes its newest step durable, and exits."""

    generation: int
    host: str


class Draining(Event, frozen=True):
    """The plan for the time that is left: finish what is in flight, save the newest sealed, or take a new snapshot.

    Attributes:
        choice: finish, newest or new.
        step: the trainer's.
        needs_s: until it is durable, at the measured rates.
        has_s: until the instance ends; `None` if unknown.
        replaces: whether an upload in flight is given up for it.
    """

    choice: str
    step: int | None
    needs_s: float | None
    has_s: float | None
    replaces: bool = False


class Drained(Event, frozen=True):
    """The result of a drain.

    Attributes:
        durable_step: the newest that survives this machine.
        durable_in_s: from the beginning of the drain to its commit; 0 if it was durable before, `None` if nothing is.
        lost_steps: steps that the trainer had completed beyond it.
    """

    durable_step: int | None
    durable_in_s: float | None
    lost_steps: int | None


class Drilling(Event, frozen=True):
    """A drill has begun: the plan that a notice of `has_s` would lead to. Training continues."""

    choice: str
    step: int | None
    needs_s: float | None
    has_s: float | None


class Drilled(Event, frozen=True):
    """The result of a drill.

    Attributes:
        durable_step: the newest that survives this machine.
        durable_in_s: from the drill's notice to the commit of its snapshot; `None` if that was not made in time.
        has_s: seconds that the notice left.
        lost_steps: steps that the trainer would have completed beyond `durable_step` when it left.
    """

    durable_step: int | None
    durable_in_s: float | None
    has_s: float
    lost_steps: int


class TrainerFinished(Event, frozen=True):
    """The trainer has reached the end of its last loop."""

    step: int


class TrainerLeft(Event, frozen=True):
    """The trainer's process ended. `code` as a shell shows it: 128 and more is a signal."""

    code: int | None
    step: int | None


class Restarting(Event, frozen=True):
    """The trainer will be started again in place."""

    in_s: float
    crashes: int


class GaveUp(Event, frozen=True):
    """No more restarts: too many crashes without progress."""

    crashes: int


class AgentReplaced(Event, frozen=True):
    """This agent took over slots from one that died or handed over."""

    slots: int


class Heartbeat(Event, frozen=True):
    """The agent is alive, and nothing else happened."""

    step: int | None = None
    durable_step: int | None = None


class Ended(Event, frozen=True):
    """The agent's last event: its recorded outcome."""

    outcome: str
    exit_code: int
    local_step: int | None
    durable_step: int | None


if TYPE_CHECKING:
    AnyEvent = Event
else:
    AnyEvent = functools.reduce(operator.or_, Event.__subclasses__())  # every class above, for the decoder


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal.

    Attributes:
        at: ISO 8601 UTC, for people.
        mono: the host's monotonic seconds; differences within one host's lines are true durations.
        generation: the generation that was current, 0 before there was one.
        body: the event.
    """

    at: str
    mono: float
    generation: int
    body: AnyEvent


def encode_line(line: Line) -> bytes:
    """Return one line of the journal, newline included."""
    return msgspec.json.encode(line) + b"\n"


# Made here, once: msgspec learns a type when it first decodes one, and crashes if two threads have it do so at once.
_LINES = msgspec.json.Decoder(Line)
_NODES = msgspec.json.Decoder(NodeBooted)


def decode_line(data: bytes) -> Line:
    """The inverse of `encode_line`. Raises msgspec.MsgspecError on foreign lines; a reader skips those."""
    return _LINES.decode(data)


def decode_node(text: str) -> NodeBooted | None:
    """Read the value of `NODE_VARIABLE`; `None` if it is none of ours."""
    try:
        return _NODES.decode(text)
    except msgspec.MsgspecError:
        return None


def describe(event: Event) -> str:
    """Return `name key=value ...`, the body of a log line."""
    fields = " ".join(
        f"{field}={_short(value)}"
        for field in event.__struct_fields__
        if (value := getattr(event, field)) is not None and value != ""
    )
    return f"{type(event).__name__} {fields}".rstrip()


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = printable(" ".join(str(value).split("\n")))
    return f'"{text}"' if " " in text else text
