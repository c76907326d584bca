"""Every way to call the module, applied for real against moto, read back, and destroyed: `scripts/torture fleets`.

    python -m tests.terraform.every_case [NAME…]

What one variable changes is the business of the module's own tests, which apply nothing. Here it is whether AWS's own
forms take all of it, and whether a destroy leaves anything. A case takes one to three minutes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.applied import AMI, AMI_PARAMETER, write_archive
from tests.support.aws_account import Account, Lease, open_account
from tests.support.terraform import Terraform

Variables = dict[str, Any]
KEEP_NOTHING = {"delete_checkpoints": True}
CASES: dict[str, Callable[[Account, Path], tuple[Variables, Callable[[Terraform], None]]]] = {}


def case(make: Callable[[Account, Path], tuple[Variables, Callable[[Terraform], None]]]) -> Any:
    """A case makes what has to be there before, and returns its variables and a look at the result."""
    CASES[make.__name__] = make
    return make


def group(terraform: Terraform) -> dict[str, Any]:
    (found,) = terraform.account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    return dict(found)


def types(terraform: Terraform) -> list[str]:
    overrides = group(terraform)["MixedInstancesPolicy"]["LaunchTemplate"]["Overrides"]
    return [override["InstanceType"] for override in overrides]


def policy(terraform: Terraform) -> str:
    """The role's, as text."""
    iam = terraform.account.client("iam")
    return str(iam.get_role_policy(RoleName=terraform.outputs()["role"], PolicyName="run")["PolicyDocument"])


def must(condition: object, words: str) -> None:
    if not condition:
        raise AssertionError(words)


