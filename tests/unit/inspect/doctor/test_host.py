"""This machine, check by check."""

from __future__ import annotations

import errno
import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from cloud.aws.metadata import Metadata, MetadataSession
from cloud.testing.metadata_sim import Fault, MetadataSimulator
from harness.inspect.doctor.finding import Level
from harness.inspect.doctor.host import (
    Host,
    check_kernel,
    check_memory,
    check_metadata,
    check_open_files,
    check_shm,
    check_software,
    check_torchrun,
    medium_of,
)
from harness.ipc.slots import Slot
from tests.support.machine import GB, Instance, Machine, Silent, settings

OK, WARNING, FAILURE = Level.OK, Level.WARNING, Level.FAILURE

importlib.import_module("requests")  # which a session does at its first question: a limit here has no time for that


@pytest.fixture
def host(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


@pytest.fixture
def disks(tmp_path: Path) -> Host:
    return Machine(tmp_path / "root").with_disks(tmp_path)


# ---- software and limits --------------------------------------------------------------------------------------------


def test_software_is_told_with_its_versions(host: Machine) -> None:
    found = check_software(host())

    assert found.level is OK
    assert "torch 2.13.0, boto3 1.44.0, awscrt 0.38.1" in found.what


def test_without_torch_it_is_the_wrong_environment(host: Machine) -> None:
    del host.versions["torch"]

    found = check_software(host())

    assert (found.level, "no torch" in found.what) == (WARNING, True)
    assert "environment that the training runs in" in found.remedy


@pytest.mark.parametrize(
    ("versions", "what", "remedy"),
    [
        ({"awscrt": "0.30.0"}, "awscrt 0.30.0 is too old, 0.31 is the oldest that works", "pip install 'awscrt>=0.31'"),
        ({"msgspec": None}, "msgspec is not installed", "pip install 'msgspec>=0.21'"),
    ],
)
def test_a_package_that_is_too_old_or_missing_fails_with_the_command_that_installs_it(
    host: Machine, versions: dict[str, str | None], what: str, remedy: str
) -> None:
    host.versions = {name: version for name, version in (host.versions | versions).items() if version is not None}

    found = check_software(host())

    assert (found.level, found.what, found.remedy) == (FAILURE, what, remedy)


def test_a_python_without_the_global_lock_is_told(host: Machine) -> None:
    found = check_software(replace(host(), free_threaded=True))

    assert found.level is WARNING
    assert "global interpreter lock" in found.remedy


def test_memfds_and_pidfds_are_tried(host: Machine) -> None:
    found = check_kernel(host({"proc/sys/kernel/osrelease": "6.1.0\n"}))

    assert (found.level, found.what) == (OK, "Linux 6.1.0, memfd and pidfd work")


def test_a_sandbox_that_forbids_memfds_fails(host: Machine) -> None:
    def refuse(size: int) -> Slot:
        raise OSError(errno.ENOSYS, "Function not implemented")

    found = check_kernel(host(make_slot=refuse))

    assert found.level is FAILURE
    assert "Function not implemented" in found.what
    assert "seccomp" in found.remedy


@pytest.mark.parametrize(
    ("limits", "s3", "level"),
    [
        ((1024, 4096), False, OK),
        ((1023, 4096), False, WARNING),
        ((1024, 524288), True, WARNING),
        ((4096, 4096), True, OK),
        ((-1, -1), True, OK),
    ],
)
def test_the_limit_on_open_files(host: Machine, limits: tuple[int, int], s3: bool, level: Level) -> None:
    assert check_open_files(host(open_files=lambda: limits), s3=s3).level is level


def test_a_hard_limit_on_open_files_that_is_too_low_is_told(host: Machine) -> None:
    assert check_open_files(host(open_files=lambda: (256, 512)), s3=False).remedy.startswith("ulimit -n 1024")
    assert "hard limit is 512" in check_open_files(host(open_files=lambda: (256, 512)), s3=False).remedy
    assert "hard limit" not in check_open_files(host(open_files=lambda: (256, -1)), s3=False).remedy


@pytest.mark.parametrize(
    ("command", "environ", "level", "word"),
    [
        ((), {}, OK, "not in use"),
        (("python", "train.py"), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}, OK, "not in use"),
        (("torchrun", "train.py"), {}, OK, "100 s after a signal"),
        (("/opt/bin/torchrun", "--max-restarts=3", "train.py"), {}, OK, "restarts ranks by itself, 3 times"),
        (("python", "-m", "torch.distributed.run", "train.py"), {}, OK, "100 s"),
        ((), {"TORCHELASTIC_RUN_ID": "1"}, WARNING, "30 s after a signal; a drain may take 66 s"),
        (("torchrun", "train.py"), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, OK, "120 s"),
        (("torchrun", "--shutdown-timeout", "90", "train.py"), {}, OK, "90 s"),
        (("torchrun", "--shutdown_timeout=20", "train.py"), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, WARNING, "20 s"),
        (("torchrun", "train.py"), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "long"}, FAILURE, "'long'"),
    ],
)
def test_torchrun_must_leave_the_time_of_a_drain(
    host: Machine, command: tuple[str, ...], environ: dict[str, str], level: Level, word: str
) -> None:
    found = check_torchrun(host(environ=environ), command, 66.0, 100.0)

    assert (found.level, word in found.what) == (level, True), found
    assert found.level is OK or "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=66" in found.remedy


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_two_slots_of_the_state_should_fit(host: Machine) -> None:
    assert check_memory(host(), settings(), 30 * GB).level is OK
    found = check_memory(host(), settings(), 32 * GB)

    assert found.level is WARNING
    assert found.what == "64.0 GB free, enough for 1 of 2 slots of 32.0 GB"
    assert "--slots 1" in found.remedy


