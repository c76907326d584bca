"""An instance that cannot be prepared does not wait at full price: whatever went wrong, its group is set to zero."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from cloud.testing.metadata_sim import MetadataSimulator
from tests.node.machine import Machine

INSTANCE = "i-0123456789abcdef0"
TOPIC = "arn:aws:sns:us-east-1:123456789012:harness"


class Aws:
    """SNS and Auto Scaling, as far as they are asked here.

    Attributes:
        calls: the parameters of every call.
        denied: actions to refuse, each so many times.
        version: of the launch template that the group uses; this instance has 1.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, str]] = []
        self.denied: dict[str, float] = {}
        self.version = "1"
        aws = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                call = {name: value for name, (value,) in parse_qs(body).items()}
                aws.calls.append(call)
                status, answer = aws.answer(call["Action"])
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, action: str) -> tuple[int, str]:
        if self.denied.get(action, 0) > 0:
            self.denied[action] -= 1
            return 403, "<ErrorResponse><Error><Code>AuthorizationError</Code></Error></ErrorResponse>"
        inner = "<MessageId>1</MessageId>"
        if action == "DescribeAutoScalingGroups":
            inner = (
                "<AutoScalingGroups><member><AutoScalingGroupName>trainers</AutoScalingGroupName><Instances><member>"
                f"<InstanceId>{INSTANCE}</InstanceId><LaunchTemplate><LaunchTemplateName>t</LaunchTemplateName>"
                "<Version>1</Version></LaunchTemplate></member></Instances><MixedInstancesPolicy><LaunchTemplate>"
                f"<LaunchTemplateSpecification><Version>{self.version}</Version></LaunchTemplateSpecification>"
                "</LaunchTemplate></MixedInstancesPolicy></member></AutoScalingGroups>"
            )
        return 200, f"<{action}Response><{action}Result>{inner}</{action}Result></{action}Response>"

    def of(self, action: str) -> list[dict[str, str]]:
        return [call for call in self.calls if call["Action"] == action]

    def actions(self) -> list[str]:
        return [call["Action"] for call in self.calls]


@pytest.fixture
def aws(machine: Machine) -> Iterator[Aws]:
    """What the machine finds; its group is `trainers`, and its source an address that is refused."""
    made = Aws()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    machine.settings |= {"HARNESS_GROUP": "trainers", "HARNESS_TOPIC": TOPIC, "HARNESS_SOURCE": "ftp://host/code"}
    machine.settings |= {"HARNESS_HOOK": "drain", "HARNESS_LAUNCH_HOOK": "ready"}
    machine.settings |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
    with MetadataSimulator(instance_id=INSTANCE) as metadata:
        machine.environment |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server.server_address[1]}", "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url,
        }  # fmt: skip
        yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def assert_stopped(aws: Aws) -> None:
    (call,) = aws.of("SetDesiredCapacity")
    assert (call["AutoScalingGroupName"], call["DesiredCapacity"]) == ("trainers", "0")


def test_the_owner_hears_why_and_the_group_is_set_to_zero(machine: Machine, aws: Aws) -> None:
    done = machine.prepare()

    assert done.returncode == 64
    assert_stopped(aws)
    (told,) = aws.of("Publish")
    assert told["Subject"] == "gpt: no instance can be prepared"
    assert f"Auto Scaling group trainers, instance {INSTANCE}" in told["Message"]
    assert "source_archive: 'ftp://host/code' is neither" in told["Message"]


def test_the_group_waits_for_neither_of_its_hooks(machine: Machine, aws: Aws) -> None:
    machine.prepare()

    completed = [
        (call["LifecycleHookName"], call["LifecycleActionResult"], call["InstanceId"])
        for call in aws.of("CompleteLifecycleAction")
    ]
    assert completed == [("ready", "ABANDON", INSTANCE), ("drain", "CONTINUE", INSTANCE)]
    assert aws.actions().index("SetDesiredCapacity") < aws.actions().index("CompleteLifecycleAction")


def test_a_call_that_is_refused_is_repeated_for_minutes(machine: Machine, aws: Aws) -> None:
    machine.environment["HARNESS_STOP_S"] = "60"
    aws.denied = {"SetDesiredCapacity": 3, "UpdateAutoScalingGroup": 3}

    done = machine.prepare()

    assert "the desired capacity of trainers is 0 now" in done.stdout
    assert len(aws.of("SetDesiredCapacity")) == 4
    assert len(aws.of("Publish")) == 1


def test_a_group_that_cannot_be_stopped_is_told(machine: Machine, aws: Aws) -> None:
    aws.denied = {"SetDesiredCapacity": math.inf, "UpdateAutoScalingGroup": math.inf}

    done = machine.prepare()

    assert "could not be set to zero" in done.stdout
    assert "THE GROUP COULD NOT BE SET TO ZERO" in aws.of("Publish")[-1]["Message"]


def test_a_group_with_a_minimum_is_stopped_too(machine: Machine, aws: Aws) -> None:
    aws.denied = {"SetDesiredCapacity": math.inf}

    machine.prepare()

    (call,) = aws.of("UpdateAutoScalingGroup")
    assert (call["MinSize"], call["DesiredCapacity"]) == ("0", "0")


