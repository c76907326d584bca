"""What the kernel tells of processes: memory, CPU, and whether one does anything at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

QUIET_S = 0.3
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE_MB, _IDLE_CPU_S = 1.0, 0.02


def own_mb(pid: int) -> float:
    """Memory that is the process's own, in MB: neither shared nor a file's."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


def cpu_s(pid: int) -> float:
    """CPU seconds that the process has used, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def machine_cpu_s() -> float:
    """CPU seconds that the whole machine has been busy: kernel threads, which write files back, are nobody's."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _idle, _wait, irq, softirq = map(int, fields[1:8])
    return (user + nice + system + irq + softirq) * _TICK_S


class Quiet:
    """Tells when a process has done nothing worth mentioning for a while."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._done()
        self._since = self._looked_at = time.monotonic()

    def __call__(self) -> bool:
        """Whether it is; to be asked again and again."""
        now = time.monotonic()
        if now - self._looked_at > QUIET_S / 10:
            self._looked_at = now
            done = self._done()
            if any(after > before for after, before in zip(done, self._before, strict=True)):
                self._before, self._since = (done[0] + _IDLE_MB, done[1] + _IDLE_CPU_S), now
        return now - self._since > QUIET_S

    def _done(self) -> tuple[float, float]:
        lines = Path(f"/proc/{self._pid}/io").read_text().splitlines()
        counts = {name: int(count) for name, count in (line.split(": ") for line in lines)}
        moved = sum(counts[name] for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
        return moved / 1e6, cpu_s(self._pid)
