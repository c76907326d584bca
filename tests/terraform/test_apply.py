"""`terraform apply` for a first user, against moto: what there is then, read with boto3; and what a destroy leaves.

What each variable changes is the business of the module's own tests; here it is whether AWS takes all of it, and what a
mistake, a second apply and a destroy come to. `tests/support/applied.py` says what it is applied with.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.applied import AMI, AMI_PARAMETER, COMMAND, RUN, Applied, variables
from tests.support.aws_account import REGION
from tests.support.terraform import Terraform

pytestmark = pytest.mark.long("terraform and its provider wait for what they have changed")

SCRIPTS = ("bootstrap-node.sh", "resume.sh", "stop-fleet.sh")
NAME = f"harness-{RUN}"
KNOWN = "-refresh=false"  # nobody else has changed anything: saves seconds
CHECKPOINT = f"checkpoints/{RUN}/snapshots/1"


# ---- the fleet ------------------------------------------------------------------------------------------------------


def group(applied: Applied) -> dict[str, Any]:
    (found,) = applied.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    return dict(found)


def test_the_group_buys_nothing_but_spot_in_the_pools_that_are_cheap_and_deep(applied: Applied) -> None:
    policy = group(applied)["MixedInstancesPolicy"]
    bought = policy["InstancesDistribution"]

    assert (bought["OnDemandBaseCapacity"], bought["OnDemandPercentageAboveBaseCapacity"]) == (0, 0)
    assert bought["SpotAllocationStrategy"] == "price-capacity-optimized"
    assert not bought.get("SpotMaxPrice"), "a price limit means more interruptions"
    types = [override["InstanceType"] for override in policy["LaunchTemplate"]["Overrides"]]
    assert len(types) >= 10, "AWS's advice for spot"
    assert {name.split(".")[0] for name in types} <= {"g5", "g6", "g6e", "gr6"}


def test_the_group_keeps_one_instance_alive_in_any_zone_and_does_not_move_it(applied: Applied) -> None:
    found = group(applied)
    zones = applied.client("ec2").describe_availability_zones()["AvailabilityZones"]

    assert (found["MinSize"], found["DesiredCapacity"], found["MaxSize"]) == (0, 1, 2)
    assert len(found["Instances"]) == 1
    assert len(found["VPCZoneIdentifier"].split(",")) == len(zones) > 1
    assert [process["ProcessName"] for process in found["SuspendedProcesses"]] == ["AZRebalance"]
    assert not found.get("CapacityRebalance")
    assert found["HealthCheckGracePeriod"] <= 60, "who fails its self-test is replaced"


def test_an_instance_has_time_to_come_up_and_to_drain_and_goes_whatever_it_answers(applied: Applied) -> None:
    hooks = applied.client("autoscaling").describe_lifecycle_hooks(AutoScalingGroupName=NAME)["LifecycleHooks"]

    found = {hook["LifecycleTransition"].partition(":")[2]: hook for hook in hooks}
    assert {
        name: (hook["LifecycleHookName"], hook["DefaultResult"], hook["HeartbeatTimeout"])
        for name, hook in found.items()
    } == {
        "EC2_INSTANCE_TERMINATING": (f"{NAME}-drain", "CONTINUE", 300),
        "EC2_INSTANCE_LAUNCHING": (f"{NAME}-ready", "ABANDON", 1800),
    }


def test_an_instance_carries_what_resume_looks_for(applied: Applied) -> None:
    (found,) = group(applied)["Instances"]
    (reservation,) = applied.client("ec2").describe_instances(InstanceIds=[found["InstanceId"]])["Reservations"]
    (instance,) = reservation["Instances"]
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"] if not tag["Key"].startswith("aws:")}

    assert tags == {
        "Name": NAME,
        "harness-run": RUN,
        "harness-store": f"s3://{applied.bucket}/checkpoints",
        "harness-command": COMMAND,
    }
    assert instance["ImageId"] == AMI


# ---- what an instance is --------------------------------------------------------------------------------------------


def test_an_instance_answers_for_itself_by_version_two_of_the_metadata_service(applied: Applied) -> None:
    options = applied.launch_template()["MetadataOptions"]

    assert options["HttpEndpoint"] == "enabled"
    assert options["HttpTokens"] == "required"
    assert options["HttpPutResponseHopLimit"] == 2, "a container is one hop further"
    assert options["InstanceMetadataTags"] == "enabled"


def test_the_root_volume_is_encrypted_and_goes_with_its_instance(applied: Applied) -> None:
    template = applied.launch_template()
    (volume,) = template["BlockDeviceMappings"]

    assert volume["Ebs"]["VolumeType"] == "gp3"
    assert volume["Ebs"]["Encrypted"] is True
    assert volume["Ebs"]["DeleteOnTermination"] is True
    assert template["InstanceInitiatedShutdownBehavior"] == "terminate"


def test_the_instances_role_can_be_taken_by_ec2_alone(applied: Applied) -> None:
    iam = applied.client("iam")
    profile = applied.launch_template()["IamInstanceProfile"]["Arn"].split("/")[-1]
    (role,) = iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]

    assert role["RoleName"] == applied.role
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert trust == {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "ec2.amazonaws.com"}}


def test_user_data_is_small_and_names_the_scripts_by_their_digests(applied: Applied) -> None:
    packed = base64.b64decode(applied.launch_template()["UserData"])
    assert len(packed) <= 3 * 1024, "EC2 takes 16 KB, the user's own words included"
    assert applied.user_data.startswith("#!/usr/bin/env bash\n")

    named = re.findall(r'^script ([0-9a-f]{64}) "([^"]+)" (\S+)$', applied.user_data, re.MULTILINE)
    assert {name for _, _, name in named} == set(SCRIPTS)
    for digest, key, name in named:
        body = applied.client("s3").get_object(Bucket=applied.bucket, Key=key)["Body"].read()
        assert body == scripts(applied)[name]
        assert hashlib.sha256(body).hexdigest() == digest


def test_user_data_leaves_the_settings_and_the_scripts_where_a_node_has_them(applied: Applied, tmp_path: Path) -> None:
    script = tmp_path / "user-data"
    script.write_text(applied.user_data)
    root = tmp_path / "root"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {**applied.account.environment(), "PATH": path, "HARNESS_ROOT": str(root)}
    started = subprocess.run(["bash", script, "--help"], env=environment, capture_output=True, text=True, check=True)
    assert started.stdout.startswith("usage: bootstrap-node.sh"), "its arguments are passed on"

    for name in SCRIPTS:
        written = root / "opt" / "harness" / "bin" / name
        assert written.read_bytes() == scripts(applied)[name]
        assert written.stat().st_mode & 0o777 == 0o755
    settings = sourced(root / "etc" / "harness" / "node.env")
    (archive,) = archives(applied)
    assert settings | {"HARNESS_PYTHON": "", "HARNESS_PACKAGE": "", "HARNESS_SETUP": ""} == {
        "HARNESS_RUN": RUN,
        "HARNESS_STORE": f"s3://{applied.bucket}/checkpoints",
        "HARNESS_COMMAND": COMMAND,
        "HARNESS_SOURCE": f"s3://{applied.bucket}/{archive}",
        "HARNESS_PACKAGE": "",
        "HARNESS_SETUP": "",
        "HARNESS_PYTHON": "",
        "HARNESS_IMAGE": "",
        "HARNESS_GROUP": NAME,
        "HARNESS_HOOK": f"{NAME}-drain",
        "HARNESS_LAUNCH_HOOK": f"{NAME}-ready",
        "HARNESS_TOPIC": applied.topic_arn,
        "HARNESS_METRICS": "Harness",
        "HARNESS_LOG_GROUP": f"/harness/{RUN}",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
    }


def scripts(applied: Applied) -> dict[str, bytes]:
    """The repository's scripts, as they were when the module was applied."""
    return {path.name: path.read_bytes() for path in (applied.terraform.module.parent / "scripts").iterdir()}


