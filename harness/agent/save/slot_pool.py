"""The slots of one node: how many fit, which is free, which holds the newest snapshot.

Owns the agent's side of every slot, from its making to its close; knows neither stores nor messages. Used from the
agent's main thread only.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import NoSpace
from harness.ipc.slots import Slot, SlotState
from harness.ipc.window import Window

RESERVED_BYTES = 256 * 1024 * 1024  # left to the trainer and the kernel when the budget is checked
TWO_SLOTS_FROM_BYTES = 32 * 1024**3
TRAINER = "trainer"  # the holder of a slot that is granted
_ROOT = Path("/")


def available_bytes() -> int:
    """Return the available memory: the host's, or the cgroup's if that is less (memfds are charged to it)."""
    host, cgroup = _meminfo("MemAvailable"), free_in_cgroup(_ROOT)
    return host if cgroup is None else min(host, cgroup)


def free_in_cgroup(root: Path) -> int | None:
    """Return the bytes that the tightest memory limit above this process leaves; `None` if there is no limit.

    Limits are read from this process's own cgroup up to the root, in both versions: a unit's MemoryMax= is not at the
    root that a process outside a cgroup namespace sees. The kernel counts files in the page cache as used; here they
    count as free.

    Args:
        root: where /proc and /sys are.
    """
    left = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, used_name, cache_name = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_name, used_name = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            continue
        for directory in (Path(path), *Path(path).parents):
            here = root / "sys/fs/cgroup" / base / str(directory).strip("/")
            limit, used = _read(here / limit_name) or "", _read(here / used_name) or ""
            if limit.isdigit() and used.isdigit():
                cache = re.search(rf"^{cache_name} (\d+)$", _read(here / "memory.stat") or "", re.MULTILINE)
                left.append(max(0, int(limit) - int(used) + (int(cache[1]) if cache else 0)))
    return min(left, default=None)


def total_bytes() -> int:
    """Return the host's memory in bytes."""
    return _meminfo("MemTotal")


