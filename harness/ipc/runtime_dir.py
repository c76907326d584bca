"""The private directory of one run's agent on this host, with its lock, its socket and its log.

Owns those names, the check of the directory's owner and permissions, and the lock. Another user of this host can put
nothing in the directory's place (ADR 0020).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RuntimeDir:
    """The private directory of one run's agent on this host. Its path is short: socket paths have at most 107 bytes.

    Attributes:
        directory: 0700, one per (user, store, run, rank's node).
    """

    directory: Path

    @classmethod
    def of(cls, runtime_dir: Path, store_url: str, run: str) -> RuntimeDir:
        """Return the directory for `run` in `store_url`; two stores may hold runs of the same name."""
        name = hashlib.blake2b(os.fsencode(f"{store_url}\0{run}"), digest_size=6).hexdigest()
        return cls(runtime_dir / name)

    @property
    def socket(self) -> Path:
        """Path of the agent's socket."""
        return self.directory / "agent.sock"

    @property
    def log(self) -> Path:
        """Path of the log: the output of a detached agent."""
        return self.directory / "agent.log"

    @property
    def outcome(self) -> Path:
        """Path of the file in which the last agent that ended here has recorded its outcome."""
        return self.directory / "outcome.json"

    def prepare(self) -> None:
        """Create the directory, private to this user, and check that no other user can put another one in its place.

        Raises:
            PermissionError: it or its parent belongs to another user, is a link, or is writable by others.
            OSError: it cannot be created.
        """
        parent = self.directory.parent
        for missing in reversed([path for path in (parent, *parent.parents) if not path.exists()]):
            with contextlib.suppress(FileExistsError):
                missing.mkdir(mode=0o700)
        with _safe_directory(parent, shared=True) as above:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.directory.name, 0o700, dir_fd=above)
            with _safe_directory(self.directory, shared=False):
                pass

    def try_lock(self) -> int | None:
        """Take the run's lock on this host. Return a descriptor to keep open, or `None` if another agent holds it."""
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def holder(self) -> str:
        """Return the process that holds the lock, as words for an error; empty if that cannot be found out."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            found = (self.directory / "lock").stat()
            where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
            for line in Path("/proc/locks").read_text().splitlines():
                words = line.split()
                if words[1] == "FLOCK" and words[5] == where:
                    return f": process {words[4]}"
        return ""

    def identity(self, lock: int) -> str:
        """Return a name for the lock, unique among hosts and boots. Its holder knows that no other holder lives."""
        found = os.fstat(lock)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{found.st_dev:x}-{found.st_ino:x}"


@contextlib.contextmanager
def _safe_directory(path: Path, *, shared: bool) -> Iterator[int]:
    """Open a directory in which no other user can replace our files.

    Args:
        path: its name. It must not be a link.
        shared: whether it may belong to root, as /run does, or be writable by all users, as /tmp is, where the sticky
            bit protects each user's files from the others.

    Raises:
        PermissionError: it is not such a directory.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as err:
        raise PermissionError(f"{path} is a link, or not a directory") from err
    try:
        found = os.fstat(fd)
        if found.st_uid not in ((os.geteuid(), 0) if shared else (os.geteuid(),)):
            raise PermissionError(f"{path} belongs to another user (uid {found.st_uid})")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (shared and found.st_mode & stat.S_ISVTX):
            raise PermissionError(f"others may write to {path}: make it yours alone with chmod go-w {path}")
        yield fd
    finally:
        os.close(fd)