def sourced(path: Path) -> dict[str, str]:
    """The variables of an environment file, as bash reads them."""
    read = subprocess.run(
        ["bash", "-c", 'set -a; source "$1"; env -0', "bash", path], env={}, capture_output=True, text=True, check=True
    )
    found = dict(line.split("=", 1) for line in read.stdout.split("\0") if line)
    return {name: value for name, value in found.items() if name.startswith(("HARNESS_", "AWS_"))}


def keys(applied: Applied, prefix: str = "") -> list[str]:
    listed = applied.client("s3").list_objects_v2(Bucket=applied.bucket, Prefix=prefix)
    return [found["Key"] for found in listed.get("Contents", [])]


# ---- the bucket -----------------------------------------------------------------------------------------------------


def test_the_bucket_is_encrypted_private_and_without_acls(applied: Applied) -> None:
    s3 = applied.client("s3")

    (rule,) = s3.get_bucket_encryption(Bucket=applied.bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    blocked = s3.get_public_access_block(Bucket=applied.bucket)["PublicAccessBlockConfiguration"]
    assert set(blocked.values()) == {True}
    assert len(blocked) == 4
    (owner,) = s3.get_bucket_ownership_controls(Bucket=applied.bucket)["OwnershipControls"]["Rules"]
    assert owner["ObjectOwnership"] == "BucketOwnerEnforced"
    assert s3.get_bucket_location(Bucket=applied.bucket)["LocationConstraint"] == REGION


def test_the_bucket_drops_uploads_that_nobody_finished_and_nothing_else(applied: Applied) -> None:
    (rule,) = applied.client("s3").get_bucket_lifecycle_configuration(Bucket=applied.bucket)["Rules"]

    assert rule["Status"] == "Enabled"
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert not {"Expiration", "Transitions", "NoncurrentVersionExpiration"} & set(rule)


@pytest.mark.parametrize("folder", ["commits", "generations"])
def test_the_bucket_takes_a_commit_only_where_there_is_none(copied: Applied, folder: str) -> None:
    s3 = copied.client("s3")
    place = {"Bucket": copied.bucket, "Key": f"checkpoints/{RUN}/{folder}/1"}

    refused(403, lambda: s3.put_object(**place, Body=b"overwritten"))
    s3.put_object(**place, Body=b"first", IfNoneMatch="*")
    refused(412, lambda: s3.put_object(**place, Body=b"second", IfNoneMatch="*"))
    refused(403, lambda: s3.put_object(**place, Body=b"third"))
    assert s3.get_object(**place)["Body"].read() == b"first"
    s3.put_object(Bucket=copied.bucket, Key=CHECKPOINT, Body=b"of no consequence without a commit")


def refused(status: int, call: Callable[[], object]) -> None:
    with pytest.raises(ClientError) as error:
        call()
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


# ---- network --------------------------------------------------------------------------------------------------------


def test_nobody_gets_in_and_nobody_elses_routes_change(applied: Applied) -> None:
    ec2 = applied.client("ec2")
    (security_group,) = applied.launch_template()["SecurityGroupIds"]
    rules = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [security_group]}])
    (described,) = ec2.describe_security_groups(GroupIds=[security_group])["SecurityGroups"]

    assert [rule["IsEgress"] for rule in rules["SecurityGroupRules"]] == [True]
    assert described["IpPermissions"] == []
    assert ec2.describe_vpc_endpoints()["VpcEndpoints"] == [], "unless it is asked for: it cuts connections of others"


