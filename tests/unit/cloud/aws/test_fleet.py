"""Fleet against moto, and against literal answers for what moto does not know; who am I, against the simulator."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloud.aws.fleet import Fleet, GroupState, find_fleet
from cloud.aws.fleet_errors import Refused
from cloud.aws.instance import GROUP_TAG, Instance
from cloud.aws.metadata import MetadataSession
from cloud.errors import Denied, NotFound, OutcomeUnknown, Unavailable
from cloud.notice import Deadline
from cloud.s3.errors import SlowDown
from cloud.testing.metadata_sim import MetadataSimulator
from tests.support.clock import FakeClock, standing
from tests.support.fleet_server import REGION, FleetServer
from tests.support.patience import HANG_S
from tests.support.s3_account import use_account

ROOT = Path(__file__).parents[4]
NEVER = Deadline.never()
GROUP = "trainers"
HOOK, LAUNCH_HOOK = "drain", "ready"
TOPIC = f"arn:aws:sns:{REGION}:123456789012:alarms"
STRANGER = "i-0123456789abcdef0"

Action = Callable[[Fleet, Deadline], object]

CHANGES: dict[str, Action] = {
    "finish": Fleet.finish,
    "stop": Fleet.stop,
    "leave": Fleet.leave,
    "protect": lambda fleet, deadline: fleet.protect(True, deadline),
    "mark_unhealthy": Fleet.mark_unhealthy,
}
EVERY_CHANGE = pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))


@pytest.fixture(scope="module")
def running() -> Iterator[FleetServer]:
    with FleetServer() as server:
        yield server


@pytest.fixture
def server(running: FleetServer, monkeypatch: pytest.MonkeyPatch) -> FleetServer:
    use_account(monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
    running.reset()
    return running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def join(server: FleetServer, clock: FakeClock) -> Iterator[Callable[[str], Fleet]]:
    """Makes a Fleet for an instance, which pauses on the fake clock."""
    with contextlib.ExitStack() as fleets:

        def joined(instance_id: str, group: str = GROUP) -> Fleet:
            instance = Instance(instance_id, REGION, "g6e.xlarge", f"{REGION}a", spot=True)
            fleet = Fleet(
                instance, group, hook=HOOK, launch_hook=LAUNCH_HOOK, topic=TOPIC, namespace="Harness",
                run="gpt-small", sleep=clock.sleep,
            )  # fmt: skip
            fleets.callback(fleet.close)
            return fleet

        yield joined


def described(state: str, *others: str, desired: int = 1, minimum: int = 0) -> str:
    """The answer to DescribeAutoScalingGroups for a group in which we are in `state`, and others in theirs."""
    members = "".join(
        f"<member><InstanceId>{id_}</InstanceId><LifecycleState>{its}</LifecycleState></member>"
        for id_, its in [(STRANGER, state), *((f"i-{n}", other) for n, other in enumerate(others))]
    )
    return (
        "<DescribeAutoScalingGroupsResponse><DescribeAutoScalingGroupsResult><AutoScalingGroups><member>"
        f"<AutoScalingGroupName>{GROUP}</AutoScalingGroupName><MinSize>{minimum}</MinSize><MaxSize>4</MaxSize>"
        f"<DesiredCapacity>{desired}</DesiredCapacity><Instances>{members}</Instances>"
        "</member></AutoScalingGroups></DescribeAutoScalingGroupsResult></DescribeAutoScalingGroupsResponse>"
    )


def changes(server: FleetServer) -> list[str]:
    return [action for action in server.actions() if not action.startswith("Describe")]


# ------------------------------------------------------------------------------------------- what each does to a group


def test_a_group_is_described(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    instances = server.create_group(GROUP, desired=2, minimum=1)

    assert join(instances[0]).describe(NEVER) == GroupState(GROUP, 2, 1, 4, tuple(instances))
    assert server.requests == [("DescribeAutoScalingGroups", {"AutoScalingGroupNames.member.1": GROUP})]


def test_who_finishes_is_terminated_and_not_replaced(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    first, second = server.create_group(GROUP, desired=2)

    join(first).finish(NEVER)

    assert server.members(GROUP) == [second]
    assert server.sizes(GROUP) == (0, 1)
    assert server.asked("TerminateInstanceInAutoScalingGroup") == [
        {"InstanceId": first, "ShouldDecrementDesiredCapacity": "true"}
    ]


def test_a_minimum_is_lowered_before_the_last_it_allows_finishes(
    server: FleetServer, join: Callable[[str], Fleet]
) -> None:
    first, second = server.create_group(GROUP, desired=2, minimum=2)

    join(first).finish(NEVER)
    assert server.sizes(GROUP) == (1, 1)
    join(second).finish(NEVER)

    assert server.sizes(GROUP) == (0, 0)
    assert server.asked("UpdateAutoScalingGroup") == [
        {"AutoScalingGroupName": GROUP, "MinSize": "1"},
        {"AutoScalingGroupName": GROUP, "MinSize": "0"},
    ]


@pytest.mark.parametrize("code", ["ValidationError", "AccessDenied"])
def test_the_only_one_finishes_by_a_desired_capacity_of_0_where_it_may_not_be_terminated(
    server: FleetServer, join: Callable[[str], Fleet], code: str
) -> None:
    (only,) = server.create_group(GROUP)
    server.fault("TerminateInstanceInAutoScalingGroup", code=code)

    join(only).finish(NEVER)

    assert server.members(GROUP) == []
    assert server.sizes(GROUP) == (0, 0)


def test_one_of_several_that_may_not_be_terminated_leaves_the_others_alone(
    server: FleetServer, join: Callable[[str], Fleet]
) -> None:
    instances = server.create_group(GROUP, desired=2)
    server.fault("TerminateInstanceInAutoScalingGroup", code="AccessDenied", status=403)

    with pytest.raises(Denied, match="allow autoscaling:TerminateInstanceInAutoScalingGroup on this group's ARN"):
        join(instances[0]).finish(NEVER)

    assert server.members(GROUP) == instances
    assert server.sizes(GROUP) == (0, 2)


def test_stop_ends_all_of_the_group(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    first, _ = server.create_group(GROUP, desired=2, minimum=1)

    join(first).stop(NEVER)

    assert server.members(GROUP) == []
    assert server.sizes(GROUP) == (0, 0)
    assert changes(server) == ["UpdateAutoScalingGroup", "SetDesiredCapacity"]


def test_stop_needs_one_permission_where_the_minimum_is_0_already(
    server: FleetServer, join: Callable[[str], Fleet]
) -> None:
    (only,) = server.create_group(GROUP)

    join(only).stop(NEVER)

    assert changes(server) == ["SetDesiredCapacity"]
    assert server.asked("SetDesiredCapacity") == [
        {"AutoScalingGroupName": GROUP, "DesiredCapacity": "0", "HonorCooldown": "false"}
    ]


def test_stop_takes_our_own_protection_off_first(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    (only,) = server.create_group(GROUP)
    fleet = join(only)
    fleet.protect(True, NEVER)

    fleet.stop(NEVER)

    assert changes(server) == ["SetInstanceProtection", "SetInstanceProtection", "SetDesiredCapacity"]
    assert server.asked("SetInstanceProtection")[1]["ProtectedFromScaleIn"] == "false"


def test_who_leaves_is_replaced(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    (only,) = server.create_group(GROUP)

    join(only).leave(NEVER)

    assert len(server.members(GROUP)) == 1
    assert only not in server.members(GROUP)
    assert server.sizes(GROUP) == (0, 1)


def test_protection_goes_on_and_off_for_this_instance_only(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    first, second = server.create_group(GROUP, desired=2)
    fleet = join(first)

    fleet.protect(True, NEVER)
    assert server.member_fields(GROUP, "ProtectedFromScaleIn") == {first: True, second: False}
    fleet.protect(False, NEVER)
    assert server.member_fields(GROUP, "ProtectedFromScaleIn") == {first: False, second: False}


def test_an_unhealthy_instance_is_replaced_without_a_grace_period(
    server: FleetServer, join: Callable[[str], Fleet]
) -> None:
    first, second = server.create_group(GROUP, desired=2)

    join(first).mark_unhealthy(NEVER)

    assert server.member_fields(GROUP, "HealthStatus") == {first: "Unhealthy", second: "Healthy"}
    assert server.asked("SetInstanceHealth") == [
        {"InstanceId": first, "HealthStatus": "Unhealthy", "ShouldRespectGracePeriod": "false"}
    ]


# --------------------------------------------------------------------------------------------------- lifecycle action


def test_a_heartbeat_and_the_completion_name_group_hook_and_instance(
    server: FleetServer, join: Callable[[str], Fleet]
) -> None:
    server.waiting.add(STRANGER)
    fleet = join(STRANGER)

    assert fleet.heartbeat(NEVER)
    assert fleet.complete(NEVER)

    ours = {"AutoScalingGroupName": GROUP, "LifecycleHookName": HOOK, "InstanceId": STRANGER}
    assert server.requests == [
        ("RecordLifecycleActionHeartbeat", ours),
        ("CompleteLifecycleAction", {**ours, "LifecycleActionResult": "CONTINUE"}),
    ]


def test_where_no_action_is_under_way_nothing_is_said(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    server.waiting.add(STRANGER)
    fleet = join(STRANGER)
    fleet.complete(NEVER)

    assert not fleet.complete(NEVER)
    assert not fleet.heartbeat(NEVER)


def test_without_a_hook_nobody_is_asked(server: FleetServer) -> None:
    with contextlib.closing(Fleet(Instance(STRANGER, REGION, "", "", spot=False), GROUP)) as fleet:
        assert not fleet.heartbeat(NEVER)
        assert not fleet.complete(NEVER)
    assert server.requests == []


def test_a_hook_that_is_refused_for_another_reason_says_so_while_we_are_in_the_group(
    server: FleetServer, join: Callable[[str], Fleet]
) -> None:
    (only,) = server.create_group(GROUP)
    server.fault("CompleteLifecycleAction", code="ValidationError", message="that is no hook", times=2)

    with pytest.raises(Refused, match="that is no hook"):
        join(only).complete(NEVER)
    assert not join(STRANGER).complete(NEVER)


# -------------------------------------------------------------------------------------------- topic and metrics


def test_a_message_reaches_the_topics_subscribers(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    sqs, sns = server.client("sqs"), server.client("sns")
    queue = sqs.create_queue(QueueName="inbox")["QueueUrl"]
    assert sns.create_topic(Name="alarms")["TopicArn"] == TOPIC
    inbox = f"arn:aws:sqs:{REGION}:123456789012:inbox"
    sns.subscribe(TopicArn=TOPIC, Protocol="sqs", Endpoint=inbox, Attributes={"RawMessageDelivery": "true"})

    join(STRANGER).notify("gpt-small stopped", "Three crashes.\nSee the log: …", NEVER)

    (message,) = sqs.receive_message(QueueUrl=queue)["Messages"]
    assert message["Body"] == "Three crashes.\nSee the log: …"


@pytest.mark.parametrize(
    ("subject", "sent"),
    [("run\nstopped", "run stopped"), ("one été", "one ?t?"), ("x" * 200, "x" * 99), ("", "-")],
)
def test_a_subject_becomes_one_that_sns_takes(
    server: FleetServer, join: Callable[[str], Fleet], subject: str, sent: str
) -> None:
    server.client("sns").create_topic(Name="alarms")

    join(STRANGER).notify(subject, "", NEVER)

    assert server.asked("Publish") == [{"TopicArn": TOPIC, "Subject": sent, "Message": "-"}]


def test_metrics_carry_run_and_unit(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    join(STRANGER).measure({"DurableAgeSeconds": 61.5, "Starts": 1}, NEVER)

    run = [{"Name": "Run", "Value": "gpt-small"}]
    assert server.asked("PutMetricData") == [
        {
            "Namespace": "Harness",
            "MetricData": [
                {"MetricName": "DurableAgeSeconds", "Dimensions": run, "Value": 61.5, "Unit": "Seconds"},
                {"MetricName": "Starts", "Dimensions": run, "Value": 1.0, "Unit": "Count"},
            ],
        }
    ]
    metrics = server.client("cloudwatch").list_metrics(Namespace="Harness")["Metrics"]
    assert {metric["MetricName"] for metric in metrics} == {"DurableAgeSeconds", "Starts"}


def test_without_topic_and_namespace_nobody_is_told(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    with contextlib.closing(Fleet(Instance(STRANGER, REGION, "", "", spot=False), GROUP)) as fleet:
        fleet.notify("subject", "text", NEVER)
        fleet.measure({"Starts": 1}, NEVER)
    join(STRANGER).measure({}, NEVER)
    assert server.requests == []


# -------------------------------------------------------------------------------------------- twice, and too late


@pytest.mark.parametrize("change", [Fleet.finish, Fleet.stop, Fleet.leave], ids=["finish", "stop", "leave"])
def test_a_second_time_changes_nothing_more(server: FleetServer, join: Callable[[str], Fleet], change: Action) -> None:
    instances = server.create_group(GROUP, desired=3)
    fleet = join(instances[0])
    change(fleet, NEVER)
    left, sizes, so_far = server.members(GROUP), server.sizes(GROUP), len(changes(server))

    change(fleet, NEVER)

    assert server.members(GROUP) == left
    assert server.sizes(GROUP) == sizes
    assert len(changes(server)) == so_far


@EVERY_CHANGE
def test_a_group_that_is_gone_needs_nothing(server: FleetServer, join: Callable[[str], Fleet], change: Action) -> None:
    change(join(STRANGER), NEVER)

    assert changes(server) == []


def test_a_group_that_is_gone_cannot_be_described(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    with pytest.raises(NotFound, match="no Auto Scaling group trainers in us-east-1"):
        join(STRANGER).describe(NEVER)


@EVERY_CHANGE
def test_a_group_that_we_are_not_in_is_never_touched(
    server: FleetServer, join: Callable[[str], Fleet], change: Action
) -> None:
    others = server.create_group(GROUP, desired=2, minimum=1)

    change(join(STRANGER), NEVER)

    assert changes(server) == []
    assert server.members(GROUP) == others
    assert server.sizes(GROUP) == (1, 2)


@pytest.mark.parametrize("change", [Fleet.finish, Fleet.stop], ids=["finish", "stop"])
def test_a_group_of_the_same_account_is_not_touched_with_ours(
    server: FleetServer, join: Callable[[str], Fleet], change: Action
) -> None:
    (ours,) = server.create_group(GROUP, minimum=1)
    others = server.create_group("neighbours", desired=2, minimum=1)

    change(join(ours), NEVER)

    assert server.members("neighbours") == others
    assert server.sizes("neighbours") == (1, 2)


@pytest.mark.parametrize("name", ["leave", "protect", "mark_unhealthy"])
@pytest.mark.parametrize("state", ["Terminating", "Terminating:Wait", "Terminated", "Detaching"])
def test_an_instance_on_its_way_out_is_left_alone(
    server: FleetServer, join: Callable[[str], Fleet], name: str, state: str
) -> None:
    server.say("DescribeAutoScalingGroups", 200, described(state))

    CHANGES[name](join(STRANGER), NEVER)

    assert changes(server) == []


def test_who_finishes_while_it_is_reclaimed_wants_no_replacement(
    server: FleetServer, join: Callable[[str], Fleet]
) -> None:
    server.say("DescribeAutoScalingGroups", 200, described("Terminating:Wait", "Terminated", minimum=1))
    for action in ("UpdateAutoScalingGroup", "SetDesiredCapacity"):
        server.say(action, 200, f"<{action}Response/>")

    join(STRANGER).finish(NEVER)

    assert changes(server) == ["UpdateAutoScalingGroup", "SetDesiredCapacity"]
    assert server.asked("SetDesiredCapacity")[0]["DesiredCapacity"] == "0"


@pytest.mark.parametrize(
    "group",
    [described("Terminating", "InService"), described("Terminating", desired=2), described("Terminating", desired=0)],
    ids=["finished before, and one goes on", "another is still to come", "nobody is wanted"],
)
def test_who_finishes_while_it_is_terminated_takes_nobody_along(
    server: FleetServer, join: Callable[[str], Fleet], group: str
) -> None:
    server.say("DescribeAutoScalingGroups", 200, group)

    join(STRANGER).finish(NEVER)

    assert changes(server) == []


# ------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    "code", ["Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException"]
)
def test_a_throttled_call_waits_and_is_asked_again(
    server: FleetServer, join: Callable[[str], Fleet], clock: FakeClock, code: str
) -> None:
    (only,) = server.create_group(GROUP)
    server.fault("SetDesiredCapacity", code=code, message="Rate exceeded", times=3)

    join(only).stop(NEVER)

    assert server.sizes(GROUP) == (0, 0)
    assert len(clock.sleeps) == 3
    assert len(set(clock.sleeps)) == 3, "the pauses are random"


def test_a_group_that_is_busy_is_asked_again(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    (only,) = server.create_group(GROUP)
    server.fault("TerminateInstanceInAutoScalingGroup", code="ScalingActivityInProgress")
    server.fault("TerminateInstanceInAutoScalingGroup", code="ResourceContention", status=500)

    join(only).finish(NEVER)

    assert server.sizes(GROUP) == (0, 0)


def test_a_lost_reply_does_not_decrement_twice(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    first, *others = server.create_group(GROUP, desired=3)
    server.lose_reply("TerminateInstanceInAutoScalingGroup")

    join(first).finish(NEVER)

    assert server.members(GROUP) == others
    assert server.sizes(GROUP) == (0, 2)


def test_throttling_without_end_ends_by_the_deadline(
    server: FleetServer, join: Callable[[str], Fleet], clock: FakeClock
) -> None:
    server.fault("DescribeAutoScalingGroups", code="Throttling", times=1000)

    with pytest.raises(SlowDown, match="DescribeAutoScalingGroups of Auto Scaling group trainers: Throttling"):
        join(STRANGER).finish(Deadline.after(20.0, clock))

    assert sum(clock.sleeps) <= 20.0
    assert changes(server) == []


def test_no_request_is_made_after_the_deadline(
    server: FleetServer, join: Callable[[str], Fleet], clock: FakeClock
) -> None:
    with pytest.raises(Unavailable, match="no time left"):
        join(STRANGER).stop(Deadline(clock.now, clock))

    assert server.requests == []


def test_a_server_that_hangs_is_given_up_by_the_deadline(
    server: FleetServer, join: Callable[[str], Fleet], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud.aws.calls.READ_S", HANG_S)  # whoever waits as long as a request may is not back in time
    monkeypatch.setattr("random.uniform", lambda _low, high: high)  # by a short pause there would be time for another
    server.hang("RecordLifecycleActionHeartbeat")
    deadline = Deadline(clock.now + 0.3, clock)  # it stands: the request leaves, however late

    with pytest.raises(OutcomeUnknown):
        join(STRANGER).heartbeat(deadline)

    assert len(server.asked("RecordLifecycleActionHeartbeat")) == 1


def test_nothing_listening_is_unavailable(
    server: FleetServer, join: Callable[[str], Fleet], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")

    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        join(STRANGER).stop(Deadline.after(5.0, clock))


def test_an_endpoint_that_is_none_is_denied_with_the_setting(
    server: FleetServer, join: Callable[[str], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1")

    with pytest.raises(Denied, match="check AWS_ENDPOINT_URL"):
        join(STRANGER).stop(NEVER)


@pytest.mark.parametrize(
    ("operation", "call", "permission"),
    [
        ("DescribeAutoScalingGroups", Fleet.describe, 'autoscaling:DescribeAutoScalingGroups on "\\*"'),
        ("SetDesiredCapacity", Fleet.stop, "autoscaling:SetDesiredCapacity on this group's ARN"),
        ("TerminateInstanceInAutoScalingGroup", Fleet.leave, "autoscaling:TerminateInstanceInAutoScalingGroup on"),
        ("SetInstanceProtection", CHANGES["protect"], "autoscaling:SetInstanceProtection on this group's ARN"),
        ("SetInstanceHealth", Fleet.mark_unhealthy, "autoscaling:SetInstanceHealth on this group's ARN"),
        ("RecordLifecycleActionHeartbeat", Fleet.heartbeat, "autoscaling:RecordLifecycleActionHeartbeat on"),
        ("CompleteLifecycleAction", Fleet.complete, "autoscaling:CompleteLifecycleAction on this group's ARN"),
        ("Publish", lambda fleet, deadline: fleet.notify("a", "b", deadline), "sns:Publish on the topic's ARN"),
        ("PutMetricData", lambda fleet, deadline: fleet.measure({"a": 1}, deadline), "cloudwatch:PutMetricData on"),
    ],
)
def test_what_is_denied_names_the_permission_and_is_asked_once(
    server: FleetServer, join: Callable[[str], Fleet], operation: str, call: Action, permission: str
) -> None:
    (only,) = server.create_group(GROUP)
    body = server.denial(operation)
    server.say(operation, 403, body)

    with pytest.raises(Denied, match=f"allow {permission}.*: see docs/operations.md"):
        call(join(only), NEVER)

    assert len(server.asked(operation)) == 1


def test_credentials_that_have_expired_are_looked_for_anew(
    server: FleetServer, join: Callable[[str], Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = server.create_group(GROUP)
    fleet = join(only)
    fleet.describe(NEVER)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAFRESH")
    server.fault("DescribeAutoScalingGroups", code="ExpiredToken", status=403)

    fleet.describe(NEVER)

    assert server.access_keys == ["AKIAEXAMPLE", "AKIAEXAMPLE", "AKIAFRESH"]


# ------------------------------------------------------------------------------------------------------ find_fleet


@contextlib.contextmanager
def found(simulator: MetadataSimulator, group: str | None = None) -> Iterator[tuple[Fleet | None, str]]:
    session = MetadataSession(simulator.url)
    fleet, why = find_fleet(
        session, group=group, hook=HOOK, topic=TOPIC, namespace="Harness", run="r", deadline=standing(30.0)
    )
    yield fleet, why
    session.close()
    if fleet is not None:
        fleet.close()


def test_the_group_is_found_by_the_tag_that_auto_scaling_sets(server: FleetServer) -> None:
    (only,) = server.create_group(GROUP)

    with MetadataSimulator(instance_id=only, tags={GROUP_TAG: GROUP}) as simulator, found(simulator) as (fleet, why):
        assert fleet is not None
        assert why == ""
        assert fleet.instance == Instance(only, "us-east-1", "g6e.xlarge", "us-east-1a", spot=True)
        assert fleet.group == GROUP
        fleet.finish(NEVER)
    assert server.sizes(GROUP) == (0, 0)


def test_the_group_that_is_given_needs_no_tag(server: FleetServer) -> None:
    (only,) = server.create_group(GROUP)

    with MetadataSimulator(instance_id=only) as simulator, found(simulator, GROUP) as (fleet, why):
        assert fleet is not None
        assert why == ""


def test_a_laptop_has_no_fleet(server: FleetServer) -> None:
    session = MetadataSession("http://127.0.0.1:1")

    fleet, why = find_fleet(
        session, group=GROUP, hook=None, topic=None, namespace=None, run="r", deadline=standing(30.0)
    )

    session.close()
    assert fleet is None
    assert why.startswith("not on EC2: ")
    assert server.requests == []


def test_where_the_metadata_service_is_turned_off_there_is_no_fleet(server: FleetServer) -> None:
    fleet, why = find_fleet(None, group=GROUP, hook=None, topic=None, namespace=None, run="r", deadline=NEVER)

    assert fleet is None
    assert why == "not on EC2: the settings turn the metadata service off"
    assert server.requests == []


def test_an_instance_without_a_group_has_no_fleet(server: FleetServer) -> None:
    with MetadataSimulator() as simulator, found(simulator) as (fleet, why):
        assert fleet is None
        assert why == "no Auto Scaling group"
    assert server.requests == []


def test_an_instance_of_another_group_has_no_fleet(server: FleetServer) -> None:
    with MetadataSimulator(tags={GROUP_TAG: "neighbours"}) as simulator, found(simulator, GROUP) as (fleet, why):
        assert fleet is None
        assert why == f"{STRANGER} is in Auto Scaling group neighbours, not in {GROUP}"
    assert server.requests == []


def test_an_instance_that_is_not_in_the_group_has_no_fleet(server: FleetServer) -> None:
    server.create_group(GROUP)

    with MetadataSimulator() as simulator, found(simulator, GROUP) as (fleet, why):
        assert fleet is None
        assert why == f"{STRANGER} is not in Auto Scaling group {GROUP}"


def test_a_group_that_does_not_exist_is_no_fleet(server: FleetServer) -> None:
    with MetadataSimulator() as simulator, found(simulator, "trainerz") as (fleet, why):
        assert fleet is None
        assert why == "there is no Auto Scaling group trainerz in us-east-1"


def test_without_credentials_there_is_no_fleet(server: FleetServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    with MetadataSimulator(tags={GROUP_TAG: GROUP}) as simulator:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", simulator.url)  # an instance without a role
        with found(simulator) as (fleet, why):
            assert fleet is None
            assert why.startswith("no credentials: ")
    assert server.requests == []


def test_a_group_that_may_not_be_described_is_a_fleet_with_a_warning(server: FleetServer) -> None:
    server.say("DescribeAutoScalingGroups", 403, server.denial("DescribeAutoScalingGroups"))

    with MetadataSimulator(tags={GROUP_TAG: GROUP}) as simulator, found(simulator) as (fleet, why):
        assert fleet is not None
        assert "allow autoscaling:DescribeAutoScalingGroups" in why


# ------------------------------------------------------------------------------------------------- import


def test_importing_it_costs_no_boto3() -> None:
    script = (
        "import sys, cloud.aws.fleet; sys.exit(any(name in sys.modules for name in ('boto3', 'botocore', 'requests')))"
    )

    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_a_launch_is_in_service_or_given_up_by_its_own_hook(server: FleetServer, join: Callable[[str], Fleet]) -> None:
    server.waiting.add(STRANGER)
    fleet = join(STRANGER)
    assert fleet.ready(NEVER)
    server.waiting.add(STRANGER)
    assert fleet.abandon(NEVER)
    assert not fleet.abandon(NEVER)

    ours = {"AutoScalingGroupName": GROUP, "LifecycleHookName": LAUNCH_HOOK, "InstanceId": STRANGER}
    assert server.asked("CompleteLifecycleAction")[:2] == [
        {**ours, "LifecycleActionResult": "CONTINUE"},
        {**ours, "LifecycleActionResult": "ABANDON"},
    ]
