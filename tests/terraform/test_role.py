"""What a node's role may do, and what it may not: its policies as AWS has them, and the bucket's, for one call each.

`tests.support.iam` judges, since moto does not look at conditions. What the harness needs is named by the two tables of
actions in docs/operations.md and by `cloud.aws.fleet_errors`; a call that is in none of them has no business in the
role.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest

from cloud.aws.fleet_errors import SERVICES
from tests.support.applied import RUN, Applied
from tests.support.aws_account import NUMBER, REGION, ROOT
from tests.support.iam import Request, Verdict, judge, statements

pytestmark = pytest.mark.long("terraform and its provider wait for what they have changed")

ALLOWED, NOT_ALLOWED, DENIED = Verdict.ALLOWED, Verdict.NOT_ALLOWED, Verdict.DENIED
OBJECTS = f"checkpoints/{RUN}"
NOT_SENT = dict.fromkeys(
    (
        "s3:if-none-match",
        "s3:ObjectCreationOperation",
        "s3:prefix",
        "cloudwatch:namespace",
        "autoscaling:MinSize",
        "autoscaling:MaxSize",
        "autoscaling:LaunchConfigurationName",
        "autoscaling:VPCZoneIdentifiers",
        "kms:ViaService",
    )
)
PUT = {"s3:ObjectCreationOperation": "true", "s3:if-none-match": "*"}
OVERWRITE = {"s3:ObjectCreationOperation": "true"}
PART = {"s3:ObjectCreationOperation": "false"}


@dataclass(frozen=True)
class Role:
    """A role and a bucket, by their policies."""

    arn: str
    bucket: str
    own: dict[str, Any]
    buckets: dict[str, Any]

    def verdict(self, action: str, resource: str, **context: str) -> Verdict:
        """Of a call over TLS, unless the context says otherwise. A key in the bucket is a resource too."""
        arn = resource if resource == "*" or resource.startswith("arn:") else f"{bucket_arn(self.bucket)}/{resource}"
        sent = {"aws:SecureTransport": "true", **NOT_SENT, **context}
        of_the_bucket = [self.buckets] if arn.startswith(bucket_arn(self.bucket)) else []
        return judge(Request(action, arn, self.arn, sent), [self.own], of_the_bucket)

    def actions(self) -> set[str]:
        """Every action that a statement of the role names."""
        named = [statement["Action"] for statement in statements(self.own)]
        return {action for one in named for action in ([one] if isinstance(one, str) else one)}


def bucket_arn(name: str) -> str:
    return f"arn:aws:s3:::{name}"


def group_arn(name: str, *, region: str = REGION, account: str = NUMBER) -> str:
    return (
        f"arn:aws:autoscaling:{region}:{account}:autoScalingGroup:7a1e9f3c-0000-4000-8000-3e2b1c0d9f8a:"
        f"autoScalingGroupName/{name}"
    )


@pytest.fixture(scope="module")
def role(applied: Applied) -> Role:
    return role_of(applied)


def role_of(applied: Applied) -> Role:
    iam, s3 = applied.client("iam"), applied.client("s3")
    (inline,) = iam.list_role_policies(RoleName=applied.role)["PolicyNames"]
    return Role(
        iam.get_role(RoleName=applied.role)["Role"]["Arn"],
        applied.bucket,
        iam.get_role_policy(RoleName=applied.role, PolicyName=inline)["PolicyDocument"],
        json.loads(s3.get_bucket_policy(Bucket=applied.bucket)["Policy"]),
    )


# ---- S3: the table of docs/operations.md ----------------------------------------------------------------------------


def documented(heading: str) -> dict[str, str]:
    """The table of actions below a heading of docs/operations.md: what each is needed on, by its name."""
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.split(f"\n{heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`\w+:[^|]*) \| ([^|]*) \|", section, re.MULTILINE)
    return {action: on for actions, on in rows for action in re.findall(r"`(\w+:\w+)`", actions)}


S3_ACTIONS = documented("### IAM actions")
FLEET_ACTIONS = documented("## A fleet")
LOG_ACTIONS = {"logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"}
SHELL_ACTIONS = {"ssm:UpdateInstanceInformation"} | {
    f"ssmmessages:{verb}{channel}" for verb in ("Create", "Open") for channel in ("ControlChannel", "DataChannel")
}


def needed() -> list[tuple[str, str, dict[str, str]]]:
    """A call for each action and each place that the table names: action, resource, context."""
    found = []
    for action, on in S3_ACTIONS.items():
        folders = re.findall(r"`<run>/([a-z]+)/\*`", on)
        if on.startswith("everything below"):
            folders = ["generations", "commits", "snapshots", "events", "quarantine"]
        context = {"s3:prefix": f"{OBJECTS}/commits/"} if "s3:prefix" in on else {}
        assert folders or on.startswith("the bucket"), f"a row of another form: {on}"
        found += [(action, f"{OBJECTS}/{folder}/1", PUT if action == "s3:PutObject" else {}) for folder in folders]
        found += [] if folders else [(action, "", context)]
    return found


@pytest.mark.parametrize(("action", "key", "context"), needed())
def test_a_node_may_do_what_the_table_says(role: Role, action: str, key: str, context: dict[str, str]) -> None:
    assert role.verdict(action, key or bucket_arn(role.bucket), **context) is ALLOWED


def test_a_node_may_do_with_s3_nothing_that_the_table_does_not_say(role: Role) -> None:
    assert {action for action in role.actions() if action.startswith("s3:")} == set(S3_ACTIONS)


@pytest.mark.parametrize("folder", ["generations", "events", "", "probes"])
def test_what_tells_of_the_past_is_never_deleted(role: Role, folder: str) -> None:
    assert role.verdict("s3:DeleteObject", f"{OBJECTS}/{folder}/1") is NOT_ALLOWED


@pytest.mark.parametrize("action", ["s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"])
@pytest.mark.parametrize(
    "key", ["checkpoints/other/snapshots/1", f"checkpoints/{RUN}-2/snapshots/1", f"{RUN}/snapshots/1", "anything"]
)
def test_another_runs_keys_are_out_of_reach(role: Role, action: str, key: str) -> None:
    assert role.verdict(action, key, **(PUT if action == "s3:PutObject" else {})) is NOT_ALLOWED


@pytest.mark.parametrize("prefix", [None, "", "checkpoints/", f"checkpoints/{RUN}", "checkpoints/other/", "sources/"])
def test_a_list_that_shows_other_runs_is_out_of_reach(role: Role, prefix: str | None) -> None:
    context = {} if prefix is None else {"s3:prefix": prefix}
    assert role.verdict("s3:ListBucket", bucket_arn(role.bucket), **context) is NOT_ALLOWED


def test_the_code_is_read_and_never_written(role: Role) -> None:
    assert role.verdict("s3:GetObject", f"sources/{RUN}/1.tar.gz") is ALLOWED
    assert role.verdict("s3:GetObject", "sources/other/1.tar.gz") is NOT_ALLOWED
    for action in ("s3:PutObject", "s3:DeleteObject"):
        assert role.verdict(action, f"sources/{RUN}/1.tar.gz", **PUT) is NOT_ALLOWED


@pytest.mark.parametrize("folder", ["commits", "generations"])
def test_a_record_is_put_where_there_is_none_or_not_at_all(role: Role, folder: str) -> None:
    key = f"{OBJECTS}/{folder}/1"
    assert role.verdict("s3:PutObject", key, **PUT) is ALLOWED
    assert role.verdict("s3:PutObject", key, **OVERWRITE) is DENIED
    assert role.verdict("s3:PutObject", key, **PART) is ALLOWED, "a part is nothing until its upload is completed"


def test_a_record_of_any_run_is_put_where_there_is_none_whoever_puts_it(role: Role) -> None:
    administrator = {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}
    everybody = Role("arn:aws:iam::123456789012:user/admin", role.bucket, administrator, role.buckets)

    assert everybody.verdict("s3:PutObject", "checkpoints/other/commits/1", **OVERWRITE) is DENIED
    assert everybody.verdict("s3:PutObject", "checkpoints/other/commits/1", **PUT) is ALLOWED


def test_a_shard_is_written_again_by_who_repeats_a_part(role: Role) -> None:
    for context in (PUT, OVERWRITE, PART):
        assert role.verdict("s3:PutObject", f"{OBJECTS}/snapshots/1", **context) is ALLOWED


def test_a_shard_is_copied_from_one_snapshot_to_another_of_the_run_and_from_nowhere_else(role: Role) -> None:
    """A CopyObject is a GetObject of the source and a PutObject without If-None-Match; UploadPartCopy puts a part."""
    assert role.verdict("s3:GetObject", f"{OBJECTS}/snapshots/1") is ALLOWED
    assert role.verdict("s3:PutObject", f"{OBJECTS}/snapshots/2", **OVERWRITE) is ALLOWED
    assert role.verdict("s3:PutObject", f"{OBJECTS}/snapshots/2", **PART) is ALLOWED
    assert role.verdict("s3:GetObject", "checkpoints/other/snapshots/1") is NOT_ALLOWED
    assert role.verdict("s3:PutObject", f"{OBJECTS}/commits/2", **OVERWRITE) is DENIED


@pytest.mark.parametrize(
    ("action", "key"),
    [("s3:GetObject", f"{OBJECTS}/commits/1"), ("s3:PutObject", f"{OBJECTS}/snapshots/1"), ("s3:ListBucket", "")],
)
def test_nothing_passes_in_clear(role: Role, action: str, key: str) -> None:
    plain = {"aws:SecureTransport": "false", "s3:prefix": f"{OBJECTS}/"}
    assert role.verdict(action, key or bucket_arn(role.bucket), **plain) is DENIED


# ---- the fleet ------------------------------------------------------------------------------------------------------

SECRETS = ("ssm:GetParameter", "secretsmanager:GetSecretValue")  # where a variable names some
LOWERS_A_MINIMUM = "UpdateAutoScalingGroup"  # which this group does not have
ON_THE_GROUP = sorted(
    name
    for name, service in SERVICES.items()
    if service == "autoscaling" and name[:3] != "Des" and name != LOWERS_A_MINIMUM
)


@pytest.mark.parametrize("call", ON_THE_GROUP)
def test_a_node_steers_its_own_group_and_no_other(role: Role, applied: Applied, call: str) -> None:
    action, group = f"autoscaling:{call}", applied.group

    assert role.verdict(action, group_arn(group)) is ALLOWED
    for other in (
        group_arn("other"),
        group_arn(f"{group}-2"),
        group_arn(f"other/{group}"),
        group_arn(group, region="us-east-1"),
        group_arn(group, account="210987654321"),
    ):
        assert role.verdict(action, other) is NOT_ALLOWED, other


def test_a_node_sees_groups_and_tells_its_own_topic(role: Role, applied: Applied) -> None:
    assert role.verdict("autoscaling:DescribeAutoScalingGroups", "*") is ALLOWED
    assert role.verdict("sns:Publish", applied.topic_arn) is ALLOWED
    assert role.verdict("sns:Publish", f"{applied.topic_arn}-2") is NOT_ALLOWED
    assert role.verdict("sns:Publish", "*") is NOT_ALLOWED


def test_a_node_cannot_make_its_group_larger_nor_have_it_start_something_else(role: Role, applied: Applied) -> None:
    """It need not lower the minimum, which is 0: so it may not change the group at all, but for its desired size."""
    for sent in ({}, {"MinSize": "0"}, {"MaxSize": "100"}, {"VPCZoneIdentifiers": "another"}):
        named = {f"autoscaling:{name}": value for name, value in sent.items()}
        assert role.verdict("autoscaling:UpdateAutoScalingGroup", group_arn(applied.group), **named) is NOT_ALLOWED


def test_a_node_measures_in_its_own_namespace(role: Role) -> None:
    assert role.verdict("cloudwatch:PutMetricData", "*", **{"cloudwatch:namespace": "Harness"}) is ALLOWED
    assert role.verdict("cloudwatch:PutMetricData", "*", **{"cloudwatch:namespace": "AWS/AutoScaling"}) is NOT_ALLOWED
    assert role.verdict("cloudwatch:PutMetricData", "*") is NOT_ALLOWED


def test_a_node_writes_its_own_log(role: Role, applied: Applied) -> None:
    groups = f"arn:aws:logs:{REGION}:{NUMBER}:log-group:"
    assert role.verdict("logs:PutLogEvents", f"{groups}{applied.outputs['log_group']}:log-stream:i-1") is ALLOWED
    assert role.verdict("logs:PutLogEvents", f"{groups}/harness/other:log-stream:i-1") is NOT_ALLOWED
    assert role.verdict("logs:DeleteLogGroup", f"{groups}{applied.outputs['log_group']}") is NOT_ALLOWED


def test_a_node_may_do_nothing_that_no_call_of_the_harness_needs(role: Role) -> None:
    calls = {f"{service}:{call}" for call, service in SERVICES.items()}
    assert set(FLEET_ACTIONS) == calls
    mine = role.actions() - set(S3_ACTIONS) - LOG_ACTIONS - SHELL_ACTIONS
    assert mine == calls - {f"autoscaling:{LOWERS_A_MINIMUM}", *SECRETS}


@pytest.mark.parametrize(
    ("action", "resource"),
    [
        ("ec2:RunInstances", "*"),
        ("ec2:TerminateInstances", f"arn:aws:ec2:{REGION}:{NUMBER}:instance/i-1"),
        ("ec2:DescribeInstances", "*"),
        ("iam:PassRole", f"arn:aws:iam::{NUMBER}:role/harness-{RUN}"),
        ("iam:PutRolePolicy", f"arn:aws:iam::{NUMBER}:role/harness-{RUN}"),
        ("sts:AssumeRole", f"arn:aws:iam::{NUMBER}:role/administrator"),
        ("sns:Subscribe", f"arn:aws:sns:{REGION}:{NUMBER}:harness-{RUN}"),
        ("autoscaling:CreateAutoScalingGroup", group_arn("other")),
        ("autoscaling:DeleteAutoScalingGroup", group_arn(f"harness-{RUN}")),
        ("autoscaling:AttachInstances", group_arn(f"harness-{RUN}")),
        ("ssm:GetParameter", f"arn:aws:ssm:{REGION}:{NUMBER}:parameter/secret"),
        ("ssm:SendCommand", "*"),
        ("s3:DeleteBucket", ""),
        ("s3:PutBucketPolicy", ""),
        ("s3:DeleteBucketPolicy", ""),
        ("s3:PutLifecycleConfiguration", ""),
        ("s3:PutEncryptionConfiguration", ""),
        ("s3:PutBucketPublicAccessBlock", ""),
        ("s3:ListAllMyBuckets", "*"),
        ("s3:PutObjectAcl", f"{OBJECTS}/commits/1"),
        ("s3:BypassGovernanceRetention", f"{OBJECTS}/commits/1"),
        ("kms:Decrypt", f"arn:aws:kms:{REGION}:{NUMBER}:key/1"),
    ],
)
def test_what_would_hurt_is_not_allowed(role: Role, action: str, resource: str) -> None:
    assert role.verdict(action, resource or bucket_arn(role.bucket)) is NOT_ALLOWED


def test_none_of_awss_own_policies_is_attached(applied: Applied) -> None:
    """The one for Session Manager lets a node read every parameter of the account."""
    assert applied.client("iam").list_attached_role_policies(RoleName=applied.role)["AttachedPolicies"] == []


@pytest.mark.parametrize("action", sorted(SHELL_ACTIONS))
def test_a_shell_needs_no_inbound_port(role: Role, action: str) -> None:
    assert role.verdict(action, "*") is ALLOWED


# ---- what variables add ---------------------------------------------------------------------------------------------


TOKEN = f"arn:aws:ssm:{REGION}:{NUMBER}:parameter/team/token"
VAULT = f"arn:aws:secretsmanager:{REGION}:{NUMBER}:secret:wandb-AbCdEf"


def test_a_variable_adds_what_it_names_and_no_more(copied: Applied) -> None:
    key = f"arn:aws:kms:{REGION}:{NUMBER}:key/11111111-2222-3333-4444-555555555555"
    before = role_of(copied).actions()
    copied.terraform.set(
        kms_key_arn=key,
        data_bucket_arns=["arn:aws:s3:::my-data"],
        container_image=f"{NUMBER}.dkr.ecr.{REGION}.amazonaws.com/train:v3",
        harness_package="s3://my-wheels/below/harness-1.whl",
        secrets={"HF_TOKEN": TOKEN, "WANDB_API_KEY": f"{VAULT}:key::"},
        secrets_kms_key_arn=key.replace("1111", "2222"),
    )
    copied.terraform.apply("-refresh=false")
    role = role_of(copied)

    images = f"arn:aws:ecr:{REGION}:{NUMBER}:repository"
    may: list[tuple[str, str, str]] = [  # action, on this, not on that
        ("kms:Decrypt", key, key.replace("1111", "9999")),
        ("kms:GenerateDataKey", key, key.replace("1111", "9999")),
        ("s3:GetObject", "arn:aws:s3:::my-data/shard-1", "arn:aws:s3:::my-data-2/shard-1"),
        ("s3:ListBucket", "arn:aws:s3:::my-data", "arn:aws:s3:::my-wheels"),
        ("s3:GetObject", "arn:aws:s3:::my-wheels/below/harness-1.whl", "arn:aws:s3:::my-wheels/below/other.whl"),
        ("ecr:BatchGetImage", f"{images}/train", f"{images}/other"),
        ("ecr:GetDownloadUrlForLayer", f"{images}/train", f"{images}/train-2"),
        ("ssm:GetParameter", TOKEN, f"{TOKEN}-2"),
        ("secretsmanager:GetSecretValue", VAULT, f"{VAULT}-2"),
    ]
    for action, this, that in may:
        assert (role.verdict(action, this), role.verdict(action, that)) == (ALLOWED, NOT_ALLOWED), action
    by_the_service = {"kms:ViaService": f"ssm.{REGION}.amazonaws.com"}
    assert role.verdict("kms:Decrypt", key.replace("1111", "2222"), **by_the_service) is ALLOWED
    assert role.verdict("kms:Decrypt", key.replace("1111", "2222")) is NOT_ALLOWED
    assert role.verdict("ecr:GetAuthorizationToken", "*") is ALLOWED
    assert role.verdict("s3:PutObject", "arn:aws:s3:::my-data/shard-1", **PUT) is NOT_ALLOWED
    assert role.actions() - before == {action for action, *_ in may if action[:2] != "s3"} | {
        "ecr:GetAuthorizationToken"
    }


def test_the_topic_hears_events_alarms_and_budgets_of_this_account(applied: Applied) -> None:
    attributes = applied.client("sns").get_topic_attributes(TopicArn=applied.topic_arn)["Attributes"]
    policy = json.loads(attributes["Policy"])

    def verdict(service: str, account: str) -> Verdict:
        publish = Request("sns:Publish", applied.topic_arn, service, {"aws:SourceAccount": account})
        return judge(publish, [], [policy])

    for service in ("cloudwatch.amazonaws.com", "budgets.amazonaws.com", "events.amazonaws.com"):
        assert verdict(service, NUMBER) is ALLOWED, service
    assert verdict("cloudwatch.amazonaws.com", "210987654321") is NOT_ALLOWED
    assert verdict("s3.amazonaws.com", NUMBER) is NOT_ALLOWED
    assert verdict("arn:aws:iam::210987654321:root", "210987654321") is NOT_ALLOWED