def test_a_run_has_a_fleet_in_a_second_region(copied: Applied, tmp_path: Path) -> None:
    there = "us-west-2"
    copied.client("s3", there).create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": there})
    copied.client("ssm", there).put_parameter(Name=AMI_PARAMETER, Value=AMI, Type="String")
    second = Terraform.prepare(
        tmp_path / "second",
        copied.account,
        {**variables(tmp_path), "region": there, "bucket": "far", "s3_gateway_endpoint": True},
    )

    second.apply()

    groups = {
        region: copied.client("autoscaling", region).describe_auto_scaling_groups()["AutoScalingGroups"]
        for region in (REGION, there)
    }
    assert {region: [found["AutoScalingGroupName"] for found in each] for region, each in groups.items()} == {
        REGION: [NAME], there: [NAME],
    }  # fmt: skip
    assert {role["RoleName"] for role in copied.client("iam").list_roles()["Roles"]} >= {f"{NAME}-euw1", f"{NAME}-usw2"}
    (endpoint,) = copied.client("ec2", there).describe_vpc_endpoints()["VpcEndpoints"]
    assert (endpoint["VpcEndpointType"], endpoint["ServiceName"]) == ("Gateway", f"com.amazonaws.{there}.s3")
    assert endpoint["RouteTableIds"]


