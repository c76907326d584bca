"""The power fails while a run is writing: what the disk holds then is complete snapshots, and every one that was promised.

The store lies on ext4 on a loop device (`disk.py`). Copies of its image, each a point in time, are mounted as by a
machine that starts again, and judged. The moments:

- *every* state that the disk is in between two system calls of the agent: it stops itself after each (`stopping_run.py`);
- states within a single `fsync` as well, from copies made while it runs freely. Which of them is up to chance, and the
  verdict is not.

What this proves: nothing is visible before it is complete, and nothing is `Published` before it is on the disk, with the
order of system calls that we use and the ext4 of this kernel. That it would notice is shown by three agents that
forget to sync something.
What it does not: a disk that loses what it acknowledged, or ignores a flush, and file systems that are not ext4. A disk
with a volatile cache, which reorders writes between two flushes, is left to ext4's own barriers and journal sums.
"""

from __future__ import annotations

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

from cloud.directory import DirectoryStore
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.agent import commit
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt
from tests.power.disk import Disk, NoDisk, powered_up
from tests.support.tiny_trainer import STATE_BYTES, advance, digest

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
RUN = "power"
KEYS = RunKeys(RUN)
STEPS = 30
KEEP = 2
PUBLISHED = re.compile(r"^harness: .* Published tier=remote snapshot=(\S+) .*\n", re.MULTILINE)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short one: sockets live in it, and their paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h") as name:
        yield Path(name)


