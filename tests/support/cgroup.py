"""A real limit on memory, for a command and all that it starts."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from tests.support.needs import lacking

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[list[str]]:
    """What to put before a command, so that it and its children have `size` bytes of memory in all.

    Skips, loudly, where this process may make no group of its own.
    """
    name = f"harness-test-{secrets.token_hex(4)}"
    for base, limit in ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max")):
        group = base / name
        try:
            group.mkdir()
            (group / limit).write_text(str(size))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        break
    else:
        lacking("cgroup")
    try:
        yield ["/bin/sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "limited"]
    finally:
        for line in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), 9)
        with contextlib.suppress(OSError):  # the kernel has not let go of the last process yet; an empty group is cheap
            group.rmdir()
