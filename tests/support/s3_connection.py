"""One client's connection to the S3 server: its thread, and what a fault does to the call that it strikes.

Owns the socket, and the order of things: refuse, read, take effect, record, reply. Knows no operation.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

from tests.support.s3_faults import Fault
from tests.support.s3_operations import Target
from tests.support.s3_wire import (
    Gate,
    Reply,
    Request,
    S3Error,
    error_reply,
    head_of,
    read_body,
    read_head,
    send,
    skip_body,
)

if TYPE_CHECKING:
    from tests.support.s3_server import Call, S3Server

CONTROL = "/__control__"
PAGE = b"<html><head><title>Welcome</title></head><body><p>Please log in.</p></body></html>"
EMPTY_LISTS = {
    operation: f"<{root}><Name>bucket</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></{root}>".encode()
    for operation, root in (
        ("ListObjectsV2", "ListBucketResult"),
        ("ListMultipartUploads", "ListMultipartUploadsResult"),
    )
}
LINGER_0 = struct.pack("ii", 1, 0)  # closing sends RST


class _Reset(Exception):
    """The connection ends here, with RST."""


class Connection:
    """One client's connection, and its thread."""

    def __init__(self, server: S3Server, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.steers = False
        self.thread = threading.Thread(target=self._run, name="s3-connection", daemon=True)
        self._server = server
        self._service = server.service
        self._sock = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False) if tls else sock
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._keeps_alive = True

    def sever(self) -> None:
        """End the connection with RST, from any thread; whoever reads or writes it wakes."""
        with contextlib.suppress(OSError):  # it has just ended by itself
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not TLS's own, which is not for two threads

    def _run(self) -> None:
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.do_handshake()
            with self._sock.makefile("rb", buffering=64 * 1024) as reader:
                while self._keeps_alive and (request := read_head(reader)) is not None:
                    self._keeps_alive = not request.wants_close
                    if request.path == CONTROL:
                        self._control(reader, request)
                    else:
                        self._answer(reader, request)
        except _Reset:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        except (OSError, S3Error):  # the client went, or it speaks no HTTP
            pass
        finally:
            self._sock.close()
            self._server.ended(self)

    def _control(self, reader: Any, request: Request) -> None:
        self.steers = True
        order = json.loads(read_body(reader, request).data)
        status, answer = 200, {}
        try:
            answer = {"result": self._server.steer(order)}
        except (ValueError, KeyError, TypeError, TimeoutError) as err:
            status, answer = 400, {"error": f"{type(err).__name__}: {err}"}
        reply = Reply(status, {"Content-Type": "application/json"}, [json.dumps(answer).encode()])
        send(self._sock, [head_of(reply), *reply.body])

    def _answer(self, reader: Any, request: Request) -> None:
        target = self._service.target(request)
        call = self._server.begin(target, request)
        if self._server.is_down:
            raise _Reset
        fault = self._server.faults.strike(target.operation, target.key)
        try:
            reply = self._effect(reader, request, target, fault, call)
        except S3Error as err:
            reply = error_reply(err, request.path, call.request_id)
        reply.headers |= {
            "Date": format_datetime(self._service.now(), usegmt=True),
            "Server": "AmazonS3",
            "x-amz-request-id": call.request_id,
            "x-amz-id-2": "tests",
            "Connection": "keep-alive" if self._keeps_alive else "close",
        }
        if request.method == "HEAD" or reply.status in (204, 304):
            reply.length, reply.body = reply.body_bytes, []
        self._send(reply, fault, call)

    def _effect(self, reader: Any, request: Request, target: Target, fault: Fault | None, call: Call) -> Reply:
        """Read the body and let the call take effect, as the fault lets it. Raises S3Error, _Reset, OSError."""
        refusal = self._service.refusal(target, request) or self._injected(request, target, fault)
        if refusal:
            if request.expects_continue:
                self._keeps_alive = False  # the client may send its body or not
            else:
                skip_body(reader, request)
            raise refusal
        if request.expects_continue:
            self._sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        keeps_alive, self._keeps_alive = self._keeps_alive, False  # while it is not known where the next head begins
        gate = None
        if fault and fault.breaks("request"):
            gate = Gate(fault.after_bytes or 0, lambda: self._break(fault))
        body = read_body(reader, request, gate)
        self._keeps_alive = keeps_alive
        call.body_bytes = len(body.data)
        kind = fault.kind if fault else ""
        if fault and kind == "corrupt_stored" and body.data:
            body.data[_middle(fault.offset, len(body.data))] ^= 1
        if fault and kind == "embedded_error":
            reply = error_reply(S3Error(200, fault.code), request.path, call.request_id)
        elif fault and kind == "page":
            leads = {"Location": f"https://portal.invalid{request.path}"} if 300 <= fault.status < 400 else {}
            reply = Reply(fault.status, {"Content-Type": "text/html", **leads}, [PAGE])
        else:
            reply = self._service.answer(target, request, body)
        if kind == "empty_list" and target.operation in EMPTY_LISTS:
            reply.body = [EMPTY_LISTS[target.operation]]
        if fault and kind == "header":
            name, _, value = fault.code.partition(": ")
            reply.headers[name] = value
        if kind == "short_reply":
            whole = b"".join(reply.body)
            reply.body = [whole[: len(whole) // 2]]
        if kind == "forget_part" and target.operation == "UploadPart":
            with self._service.lock:
                del self._service.bucket.uploads[request.query["uploadId"]].parts[call.part]
        return reply

    def _injected(self, request: Request, target: Target, fault: Fault | None) -> S3Error | None:
        if fault is None or fault.kind != "error":
            return None
        if (target.operation, fault.code) == ("CompleteMultipartUpload", "ConditionalRequestConflict"):
            with self._service.lock:  # AWS: "re-initiate the upload with CreateMultipartUpload and re-upload each part"
                self._service.bucket.uploads.pop(request.query["uploadId"], None)
        return S3Error(fault.status, fault.code, "injected")

    def _break(self, fault: Fault) -> None:
        if fault.kind == "reset":
            raise _Reset
        self._server.faults.hold(fault)

    def _send(self, reply: Reply, fault: Fault | None, call: Call) -> None:
        pieces: list[Any] = [head_of(reply), *reply.body]
        size = reply.body_bytes if reply.body else 0
        if fault and fault.kind == "corrupt_response" and size:
            damaged = bytearray().join(reply.body)
            damaged[_middle(fault.offset, size)] ^= 1
            pieces[1:] = [damaged]
        if fault and fault.kind == "truncate":
            self._server.answered(call, reply.status)
            send(self._sock, pieces[:1])
            send(self._sock, pieces[1:], size // 2 if fault.after_bytes is None else fault.after_bytes)
            self._keeps_alive = False
            return
        if fault and fault.breaks("reply"):
            if fault.after_bytes:
                send(self._sock, pieces[:1])
                send(self._sock, pieces[1:], fault.after_bytes)
                pieces = [memoryview(b"".join(pieces[1:]))[fault.after_bytes :]]
            self._break(fault)
        self._server.answered(call, reply.status)
        send(self._sock, pieces)


def _middle(offset: int | None, size: int) -> int:
    return size // 2 if offset is None else min(offset, size - 1)
