"""The module applied as a first user would, once for all tests of a session, and read back with boto3.

Owns what it is applied with, and where the workers of one test run leave it for each other. Tests look at it as it is;
one that changes something takes a copy (`Applied.copy`), which has an account and a state of its own.

An apply takes a minute, in which the provider does nothing but wait for a bucket's rules to settle. So it begins as
soon as it is known that some test wants it (`Early`), in a process of its own, and is there when its turn comes:

    python -m tests.support.applied SHARED      ends what it is at, and itself, when its standard input does
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.aws_account import REGION, ROOT, Account, Lease, open_account
from tests.support.terraform import Terraform, TerraformFailed, Unavailable, kill_all

RUN = "gpt-small"
STEPS = 20
PAUSE = " --pause-s 0.2"  # there is a notice in the middle, whatever the machine
COMMAND = f"python gpt.py --epochs 2 --steps-per-epoch {STEPS // 2} --seed 7 --curve curve{PAUSE}"
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


class Early:
    """An apply that goes on while tests of something else run."""

    def __init__(self, shared: Path) -> None:
        self._lease = Lease(shared / "lease")
        with (shared / "early.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.applied", str(shared)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self, *, at_once: bool) -> None:
        """Wait for its end, which other workers may still wait for; or end it."""
        if at_once:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()
        self._lease.release()


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


def main() -> None:
    """Apply, for whoever asks later; not longer than the one that has started this lives."""
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    apply_once(Path(sys.argv[1]))


def _end_with_standard_input() -> None:
    sys.stdin.read()
    kill_all()
    os._exit(1)


if __name__ == "__main__":
    main()
