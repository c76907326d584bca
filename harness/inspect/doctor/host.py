"""Checks of this machine: software, limits, memory, disks, torchrun, the metadata service.

Owns one function for each check. A check sees the machine only through `Host`, so that a test can build a machine in a
directory. Knows no store; changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloud.aws.firmware import is_ec2
from cloud.aws.metadata import Metadata
from cloud.errors import CloudError
from cloud.notice import Clock, Deadline
from harness.agent.save import slot_pool
from harness.config.settings import Settings
from harness.inspect.doctor.finding import Finding, failure, ok, one_line, warning
from harness.ipc.process import open_pidfd
from harness.ipc.slots import Slot
from harness.requirements import FREE_THREADED, is_free_threaded, unmet

FEW_FILES, FEW_FILES_S3 = 1024, 4096
SMALL_SHM_BYTES = 1024**3
TORCHRUN_DEFAULT_S = 30.0
_METADATA_S = 3.0
_GONE_WITH = {
    "tmpfs": "memory, which a reboot empties",
    "ramfs": "memory, which a reboot empties",
    "overlay": "the container's own layer, which goes with the container",
    "instance store": "instance store, which goes with the instance",
}


@dataclass(frozen=True)
class Host:
    """This machine, as the checks see it.

    Attributes:
        environ: the environment.
        root: where /proc, /sys and /dev are.
        clock: monotonic seconds.
        available: memory that the agent may use by its own estimate, in bytes.
        total: memory of the host, in bytes.
        disk: total, used and free bytes of a path's file system.
        open_files: soft and hard limit on open descriptors.
        version: version of an installed distribution; raises PackageNotFoundError.
        make_slot: allocates a slot.
        free_threaded: whether this Python was built to run without the global interpreter lock.
    """

    environ: Mapping[str, str]
    root: Path = Path("/")
    clock: Clock = time.monotonic
    available: Callable[[], int] = slot_pool.available_bytes
    total: Callable[[], int] = slot_pool.total_bytes
    disk: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
    open_files: Callable[[], tuple[int, int]] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)
    version: Callable[[str], str] = importlib.metadata.version
    make_slot: Callable[[int], Slot] = Slot.create
    free_threaded: bool = field(default_factory=is_free_threaded)

    def read(self, path: str) -> str | None:
        """Return a small kernel file, stripped; `None` if it does not exist or cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, ValueError):
            return None


# ---- software and limits --------------------------------------------------------------------------------------------