@case
def defaults(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    return {}, lambda made: must(
        len(types(made)) >= 10 and len(group(made)["Instances"]) == 1, "ten types, one instance"
    )


@case
def gpu_types(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    wanted = ["g5.xlarge", "g5.2xlarge", "g6.xlarge"]
    return {"instance_types": wanted}, lambda made: must(types(made) == wanted, "these, in this order")


@case
def mixed_memory_by_word(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    wanted = ["p4d.24xlarge", "g5.48xlarge"]
    return {"instance_types": wanted, "mix_gpu_memory": True}, lambda made: must(types(made) == wanted, "both")


@case
def by_requirements(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    wanted = {"gpu_count": 1, "gpu_memory_gib": 22}

    def look(made: Terraform) -> None:
        (override,) = group(made)["MixedInstancesPolicy"]["LaunchTemplate"]["Overrides"]
        must(override["InstanceRequirements"]["AcceleratorCount"] == {"Min": 1, "Max": 1}, "one GPU")

    return {"instance_requirements": wanted}, look


def network(account: Account) -> tuple[str, list[str]]:
    """A VPC of one's own with two subnets, and no way out of it."""
    ec2 = account.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    zones = [zone["ZoneName"] for zone in ec2.describe_availability_zones()["AvailabilityZones"]][:2]
    return vpc, [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.9.{number}.0/24", AvailabilityZone=zone)["Subnet"]["SubnetId"]
        for number, zone in enumerate(zones)
    ]


@case
def given_network_without_a_way_out(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    vpc, subnets = network(account)

    def look(made: Terraform) -> None:
        must(set(group(made)["VPCZoneIdentifier"].split(",")) == set(subnets), "these subnets")
        (endpoint,) = account.client("ec2").describe_vpc_endpoints()["VpcEndpoints"]
        must(endpoint["VpcId"] == vpc, "its endpoint of S3")

    return {"vpc_id": vpc, "subnet_ids": subnets, "s3_gateway_endpoint": True}, look


@case
def given_bucket_and_key(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    place = {"LocationConstraint": "eu-west-1"}
    account.client("s3").create_bucket(Bucket="team-bucket", CreateBucketConfiguration=place)
    key = account.client("kms").create_key()["KeyMetadata"]["Arn"]

    def look(made: Terraform) -> None:
        must(made.outputs()["store"] == "s3://team-bucket/team/checkpoints", "in the given bucket")
        must(key in policy(made) and "kms:GenerateDataKey" in policy(made), "the role may use the key")

    return {"bucket": "team-bucket", "bucket_prefix": "team/checkpoints", "kms_key_arn": key}, look


@case
def container(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    image = f"123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/train@sha256:{'a' * 64}"
    look = lambda made: must("repository/team/train" in policy(made), "the role may pull it")  # noqa: E731
    return {"container_image": image, "source_archive": "", "python": ""}, look


@case
def code_in_git(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    look = lambda made: must(not sources(made), "nothing is uploaded")  # noqa: E731
    return {
        "source_archive": "git+https://example.com/team/gpt@v1",
        "setup_command": "pip install . && echo $HOME",
    }, look


@case
def code_in_an_archive_on_s3(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    place = {"LocationConstraint": "eu-west-1"}
    account.client("s3").create_bucket(Bucket="code", CreateBucketConfiguration=place)
    account.client("s3").put_object(Bucket="code", Key="gpt/v1.tar.gz", Body=b"code")
    look = lambda made: must("arn:aws:s3:::code/gpt/v1.tar.gz" in policy(made), "the role may read it")  # noqa: E731
    return {"source_archive": "s3://code/gpt/v1.tar.gz"}, look


@case
def every_limit_and_a_drill(account: Account, folder: Path) -> tuple[Variables, Callable[[Terraform], None]]:
    def look(made: Terraform) -> None:
        must(group(made)["CapacityRebalance"], "rebalanced")
        bought = group(made)["MixedInstancesPolicy"]["InstancesDistribution"]
        must(float(bought["SpotMaxPrice"]) == 1.5, "the price")
        must(account.client("autoscaling").describe_scheduled_actions()["ScheduledUpdateGroupActions"], "the end")

    limits = {"max_hours": 48, "max_usd_per_hour": 1.5, "stop_after_s": 172800, "capacity_rebalance": True}
    return {**limits, "tags": {"team": "research"}, "env": {"A": "b"}}, look


def sources(made: Terraform) -> list[str]:
    """The code that was uploaded."""
    bucket = made.outputs()["bucket"]
    listed = made.account.client("s3").list_objects_v2(Bucket=bucket, Prefix="sources/").get("Contents", [])
    return [found["Key"] for found in listed if "/scripts/" not in found["Key"]]


# ---- examples -------------------------------------------------------------------------------------------------------


def apply_example(name: str, account: Account, folder: Path, look: Callable[[Account], None], **more: Any) -> None:
    """Apply one of terraform/examples as it is, look, and destroy it but for its buckets' content."""
    archive = write_archive(folder / "source.tar.gz")
    made = Terraform.prepare(folder / "made", account, {}, module=f"terraform/examples/{name}")
    module = made.module
    variables_file = module.parents[1] / "aws" / "variables-fleet.tf"
    text = variables_file.read_text()
    image = text.partition('variable "ami_ssm_parameter"')[2].partition('default     = "')[2].partition('"')[0]
    variables_file.write_text(text.replace(image, AMI_PARAMETER))  # moto has no image of the default line
    for name_, text in more.items():
        (module / name_.replace("__", ".")).write_text(text)
    made.set(notify_email="team@example.org", source_archive=str(archive))
    made.apply()
    look(account)
    empty_buckets(account)
    made.destroy()
    must_be_gone(account, keeps=set())


def eleven_fleets(account: Account, folder: Path) -> None:
    rows = "".join(f"sweep-{number},{number},3e-4,24\n" for number in range(1, 12))

    def look(account: Account) -> None:
        groups = account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        must(len(groups) == 11 and all(len(one["Instances"]) == 1 for one in groups), "eleven, with one instance each")

    apply_example("many-runs", account, folder, look, runs__csv="run,seed,lr,gpu_memory_gb\n" + rows)


def private_subnets(account: Account, folder: Path) -> None:
    def look(account: Account) -> None:
        (one,) = account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
        subnets = account.client("ec2").describe_subnets(SubnetIds=one["VPCZoneIdentifier"].split(","))["Subnets"]
        must(len(subnets) == 3 and not any(subnet["MapPublicIpOnLaunch"] for subnet in subnets), "three, none public")
        (endpoint,) = account.client("ec2").describe_vpc_endpoints()["VpcEndpoints"]
        theirs = [{"Name": "association.subnet-id", "Values": [subnet["SubnetId"] for subnet in subnets]}]
        tables = account.client("ec2").describe_route_tables(Filters=theirs)["RouteTables"]
        must({table["RouteTableId"] for table in tables} <= set(endpoint["RouteTableIds"]), "S3 goes by the endpoint")

    apply_example("private-subnets", account, folder, look)


def two_runs(account: Account, folder: Path) -> None:
    def look(account: Account) -> None:
        must(len(account.client("s3").list_buckets()["Buckets"]) == 1, "one bucket for both")
        must(len(account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]) == 2, "two fleets")

    apply_example("two-runs", account, folder, look)


EXAMPLES = {run.__name__: run for run in (eleven_fleets, private_subnets, two_runs)}


# ---- what is left ---------------------------------------------------------------------------------------------------


def empty_buckets(account: Account) -> None:
    s3 = account.client("s3")
    for bucket in s3.list_buckets()["Buckets"]:
        for found in s3.list_objects_v2(Bucket=bucket["Name"]).get("Contents", []):
            s3.delete_object(Bucket=bucket["Name"], Key=found["Key"])


def what_costs(account: Account) -> dict[str, list[str]]:
    """What AWS asks money for, or what would start it again, by name."""
    ec2 = account.client("ec2")
    instances = [one for found in ec2.describe_instances()["Reservations"] for one in found["Instances"]]
    gateways = ec2.describe_nat_gateways()["NatGateways"]
    found: Mapping[str, list[Any]] = {
        "groups": account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"],
        "instances": [one["InstanceId"] for one in instances if one["State"]["Name"] != "terminated"],
        "templates": ec2.describe_launch_templates()["LaunchTemplates"],
        "endpoints": [one for one in ec2.describe_vpc_endpoints()["VpcEndpoints"] if one["State"] != "deleted"],
        "gateways": [one for one in gateways if one["State"] not in ("deleted", "deleting")],
        "addresses": ec2.describe_addresses()["Addresses"],
        "alarms": account.client("cloudwatch").describe_alarms()["MetricAlarms"],
        "logs": account.client("logs").describe_log_groups()["logGroups"],
        "rules": account.client("events").list_rules()["Rules"],
        "topics": account.client("sns").list_topics()["Topics"],
        "roles": account.client("iam").list_roles()["Roles"],
        "buckets": [bucket["Name"] for bucket in account.client("s3").list_buckets()["Buckets"]],
    }
    return {kind: [str(one) for one in left] for kind, left in found.items() if left}


def must_be_gone(account: Account, keeps: set[str]) -> None:
    left = what_costs(account)
    left["buckets"] = [name for name in left.get("buckets", []) if name not in keeps]
    must(not any(left.values()), f"left: {left}")


def run_case(name: str, account: Account, folder: Path) -> None:
    if name in EXAMPLES:
        EXAMPLES[name](account, folder)
        return
    variables, look = CASES[name](account, folder)
    before = {bucket["Name"] for bucket in account.client("s3").list_buckets()["Buckets"]}
    usual = {
        "run": "gpt-small", "command": "python train.py", "ami_ssm_parameter": AMI_PARAMETER,
        "source_archive": str(write_archive(folder / "source.tar.gz")), "notify_email": "team@example.org",
        "python": sys.executable,
    }  # fmt: skip
    made = Terraform.prepare(folder / "made", account, {**usual, **variables, **KEEP_NOTHING})
    made.apply()
    look(made)
    must(made.plan().code == 0, "a second apply would change something")
    made.destroy()
    must_be_gone(account, keeps=before)


def main() -> int:
    """Run the named cases, or all; return 1 if one failed."""
    names = sys.argv[1:] or [*CASES, *EXAMPLES]
    failed = []
    with tempfile.TemporaryDirectory(prefix="fleets-") as made:
        folder = Path(made)
        lease = Lease(folder / "lease")
        try:
            empty = open_account(folder / "lease", folder / "account.log")
            empty.client("ssm").put_parameter(Name=AMI_PARAMETER, Value=AMI, Type="String")
            for name in names:
                (folder / name).mkdir()
                account, began = empty.copy(), time.monotonic()
                try:
                    run_case(name, account, folder / name)
                    words = "ok"
                except Exception:  # noqa: BLE001  the other cases still run
                    traceback.print_exc()
                    failed.append(name)
                    words = "FAILED"
                finally:
                    account.end()
                    shutil.rmtree(folder / name, ignore_errors=True)
                print(f"{name:<34} {words:<6} {time.monotonic() - began:6.0f} s", flush=True)
        finally:
            lease.release()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
