"""Where the agent of one run is met on this host: a private directory with its lock, its socket and its log.

Owns those names, who may have the directory, and who has the lock. Another user of this host can put nothing in its
place (ADR 0020).
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
    """Where the agent of one run lives on this host: a short private directory, since socket paths end at 107 bytes.

    Attributes:
        directory: 0700, one per (user, store, run, rank's node).
    """

    directory: Path

    @classmethod
    def of(cls, runtime_dir: Path, store_url: str, run: str) -> RuntimeDir:
        """The place of `run` in `store_url`; two stores may hold runs of one name."""
        name = hashlib.blake2b(os.fsencode(f"{store_url}\0{run}"), digest_size=6).hexdigest()
        return cls(runtime_dir / name)

    @property
    def socket(self) -> Path:
        """The agent's address."""
        return self.directory / "agent.sock"

    @property
    def log(self) -> Path:
        """What a detached agent prints."""
        return self.directory / "agent.log"

    @property
    def outcome(self) -> Path:
        """What the last agent that ended here has come to."""
        return self.directory / "outcome.json"

    def prepare(self) -> None:
        """Create the directory, private to this user, and see that nobody else can put another one in its place.

        Raises:
            PermissionError: it, or the one that it is in, is another user's, or a link, or others may write there.
            OSError: it cannot be made.
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
        """The run's lock on this host as a descriptor to keep open, or `None` if another agent holds it."""
        fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def holder(self) -> str:
        """Who has the lock, in words for an error; empty if that cannot be seen."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            found = (self.directory / "lock").stat()
            where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
            for line in Path("/proc/locks").read_text().splitlines():
                words = line.split()
                if words[1] == "FLOCK" and words[5] == where:
                    return f": process {words[4]}"
        return ""

    def identity(self, lock: int) -> str:
        """Names the lock that `try_lock` gave, on any host and boot: who holds it knows that no other holder lives."""
        found = os.fstat(lock)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{found.st_dev:x}-{found.st_ino:x}"


@contextlib.contextmanager
def _safe_directory(path: Path, *, shared: bool) -> Iterator[int]:
    """A directory, open, in which no other user can replace what is ours.

    Args:
        path: its name. It must be no link.
        shared: whether it may be the system's own, as /run is; or anybody's to make files in, as /tmp is, where the
            sticky bit keeps each user's from the others.

    Raises:
        PermissionError: it is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as err:
        raise PermissionError(f"{path} is a link, or no directory") from err
    try:
        found = os.fstat(fd)
        if found.st_uid not in ((os.geteuid(), 0) if shared else (os.geteuid(),)):
            raise PermissionError(f"{path} belongs to another user (uid {found.st_uid})")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (shared and found.st_mode & stat.S_ISVTX):
            raise PermissionError(f"others may write to {path}: make it yours alone with chmod go-w {path}")
        yield fd
    finally:
        os.close(fd)
