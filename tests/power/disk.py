"""A disk that can lose power: ext4 on a loop device, whose image is copied as a power cut would leave it.

Owns the image file, the loop device and the mounts; knows nothing of what lies on it.

- The disk gets what `fsync` asks for, and little else: `commit=600` switches off ext4's own commits every 5 s,
  `noauto_da_alloc` its kindness to those who rename without `fsync`, and dirty pages wait 30 s.
- The loop device writes through the page cache of the image file (no direct I/O), which is where `copy` reads: so a
  copy holds exactly what ext4 has submitted, no more and no less. Direct I/O would only make that depend on
  invalidation.
- A copy is a *point in time*: it counts only if the device wrote nothing while it was made. A mixture of two points in
  time is what no power cut leaves behind, and would accuse the innocent.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

IMAGE_BYTES = 160 * 1024 * 1024  # sparse: the agent wants 64 MiB to spare, and writes little
_UNFORGIVING = "commit=600,noauto_da_alloc,noinit_itable"


class NoDisk(Exception):
    """This machine, or this user, has no loop mounts; says why."""


@contextlib.contextmanager
def in_memory(directory: Path) -> Iterator[None]:
    """Make `directory` one of memory, so that no test waits for the host's own disk. Raises NoDisk."""
    if os.geteuid() != 0:
        raise NoDisk("you are not root")
    try:
        _call("mount", "-t", "tmpfs", "-o", "size=2g,mode=0700", "tmpfs", str(directory))
    except (OSError, subprocess.CalledProcessError) as err:
        raise NoDisk(_words(err)) from err
    try:
        yield
    finally:
        while list(_devices_of(directory)):  # the kernel detaches a device once nobody looks at it any more
            threading.Event().wait(0.005)
        _call("umount", str(directory))


class Disk:
    """An ext4 file system on a loop device of its own, mounted at `root`.

    Attributes:
        image: the file that the loop device writes.
        root: where it is mounted.
    """

    def __init__(self, image: Path, root: Path, device: str) -> None:
        self.image, self.root = image, root
        self._sys = Path("/sys/block") / Path(device).name

    @classmethod
    @contextlib.contextmanager
    def made(cls, directory: Path) -> Iterator[Disk]:
        """A new empty disk below `directory`. Raises NoDisk."""
        image = directory / "disk.img"
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        try:
            _call("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
            device = _call("losetup", "--find", "--show", "--direct-io=off", str(image))
        except (OSError, subprocess.CalledProcessError) as err:
            raise NoDisk(_words(err)) from err
        try:
            root = directory / "mounted"
            root.mkdir()
            try:
                _call("mount", "-o", _UNFORGIVING, device, str(root))
            except subprocess.CalledProcessError as err:
                raise NoDisk(_words(err)) from err
            try:
                yield cls(image, root, device)
            finally:
                _call("umount", str(root))
        finally:
            _call("losetup", "--detach", device)

    @property
    def writes(self) -> int:
        """Write requests that the device has completed."""
        return int((self._sys / "stat").read_text().split()[4])

    def is_writing(self) -> bool:
        """Whether a write is on its way. A flush is not a write: it changes nothing that a copy would hold."""
        return (self._sys / "inflight").read_text().split()[1] != "0"

    def copy(self, to: Path) -> int | None:
        """What the disk would hold if the power failed now; `None` if it wrote meanwhile, and `to` is worthless.

        Returns:
            `writes` at that moment, which names the state: equal numbers, equal copies.
        """
        before = self.writes
        if self.is_writing():
            return None
        _copy_sparse(self.image, to)
        return before if not self.is_writing() and self.writes == before else None


@contextlib.contextmanager
def powered_up(image: Path) -> Iterator[Path]:
    """A copy, mounted read-write on a machine that starts again: ext4 replays its journal. Where it is mounted.

    Raises:
        CalledProcessError: it cannot be mounted, or `e2fsck` finds it damaged afterwards.
    """
    root = image.with_suffix(".mounted")
    root.mkdir()
    _call("mount", "-o", "loop", str(image), str(root))
    try:
        yield root
    finally:
        _call("umount", str(root))
        root.rmdir()
    _call("e2fsck", "-f", "-n", str(image))


def _copy_sparse(image: Path, to: Path) -> None:
    """`cp --sparse=always`, without the milliseconds that a process takes: the device does not wait for us."""
    with image.open("rb", buffering=0) as source, to.open("wb", buffering=0) as target:
        target.truncate(IMAGE_BYTES)
        end = 0
        while True:
            try:
                start = os.lseek(source.fileno(), end, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            end = os.lseek(source.fileno(), start, os.SEEK_HOLE)
            os.pwrite(target.fileno(), os.pread(source.fileno(), end - start, start), start)


def _devices_of(directory: Path) -> Iterator[str]:
    """The loop devices whose image lies below `directory`."""
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it is detached just now
            if file.read_text().startswith(f"{directory}/"):
                yield file.parts[3]


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _words(err: OSError | subprocess.CalledProcessError) -> str:
    return str(err.stderr or err).strip() if isinstance(err, subprocess.CalledProcessError) else str(err)
