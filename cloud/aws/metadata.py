"""MetadataSession: one HTTP session to an EC2 metadata service, IMDSv2 (the only importer of requests).

Owns tokens, time-outs, and the limits of an answer. Knows no path's meaning: `notices.py` does. Reads no environment:
the caller passes `AWS_EC2_METADATA_*` to `endpoint_from`.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol

from cloud.errors import TooLarge, Unavailable
from cloud.notice import Clock, Deadline

if TYPE_CHECKING:
    from requests import Response, Session
    from requests.adapters import HTTPAdapter  # imported where it is used: it costs 100 ms, and a laptop may never ask

IPV4_ENDPOINT = "http://169.254.169.254"
IPV6_ENDPOINT = "http://[fd00:ec2::254]"

TOKEN_TTL_S = 21600  # six hours, the longest that EC2 gives
MAX_BODY_BYTES = 16 * 1024  # an identity document has about 500
CUT = 1.2  # times a request's time-out: then its connection is shut down, even if bytes still arrive
_TOKEN = re.compile(r"[!-~]{1,1024}")


@dataclass(frozen=True)
class Answer:
    """An answer of the metadata service with status 200.

    Attributes:
        text: the body.
        served_at: the service's own clock when it answered (its `Date` header), or `None` if it sent none.
    """

    text: str
    served_at: datetime | None


class Metadata(Protocol):
    """The calls that a notice source makes to a metadata service."""

    def get(self, path: str, *, deadline: Deadline) -> Answer | None:
        """Return the answer at `path` below /latest/, or `None` if there is nothing there. Raises `Unavailable`."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


def endpoint_from(endpoint: str | None = None, mode: str | None = None, disabled: str | None = None) -> str | None:
    """Return the service's URL, from three settings that every AWS SDK honours; `None` if they disable it.

    Args:
        endpoint: AWS_EC2_METADATA_SERVICE_ENDPOINT; wins over `mode`.
        mode: AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE, "IPv4" (also when absent) or "IPv6".
        disabled: AWS_EC2_METADATA_DISABLED; "true" in any case disables.

    Raises:
        ValueError: `endpoint` is not an http URL, or `mode` is neither IPv4 nor IPv6.
    """
    if (disabled or "").strip().lower() == "true":
        return None
    if endpoint:
        if not re.match(r"https?://[^/]", endpoint):
            raise ValueError(f"AWS_EC2_METADATA_SERVICE_ENDPOINT is not an http URL: {endpoint[:120]!r}")
        return endpoint.rstrip("/")
    modes = {"ipv4": IPV4_ENDPOINT, "ipv6": IPV6_ENDPOINT}
    try:
        return modes[(mode or "IPv4").strip().lower()]
    except KeyError:
        raise ValueError(f"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE is neither IPv4 nor IPv6: {mode!r}") from None


