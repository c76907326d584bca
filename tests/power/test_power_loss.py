"""The power fails while a run is writing: the disk holds complete snapshots, and every one that was promised.

The store lies on ext4 on a loop device (`disk.py`). Copies of its image, each a point in time, are mounted as by a
machine that starts again, and judged. The moments:

- *every* state that the disk has between two system calls of the agent, and between the two halves of an fdatasync: the
  agent stops itself there (`stopping_run.py`);
- states that are caught while it runs freely. Which they are is chance, the verdict is not.

What this proves: nothing is visible before it is complete, and nothing is `Published` before it is on the disk, with
the order of system calls that we use and the ext4 of this kernel. That a mistake would be noticed is shown by agents
that forget to sync something.
What it does not: a disk that loses what it acknowledged, or ignores a flush, and file systems other than ext4. The
order of writes between two flushes, which a volatile cache may change, is left to ext4's barriers and checksums.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloud.directory.store import DirectoryStore
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from harness.snapshots import fetch, records
from tests.power.disk import Disk, NoDisk, in_memory, powered_up
from tests.support.needs import lacking
from tests.support.tiny_trainer import STATE_BYTES, advance, digest
from tests.support.world import World

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
RUN = "power"
KEYS = RunKeys(RUN)
STEPS = 40
FOREVER = 10**9
RESUMES = 8
PASSING = 20
PATIENCE = 1000  # copies, of some milliseconds each
KEEP = 2
PUBLISHED = re.compile(r"^harness: .* Published tier=remote snapshot=(\S+) .*\n", re.MULTILINE)
RESTORED = re.compile(r"^harness: .* Restored snapshot=(\S+) ", re.MULTILINE)


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory, and short: sockets live in it, and their paths are limited to 107 bytes."""
    with new_directory() as made:
        yield made


@pytest.fixture
def disk(directory: Path) -> Iterator[Disk]:
    """A disk for the store."""
    with new_disk(directory) as made:
        yield made


@pytest.fixture(scope="module")
def every_cut() -> Iterator[list[Cut]]:
    """A whole run, cut at each of its stops."""
    with new_directory() as made, new_disk(made) as disk:
        with Run(made, disk.root / "store", stop="calls") as run:
            cuts = list(cuts_at_stops(run, disk))
            assert run.exit_code == 0
        yield cuts


