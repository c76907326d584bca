"""One of several ranks without torch: what a Checkpointer does there, over the real link and the real meeting.

Its "training" is two hash chains: one that is each rank's own, and one that all ranks have alike, of which each stores
its rows. A lost, repeated, torn or mixed step shows in every later one. It writes one line `step own common` for each
step to CURVE.RANK, and the final digests to FINAL.RANK.

    python -m tests.support.launcher 3 -- python -m tests.support.tiny_rank --curve curve --final final [--steps 20]

    --together FILE                    begin no step before all ranks have ended the one before, deaf to signals, as in
                                       a collective call
    --hold-at STEP --hold-until FILE   stay at the boundary after STEP, listening, until FILE exists
    --up-to STEP   go on to this step, though, if it is agreed on, and stay there: one that had not seen an ask when the
                   others had makes one more step
    --grows-at STEP                    the last rank has one more value of its own from then on, which it tells only as
                                       it takes the next snapshot, as of gradients that turn out to be pending
    --careless                         go on while a snapshot is on its way, as a Checkpointer does
    --pauses RANK:STEP                 that rank stays at the boundary after STEP, before it looks, until FILE exists
    --late RANK:STEP                   that rank stays in the middle of the step after STEP, until FILE exists
    --maybe                            no wrapper keeps the common chain equal
    --differs-at STEP                  the last rank's common chain is another one from then on
    --uneven                           the last rank makes one step more
    --fails-early                      the last rank raises an exception before it says hello, once FILE exists
    --raise-at STEP                    the last rank raises an exception after STEP
    --save-at STEP                     rank 0 wants a snapshot of the step after STEP, stays there until the ranks are
                                       asked for one, and waits until it is durable
    --half-sealed                      rank 0 does not seal the first snapshot, and the others not before FILE exists
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import signal
import struct
import sys
import threading
from pathlib import Path

from harness.config.settings import SOCKET_VARIABLE, resolve
from harness.core import messages
from harness.core.manifest import StoredPiece
from harness.core.messages import HeldTensor, Holds
from harness.core.pieces import label
from harness.core.policy.meeting import Hold
from harness.core.shard import TensorSpec, header_bytes, parse_header, plan_shards
from harness.core.snapshot import shard_name
from harness.errors import StateError
from harness.ipc.control_page import Command, Request, Said, Word
from harness.ipc.slots import Slot, SlotRecord, place_shards, slot_bytes
from harness.trainer.boundary import Boundary
from harness.trainer.link import Link
from harness.trainer.meeting import Meeting
from harness.trainer.ranks import Rank, find_rank
from tests.support import delays

ROWS, ROW = 64, 1024
OWN_BYTES = 16 * 1024
GROWN_BYTES = 16  # so few that no other rank stores anything else
LOOK_S = 0.002


def first(seed: str, size: int) -> bytes:
    """A state before the first step."""
    return hashlib.shake_128(seed.encode()).digest(size)


def advance(state: bytes, step: int) -> bytes:
    """The state after one more step."""
    return hashlib.shake_128(hashlib.blake2b(state + step.to_bytes(8, "little")).digest()).digest(len(state))


def unbroken(rank: int, steps: int, differs_at: int | None = None) -> list[str]:
    """The curve of a rank, had nothing ever happened; that of the last one with `differs_at`, if it is given."""
    own, common, lines = first(f"own {rank}", OWN_BYTES), first("common", ROWS * ROW), []
    for step in range(steps):
        own, common = advance(own, step), advance(common, step)
        if step == differs_at:
            common = advance(common, 7)
        lines.append(f"{step + 1} {digest(own)} {digest(common)}")
    return lines


def digest(state: bytes) -> str:
    """What the curve shows of a state."""
    return hashlib.blake2b(state, digest_size=8).hexdigest()


def is_awaited(link: Link, step: int) -> bool:
    """Whether several ranks have yet to be asked for the next snapshot by steps; else the agent may be late for it."""
    news = link.page.news
    agreed = link.page.agreed(news)
    asks = link.settings.every_steps is not None and not link.page.command.leaves
    return not link.rank.is_alone and asks and (agreed is None or agreed.step <= step)


class Together:
    """Steps of all ranks in shared memory: nobody begins one before all have ended the one before."""

    def __init__(self, path: Path, rank: Rank) -> None:
        self._rank = rank
        self._launcher = int(os.environ["LAUNCHER_PID"])  # it may have died before this process looks for its parent
        attempt = f"{self._launcher}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        fd = os.open(path.with_name(f"{path.name}.{attempt}"), os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 8 * rank.world_size)
        self._page = mmap.mmap(fd, 8 * rank.world_size)
        os.close(fd)

    def is_behind(self, step: int) -> bool:
        """Whether another rank has ended a later step, and so waits for this one."""
        return max(struct.unpack_from(f"<{self._rank.world_size}Q", self._page)) > step

    def come(self, step: int) -> None:
        """End a step, and wait for all others, deaf; without a launcher for a second only, as for a time-out."""
        deaf = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        struct.pack_into("<Q", self._page, 8 * self._rank.number, step)
        looks = 0
        while min(struct.unpack_from(f"<{self._rank.world_size}Q", self._page)) < step:
            threading.Event().wait(LOOK_S)
            looks += os.getppid() != self._launcher
            if looks * LOOK_S > 1:
                raise ConnectionError("another rank has not come")
        signal.pthread_sigmask(signal.SIG_SETMASK, deaf)


class TinyRank:
    """One life of one rank. It is its own stager and its own saving, as `Meeting` knows them."""

    pending = False

    def __init__(self, link: Link, options: argparse.Namespace) -> None:
        self.link, self.rank, self.options = link, link.rank, options
        self.own, self.common = first(f"own {self.rank.number}", OWN_BYTES), first("common", ROWS * ROW)
        self.boundary = Boundary(accumulate=None, sees_optimizers=False)
        self.meeting = Meeting(link, self, self, self.boundary, print)  # type: ignore[arg-type]
        self.sealed_step: int | None = None
        self._used: messages.Stores | None = None
        self._told, self._grown = 0, False
        self._grant = self._sequence = self._begun = 0
        self._together: Together | None = None
        self._first_at: int | None = None  # the step at which it was first to seal a snapshot

    # ---- what a stager does -----------------------------------------------------------------------------------------

    @property
    def planned(self) -> bool:
        """Whether slots were asked for, for what it stores now."""
        return self._used is not None and self.link.stores is self._used and not self.link.holds_wanted

    @property
    def _has_grown(self) -> bool:
        at = self.options.grows_at
        return at is not None and self.rank.number == self.rank.world_size - 1 and self.boundary.step >= at

    def plan(self, _step: int) -> None:
        """Tell what it holds; ask for slots, once it is told what it stores."""
        if not self._told or self.link.holds_wanted:
            self.link.holds_wanted = False
            self._told += 1
            how = "maybe" if self.options.maybe else "shared"
            held = HeldTensor("own", "U8", (OWN_BYTES,), "own"), HeldTensor("common", "U8", (ROWS, ROW), how)
            grown = (HeldTensor("grown", "U8", (GROWN_BYTES,), "own"),) if self._grown else ()
            self.link.send(Holds((*held, *grown), self._told), repeat=True)
        if (stores := self.link.stores) is None or stores.number != self._told or self.link.holds_wanted:
            return
        self._used, self._assignment = stores, stores.assignment
        self._entries: dict[str, tuple[str, int, int]] = {"own": ("own", 0, OWN_BYTES)}
        self._pieces = {"own": StoredPiece(own=True)}
        specs = [TensorSpec("own", "U8", (OWN_BYTES,))]
        if self._grown:
            self._entries["grown"], self._pieces["grown"] = ("own", 0, GROWN_BYTES), StoredPiece(own=True)
            specs.append(TensorSpec("grown", "U8", (GROWN_BYTES,)))
        for row in stores.rows:
            name = f"common@{row.first},0"
            self._entries[name] = ("common", row.first * ROW, row.last * ROW)
            self._pieces[name] = StoredPiece(tensor="common", whole=(ROWS, ROW), offset=(row.first, 0))
            specs.append(TensorSpec(name, "U8", (row.last - row.first, ROW)))
        if "common" in stores.own:  # the common chain is each rank's own: they differ
            self._entries["common"], self._pieces["common"] = ("common", 0, ROWS * ROW), StoredPiece(own=True)
            specs.append(TensorSpec("common", "U8", (ROWS, ROW)))
        self._shards = plan_shards(specs)
        number, size = self.rank.number, self.rank.world_size
        self._spans = place_shards([(shard_name(number, size, shard.index), shard.size) for shard in self._shards])
        self.link.ask_slots(slot_bytes(self._spans, 1000))

    def take(self, *, overlap: bool = False, compares: bool = False) -> bool:
        """Seal a snapshot if a slot is granted."""
        if self.sealed_step == self.boundary.step:
            return True
        if (error := self.link.slot_error) is not None:
            raise error
        if self.options.half_sealed and not self._takes_half():
            return False
        granted = self.link.granted(self._grant, self._sequence)
        if granted is None:
            return False
        if self._has_grown and not self._grown:
            self._grown, self.link.holds_wanted, self._used = True, True, None
            self.plan(self.boundary.step)
            return False
        self._grant, slot = granted
        slot.begin()
        values = {"own": self.own, "common": self.common}
        for span, shard in zip(self._spans, self._shards, strict=True):
            slot.buffer[span.offset : span.offset + len(shard.header)] = shard.header
            for placed in shard.tensors:
                name, begin, end = self._entries[placed.name]
                start = span.offset + placed.offset
                slot.buffer[start : start + placed.size] = values[name][begin:end]
        self._sequence += 1
        record = SlotRecord(
            step=self.boundary.step,
            rank=self.rank.number,
            world_size=self.rank.world_size,
            generation=self.link.generation.number,
            shards=self._spans,
            state=json.dumps({"step": self.boundary.step, "states": {}, "rank": self.rank.number}),
            environment={},
            sealed_at="2026-01-01T00:00:00+00:00",
            pieces=self._pieces,
            assignment=self._assignment,
            sums={
                label(name, None, (ROWS, ROW)): int(digest(values[name])[:12], 16) for name in self._compared(compares)
            },
        )
        slot.seal(record, self._sequence)
        self.sealed_step = self.boundary.step
        size, index = sum(span.size for span in self._spans), self.link.index_of(slot)
        self.link.send(messages.Sealed(index, self.boundary.step, size, 1e-4, 1e-4, assignment=self._assignment))
        return True

    def _takes_half(self) -> bool:
        """Whether it seals its first snapshot, if this is that: rank 0 does not, and the others wait for FILE."""
        if self._first_at is None:
            self._first_at = self.boundary.step
            os.write(2, f"test: rank {self.rank.number} is about to seal\n".encode())
        while self._first_at == self.boundary.step and self.rank.number and not self.options.hold_until.exists():
            threading.Event().wait(LOOK_S)
            if not self.planned:  # another agent asks for a snapshot only once all have their slots
                self.plan(self.boundary.step)
        return self._first_at != self.boundary.step or self.rank.number > 0

    def _compared(self, thoroughly: bool) -> tuple[str, ...]:
        assert self._used is not None, "it is planned"
        return self._used.compared + (self._used.kept_equal if thoroughly else ())

    # ---- what saving does -------------------------------------------------------------------------------------------

    def take_waiting(self, news: int, *, compares: bool = False) -> None:
        """Seal a snapshot; wait for a slot, while `news` is the word."""
        while not (self.planned and self.take(compares=compares)):
            if self.link.page.news != news or (self.link.page.command.leaves and self.link.page.time_is_up):
                return
            if not self.planned:
                self.plan(self.boundary.step)
            threading.Event().wait(LOOK_S)

    def wait_durable(self) -> bool:
        """Wait for the store; whether the snapshot was not void."""
        while self._is_on_its_way() and not self.link.gone and not self.link.page.time_is_up:
            threading.Event().wait(LOOK_S)
        return not self.is_void

    def _is_on_its_way(self) -> bool:
        durable, sealed = self.link.page.durable_step, self.sealed_step
        return sealed is not None and not self.is_void and (durable is None or durable < sealed)

    @property
    def is_void(self) -> bool:
        """Whether the agent has dropped the newest seal."""
        return self.sealed_step is not None and self.link.page.is_void(self._sequence)

    def forget_void(self) -> None:
        """Let the newest step be sealed again, if its seal was dropped."""
        if self.is_void:
            self.sealed_step = None

    # ---- a life -----------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Take what the agent found, if anything."""
        self.link.wait_head()
        ready = self.link.wait_ready()
        if ready is not None:
            common = bytearray(ROWS * ROW)
            for number, slot in enumerate(ready.slots):
                self._read(slot, common, mine=number == self.rank.number)
            self.common = bytes(common)
            record = ready.slot.record()
            assert record is not None
            small = json.loads(record.state)
            assert (small["rank"], small["step"]) == (self.rank.number, record.step)
            self.boundary.step = record.step
            self.link.send(messages.Restored(ready.snapshot, record.step, 0.0))
            self.link.drop_ready()
        self._sequence = self.link.sequence
        self.link.page.completed(self.boundary.step)
        self.boundary.look_soon()

    def _read(self, slot: Slot, common: bytearray, *, mine: bool) -> None:
        record = slot.record()
        assert record is not None
        assert record.pieces is not None
        for span in record.shards:
            data = bytes(slot.shard(span))
            for placed in parse_header(data[: header_bytes(data[:8], span.size)], span.size).tensors:
                value, piece = data[placed.offset : placed.offset + placed.size], record.pieces[placed.name]
                if placed.name == "own" and mine:
                    self.own = value
                elif placed.name == "common" and mine:
                    common[:] = value
                elif piece.offset is not None:
                    start = piece.offset[0] * ROW
                    common[start : start + len(value)] = value

    def train(self) -> int:
        """Train to the end; the exit code."""
        options, boundary, page = self.options, self.boundary, self.link.page
        is_last_rank = self.rank.number == self.rank.world_size - 1
        self._together = None if options.together is None else Together(options.together, self.rank)
        self._begun, told = boundary.step, False
        with Path(f"{options.curve}.{self.rank.number}").open("a") as out:
            while boundary.step < options.steps + (options.uneven and is_last_rank):
                step = boundary.step
                self._stay_away(step, options.late)
                if options.half_sealed and self._first_at == step:
                    os.write(2, f"test: rank {self.rank.number} goes on\n".encode())
                self.own, self.common = advance(self.own, step), advance(self.common, step)
                if options.differs_at == step and is_last_rank:
                    self.common = advance(self.common, 7)
                if self._together is not None:
                    self._together.come(step + 1 - self._begun)
                boundary.step = step = step + 1
                out.write(f"{step} {digest(self.own)} {digest(self.common)}\n")
                out.flush()
                news = self.link.page.completed(step)
                if not told:
                    told = True
                    self.link.stepped(step, 0.0)
                if options.raise_at == step and is_last_rank:
                    raise ArithmeticError(f"injected after step {step}")
                self._stay_away(step, options.pauses)
                if options.save_at == step - 1 and self.rank.number == 0:
                    self.meeting.want(wait=True)
                    news = self._wait_asked()  # else how many more steps there are depends on the agent's speed
                if (news != boundary.seen or step == boundary.next_due) and self._attend():
                    return self.leave()
                while self._waits():
                    threading.Event().wait(LOOK_S)
                    page = self.link.page
                    if (page.news != boundary.seen or not self.planned) and self._attend():
                        return self.leave()
        if self.meeting.attend_last() or self.sealed_step != boundary.step:
            return self.leave()
        self.link.send(messages.Finished(boundary.step), repeat=True)
        self.wait_durable()
        return 0

    def _waits(self) -> bool:
        if self.link.gone or self.link.slot_error is not None or self._has_passed():
            return False
        step, options = self.boundary.step, self.options
        agreed = self.link.page.agreed(self.link.page.news)
        # All go on to the agreed step: careless ones may be at theirs before they were ever asked.
        later = agreed is not None and agreed.step > step and (options.careless or agreed.step == options.up_to)
        goes_on = self.link.page.command.leaves or later
        held = step in (options.hold_at, options.up_to) and not goes_on and not options.hold_until.exists()
        asks = step < options.steps and not self._is_behind  # else there is no ask to wait for
        awaited = asks and is_awaited(self.link, step)
        # The agent may be late with the slots, and the run may end before a snapshot that is wanted without them.
        awaited |= asks and options.save_at is not None and self.link.granted(self._grant, self._sequence) is None
        return held or (not options.careless and (awaited or self._is_on_its_way()))

    @property
    def _is_behind(self) -> bool:
        """Whether another rank waits for this one, in lockstep."""
        return self._together is not None and self._together.is_behind(self.boundary.step - self._begun)

    def _attend(self) -> bool:
        """Look at what the agent wants, with the first slots: it asks as soon as it has sent them. Whether to leave."""
        while self._awaits_first_slot():
            threading.Event().wait(LOOK_S)
        return self.meeting.attend(overlap=False)

    def _awaits_first_slot(self) -> bool:
        link = self.link
        if self.options.careless or self._is_behind or not self.planned or self._grant or link.page.command.leaves:
            return False
        return not link.gone and not link.slot_error and link.granted(self._grant, self._sequence) is None

    def _wait_asked(self) -> int:
        """Wait until the agent commands something for this step or the next; the word of it."""
        while not self.link.gone:
            news = self.link.page.news
            agreed = self.link.page.agreed(news)
            if Command.of(news) is not Command.NOTHING and (agreed is None or agreed.step <= self.boundary.step + 1):
                break
            threading.Event().wait(LOOK_S)
        return self.link.page.news

    def _has_passed(self) -> bool:
        """Whether it has said that it will not seal this step: it makes the next one, as a Checkpointer does."""
        said = Said.decode(self.link.page.words[Word.HOLD])
        return said.hold is Hold.PASSED and said.sequence == Request.decode(self.boundary.seen).sequence

    def _stay_away(self, step: int, when: str | None) -> None:
        rank, _, at = (when or "-1:-1").partition(":")
        if self.rank.number == int(rank) and step == int(at):
            os.write(2, f"test: rank {rank} stays away\n".encode())
        while self.rank.number == int(rank) and step == int(at) and not self.options.hold_until.exists():
            threading.Event().wait(LOOK_S)

    def leave(self) -> int:
        """The way out; the exit code."""
        self.link.send(messages.Leaving(), repeat=True)
        self.wait_durable()
        return 75 if self.link.detached else 0

    def on_signal(self, signum: int, _frame: object) -> None:
        """As a Checkpointer: the agent decides what follows."""
        self.link.poke(signum)


