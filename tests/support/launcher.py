"""What torchrun does with the ranks of one machine, without torch: starts them, ends all when one fails, starts again.

    python -m tests.support.launcher RANKS [--max-restarts N] -- COMMAND…

Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RESTART_COUNT and LAUNCHER_PID. When one
ends with another code than 0, the others get SIGTERM, and SIGKILL after TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds. A
SIGTERM to the launcher goes to all ranks, likewise. The exit code is 0 or 1. Killed by SIGKILL, it leaves its ranks
alone, as torchrun does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

LOOK_S = 0.02


class Told(Exception):
    """SIGTERM to the launcher."""


def start(ranks: int, command: Sequence[str], restarts: int) -> list[subprocess.Popen[bytes]]:
    """Start all ranks."""
    found = []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        names |= {"TORCHELASTIC_RESTART_COUNT": restarts, "LAUNCHER_PID": os.getpid()}
        found.append(
            subprocess.Popen(command, env={**os.environ, **{name: str(value) for name, value in names.items()}})
        )
    return found


def watch(ranks: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Wait until all have ended well, or one has not. Whether all have."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            return False
        if None not in codes:
            return True
        threading.Event().wait(LOOK_S)


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that live."""
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGTERM)
    looks = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) / LOOK_S
    while any(rank.poll() is None for rank in ranks) and looks > 0:
        threading.Event().wait(LOOK_S)
        looks -= 1
    for rank in ranks:
        rank.kill()
        rank.wait()


def main(arguments: Sequence[str]) -> int:
    """Run; the exit code."""
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    most = int(options[2]) if "--max-restarts" in options else 0

    def told(_signum: int, _frame: object) -> None:
        raise Told

    signal.signal(signal.SIGTERM, told)
    for restarts in range(most + 1):
        ranks = start(int(options[0]), command, restarts)
        try:
            if watch(ranks):
                return 0
            end(ranks)
        except Told:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end(ranks)
            break
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
