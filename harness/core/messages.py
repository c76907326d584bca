"""Every message between a trainer and its agent, and between an agent and other processes, as types.

Owns which messages there are, what they carry, and their bytes: one JSON object with a `type`. Framing, descriptors and
liveness are `ipc.channel`. A message is decoded once, where it arrives. Anything else is refused there, so that no
other code handles names of fields. Every time is monotonic seconds of this host, every size bytes.

    trainer ──▶ agent    Hello Attached Holds Layout Restored FirstStep Sealed SaveWanted SignalReceived Training AtEnd
                         LeftLoop Evaluates Finished Leaving Bye
    agent ──▶ trainer    Welcome Refused ResumeHeader ResumeSlots ResumeReady ResumeNone ResumeFailed Stores HoldsWanted
                         Slots NoSlots NoMeeting Superseded
    others ──▶ agent     AskStatus AskDrill Takeover
    agent ──▶ others     Status · Drilling DrillDone NoDrill · Busy HandedOver
"""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from harness.core import events
from harness.core.restart import Span

PROTOCOL = 9
"""Increased with any change that an agent and a trainer of two versions would misunderstand."""


class RunState(enum.Enum):
    """STARTING → RUNNING → DRAINING → DONE; RUNNING → STARTING on a restart in place; every state may go to DONE.

    STARTING: no trainer has connected in this generation yet. RUNNING: one has. DRAINING: the instance is going away,
    or the user wants to stop: nothing new is begun after the last snapshot. DONE: the outcome is decided.
    """

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"


class GenerationInfo(msgspec.Struct, frozen=True):
    """One start of the trainers, as messages carry it.

    Attributes:
        number: of the generation; may still rise while it is not claimed.
        run_id: identity of the run; empty while it is not known.
        nonce: of the claimant.
        parent: the snapshot it resumed from; `None` for step 0, or while that is not known.
        claimed: whether the claim stands in the store.
    """

    number: int
    run_id: str
    nonce: str
    parent: str | None = None
    claimed: bool = False


def _kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=_kebab):
    """Base of every message; the class's name in kebab case is its `type`."""


# ---- from the trainer -----------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A Checkpointer connects. It sends the descriptors of control page and slots if it continues after its agent died.

    Attributes:
        protocol: `PROTOCOL` of its version.
        rank: of the process.
        world_size: number of ranks.
        generation: the one that it has begun; `None` if it asks what to resume.
        indexes: of the slots whose descriptors follow that of the page.
    """

    protocol: int
    rank: int = 0
    world_size: int = 1
    generation: GenerationInfo | None = None
    indexes: tuple[int, ...] = ()


class HeldTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that one of several ranks holds.

    Attributes:
        name: of the tensor.
        dtype: as in a shard.
        shape: of what the rank holds.
        how: a `Holding`: shared, maybe or own.
        whole: shape of the whole tensor, if the rank holds a part of it.
        offset: where that part begins in the whole one.
        group: of a parameter that is kept equal on a group of ranks: the index of that group.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    how: str
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    group: int | None = None


class Holds(Message, frozen=True):
    """What one of several ranks holds. `Stores` follows.

    Attributes:
        tensors: what it holds.
        number: distinguishes one state of it from the next.
        groups: the groups of ranks that keep a parameter equal.
    """

    tensors: tuple[HeldTensor, ...]
    number: int
    groups: tuple[tuple[int, ...], ...] = ()


class Layout(Message, frozen=True):
    """The trainer needs slots of `bytes`. `number` distinguishes one layout from the next."""

    bytes: int
    number: int


class Restored(Message, frozen=True):
    """The trainer has restored the snapshot, and returns its slot to the agent."""

    snapshot: str
    step: int
    seconds: float


class FirstStep(Message, frozen=True):
    """The first step of this process is complete. Carries what its time was spent on.

    Attributes:
        step: its number.
        at: when it was complete.
        waits: when the process waited for the agent to find or fetch the snapshot.
        wanted_at: when the process was ready to restore the snapshot.
    """

    step: int
    at: float
    waits: tuple[Span, ...]
    wanted_at: float


class Sealed(Message, frozen=True):
    """A snapshot is sealed in a slot.

    Attributes:
        index: of the slot.
        step: completed optimizer steps.
        bytes: of all shards.
        stall_s: how long the loop waited.
        copy_s: how long it would have waited without overlap.
        held: whether it counts only once the program's exit code is known to be 0.
        assignment: of several ranks: see `Stores`.
    """

    index: int
    step: int
    bytes: int
    stall_s: float
    copy_s: float
    held: bool = False
    assignment: str = ""


class SaveWanted(Message, frozen=True):
    """The program wants a snapshot at the next boundary, and wants it durable at once."""


class SignalReceived(Message, frozen=True):
    """A signal has reached this process."""

    signum: int


class Attached(Message, frozen=True):
    """A trainer whose agent died tells the new one everything from now on: what it sealed before may be untold."""


class Training(Message, frozen=True):
    """Another loop has begun, after the end of a loop that was taken for the end of the training."""


class AtEnd(Message, frozen=True):
    """One of several ranks makes no further step: it waits for the others, to seal this step with them."""

    step: int


class LeftLoop(Message, frozen=True):
    """One of several ranks has left its outermost loop before the end: it takes no snapshot before another loop."""


class Evaluates(Message, frozen=True):
    """One of several ranks enters a validation that may take long, at this step. If all do, it is saved before.

    Attributes:
        step: completed steps.
        passed: the validations of this step that it has entered before.
    """

    step: int
    passed: int


class Finished(Message, frozen=True):
    """The last loop is over, at this step."""

    step: int


class Leaving(Message, frozen=True):
    """The trainer waits until its newest snapshot is durable, and then exits."""


class Bye(Message, frozen=True):
    """The last message of a Checkpointer: its process exits, or continues without it.

    Attributes:
        exception: whether it ends by an exception, or by an exit code that means failure.
        early: whether the program left its outermost loop before its end.
        hopeless: whether the same program would meet that exception again.
        process_lives: whether the process continues.
    """

    exception: bool
    early: bool = False
    hopeless: bool = False
    process_lives: bool = False


# ---- to the trainer -------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The answer to `Hello`, with the control page's descriptor.

    Attributes:
        generation: the one that begins, or continues.
        restarts: how many restarts by this agent there were before.
        settings: of the run, as `Settings.to_json`.
        detached: whether the agent is not the parent of its trainer.
        command: the trainer's command line, as claims record it.
        sequence: number of the newest seal on this host.
    """

    generation: GenerationInfo
    restarts: int
    settings: str
    detached: bool
    command: tuple[str, ...]
    sequence: int


