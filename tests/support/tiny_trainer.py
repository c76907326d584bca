"""A trainer without torch, over harness.trainer.link: what a Checkpointer does, for a state of 256 KiB.

Its "training" is a hash chain: step n+1 is a function of step n alone, so a lost, repeated or torn step shows in every
later one. It writes one line `step digest` for each step to --curve, and the final digest to --final.

    python -m tests.support.tiny_trainer --steps 60 --curve curve.txt --final final.txt [--every-steps 5] [--step-s 0.01]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
from pathlib import Path

from harness.core.shard import TensorSpec, header_bytes, parse_header, plan_shards
from harness.core.snapshot import shard_name
from harness.ipc.slots import Ask, Request, SlotRecord, Word, place_shards, slot_bytes
from harness.trainer.link import Link

STATE_BYTES = 256 * 1024


def advance(state: bytes, step: int) -> bytes:
    """The state after one more step."""
    seed = hashlib.blake2b(state + step.to_bytes(8, "little")).digest()
    return hashlib.shake_128(seed).digest(STATE_BYTES)


def digest(state: bytes) -> str:
    """What the curve shows of a state."""
    return hashlib.blake2b(state, digest_size=8).hexdigest()


class TinyTrainer:
    """One life of the trainer."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.step, self.state = 0, bytes(STATE_BYTES)
        self.shards = plan_shards([TensorSpec("state", "U8", (STATE_BYTES,))])
        self.spans = place_shards([(shard_name(0, 1, shard.index), shard.size) for shard in self.shards])
        self.used_grant = 0
        self.sequence = 0
        self.sealed_step: int | None = None

    def restore(self) -> None:
        """Take what the agent found, if anything."""
        self.link.wait_head()
        ready = self.link.wait_ready()
        if ready is not None:
            record = ready.slot.record()
            assert record is not None
            data = ready.slot.shard(record.shards[0])
            layout = parse_header(bytes(data[: header_bytes(bytes(data[:8]), record.shards[0].size)]), record.shards[0].size)
            placed = layout.tensors[0]
            self.state = bytes(data[placed.offset : placed.offset + placed.size])
            self.step = record.step
            assert json.loads(record.state)["step"] == self.step
            del data
            self.link.send("restored", snapshot=ready.snapshot, step=self.step, seconds=0.0)
            self.link.drop_ready()
        self.link.page.words[Word.TRAINER_STEP] = self.step + 1

    def take(self) -> bool:
        """Seal a snapshot if a slot is granted."""
        if self.sealed_step == self.step:
            return True
        granted = self.link.granted(self.used_grant)
        if granted is None:
            return False
        self.used_grant, slot = granted
        slot.begin()
        span, shard = self.spans[0], self.shards[0]
        slot.buffer[span.offset : span.offset + len(shard.header)] = shard.header
        start = span.offset + shard.tensors[0].offset
        slot.buffer[start : start + STATE_BYTES] = self.state
        self.sequence = max(self.sequence, slot.sequence) + 1
        record = SlotRecord(
            step=self.step,
            rank=0,
            world_size=1,
            generation=int(self.link.life["number"]),
            shards=self.spans,
            state=json.dumps({"step": self.step}),
            environment={},
            sealed_at="2026-01-01T00:00:00+00:00",
        )
        slot.seal(record, self.sequence)
        self.sealed_step = self.step
        size = sum(span.size for span in self.spans)
        self.link.send("sealed", index=self.link.index_of(slot), step=self.step, bytes=size, stall_s=0.0001)
        return True

    def wait_durable(self) -> None:
        """Leaving waits."""
        page = self.link.page
        while self.sealed_step is not None and not self.link.gone:
            durable = page.step_or_none(Word.DURABLE_STEP)
            if durable is not None and durable >= self.sealed_step:
                return
            threading.Event().wait(0.005)

    def train(self, steps: int, every_steps: int, step_s: float, curve: Path) -> int:
        """Train to `steps`; the exit code."""
        self.link.send("layout", repeat=True, bytes=slot_bytes(self.spans, 100))
        page, overdue, told = self.link.page, False, False
        with curve.open("a") as out:
            while self.step < steps:
                self.state = advance(self.state, self.step)
                self.step += 1
                page.words[Word.TRAINER_STEP] = self.step + 1
                out.write(f"{self.step} {digest(self.state)}\n")
                out.flush()
                if not told:
                    self.link.send("stepped", step=self.step)
                    told = True
                ask = Request.decode(page.words[Word.ASK]).value
                if ask in (Ask.LEAVE, Ask.SNAPSHOT_AND_LEAVE):
                    while ask == Ask.SNAPSHOT_AND_LEAVE and not self.take():
                        threading.Event().wait(0.005)
                        ask = Request.decode(page.words[Word.ASK]).value
                    self.link.send("leaving", repeat=True)
                    self.wait_durable()
                    return 75
                overdue |= ask == Ask.SNAPSHOT or self.step % every_steps == 0
                if overdue and self.take():
                    overdue = False
                threading.Event().wait(step_s)
        while not self.take() and not self.link.gone:
            threading.Event().wait(0.005)
        self.link.send("finished", repeat=True, step=self.step)
        self.wait_durable()
        return 0


def main() -> int:
    """Run one life."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every-steps", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--final", type=Path, required=True)
    options = parser.parse_args()
    trainer = TinyTrainer(Link(None, sys.argv, os.environ))
    trainer.restore()
    code = trainer.train(options.steps, options.every_steps, options.step_s, options.curve)
    if code == 0:
        options.final.write_text(digest(trainer.state))
    trainer.link.send("bye", exception=False)
    trainer.link.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
