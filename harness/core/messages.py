"""Every message between a trainer and its agent, and between an agent and whoever asks it, as types.

Owns which messages there are, what they carry, and their bytes: one JSON object with a `type`. Framing, descriptors and
liveness are `ipc.channel`. A message is decoded once, where it arrives; what is none of these is refused there, and
behind that nobody handles names of fields. Every time is monotonic seconds of this host, every size bytes.

    trainer ──▶ agent    Hello Layout Restored FirstStep Sealed SaveWanted SignalReceived Training Finished Leaving Bye
    agent ──▶ trainer    Welcome Refused ResumeHeader ResumeReady ResumeNone ResumeFailed Slots NoSlots Superseded
    anybody ──▶ agent    AskStatus AskDrill Takeover
    agent ──▶ anybody    Status · Drilling DrillDone NoDrill · Busy HandedOver
"""

from __future__ import annotations

import enum
import re
from typing import Any

import msgspec

from harness.core import events
from harness.core.restart import Span

PROTOCOL = 4
"""Raised with any change that an agent and a trainer of two versions would misunderstand."""


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
    """One start of the trainers, as it travels.

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
    """A Checkpointer is there. With descriptors of control page and slots where it goes on after its agent died.

    Attributes:
        protocol: `PROTOCOL` of its version.
        rank: of the process.
        world_size: how many there are.
        generation: which it has begun; `None` for one that asks what it resumes.
        indexes: of the slots whose descriptors follow that of the page.
    """

    protocol: int
    rank: int = 0
    world_size: int = 1
    generation: GenerationInfo | None = None
    indexes: tuple[int, ...] = ()


class Layout(Message, frozen=True):
    """Slots of `bytes` are needed. `number` tells one layout from the next."""

    bytes: int
    number: int


class Restored(Message, frozen=True):
    """The live state is the snapshot's; its slot is the agent's again."""

    snapshot: str
    step: int
    seconds: float


class FirstStep(Message, frozen=True):
    """The first step of this process is complete, and what its time went into.

    Attributes:
        step: its number.
        at: when it was complete.
        waits: for what the agent was still finding or fetching.
        wanted_at: when it was ready to make the snapshot's state its own.
    """

    step: int
    at: float
    waits: tuple[Span, ...]
    wanted_at: float


class Sealed(Message, frozen=True):
    """A snapshot is in a slot.

    Attributes:
        index: of the slot.
        step: completed optimizer steps.
        bytes: of all shards.
        stall_s: how long the loop waited.
        copy_s: how long it would have, without overlap.
        held: whether it counts only once the program's exit code is known to be 0.
    """

    index: int
    step: int
    bytes: int
    stall_s: float
    copy_s: float
    held: bool = False


class SaveWanted(Message, frozen=True):
    """The program wants a snapshot at the next boundary, and wants it durable at once."""


class SignalReceived(Message, frozen=True):
    """A signal has reached this process."""

    signum: int


class Training(Message, frozen=True):
    """A loop has begun after one whose end was taken for that of the training."""


class Finished(Message, frozen=True):
    """The last loop is over, at this step."""

    step: int


class Leaving(Message, frozen=True):
    """It waits for its newest snapshot to be durable, and then ends."""


class Bye(Message, frozen=True):
    """The last word of a Checkpointer: its process ends, or goes on without it.

    Attributes:
        exception: it ends by one, or by an exit code that says so.
        early: the program left its outermost loop before its end.
        hopeless: by an exception that the same program would meet again.
        process_lives: the process goes on.
    """

    exception: bool
    early: bool = False
    hopeless: bool = False
    process_lives: bool = False


# ---- to the trainer -------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The answer to `Hello`, with the control page's descriptor.

    Attributes:
        generation: which is begun, or goes on.
        restarts: how many there were before it, by this agent.
        settings: of the run, as `Settings.to_json`.
        detached: whether the agent is no parent of its trainer.
        command: the trainer's command line, as it is remembered.
        sequence: number of the newest seal on this host.
    """

    generation: GenerationInfo
    restarts: int
    settings: str
    detached: bool
    command: tuple[str, ...]
    sequence: int


class Refused(Message, frozen=True):
    """The other answer to `Hello`: why this trainer cannot be this agent's."""

    message: str


class ResumeHeader(Message, frozen=True):
    """Which snapshot is fetched, and its small state: `record` is a slot's record. Tensors follow."""

    snapshot: str
    tier: str
    record: str
    generation: GenerationInfo


