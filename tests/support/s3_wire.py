"""HTTP/1.1 as S3 speaks it: request heads, bodies in every framing that S3 clients send, replies, error documents.

Owns the bytes on the connection. Knows nothing of buckets, of operations or of faults, but that a body may be watched
while it arrives (`Gate`).
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

MAX_HEAD_BYTES = 64 * 1024
SCRATCH_BYTES = 1024 * 1024
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class S3Error(Exception):
    """What the client gets as an error document."""

    def __init__(self, status: int, code: str, message: str = "", **details: str) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code, self.message, self.details = status, code, message or code, details


@dataclass
class Request:
    """One request's head. Header names are in lower case; `path` and `query` are decoded."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def expects_continue(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"

    @property
    def wants_close(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


@dataclass
class Body:
    """A request's payload without any framing, and the headers that came behind it."""

    data: bytearray
    trailers: dict[str, str]


@dataclass
class Reply:
    """A reply before it is sent. `length` speaks for a body that is not sent: of HEAD."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: list[Any] = field(default_factory=list)  # bytes-like
    length: int | None = None

    @property
    def body_bytes(self) -> int:
        return sum(len(piece) for piece in self.body)


class Gate:
    """Counts a payload's bytes as they pass, and calls `act` once: before byte `after_bytes`, or at the end."""

    def __init__(self, after_bytes: int = 0, act: Callable[[], None] | None = None) -> None:
        self._left = after_bytes
        self._act = act

    def room(self) -> int:
        """How many bytes may pass now."""
        if self._act is not None and self._left == 0:
            self.finish()
        return self._left if self._act is not None else SCRATCH_BYTES * 1024

    def passed(self, count: int) -> None:
        self._left -= count

    def finish(self) -> None:
        if self._act is not None:
            act, self._act = self._act, None
            act()


def read_head(reader: Any) -> Request | None:
    """The next request's head; `None` when the client has closed. Raises ConnectionError, S3Error."""
    line = reader.readline(MAX_HEAD_BYTES)
    if not line:
        return None
    try:
        method, target, _version = line.decode("latin-1").split()
    except ValueError:
        raise S3Error(400, "BadRequest", f"not a request line: {line[:80]!r}") from None
    path, _, query = target.partition("?")
    headers = _read_headers(reader)
    return Request(method, unquote(path), dict(parse_qsl(query, keep_blank_values=True)), headers)


def _read_headers(reader: Any) -> dict[str, str]:
    headers: dict[str, str] = {}
    while (line := reader.readline(MAX_HEAD_BYTES)) not in (b"\r\n", b"\n"):
        if not line:
            raise ConnectionError("the client closed within a request's head")
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


class _Framed(io.RawIOBase):
    """The body as HTTP frames it: by Content-Length, or by chunks of its own."""

    def __init__(self, reader: Any, headers: dict[str, str]) -> None:
        self._reader = reader
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._left = 0 if self._chunked else int(headers.get("content-length", "0"))
        self._ended = not self._chunked and not self._left

    def readable(self) -> bool:
        return True

    def readinto(self, view: Any) -> int:
        if self._chunked and not self._left and not self._ended:
            self._left = _chunk_size(self._reader)
            if not self._left:
                _read_headers(self._reader)
                self._ended = True
        if self._ended:
            return 0
        count = self._reader.readinto(memoryview(view)[: self._left])
        if not count:
            raise ConnectionError("the client closed within a request's body")
        self._left -= count
        if not self._left:
            if self._chunked:
                self._reader.readline()
            else:
                self._ended = True
        return int(count)


def read_body(reader: Any, request: Request, gate: Gate | None = None) -> Body:
    """The whole payload; blocks. Raises ConnectionError when the client goes, S3Error for a broken framing."""
    gate = gate or Gate()
    headers = request.headers
    framed = _Framed(reader, headers)
    payload = headers.get("x-amz-content-sha256", "")
    if "aws-chunked" in headers.get("content-encoding", "") or payload.startswith("STREAMING-"):
        with io.BufferedReader(framed, 64 * 1024) as source:
            body = _read_aws_chunked(source, headers, gate)
            drain(source)
    elif "transfer-encoding" in headers:
        with io.BufferedReader(framed, 64 * 1024) as source:
            body = Body(_read_to_end(source, gate), {})
    else:
        body = Body(bytearray(int(headers.get("content-length", "0"))), {})
        _fill(framed, memoryview(body.data), gate)
    gate.finish()
    return body


def drain(source: Any) -> None:
    """Read to the end, and forget."""
    scratch = bytearray(SCRATCH_BYTES)
    while source.readinto(scratch):
        pass


def skip_body(reader: Any, request: Request) -> None:
    """Read a body that nobody wants, so that the next request can be read."""
    drain(_Framed(reader, request.headers))


def _fill(source: Any, view: memoryview, gate: Gate) -> None:
    while view:
        count = source.readinto(view[: gate.room()])
        if not count:
            raise S3Error(400, "IncompleteBody", "You did not provide the number of bytes specified by the headers.")
        gate.passed(count)
        view = view[count:]


def _read_to_end(source: BinaryIO, gate: Gate) -> bytearray:
    data = bytearray()
    while piece := source.read(min(gate.room(), SCRATCH_BYTES)):
        gate.passed(len(piece))
        data += piece
    return data


def _read_aws_chunked(source: BinaryIO, headers: dict[str, str], gate: Gate) -> Body:
    """STREAMING-…: `size[;chunk-signature=…]`, the bytes; at the end a chunk of 0 and the trailing headers."""
    expected = int(headers.get("x-amz-decoded-content-length", "0"))
    data = bytearray(expected)
    filled = 0
    while size := _chunk_size(source):
        if filled + size > expected:
            raise S3Error(400, "IncompleteBody", "The chunks hold more than x-amz-decoded-content-length.")
        _fill(source, memoryview(data)[filled : filled + size], gate)
        filled += size
        source.readline()
    if filled != expected:
        raise S3Error(400, "IncompleteBody", "The chunks hold less than x-amz-decoded-content-length.")
    trailers = {}
    while line := source.readline().strip():
        name, _, value = line.decode("latin-1").partition(":")
        trailers[name.strip().lower()] = value.strip()
    return Body(data, trailers)


def _chunk_size(source: BinaryIO) -> int:
    line = source.readline(MAX_HEAD_BYTES)
    if not line:
        raise ConnectionError("the client closed between two chunks")
    try:
        return int(line.split(b";")[0], 16)
    except ValueError:
        raise S3Error(400, "InvalidRequest", f"not a chunk's size: {line[:80]!r}") from None


def head_of(reply: Reply) -> bytes:
    """Status line and headers; Content-Length is the whole body's, whatever is sent of it."""
    length = reply.body_bytes if reply.length is None else reply.length
    lines = [f"HTTP/1.1 {reply.status} {_phrase(reply.status)}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    if reply.status not in (204, 304):
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def send(sock: socket.socket, pieces: Iterable[Any], limit: int | None = None) -> None:
    """Send the pieces, or the first `limit` bytes of them."""
    for piece in pieces:
        view = memoryview(piece)
        if limit is not None:
            view = view[:limit]
            limit -= len(view)
        if view:
            sock.sendall(view)


def element(name: str, *children: object, **attributes: str) -> str:
    """An XML element; children that are elements already come as `str` from here, values through `text`."""
    opening = " ".join([name, *(f'{key}="{value}"' for key, value in attributes.items())])
    return f"<{opening}>{''.join(str(child) for child in children)}</{name}>"


def text(name: str, value: object) -> str:
    """An XML element that holds a value."""
    return element(name, escape(str(value)))


def document(root: str) -> Reply:
    """A reply that is an XML document."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{root}'.encode()
    return Reply(200, {"Content-Type": "application/xml"}, [body])


def error_reply(error: S3Error, resource: str, request_id: str) -> Reply:
    """The error document that S3 would send."""
    fields = {"Code": error.code, "Message": error.message, **error.details}
    fields |= {"Resource": resource, "RequestId": request_id, "HostId": "tests"}
    reply = document(element("Error", *(text(name, value) for name, value in fields.items())))
    reply.status = error.status
    return reply