class MetadataSession:
    """Asks one metadata service over one kept-alive connection. For one thread.

    Proxies of the environment are ignored: a metadata service answers only its own host.

    Args:
        endpoint: the URL that `endpoint_from` returned.
        timeout_s: for one request, from its beginning to the last byte of its answer.
        clock: measures the token's age.
    """

    def __init__(self, endpoint: str = IPV4_ENDPOINT, *, timeout_s: float = 1.0, clock: Clock = time.monotonic) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._timeout_s = timeout_s
        self._clock = clock
        self._session: Session | None = None
        self._token = ""
        self._refresh_at = 0.0
        self._sockets: list[socket.socket] = []

    def get(self, path: str, *, deadline: Deadline) -> Answer | None:
        """Return the answer at `path` below /latest/, or `None` if there is nothing (404).

        Blocks for about a second at most, token included, and less if the deadline is nearer.

        Raises:
            Unavailable: no answer, or not a metadata service's; the message says which, and what it may mean.
        """
        bound = deadline.sooner(self._timeout_s)
        answer = self._ask(path, bound)
        if answer.status == 401:  # the token was revoked, or forgotten by a service that restarted
            self._token = ""
            answer = self._ask(path, bound)
        if answer.status == 200:
            return Answer(answer.text, answer.served_at)
        if answer.status == 404:
            return None
        raise Unavailable(f"{self.endpoint}/latest/{path} answered {answer.status}")

    def close(self) -> None:
        """Close the connection. Idempotent; a later `get` opens a new one."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _ask(self, path: str, deadline: Deadline) -> _Reply:
        headers = {"X-aws-ec2-metadata-token": self._valid_token(deadline)}
        return self._request("GET", path, headers, deadline)

    def _valid_token(self, deadline: Deadline) -> str:
        if self._token and self._clock() < self._refresh_at:
            return self._token
        asked_at = self._clock()
        reply = self._request("PUT", "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}, deadline)
        if reply.status == 403:
            raise Unavailable(f"{self.endpoint} refuses a token (403): the metadata service is turned off here")
        if reply.status in (404, 405):
            raise Unavailable(f"{self.endpoint} has no tokens ({reply.status}): it is not an EC2 metadata service")
        if reply.status != 200:
            raise Unavailable(f"{self.endpoint} answered {reply.status} to the request for a token")
        if not _TOKEN.fullmatch(reply.text):
            raise Unavailable(f"{self.endpoint} answered with something that is no token: {reply.text[:60]!r}")
        self._token = reply.text
        self._refresh_at = asked_at + TOKEN_TTL_S / 2
        return self._token

    def _request(self, method: str, path: str, headers: dict[str, str], deadline: Deadline) -> _Reply:
        """Send one request and return the reply, whatever its status. Raises `Unavailable` if there is no reply."""
        import requests
        import urllib3.exceptions

        url = f"{self.endpoint}/latest/{path}"
        timeout_s = min(self._timeout_s, deadline.remaining_s)
        if timeout_s <= 0:
            raise Unavailable(f"{url}: no time left to ask")
        try:
            with (
                self._bounded(CUT * timeout_s) as cut,
                self._opened().request(
                    method, url, headers=headers, timeout=timeout_s, stream=True, allow_redirects=False
                ) as response,
            ):
                reply = _Reply(response.status_code, _body(response, url, deadline), _served_at(response))
        except (requests.RequestException, urllib3.exceptions.HTTPError, TooLarge, OSError) as err:
            timed_out = isinstance(err, requests.Timeout | urllib3.exceptions.TimeoutError)
            if timed_out or (cut.is_set() and _says_that_nothing_came(err)):
                hint = "; in a container this is what a hop limit of 1 looks like" if method == "PUT" else ""
                raise Unavailable(f"{method} {url}: no answer within {timeout_s:.3g} s{hint}") from err
            raise Unavailable(f"{method} {url}: {'the answer comes too slowly' if cut.is_set() else err}") from err
        if cut.is_set():  # the part that arrived may look like a whole answer
            raise Unavailable(f"{method} {url}: the answer comes too slowly")
        return reply

    def _opened(self) -> Session:
        if self._session is None:
            import requests

            self._session = requests.Session()
            self._session.trust_env = False  # HTTP_PROXY would swallow the call, NO_PROXY or not
            self._session.headers.update({"Accept-Encoding": "identity", "User-Agent": "harness"})
            self._session.mount("http://", _remembering(self._sockets))
        return self._session

    @contextlib.contextmanager
    def _bounded(self, seconds: float) -> Generator[threading.Event]:
        """Shut the connection down after `seconds`: the library's time-out restarts at each byte, and headers may drip.

        Yields:
            An event that is set once the connection has been shut down.
        """
        cut = threading.Event()

        def shut() -> None:
            cut.set()
            for opened in self._sockets:
                with contextlib.suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, shut)
        timer.daemon = True
        timer.start()
        try:
            yield cut
        finally:
            timer.cancel()


def _remembering(sockets: list[socket.socket]) -> HTTPAdapter:
    """Return an adapter that connects for a session, and keeps the newest connection's socket in `sockets`."""
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection
    from urllib3.connectionpool import HTTPConnectionPool

    class Connection(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            sockets[:] = [self.sock]

    class Pool(HTTPConnectionPool):
        ConnectionCls = Connection

    adapter = HTTPAdapter()
    adapter.poolmanager.pool_classes_by_scheme = {"http": Pool}
    return adapter


@dataclass(frozen=True)
class _Reply:
    status: int
    text: str
    served_at: datetime | None


def _body(response: Response, url: str, deadline: Deadline) -> str:
    """Return the whole body, so that the connection can be used again; bounded in bytes and in time."""
    # read1 returns the bytes that have arrived; `read` waits for all, and a service that drips could block for minutes.
    read = getattr(response.raw, "read1", response.raw.read)  # urllib3 has it since 2.1
    body = b""
    while piece := read(MAX_BODY_BYTES):
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"more than {MAX_BODY_BYTES} bytes")
        if deadline.expired:
            raise Unavailable(f"{url}: the answer comes too slowly")
    return body.decode("utf-8", "replace")


def _says_that_nothing_came(err: BaseException) -> bool:
    """Whether the connection ended before the first byte of an answer, judged by the error inside the library's."""
    inner: BaseException | None = err
    while inner is not None:
        if isinstance(inner, http.client.RemoteDisconnected):
            return True
        inner = inner.__context__
    return False


def _served_at(response: Response) -> datetime | None:
    try:
        served_at = email.utils.parsedate_to_datetime(response.headers.get("Date", ""))
    except ValueError:
        return None
    return served_at if served_at.tzinfo else served_at.replace(tzinfo=UTC)