def check_software(host: Host) -> Finding:
    """Check the packages that a run needs, in this interpreter's environment: torch may be in another one."""
    problem = unmet(without=("torch",), version=host.version)
    if problem is not None:
        return failure("software", problem.what, problem.remedy)
    found = [f"Python {platform.python_version()}", *(f"{name} {host.version(name)}" for name in ("boto3", "awscrt"))]
    try:
        found.insert(1, f"torch {host.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        what = f"{', '.join(found)}, no torch"
        return warning("software", what, "use the harness of the environment that the training runs in")
    if host.free_threaded:
        return warning("software", ", ".join(found), FREE_THREADED)
    return ok("software", ", ".join(found))


def check_kernel(host: Host) -> Finding:
    """Check the two features of Linux that a sandbox may forbid: memfds and pidfds."""
    release = host.read("proc/sys/kernel/osrelease") or "of unknown version"
    try:
        host.make_slot(1024 * 1024).close()
        descriptor = open_pidfd(os.getpid())
    except OSError as err:
        return failure(
            "kernel",
            f"Linux {release}: {one_line(err)}",
            "memfd_create and pidfd_open are needed: Linux 5.3 or newer, and a seccomp profile that allows them",
        )
    if descriptor is not None:
        os.close(descriptor)
    return ok("kernel", f"Linux {release}, memfd and pidfd work")


def check_open_files(host: Host, *, s3: bool) -> Finding:
    """Check the soft limit on descriptors: connections to S3, slots, and the pipes of DataLoader workers count."""
    soft, hard = host.open_files()
    needed = FEW_FILES_S3 if s3 else FEW_FILES
    infinite = soft == resource.RLIM_INFINITY
    if infinite or soft >= needed:
        return ok("nofile", "no limit" if infinite else f"{soft} open files")
    enough = hard == resource.RLIM_INFINITY or hard >= needed
    remedy = f"ulimit -n {needed}, or LimitNOFILE={needed} in the unit file"
    if not enough:
        remedy += f"; the hard limit is {hard}, so raise it in /etc/security/limits.conf or docker run --ulimit nofile"
    return warning("nofile", f"{soft} open files; connections, slots and data workers may need {needed}", remedy)


def check_torchrun(host: Host, command: Sequence[str], drain_s: float, grace_s: float) -> Finding:
    """Check whether torchrun would kill the ranks during a drain: it sends SIGKILL 30 s after a signal to end.

    `harness run` starts torchrun with the grace instead, unless that is set.
    """
    starts = any(
        os.path.basename(word) == "torchrun" or word.startswith("torch.distributed.")  # noqa: PTH119
        for word in command
    )
    used = starts or "TORCHELASTIC_RUN_ID" in host.environ
    remedy = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={drain_s:.0f}; a torch that does not know it always waits 30 s"
    told = _flag(command, "shutdown-timeout") or host.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    try:
        timeout_s = float(told) if told else grace_s if starts else TORCHRUN_DEFAULT_S
    except ValueError:
        return failure("torchrun", f"the shutdown timeout is not a number: {told!r}", remedy)
    if not used:
        return ok("torchrun", f"not in use; under it, a trainer is killed {timeout_s:g} s after a signal")
    if timeout_s < drain_s:
        return warning(
            "torchrun", f"kills the trainer {timeout_s:g} s after a signal; a drain may take {drain_s:.0f} s", remedy
        )
    restarts = _flag(command, "max-restarts") or "0"
    itself = "" if restarts == "0" else f"; it restarts ranks by itself, {restarts} times, before harness run does"
    what = f"gives the trainer {timeout_s:g} s after a signal; a drain takes {drain_s:.0f} s at most{itself}"
    return ok("torchrun", what)


def _flag(command: Sequence[str], name: str) -> str | None:
    """Return the value of `--name value` or `--name=value`, dashes or underscores."""
    for index, word in enumerate(command):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("_", "-") == name:
            return value if equals else next(iter(command[index + 1 : index + 2]), None)
    return None


# ---- memory ---------------------------------------------------------------------------------------------------------


def check_memory(host: Host, settings: Settings, state_bytes: int | None) -> Finding:
    """Check whether the slots fit. A memfd is charged to the cgroup of the process that fills it, like any memory."""
    count = settings.slots or (2 if host.total() >= slot_pool.TWO_SLOTS_FROM_BYTES else 1)
    slots = f"{count} slot{'s' if count > 1 else ''}"
    free, limit = host.available(), "free"
    cgroup_free = slot_pool.free_in_cgroup(host.root)
    if cgroup_free is not None and cgroup_free < free:
        free, limit = cgroup_free, "left by the cgroup"
    if state_bytes is None:
        fits = max(0, free - slot_pool.RESERVED_BYTES) / count
        return ok("memory", f"{free / 1e9:.1f} GB {limit}: room for {slots} of up to {fits / 1e9:.1f} GB")
    fit = slot_pool.how_many_fit(state_bytes, count, free)
    if fit == 0:
        what = f"{free / 1e9:.1f} GB {limit}, too little for a slot of {state_bytes / 1e9:.1f} GB"
        if settings.slot_disk is None:
            return failure(
                "memory",
                what,
                "use a host with more memory, raise the cgroup limit, or pass --local DIR on a fast disk",
            )
        return warning(
            "memory",
            f"{what}: snapshots go through a window to {settings.slot_disk}, and training waits for that disk",
            "use a host with more memory or raise the cgroup limit; else use the fastest disk you have for --local",
        )
    if fit < count:
        what = f"{free / 1e9:.1f} GB {limit}, enough for {fit} of {slots} of {state_bytes / 1e9:.1f} GB"
        return warning(
            "memory",
            what,
            f"pass --slots {fit}, as no more fit; or use a host with more memory, or raise the cgroup limit",
        )
    left = free - count * state_bytes
    return ok(
        "memory",
        f"{free / 1e9:.1f} GB {limit}; {slots} of {state_bytes / 1e9:.1f} GB leave {left / 1e9:.1f} GB to the training",
    )


def check_shm(host: Host) -> Finding:
    """Check /dev/shm: DataLoader workers need it, the harness does not; Docker gives 64 MB."""
    path = host.root / "dev/shm"
    remedy = "docker run --shm-size=8g, or --ipc=host; the harness itself uses memfds and needs none of it"
    if not path.is_dir():
        return warning("/dev/shm", "does not exist: DataLoader workers cannot pass tensors", remedy)
    total, _, free = host.disk(path)
    if total < SMALL_SHM_BYTES:
        return warning("/dev/shm", f"{total / 1e6:.0f} MB: DataLoader workers may die of a bus error", remedy)
    return ok("/dev/shm", f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free, for DataLoader workers; slots need none")


# ---- disks ----------------------------------------------------------------------------------------------------------


def medium_of(host: Host, path: Path) -> str:
    """Return the medium of a path: "instance store", "EBS", or the file system ("ext4", "tmpfs", "overlay", "nfs4")."""
    best, kind, source = "", "unknown", ""
    place = str(existing(path).resolve())
    for line in (host.read("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        point, fields = before.split()[4].replace("\\040", " "), after.split()
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(fields) >= 2 and len(point) >= len(best):  # the last mount on one point hides the others
            best, kind, source = point, fields[0], fields[1]
    model = " ".join(_models(host, source.removeprefix("/dev/"))) if source.startswith("/dev/") else ""
    if "Instance Storage" in model:
        return "instance store"
    return "EBS" if "Elastic Block Store" in model else kind


def goes_with(medium: str) -> str | None:
    """Return the reason why a store on `medium` is not durable, or `None` if it is."""
    return _GONE_WITH.get(medium)


def existing(path: Path) -> Path:
    """Return the path itself, or the nearest parent directory that exists."""
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


def _models(host: Host, device: str) -> list[str]:
    """Return the model name of a block device; for a RAID or a logical volume, those of its members."""
    name = re.sub(r"^(nvme\d+n\d+)p\d+$", r"\1", device)
    try:
        members = sorted(entry.name for entry in (host.root / "sys/class/block" / name / "slaves").iterdir())
    except OSError:
        members = []
    whole = [re.sub(r"^(nvme\d+n\d+)p\d+$", r"\1", member) for member in members] or [name]
    return [host.read(f"sys/class/block/{each}/device/model") or "" for each in whole]


# ---- the metadata service -------------------------------------------------------------------------------------------


def check_metadata(host: Host, settings: Settings, open_metadata: Callable[[str], Metadata]) -> Finding:
    """Check whether a spot notice would reach this machine, and if not, find out why."""
    name = "metadata"
    if settings.metadata == "off":
        disabled = host.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
        remedy = "unset AWS_EC2_METADATA_DISABLED" if disabled else "remove --metadata off"
        return warning(name, "off: EC2's notices are not received", f"on a spot instance, {remedy}")
    session = open_metadata(settings.metadata)
    try:
        deadline = Deadline.after(_METADATA_S, host.clock)
        cycle = session.get("meta-data/instance-life-cycle", deadline=deadline)
        kind = session.get("meta-data/instance-type", deadline=deadline)
    except CloudError as err:
        return _deaf(host, settings.metadata, one_line(err))
    finally:
        session.close()
    words = " ".join(answer.text.strip()[:40] for answer in (cycle, kind) if answer is not None)
    return ok(name, f"{settings.metadata} answers{': ' if words else ''}{words}; no proxy is used")


def _deaf(host: Host, endpoint: str, why: str) -> Finding:
    """Return the finding for no answer: on EC2 a failure with a command as remedy, elsewhere only a warning."""
    if not is_ec2(host.root):
        return warning(
            "metadata",
            f"this does not look like an EC2 instance; EC2's notices are not received: {why}",
            "outside EC2, the notice has to be a SIGTERM (grace_s) or a drain file",
        )
    instance = host.read("sys/class/dmi/id/board_asset_tag") or ""
    options = f"aws ec2 modify-instance-metadata-options --instance-id {instance if instance else 'i-...'}"
    if "hop limit" in why:  # the session says this if its request for a token got no answer
        remedy = f"{options} --http-put-response-hop-limit 2, or the host's network for the container"
    elif "turned off" in why:
        remedy = f"{options} --http-endpoint enabled"
    else:
        remedy = (
            f"see what answers: curl -X PUT {endpoint}/latest/api/token -H 'X-aws-ec2-metadata-token-ttl-seconds: 60'"
        )
    return failure("metadata", f"this EC2 instance receives no notices: {why}", remedy)