class ResumeReady(Message, frozen=True):
    """The snapshot is in the slot whose descriptor comes with this. `verified`: every digest was compared."""

    snapshot: str
    tier: str
    verified: bool
    generation: GenerationInfo


class ResumeNone(Message, frozen=True):
    """There is nothing to resume: the run begins."""

    generation: GenerationInfo


class ResumeFailed(Message, frozen=True):
    """What there is cannot be resumed. `error` names an exception of `harness.errors`."""

    error: str
    message: str


class Slots(Message, frozen=True):
    """The slots of a layout, by their indexes; their descriptors come with this."""

    indexes: tuple[int, ...]
    number: int


class NoSlots(Message, frozen=True):
    """There is no room for the slots of the layout. `error` names an exception of `harness.errors`."""

    error: str
    message: str


class Superseded(Message, frozen=True):
    """A newer start has asked for the run: who leaves on the next command leaves with that exit code."""


# ---- of this host's other processes ---------------------------------------------------------------------------------


class AskStatus(Message, frozen=True):
    """What is the run doing? The answer is `Status`."""


class Forecast(msgspec.Struct, frozen=True):
    """What a notice would come to if it came now, at the measured rates.

    Attributes:
        in_s: seconds that it would leave.
        needs_s: seconds until the snapshot that can be saved would be durable.
        lost_steps: steps that the trainer has made beyond it.
    """

    in_s: float
    needs_s: float
    lost_steps: int


class Status(Message, frozen=True, kw_only=True):
    """What a live agent says of its run.

    Attributes:
        run: its name.
        store: where its snapshots go.
        local: the local tier, if one is set.
        state: of the run, here.
        generation: its number, 0 before it has begun.
        run_id: identity of the run.
        claimed: whether the store knows of this start.
        step: completed optimizer steps; `None` before the loop.
        step_age_s: seconds since it was reached, as the agent has seen it.
        local_step: newest step committed on this machine.
        durable_step: newest step committed in the store.
        durable_age_s: seconds since that.
        bytes_copied: what the store copied by itself of the newest snapshot.
        bytes_pending: what is still to be sent of the one in flight.
        estimate_s: seconds that will take.
        deadline_s: seconds until the instance ends; `None` where no end is announced.
        notice: what one would come to now; `None` before the first step, and once one is in force.
        finished_step: at which the last loop ended.
        everything_durable: whether the newest snapshot is.
        restarts: in place, by this agent.
        restart: what the newest start took.
        unreachable: sources of notices that should answer here, and do not.
        agent_pid: of the process that answers.
        trainer_pid: of the connected trainer.
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

    def fields(self) -> dict[str, Any]:
        """As a document: what `harness status --json` shows."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        document.pop("type")
        return document | {"restart": None if self.restart is None else self.restart.fields()}


class AskDrill(Message, frozen=True):
    """What would a notice come to that leaves `in_s` seconds? `Drilling` and `DrillDone` follow, or `NoDrill`.

    Attributes:
        in_s: seconds until the end of the instance, had it been a notice.
        end: whether the run then really leaves.
    """

    in_s: float
    end: bool


class Drilling(Message, frozen=True):
    """It has begun: the plan, for people."""

    words: str


class DrillDone(Message, frozen=True):
    """What it came to, and that for people."""

    drilled: events.Drilled
    words: str


class NoDrill(Message, frozen=True):
    """It cannot be done, or not be carried through."""

    why: str


class Takeover(Message, frozen=True):
    """Another agent of this host wants the run. `HandedOver` or `Busy` follows."""


class Busy(Message, frozen=True):
    """It is being trained here, by this process."""

    trainer_pid: int


class HandedOver(Message, frozen=True):
    """Here are the sealed slots, whose descriptors come with this, and the generations that made them."""

    indexes: tuple[int, ...]
    generations: tuple[GenerationInfo, ...]


FromTrainer = (
    Hello | Layout | Restored | FirstStep | Sealed | SaveWanted | SignalReceived | Training | Finished | Leaving | Bye
)
ToTrainer = Welcome | Refused | ResumeHeader | ResumeReady | ResumeNone | ResumeFailed | Slots | NoSlots | Superseded
OfThisHost = AskStatus | Status | AskDrill | Drilling | DrillDone | NoDrill | Takeover | Busy | HandedOver
AnyMessage = FromTrainer | ToTrainer | OfThisHost

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """One message's bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The inverse of `encode`; fields of a newer version are ignored. Raises ValueError where it is no message."""
    message: AnyMessage = _decoder.decode(data)
    return message