def main() -> int:
    """Run one life."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--curve", required=True)
    parser.add_argument("--final", required=True)
    parser.add_argument("--together", type=Path)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--up-to", type=int)
    parser.add_argument("--hold-until", type=Path)
    parser.add_argument("--pauses")
    parser.add_argument("--late")
    parser.add_argument("--grows-at", type=int)
    parser.add_argument("--careless", action="store_true")
    parser.add_argument("--maybe", action="store_true")
    parser.add_argument("--differs-at", type=int)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--fails-early", action="store_true")
    parser.add_argument("--raise-at", type=int)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--half-sealed", action="store_true")
    options = parser.parse_args()
    delays.install(delays.TRAINER)
    detached = SOCKET_VARIABLE not in os.environ
    settings = resolve({}, os.environ, Path.cwd(), script=None) if detached else None
    rank = find_rank(os.environ)
    if options.fails_early and rank.number == rank.world_size - 1:
        while not options.hold_until.exists():
            threading.Event().wait(LOOK_S)
        raise ArithmeticError("injected before the first step")
    link = Link(settings, [sys.executable, *sys.argv], os.environ, rank)
    trainer = TinyRank(link, options)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, trainer.on_signal)
    try:
        trainer.restore()
        code = trainer.train()
    except Exception as err:
        link.part(exception=True, hopeless=isinstance(err, StateError))
        raise
    if code == 0 and trainer.boundary.step >= options.steps:
        Path(f"{options.final}.{link.rank.number}").write_text(f"{digest(trainer.own)} {digest(trainer.common)}")
    link.part(exception=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
