"""What the owner of a fleet asks AWS: against moto, and against literal answers for what moto does not know."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

import pytest

from cloud.aws.console import Console, Ran
from cloud.errors import Denied
from cloud.notice import Deadline
from tests.support.fleet_server import REGION, FleetServer
from tests.support.s3_account import use_account

NEVER = Deadline.never()
NOW = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)


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
def console(server: FleetServer) -> Iterator[Console]:
    made = Console(REGION, sleep=lambda seconds: None)
    yield made
    made.close()


def test_a_group_is_found_by_its_name_and_resized(server: FleetServer, console: Console) -> None:
    (instance,) = server.create_group("harness-gpt", desired=1)

    (found,) = console.groups(NEVER, "harness-gpt")
    console.set_size("harness-gpt", 0, NEVER)
    (stopped,) = console.groups(NEVER, "harness-gpt")

    assert (found.name, found.desired, [member.id for member in found.members]) == ("harness-gpt", 1, [instance])
    assert stopped.desired == 0
    assert console.groups(NEVER, "harness-other") == []


def test_activities_tell_launches_ends_and_failures(server: FleetServer, console: Console) -> None:
    began = "2026-11-01T10:00:00Z"

    def member(words: str, status: str, more: str = "") -> str:
        return (
            "<member><ActivityId>a</ActivityId><AutoScalingGroupName>g</AutoScalingGroupName><Cause>c</Cause>"
            f"<Description>{words}</Description><StartTime>{began}</StartTime><StatusCode>{status}</StatusCode>{more}"
            "</member>"
        )

    why = "<StatusMessage>no quota</StatusMessage>"
    first = member("Launching a new EC2 instance.  Status Reason: no quota", "Failed", why)
    second = member("Terminating EC2 instance: i-1", "Successful", f"<EndTime>{began}</EndTime>")
    third = member("Launching a new EC2 instance: i-1", "Successful", f"<EndTime>{began}</EndTime>")

    def page(members: str, token: str = "") -> str:
        return (
            '<DescribeScalingActivitiesResponse xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/">'
            f"<DescribeScalingActivitiesResult><Activities>{members}</Activities>{token}"
            "</DescribeScalingActivitiesResult></DescribeScalingActivitiesResponse>"
        )

    server.say("DescribeScalingActivities", 200, page(first, "<NextToken>more</NextToken>"))
    server.say("DescribeScalingActivities", 200, page(second + third))

    failed, ended, launched = console.activities("g", NEVER)

    assert (failed.failed, failed.launch, failed.instance, failed.ended_at) == (True, True, None, None)
    assert failed.words.endswith(": no quota")
    assert (ended.failed, ended.launch, ended.instance) == (False, False, "i-1")
    assert (launched.launch, launched.instance, launched.ended_at) == (True, "i-1", launched.began_at)
    assert [asked.get("NextToken") for asked in server.asked("DescribeScalingActivities")] == [None, "more"]


def test_the_price_of_a_type_is_the_one_by_the_hour(server: FleetServer, console: Console) -> None:
    def product(unit: str, usd: str) -> str:
        price = {"unit": unit, "pricePerUnit": {"USD": usd}}
        return json.dumps({"terms": {"OnDemand": {"o": {"priceDimensions": {"d": price}}}}})

    listed = [product("Hrs", "0.0"), product("GB", "9"), product("Hrs", "0.8")]
    server.say("GetProducts", 200, json.dumps({"PriceList": listed}))
    assert console.on_demand_price("g6.xlarge", "eu-west-1", NEVER) == 0.8

    server.say("GetProducts", 200, json.dumps({"PriceList": []}))
    assert console.on_demand_price("g6.xlarge", "eu-west-1", NEVER) is None


def test_who_may_not_see_prices_is_told_which_action_is_missing(server: FleetServer, console: Console) -> None:
    refusal = (
        "<Response><Errors><Error><Code>UnauthorizedOperation</Code><Message>no</Message></Error></Errors></Response>"
    )
    server.say("DescribeSpotPriceHistory", 403, refusal)

    with pytest.raises(Denied, match=r'allow ec2:DescribeSpotPriceHistory on "\*"'):
        console.spot_prices(["g6.xlarge"], NOW, NOW, NEVER)


def test_a_page_of_a_proxy_is_not_repeated_in_an_error(server: FleetServer, console: Console) -> None:
    server.say("GetProducts", 403, "<!doctype html>\n<title>Blocked</title>\n</html>")

    with pytest.raises(Denied, match=r"^GetProducts of g6.xlarge in eu-west-1: 403 the answer is a page of HTML"):
        console.on_demand_price("g6.xlarge", "eu-west-1", NEVER)


def test_a_command_on_an_instance_is_waited_for(server: FleetServer, console: Console) -> None:
    server.say("SendCommand", 200, json.dumps({"Command": {"CommandId": "11111111-2222-3333-4444-555555555555"}}))
    server.say("GetCommandInvocation", 400, json.dumps({"__type": "InvocationDoesNotExist", "message": "not yet"}))
    for status in ("Pending", "InProgress"):
        server.say("GetCommandInvocation", 200, json.dumps({"Status": status, "ResponseCode": -1}))
    done = {"Status": "Failed", "ResponseCode": 74, "StandardOutputContent": "said\n", "StandardErrorContent": ""}
    server.say("GetCommandInvocation", 200, json.dumps(done))

    assert console.run_on("i-1", "harness drill", NEVER) == Ran(74, "said\n", "")
    (sent,) = server.asked("SendCommand")
    assert sent["Parameters"] == {"commands": ["harness drill"]}