def test_an_instance_of_an_older_apply_is_replaced_and_the_fleet_goes_on(machine: Machine, aws: Aws) -> None:
    """New code was applied while it booted: what its own user data names is gone."""
    aws.version = "2"

    done = machine.prepare()

    assert "this instance is replaced" in done.stdout
    (left,) = aws.of("TerminateInstanceInAutoScalingGroup")
    assert (left["InstanceId"], left["ShouldDecrementDesiredCapacity"]) == (INSTANCE, "false")
    assert not {"SetDesiredCapacity", "UpdateAutoScalingGroup", "Publish"} & set(aws.actions())


def test_without_a_group_nothing_is_stopped(machine: Machine, aws: Aws) -> None:
    del machine.settings["HARNESS_GROUP"]

    assert machine.prepare().returncode == 64
    assert aws.calls == []


@pytest.mark.parametrize(("decision", "stops"), [("", True), ("nothing is left to do, exit code 0\n", False)])
def test_a_supervisor_that_has_decided_stops_no_fleet(machine: Machine, aws: Aws, decision: str, stops: bool) -> None:
    files = {"run/harness/decision": decision, "var/log/harness/harness.log": "step 17\nTraceback: a bug\n"}
    for name, text in files.items():
        (machine.root / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.root / name).write_text(text)

    done = machine.stop("--unless-decided")

    assert done.returncode == 0
    assert bool(aws.of("SetDesiredCapacity")) is stops
    if stops:
        (told,) = aws.of("Publish")
        assert told["Subject"] == "gpt: the supervisor has ended without a decision"
        assert "Traceback: a bug" in told["Message"]
    else:
        assert "nothing is left to do, exit code 0" in done.stdout


def test_a_log_of_one_endless_line_does_not_keep_it_from_being_told(machine: Machine, aws: Aws) -> None:
    log = machine.root / "var/log/harness/bootstrap.log"
    log.parent.mkdir(parents=True)
    log.write_text("50 % of 2 GB — ü\r\x1b[A" * 20_000)  # a progress bar, cut anywhere

    machine.prepare()

    assert_stopped(aws)
    (told,) = aws.of("Publish")
    assert "source_archive: 'ftp://host/code' is neither" in told["Message"]
    assert len(told["Message"]) <= 4300


def test_a_topic_that_refuses_does_not_keep_the_instance_idle(machine: Machine, aws: Aws) -> None:
    aws.denied["Publish"] = math.inf

    done = machine.prepare()

    assert "WARNING: cannot notify the owner" in done.stdout
    assert_stopped(aws)


def test_without_boto3_the_command_line_client_does_it(machine: Machine, aws: Aws) -> None:
    calls = machine.root / "calls"
    del machine.settings["HARNESS_PYTHON"]
    machine.replace_program("python3", f'exec {sys.executable} -I -S "$@"')
    machine.replace_program("aws", f'echo "$@" >>"{calls}"')

    machine.prepare()

    told = calls.read_text()
    assert f"sns publish --topic-arn {TOPIC} --subject gpt: no instance can be prepared --message" in told
    assert "source_archive: 'ftp://host/code' is neither" in told
    assert "autoscaling set-desired-capacity --auto-scaling-group-name trainers --desired-capacity 0\n" in told
    assert told.endswith(
        f"complete-lifecycle-action --auto-scaling-group-name trainers --instance-id {INSTANCE} "
        "--lifecycle-hook-name drain --lifecycle-action-result CONTINUE\n"
    )


def test_what_hangs_is_ended(machine: Machine, aws: Aws) -> None:
    machine.settings["HARNESS_SOURCE"] = "git+https://host/repository@main"
    machine.replace_program("git", "exec sleep 1000")
    machine.replace_program("timeout", 'test "$2" -gt 5000 || exit 1; shift 2; exec /usr/bin/timeout 0.5 "$@"')

    done = machine.prepare()

    assert done.returncode == 124
    assert "something hangs" in done.stdout
    assert_stopped(aws)


def test_a_disk_without_room_for_a_lock_does_not_keep_the_instance_idle(machine: Machine, aws: Aws) -> None:
    for folder in ("opt/harness/source", "var/log"):  # a file there stands for a file system that is full
        (machine.root / folder).parent.mkdir(parents=True, exist_ok=True)
        (machine.root / folder).touch()
    machine.replace_program("sleep", "")  # between two attempts

    done = machine.prepare()

    assert done.returncode != 0
    assert_stopped(aws)
    assert aws.of("Publish")[0]["Message"].endswith("there is no log")


def test_a_reboot_in_the_middle_of_the_first_boot_is_not_its_end(machine: Machine, aws: Aws) -> None:
    machine.prepare()

    assert "ExecStart=/opt/harness/bin/bootstrap-node.sh\n" in machine.unit("harness-node.service")
    assert not (machine.root / "etc/systemd/system/harness.service").exists()
