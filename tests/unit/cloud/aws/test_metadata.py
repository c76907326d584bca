"""MetadataSession against the simulator, over loopback, through every fault."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cloud.aws import metadata
from cloud.aws.metadata import MAX_BODY_BYTES, MetadataSession, endpoint_from
from cloud.errors import Unavailable
from cloud.notice import Deadline
from cloud.testing.metadata_sim import INSTANCE, Fault, MetadataSimulator
from tests.support.clock import FakeClock
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[4]
NEVER = Deadline.never()
INSTANCE_ID = "meta-data/instance-id"
TOKEN = ("PUT", "api/token")

importlib.import_module("requests")  # which a session does at its first question: a limit here has no time for that


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def simulator(clock: FakeClock) -> Iterator[MetadataSimulator]:
    with MetadataSimulator(clock=clock) as simulator:
        yield simulator


@pytest.fixture
def session(simulator: MetadataSimulator, clock: FakeClock) -> Iterator[MetadataSession]:
    session = MetadataSession(simulator.url, timeout_s=HANG_S, clock=clock)
    yield session
    session.close()


def impatient(simulator: MetadataSimulator) -> MetadataSession:
    return MetadataSession(simulator.url, timeout_s=0.05)


def test_an_answer_is_fetched_with_a_token(simulator: MetadataSimulator, session: MetadataSession) -> None:
    answer = session.get(INSTANCE_ID, deadline=NEVER)

    assert answer is not None
    assert answer.text == "i-0123456789abcdef0"
    assert list(simulator.requests) == [TOKEN, ("GET", INSTANCE_ID)]


def test_the_services_own_time_comes_along() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    with MetadataSimulator(wall_clock=lambda: at) as simulator:
        session = MetadataSession(simulator.url)
        answer = session.get(INSTANCE_ID, deadline=NEVER)
        session.close()

    assert answer is not None
    assert answer.served_at == at


def test_what_is_not_there_is_none_whatever_page_says_so(session: MetadataSession) -> None:
    assert session.get("meta-data/spot/instance-action", deadline=NEVER) is None


def test_a_token_serves_until_half_of_its_life(
    simulator: MetadataSimulator, session: MetadataSession, clock: FakeClock
) -> None:
    session.get(INSTANCE_ID, deadline=NEVER)
    clock.advance(10799)
    session.get(INSTANCE_ID, deadline=NEVER)
    assert list(simulator.requests).count(TOKEN) == 1

    clock.advance(2)
    session.get(INSTANCE_ID, deadline=NEVER)
    assert list(simulator.requests).count(TOKEN) == 2


def test_a_void_token_is_replaced_in_the_same_call(simulator: MetadataSimulator, session: MetadataSession) -> None:
    session.get(INSTANCE_ID, deadline=NEVER)
    simulator.fault(Fault.TOKEN_EXPIRY)
    simulator.requests.clear()

    assert session.get(INSTANCE_ID, deadline=NEVER) is not None
    assert list(simulator.requests) == [("GET", INSTANCE_ID), TOKEN, ("GET", INSTANCE_ID)]


def test_two_refused_tokens_are_unavailable(simulator: MetadataSimulator, session: MetadataSession) -> None:
    simulator.fault(Fault.UNAUTHORIZED)

    with pytest.raises(Unavailable, match="answered 401"):
        session.get(INSTANCE_ID, deadline=NEVER)
    assert list(simulator.requests).count(TOKEN) == 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Fault.SERVER_ERROR, "answered 503"),
        (Fault.DISABLED, "turned off"),
        (Fault.NO_TOKENS, "not an EC2 metadata service"),
    ],
)
def test_a_fault_is_unavailable_with_words_and_over_when_it_is_over(
    simulator: MetadataSimulator, session: MetadataSession, kind: Fault, words: str
) -> None:
    simulator.fault(kind)
    with pytest.raises(Unavailable, match=words):
        session.get(INSTANCE_ID, deadline=NEVER)

    simulator.clear()
    assert session.get(INSTANCE_ID, deadline=NEVER) is not None


@pytest.mark.parametrize("cut", [1.2, 0.5], ids=["its-own-limit-comes-first", "the-connection-is-shut-down-first"])
def test_no_answer_to_the_put_names_the_hop_limit(
    simulator: MetadataSimulator, monkeypatch: pytest.MonkeyPatch, cut: float
) -> None:
    monkeypatch.setattr(metadata, "CUT", cut)
    simulator.fault(Fault.HANG, path="api/token")

    with pytest.raises(Unavailable, match=r"no answer within .* hop limit of 1"):
        impatient(simulator).get(INSTANCE_ID, deadline=NEVER)


def test_no_answer_to_the_get_does_not(simulator: MetadataSimulator, session: MetadataSession) -> None:
    session.get(INSTANCE_ID, deadline=NEVER)
    session._timeout_s = 0.05
    simulator.fault(Fault.HANG, path="meta-data/")

    with pytest.raises(Unavailable, match="no answer within") as caught:
        session.get(INSTANCE_ID, deadline=NEVER)
    assert "hop limit" not in str(caught.value)


def test_an_answer_that_drips_is_not_waited_for(simulator: MetadataSimulator) -> None:
    simulator.fault(Fault.SLOW, path="api/token")
    session = MetadataSession(simulator.url, timeout_s=0.3)

    with pytest.raises(Unavailable, match=r"too slowly|no answer within"):
        session.get(INSTANCE_ID, deadline=NEVER)


def test_nobody_there_is_unavailable() -> None:
    with MetadataSimulator() as simulator:
        session = MetadataSession(simulator.url, timeout_s=1.0)

    with pytest.raises(Unavailable, match="refused"):
        session.get(INSTANCE_ID, deadline=NEVER)


def test_without_time_nothing_is_asked(simulator: MetadataSimulator, session: MetadataSession) -> None:
    with pytest.raises(Unavailable, match="no time left"):
        session.get(INSTANCE_ID, deadline=Deadline(0.0, lambda: 1.0))
    assert not simulator.requests


def test_a_page_is_no_token(
    simulator: MetadataSimulator, session: MetadataSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "new_token", lambda _ttl_s: "<html>\nlog in first\n</html>")

    with pytest.raises(Unavailable, match="no token"):
        session.get(INSTANCE_ID, deadline=NEVER)


def test_an_answer_without_end_is_refused(
    simulator: MetadataSimulator, session: MetadataSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "lookup", lambda _path: "x" * (MAX_BODY_BYTES + 1))

    with pytest.raises(Unavailable, match=f"more than {MAX_BODY_BYTES} bytes"):
        session.get(INSTANCE_ID, deadline=NEVER)


def test_proxies_of_the_environment_are_ignored(
    simulator: MetadataSimulator, session: MetadataSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there

    assert session.get(INSTANCE_ID, deadline=NEVER) is not None


def test_one_connection_serves_every_call(simulator: MetadataSimulator, session: MetadataSession) -> None:
    for path in (*INSTANCE, "meta-data/not-there", INSTANCE_ID):
        session.get(path, deadline=NEVER)

    assert simulator._server is not None
    assert len(simulator._server._connections) == 1


def test_a_session_may_be_closed_twice_and_used_again(session: MetadataSession) -> None:
    session.close()
    session.close()

    assert session.get(INSTANCE_ID, deadline=NEVER) is not None


@pytest.mark.parametrize(
    ("settings", "endpoint"),
    [
        ({}, "http://169.254.169.254"),
        ({"mode": "IPv4"}, "http://169.254.169.254"),
        ({"mode": "ipv6"}, "http://[fd00:ec2::254]"),
        ({"endpoint": "http://127.0.0.1:1338/", "mode": "IPv6"}, "http://127.0.0.1:1338"),
        ({"disabled": "true"}, None),
        ({"disabled": "TRUE", "endpoint": "http://127.0.0.1:1338"}, None),
        ({"disabled": "false"}, "http://169.254.169.254"),
    ],
)
def test_the_endpoint_follows_the_settings_of_every_aws_sdk(settings: dict[str, str], endpoint: str | None) -> None:
    assert endpoint_from(**settings) == endpoint


@pytest.mark.parametrize("settings", [{"mode": "IPv5"}, {"endpoint": "169.254.169.254"}, {"endpoint": "file:///x"}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        endpoint_from(**settings)


def test_importing_a_source_loads_no_http_client() -> None:
    program = "import sys, cloud.aws.notices, cloud.host.notices; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)

    assert not set(done.stdout.split()) & {"requests", "urllib3", "tenacity", "awscrt", "asyncio"}


@pytest.mark.parametrize("kept", [False, True])
def test_a_service_that_drips_is_given_up_in_time(kept: bool) -> None:
    """Each byte came in time, so the library waited for the next one: an agent heard no notice meanwhile."""
    over = threading.Event()

    class Dripping(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            if kept:  # the token comes at once, and the connection is kept
                self.send_response(200)
                self.send_header("Content-Length", "1")
                self.end_headers()
                self.wfile.write(b"t")
            else:
                self.do_GET()

        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            with contextlib.suppress(OSError):
                while not over.wait(0.01):
                    self.wfile.write(b"a ")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        session = MetadataSession(f"http://127.0.0.1:{server.server_address[1]}", timeout_s=0.2)
        try:
            for _ in range(2):
                with pytest.raises(Unavailable):
                    session.get(INSTANCE_ID, deadline=NEVER)
        finally:
            over.set()
            session.close()
            server.shutdown()
            serving.join()
