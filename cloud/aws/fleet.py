"""What can be done to the Auto Scaling group that this instance is in (with `cloud.s3.client`, importer of boto3).

Owns the calls to Auto Scaling, SNS and CloudWatch, and what may be done twice. Knows neither the harness nor when any
of this should happen. What a refusal means is in `fleet_errors.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cloud.aws.fleet_errors import SERVICES, NotWaiting, Refused, explain, takes_effect
from cloud.aws.instance import GROUP_TAG, Instance, identify, tag
from cloud.aws.metadata import Metadata
from cloud.errors import CloudError, Denied, NotFound, Unavailable, call_with_retry
from cloud.notice import Deadline
from cloud.s3.client import library_errors, new_session, no_answer
from cloud.s3.errors import CredentialsExpired, CredentialsMissing

CONNECT_S = 3.0
"""To connect: how far a call can exceed its deadline, where nothing answers."""
READ_S = 15.0
"""To wait for an answer."""
ATTEMPTS = 30
"""For one action; with the pauses below, more than a minute of throttling. The deadline ends it sooner."""
FIRST_PAUSE_S = 0.3

LEAVING = ("Terminating", "Terminated", "Detaching", "Detached")
"""How the lifecycle state of an instance begins that the group will not keep ("Terminating:Wait")."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class GroupState:
    """An Auto Scaling group as it was just now.

    Attributes:
        name: its name.
        desired: how many instances it wants.
        minimum: and never fewer than.
        maximum: and never more than.
        instances: ids of those in it, the ones that are starting or leaving included.
    """

    name: str
    desired: int
    minimum: int
    maximum: int
    instances: tuple[str, ...]


def find_fleet(
    metadata: Metadata | None,
    *,
    group: str | None,
    hook: str | None,
    topic: str | None,
    namespace: str | None,
    run: str,
    deadline: Deadline,
) -> tuple[Fleet | None, str]:
    """The group that this instance is in, or `None` and in words why there is none. Raises no CloudError.

    Words beside a fleet are a warning: it could not be looked at, so that calls may fail. They will say so again.

    Args:
        metadata: the service; `None` where the settings turn it off.
        group: its name; `None` or empty: what the instance's tag says.
        hook: see `Fleet`.
        topic: see `Fleet`.
        namespace: see `Fleet`.
        run: see `Fleet`.
        deadline: bounds it all.
    """
    try:
        instance = identify(metadata, deadline)
    except Unavailable as err:
        return None, f"not on EC2: {err}"
    member_of = tag(metadata, GROUP_TAG, deadline)
    name = group or member_of
    if not name:
        return None, "no Auto Scaling group"
    if member_of and member_of != name:
        return None, f"{instance.id} is in Auto Scaling group {member_of}, not in {name}"
    fleet = Fleet(instance, name, hook=hook, topic=topic, namespace=namespace, run=run)
    why, warning = "", ""
    try:
        if instance.id not in fleet.describe(deadline).instances:
            why = f"{instance.id} is not in Auto Scaling group {name}"
    except CredentialsMissing as err:
        why = f"no credentials: {err}"
    except NotFound as err:
        why = str(err)
    except CloudError as err:
        warning = str(err)
    if why:
        fleet.close()
        return None, why
    return fleet, warning


