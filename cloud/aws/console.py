"""Console: what the owner of a fleet asks AWS from any machine, and the few things that they change there.

Owns the forms of AWS's answers, and their pages. `fleet.py` has what an instance does to its own group.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloud.aws.calls import Calls
from cloud.aws.fleet_errors import Refused
from cloud.errors import call_with_retry
from cloud.notice import Deadline

RUN_TAG, STORE_TAG = "harness-run", "harness-store"
_PRICES_IN = "us-east-1"  # the price list has few endpoints; it knows all regions
_PAGES = 50
_RUN_SHELL = "AWS-RunShellScript"
_RUNNING = ("Pending", "InProgress", "Delayed")


@dataclass(frozen=True)
class Member:
    """An instance of a group.

    Attributes:
        id: "i-0123456789abcdef0".
        type: "g6e.xlarge".
        zone: "us-east-1a".
        state: of its life in the group: "InService", "Pending:Wait", "Terminating:Wait".
    """

    id: str
    type: str
    zone: str
    state: str


@dataclass(frozen=True)
class Group:
    """An Auto Scaling group, as its owner sees it.

    Attributes:
        name: of the group.
        desired: how many instances it wants.
        members: its instances.
        tags: of the group.
    """

    name: str
    desired: int
    members: tuple[Member, ...]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Activity:
    """Something that a group did, or could not do.

    Attributes:
        began_at: when.
        ended_at: `None` if it goes on.
        instance: the id in its description, or `None`.
        launch: whether it started an instance, and did not end one.
        failed: whether it came to nothing.
        words: AWS's own: what, and why it failed.
    """

    began_at: datetime.datetime
    ended_at: datetime.datetime | None
    instance: str | None
    launch: bool
    failed: bool
    words: str


@dataclass(frozen=True)
class SpotPrice:
    """The price of a spot pool from one instant on, until its next one.

    Attributes:
        type: of the instances.
        zone: of the pool.
        at: since when.
        usd: for an instance and hour.
    """

    type: str
    zone: str
    at: datetime.datetime
    usd: float


@dataclass(frozen=True)
class LogLine:
    """A line of CloudWatch Logs.

    Attributes:
        id: of this line, once in the log group.
        at_ms: milliseconds since 1970.
        stream: the instance's id.
        text: the line.
    """

    id: str
    at_ms: int
    stream: str
    text: str


@dataclass(frozen=True)
class Ran:
    """What a command on an instance came to.

    Attributes:
        code: its exit code; -1 if it was not run.
        output: of stdout, the first 24 000 characters.
        errors: of stderr, the same.
    """

    code: int
    output: str
    errors: str


class Console:
    """AWS in one region. Every method blocks, and raises `CloudError`: `Denied` names the IAM action that is missing.

    Args:
        region: of the fleet; empty for boto3's own choice.
        sleep: how to pause between attempts.
    """

    def __init__(self, region: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self.region = region
        self._calls, self._prices = Calls(region), Calls(_PRICES_IN)
        self._sleep = sleep

    def groups(self, deadline: Deadline, name: str | None = None) -> list[Group]:
        """Return the group of this name, if there is one; without a name, every group of a run."""
        which = {"Filters": [{"Name": "tag-key", "Values": [RUN_TAG]}]} if name is None else {}
        named = {} if name is None else {"AutoScalingGroupNames": [name]}
        where = "of this region" if name is None else f"of Auto Scaling group {name}"
        pages = self._pages("DescribeAutoScalingGroups", where, deadline, **which, **named)
        return [_group(found) for page in pages for found in page["AutoScalingGroups"]]

    def set_size(self, name: str, desired: int, deadline: Deadline) -> None:
        """Have the group want so many instances."""
        self._ask(
            "SetDesiredCapacity", f"of Auto Scaling group {name}", deadline,
            AutoScalingGroupName=name, DesiredCapacity=desired, HonorCooldown=False,
        )  # fmt: skip

    def activities(self, name: str, deadline: Deadline) -> Iterator[Activity]:
        """Yield what the group did, the newest first: those of the last six weeks, which AWS keeps."""
        where = f"of Auto Scaling group {name}"
        for page in self._pages("DescribeScalingActivities", where, deadline, AutoScalingGroupName=name):
            yield from map(_activity, page["Activities"])

    def alarms(self, prefix: str, deadline: Deadline) -> dict[str, str]:
        """Return the state of every alarm whose name begins with `prefix`, by the rest of its name."""
        pages = self._pages("DescribeAlarms", f"{prefix}…", deadline, AlarmNamePrefix=prefix)
        return {
            found["AlarmName"].removeprefix(prefix): str(found["StateValue"])
            for page in pages
            for found in page["MetricAlarms"]
        }

    def log_lines(self, group: str, since_ms: int, deadline: Deadline) -> Iterator[LogLine]:
        """Yield the lines of a log group since an instant, of all instances, in the order of time."""
        pages = self._pages("FilterLogEvents", f"of {group}", deadline, logGroupName=group, startTime=since_ms)
        for page in pages:
            for found in page["events"]:
                yield LogLine(found["eventId"], found["timestamp"], found["logStreamName"], found["message"])

    def spot_prices(
        self, types: Sequence[str], since: datetime.datetime, until: datetime.datetime, deadline: Deadline
    ) -> list[SpotPrice]:
        """Return the prices of these types in all zones: the one at `since`, and each change until `until`.

        AWS keeps ninety days.
        """
        which = {"InstanceTypes": list(types), "ProductDescriptions": ["Linux/UNIX"]}
        when = {"StartTime": since, "EndTime": until}
        pages = self._pages("DescribeSpotPriceHistory", "of " + ", ".join(types), deadline, **which, **when)
        return [
            SpotPrice(found["InstanceType"], found["AvailabilityZone"], found["Timestamp"], float(found["SpotPrice"]))
            for page in pages
            for found in page["SpotPriceHistory"]
        ]

    def on_demand_price(self, type_: str, region: str, deadline: Deadline) -> float | None:
        """Return the dollars for an instance with Linux and hour, by AWS's price list; `None` if it has none."""
        wanted = {
            "instanceType": type_, "regionCode": region, "operatingSystem": "Linux", "tenancy": "Shared",
            "preInstalledSw": "NA", "capacitystatus": "Used",
        }  # fmt: skip
        filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
        where = f"of {type_} in {region}"
        found = self._ask(
            "GetProducts", where, deadline, calls=self._prices, ServiceCode="AmazonEC2", Filters=filters
        )["PriceList"]  # fmt: skip
        return next((price for item in found if (price := _hourly(item)) is not None), None)

    def buckets(self, prefix: str, deadline: Deadline) -> list[str]:
        """Return the names of the account's buckets that begin with `prefix`."""
        found = self._ask("ListBuckets", "of this account", deadline)["Buckets"]
        return sorted(name for bucket in found if (name := str(bucket["Name"])).startswith(prefix))

    def run_on(self, instance: str, command: str, deadline: Deadline) -> Ran:
        """Run a shell line on an instance, by Systems Manager, as root; wait for its end, or until the deadline."""
        where = f"on {instance}"
        given = {"InstanceIds": [instance], "DocumentName": _RUN_SHELL, "Parameters": {"commands": [command]}}
        # Not repeated: the line could run twice.
        id_ = self._calls.call("SendCommand", where, deadline, **given)["Command"]["CommandId"]
        while True:
            self._sleep(1.0)
            try:
                found = self._ask("GetCommandInvocation", where, deadline, CommandId=id_, InstanceId=instance)
            except Refused:  # for some seconds the service does not know what it has just taken
                if deadline.expired:
                    raise
                continue
            if found["Status"] not in _RUNNING or deadline.expired:
                code = int(found.get("ResponseCode", -1))
                return Ran(code, found.get("StandardOutputContent", ""), found.get("StandardErrorContent", ""))

    def experiment(self, template: str, deadline: Deadline) -> str:
        """Start an experiment of Fault Injection Service. Return its id."""
        found = self._calls.call("StartExperiment", f"of {template}", deadline, experimentTemplateId=template)
        return str(found["experiment"]["id"])

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()
        self._prices.close()

    def _ask(
        self, operation: str, where: str, deadline: Deadline, calls: Calls | None = None, **parameters: Any
    ) -> dict[str, Any]:
        one = calls or self._calls
        return call_with_retry(lambda: one.call(operation, where, deadline, **parameters), deadline, sleep=self._sleep)

    def _pages(self, operation: str, where: str, deadline: Deadline, **parameters: Any) -> Iterator[dict[str, Any]]:
        name = "nextToken" if operation == "FilterLogEvents" else "NextToken"
        for _ in range(_PAGES):
            page = self._ask(operation, where, deadline, **parameters)
            yield page
            if not page.get(name):
                return
            parameters[name] = page[name]