def how_many_fit(size: int, count: int, available: int) -> int:
    """Return how many of `count` slots of `size` bytes fit into `available` bytes, with `RESERVED_BYTES` to spare."""
    return max(0, min(count, (available - RESERVED_BYTES) // max(size, 1)))


class Medium(enum.Enum):
    """Where a slot may be made."""

    MEMORY = "memory, and where that has no room the disk"
    DISK = "the disk, whatever room memory has"


@dataclass(frozen=True)
class SlotRequest:
    """Slots to be made: as many as memory has room for, else one on the disk.

    Attributes:
        bytes: of each.
        disk: see `Settings.slot_disk`; `None` for memory alone.
        count: at most.
        reserve_bytes: of memory to leave for another process.
        medium: where they may be made.
    """

    bytes: int
    disk: Path | None
    count: int = 1
    reserve_bytes: int = 0
    medium: Medium = Medium.MEMORY

    def make(self) -> list[Slot]:
        """Make them. Blocks for half a second per GiB of memory.

        Raises:
            NoSpace: not even one fits anywhere.
        """
        made: list[Slot] = []
        refused = ""
        try:
            for _ in range(self._fit_in_memory()):
                made.append(Slot.create(self.bytes))  # noqa: PERF401  what was made counts if the next one fails
        except OSError as err:
            refused = f" ({err.strerror})"
        return made or [self._on_disk(refused)]

    def begin(self) -> tuple[Slot, Generator[int]]:
        """Make one, without waiting for memory.

        Returns:
            The slot, and a generator that allocates it from front to back; an empty one on a disk. See
            `pages.allocating`.

        Raises:
            NoSpace: it fits nowhere.
        """
        if self._fit_in_memory():
            with contextlib.suppress(OSError):
                return Slot.creating(self.bytes)
        return self._on_disk(), (_ for _ in ())

    def _fit_in_memory(self) -> int:
        if self.medium is Medium.DISK:
            return 0
        return how_many_fit(self.bytes, self.count, available_bytes() - self.reserve_bytes)

    def _on_disk(self, refused: str = "") -> Slot:
        needs, free = f"{self.bytes / 1e9:.2f} GB", f"{available_bytes() / 1e9:.2f} GB"
        words = f"a snapshot needs {needs} of memory, {free} are free here{refused}"
        if self.disk is None:
            raise NoSpace(
                f"{words}; use a host (or a cgroup limit) with more memory, or --local DIR with a fast disk, "
                "which then holds it instead"
            )
        try:
            return Slot.create(self.bytes, self.disk)
        except OSError as err:
            raise NoSpace(f"{words}, and the disk at {self.disk} has no room for it either: {err.strerror}") from err


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since it booted, in any container."""
    found = re.search(r"^oom_kill (\d+)$", _read(_ROOT / "proc/vmstat") or "", re.MULTILINE)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Wanted:
    """The slots of a new layout: existing ones, and some that have to be made. Does not know the pool.

    Attributes:
        rank: the one that will own them.
        missing: slots that have to be made, at most; perhaps none.
        kept: indexes of the existing slots.
        substitutes: indexes of the slots to use if none can be made.
    """

    rank: int
    missing: SlotRequest
    kept: tuple[int, ...]
    substitutes: tuple[int, ...]

    def make(self) -> list[Slot]:
        """Make the missing slots, as far as there is room. From any thread; blocks for half a second per GiB.

        Raises:
            NoSpace: there is room for none, and there is no substitute.
        """
        if not self.missing.count:
            return []
        try:
            return self.missing.make()
        except NoSpace:
            if not self.substitutes:
                raise
            return []


class SlotPool:
    """Slots of all ranks, by index. Each belongs to one rank. Ranks do not share layouts, grants or newest slots.

    A slot is *busy* while a tier reads it. The newest sealed slot of a rank is kept until the rank seals another.
    """

    def __init__(self, disk: Path | None = None) -> None:
        """Start empty. `disk` is a directory for a slot that memory has no room for."""
        self._disk = disk
        self._medium = Medium.MEMORY
        self._slots: dict[int, Slot] = {}
        self._rank: dict[int, int] = {}
        self._busy: dict[int, set[str]] = {}
        self._retired: set[int] = set()
        self._next = 0

    def __len__(self) -> int:
        return len(self.usable)

    @property
    def usable(self) -> list[int]:
        """Indexes of the slots of the current layouts."""
        return [index for index in self._slots if index not in self._retired]

    def count(self, rank: int) -> int:
        """Return how many slots the layout of a rank has."""
        return sum(self._rank[index] == rank for index in self.usable)

    def rank_of(self, index: int) -> int:
        """Return the index of the rank that owns the slot."""
        return self._rank[index]

    def _of(self, rank: int) -> set[int]:
        return {index for index, whose in self._rank.items() if whose == rank}

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __contains__(self, index: int) -> bool:
        return index in self._slots

    def add(self, slot: Slot, rank: int = 0) -> int:
        """Take over a slot; return its index, which is not used again soon (indexes wrap only after 250)."""
        while self._next in self._slots:
            self._next = (self._next + 1) % 250
        index, self._next = self._next, (self._next + 1) % 250
        self.put(index, slot, rank)
        return index

    def put(self, index: int, slot: Slot, rank: int = 0) -> None:
        """Take over a slot under the index by which the trainer knows it."""
        self._slots[index], self._rank[index] = slot, rank
        self._busy[index] = set()

    def allocate(self, size: int, count: int, rank: int = 0) -> list[int]:
        """`begin`, `make` and `finish` in one go. Blocks for half a second per GiB. Raises NoSpace."""
        wanted = self.begin(size, count, rank)
        return self.finish(wanted, wanted.make())

    def begin(self, size: int, count: int, rank: int = 0, *, in_memory: int | None = None) -> Wanted:
        """Begin a new layout of a rank. Slots of its old layout are closed as soon as nothing uses them.

        Slots that are large enough already are kept: a resume's slot becomes the first snapshot's.

        Args:
            size: of each.
            count: how many there should be. See `SlotRequest` for how many there will be.
            rank: the one that owns the layout.
            in_memory: how many there may be in memory, at most; with 0 there is one on the disk.
        """
        count = count if in_memory is None else min(count, in_memory or 1)
        its = self._of(rank)
        large = [index for index in self.usable if index in its and self._slots[index].size >= size]
        in_ram = [index for index in large if not self._slots[index].on_disk]
        kept = in_ram[: count if in_memory != 0 else 0]
        self._retired |= its - set(large)
        self.collect()
        substitutes = kept or large[:1]  # a resume may have used the disk, when this was not known
        disk = None if substitutes else self._disk
        medium = self._medium if in_memory != 0 else Medium.DISK
        missing = SlotRequest(size, disk, count - len(kept), medium=medium)
        return Wanted(rank, missing, tuple(kept), tuple(substitutes))

    def finish(self, wanted: Wanted, made: Iterable[Slot]) -> list[int]:
        """Take over the slots that were made; return the layout's indexes. Slots that it does not need are closed."""
        added = [self.add(slot, wanted.rank) for slot in made]
        there = wanted.kept if added else wanted.kept or wanted.substitutes
        indexes = [index for index in there if index in self.usable] + added
        self._retired |= self._of(wanted.rank) - set(indexes)
        self.collect()
        return indexes

    def leave_memory(self) -> dict[int, int]:
        """Move the newest snapshot to the disk, and make slots there from now on. Blocks while the disk writes.

        Only while no trainer is alive. A tier that reads a slot in memory keeps it until it is done.

        Returns:
            The old index, in memory, of each slot of the newest snapshot, mapped to its new one.

        Raises:
            NoSpace: there is no disk, or no room on it. Nothing has changed.
        """
        if self._disk is None:
            raise NoSpace("there is no disk for them; use --local DIR")
        copies = dict[int, Slot]()
        try:
            for index in self.newest():
                if not (old := self._slots[index]).on_disk:
                    (copies[index],) = SlotRequest(old.size, self._disk, medium=Medium.DISK).make()
                    Window(copies[index]).move(old)
        except (NoSpace, OSError) as err:
            for slot in copies.values():
                slot.close()
            if isinstance(err, NoSpace):
                raise
            raise NoSpace(f"the disk at {self._disk} has failed: {err.strerror}") from err
        self._medium = Medium.DISK
        in_memory = [index for index, slot in self._slots.items() if not slot.on_disk]
        moved = {index: self.add(slot, self._rank[index]) for index, slot in copies.items()}
        for index in in_memory:
            self._slots[index].begin()
            self._retired.add(index)
        self.collect()
        return moved

    @property
    def free_bytes(self) -> int:
        """Bytes of slots in memory that nothing uses: they are kept for a new layout, or closed."""
        return sum(slot.size for i, slot in self._slots.items() if not (slot.on_disk or self._busy[i] - {TRAINER}))

    def hold(self, index: int, tier: str) -> None:
        """Keep the slot's content for `tier` (or for a resume) until `release`."""
        self._busy[index].add(tier)

    def release(self, index: int, tier: str) -> None:
        """Drop `tier`'s hold on the slot; close the slot if its layout is old and nothing else uses it."""
        if index in self._busy:
            self._busy[index].discard(tier)
            self.collect()

    def grant(self, rank: int = 0) -> int | None:
        """Return a slot that a rank may fill now: the one with the oldest content. `None` if all are in use."""
        free = [index for index in self.usable if self._rank[index] == rank and not self._busy[index]]
        return min(free, key=lambda index: self._slots[index].sequence, default=None)

    def is_granted(self, index: int) -> bool:
        """Return whether the trainer may begin to write to the slot at any moment: no one else may begin to read it."""
        return TRAINER in self._busy[index]

    def newest(self) -> list[int]:
        """Return the slot that each rank has sealed last, in rank order."""
        newest = {self._rank[index]: index for index in sorted(self.sealed(), key=lambda i: self._slots[i].sequence)}
        return [newest[rank] for rank in sorted(newest)]

    def sequence(self, rank: int = 0) -> int:
        """Return the number of a rank's newest seal in this pool; 0 if there is none."""
        return max((self._slots[index].sequence for index in self.sealed() if self._rank[index] == rank), default=0)

    def sealed(self) -> list[int]:
        """Return every sealed slot, including those of retired layouts."""
        return [index for index, slot in self._slots.items() if slot.state is SlotState.SEALED]

    def collect(self) -> None:
        """Close unused slots of old layouts; the slot that a rank has sealed last stays until it seals another."""
        newest = self.newest()
        for index in [i for i in self._retired if not self._busy[i] and i not in newest]:
            self.close([index])

    def close(self, indexes: Iterable[int] | None = None) -> None:
        """Close the slots of `indexes`; `None` for all."""
        for index in list(self._slots if indexes is None else indexes):
            del self._busy[index], self._rank[index]
            self._retired.discard(index)
            self._slots.pop(index).close()


def _meminfo(name: str) -> int:
    path = _ROOT / "proc/meminfo"
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise NoSpace(f"{path} has no {name}")


def _read(path: Path) -> str | None:
    """Return a small file of the kernel's, stripped; `None` if it is missing or cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None