@pytest.fixture(params=["ordered"])
def disk(directory: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """A disk for the store, where there can be one."""
    try:
        with Disk.made(directory, data=request.param) as made:
            yield made
    except NoDisk as err:
        pytest.skip(f"POWER LOSS IS NOT TESTED HERE, it needs root and a loop device: {err}")


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

    def __init__(self, directory: Path, store: Path, *, stop: str, forget: str = "nothing") -> None:
        self.log = directory / "log.txt"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.power.stopping_run", "--stop", stop, "--forget", forget),
                    *options(directory, store),
                    *trainer(directory, step_s=0.01),
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
        self._process.send_signal(signal.SIGCONT)

    def published(self) -> list[SnapshotId]:
        """What it has promised so far, oldest first."""
        return [SnapshotId.parse(name) for name in PUBLISHED.findall(self.log.read_text())]


def options(directory: Path, store: Path) -> list[str]:
    return [
        *("--store", str(store), "--run", RUN, "--runtime-dir", str(directory / "run"), "--metadata", "off"),
        *("--every-s", "1000", "--keep-last", str(KEEP)),
        "--",
    ]


def trainer(directory: Path, *, step_s: float) -> list[str]:
    return [
        *(sys.executable, "-m", "tests.support.tiny_trainer", "--steps", str(STEPS), "--step-s", str(step_s)),
        *("--curve", str(directory / "curve.txt"), "--final", str(directory / "final.txt")),
    ]


def cuts_at_stops(run: Run, disk: Disk, directory: Path) -> Iterator[Cut]:
    """Each state of the disk, and each new promise, at the stops of `run`; nothing twice. Ends with the run."""
    last: tuple[int, frozenset[SnapshotId]] | None = None
    while run.stopped():
        promised = frozenset(run.published()[-KEEP:])
        if (disk.writes, promised) != last:
            image = directory / "cut.img"
            writes = disk.copy(image)
            assert writes is not None, "somebody wrote, and it was not the agent: it is stopped"
            last = (writes, promised)
            yield Cut(image, promised)
        run.go_on()


def cuts_in_passing(run: Run, disk: Disk, directory: Path) -> Iterator[Cut]:
    """States of the disk while `run` goes on, as many as can be caught. Ends with the run."""
    last, number = -1, 0
    while not run.over:
        if disk.writes == last:
            continue
        before = run.published()
        image = directory / f"cut-{number}.img"
        if (writes := disk.copy(image)) is None:
            continue
        # A snapshot that was promised before the copy may be retired in it if enough newer ones are promised after it.
        yield Cut(image, frozenset(before) & frozenset(run.published()[-KEEP:]))
        last, number = writes, number + 1


def judge(store: Path, promised: frozenset[SnapshotId]) -> list[str]:
    """What is wrong with a store after a power cut; nothing, if all is well."""
    try:
        objects = DirectoryStore(store)
        deadline = Deadline.after(60.0)
        visible = {KEYS.parse_commit(info.key) for info in objects.list(KEYS.commits, deadline=deadline)}
    except CloudError as err:
        return [str(err)]
    wrong = [f"{snapshot} was promised and is gone" for snapshot in sorted(promised - visible)]
    for snapshot in visible:
        if snapshot is None:
            wrong.append("a stranger among the commits")
            continue
        try:
            manifest = commit.read_manifest(objects, KEYS, snapshot, deadline)
            commit.verify(objects, KEYS, manifest, deadline)
        except (SnapshotCorrupt, CloudError) as err:
            wrong.append(f"{snapshot} is visible and not complete: {err}")
    return wrong


def newest(store: Path) -> SnapshotId | None:
    found = DirectoryStore(store).list(KEYS.commits, deadline=Deadline.after(60.0))
    return max((snapshot for info in found if (snapshot := KEYS.parse_commit(info.key))), default=None)


def is_finished(store: Path) -> bool:
    found = DirectoryStore(store).list(KEYS.generations, deadline=Deadline.after(60.0))
    return any(KEYS.parse_done(info.key) for info in found)


def resume_and_finish(store: Path, directory: Path) -> None:
    """The same command on the machine that started again: goes on from the newest snapshot, and ends where it must."""
    expected = newest(store)
    (directory / "final.txt").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.harness_run", *options(directory, store), *trainer(directory, step_s=0)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (directory / "final.txt").read_text() == final_digest()
    if expected is None:
        assert " NothingToResume " in done.stderr
    else:
        assert f" Restored snapshot={expected} " in done.stderr


def final_digest() -> str:
    state = bytes(STATE_BYTES)
    for step in range(STEPS):
        state = advance(state, step)
    return digest(state)


def test_a_power_cut_between_any_two_system_calls_leaves_complete_snapshots_and_keeps_every_promise(
    disk: Disk, directory: Path
) -> None:
    promises: set[frozenset[SnapshotId]] = set()
    cuts = 0
    with Run(directory, disk.root / "store", stop="calls") as run:
        for cut in cuts_at_stops(run, disk, directory):
            with powered_up(cut.image) as root:
                assert judge(root / "store", cut.promised) == []
            promises.add(cut.promised)
            cuts += 1
        assert run.exit_code == 0
    # The first promise, at least two in which a retention has deleted something, and many states for each.
    assert len(promises) >= 4
    assert cuts > 10 * len(promises)


def test_a_run_that_lost_power_goes_on_from_the_newest_snapshot_and_ends_where_an_unbroken_one_does(
    disk: Disk, directory: Path
) -> None:
    with Run(directory, disk.root / "store", stop="never") as run:
        cuts = list(cuts_in_passing(run, disk, directory))
        assert run.exit_code == 0
    assert len(cuts) >= 5
    for number, cut in enumerate(cuts):
        with powered_up(cut.image) as root:
            store = root / "store"
            assert judge(store, cut.promised) == []
            if is_finished(store):
                assert newest(store) == SnapshotId(1, STEPS)
            elif number % (len(cuts) // 5) == 0:
                resume_and_finish(store, directory)


@pytest.mark.parametrize("forget", ["files", "directories", "everything"])
def test_a_store_that_forgets_to_sync_is_found_out(disk: Disk, directory: Path, forget: str) -> None:
    with Run(directory, disk.root / "store", stop="published", forget=forget) as run:
        cut = next(cuts_at_stops(run, disk, directory))
        with powered_up(cut.image) as root:
            wrong = judge(root / "store", cut.promised)

    assert wrong
