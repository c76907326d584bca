"""The module applied as a first user would, once for all tests of a session, and read back with boto3.

Owns what it is applied with, and where the workers of one test run leave it for each other. Tests look at it as it is;
one that changes something takes a copy (`Applied.copy`), which has an account and a state of its own.
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import json
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.aws_account import REGION, ROOT, Account, open_account
from tests.support.terraform import Terraform, TerraformFailed, Unavailable

RUN = "gpt-small"
COMMAND = "python gpt.py --epochs 2 --steps-per-epoch 20 --seed 7 --pause-s 0.1 --curve curve"
AMI_PARAMETER = "/tests/ami"  # moto has no parameters of the Deep Learning AMI
AMI = "ami-12c6146b"  # one that moto has


@dataclass(frozen=True)
class Applied:
    """A module that is applied, and the account that it is in."""

    terraform: Terraform
    outputs: dict[str, Any]

    @property
    def account(self) -> Account:
        return self.terraform.account

    def client(self, service: str, region: str = REGION) -> Any:
        return self.account.client(service, region)

    def copy(self, folder: Path) -> Applied:
        """The same module and account, for a test that changes something; `folder` is not there yet."""
        return Applied(self.terraform.copy(folder), self.outputs)

    @property
    def bucket(self) -> str:
        return str(self.outputs["bucket"])

    @property
    def group(self) -> str:
        return str(self.outputs["group"])

    @property
    def topic_arn(self) -> str:
        return str(self.outputs["topic"])

    @property
    def role(self) -> str:
        return str(self.outputs["role"])

    def launch_template(self) -> dict[str, Any]:
        """The data of the version that the group uses."""
        (group,) = self.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        used = group["MixedInstancesPolicy"]["LaunchTemplate"]["LaunchTemplateSpecification"]
        (version,) = self.client("ec2").describe_launch_template_versions(
            LaunchTemplateId=used["LaunchTemplateId"], Versions=[used["Version"]]
        )["LaunchTemplateVersions"]
        return dict(version["LaunchTemplateData"])

    @property
    def user_data(self) -> str:
        """What cloud-init runs, unpacked as it would."""
        packed = base64.b64decode(self.launch_template()["UserData"])
        return gzip.decompress(packed).decode()


def apply_once(shared: Path) -> Applied:
    """Apply the module in `shared`, or take what another process has applied there.

    The caller holds the lease `shared`/lease. Raises Unavailable and TerraformFailed, in every process.
    """
    record = shared / "applied.json"
    with _alone(shared / "lock"):
        if not record.exists():
            record.write_text(json.dumps({"failed": "the apply of another process did not come to its end"}))
            record.write_text(json.dumps(_apply(shared)))
    found = json.loads(record.read_text())
    if "unavailable" in found:
        raise Unavailable(found["unavailable"])
    if "failed" in found:
        raise TerraformFailed(found["failed"])
    return Applied(Terraform(shared / "module", Account(**found["account"])), found["outputs"])


def variables(folder: Path) -> dict[str, object]:
    """What it is applied with: what a first user gives, and what this machine needs."""
    return {
        "run": RUN,
        "command": COMMAND,
        "source_archive": str(write_archive(folder / "source.tar.gz")),
        "ami_ssm_parameter": AMI_PARAMETER,
        "python": sys.executable,  # which has the harness: nothing is fetched
        "notify_email": "somebody@example.org",
    }


def write_archive(path: Path) -> Path:
    """The program's code as its user would pack it."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(ROOT / "examples" / "gpt.py", "gpt.py")
    return path


def _apply(shared: Path) -> dict[str, Any]:
    account = open_account(shared / "lease", shared / "account.log")
    account.client("ssm").put_parameter(Name=AMI_PARAMETER, Value=AMI, Type="String")
    try:
        terraform = Terraform.prepare(shared / "module", account, variables(shared))
        terraform.apply()
        return {"account": asdict(account), "outputs": terraform.outputs()}
    except Unavailable as why:
        return {"unavailable": str(why)}
    except TerraformFailed as why:
        return {"failed": str(why)}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
