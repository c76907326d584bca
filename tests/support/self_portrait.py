"""Prints what a process can see of itself, as JSON: a fork of tests.support.fork_server sees what an interpreter does.

python -m tests.support.self_portrait [--exit CODE | --raise | --kill | --leave FILE]
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path


def portrait() -> dict[str, object]:
    """What there is to see, but for its pid and the time."""
    main = sys.modules["__main__"]
    return {
        "arguments": sys.argv,
        "path": sys.path,
        "directory": str(Path.cwd()),
        "environment": dict(os.environ),
        "shown environment": sorted(shown("environ")),
        "shown command": shown("cmdline"),
        "parent": os.getppid(),
        "group is its own": os.getpgid(0) == os.getpid(),
        "session is its own": os.getsid(0) == os.getpid(),
        "descriptors": sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())[:-1],
        "input": sys.stdin.read(),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "handlers": {number: str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()},
        "threads": threading.active_count(),
        "limit of descriptors": resource.getrlimit(resource.RLIMIT_NOFILE),
        "file": main.__file__,
        "package": main.__package__,
        "name": main.__spec__.name if main.__spec__ else None,
        "temporary files": tempfile.gettempdir(),
        "unbuffered": os.environ.get("PYTHONUNBUFFERED"),
    }


def shown(name: str) -> list[str]:
    """What /proc tells others."""
    return (Path("/proc/self") / name).read_bytes().rstrip(b"\0").decode().split("\0")


if __name__ == "__main__":
    print(json.dumps(portrait()), flush=True)
    if "--exit" in sys.argv:
        sys.exit(int(sys.argv[-1]))
    if "--raise" in sys.argv:
        raise RuntimeError("as it was told")
    if "--leave" in sys.argv:  # with words on their way to a file, others in a function, and a last one
        left_open = Path(sys.argv[-1]).open("w")  # noqa: SIM115
        left_open.write("written, not flushed")
        atexit.register(print, "registered")
        sys.exit("the last word")
    if "--kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
