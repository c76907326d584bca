"""An instance to be, for tests: a root of its own, disks on loop devices, the script that makes it a node.

Owns files below one directory, and the loop devices and arrays on them; knows the script by its interface only. Mounts
are made in a mount namespace that ends with each boot, so that none outlives its test, and a second boot is a reboot.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bootstrap-node.sh"
STOP = ROOT / "scripts" / "stop-fleet.sh"
DISK_BYTES = 320 * 1024 * 1024  # sparse; xfs wants 300 MB
INSTANCE_STORE = "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS"


class CannotHaveDisks(Exception):
    """This machine, or this user, has no loop devices; says why."""


class Machine:
    """One instance. `root` is where the script puts everything, `settings` becomes node.env."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.links = directory / "by-id"
        self.mount_point = self.root / "mnt/harness"
        self.current = self.root / "opt/harness/source/current"
        self.settings = {"HARNESS_RUN": "gpt", "HARNESS_PYTHON": sys.executable}
        self.environment = {
            "HARNESS_ROOT": str(self.root), "HARNESS_DISK_LINKS": str(self.links), "HARNESS_STOP_S": "0",
            "HARNESS_STOP_PAUSE_S": "0", "HARNESS_LET_GO_S": "0", "HARNESS_GPU": str(directory / "nvidia0"),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9",
        }  # fmt: skip
        self._directory = directory
        self._disks: list[Path] = []
        scripts = self.root / "opt/harness/bin"
        scripts.mkdir(parents=True)
        self.links.mkdir()
        shutil.copy(SCRIPT, scripts)
        shutil.copy(STOP, scripts)
        (scripts / "resume.sh").write_text("#!/bin/sh\n")
        (scripts / "resume.sh").chmod(0o755)

    def prepare(self, *parts: str, killed: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the script for these parts; `killed`: it is expected to be."""
        return self._run([self._script, *parts], killed=killed)

    def stop(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run stop-fleet.sh."""
        return self._run([str(self.root / "opt/harness/bin/stop-fleet.sh"), *arguments], killed=False)

    def boot(self, shell: str = "bootstrap disks", *, killed: bool = False) -> subprocess.CompletedProcess[str]:
        """Run shell lines as one boot: `bootstrap` is the script, `$mnt` the mount point. Nothing stays mounted."""
        prelude = f'set -eu; mnt="{self.mount_point}"; bootstrap() {{ "{self._script}" "$@"; }}\n'
        return self._run(["unshare", "--mount", "bash", "-c", prelude + shell], killed=killed)

    def local_env(self) -> dict[str, str]:
        """What resume.sh will find."""
        lines = (self.root / "etc/harness/local.env").read_text().splitlines()
        return {name: value.strip('"') for name, value in (line.split("=", 1) for line in lines)}

    def unit(self, name: str) -> str:
        return (self.root / "etc/systemd/system" / name).read_text()

    def write_settings(self) -> None:
        """node.env, as user data writes it."""
        file = self.root / "etc/harness/node.env"
        file.parent.mkdir(parents=True, exist_ok=True)
        escaped = ((name, re.sub(r'([\\"$`])', r"\\\1", value)) for name, value in self.settings.items())
        file.write_text("".join(f'{name}="{value}"\n' for name, value in escaped))

    def add_disk(self) -> str:
        """A new empty disk of the instance store; its device. Raises CannotHaveDisks."""
        image = self._image(len(self._disks))
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        try:
            device = _call("losetup", "--find", "--show", str(image))
        except (OSError, subprocess.CalledProcessError) as err:
            raise CannotHaveDisks(getattr(err, "stderr", None) or str(err)) from err
        self._disks.append(Path(device))
        number = len(self._disks)
        (self.links / f"{INSTANCE_STORE}{number}").symlink_to(device)
        (self.links / f"{INSTANCE_STORE}{number}_1").symlink_to(device)  # the namespace's link
        return device

    def without(self, *programs: str) -> None:
        """From now on these are not installed."""
        directory = self._directory / "bin"
        directory.mkdir()
        for folder in reversed(os.environ["PATH"].split(":")):
            for program in Path(folder).glob("*"):
                link = directory / program.name
                link.unlink(missing_ok=True)
                if program.name not in programs:
                    link.symlink_to(program)
        self.environment["PATH"] = str(directory)

    def replace_program(self, name: str, script: str) -> None:
        """From now on this shell script is found for `name`."""
        directory = self._directory / "replaced"
        directory.mkdir(exist_ok=True)
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
        self.environment["PATH"] = f"{directory}:{self.environment.get('PATH', os.environ['PATH'])}"

    def no_longer_replaced(self) -> None:
        """Undo every `replace_program`."""
        shutil.rmtree(self._directory / "replaced")

    def power_off(self) -> None:
        """Stop what the kernel has assembled, as a reboot does; the disks keep what is on them."""
        for array in {holder.name for disk in self._disks for holder in self._holders(disk)}:
            _call("mdadm", "--quiet", "--stop", f"/dev/{array}")

    def close(self) -> None:
        """Give back every device, and the room that the images took."""
        with contextlib.ExitStack() as stack:
            for number, disk in enumerate(self._disks):
                stack.callback(self._image(number).unlink)
                stack.callback(_call, "losetup", "--detach", str(disk))
            self.power_off()

    @property
    def _script(self) -> str:
        return str(self.root / "opt/harness/bin/bootstrap-node.sh")

    def _image(self, number: int) -> Path:
        return self._directory / f"disk{number}.img"

    @staticmethod
    def _holders(disk: Path) -> Iterator[Path]:
        return Path(f"/sys/class/block/{disk.name}/holders").glob("md*")

    def _run(self, command: list[str], *, killed: bool) -> subprocess.CompletedProcess[str]:
        self.write_settings()
        process = subprocess.Popen(
            command,
            env=os.environ | self.environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that `kill -9 0` in a replaced program ends the script and nobody else
        )
        try:
            output, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was interrupted, or has left somebody
                os.killpg(process.pid, signal.SIGKILL)
        assert (process.returncode == -signal.SIGKILL) == killed, output
        return subprocess.CompletedProcess(command, process.returncode, output)


def tar(*members: tuple[str | tarfile.TarInfo, bytes]) -> bytes:
    """A .tar.gz, of names or of members that no honest packer would write."""
    made = BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for named, content in members:
            member = tarfile.TarInfo(named) if isinstance(named, str) else named
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    return made.getvalue()


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    """A .zip; also a wheel is one."""
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for named, content in members:
            archive.writestr(named, content)
    return made.getvalue()


def wheel(name: str, *, version: str = "1", requires: str = "", **modules: str) -> bytes:
    """A wheel whose package holds these modules, and nothing else."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    return zipped(
        (f"{name}/__init__.py", b""),
        *((f"{name}/{module}.py", text.encode()) for module, text in modules.items()),
        (f"{info}/METADATA", metadata.encode()),
        (f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
        (f"{info}/RECORD", b""),
    )


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
