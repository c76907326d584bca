"""`harness fleet` with a real Terraform, against moto: made from nothing, found from another machine, ended.

The machines are folders: what one of them knows is below its XDG_STATE_HOME.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.applied import AMI, AMI_PARAMETER, Applied
from tests.support.aws_account import REGION, ROOT, Account, Lease, open_account
from tests.support.needs import lacking
from tests.support.terraform import NO_PROVIDER, OVERRIDE, PLUGINS, VARIABLES

pytestmark = pytest.mark.long("terraform and its provider wait for what they have changed", minutes=4)

RUN = "gpt-small"
NAME = f"harness-{RUN}"


@dataclass(frozen=True)
class Laptop:
    """A machine with the harness, Terraform and credentials."""

    folder: Path
    account: Account

    def fleet(self, *words: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """Run `harness fleet`."""
        self._lead_to_account()
        plugins = os.environ.get(PLUGINS)
        init = [f"-plugin-dir={plugins}"] if plugins else []
        init += ["-backend-config=use_path_style=true"] if (self.module / "backend.tf").exists() else []
        theirs = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TF_VAR_"))}
        environment = {
            **theirs,
            **self.account.environment(REGION),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "TF_CLI_ARGS": "-no-color",
            "TF_CLI_ARGS_init": " ".join(init),
            "CHECKPOINT_DISABLE": "1",
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-m", "harness", "fleet", *words],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if any(problem in done.stderr for problem in NO_PROVIDER):
            lacking("terraform", f"terraform init finds no provider, and {PLUGINS} is not set")
        assert done.returncode in codes, f"harness fleet {' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done

    @property
    def module(self) -> Path:
        return self.folder / "state" / "harness" / "fleets" / REGION / RUN / "terraform"

    def _lead_to_account(self) -> None:
        self.module.mkdir(parents=True, exist_ok=True)
        (self.module / "tests_override.tf").write_text(OVERRIDE)


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    if shutil.which("terraform") is None:
        lacking("terraform", "terraform is not installed")
    lease = Lease(tmp_path / "lease")
    try:
        made = open_account(tmp_path / "lease", tmp_path / "account.log")
        made.client("ssm").put_parameter(Name=AMI_PARAMETER, Value=AMI, Type="String")
        yield made
    finally:
        lease.release()


def laptop(folder: Path, account: Account) -> Laptop:
    folder.mkdir()
    return Laptop(folder, account)


def project(folder: Path, text: str) -> Path:
    """A folder with a program, and a wheel that stands for the harness."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    (folder / "harness-1-py3-none-any.whl").touch()
    return folder


def groups(account: Account) -> list[dict[str, Any]]:
    return list(account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"])


def group(account: Account) -> dict[str, Any]:
    (found,) = groups(account)
    return found


def buckets(account: Account) -> list[str]:
    return [found["Name"] for found in account.client("s3").list_buckets()["Buckets"]]


def keys(account: Account, prefix: str) -> list[str]:
    (bucket,) = buckets(account)
    return [
        found["Key"] for found in account.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    ]


def test_a_fleet_is_made_from_nothing_and_any_machine_can_change_stop_and_end_it(
    tmp_path: Path, account: Account
) -> None:
    mine, other = laptop(tmp_path / "mine", account), laptop(tmp_path / "other", account)
    code = project(tmp_path / "code", "print(1)")
    words = ["--source", str(code), "--email", "somebody@example.org", "--set", f"ami_ssm_parameter={AMI_PARAMETER}"]
    program = ["--", "python", "train.py", "--lr", "3e-4"]

    refused = mine.fleet("up", RUN, *words, *program, codes=(64,))
    assert "--yes is needed" in refused.stderr
    assert buckets(account) == [], "what it would cost is shown, and nothing is made"
    assert 'command: default -> "python train.py --lr 3e-4"' in refused.stdout
    assert re.search(r"plan +\d\d to add, 0 to change, 0 to destroy", refused.stdout)
    assert re.search(r"price 1 +\S+ an hour: eu-west-1", refused.stdout)

    made = mine.fleet("up", RUN, *words, "--yes", *program)
    assert group(account)["DesiredCapacity"] == 1
    assert "$ terraform -chdir=" in made.stderr
    (bucket,) = buckets(account)
    (archive,) = keys(account, f"sources/{RUN}/packed/")
    with tarfile.open(fileobj=account.client("s3").get_object(Bucket=bucket, Key=archive)["Body"], mode="r|gz") as tar:
        assert sorted(tar.getnames()) == ["harness-1-py3-none-any.whl", "train.py"]
    assert keys(account, "fleets/") == [f"fleets/{RUN}/terraform.tfstate", f"fleets/{RUN}/variables.json"]

    # Another machine, which knows nothing, changes two things, and forgets nothing. New code is a new object; the old
    # one stays for an instance that may just be booting.
    account.client("cloudwatch").set_alarm_state(
        AlarmName=f"{NAME}-no-progress", StateValue="ALARM", StateReason="nothing became durable"
    )
    changed = other.fleet("up", RUN, "--set", "max_size=3", "--source", str(project(code, "print(2)")), "--yes")
    told = re.findall(r"change \d +(\w+): ", changed.stdout, re.MULTILINE)
    assert told == ["max_size", "source_archive"]
    assert "the alarm no-progress still rings" in changed.stdout
    assert (group(account)["MaxSize"], group(account)["DesiredCapacity"]) == (3, 1)
    after = keys(account, f"sources/{RUN}/packed/")
    assert len(after) == 2
    assert archive in after

    seen = json.loads(other.fleet("status", RUN, "--json").stdout)
    assert seen["group"]["name"] == NAME
    assert [member["state"] for member in seen["group"]["members"]] == ["InService"]
    assert RUN in other.fleet("status").stdout

    other.fleet("stop", RUN)
    assert group(account)["DesiredCapacity"] == 0

    other.fleet("down", RUN, "--yes")
    assert groups(account) == []
    assert buckets(account) == [bucket]
    assert account.client("s3").get_bucket_policy(Bucket=bucket)["Policy"]
    kept = other.fleet("down", RUN, "--delete-checkpoints", "--yes", codes=(64,))
    assert "an earlier down has let it go: it stays" in kept.stderr


def test_checkpoints_are_deleted_only_by_the_word_for_it_and_then_nothing_is_left(
    copied: Applied, tmp_path: Path
) -> None:
    """Of a fleet that plain Terraform has made, with its state on this machine."""
    mine = laptop(tmp_path / "mine", copied.account)
    mine.module.mkdir(parents=True)
    for name in ("terraform.tfstate", VARIABLES):
        shutil.copy(copied.terraform.module / name, mine.module)
    (mine.module / VARIABLES).rename(mine.module / "fleet.auto.tfvars.json")
    copied.client("s3").put_object(Bucket=copied.bucket, Key=f"checkpoints/{RUN}/snapshots/1", Body=b"weights")

    mine.fleet("down", RUN, "--delete-checkpoints", "--yes")

    assert buckets(copied.account) == []
    assert groups(copied.account) == []
    assert copied.client("iam").list_roles()["Roles"] == []
    assert "there is no fleet of the run" in mine.fleet("down", "other", "--yes", codes=(64,)).stderr
