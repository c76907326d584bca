"""MetadataSimulator: an EC2 metadata service on this host, to try out and test the end of an instance.

Owns a real HTTP server that speaks IMDSv2 as EC2 does, including the XHTML of its errors, and that makes announcements
and misbehaves on request. Knows nothing of its readers.

    PUT  /latest/api/token                       a token, for the time that the request's header asks for
    GET  /latest/meta-data/…, /latest/dynamic/…  with a token
    POST /sim/notice?in_s=20&action=terminate&lead_s=120      requests of `steer`, also from another process
    POST /sim/rebalance?in_s=0    /sim/lifecycle?state=Terminated    /sim/withdraw    /sim/clear
    POST /sim/fault?kind=hang&for_s=10&path=meta-data/spot    without `for_s` until /sim/clear
    GET  /sim/state

Unlike some mocks, the time in a notice is fixed when the notice is issued: EC2's does not slide with every request.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import http.client
import json
import math
import secrets
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cloud.notice import SPOT_NOTICE_S, Clock

MAX_TOKEN_TTL_S = 21600
DRIP_S = 0.2  # between two bytes of a slow answer

INSTANCE_ID = "i-0123456789abcdef0"
REGION = "us-east-1"
INSTANCE: Mapping[str, str] = {
    "meta-data/instance-id": INSTANCE_ID,
    "meta-data/instance-type": "g6e.xlarge",
    "meta-data/instance-life-cycle": "spot",
    "meta-data/placement/region": REGION,
    "meta-data/placement/availability-zone": f"{REGION}a",
    "meta-data/tags/instance/Name": "simulated",
    "dynamic/instance-identity/document": json.dumps(
        {
            "accountId": "123456789012",
            "availabilityZone": f"{REGION}a",
            "instanceId": INSTANCE_ID,
            "instanceType": "g6e.xlarge",
            "region": REGION,
        },
        indent=2,
    ),
}
"""Metadata of the simulated instance, by path below /latest/."""


class Fault(enum.Enum):
    """Ways in which a metadata service can fail."""

    TOKEN_EXPIRY = "token-expiry"
    """Every token given so far becomes invalid. Happens once."""
    UNAUTHORIZED = "unauthorized"
    """Every token is refused: 401."""
    HANG = "hang"
    """Accepts the request and never answers. In a container, a hop limit of 1 looks like this."""
    SLOW = "slow"
    """Answers slowly, a byte at a time."""
    SERVER_ERROR = "5xx"
    """503 to every request."""
    XHTML = "xhtml"
    """200, and an XHTML page instead of the data."""
    DISABLED = "disabled"
    """403 to everything: the instance's metadata service is turned off."""
    NO_TOKENS = "no-tokens"
    """404 to the request for a token: another kind of server answers at the address."""
    CLOCK_OFFSET = "clock-offset"
    """The service's clock is an hour ahead, in its `Date` header and in every time that it announces."""


CLOCK_OFFSET = timedelta(hours=1)


@dataclass(frozen=True)
class _Announcement:
    """An announcement that names the instant `at`, and appears at `appears_at` on the monotonic clock."""

    appears_at: float
    at: datetime
    action: str = ""


@dataclass(frozen=True)
class _Misbehaviour:
    kind: Fault
    until: float
    path: str


