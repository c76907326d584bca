"""The instance store becomes one file system, and never costs anybody what is on it: real devices, mkfs and mounts.

An array needs a kernel with RAID0; those tests are skipped without.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node.machine import ROOT, Machine

Disks = Callable[[int], list[str]]

pytestmark = pytest.mark.root

needs_xfs = pytest.mark.usefixtures("xfs")
needs_raid0 = pytest.mark.usefixtures("raid0")
SHOW = 'findmnt --noheadings --output SOURCE,FSTYPE,OPTIONS "$mnt"'


@needs_xfs
def test_one_disk_is_formatted_once_and_found_again_by_a_second_start_and_after_a_reboot(
    machine: Machine, disks: Disks
) -> None:
    (disk,) = disks(1)

    first = machine.boot(f'bootstrap disks; echo kept >"$mnt/file"; bootstrap disks; {SHOW}')
    unit = machine.unit("mnt-harness.mount")
    second = machine.boot(f'bootstrap disks; cat "$mnt/file"; {SHOW}')

    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert "is mounted" in first.stdout
    assert re.search(rf"^kept\n{disk} +xfs +\S*noatime", second.stdout, re.MULTILINE)
    assert f"What=/dev/disk/by-uuid/{_property(disk, 'UUID')}\nWhere=/mnt/harness\nType=xfs\nOptions=noatime" in unit
    assert machine.unit("mnt-harness.mount") == unit


def test_without_mkfs_xfs_it_is_ext4(machine: Machine, disks: Disks) -> None:
    (disk,) = disks(1)
    machine.without("mkfs.xfs")

    first = machine.boot(f'bootstrap disks; echo kept >"$mnt/file"; {SHOW}')
    second = machine.boot('bootstrap disks; cat "$mnt/file"')

    assert re.search(rf"^{disk} +ext4 ", first.stdout, re.MULTILINE), first.stdout
    assert second.stdout.endswith("kept\n")


def test_without_a_disk_the_local_tier_is_on_the_root_volume_and_it_says_so_loudly(machine: Machine) -> None:
    done = machine.prepare("disks")

    assert done.returncode == 0
    assert "WARNING: NO INSTANCE STORE" in done.stdout
    assert not machine.mount_point.exists()


def test_a_volume_or_a_partition_is_never_touched(machine: Machine, disks: Disks) -> None:
    (disk,) = disks(1)
    for link in machine.links.iterdir():
        link.unlink()
    (machine.links / "nvme-Amazon_Elastic_Block_Store_vol0123").symlink_to(disk)
    (machine.links / "nvme-Amazon_EC2_NVMe_Instance_Storage_AWS1-part1").symlink_to(disk)

    done = machine.boot()

    assert "NO INSTANCE STORE to use (0 disks)" in done.stdout
    assert _signatures(disk) == ""


@pytest.mark.parametrize("content", ["mkfs.ext4 -q -L data", "mkswap", "a partition table"])
def test_a_disk_with_foreign_data_is_left_alone_and_the_others_are_used(
    machine: Machine, disks: Disks, content: str
) -> None:
    foreign, blank = disks(2)
    if content == "a partition table":
        partition = b"\0" * 4 + b"\x83" + b"\0" * 3 + (2048).to_bytes(4, "little") * 2
        Path(foreign).write_bytes(b"\0" * 446 + partition + b"\0" * 48 + b"\x55\xaa")
    else:
        subprocess.run([*content.split(), foreign], check=True, capture_output=True)
    before = _signatures(foreign)

    done = machine.boot(f"bootstrap disks; {SHOW}")

    assert done.returncode == 0, done.stdout
    assert f"WARNING: {foreign} holds" in done.stdout
    assert f"wipefs --all {foreign}" in done.stdout
    assert re.search(rf"^{blank} ", done.stdout, re.MULTILINE)
    assert _signatures(foreign) == before != ""


def test_a_disk_that_cannot_be_read_counts_as_foreign_and_not_as_blank(machine: Machine, disks: Disks) -> None:
    (disk,) = disks(1)
    subprocess.run(["mkfs.ext4", "-q", "-L", "data", disk], check=True)
    before = _signatures(disk)
    real = shutil.which("wipefs")
    machine.replace_program(
        "wipefs", f'case "$*" in *--output*) exit 1;; *) exec {real} "$@";; esac'
    )  # util-linux 2.30

    done = machine.boot()

    assert f"WARNING: {disk}: wipefs cannot read it: left alone" in done.stdout
    assert _signatures(disk) == before != ""


def test_what_the_image_has_mounted_is_used_where_it_is(machine: Machine, disks: Disks, tmp_path: Path) -> None:
    (disk,) = disks(1)
    machine.environment["PYTHONPATH"] = str(ROOT)
    elsewhere = tmp_path / "dlami"
    elsewhere.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-L", "dlami", disk], check=True)

    done = machine.boot(f'mount {disk} "{elsewhere}"; bootstrap disks source environment; ls -d "{elsewhere}/harness"')

    assert done.returncode == 0, done.stdout
    assert machine.local_env()["HARNESS_LOCAL"] == str(elsewhere / "harness")
    assert _property(disk, "LABEL") == "dlami"


def test_two_disks_without_mdadm_are_one_disk_loudly_and_the_same_one_from_then_on(
    machine: Machine, disks: Disks
) -> None:
    first, second = disks(2)
    with_everything = dict(machine.environment)
    machine.without("mdadm")

    before = machine.boot(f'bootstrap disks; echo kept >"$mnt/file"; {SHOW}')
    machine.environment = with_everything  # an AMI update has brought it
    after = machine.boot(f'bootstrap disks; cat "$mnt/file"; {SHOW}')

    assert "WARNING: NO ARRAY" in before.stdout
    assert re.search(rf"^{first} ", before.stdout, re.MULTILINE)
    assert "the other disks lie idle" in after.stdout
    assert re.search(rf"^kept\n{first} ", after.stdout, re.MULTILINE)
    assert _signatures(second) == ""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_start_that_is_killed_at_mkfs_is_taken_up_by_the_next(machine: Machine, disks: Disks, moment: str) -> None:
    (disk,) = disks(1)
    for name in ("mkfs.xfs", "mkfs.ext4"):
        real = shutil.which(name)
        machine.replace_program(name, "kill -9 0" if moment == "before" else f'{real} "$@"; kill -9 0')

    machine.boot(killed=True)
    assert not (machine.root / "etc/harness/local.env").exists()
    machine.no_longer_replaced()
    after = machine.boot(f'bootstrap disks; : >"$mnt/file"; {SHOW}')

    assert re.search(rf"^{disk} ", after.stdout, re.MULTILINE), after.stdout
    assert "WARNING" not in after.stdout


def test_a_file_system_of_ours_that_cannot_be_mounted_is_made_anew_loudly(machine: Machine, disks: Disks) -> None:
    (disk,) = disks(1)
    machine.without("mkfs.xfs")
    machine.boot()
    with Path(disk).open("r+b") as file:  # the superblock stays, what it points to does not
        file.seek(4096)
        file.write(b"\xff" * 4096)

    done = machine.boot(f"bootstrap disks; {SHOW}")

    assert "cannot be mounted" in done.stdout
    assert "made again" in done.stdout
    assert re.search(rf"^{disk} +ext4", done.stdout, re.MULTILINE)


# -------------------------------------------------------------------------------------------------------------- arrays


@needs_raid0
@pytest.mark.parametrize("count", [2, 8])
def test_several_disks_are_one_array_which_a_reboot_finds_again(machine: Machine, disks: Disks, count: int) -> None:
    disks(count)

    first = machine.boot(
        f'bootstrap disks; echo kept >"$mnt/file"; bootstrap disks; {SHOW}; df -B1 --output=size "$mnt"'
    )
    uuid = _property(_array(first.stdout), "UUID")
    machine.power_off()
    second = machine.boot(f'bootstrap disks; cat "$mnt/file"; {SHOW}')

    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert int(first.stdout.split()[-1]) > (count - 1) * 300e6
    assert "WARNING" not in first.stdout + second.stdout
    assert "kept\n/dev/md" in second.stdout
    assert _property(_array(second.stdout), "UUID") == uuid


@needs_raid0
def test_an_array_that_the_system_has_assembled_under_another_name_is_used(machine: Machine, disks: Disks) -> None:
    members = disks(2)
    machine.boot('bootstrap disks; echo kept >"$mnt/file"')
    machine.power_off()
    subprocess.run(["mdadm", "--quiet", "--assemble", "/dev/md42", *members], check=True)

    done = machine.boot(f'bootstrap disks; cat "$mnt/file"; {SHOW}')

    assert "kept\n/dev/md42 " in done.stdout
    assert "WARNING" not in done.stdout


@needs_raid0
def test_an_array_without_a_file_system_gets_one(machine: Machine, disks: Disks) -> None:
    disks(2)
    for name in ("mkfs.xfs", "mkfs.ext4"):
        machine.replace_program(name, "kill -9 0")
    machine.boot(killed=True)
    machine.no_longer_replaced()
    machine.power_off()

    done = machine.boot(f"bootstrap disks; {SHOW}")

    assert _array(done.stdout)
    assert "WARNING" not in done.stdout


@needs_raid0
@pytest.mark.parametrize("state", ["off", "inactive"])
def test_a_half_built_array_is_made_anew(machine: Machine, disks: Disks, state: str) -> None:
    members = disks(3)
    machine.boot()
    machine.power_off()
    subprocess.run(["mdadm", "--quiet", "--zero-superblock", members[1]], check=True)
    if state == "inactive":  # as udev leaves it: the members that are there are held by an array that cannot run
        subprocess.run(["mdadm", "--quiet", "--incremental", members[0]], check=False, capture_output=True)

    done = machine.boot(f'bootstrap disks; {SHOW}; df -B1 --output=size "$mnt"')

    assert done.returncode == 0, done.stdout
    assert "is not whole: made again" in done.stdout
    assert _array(done.stdout)
    assert int(done.stdout.split()[-1]) > 2 * 300e6


@needs_raid0
def test_a_disk_more_than_the_array_had_makes_it_anew(machine: Machine, disks: Disks) -> None:
    disks(2)
    machine.boot()
    disks(1)

    done = machine.boot(f'bootstrap disks; {SHOW}; df -B1 --output=size "$mnt"')

    assert "is not whole: made again" in done.stdout
    assert int(done.stdout.split()[-1]) > 2 * 300e6


@needs_raid0
def test_a_foreign_array_is_left_alone(machine: Machine, disks: Disks) -> None:
    members = disks(3)
    subprocess.run(
        [
            "mdadm",
            "--quiet",
            "--create",
            "/dev/md77",
            "--run",
            "--level=0",
            "--name=data",
            "--raid-devices=2",
            *members[:2],
        ],
        check=True,
    )
    done = machine.boot(f"bootstrap disks; {SHOW}")

    assert re.search(rf"^{members[2]} ", done.stdout, re.MULTILINE), done.stdout
    assert done.stdout.count("not ours: left alone") == 2
    assert "linux_raid_member" in _signatures(members[0])


def _array(output: str) -> str:
    found = re.search(r"^/dev/md\S+", output, re.MULTILINE)
    assert found, output
    return found.group()


def _signatures(device: str) -> str:
    return _output("wipefs", "--noheadings", "--output", "TYPE,OFFSET,UUID", device)


def _property(device: str, name: str) -> str:
    return _output("blkid", "-p", "-o", "value", "-s", name, device)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