def test_a_small_host_has_one_slot_unless_told(host: Machine) -> None:
    small = host(total=lambda: 16 * GB, available=lambda: 10 * GB)

    assert "1 slot of 8.0 GB" in check_memory(small, settings(), 8 * GB).what
    assert check_memory(small, settings(slots=2), 8 * GB).level is WARNING


def test_a_state_that_memory_has_no_room_for_waits_for_the_disk_and_without_one_for_nothing(host: Machine) -> None:
    found = check_memory(host(), settings(local="/mnt/ssd"), 70 * GB)
    assert (found.level, "through a window to /mnt/ssd" in found.what) == (WARNING, True)

    nowhere = check_memory(host(), settings(store="s3://bucket"), 70 * GB)
    assert (nowhere.level, "--local DIR" in nowhere.remedy) == (FAILURE, True)


def test_without_a_size_the_largest_state_that_fits_is_told(host: Machine) -> None:
    found = check_memory(host(), settings(), None)

    assert (found.level, found.what) == (OK, "64.0 GB free: room for 2 slots of up to 31.9 GB")


def test_a_cgroup_that_leaves_less_than_the_host_counts(host: Machine) -> None:
    limited = host(
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(8 * GB),
            "sys/fs/cgroup/memory.current": str(GB),
        }
    )

    found = check_memory(limited, settings(), 4 * GB)

    assert (found.level, "7.0 GB left by the cgroup" in found.what) == (WARNING, True)


def test_docker_s_shm_is_warned_of(host: Machine) -> None:
    small, large = (64_000_000, 0, 64_000_000), (8 * GB, GB, 7 * GB)

    found = check_shm(host(disk=lambda path: small))
    assert (found.level, "64 MB" in found.what, "--shm-size" in found.remedy) == (WARNING, True, True)
    assert check_shm(host(disk=lambda path: large)).what.startswith("7.0 of 8.0 GB free")


def test_no_shm_at_all_is_warned_of(host: Machine, tmp_path: Path) -> None:
    (tmp_path / "root/dev/shm").rmdir()

    assert check_shm(host()).level is WARNING


# ---- disks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "medium"),
    [
        ("/", "EBS"),
        ("nvme", "instance store"),
        ("nvme/not/there/yet", "instance store"),
        ("nvmeX", "tmpfs"),
        ("raid", "instance store"),
        ("a share", "nfs4"),
        ("layer", "overlay"),
        (".", "tmpfs"),
    ],
)
def test_what_a_directory_lies_on(disks: Host, tmp_path: Path, where: str, medium: str) -> None:
    assert medium_of(disks, tmp_path / where) == medium


def test_without_a_list_of_mounts_the_medium_is_unknown(host: Machine, tmp_path: Path) -> None:
    assert medium_of(host(), tmp_path) == "unknown"


# ---- the metadata service -------------------------------------------------------------------------------------------


EC2 = {"sys/class/dmi/id/sys_vendor": "Amazon EC2\n", "sys/class/dmi/id/board_asset_tag": "i-0123456789abcdef0\n"}
URL = "http://169.254.169.254"


def test_an_instance_that_hears_says_what_it_is(host: Machine) -> None:
    found = check_metadata(host(), settings(), lambda url: Instance())

    assert (found.level, found.what) == (OK, f"{URL} answers: spot g6e.xlarge; no proxy is used")


def test_metadata_off_is_told_with_who_turned_it_off(host: Machine) -> None:
    def never(url: str) -> Metadata:
        raise AssertionError("off is off")

    by_flag = check_metadata(host(), settings(metadata="off"), never)
    by_environ = check_metadata(host(environ={"AWS_EC2_METADATA_DISABLED": "True"}), settings(metadata="off"), never)

    assert (by_flag.level, by_environ.level) == (WARNING, WARNING)
    assert "remove --metadata off" in by_flag.remedy
    assert "unset AWS_EC2_METADATA_DISABLED" in by_environ.remedy


def test_elsewhere_than_on_ec2_silence_is_a_warning(host: Machine) -> None:
    service = Silent("no route")

    found = check_metadata(host(), settings(), lambda url: service)

    assert (found.level, "no route" in found.what, service.closed) == (WARNING, True, True)
    assert "drain file" in found.remedy


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        (
            "no answer within 1 s; in a container this is what a hop limit of 1 looks like",
            "--instance-id i-0123456789abcdef0 --http-put-response-hop-limit 2",
        ),
        ("refuses a token (403): the metadata service is turned off here", "--http-endpoint enabled"),
        ("connection refused", f"curl -X PUT {URL}/latest/api/token"),
    ],
)
def test_on_ec2_silence_is_a_failure_with_its_command(host: Machine, why: str, remedy: str) -> None:
    found = check_metadata(host(EC2), settings(), lambda url: Silent(why))

    assert (found.level, remedy in found.remedy) == (FAILURE, True), found


def test_a_token_that_never_comes_is_taken_for_a_hop_limit_of_1(host: Machine) -> None:
    with MetadataSimulator() as simulator:
        simulator.fault(Fault.HANG, path="api/token")

        found = check_metadata(
            host(EC2), settings(metadata=simulator.url), lambda url: MetadataSession(url, timeout_s=0.2)
        )

    assert "--http-put-response-hop-limit 2" in found.remedy


def test_a_proxy_of_the_environment_is_passed_by(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with MetadataSimulator() as simulator:
        found = check_metadata(host(), settings(metadata=simulator.url), MetadataSession)

    assert (found.level, "spot g6e.xlarge" in found.what) == (OK, True), found
