"""A trainer without torch, over harness.trainer.link: what a Checkpointer does, for a state of 256 KiB.

Its "training" is a hash chain: step n+1 is a function of step n alone, so a lost, repeated or torn step shows in every
later one. It writes one line `step digest` for each step to --curve, and the final digest to --final.

    python -m tests.support.tiny_trainer --curve curve.txt --final final.txt [--steps 60] [--every-steps 5]

    --hold-at STEP --hold-until FILE   stay at the boundary after STEP, listening, until FILE exists
    --stuck-at STEP --hold-until FILE  stay in the middle of the step after STEP, deaf, until FILE exists
    --careless                         go on to the next step while a snapshot that is due waits for its slot, as a
                                       Checkpointer does; without this it is sealed at the very step at which it is due
    --patient-until STEP               until then a snapshot is also durable before the next step
    --frozen-bytes BYTES               state beside it that never changes, as of a model of which an adapter is trained
    --raise-at STEP                    raise an exception after STEP; 0 for before the first one
    --raise NAME                       which: ArithmeticError, or StateError
    --fork-at STEP --hold-until FILE   after STEP fork a child that exits and one that lives until FILE exists
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from harness.config.settings import SOCKET_VARIABLE, resolve
from harness.core import messages
from harness.core.shard import TensorSpec, header_bytes, parse_header, plan_shards
from harness.core.snapshot import shard_name
from harness.errors import StateError
from harness.ipc.control_page import Command
from harness.ipc.slots import SlotRecord, place_shards, slot_bytes
from harness.trainer.link import Link
from tests.support import delays

STATE_BYTES = 256 * 1024


def advance(state: bytes, step: int) -> bytes:
    """The state after one more step."""
    seed = hashlib.blake2b(state + step.to_bytes(8, "little")).digest()
    return hashlib.shake_128(seed).digest(STATE_BYTES)


def frozen_bytes(size: int) -> bytes:
    """What never changes."""
    return hashlib.shake_128(b"frozen").digest(size)


def digest(state: bytes) -> str:
    """What the curve shows of a state."""
    return hashlib.blake2b(state, digest_size=8).hexdigest()


class TinyTrainer:
    """One life of the trainer."""

    def __init__(self, link: Link, frozen: int = 0) -> None:
        self.link = link
        self.step, self.state, self.frozen = 0, bytes(STATE_BYTES), frozen_bytes(frozen)
        specs = [TensorSpec("frozen", "U8", (frozen,), frozen=True)] if frozen else []
        self.shards = plan_shards([*specs, TensorSpec("state", "U8", (STATE_BYTES,))])
        self.spans = place_shards([(shard_name(0, 1, shard.index), shard.size) for shard in self.shards])
        self.used_grant = 0
        self.sequence = 0
        self.sealed_step: int | None = None
        self.overdue = False
        self.interrupts = 0
        self.wanted_at = 0.0

    def restore(self) -> None:
        """Take what the agent found, if anything."""
        self.link.wait_head()
        ready = self.link.wait_ready()
        began = time.monotonic()
        if ready is not None:
            record = ready.slot.record()
            assert record is not None
            found = {}
            for span in record.shards:
                data = bytes(ready.slot.shard(span))
                for placed in parse_header(data[: header_bytes(data[:8], span.size)], span.size).tensors:
                    found[placed.name] = data[placed.offset : placed.offset + placed.size]
            self.state = found["state"]
            assert found.get("frozen", b"") == self.frozen, "what never changes has changed"
            self.step = record.step
            assert json.loads(record.state)["step"] == self.step
            self.link.send(messages.Restored(ready.snapshot, self.step, 0.0))
            self.link.drop_ready()
        self.wanted_at = began
        self.sequence = self.link.sequence
        self.link.page.completed(self.step)

    def take(self) -> bool:
        """Seal a snapshot if a slot is granted."""
        if self.sealed_step == self.step:
            return True
        if (error := self.link.slot_error) is not None:
            raise error
        granted = self.link.granted(self.used_grant, self.sequence)
        if granted is None:
            return False
        self.used_grant, slot = granted
        slot.begin()
        for span, shard in zip(self.spans, self.shards, strict=True):
            slot.buffer[span.offset : span.offset + len(shard.header)] = shard.header
            placed = shard.tensors[0]
            start = span.offset + placed.offset
            slot.buffer[start : start + placed.size] = self.frozen if placed.name == "frozen" else self.state
        self.sequence += 1
        record = SlotRecord(
            step=self.step,
            rank=0,
            world_size=1,
            generation=self.link.generation.number,
            shards=self.spans,
            state=json.dumps({"step": self.step, "states": {}}),
            environment={},
            sealed_at="2026-01-01T00:00:00+00:00",
        )
        slot.seal(record, self.sequence)
        self.sealed_step = self.step
        size = sum(span.size for span in self.spans)
        self.link.send(messages.Sealed(self.link.index_of(slot), self.step, size, 1e-4, 1e-4))
        return True

    def wait_durable(self) -> None:
        """Leaving waits."""
        while not self.is_durable() and not self.link.gone:
            threading.Event().wait(0.005)

    def is_durable(self) -> bool:
        """Whether the store has all that was sealed in this life."""
        durable = self.link.page.durable_step
        return self.sealed_step is None or (durable is not None and durable >= self.sealed_step)

    def waits(self, options: argparse.Namespace) -> bool:
        """Whether the next step waits for a snapshot that is due, or on its way to be durable.

        The test then says which steps are sealed, however late the agent grants a slot.
        """
        if self.link.gone or self.link.slot_error is not None:
            return False
        return (self.overdue and not options.careless) or (self.step <= options.patient_until and not self.is_durable())

    def look(self) -> Command:
        """A boundary: take a snapshot if one is wanted and there is a slot. Whether to leave."""
        ask = self.link.page.command
        if ask.leaves:
            return ask
        self.overdue |= ask is Command.SNAPSHOT
        if self.overdue and self.take():
            self.overdue = False
        return Command.NOTHING

    def leave(self, ask: Command) -> int:
        """The way out; the exit code."""
        while ask is Command.SNAPSHOT_AND_LEAVE and not self.take():
            threading.Event().wait(0.005)
            ask = self.link.page.command
        self.link.send(messages.Leaving(), repeat=True)
        self.wait_durable()
        return 130 if self.interrupts else 73 if self.link.superseded else 75

    def train(self, options: argparse.Namespace) -> int:
        """Train to `steps`; the exit code."""
        self.link.ask_slots(slot_bytes(self.spans, 100))
        told = False
        self.fail(options)
        with options.curve.open("a") as out:
            while self.step < options.steps:
                self.state = advance(self.state, self.step)
                self.step += 1
                self.link.page.completed(self.step)
                out.write(f"{self.step} {digest(self.state)}\n")
                out.flush()
                if not told:
                    self.link.stepped(self.step, self.wanted_at)
                    told = True
                self.overdue |= self.step % options.every_steps == 0
                if (ask := self.look()) is not Command.NOTHING:
                    return self.leave(ask)
                while self.waits(options):
                    threading.Event().wait(0.002)
                    if (ask := self.look()) is not Command.NOTHING:
                        return self.leave(ask)
                while self.step == options.hold_at and not options.hold_until.exists():
                    threading.Event().wait(0.005)
                    if (ask := self.look()) is not Command.NOTHING:
                        return self.leave(ask)
                self.disturb(options)
                threading.Event().wait(options.step_s)
        while not self.take() and not self.link.gone:
            threading.Event().wait(0.005)
        self.link.send(messages.Finished(self.step), repeat=True)
        self.wait_durable()
        return 0

    def disturb(self, options: argparse.Namespace) -> None:
        """Whatever a real trainer may do between two steps."""
        while self.step == options.stuck_at and not options.hold_until.exists():
            threading.Event().wait(0.005)
        self.fail(options)
        if self.step == options.fork_at:
            self.fork(options.hold_until)

    def fail(self, options: argparse.Namespace) -> None:
        """Raise what was asked for, if this is the step."""
        if self.step == options.raise_at:
            raise {"ArithmeticError": ArithmeticError, "StateError": StateError}[options.error](
                f"injected after step {self.step}"
            )

    def fork(self, until: Path) -> None:
        """A child that exits at once, and one that lives on, with everything that it inherited."""
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        if os.fork() == 0:
            for inherited in (0, 1, 2):
                os.close(inherited)
            while not until.exists():
                threading.Event().wait(0.01)
            os._exit(0)

    def on_signal(self, signum: int, _frame: object) -> None:
        """As a Checkpointer: the agent decides what follows; a second Ctrl-C is Python's own."""
        if signum == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
        self.link.poke(signum)


def main() -> int:
    """Run one life."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every-steps", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--final", type=Path, required=True)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--stuck-at", type=int)
    parser.add_argument("--hold-until", type=Path)
    parser.add_argument("--careless", action="store_true")
    parser.add_argument("--patient-until", type=int, default=0)
    parser.add_argument("--frozen-bytes", type=int, default=0)
    parser.add_argument("--raise-at", type=int)
    parser.add_argument("--raise", dest="error", default="ArithmeticError")
    parser.add_argument("--fork-at", type=int)
    options = parser.parse_args()
    delays.install(delays.TRAINER)
    detached = SOCKET_VARIABLE not in os.environ
    settings = resolve({}, os.environ, Path.cwd(), script=None) if detached else None
    trainer = TinyTrainer(Link(settings, [sys.executable, *sys.argv], os.environ), options.frozen_bytes)
    os.register_at_fork(after_in_child=trainer.link.close_in_child)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, trainer.on_signal)
    trainer.restore()
    try:
        code = trainer.train(options)
    except Exception as err:
        trainer.link.part(exception=True, hopeless=isinstance(err, StateError))
        raise
    if code == 0:
        options.final.write_text(digest(trainer.state))
    trainer.link.part(exception=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
