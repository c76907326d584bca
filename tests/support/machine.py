"""A machine in a directory, and what it meets: what `harness doctor` looks at in tests."""

from __future__ import annotations

import importlib.metadata
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloud.aws.metadata import Answer
from cloud.errors import Unavailable
from cloud.notice import Deadline
from cloud.store import CHUNK_BYTES, Progress, Receipt, Source
from cloud.testing.memory import MemoryStore
from harness.config.settings import Settings
from harness.inspect.doctor.host import Host
from tests.support.clock import FakeClock
from tests.support.protocol import KEYS

GB = 10**9
EBS, NVME = "Amazon Elastic Block Store              \n", "Amazon EC2 NVMe Instance Storage        \n"
MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
23 22 0:21 / /proc rw - proc proc rw
24 22 0:30 / {at} rw - tmpfs tmpfs rw
25 24 259:5 / {at}/nvme rw shared:7 master:2 - xfs /dev/nvme1n1 rw
26 24 9:0 / {at}/raid rw - ext4 /dev/md0 rw
27 24 0:40 / {at}/a\\040share rw - nfs4 server:/export rw
28 24 0:50 / {at}/layer rw - tmpfs tmpfs rw
29 24 0:51 / {at}/layer rw - overlay overlay rw
"""


class Machine:
    """A machine with 128 GB, half of them free, whose /proc, /sys and /dev lie below `root`.

    Attributes:
        root: its root directory.
        versions: of what is installed there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions = dict.fromkeys(("requests", "rich", "tenacity", "typer", "msgspec"), "99") | {
            "torch": "2.13.0", "awscrt": "0.38.1", "boto3": "1.44.0",
        }  # fmt: skip
        (root / "dev/shm").mkdir(parents=True)

    def __call__(
        self, files: dict[str, str] | None = None, environ: dict[str, str] | None = None, **parts: Any
    ) -> Host:
        """The machine with these files in addition, and these parts of `Host` instead of its own."""
        for name, text in (files or {}).items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        whole = {"available": lambda: 64 * GB, "total": lambda: 128 * GB, "version": self.version} | parts
        return Host(environ or {}, self.root, **whole)

    def version(self, name: str) -> str:
        try:
            return self.versions[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    def with_disks(self, at: Path) -> Host:
        """EBS at the root; below `at`, on a tmpfs: instance store, a RAID of it, NFS, a container's layer."""
        for name in ("nvme", "raid", "a share", "layer"):
            (at / name).mkdir()
        for member in ("nvme1n1", "nvme2n1p1"):
            (self.root / "sys/class/block/md0/slaves" / member).mkdir(parents=True)
        models = {"nvme0n1": EBS, "nvme1n1": NVME, "nvme2n1": NVME}
        files = {f"sys/class/block/{name}/device/model": model for name, model in models.items()}
        return self({"proc/self/mountinfo": MOUNTS.format(at=at), **files})


def settings(**values: Any) -> Settings:
    return Settings(**{"store": "/nowhere", "run": KEYS.run, **values})


class Silent:
    """A metadata service that fails as told."""

    def __init__(self, why: str) -> None:
        self.why, self.closed = why, False

    def get(self, path: str, *, deadline: Deadline) -> Answer | None:
        raise Unavailable(self.why)

    def close(self) -> None:
        self.closed = True


class Instance:
    """A metadata service that answers."""

    def get(self, path: str, *, deadline: Deadline) -> Answer | None:
        text = {"meta-data/instance-life-cycle": "spot", "meta-data/instance-type": "g6e.xlarge"}.get(path)
        return Answer(text, datetime.now(UTC)) if text else None

    def close(self) -> None:
        pass


class Slow(MemoryStore):
    """A store that takes its time, on a clock of its own."""

    def __init__(self, bytes_s: float = 2e6) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.bytes_s = bytes_s

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        assert isinstance(source, memoryview)
        self.clock.advance(len(source) / self.bytes_s)
        if deadline.expired:
            raise Unavailable("no time left")
        return super().put(key, source[: CHUNK_BYTES + 1], deadline=deadline, progress=progress)


class Ticking(FakeClock):
    """A clock that moves whenever somebody looks: nothing is measured for long."""

    def __call__(self) -> float:
        self.advance(0.15)
        return self.now