# ---- who is told ----------------------------------------------------------------------------------------------------


def rules(applied: Applied) -> dict[str, dict[str, Any]]:
    found = applied.client("events").list_rules()["Rules"]
    return {rule["Name"].removeprefix(f"{NAME}-"): json.loads(rule["EventPattern"]) for rule in found}


def test_what_happens_to_instances_is_told_by_rules_that_ec2_and_the_group_match(applied: Applied) -> None:
    found = rules(applied)

    assert {name: pattern["detail-type"] for name, pattern in found.items() if name != "group"} == {
        "interruption": ["EC2 Spot Instance Interruption Warning"],
        "rebalance": ["EC2 Instance Rebalance Recommendation"],
    }
    assert {name: pattern["source"] for name, pattern in found.items()} == {
        "interruption": ["aws.ec2"], "rebalance": ["aws.ec2"], "group": ["aws.autoscaling"],
    }  # fmt: skip
    assert found["group"]["detail"] == {"AutoScalingGroupName": [NAME]}


def test_rules_write_mails_that_a_person_can_read(applied: Applied) -> None:
    events = applied.client("events")
    for name in rules(applied):
        (target,) = events.list_targets_by_rule(Rule=f"{NAME}-{name}")["Targets"]

        assert target["Arn"] == applied.topic_arn
        form = target["InputTransformer"]
        mail = form["InputTemplate"]  # as it is: EventBridge does not read it as JSON
        for part in form["InputPathsMap"]:
            assert f"<{part}>" in mail
            mail = mail.replace(f"<{part}>", "…")
        assert RUN in json.loads(mail)
        assert "<" not in mail, "every part of it is taken from the event"


def test_no_policy_for_logs_is_needed_of_which_a_region_has_ten(applied: Applied) -> None:
    logs = applied.client("logs")
    (log,) = logs.describe_log_groups()["logGroups"]

    assert (log["logGroupName"], log["retentionInDays"]) == (f"/harness/{RUN}", 30)
    assert logs.describe_resource_policies()["resourcePolicies"] == []


def test_the_address_that_was_given_hears_what_the_topic_says(applied: Applied) -> None:
    (subscription,) = applied.client("sns").list_subscriptions()["Subscriptions"]

    assert subscription["TopicArn"] == applied.topic_arn
    assert (subscription["Protocol"], subscription["Endpoint"]) == ("email", "somebody@example.org")


def test_alarms_hear_what_nodes_measure_and_ring_at_the_topic(applied: Applied) -> None:
    found = {
        alarm["AlarmName"].removeprefix(f"{NAME}-"): alarm
        for alarm in applied.client("cloudwatch").describe_alarms()["MetricAlarms"]
    }

    assert set(found) == {"durable-age", "crash-loop", "failed-starts", "no-progress", "never-ready"}
    assert all(applied.topic_arn in alarm["AlarmActions"] for alarm in found.values())
    age = {query["Id"]: query["MetricStat"] for query in found["durable-age"]["Metrics"] if "MetricStat" in query}
    measured = [age["age"]["Metric"], *(found[name] for name in ("crash-loop", "failed-starts"))]
    run = [{"Name": "Run", "Value": RUN}]
    assert [(one["Namespace"], one["MetricName"], one["Dimensions"]) for one in measured] == [
        ("Harness", "DurableAgeSeconds", run),
        ("Harness", "Starts", run),
        ("Harness", "FailedStarts", run),
    ]
    assert (found["durable-age"]["Threshold"], found["durable-age"]["TreatMissingData"]) == (1800.0, "breaching")
    assert found["crash-loop"]["TreatMissingData"] == "notBreaching", "a run that has ended does not start"


