"""Fleet: this instance in its Auto Scaling group, and the calls to it.

Owns the calls to Auto Scaling, SNS and CloudWatch, and which of them may be repeated. Knows neither the harness nor
when a call should be made. `calls.py` makes them, `fleet_errors.py` owns the meaning of a refusal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cloud.aws.calls import Calls
from cloud.aws.fleet_errors import NotWaiting, Refused
from cloud.aws.instance import GROUP_TAG, Instance, identify, tag
from cloud.aws.metadata import Metadata
from cloud.errors import CloudError, Denied, NotFound, Unavailable, call_with_retry
from cloud.notice import Deadline
from cloud.s3.errors import CredentialsMissing

ATTEMPTS = 30
"""Attempts for one action; with the pauses, more than a minute of throttling. The deadline may end them sooner."""
FIRST_PAUSE_S = 0.3

LEAVING = ("Terminating", "Terminated", "Detaching", "Detached")
"""Prefixes of the lifecycle states of instances that the group will not keep ("Terminating:Wait")."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class GroupState:
    """State of an Auto Scaling group at one moment.

    Attributes:
        name: name of the group.
        desired: desired number of instances.
        minimum: least number of instances.
        maximum: greatest number of instances.
        instances: ids of its instances, including those that are starting or leaving.
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
    launch_hook: str | None = None,
) -> tuple[Fleet | None, str]:
    """Return this instance's group and a warning, or `None` and the reason why there is none. Raises no CloudError.

    The text beside a fleet is a warning (or empty): the group could not be described, so that later calls may fail with
    the same error.

    Args:
        metadata: the service; `None` if the settings turn it off.
        group: name of the group; `None` or empty for the name in the instance's tag.
        hook: see `Fleet`.
        topic: see `Fleet`.
        namespace: see `Fleet`.
        run: see `Fleet`.
        deadline: for the whole.
        launch_hook: see `Fleet`.
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
    fleet = Fleet(instance, name, hook=hook, launch_hook=launch_hook, topic=topic, namespace=namespace, run=run)
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

    Every call is safe to repeat, in this process and by another, and is repeated here while its error is retryable and
    its deadline not reached. If this instance or its group is gone already, a call does nothing and raises nothing. A
    group that this instance is not in is never changed.

    Every method but the constructor raises `CloudError`: `Denied` names the IAM action that is missing.

    Args:
        instance: this instance.
        group: the Auto Scaling group's name.
        hook: name of the group's TERMINATING lifecycle hook; `None` or empty for none.
        launch_hook: name of its LAUNCHING lifecycle hook; `None` or empty for none.
        topic: ARN of an SNS topic; `None` or empty for none.
        namespace: namespace of the CloudWatch metrics; `None` or empty for none.
        run: value of the metrics' dimension Run.
        sleep: how to pause between attempts.
    """

    def __init__(
        self,
        instance: Instance,
        group: str,
        *,
        hook: str | None = None,
        launch_hook: str | None = None,
        topic: str | None = None,
        namespace: str | None = None,
        run: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.instance = instance
        self.group = group
        self._hook, self._launch_hook = hook, launch_hook
        self._topic = topic
        self._namespace = namespace
        self._run = run
        self._sleep = sleep
        self._calls = Calls(instance.region)

    def describe(self, deadline: Deadline) -> GroupState:
        """Return the present state of the group. Raises `NotFound` if the group is gone."""
        found = self._retry(lambda: self._find(deadline), deadline)
        if found is None:
            region = f" in {self.instance.region}" if self.instance.region else ""
            raise NotFound(f"there is no Auto Scaling group {self.group}{region}")
        return found.state

    def finish(self, deadline: Deadline) -> None:
        """Terminate this instance and lower the group's desired capacity by one, and its minimum if necessary.

        If that is refused and this instance is alone in the group, set the desired capacity to 0.
        """
        self._retry(lambda: self._finish(deadline), deadline)

    def stop(self, deadline: Deadline) -> None:
        """End every instance of the group: set its minimum and desired capacity to 0.

        This removes this instance's own scale-in protection first. Other protected instances stay protected, and stay.
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
        """Terminate only this instance; the group keeps its size and starts a replacement."""

        def attempt() -> None:
            if self._stays(deadline):
                self._terminate(decrement=False, deadline=deadline)

        self._retry(attempt, deadline)

    def heartbeat(self, deadline: Deadline) -> bool:
        """Ask the group to wait longer before it ends this instance. Return whether it is waiting."""
        return self._act("RecordLifecycleActionHeartbeat", self._hook, deadline)

    def complete(self, deadline: Deadline) -> bool:
        """Tell the group that it need not wait to end this instance. Return whether it was waiting.

        Just after `finish` or `leave` it may not be waiting yet: ask again some seconds later.
        """
        return self._act("CompleteLifecycleAction", self._hook, deadline, LifecycleActionResult="CONTINUE")

    def ready(self, deadline: Deadline) -> bool:
        """Tell the group that this instance, which it has started, is in service. Return whether it was waiting."""
        return self._act("CompleteLifecycleAction", self._launch_hook, deadline, LifecycleActionResult="CONTINUE")

    def abandon(self, deadline: Deadline) -> bool:
        """Tell the group that this instance, which it has started, is of no use. Return whether it was waiting.

        It then ends the instance, and starts another if it wants as many.
        """
        return self._act("CompleteLifecycleAction", self._launch_hook, deadline, LifecycleActionResult="ABANDON")

    def protect(self, on: bool, deadline: Deadline) -> None:
        """Keep the group from choosing this instance when it shrinks, or allow that again."""

        def attempt() -> None:
            if self._stays(deadline):
                self._protect(on, deadline)

        self._retry(attempt, deadline)

    def mark_unhealthy(self, deadline: Deadline) -> None:
        """Ask the group to replace this instance, even within its health check grace period."""

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
        """Send a message to the topic's subscribers; twice if a reply is lost. Does nothing without a topic.

        Args:
            subject: SNS accepts 99 printable ASCII characters; others become "?", and the rest is cut off.
            text: SNS accepts 256 KiB; the rest is cut off.
            deadline: ends the attempts.
        """
        if not self._topic:
            return
        message = {"TopicArn": self._topic, "Subject": _subject(subject), "Message": _bounded(text) or "-"}
        self._retry(lambda: self._calls.call("Publish", f"to {self._topic}", deadline, **message), deadline)

    def measure(self, values: Mapping[str, float], deadline: Deadline) -> None:
        """Put metrics, by name; a name that ends in "Seconds" has that unit, any other is a count.

        If a reply is lost, a metric may be counted twice. Does nothing without a namespace.
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
        """Close the connections. Idempotent; a later call opens new ones."""
        self._calls.close()

    # ------------------------------------------------------------------------------------------- one attempt of each

    @property
    def _where(self) -> str:
        return f"of {self.instance.id} in Auto Scaling group {self.group}"

    def _retry(self, call: Callable[[], _T], deadline: Deadline) -> _T:
        return call_with_retry(call, deadline, sleep=self._sleep, attempts=ATTEMPTS, base_s=FIRST_PAUSE_S)

    def _find(self, deadline: Deadline) -> _Found | None:
        """Return the group with this instance in it, or `None` if the group is gone."""
        where = f"of Auto Scaling group {self.group}"
        reply = self._calls.call("DescribeAutoScalingGroups", where, deadline, AutoScalingGroupNames=[self.group])
        groups = reply.get("AutoScalingGroups")
        return _Found.read(groups[0], self.instance.id) if groups else None

    def _stays(self, deadline: Deadline) -> bool:
        """Whether this instance is in the group, and not leaving it."""
        found = self._find(deadline)
        return found is not None and found.me is not None and not _is_leaving(found.me)

    def _finish(self, deadline: Deadline) -> None:
        found = self._find(deadline)
        if found is None or found.me is None:
            return
        state = found.state
        if _is_leaving(found.me):
            if found.alone:  # reclaimed at the last moment: the group needs no replacement
                self._shrink(state, 0, deadline)
            return
        self._lower_minimum(state, max(0, state.desired - 1), deadline)
        try:
            self._terminate(decrement=True, deadline=deadline)
        except Denied:  # also Refused: for example, a user has raised the minimum meanwhile
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

    def _act(self, operation: str, hook: str | None, deadline: Deadline, **parameters: Any) -> bool:
        """Make a call about a lifecycle action of this instance. Return whether there was one."""
        if not hook:
            return False
        parameters |= {"LifecycleHookName": hook, "InstanceId": self.instance.id}

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
        me: this instance as AWS describes it, or `None` if it is not in the group.
        alone: whether the group wants at most one instance, and every other instance is leaving.
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


# ----------------------------------------------------------------------------------------------------- limits of SNS


def _subject(text: str) -> str:
    line = "".join(c if " " <= c <= "~" else "?" for c in " ".join(text.split()))
    return line[:99] or "-"


def _bounded(text: str) -> str:
    return text.encode("utf-8", "replace")[: 256 * 1024].decode("utf-8", "ignore")
