"""An S3 server that costs next to nothing: it drops what is put, and makes up what is got. For benchmarks of clients.

Speaks as much of S3 as one object needs: PutObject, multipart uploads, HeadObject, GetObject with a range. The object
"bytes-N" is there already: N bytes of `content`. It keeps sizes only, checks no sums and no signatures.

    python benchmarks/s3_sink.py [certificate.pem key.pem]      prints its port, and serves until its stdin ends
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import random
import re
import socket
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PERIOD = 1 << 20
LONGEST = 16 << 20
RECEIVE_BYTES = 1 << 18
_CONTENT = memoryview(random.Random(0).randbytes(PERIOD) * (1 + LONGEST // PERIOD))


def content(offset: int, size: int) -> memoryview:
    """Bytes of every generated object from `offset` on; at most `LONGEST`."""
    return _CONTENT[offset % PERIOD : offset % PERIOD + size]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Sink

    def setup(self) -> None:
        super().setup()
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))

    def do_PUT(self) -> None:
        size = int(self.headers.get("x-amz-decoded-content-length") or self.headers["Content-Length"])
        self.receive()
        self.server.add(self.key, size, part="partNumber" in self.query)
        self.reply(ETag='"0"')

    def do_POST(self) -> None:
        self.receive()
        if "uploads" in self.query:
            self.server.begin(self.key)
            self.reply("<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
        else:
            self.reply('<CompleteMultipartUploadResult><ETag>"0-1"</ETag></CompleteMultipartUploadResult>')

    def do_HEAD(self) -> None:
        size = self.server.size(self.key)
        self.begin(200 if size is not None else 404, size or 0)

    def do_GET(self) -> None:
        if "uploads" in self.query:
            self.reply("<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>")
            return
        size = self.server.size(self.key)
        if size is None:
            self.reply("<Error><Code>NoSuchKey</Code></Error>", status=404)
            return
        first, end, status, range_header = 0, size, 200, {}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, end = int(asked[1]), min(size, int(asked[2]) + 1 if asked[2] else size)
            status, range_header = 206, {"Content-Range": f"bytes {first}-{end - 1}/{size}"}
        self.begin(status, end - first, **range_header)
        for at in range(first, end, LONGEST):
            self.connection.sendall(content(at, min(LONGEST, end - at)))

    def do_DELETE(self) -> None:
        self.begin(204, 0)

    @property
    def key(self) -> str:
        return urlsplit(self.path).path

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    def receive(self) -> None:
        """Take the request's body, and drop it."""
        if self.headers.get("Transfer-Encoding") == "chunked":  # boto3 over TLS, when it makes the sums
            while size := int(self.rfile.readline(), 16):
                self.drop(size + len("\r\n"))
            self.rfile.readline()
        else:
            self.drop(int(self.headers.get("Content-Length") or 0))

    def drop(self, size: int) -> None:
        while size:
            count = self.rfile.readinto(self.buffer[: min(size, RECEIVE_BYTES)])
            if not count:
                raise ConnectionResetError("the client has gone")
            size -= count

    def begin(self, status: int, size: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        for name, value in {"ETag": '"0"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, text: str = "", *, status: int = 200, **headers: str) -> None:
        body = text.encode()
        self.begin(status, len(body), **headers)
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


class Sink(ThreadingHTTPServer):
    """The sizes of what was put.

    Args:
        tls: certificate and key, as PEM files; `None` for plain HTTP.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, tls: tuple[Path, Path] | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._context: ssl.SSLContext | None = None
        if tls is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(*tls)
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}

    def begin(self, key: str) -> None:
        """Its parts follow."""
        with self._lock:
            self._sizes[key] = 0

    def add(self, key: str, size: int, *, part: bool) -> None:
        """A part has come, or the whole object."""
        with self._lock:
            self._sizes[key] = size + (self._sizes[key] if part else 0)

    def size(self, key: str) -> int | None:
        """Of an object that was put, or of a generated one."""
        with self._lock:
            generated = re.search(r"/bytes-(\d+)$", key)
            return self._sizes.get(key, int(generated[1]) if generated else None)

    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """In the connection's own thread, so that a handshake holds up nobody else."""
        assert isinstance(request, socket.socket)
        if self._context is not None:
            request = self._context.wrap_socket(request, server_side=True)
        with contextlib.suppress(OSError):  # the client has gone
            super().finish_request(request, client_address)


def write_certificates(directory: Path) -> tuple[Path, Path, Path]:
    """An authority to trust, and a certificate of it for localhost with its key, each a PEM file.

    Two certificates, since some clients (rustls) take no authority for a server.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(name: str, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType, *, ca: bool) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
            public_key=public,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - day,
            not_valid_after=now + day,
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        signed = builder.add_extension(extension, critical=False).sign(authority_key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    pems = {
        "authority.pem": certificate("benchmark", authority_key.public_key(), identifier, ca=True),
        "certificate.pem": certificate("localhost", key.public_key(), x509.SubjectAlternativeName(names), ca=False),
        "key.pem": key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
    for name, pem in pems.items():
        (directory / name).write_bytes(pem)
    return directory / "authority.pem", directory / "certificate.pem", directory / "key.pem"


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:3]]
    sink = Sink((paths[0], paths[1]) if paths else None)
    threading.Thread(target=sink.serve_forever, name="sink", daemon=True).start()
    print(sink.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