@contextlib.contextmanager
def new_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as name, skipped_without_disks(), in_memory(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def new_disk(directory: Path) -> Iterator[Disk]:
    with skipped_without_disks(), Disk.made(directory) as made:
        yield made


@contextlib.contextmanager
def skipped_without_disks() -> Iterator[None]:
    try:
        yield
    except NoDisk as err:
        lacking("loop-devices", str(err))


@dataclass(frozen=True)
class Cut:
    """The disk at one moment.

    Attributes:
        image: a copy of it.
        promised: snapshots that had been `Published` before, and that retention does not delete.
    """

    image: Path
    promised: frozenset[SnapshotId]


class Run:
    """A `harness run` of the tiny trainer with its store on a disk; killed at the end of `with`, trainer and all."""

    def __init__(self, directory: Path, store: Path, *, stop: str, forget: str = "nothing", steps: int = STEPS) -> None:
        self.log = directory / "log.txt"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.power.stopping_run", "--stop", stop, "--forget", forget),
                    *options(directory, store),
                    *trainer(directory, steps=steps, step_s=0.01),
                ],
                cwd=ROOT,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def over(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int:
        """Of a run that is over."""
        return self._process.wait()

    def stopped(self) -> bool:
        """Wait until it stops; False if it has ended instead."""
        found = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_code == os.CLD_STOPPED

    def go_on(self) -> None:
        """Continue a stopped run."""
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # WNOWAIT above left it to be taken
        os.killpg(self._process.pid, signal.SIGCONT)

    def published(self) -> list[SnapshotId]:
        """What it has promised so far, oldest first."""
        return [SnapshotId.parse(name) for name in PUBLISHED.findall(self.log.read_text())]


def options(directory: Path, store: Path) -> list[str]:
    return [
        *("--store", str(store), "--run", RUN, "--runtime-dir", str(directory / "run"), "--metadata", "off"),
        *("--every-s", "1000", "--keep-last", str(KEEP)),
        "--",
    ]


def trainer(directory: Path, *, steps: int, step_s: float) -> list[str]:
    return [
        *(sys.executable, "-m", "tests.support.tiny_trainer", "--steps", str(steps), "--step-s", str(step_s)),
        *("--curve", str(directory / "curve.txt"), "--final", str(directory / "final.txt")),
        *("--frozen-bytes", "100000"),  # a shard that every snapshot but the first has as a second name
    ]


def cuts_at_stops(run: Run, disk: Disk) -> Iterator[Cut]:
    """Each state of the disk, and each new promise, at the stops of `run`; nothing twice. Ends with the run."""
    last: tuple[int, frozenset[SnapshotId]] | None = None
    for number in itertools.count():
        if not run.stopped():
            return
        promised = frozenset(run.published()[-KEEP:])
        if (disk.writes, promised) != last:
            image = disk.image.with_name(f"cut-{number}.img")
            # The agent is stopped; what it had asked for before, or the kernel thinks of just now, comes to an end.
            writes = next(found for _ in range(PATIENCE) if (found := disk.copy(image)) is not None)
            last = (writes, promised)
            yield Cut(image, promised)
        run.go_on()


def cuts_in_passing(run: Run, disk: Disk) -> Iterator[Cut]:
    """States of the disk while `run` goes on, those that can be caught; nothing twice. Ends with the run."""
    last: int | None = None
    for number in itertools.count():
        if run.over:
            return
        before = run.published()
        image = disk.image.with_name(f"cut-{number}.img")
        if disk.writes != last and (writes := disk.copy(image)) is not None:
            # What was promised before the copy may be retired in it, if enough was promised since.
            yield Cut(image, frozenset(before) & frozenset(run.published()[-KEEP:]))
            last = writes


def judge(store: Path, promised: frozenset[SnapshotId]) -> list[str]:
    """What is wrong with a store after a power cut; nothing, if all is well."""
    try:
        objects = DirectoryStore(store)
        deadline = Deadline.never()
        found = {KEYS.parse_commit(info.key) for info in objects.list(KEYS.commits, deadline=deadline)}
    except CloudError as err:
        return [str(err)]
    wrong = [f"{snapshot} was promised and is gone" for snapshot in sorted(promised - found)]
    for snapshot in found:
        if snapshot is None:
            wrong.append("a stranger among the commits")
            continue
        try:
            manifest = records.read_manifest(objects, KEYS, snapshot, deadline)
            fetch.verify(objects, KEYS, manifest, deadline)
        except (SnapshotCorrupt, CloudError) as err:
            wrong.append(f"{snapshot} is visible and not complete: {err}")
    return wrong


def resume_and_finish(store: Path, directory: Path) -> SnapshotId | None:
    """The same command on the machine that started again ends where it must. What it went on from."""
    world = World(directory)
    try:
        done = world.start(
            *(sys.executable, "-m", "tests.support.harness_run"),
            *("--handover-s", "0.2", "--await-s", "0.1"),  # nobody knows that the machine before the cut was this one
            *options(directory, store),
            *trainer(directory, steps=STEPS, step_s=0),
        )
        assert done.wait() == 0, done.stderr
    finally:
        world.close()
    assert (directory / "final.txt").read_text() == final_digest()
    restored = RESTORED.search(done.stderr)
    return SnapshotId.parse(restored[1]) if restored else None


def visible(store: Path) -> list[SnapshotId]:
    found = DirectoryStore(store).list(KEYS.commits, deadline=Deadline.never())
    return [snapshot for info in found if (snapshot := KEYS.parse_commit(info.key)) is not None]


def is_over(store: Path) -> bool:
    """Whether the run is on record as finished."""
    found = DirectoryStore(store).list(KEYS.generations, deadline=Deadline.never())
    return any(KEYS.parse_done(info.key) is not None for info in found)


def final_digest() -> str:
    state = bytes(STATE_BYTES)
    for step in range(STEPS):
        state = advance(state, step)
    return digest(state)


def test_a_power_cut_between_any_two_system_calls_leaves_complete_snapshots_and_keeps_every_promise(
    every_cut: list[Cut],
) -> None:
    for cut in every_cut:
        with powered_up(cut.image) as root:
            assert judge(root / "store", cut.promised) == []

    promises = {cut.promised for cut in every_cut}
    assert len(promises) >= 4  # none, one, two, and two after something was retired
    assert len(every_cut) > 5 * len(promises)


def test_a_run_that_lost_power_goes_on_from_the_newest_snapshot_and_ends_where_an_unbroken_one_does(
    every_cut: list[Cut], directory: Path
) -> None:
    started_over = resumed = 0
    for cut in every_cut[:: len(every_cut) // RESUMES]:
        with powered_up(cut.image) as root:
            store = root / "store"
            if is_over(store):
                assert SnapshotId(1, STEPS) in visible(store)
                continue
            newest = max(visible(store), default=None)
            restored = resume_and_finish(store, directory)
            if restored is None:
                assert newest is None
                started_over += 1
            else:  # a snapshot that only lacked its manifest is finished by whoever comes next
                assert newest is None or restored >= newest
                resumed += 1

    assert started_over
    assert resumed >= 3


@pytest.mark.sample
def test_a_power_cut_while_the_run_goes_on_leaves_complete_snapshots_and_keeps_every_promise(
    disk: Disk, directory: Path
) -> None:
    with Run(directory, disk.root / "store", stop="never", steps=FOREVER) as run:
        cuts = list(itertools.islice(cuts_in_passing(run, disk), PASSING))

    assert len(cuts) == PASSING
    for cut in cuts:
        with powered_up(cut.image) as root:
            assert judge(root / "store", cut.promised) == []


@pytest.mark.parametrize("forget", ["files", "directories", "everything"])
def test_a_store_that_forgets_to_sync_is_found_out(disk: Disk, directory: Path, forget: str) -> None:
    with Run(directory, disk.root / "store", stop="published", forget=forget) as run:
        cut = next(cuts_at_stops(run, disk))
    with powered_up(cut.image) as root:
        wrong = judge(root / "store", cut.promised)

    assert wrong