class Refused(Message, frozen=True):
    """The other answer to `Hello`: why this agent cannot serve this trainer."""

    message: str


class ResumeHeader(Message, frozen=True):
    """The snapshot that is being fetched, and its small state: `record` is a slot's record. Tensors follow."""

    snapshot: str
    tier: str
    record: str
    generation: GenerationInfo


class ResumeSlots(Message, frozen=True):
    """Descriptors of slots that come before those of `ResumeReady`: one message has few."""


class ResumeReady(Message, frozen=True):
    """The snapshot is in slots, one for each rank, whose descriptors come with this. `verified`: digests were compared.

    They are in rank order, after those of `ResumeSlots`.
    """

    snapshot: str
    tier: str
    verified: bool
    generation: GenerationInfo


class ResumeNone(Message, frozen=True):
    """There is nothing to resume: the run begins."""

    generation: GenerationInfo


class ResumeFailed(Message, frozen=True):
    """The run cannot be resumed. `error` names an exception of `harness.errors`."""

    error: str
    message: str


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of what a rank holds of a tensor, from `first` to before `last`; all of it if there are no dimensions."""

    name: str
    first: int
    last: int


class Stores(Message, frozen=True):
    """The answer to `Holds`: what this rank stores of it. It may come again, if another rank holds something else now.

    Attributes:
        rows: of tensors that several ranks share.
        own: names of tensors that are this rank's alone.
        compared: names of tensors that are compared between ranks in every snapshot.
        kept_equal: names of tensors that a wrapper keeps equal: they are compared in some snapshots.
        number: of the `Holds`.
        assignment: identity of what all ranks store: only shares of one assignment are a snapshot together.
    """

    rows: tuple[Rows, ...]
    own: tuple[str, ...]
    compared: tuple[str, ...]
    kept_equal: tuple[str, ...]
    number: int
    assignment: str = ""


class HoldsWanted(Message, frozen=True):
    """What the ranks hold does not fit together, perhaps because they told it at different steps: tell it again."""


class Slots(Message, frozen=True):
    """The slots of a layout, by their indexes; their descriptors come with this."""

    indexes: tuple[int, ...]
    number: int


class NoSlots(Message, frozen=True):
    """There is no room for the slots of the layout. `error` names an exception of `harness.errors`."""

    error: str
    message: str


class NoMeeting(Message, frozen=True):
    """The ranks will never come to one step. `error` names an exception of `harness.errors`."""

    error: str
    message: str


class Superseded(Message, frozen=True):
    """A newer start has asked for the run. A trainer that leaves on the next command exits with the superseded code."""


# ---- of this host's other processes ---------------------------------------------------------------------------------


class AskStatus(Message, frozen=True):
    """Ask what the run is doing. The answer is `Status`."""


class Forecast(msgspec.Struct, frozen=True):
    """The outcome that an interruption notice would have now, at the measured rates.

    Attributes:
        in_s: seconds that the notice would leave.
        needs_s: seconds until the snapshot that can be saved would be durable.
        lost_steps: steps that the trainer has completed beyond that snapshot.
    """

    in_s: float
    needs_s: float
    lost_steps: int


class RankStatus(msgspec.Struct, frozen=True):
    """One of several ranks.

    Attributes:
        rank: its number.
        pid: of its process; `None` if it is not connected.
        step: completed optimizer steps; `None` before its loop.
        step_age_s: for how long it has been there; `None` before that was looked at.
        waits: whether it waits at that step for the other ranks.
        late: whether the others have waited for it, for a minute or more.
    """

    rank: int
    pid: int | None
    step: int | None
    step_age_s: float | None
    waits: bool
    late: bool


class Status(Message, frozen=True, kw_only=True):
    """The status of a run, as its live agent reports it.

    Attributes:
        run: its name.
        store: where its snapshots go.
        local: the local tier, if one is set.
        state: of the run, here.
        generation: its number, 0 before it has begun.
        run_id: identity of the run.
        claimed: whether the store knows of this start.
        step: completed optimizer steps; `None` before the loop.
        step_age_s: seconds since the agent saw that step complete.
        local_step: newest step committed on this machine.
        durable_step: newest step committed in the store.
        durable_age_s: seconds since the commit of that snapshot.
        bytes_copied: bytes of the newest snapshot that the store copied by itself.
        bytes_pending: bytes still to be sent of the upload in flight.
        estimate_s: estimated seconds to send them.
        deadline_s: seconds until the instance ends; `None` if no end is announced.
        notice: forecast for a notice now; `None` before the first step, and once a notice is in force.
        finished_step: step at which the last loop ended.
        everything_durable: whether the newest snapshot is durable.
        restarts: number of restarts in place, by this agent.
        restart: what the time of the newest start was spent on.
        unreachable: sources of notices that should answer here, but do not.
        agent_pid: of the process that answers.
        trainer_pid: of the connected trainer.
        ranks: each of several ranks; empty for one.
        unsaved: of a program that saves by itself: why the newest thing that it has written is not saved.
    """

    run: str
    store: str
    local: str | None
    state: RunState
    generation: int
    run_id: str
    claimed: bool
    step: int | None
    step_age_s: float | None = None
    local_step: int | None
    durable_step: int | None
    durable_age_s: float | None
    bytes_copied: int
    bytes_pending: int
    estimate_s: float | None
    deadline_s: float | None
    notice: Forecast | None = None
    finished_step: int | None
    everything_durable: bool
    restarts: int
    restart: events.Restarted | None
    unreachable: tuple[str, ...]
    agent_pid: int
    trainer_pid: int | None
    ranks: tuple[RankStatus, ...] = ()
    unsaved: str = ""

    def fields(self) -> dict[str, Any]:
        """Return the document that `harness status --json` shows."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        document.pop("type")
        return document | {"restart": None if self.restart is None else self.restart.fields()}


