"""An instance that cannot be prepared does not wait at full price: whatever went wrong, its group is set to zero."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from tests.node.machine import Machine

TOPIC = "arn:aws:sns:us-east-1:123456789012:harness"


class Aws:
    """SNS and Auto Scaling, as far as they are asked here. `calls`: their parameters; `denied`: actions to refuse."""

    def __init__(self) -> None:
        self.calls: list[dict[str, str]] = []
        self.denied: set[str] = set()
        aws = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                call = {name: value for name, (value,) in parse_qs(body).items()}
                aws.calls.append(call)
                action = call["Action"]
                answer = (
                    f"<{action}Response><{action}Result><MessageId>1</MessageId></{action}Result></{action}Response>"
                )
                if action in aws.denied:
                    answer = "<ErrorResponse><Error><Code>AuthorizationError</Code></Error></ErrorResponse>"
                self.send_response(403 if action in aws.denied else 200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def of(self, action: str) -> list[dict[str, str]]:
        return [call for call in self.calls if call["Action"] == action]


@pytest.fixture
def aws(machine: Machine) -> Iterator[Aws]:
    """What the machine finds; its group is `trainers`, and its source an address that is refused."""
    made = Aws()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    machine.settings |= {"HARNESS_GROUP": "trainers", "HARNESS_TOPIC": TOPIC, "HARNESS_SOURCE": "ftp://host/code"}
    machine.settings |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
    machine.environment |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server.server_address[1]}", "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def assert_stopped(aws: Aws) -> None:
    (call,) = aws.of("UpdateAutoScalingGroup")
    assert (call["AutoScalingGroupName"], call["MinSize"], call["DesiredCapacity"]) == ("trainers", "0", "0")


def test_the_owner_hears_why_and_the_group_is_set_to_zero(machine: Machine, aws: Aws) -> None:
    done = machine.prepare()

    assert done.returncode == 64
    assert_stopped(aws)
    (told,) = aws.of("Publish")
    assert told["Subject"] == "gpt: no instance can be prepared"
    assert "source_archive: 'ftp://host/code' is neither" in told["Message"]


def test_a_log_of_one_endless_line_does_not_keep_it_from_being_told(machine: Machine, aws: Aws) -> None:
    log = machine.root / "var/log/harness/bootstrap.log"
    log.parent.mkdir(parents=True)
    log.write_text("50 % of 2 GB — ü\r\x1b[A" * 20_000)  # a progress bar, cut anywhere

    machine.prepare()

    assert_stopped(aws)
    (told,) = aws.of("Publish")
    assert "source_archive: 'ftp://host/code' is neither" in told["Message"]
    assert len(told["Message"]) <= 4000


def test_a_topic_that_refuses_does_not_keep_the_instance_idle(machine: Machine, aws: Aws) -> None:
    aws.denied.add("Publish")

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
    assert told.endswith(
        "autoscaling update-auto-scaling-group --auto-scaling-group-name trainers --min-size 0 --desired-capacity 0\n"
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
    assert aws.of("Publish")[0]["Message"] == "there is no log"


def test_a_reboot_in_the_middle_of_the_first_boot_is_not_its_end(machine: Machine, aws: Aws) -> None:
    machine.prepare()

    assert "ExecStart=/opt/harness/bin/bootstrap-node.sh\n" in machine.unit("harness-node.service")
    assert not (machine.root / "etc/systemd/system/harness.service").exists()