# ---------------------------------------------------------------------------------------------------- AWS's own forms


def _group(found: Mapping[str, Any]) -> Group:
    members = tuple(
        Member(one["InstanceId"], one.get("InstanceType", ""), one["AvailabilityZone"], one["LifecycleState"])
        for one in found.get("Instances", [])
    )
    tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", [])}
    return Group(found["AutoScalingGroupName"], int(found["DesiredCapacity"]), members, tags)


def _activity(found: Mapping[str, Any]) -> Activity:
    words = str(found.get("Description", ""))
    failed = found["StatusCode"] in ("Failed", "Cancelled")
    why = f": {found['StatusMessage']}" if failed and found.get("StatusMessage") else ""
    instance = next((word.strip(".,:") for word in words.split() if word.startswith("i-")), None)
    launch = words.startswith("Launching")
    return Activity(found["StartTime"], found.get("EndTime"), instance, launch, failed, f"{words}{why}")


def _hourly(item: str | Mapping[str, Any]) -> float | None:
    """Return the price of one product of the price list."""
    product = json.loads(item) if isinstance(item, str) else item
    for offer in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in offer.get("priceDimensions", {}).values():
            if dimension.get("unit") == "Hrs" and (usd := float(dimension["pricePerUnit"].get("USD", 0))) > 0:
                return usd
    return None