def test_two_alarms_set_the_group_to_zero(applied: Applied) -> None:
    (policy,) = applied.client("autoscaling").describe_policies(AutoScalingGroupName=NAME)["ScalingPolicies"]
    alarms = applied.client("cloudwatch").describe_alarms()["MetricAlarms"]

    assert (policy["AdjustmentType"], policy["StepAdjustments"][0]["ScalingAdjustment"]) == ("ExactCapacity", 0)
    assert {alarm["AlarmName"] for alarm in alarms if policy["PolicyARN"] in alarm["AlarmActions"]} == {
        f"{NAME}-no-progress", f"{NAME}-never-ready",
    }  # fmt: skip
    for alarm in alarms:
        if policy["PolicyARN"] in alarm["AlarmActions"]:
            (period,) = {query["MetricStat"]["Period"] for query in alarm["Metrics"] if "MetricStat" in query}
            assert period % 60 == 0
            assert period * alarm["EvaluationPeriods"] <= (86_400 if period < 3600 else 604_800), "CloudWatch's limits"
            assert alarm["DatapointsToAlarm"] == alarm["EvaluationPeriods"]


# ---- again, and mistakes --------------------------------------------------------------------------------------------


def test_a_second_apply_changes_nothing(copied: Applied) -> None:
    planned = copied.terraform.plan()
    assert planned.code == 0, planned.output


def test_a_state_of_the_undivided_module_moves_and_nothing_is_made_again(copied: Applied) -> None:
    path = copied.terraform.module / "terraform.tfstate"
    state = json.loads(path.read_text())
    kept = [found for found in state["resources"] if found["mode"] == "managed"]
    for found in kept:  # as an apply before November 2026 has left it
        module = found.pop("module").removeprefix("module.fleet").removeprefix(".")
        found |= {"module": module} if module else {}
    state["resources"] = kept
    state["serial"] += 1
    path.write_text(json.dumps(state))
    assert "aws_autoscaling_group.this" in copied.terraform.run("state", "list").output.splitlines()

    planned = copied.terraform.plan()

    assert "Plan: 0 to add, 0 to change, 0 to destroy." in planned.words, planned.output
    assert "aws_autoscaling_group.this has moved to module.fleet.aws_autoscaling_group.this" in planned.words


def test_new_code_is_a_new_object_and_another_node_goes_on_with_it_at_once(copied: Applied, tmp_path: Path) -> None:
    archive = tmp_path / "other.tar.gz"
    archive.write_bytes(b"other code")
    (before,), (trains,) = archives(copied), group(copied)["Instances"]
    copied.terraform.set(source_archive=str(archive))
    copied.terraform.apply(KNOWN)

    (after,) = archives(copied)
    assert before != after
    assert f"{copied.bucket}/{after}" in node_env(copied.user_data)
    (goes_on,) = group(copied)["Instances"]
    assert goes_on["InstanceId"] != trains["InstanceId"], "the new code is there now, and not at the next interruption"


def archives(applied: Applied) -> list[str]:
    """Keys of the run's code, without the node's scripts."""
    return [key for key in keys(applied, "sources/") if "/scripts/" not in key]


def node_env(user_data: str) -> str:
    (encoded,) = re.findall(r'/node\.env\.new" <<<"([A-Za-z0-9+/=]+)"', user_data)
    return base64.b64decode(encoded).decode()


def test_what_cannot_be_is_refused_by_the_name_of_its_variable(copied: Applied) -> None:
    copied.terraform.set(
        run="", source_archive="absent.tar.gz", instance_types=[], max_size=0, bucket_prefix="/", bucket="s3://mine"
    )
    words = copied.terraform.plan(codes=(1,)).words

    for said in (
        "run: letters, digits",
        "source_archive: there is no file absent.tar.gz",
        "instance_types: zero types",
        "max_size: at least 1, and not below desired_capacity",
        "bucket_prefix: folders of letters",
        "bucket: the plain name of a bucket",
    ):
        assert said in words


def test_two_instances_at_once_are_refused(copied: Applied) -> None:
    """Each would ask the other for the run, for ever."""
    copied.terraform.set(desired_capacity=2)
    assert "desired_capacity: 1, or 0 to stop: a run trains on one machine" in copied.terraform.plan(codes=(1,)).words


