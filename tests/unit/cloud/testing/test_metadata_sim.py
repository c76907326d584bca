"""The simulator speaks IMDSv2 as EC2 does, and is steered from another process."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from cloud.testing.metadata_sim import MetadataSimulator, steer
from tests.support.clock import FakeClock
from tests.support.patience import HANG_S

TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"
NOT_FOUND = """<?xml version="1.0" encoding="iso-8859-1"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Transitional//EN"
\t"http://www.w3.org/TR/xhtml1/DTD/xhtml1-transitional.dtd">
<html xmlns="http://www.w3.org/1999/xhtml" xml:lang="en" lang="en">
 <head>
  <title>404 - Not Found</title>
 </head>
 <body>
  <h1>404 - Not Found</h1>
 </body>
</html>
"""


class Wall:
    """A wall clock that a test sets."""

    now = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def simulator(clock: FakeClock, wall: Wall) -> Iterator[MetadataSimulator]:
    with MetadataSimulator(clock=clock, wall_clock=wall) as simulator:
        yield simulator


def ask(
    simulator: MetadataSimulator, method: str, path: str, headers: dict[str, str]
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(simulator.url.removeprefix("http://"), timeout=HANG_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers
    finally:
        connection.close()


def token(simulator: MetadataSimulator, ttl: str = "60") -> str:
    status, text, headers = ask(simulator, "PUT", "/latest/api/token", {TTL: ttl})
    assert status == 200
    assert headers[TTL] == ttl
    return text


def get(simulator: MetadataSimulator, path: str) -> tuple[int, str]:
    return ask(simulator, "GET", f"/latest/{path}", {TOKEN: token(simulator)})[:2]


@pytest.mark.parametrize("headers", [{}, {TTL: ""}, {TTL: "0"}, {TTL: "21601"}, {TTL: "-1"}, {TTL: "1e3"}, {TTL: "²"}])
def test_a_token_needs_a_lifetime_of_one_second_to_six_hours(
    simulator: MetadataSimulator, headers: dict[str, str]
) -> None:
    status, text, _ = ask(simulator, "PUT", "/latest/api/token", headers)

    assert status == 400
    assert "<h1>400 - Bad Request</h1>" in text


def test_a_token_is_refused_through_a_proxy(simulator: MetadataSimulator) -> None:
    assert ask(simulator, "PUT", "/latest/api/token", {TTL: "60", "X-Forwarded-For": "10.0.0.1"})[0] == 403


@pytest.mark.parametrize("headers", [{}, {TOKEN: "made-up"}, {TOKEN: ""}])
def test_nothing_is_told_without_a_token(simulator: MetadataSimulator, headers: dict[str, str]) -> None:
    status, text, _ = ask(simulator, "GET", "/latest/meta-data/instance-id", headers)

    assert status == 401
    assert "<h1>401 - Unauthorized</h1>" in text


def test_a_token_expires(simulator: MetadataSimulator, clock: FakeClock) -> None:
    headers = {TOKEN: token(simulator, "60")}
    assert ask(simulator, "GET", "/latest/meta-data/instance-id", headers)[0] == 200

    clock.advance(60)

    assert ask(simulator, "GET", "/latest/meta-data/instance-id", headers)[0] == 401


def test_what_is_absent_is_a_page(simulator: MetadataSimulator) -> None:
    assert get(simulator, "meta-data/spot/instance-action") == (404, NOT_FOUND)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("meta-data/instance-life-cycle", "spot"),
        ("meta-data/placement/region", "us-east-1"),
        ("meta-data/placement/availability-zone", "us-east-1a"),
        ("meta-data/instance-type", "g6e.xlarge"),
        ("meta-data/tags/instance/Name", "simulated"),
    ],
)
def test_the_instance_is_a_spot_instance(simulator: MetadataSimulator, path: str, text: str) -> None:
    assert get(simulator, path) == (200, text)


def test_the_identity_document_is_json(simulator: MetadataSimulator) -> None:
    status, text = get(simulator, "dynamic/instance-identity/document")

    assert status == 200
    assert json.loads(text)["instanceId"] == "i-0123456789abcdef0"


def test_a_notices_time_does_not_slide(simulator: MetadataSimulator, clock: FakeClock, wall: Wall) -> None:
    simulator.notice(in_s=20, lead_s=120)
    assert get(simulator, "meta-data/spot/instance-action")[0] == 404

    for _ in range(3):
        clock.advance(20)
        wall.now += timedelta(seconds=20)
        assert get(simulator, "meta-data/spot/instance-action") == (
            200,
            '{"action": "terminate", "time": "2026-06-01T12:02:20Z"}',
        )
        assert get(simulator, "meta-data/spot/termination-time") == (200, "2026-06-01T12:02:20Z")


def test_only_a_termination_has_a_termination_time(simulator: MetadataSimulator) -> None:
    simulator.notice(action="stop")

    assert get(simulator, "meta-data/spot/instance-action")[0] == 200
    assert get(simulator, "meta-data/spot/termination-time")[0] == 404


def test_every_answer_carries_the_services_time(simulator: MetadataSimulator) -> None:
    _, _, headers = ask(simulator, "GET", "/latest/", {})

    assert headers["Date"] == "Mon, 01 Jun 2026 12:00:00 GMT"


def test_another_process_steers_it(simulator: MetadataSimulator, clock: FakeClock) -> None:
    steer(simulator.url, "notice", in_s=20, action="stop", lead_s=60.0)
    steer(simulator.url, "rebalance")
    steer(simulator.url, "lifecycle", state="Terminated")
    state = steer(simulator.url, "fault", kind="hang", for_s=10)

    assert state == steer(simulator.url, "state")
    assert state == {
        "notice": {"time": "2026-06-01T12:01:20Z", "in_s": 20.0, "action": "stop"},
        "rebalance": {"time": "2026-06-01T12:00:00Z", "in_s": 0.0},
        "lifecycle": "Terminated",
        "faults": ["hang"],
        "requests": 0,
    }

    clock.advance(10)
    assert steer(simulator.url, "withdraw")["lifecycle"] == "InService"
    assert steer(simulator.url, "clear") == {
        "notice": None,
        "rebalance": None,
        "lifecycle": None,
        "faults": [],
        "requests": 0,
    }


@pytest.mark.parametrize(
    ("verb", "fields", "words"),
    [
        ("notify", {}, "no such verb"),
        ("notice", {"action": "explode"}, "terminate, stop or hibernate"),
        ("notice", {"in_s": "soon"}, "in_s is a number of seconds"),
        ("notice", {"in_s": "nan"}, "in_s is a number of seconds"),
        ("notice", {"lead": 3}, "notice takes in_s, action, lead_s, not lead"),
        ("fault", {"kind": "fire"}, "kind is one of token-expiry"),
        ("withdraw", {"now": 1}, "withdraw takes nothing"),
    ],
)
def test_what_makes_no_sense_is_told(
    simulator: MetadataSimulator, verb: str, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        steer(simulator.url, verb, **fields)


def test_a_get_changes_nothing(simulator: MetadataSimulator) -> None:
    assert ask(simulator, "GET", "/sim/notice", {})[0] == 400
    assert simulator.state()["notice"] is None


def test_nobody_to_steer_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with MetadataSimulator() as simulator:
        url = simulator.url
        steer(url, "state")  # and the proxy is not asked

    with pytest.raises(OSError, match="refused"):
        steer(url, "state")


def test_stopping_waits_for_no_client(simulator: MetadataSimulator) -> None:
    connection = http.client.HTTPConnection(simulator.url.removeprefix("http://"), timeout=HANG_S)
    connection.request("GET", "/sim/state")
    connection.getresponse().read()

    simulator.stop()
    simulator.stop()

    connection.close()