class MetadataSimulator:
    """A metadata service in a thread of this process; `with` starts and stops it. Its methods may be called any time.

    Args:
        host: address to listen on, loopback by default; every process that can reach it can steer it.
        port: port to listen on; 0 for any free port.
        instance_id: id of the simulated instance.
        region: region of the simulated instance, which is in its first availability zone.
        tags: tags of the instance beside its Name, e.g. {"aws:autoscaling:groupName": "trainers"}.
        clock: measures delays and the ages of tokens.
        wall_clock: the time that the service reports, before `Fault.CLOCK_OFFSET`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        instance_id: str = INSTANCE_ID,
        region: str = REGION,
        tags: Mapping[str, str] | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._texts = {
            path: text.replace(INSTANCE_ID, instance_id).replace(REGION, region) for path, text in INSTANCE.items()
        }
        self._texts |= {f"meta-data/tags/instance/{key}": value for key, value in (tags or {}).items()}
        self.requests: collections.deque[tuple[str, str]] = collections.deque(
            maxlen=1000
        )  # (method, path), newest last
        self._address = (host, port)
        self._clock = clock
        self._wall_clock = wall_clock
        self._changed = threading.Condition()  # guards all below; notified when a fault ends or the server stops
        self._tokens: dict[str, float] = {}
        self._notice: _Announcement | None = None
        self._recommendation: _Announcement | None = None
        self._lifecycle: str | None = None
        self._faults: list[_Misbehaviour] = []
        self._stopping = False
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------------- lifetime

    @property
    def url(self) -> str:
        """URL of the running service; only after `start`."""
        assert self._server is not None, "the simulator is not started"
        return f"http://{self._server.server_address[0]!s}:{self._server.server_address[1]}"

    def start(self) -> MetadataSimulator:
        """Bind the port and serve. Raises OSError if the port is in use."""
        self._stopping = False
        self._server = _Server(self._address, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="metadata-simulator", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving, even in the middle of an answer. Idempotent."""
        if self._server is None or self._thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.close_connections()
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None

    def wait(self) -> None:
        """Block until the service is stopped, or this thread is interrupted."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def __enter__(self) -> MetadataSimulator:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------------------- steering

    def notice(self, *, in_s: float = 0.0, action: str = "terminate", lead_s: float = SPOT_NOTICE_S) -> None:
        """Issue a spot interruption notice that appears in `in_s` and names a time `lead_s` after that."""
        if action not in ("terminate", "stop", "hibernate"):
            raise ValueError(f"action is terminate, stop or hibernate, not {action!r}")
        at = self._wall_clock() + timedelta(seconds=in_s + lead_s)
        with self._changed:
            self._notice = _Announcement(self._clock() + in_s, at, action)

    def rebalance(self, *, in_s: float = 0.0) -> None:
        """Issue a rebalance recommendation that appears in `in_s`."""
        at = self._wall_clock() + timedelta(seconds=in_s)
        with self._changed:
            self._recommendation = _Announcement(self._clock() + in_s, at)

    def lifecycle(self, state: str) -> None:
        """Set the Auto Scaling group's target state, e.g. "InService" or "Terminated"."""
        with self._changed:
            self._lifecycle = state

    def withdraw(self) -> None:
        """Withdraw the notice and the recommendation; a target state of Terminated becomes InService."""
        with self._changed:
            self._notice = self._recommendation = None
            if self._lifecycle is not None:
                self._lifecycle = "InService"

    def fault(self, kind: Fault, *, for_s: float = math.inf, path: str = "") -> None:
        """Misbehave for `for_s` seconds on every path below /latest/ that starts with `path`."""
        with self._changed:
            if kind is Fault.TOKEN_EXPIRY:
                self._tokens.clear()
            else:
                self._faults.append(_Misbehaviour(kind, self._clock() + for_s, path))

    def clear(self) -> None:
        """Remove all faults and announcements."""
        with self._changed:
            self._notice = self._recommendation = self._lifecycle = None
            self._faults.clear()
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """Return the announcements of now or soon, and the faults in force."""
        with self._changed:
            now = self._clock()
            return {
                "notice": _described(self._notice, now),
                "rebalance": _described(self._recommendation, now),
                "lifecycle": self._lifecycle,
                "faults": sorted({fault.kind.value for fault in self._faults if fault.until > now}),
                "requests": len(self.requests),
            }

    # --------------------------------------------------------------------------- asked by the handler, in any thread

    def is_faulty(self, kind: Fault, path: str = "") -> bool:
        """Whether the fault `kind` is in force for `path`."""
        with self._changed:
            return self._is_faulty(kind, path)

    def hang(self, path: str) -> None:
        """Block while `Fault.HANG` is in force for `path`, or until the simulator stops."""
        with self._changed:
            while self._is_faulty(Fault.HANG, path) and not self._stopping:
                self._changed.wait(0.1)  # a fault that ends by the clock does not notify

    def drip(self) -> bool:
        """Wait before the next byte of a slow answer. Return False if the simulator stops, so that it is not sent."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._stopping, DRIP_S)

    def now(self) -> datetime:
        """Return the time that the service reports."""
        return self._wall_clock() + self._offset()

    def new_token(self, ttl_s: int) -> str:
        """Return a new token that is valid for `ttl_s` seconds."""
        token = secrets.token_urlsafe(40)
        with self._changed:
            self._tokens[token] = self._clock() + ttl_s
        return token

    def accepts(self, token: str | None, path: str) -> bool:
        """Whether `token` gives access to `path`."""
        with self._changed:
            return self._tokens.get(token or "", -math.inf) > self._clock() and not self._is_faulty(
                Fault.UNAUTHORIZED, path
            )

    def lookup(self, path: str) -> str | None:
        """Return the text at `path` below /latest/, or `None`."""
        offset = self._offset()
        with self._changed:
            now = self._clock()
            notice = self._notice if self._notice and self._notice.appears_at <= now else None
            advice = self._recommendation if self._recommendation and self._recommendation.appears_at <= now else None
            lifecycle = self._lifecycle
        match path:
            case "meta-data/spot/instance-action":
                return json.dumps({"action": notice.action, "time": _iso(notice.at + offset)}) if notice else None
            case "meta-data/spot/termination-time":
                return _iso(notice.at + offset) if notice and notice.action == "terminate" else None
            case "meta-data/events/recommendations/rebalance":
                return json.dumps({"noticeTime": _iso(advice.at + offset)}) if advice else None
            case "meta-data/autoscaling/target-lifecycle-state":
                return lifecycle
        return self._texts.get(path)

    def _is_faulty(self, kind: Fault, path: str) -> bool:
        now = self._clock()
        return any(f.kind is kind and f.until > now and path.startswith(f.path) for f in self._faults)

    def _offset(self) -> timedelta:
        return CLOCK_OFFSET if self.is_faulty(Fault.CLOCK_OFFSET) else timedelta()


def steer(url: str, verb: str, **fields: object) -> dict[str, Any]:
    """Steer a simulator in another process; return its state afterwards.

    Args:
        url: the simulator's `url`.
        verb: notice, rebalance, lifecycle, withdraw, fault or clear; "state" only asks.
        fields: the verb's arguments, e.g. `in_s=20`.

    Raises:
        OSError: no simulator answers at `url`.
        ValueError: the simulator does not understand the request; the message says what.
    """
    query = urllib.parse.urlencode(fields)
    request = urllib.request.Request(f"{url}/sim/{verb}?{query}", method="GET" if verb == "state" else "POST")
    no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with no_proxy.open(request, timeout=5) as response:
            state: dict[str, Any] = json.load(response)
            return state
    except urllib.error.HTTPError as err:
        with err:
            raise ValueError(err.read().decode("utf-8", "replace").strip()) from None
    except http.client.HTTPException as err:
        raise OSError(f"{url} is no simulator: {err}") from err


class _Server(ThreadingHTTPServer):
    """A server that tracks its connections, so that `stop` need not wait for clients to close them."""

    daemon_threads = False  # so that server_close joins them

    def __init__(self, address: tuple[str, int], simulator: MetadataSimulator) -> None:
        self.simulator = simulator
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Shut every connection down."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a client closed the connection in the middle."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are two writes: a client's delayed ACK would cost 40 ms
    server: _Server

    def do_GET(self) -> None:
        self._serve(self._data)

    def do_PUT(self) -> None:
        self._serve(self._token)

    def do_POST(self) -> None:
        self._serve(lambda _path: self._page(405, "Method Not Allowed"))

    def _serve(self, answer: Callable[[str], None]) -> None:
        simulator = self.server.simulator
        self.rfile.read(min(int(self.headers.get("Content-Length") or 0), 65536))  # the next request begins behind it
        url = urllib.parse.urlsplit(self.path)
        if url.path.startswith("/sim/"):
            self._steer(url.path.removeprefix("/sim/"), dict(urllib.parse.parse_qsl(url.query)))
            return
        path = url.path.removeprefix("/latest/")
        simulator.requests.append((self.command, path))
        if simulator.is_faulty(Fault.HANG, path):
            simulator.hang(path)
            self.close_connection = True
        elif simulator.is_faulty(Fault.SERVER_ERROR, path):
            self._page(503, "Service Unavailable")
        elif simulator.is_faulty(Fault.DISABLED, path):
            self._page(403, "Forbidden")
        else:
            answer(path)

    def _token(self, path: str) -> None:
        simulator = self.server.simulator
        ttl_s = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if path != "api/token" or simulator.is_faulty(Fault.NO_TOKENS, path):
            self._page(404, "Not Found")
        elif self.headers.get("X-Forwarded-For") is not None:
            self._page(403, "Forbidden")  # EC2's own protection against requests through a proxy
        elif not (ttl_s.isascii() and ttl_s.isdigit() and 1 <= int(ttl_s) <= MAX_TOKEN_TTL_S):
            self._page(400, "Bad Request")
        else:
            token = simulator.new_token(int(ttl_s))
            self._answer(200, "text/plain", token, {"X-aws-ec2-metadata-token-ttl-seconds": ttl_s})

    def _data(self, path: str) -> None:
        simulator = self.server.simulator
        if not simulator.accepts(self.headers.get("X-aws-ec2-metadata-token"), path):
            self._page(401, "Unauthorized")
        elif simulator.is_faulty(Fault.XHTML, path):
            self._page(200, "OK")
        elif (text := simulator.lookup(path)) is None:
            self._page(404, "Not Found")
        else:
            self._answer(200, "text/plain", text)

    def _steer(self, verb: str, fields: dict[str, str]) -> None:
        simulator = self.server.simulator
        try:
            if verb != "state":
                if self.command != "POST":
                    raise ValueError(f"{verb} is a POST")
                _obey(simulator, verb, fields)
        except ValueError as err:
            self._answer(400, "text/plain", f"{err}\n")
        else:
            self._answer(200, "application/json", json.dumps(simulator.state()))

    def _page(self, status: int, words: str) -> None:
        self._answer(status, "text/html", _XHTML.format(title=f"{status} - {words}"))

    def _answer(self, status: int, kind: str, text: str, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        path = urllib.parse.urlsplit(self.path).path
        if path.startswith("/sim/") or not self.server.simulator.is_faulty(Fault.SLOW, path.removeprefix("/latest/")):
            self.wfile.write(body)
            return
        for at in range(len(body)):
            if not self.server.simulator.drip():
                break
            self.wfile.write(body[at : at + 1])
        self.close_connection = True

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(self.server.simulator.now().astimezone(UTC), usegmt=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _obey(simulator: MetadataSimulator, verb: str, fields: dict[str, str]) -> None:
    """Carry out a request under /sim/. Raises ValueError with a message that says what is wrong."""
    allowed = _VERBS.get(verb)
    if allowed is None:
        raise ValueError(f"no such verb: {verb[:40]!r}; there are {', '.join(_VERBS)}")
    if strange := set(fields) - set(allowed):
        raise ValueError(f"{verb} takes {', '.join(allowed) or 'nothing'}, not {', '.join(sorted(strange))}")
    seconds = {name: _seconds(name, fields[name]) for name in fields if name.endswith("_s")}
    match verb:
        case "notice":
            simulator.notice(action=fields.get("action", "terminate"), **seconds)
        case "rebalance":
            simulator.rebalance(**seconds)
        case "lifecycle":
            simulator.lifecycle(fields.get("state", "Terminated"))
        case "withdraw":
            simulator.withdraw()
        case "clear":
            simulator.clear()
        case "fault":
            try:
                kind = Fault(fields.get("kind", ""))
            except ValueError:
                raise ValueError(f"kind is one of {', '.join(fault.value for fault in Fault)}") from None
            simulator.fault(kind, path=fields.get("path", ""), **seconds)


_VERBS: Mapping[str, tuple[str, ...]] = {
    "notice": ("in_s", "action", "lead_s"),
    "rebalance": ("in_s",),
    "lifecycle": ("state",),
    "withdraw": (),
    "fault": ("kind", "for_s", "path"),
    "clear": (),
}


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 1e6:
        raise ValueError(f"{name} is a number of seconds, not {text[:40]!r}")
    return seconds


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _described(announcement: _Announcement | None, now: float) -> dict[str, Any] | None:
    if announcement is None:
        return None
    described = {"time": _iso(announcement.at), "in_s": round(max(0.0, announcement.appears_at - now), 3)}
    return described | ({"action": announcement.action} if announcement.action else {})


_XHTML = """<?xml version="1.0" encoding="iso-8859-1"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Transitional//EN"
\t"http://www.w3.org/TR/xhtml1/DTD/xhtml1-transitional.dtd">
<html xmlns="http://www.w3.org/1999/xhtml" xml:lang="en" lang="en">
 <head>
  <title>{title}</title>
 </head>
 <body>
  <h1>{title}</h1>
 </body>
</html>
"""
