"""A disk that promises room, takes bytes, and fails when it has to keep them.

Owns the mounts: ext4 on a loop device whose image has no room to grow, which ext4 does not know. They are unmounted
lazily, so that nothing stays behind where a failed test still holds a file, or the kernel still lets the device go.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.needs import lacking

IMAGE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class FailingDisk:
    """A disk that keeps so much and no more. `root` is where it is mounted."""

    root: Path
    _memory: Path

    def fail(self) -> None:
        """From now on it keeps nothing that it does not keep already."""
        _call("sync", "--file-system", str(self.root))
        with contextlib.suppress(OSError), (self._memory / "rest").open("wb", buffering=0) as rest:
            while True:
                rest.write(bytes(4096))


@contextlib.contextmanager
def failing_disk(directory: Path, keeps_bytes: int) -> Iterator[FailingDisk]:
    """One of about `keeps_bytes`, mounted below the empty `directory`. Skips, loudly, where nobody can mount."""
    if os.geteuid() != 0:
        lacking("loop-devices", "you are not root")
    with contextlib.ExitStack() as stack:
        try:
            memory, mounted = directory / "memory", directory / "mounted"
            memory.mkdir()
            mounted.mkdir()
            _call("mount", "-t", "tmpfs", "-o", f"size={keeps_bytes}", "tmpfs", str(memory))
            stack.callback(_call, "umount", "--lazy", str(memory))
            with (memory / "image").open("wb") as image:
                image.truncate(IMAGE_BYTES)
            _call("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(memory / "image"))
            device = _call("losetup", "--find", "--show", str(memory / "image")).strip()
            stack.callback(_call, "losetup", "--detach", device)
            _one_page_a_request(Path(device).name)
            _call("mount", device, str(mounted))
            stack.callback(_call, "umount", "--lazy", str(mounted))
        except (OSError, subprocess.CalledProcessError) as err:
            lacking("loop-devices", str(err))
        yield FailingDisk(mounted, memory)


def _one_page_a_request(device: str) -> None:
    """Let no request be kept in part: the loop driver takes a short write to its image for a whole one.

    A request that begins in a page that the image has, and goes on in pages that it has no room for, would be called
    written, and nobody would be told.
    """
    limit = Path(f"/sys/block/{device}/queue/max_sectors_kb")
    limit.write_text(str(os.sysconf("SC_PAGE_SIZE") // 1024))


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