def test_what_aws_does_not_have_is_refused_by_the_name_of_its_variable(copied: Applied) -> None:
    copied.client("s3", "us-east-1").create_bucket(Bucket="far-away")
    copied.terraform.set(
        bucket="far-away",
        source_archive="s3://far-away/absent.tar.gz",
        instance_types=["g6.xlarge", "m5.large"],
        subnet_ids=["subnet-0123456789abcdef0"],
    )
    words = copied.terraform.plan(KNOWN, codes=(1,)).words

    for said in (
        f"bucket: far-away is in us-east-1, and the fleet in {REGION}",
        "with module.fleet.data.aws_s3_object.source_archive[0]",
        "instance_types: m5.large has no NVMe instance store",
        "subnet_ids: subnet-0123456789abcdef0 not in vpc-",
    ):
        assert said in words


# ---- the end --------------------------------------------------------------------------------------------------------


def costs(applied: Applied) -> dict[str, list[Any]]:
    """What is left that AWS asks money for, or that would start it again."""
    ec2 = applied.client("ec2")
    instances = [one for found in ec2.describe_instances()["Reservations"] for one in found["Instances"]]
    return {
        "groups": applied.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"],
        "instances": [one["InstanceId"] for one in instances if one["State"]["Name"] != "terminated"],
        "templates": ec2.describe_launch_templates()["LaunchTemplates"],
        "endpoints": [one for one in ec2.describe_vpc_endpoints()["VpcEndpoints"] if one["State"] != "deleted"],
        "alarms": applied.client("cloudwatch").describe_alarms()["MetricAlarms"],
        "logs": applied.client("logs").describe_log_groups()["logGroups"],
        "rules": applied.client("events").list_rules()["Rules"],
        "topics": applied.client("sns").list_topics()["Topics"],
        "roles": applied.client("iam").list_roles()["Roles"],
    }


def buckets(applied: Applied) -> list[str]:
    return [bucket["Name"] for bucket in applied.client("s3").list_buckets()["Buckets"]]


def test_a_destroy_is_stopped_by_checkpoints_and_leaves_nothing_else_that_costs(copied: Applied) -> None:
    bucket = copied.bucket
    copied.client("s3").put_object(Bucket=bucket, Key=CHECKPOINT, Body=b"weights")

    destroyed = copied.terraform.destroy(codes=(1,))

    assert "BucketNotEmpty" in destroyed.words
    listed = copied.client("s3").list_objects_v2(Bucket=bucket)["Contents"]
    assert [found["Key"] for found in listed] == [CHECKPOINT]
    assert costs(copied) == {name: [] for name in costs(copied)}


def test_a_bucket_that_was_let_go_outlives_the_fleet_with_its_rules_and_the_next_fleet_takes_it(
    copied: Applied,
) -> None:
    bucket, s3 = copied.bucket, copied.client("s3")
    s3.put_object(Bucket=bucket, Key=CHECKPOINT, Body=b"weights")
    policy = s3.get_bucket_policy(Bucket=bucket)["Policy"]

    copied.terraform.run("state", "rm", "module.fleet.module.bucket")
    copied.terraform.destroy(KNOWN)

    assert costs(copied) == {name: [] for name in costs(copied)}
    copied.terraform.set(bucket=bucket)
    copied.terraform.apply()
    assert buckets(copied) == [bucket]
    assert s3.get_object(Bucket=bucket, Key=CHECKPOINT)["Body"].read() == b"weights"
    assert s3.get_bucket_policy(Bucket=bucket)["Policy"] == policy
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert set(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values()) == {True}
    assert f's3://{bucket}/checkpoints"' in node_env(copied.user_data)


def test_checkpoints_are_deleted_by_who_says_so_first(copied: Applied) -> None:
    copied.client("s3").put_object(Bucket=copied.bucket, Key=CHECKPOINT, Body=b"weights")
    copied.terraform.set(delete_checkpoints=True)
    copied.terraform.apply(KNOWN)

    copied.terraform.destroy(KNOWN)

    assert buckets(copied) == []
    assert copied.terraform.run("state", "list").output == ""
