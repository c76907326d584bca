"""A machine of its own whose first process is systemd: in namespaces, on an overlay of this machine's files.

Owns the box's boot and its end: it is powered off from inside, or lost. Its files are a `Machine`'s root over those of
this machine; its network, and so its AWS, are this machine's. What it writes is gone with it, but for its logs.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.node.machine import ROOT, Machine
from tests.support.process import Process

SYSTEMD = Path("/lib/systemd/systemd")
POWERED_OFF = -signal.SIGINT  # what pid_namespaces(7) makes of reboot(RB_POWER_OFF)
CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
TARGET = "box.target"

# A service with default dependencies would start this machine's own services, too.
ALONE = "[Unit]\nDefaultDependencies=no\n"

ENTER = """
set -e
mkdir "$cgroup"
echo $$ >"$cgroup/cgroup.procs"
exec unshare --mount --pid --fork --cgroup --uts --ipc --kill-child bash -ec "$boot"
"""

BOOT = """
mount --make-rprivate /
mount -t tmpfs tmpfs "$box"
mkdir "$box/upper" "$box/work" "$box/root"
cp -a "$files/." "$box/upper"
mount -t overlay overlay -o "lowerdir=/,upperdir=$box/upper,workdir=$box/work" "$box/root"
cd "$box/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs dev
for name in null zero full random urandom; do touch "dev/$name"; mount --bind "/dev/$name" "dev/$name"; done
mkdir dev/shm
ln -s /proc/self/fd dev/fd
touch dev/console
mount --bind "$console" dev/console
mkdir -p var/log/harness
mount --bind "$logs" var/log/harness
while IFS= read -r path; do
    mkdir -p ".$path"
    mount --rbind "$path" ".$path"
    while [[ "$path" == */* && "${path%/*}" != "" ]]; do path="${path%/*}"; chmod o+rx ".$path"; done # for other users
done <<<"$shown"
: >etc/machine-id
exec env -i container=box PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot . "$systemd" --system --unit="$target" \\
    --log-target=console --show-status=no
"""


class CannotBoot(Exception):
    """This machine cannot have another in itself; says why."""


class Box:
    """One machine. Use `boot`, wait for what it does, and `close` it."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        """Prepare nothing yet.

        Args:
            directory: for what is left of it.
            machine: its files, with the settings that user data would write.
        """
        self.machine, self.logs = machine, directory / "logs"
        self._directory, self._units = directory, machine.root / "etc/systemd/system"
        self._process: Process | None = None
        self._cgroup: Path | None = None
        for made in (self.logs, directory / "box", self._units):
            made.mkdir(parents=True, exist_ok=True)
        (directory / "console").touch()
        directory.chmod(0o777)  # its users are not this test's; above it, nobody passes on this machine

    def write_unit(self, name: str, text: str) -> None:
        path = self._units / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def boot(self, *wanted: str) -> None:
        """Start it; `wanted` are the units of its target. Raises CannotBoot."""
        for name in ("harness-node.service", "harness.service", "harness-ended.service"):
            self.write_unit(f"{name}.d/alone.conf", ALONE)
        for name in ("network-online.target", "docker.service", "dlami-nvme.service", "nvidia-persistenced.service"):
            with contextlib.suppress(FileExistsError):
                (self._units / name).symlink_to("/dev/null")
        self.write_unit(TARGET, f"[Unit]\nDescription=box\nWants={' '.join(wanted)}\n")
        self.machine.write_settings()
        self._cgroup = next((path for path in CGROUPS if (path / "cgroup.procs").exists()), None)
        if os.geteuid() != 0 or not SYSTEMD.exists() or self._cgroup is None:
            raise CannotBoot("root, systemd and a cgroup2 are needed")
        self._cgroup /= f"box-{os.getpid()}-{self._directory.name}"
        self._process = Process(["bash", "-c", ENTER], cwd=self._directory, env=self._environment())

    def wait_powered_off(self) -> None:
        """Wait until it is."""
        assert self._process is not None
        code = self._process.wait_exit()
        assert code == POWERED_OFF, f"exit code {code}\n{self.report()}"

    @property
    def runs(self) -> bool:
        """Whether it is switched on."""
        return self._process is not None and self._process.runs

    def wait_for(self, text: str, log: str) -> None:
        """Wait until `text` is in a log. Fails when the machine is off before."""
        while text not in self.log(log):
            assert self.runs, f"never said: {text}\n{self.report()}"
            time.sleep(0.05)

    def log(self, name: str) -> str:
        """What is in a log so far."""
        path = self.logs / name
        return path.read_text(errors="replace") if path.exists() else ""

    def report(self) -> str:
        """Everything that it has left, for the message of a failed test."""
        parts = {path.name: path.read_text(errors="replace")[-4000:] for path in sorted(self.logs.iterdir())}
        parts["console"] = (self._directory / "console").read_text(errors="replace")[-2000:]
        if self._process is not None:
            parts["stderr"] = self._process.stderr
        return "\n".join(f"--- {name}\n{text}" for name, text in parts.items())

    def close(self) -> None:
        """Lose it, and leave nothing of it."""
        if self._process is not None:
            self._process.reap()
        if self._cgroup is not None and self._cgroup.exists():
            with contextlib.suppress(OSError):
                (self._cgroup / "cgroup.kill").write_text("1")
            _remove(self._cgroup)

    def _environment(self) -> Mapping[str, str]:
        paths = {ROOT, Path(sys.prefix), Path(sys.base_prefix), self._directory} - {Path("/usr")}
        shown = [str(path) for path in sorted(paths) if not any(other in path.parents for other in paths)]
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "cgroup": str(self._cgroup),
            "boot": BOOT,
            "box": str(self._directory / "box"),
            "files": str(self.machine.root),
            "console": str(self._directory / "console"),
            "logs": str(self.logs),
            "shown": "\n".join(shown),
            "systemd": str(SYSTEMD),
            "target": TARGET,
        }


def write_python(path: Path) -> Path:
    """An interpreter for a box: the one of this test, whose `harness resume` waits for less long than a test.

    It does not import torch ahead of time, as a node does at each boot: that is half of all that a boot costs here.
    """
    real = shlex.quote(sys.executable)
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\n"
        '[ "$*" != "-c import torch" ] || exit 0\n'
        f'[ "$2$3$4" != "-mharnessresume" ] || exec {real} -m tests.support.resume_run "$@"\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


def _remove(cgroup: Path) -> None:
    for folder, _, _ in os.walk(cgroup, topdown=False):
        with contextlib.suppress(OSError):  # a process of it is still dying: the next test has another
            Path(folder).rmdir()