class AskDrill(Message, frozen=True):
    """Ask for a drill, as for a notice that leaves `in_s` seconds. `Drilling` and `DrillDone` follow, or `NoDrill`.

    Attributes:
        in_s: seconds until the end of the instance, had it been a notice.
        end: whether the run then really exits.
    """

    in_s: float
    end: bool


class Drilling(Message, frozen=True):
    """The drill has begun. `words` is its plan, for people."""

    words: str


class DrillDone(Message, frozen=True):
    """The drill is over. `drilled` is its result, `words` the same for people."""

    drilled: events.Drilled
    words: str


class NoDrill(Message, frozen=True):
    """The drill cannot be done, or was broken off."""

    why: str


class Takeover(Message, frozen=True):
    """Another agent of this host wants the run. `HandedOver` or `Busy` follows."""


class Busy(Message, frozen=True):
    """The run is being trained here, by this process."""

    trainer_pid: int


class HandedOver(Message, frozen=True):
    """The handover: the sealed slots, whose descriptors come with this, and the generations that made them.

    Several messages, of which all but the last say `more`, if there are more slots than descriptors fit into one.
    """

    indexes: tuple[int, ...]
    generations: tuple[GenerationInfo, ...]
    more: bool = False


FromTrainer = (
    Hello
    | Attached
    | Holds
    | Layout
    | Restored
    | FirstStep
    | Sealed
    | SaveWanted
    | SignalReceived
    | Training
    | AtEnd
    | LeftLoop
    | Evaluates
    | Finished
    | Leaving
    | Bye
)
ToTrainer = (
    Welcome
    | Refused
    | ResumeHeader
    | ResumeSlots
    | ResumeReady
    | ResumeNone
    | ResumeFailed
    | Stores
    | HoldsWanted
    | Slots
    | NoSlots
    | NoMeeting
    | Superseded
)
OfThisHost = AskStatus | Status | AskDrill | Drilling | DrillDone | NoDrill | Takeover | Busy | HandedOver
AnyMessage = FromTrainer | ToTrainer | OfThisHost

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return one message's bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The inverse of `encode`; fields of a newer version are ignored. Raises ValueError if `data` is not a message."""
    message: AnyMessage = _decoder.decode(data)
    return message
