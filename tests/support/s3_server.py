"""An S3 server for tests: real wire format, in memory, verifies every sum, and goes wrong on demand.

In a test's own process:

    with S3Server() as server:
        client = boto3.client("s3", endpoint_url=server.url, aws_access_key_id="a", aws_secret_access_key="b", …)
        server.fault("error", "PutObject", key="manifest", nth=2, times=3, status=503, code="SlowDown")
        server.fault("reset", "UploadPart", after_bytes=1_000_000)     # RST in the middle of the first part
        server.fault("lose_reply", "CompleteMultipartUpload")          # takes effect; the client never hears of it
        held = server.fault("stall", "GetObject", times=None)          # holds every GET until release()
        server.wait_struck(held)
        server.release()
        assert server.contents() == {"some/key": b"…"}
        assert server.actions() == {"s3:PutObject", "s3:GetObject"}

In a process of its own, which outlives what uses it; steered over HTTP, by the same names and keywords (but for
`contents`, which is bytes: read objects with a client):

    python -m tests.support.s3_server --port 0 --bucket b [--certificate PEM --private-key PEM]     # prints its URL

    with serving(bucket="b") as url:
        steer(url, "fault", kind="error", operations="PutObject", status=503, code="SlowDown", times=None, for_s=60)
        steer(url, "down"); steer(url, "up"); steer(url, "calls"); steer(url, "configure", checksums="reject")

`s3_faults.KINDS` lists what can go wrong, `s3_bucket.Settings` the quirks (`server.configure(...)`). Signatures are
not verified: `expire(access_key)` and `deny(action, prefix)` stand for what IAM would say. A stalled call that is
released goes on as if nothing had been: if all of its body had been sent, it takes effect late, whoever has given up.
Nothing is random: upload ids count, and the same calls meet the same faults.

Owns the listener, what is recorded and how a test steers. `s3_connection.py` serves one connection, `s3_operations.py`
knows what S3 means, `s3_bucket.py` what is stored, `s3_faults.py` what goes wrong, `s3_wire.py` the bytes between.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support import with_parent
from tests.support.patience import HANG_S
from tests.support.s3_bucket import Settings
from tests.support.s3_connection import CONTROL, Connection
from tests.support.s3_faults import Fault, Faults
from tests.support.s3_operations import Service, Target, access_key_of
from tests.support.s3_wire import Request

STEERABLE = frozenset({
    "fault", "clear", "release", "wait_struck", "down", "up", "deny", "allow", "expire", "configure", "objects",
    "uploads", "delete_behind", "flip", "bucket_vanishes", "bucket_returns", "calls", "actions", "forget_calls",
    "wait_calls",
})  # fmt: skip


@dataclass
class Call:
    """One request. `status` is 0 until it is answered, and for good where a fault took the answer."""

    action: str
    operation: str
    key: str
    status: int = 0
    part: int = 0
    body_bytes: int = 0
    access_key: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class Unfinished:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    parts: tuple[int, ...]


class S3Server:
    """One bucket on a loopback port. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        bucket: str = "bucket",
        port: int = 0,
        certificate: Path | None = None,
        private_key: Path | None = None,
        **settings: Any,
    ) -> None:
        self.bucket = bucket
        self.service = Service(bucket, Settings().changed(settings))
        self.faults = Faults()
        self.is_down = self._is_closed = False
        self._requests = 0
        self._calls: list[Call] = []
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        if certificate:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate, private_key)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        self._acceptor = threading.Thread(target=self._accept, name="s3-accept", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Sever every connection, and wait for their threads. Whoever waits for a call is told no. Idempotent."""
        self.faults.close()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._acceptor.join(HANG_S)
        self._listener.close()
        for connection in self._open_connections():
            connection.sever()
        for connection in self._open_connections():
            connection.thread.join(HANG_S)
            assert not connection.thread.is_alive(), "a connection of the S3 server does not end"

    # What goes wrong

    def fault(self, kind: str, operations: str | tuple[str, ...] = (), **details: Any) -> int:
        """Make a rule, and return its number. `kind` and `details`: see `s3_faults.Fault`. Raises ValueError."""
        names = (operations,) if isinstance(operations, str) else tuple(operations)
        return self.faults.add(Fault(kind, names, **details))

    def clear(self) -> None:
        """Forget every rule; stalled calls go on."""
        self.faults.clear()

    def release(self) -> None:
        """Let stalled calls go on."""
        self.faults.release()

    def wait_struck(self, fault_id: int, times: int = 1, timeout_s: float | None = None) -> None:
        """Block until a rule has struck so often. Raises KeyError once there is no such rule, TimeoutError."""
        self.faults.wait_struck(fault_id, times, timeout_s)

    def down(self) -> None:
        """Reset every connection, those that come too, until `up`; steering goes on."""
        self.is_down = True
        for connection in self._open_connections():
            if not connection.steers:
                connection.sever()

    def up(self) -> None:
        """Serve again."""
        self.is_down = False

    def deny(self, action: str, prefix: str = "") -> None:
        """403 AccessDenied for an IAM action such as "s3:PutObject" on keys (of a list: prefixes) below `prefix`."""
        self.service.denied |= {(action, prefix)}

    def allow(self) -> None:
        """Forget every `deny` and `expire`."""
        self.service.denied = set()
        self.service.expired = set()

    def expire(self, access_key: str) -> None:
        """400 ExpiredToken for whatever this key signs."""
        self.service.expired |= {access_key}

    def configure(self, **changes: Any) -> None:
        """Change settings: see `s3_bucket.Settings`."""
        self.service.settings = self.service.settings.changed(changes)

    # What is stored

    def contents(self) -> dict[str, bytes]:
        """Every object's bytes, by key."""
        with self.service.lock:
            return {key: b"".join(stored.parts) for key, stored in sorted(self.service.bucket.objects.items())}

    def objects(self) -> dict[str, int]:
        """Every object's size, by key."""
        with self.service.lock:
            return {key: stored.size for key, stored in sorted(self.service.bucket.objects.items())}

    def uploads(self) -> list[Unfinished]:
        """The unfinished multipart uploads, oldest first."""
        with self.service.lock:
            uploads = self.service.bucket.uploads.values()
            return [Unfinished(upload.key, upload.upload_id, tuple(sorted(upload.parts))) for upload in uploads]

    def delete_behind(self, key: str) -> None:
        """Delete an object behind its owner's back, as a person would. Raises KeyError."""
        with self.service.lock:
            del self.service.bucket.objects[key]

    def flip(self, key: str, offset: int = 0) -> None:
        """Flip one bit of an object, and leave its stored sum."""
        with self.service.lock:
            self.service.bucket.flip(key, offset)

    def bucket_vanishes(self) -> None:
        """Delete the bucket with all that is in it."""
        with self.service.lock:
            self.service.bucket.vanish()

    def bucket_returns(self) -> None:
        """Make the bucket anew, empty."""
        with self.service.lock:
            self.service.bucket.exists = True

    # What was asked

    def calls(self, operation: str = "") -> list[Call]:
        """Every call so far, or those of one operation, in the order in which they came."""
        with self._changed:
            return [replace(call) for call in self._calls if operation in ("", call.operation)]

    def actions(self) -> set[str]:
        """The IAM actions that the calls needed."""
        return {call.action for call in self.calls() if call.action}

    def forget_calls(self) -> None:
        with self._changed:
            self._calls.clear()

    def wait_calls(self, operation: str, count: int = 1, *, status: int | None = None) -> None:
        """Block until so many calls of an operation were answered, with this status if one is given.

        Raises:
            ConnectionError: the server closes.
        """

        def answered() -> int:
            found = [call.status for call in self._calls if call.operation == operation and call.status != 0]
            return len(found) if status is None else found.count(status)

        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or answered() >= count)
            if answered() < count:
                raise ConnectionError("the server closed")

    # For connections

    def begin(self, target: Target, request: Request) -> Call:
        part = int(request.query.get("partNumber", "0")) if "partNumber" in request.query else 0
        call = Call(target.action, target.operation, target.key, part=part, access_key=access_key_of(request))
        with self._changed:
            self._requests += 1
            call.request_id = f"{self._requests:016X}"
            self._calls.append(call)
        return call

    def answered(self, call: Call, status: int) -> None:
        with self._changed:
            call.status = status
            self._changed.notify_all()

    def steer(self, order: dict[str, Any]) -> Any:
        """What a steering client asked for, as JSON holds it."""
        verb, arguments = order["verb"], order["arguments"]
        if verb not in STEERABLE:
            raise ValueError(f"cannot steer {verb!r}; there are {', '.join(sorted(STEERABLE))}")
        result = getattr(self, verb)(**arguments)
        if isinstance(result, set):
            return sorted(result)
        return [asdict(item) for item in result] if isinstance(result, list) else result

    def ended(self, connection: Connection) -> None:
        with self._changed:
            self._connections.discard(connection)

    def _open_connections(self) -> list[Connection]:
        with self._changed:
            return list(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # the listener was shut down
                return
            try:
                connection = Connection(self, sock, self._tls)
            except OSError:  # the client has gone already
                sock.close()
                continue
            with self._changed:
                self._connections.add(connection)
                connection.thread.start()


def steer(url: str, verb: str, **arguments: Any) -> Any:
    """Call a method of the server at `url` in another process; its result as JSON.

    Every keyword is the method's, its limits too. Raises ValueError for what the method raises, OSError.
    """
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    if parts.scheme == "https":
        trusting = ssl._create_unverified_context()  # it is our own, on loopback
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=HANG_S, context=trusting
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=HANG_S)
    with contextlib.closing(connection):
        connection.request("POST", CONTROL, json.dumps({"verb": verb, "arguments": arguments}))
        response = connection.getresponse()
        answer = json.loads(response.read())
    if response.status != 200:
        raise ValueError(answer["error"])
    return answer["result"]


@contextlib.contextmanager
def serving(*options: str, bucket: str = "bucket") -> Iterator[str]:
    """A server in a process of its own, which ends with this one; its URL."""
    command = with_parent.command(sys.executable, "-m", "tests.support.s3_server", "--bucket", bucket, *options)
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().strip()
            assert url, f"the S3 server ended with {process.wait()}"
            yield url
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="An S3 server for tests; prints its URL and serves until SIGTERM.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", default="bucket")
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--private-key", type=Path)
    options = parser.parse_args()
    ended = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)  # before the threads start, which inherit it
    with S3Server(
        port=options.port, bucket=options.bucket, certificate=options.certificate, private_key=options.private_key
    ) as server:
        print(server.url, flush=True)
        signal.sigwait(ended)


if __name__ == "__main__":
    main()
