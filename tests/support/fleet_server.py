"""AWS as a fleet sees it: moto behind a server that records, knows lifecycle actions, and goes wrong on demand.

    with FleetServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        first, second = server.create_group("trainers", desired=2)
        server.fault("SetDesiredCapacity", status=400, code="Throttling", times=2)
        server.say("DescribeAutoScalingGroups", 200, "<…/>")      # a literal answer, instead of moto's
        server.hang("Publish")                                    # until the server closes
        server.waiting.add(first)                                 # its TERMINATING hook's action is under way
        assert server.asked("SetDesiredCapacity") == [{"AutoScalingGroupName": "trainers", …}]

moto 5 knows neither CompleteLifecycleAction nor RecordLifecycleActionHeartbeat: those are answered here. Its state is
the process's: one server at a time, which begins empty.
"""

from __future__ import annotations

import io
import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qsl

import boto3
from botocore.config import Config
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.support.patience import HANG_S

REGION = "us-east-1"
LIFECYCLE = ("CompleteLifecycleAction", "RecordLifecycleActionHeartbeat")

Environ = dict[str, Any]
Respond = Callable[[str, list[tuple[str, str]]], object]


@dataclass(frozen=True)
class _Answer:
    status: int
    body: str


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class FleetServer:
    """Auto Scaling, EC2, SNS, CloudWatch and SQS of one account on a loopback port."""

    def __init__(self) -> None:
        # Here, and not in each worker that only collects the tests: it takes a second.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.waiting: set[str] = set()
        self.access_keys: list[str] = []
        self._answers: dict[str, deque[_Answer]] = defaultdict(deque)
        self._hanging: set[str] = set()
        self._losing: set[str] = set()
        self._clients: dict[str, Any] = {}
        self._without_amis = patch("moto.settings.ec2_load_default_amis", return_value=False)  # 0.2 s at each reset
        self._closing = threading.Event()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="fleet-server")

    def __enter__(self) -> FleetServer:
        self._without_amis.start()
        self.reset()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for client in self._clients.values():
            client.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._without_amis.stop()

    def reset(self) -> None:
        """Forget the groups, and all that was asked and said. What hangs goes on hanging."""
        from moto.backends import get_backend

        for service in ("autoscaling", "ec2", "sns", "sqs", "cloudwatch"):
            get_backend(service).reset()  # type: ignore[call-overload]
        for each in (self.requests, self.waiting, self.access_keys, self._answers, self._hanging, self._losing):
            each.clear()

    # What there is

    def client(self, service: str) -> Any:
        """A client that meets no fault and is not recorded: its requests say so."""
        if service not in self._clients:
            self._clients[service] = self._open(service)
        return self._clients[service]

    def _open(self, service: str) -> Any:
        config = Config(user_agent_extra="behind-the-scenes")
        keys = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "secret"}
        return boto3.client(service, region_name=REGION, endpoint_url=self.url, config=config, **keys)

    def create_group(self, name: str, *, desired: int = 1, minimum: int = 0) -> list[str]:
        """A group; the ids of its instances."""
        self.client("ec2").create_launch_template(
            LaunchTemplateName=name, LaunchTemplateData={"ImageId": "ami-12c6146b", "InstanceType": "g6e.xlarge"}
        )
        self.client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName=name,
            MinSize=minimum,
            DesiredCapacity=desired,
            MaxSize=4,
            AvailabilityZones=[f"{REGION}a"],
            LaunchTemplate={"LaunchTemplateName": name},
        )
        return self.members(name)

    def group(self, name: str) -> dict[str, Any]:
        found = self.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[name])
        group: dict[str, Any] = found["AutoScalingGroups"][0]
        return group

    def members(self, name: str) -> list[str]:
        """The ids of its instances."""
        return list(self.member_fields(name, "InstanceId"))

    def member_fields(self, name: str, field: str) -> dict[str, Any]:
        """A field of each of its instances, by id."""
        return {member["InstanceId"]: member[field] for member in self.group(name)["Instances"]}

    def sizes(self, name: str) -> tuple[int, int]:
        """Minimum and desired capacity."""
        group = self.group(name)
        return group["MinSize"], group["DesiredCapacity"]

    # What goes wrong

    def say(self, action: str, status: int, body: str, *, times: int = 1) -> None:
        """Answer so, instead of moto, the next times that `action` is asked for."""
        self._answers[action].extend([_Answer(status, body)] * times)

    def fault(self, action: str, *, code: str, message: str = "no", status: int = 400, times: int = 1) -> None:
        """An error, in the query protocol's words."""
        self.say(action, status, error_body(code, message), times=times)

    def hang(self, action: str) -> None:
        """Take requests for `action`, and answer none."""
        self._hanging.add(action)

    def lose_reply(self, action: str) -> None:
        """Do the next `action`, and break the connection instead of saying so."""
        self._losing.add(action)

    def denial(self, action: str) -> str:
        """How AWS denies it, in the protocol that it is asked in."""
        words = f"User: arn:aws:sts::123456789012:assumed-role/r/i is not authorized to perform: {action}"
        if action == "PutMetricData":
            return json.dumps({"__type": "AccessDenied", "message": words})
        return error_body("AccessDenied", words)

    # What was asked

    def asked(self, action: str) -> list[dict[str, Any]]:
        """The parameters of each request for `action`, oldest first."""
        return [parameters for name, parameters in self.requests if name == action]

    def actions(self) -> list[str]:
        return [name for name, _ in self.requests]

    # The server

    def _serve(self, environ: Environ, respond: Respond) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        if "behind-the-scenes" in environ.get("HTTP_USER_AGENT", ""):
            return self._moto(environ, respond)
        action, parameters = _read(environ, body)
        self.requests.append((action, parameters))
        self.access_keys.append(environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition("/")[0])
        if action in self._hanging:
            self._closing.wait(HANG_S)
        answer = self._answers[action].popleft() if self._answers[action] else self._lifecycle(action, parameters)
        if action in self._losing:
            self._losing.discard(action)
            list(self._moto(environ, lambda *_: None))
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("a reply is lost")
        if answer is None:
            return self._moto(environ, respond)
        respond(f"{answer.status} Answer", [("Content-Type", "text/xml")])
        return [answer.body.encode()]

    def _lifecycle(self, action: str, parameters: dict[str, Any]) -> _Answer | None:
        if action not in LIFECYCLE:
            return None
        instance = parameters["InstanceId"]
        if instance not in self.waiting:
            words = f"No active Lifecycle Action found with instance ID {instance}"  # AWS's own
            return _Answer(400, error_body("ValidationError", words))
        if action == "CompleteLifecycleAction":
            self.waiting.discard(instance)
        return _Answer(200, f"<{action}Response><{action}Result/></{action}Response>")


def error_body(code: str, message: str) -> str:
    return (
        f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        "<RequestId>1</RequestId></ErrorResponse>"
    )


def _read(environ: Environ, body: bytes) -> tuple[str, dict[str, Any]]:
    """Action and parameters: of the JSON protocol, which CloudWatch speaks, or of the query protocol."""
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return target.rpartition(".")[2], json.loads(body)
    parameters: dict[str, Any] = dict(parse_qsl(body.decode(), keep_blank_values=True))
    parameters.pop("Version", None)
    return parameters.pop("Action", ""), parameters