class Fleet:
    """This instance in its Auto Scaling group. Opens nothing before the first call. Safe for threads.

    Every call is safe to repeat, here and by another process, and is repeated here while its error is retryable and
    its deadline not reached. Where this instance or its group has gone already there is nothing to do, and nothing is
    said. A group that this instance is not in is never changed.

    Every method but the constructor raises `CloudError`: `Denied` names the IAM action that is missing.

    Args:
        instance: who we are.
        group: the Auto Scaling group's name.
        hook: name of the group's TERMINATING lifecycle hook; `None` or empty for none.
        topic: ARN of an SNS topic; `None` or empty for none.
        namespace: of the CloudWatch metrics; `None` or empty for none.
        run: value of the metrics' dimension Run.
        sleep: how to pause between attempts.
    """

    def __init__(
        self,
        instance: Instance,
        group: str,
        *,
        hook: str | None = None,
        topic: str | None = None,
        namespace: str | None = None,
        run: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.instance = instance
        self.group = group
        self._hook = hook
        self._topic = topic
        self._namespace = namespace
        self._run = run
        self._sleep = sleep
        self._calls = _Calls(instance.region)

    def describe(self, deadline: Deadline) -> GroupState:
        """The group now. Raises `NotFound` where it is gone."""
        found = self._retry(lambda: self._find(deadline), deadline)
        if found is None:
            region = f" in {self.instance.region}" if self.instance.region else ""
            raise NotFound(f"there is no Auto Scaling group {self.group}{region}")
        return found.state

    def finish(self, deadline: Deadline) -> None:
        """End this instance for good: terminated, and the group wants one fewer. Its minimum is lowered if need be.

        Where the group is this instance alone and that is refused, the group's desired capacity becomes 0.
        """
        self._retry(lambda: self._finish(deadline), deadline)

    def stop(self, deadline: Deadline) -> None:
        """End every instance of the group: its minimum and desired capacity become 0.

        This instance's own protection is taken off first. Another's stays, and so does that other.
        """

        def attempt() -> None:
            found = self._find(deadline)
            if found is None or found.me is None:
                return
            if found.me.get("ProtectedFromScaleIn"):
                self._protect(False, deadline)
            self._shrink(found.state, 0, deadline)

        self._retry(attempt, deadline)

    def leave(self, deadline: Deadline) -> None:
        """End this instance only: terminated, and the group keeps its size, so that it starts another."""

        def attempt() -> None:
            if self._stays(deadline):
                self._terminate(decrement=False, deadline=deadline)

        self._retry(attempt, deadline)

    def heartbeat(self, deadline: Deadline) -> bool:
        """Have the group wait longer before it ends this instance; whether it is waiting at all."""
        return self._act("RecordLifecycleActionHeartbeat", deadline)

    def complete(self, deadline: Deadline) -> bool:
        """Tell the group that it need not wait to end this instance; whether it was waiting.

        Just after `finish` or `leave` it may not be waiting yet: ask again some seconds later.
        """
        return self._act("CompleteLifecycleAction", deadline, LifecycleActionResult="CONTINUE")

    def protect(self, on: bool, deadline: Deadline) -> None:
        """Keep the group from choosing this instance when it shrinks, or allow that again."""

        def attempt() -> None:
            if self._stays(deadline):
                self._protect(on, deadline)

        self._retry(attempt, deadline)

    def mark_unhealthy(self, deadline: Deadline) -> None:
        """Have the group replace this instance, however young it is."""

        def attempt() -> None:
            if self._stays(deadline):
                self._calls.call(
                    "SetInstanceHealth",
                    self._where,
                    deadline,
                    InstanceId=self.instance.id,
                    HealthStatus="Unhealthy",
                    ShouldRespectGracePeriod=False,
                )

        self._retry(attempt, deadline)

    def notify(self, subject: str, text: str, deadline: Deadline) -> None:
        """Send a message to the topic's subscribers, twice where a reply is lost. Nothing without a topic.

        Args:
            subject: SNS takes 99 printable ASCII characters; others become "?", and more are cut off.
            text: SNS takes 256 KiB; it ends there.
            deadline: ends the attempts.
        """
        if not self._topic:
            return
        message = {"TopicArn": self._topic, "Subject": _subject(subject), "Message": _bounded(text) or "-"}
        self._retry(lambda: self._calls.call("Publish", f"to {self._topic}", deadline, **message), deadline)

    def measure(self, values: Mapping[str, float], deadline: Deadline) -> None:
        """Put metrics, by name; a name that ends in "Seconds" has that unit, any other is a count.

        A reply that is lost may count twice. Nothing without a namespace.
        """
        if not self._namespace or not values:
            return
        dimensions = [{"Name": "Run", "Value": self._run}] if self._run else []
        data = [
            {
                "MetricName": name,
                "Dimensions": dimensions,
                "Value": float(value),
                "Unit": "Seconds" if name.endswith("Seconds") else "Count",
            }
            for name, value in values.items()
        ]
        metrics = {"Namespace": self._namespace, "MetricData": data}
        self._retry(lambda: self._calls.call("PutMetricData", f"to {self._namespace}", deadline, **metrics), deadline)

    def close(self) -> None:
        """Give up the connections. Idempotent; a later call opens others."""
        self._calls.close()

    # ------------------------------------------------------------------------------------------- one attempt of each

    @property
    def _where(self) -> str:
        return f"of {self.instance.id} in Auto Scaling group {self.group}"

    def _retry(self, call: Callable[[], _T], deadline: Deadline) -> _T:
        return call_with_retry(call, deadline, sleep=self._sleep, attempts=ATTEMPTS, base_s=FIRST_PAUSE_S)

    def _find(self, deadline: Deadline) -> _Found | None:
        """The group and our place in it, or `None` where the group is gone."""
        where = f"of Auto Scaling group {self.group}"
        reply = self._calls.call("DescribeAutoScalingGroups", where, deadline, AutoScalingGroupNames=[self.group])
        groups = reply.get("AutoScalingGroups")
        return _Found.read(groups[0], self.instance.id) if groups else None

    def _stays(self, deadline: Deadline) -> bool:
        """Whether this instance is in the group, and not on its way out."""
        found = self._find(deadline)
        return found is not None and found.me is not None and not _is_leaving(found.me)

    def _finish(self, deadline: Deadline) -> None:
        found = self._find(deadline)
        if found is None or found.me is None:
            return
        state = found.state
        if _is_leaving(found.me):
            if found.alone:  # reclaimed at the last moment: no replacement is needed
                self._shrink(state, 0, deadline)
            return
        self._lower_minimum(state, max(0, state.desired - 1), deadline)
        try:
            self._terminate(decrement=True, deadline=deadline)
        except Denied:  # also Refused: say, a minimum that somebody raised in between
            if not found.alone:
                raise
            self._shrink(state, 0, deadline)

    def _shrink(self, state: GroupState, desired: int, deadline: Deadline) -> None:
        self._lower_minimum(state, desired, deadline)
        if state.desired > desired:
            self._change("SetDesiredCapacity", deadline, DesiredCapacity=desired, HonorCooldown=False)

    def _lower_minimum(self, state: GroupState, minimum: int, deadline: Deadline) -> None:
        if state.minimum > minimum:
            self._change("UpdateAutoScalingGroup", deadline, MinSize=minimum)

    def _protect(self, on: bool, deadline: Deadline) -> None:
        self._change("SetInstanceProtection", deadline, InstanceIds=[self.instance.id], ProtectedFromScaleIn=on)

    def _terminate(self, *, decrement: bool, deadline: Deadline) -> None:
        self._calls.call(
            "TerminateInstanceInAutoScalingGroup",
            self._where,
            deadline,
            InstanceId=self.instance.id,
            ShouldDecrementDesiredCapacity=decrement,
        )

    def _change(self, operation: str, deadline: Deadline, **parameters: Any) -> None:
        self._calls.call(operation, self._where, deadline, AutoScalingGroupName=self.group, **parameters)

    def _act(self, operation: str, deadline: Deadline, **parameters: Any) -> bool:
        """A call about the lifecycle action of this instance; whether there was one."""
        if not self._hook:
            return False
        parameters |= {"LifecycleHookName": self._hook, "InstanceId": self.instance.id}

        def attempt() -> bool:
            try:
                self._change(operation, deadline, **parameters)
            except NotWaiting:
                return False
            except Refused:
                found = self._find(deadline)
                if found is None or found.me is None:
                    return False
                raise
            return True

        return self._retry(attempt, deadline)


@dataclass(frozen=True)
class _Found:
    """A group, and this instance in it.

    Attributes:
        state: the group.
        me: this instance as AWS describes it, or `None` where it is not in the group.
        alone: whether the group wants no more than one, and has no other that stays.
    """

    state: GroupState
    me: Mapping[str, Any] | None
    alone: bool

    @classmethod
    def read(cls, group: Mapping[str, Any], instance_id: str) -> _Found:
        members = {member["InstanceId"]: member for member in group.get("Instances", [])}
        state = GroupState(
            name=group["AutoScalingGroupName"],
            desired=group["DesiredCapacity"],
            minimum=group["MinSize"],
            maximum=group["MaxSize"],
            instances=tuple(members),
        )
        others = [member for id_, member in members.items() if id_ != instance_id]
        alone = state.desired <= 1 and all(_is_leaving(other) for other in others)
        return cls(state, members.get(instance_id), alone)


def _is_leaving(member: Mapping[str, Any]) -> bool:
    return str(member.get("LifecycleState", "")).startswith(LEAVING)


class _Calls:
    """boto3's clients for one region, and calls under a deadline. One request each. Safe for threads."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[str, Any] = {}
        self._current = threading.local()  # the deadline of this thread's call, for `_limit`

    def call(self, operation: str, where: str, deadline: Deadline, **parameters: Any) -> dict[str, Any]:
        """One request, by AWS's name for it. Raises CloudError, of the kind that `fleet_errors.explain` gives."""
        from botocore import xform_name
        from botocore.exceptions import ClientError

        if deadline.expired:
            raise Unavailable(f"{operation} {where}: no time left")
        self._current.deadline = deadline
        try:
            client = self._opened(SERVICES[operation])
            reply: dict[str, Any] = getattr(client, xform_name(operation))(**parameters)
            return reply
        except library_errors() as err:
            if isinstance(err, ClientError):
                error = _refusal(err, operation, where)
            else:
                error = no_answer(err, f"{operation} {where}", takes_effect=takes_effect(operation))
            if isinstance(error, CredentialsExpired | CredentialsMissing):
                self.close()  # the next request looks for credentials from the very beginning
            raise error from err

    def close(self) -> None:
        with self._lock:
            clients, self._clients, self._session = self._clients, {}, None
        for client in clients.values():
            client.close()

    def _opened(self, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._open(service)
            return self._clients[service]

    def _open(self, service: str) -> Any:
        from botocore.config import Config

        self._session = self._session or new_session()
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": 1, "mode": "standard"},
            user_agent_extra="harness-spot",
        )
        try:
            client = self._session.client(service, region_name=self._region or None, config=config)
        except ValueError as err:  # "Invalid endpoint"
            raise Denied(f"{service}: {err}; check AWS_ENDPOINT_URL, AWS_REGION and the profile") from err
        client.meta.events.register(f"before-call.{client.meta.service_model.service_id.hyphenize()}", self._limit)
        return client

    def _limit(self, context: dict[str, Any], **_: Any) -> None:
        deadline: Deadline = self._current.deadline
        context["read_timeout"] = max(0.05, min(READ_S, deadline.remaining_s))


def _refusal(err: Any, operation: str, where: str) -> CloudError:
    error = err.response.get("Error", {})
    status = int(err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code, message = str(error.get("Code") or status), str(error.get("Message") or "")
    return explain(operation, where, status=status, code=code, message=message)


# --------------------------------------------------------------------------------------------------- what SNS takes


def _subject(text: str) -> str:
    line = "".join(c if " " <= c <= "~" else "?" for c in " ".join(text.split()))
    return line[:99] or "-"


def _bounded(text: str) -> str:
    return text.encode("utf-8", "replace")[: 256 * 1024].decode("utf-8", "ignore")
