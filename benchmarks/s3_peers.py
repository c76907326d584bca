"""The clients that bench_s3.py compares: each sends one object from memory and fills memory from one object.

All of them get the same: parts of `PART_BYTES`, `STREAMS` of them in flight, payloads that are not signed, and
CRC-64/NVME sent along where the client can (s3torchconnector sends its own kind of sum). No sums are compared on the
way back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from circumstances import ROOT

sys.path.insert(0, str(ROOT))

from cloud.digest import crc64nvme
from cloud.notice import Deadline
from cloud.s3.transfer import encode_crc

PART_BYTES = 16 << 20
STREAMS = 4
PIECE_BYTES = 1 << 20
BUCKET, REGION = "bench", "us-east-1"
PUT_KEY = "put"


class NotPossible(Exception):
    """This client cannot do it at all; the text says why."""


@dataclass(frozen=True)
class Endpoint:
    """Where the server is, and whom to believe that it is the one (`None` for plain HTTP)."""

    url: str
    authority: str | None


class Peer(Protocol):
    """A client with its connections. Both calls return when all bytes have arrived."""

    def put(self, view: memoryview) -> None: ...

    def get(self, into: memoryview) -> None: ...


class Ours:
    """cloud.s3.store.S3Store, as the agent uses it."""

    def __init__(self, endpoint: Endpoint) -> None:
        from cloud.s3.store import S3Options, S3Store

        self._store = S3Store(f"s3://{BUCKET}", S3Options(endpoint=endpoint.url, streams=STREAMS))

    def put(self, view: memoryview) -> None:
        self._store.put(PUT_KEY, view, deadline=Deadline.never())

    def get(self, into: memoryview) -> None:
        self._store.get(f"bytes-{len(into)}", into, deadline=Deadline.never())


class BotoTransfer:
    """boto3 as its manual has it: upload_fileobj and download_fileobj."""

    def __init__(self, endpoint: Endpoint) -> None:
        from boto3.s3.transfer import TransferConfig

        self._client = boto3_client(endpoint)
        self._config = TransferConfig(
            multipart_chunksize=PART_BYTES, max_concurrency=STREAMS, preferred_transfer_client="classic"
        )

    def put(self, view: memoryview) -> None:
        sums = {"ChecksumAlgorithm": "CRC64NVME"}
        self._client.upload_fileobj(Memory(view), BUCKET, PUT_KEY, ExtraArgs=sums, Config=self._config)

    def get(self, into: memoryview) -> None:
        self._client.download_fileobj(BUCKET, f"bytes-{len(into)}", Memory(into), Config=self._config)


class BotoParts:
    """boto3 with parts and ranges by hand, and no copy that can be avoided: the least that it can cost."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = boto3_client(endpoint)
        self._pool = ThreadPoolExecutor(STREAMS)

    def put(self, view: memoryview) -> None:
        upload_id = self._client.create_multipart_upload(Bucket=BUCKET, Key=PUT_KEY)["UploadId"]

        def send(at: int) -> dict[str, object]:
            part = view[at : at + PART_BYTES]
            names = {"Bucket": BUCKET, "Key": PUT_KEY, "UploadId": upload_id, "PartNumber": at // PART_BYTES + 1}
            sums = {"ChecksumCRC64NVME": encode_crc(crc64nvme(part))}
            reply = self._client.upload_part(**names, **sums, Body=Pieces(part), ContentLength=len(part))
            return {"PartNumber": names["PartNumber"], "ETag": reply["ETag"]}

        parts = {"Parts": list(self._pool.map(send, offsets(view)))}
        self._client.complete_multipart_upload(
            Bucket=BUCKET, Key=PUT_KEY, UploadId=upload_id, MultipartUpload=parts, MpuObjectSize=len(view)
        )

    def get(self, into: memoryview) -> None:
        def fetch(at: int) -> None:
            part = into[at : at + PART_BYTES]
            asked = f"bytes={at}-{at + len(part) - 1}"
            body = self._client.get_object(Bucket=BUCKET, Key=f"bytes-{len(into)}", Range=asked)["Body"]
            done = 0
            while done < len(part):
                done += must_be_more(body.readinto(part[done : done + PIECE_BYTES]))

        for _ in self._pool.map(fetch, offsets(into)):
            pass


class Awscrt:
    """awscrt's S3Client: one meta request for each object, which it splits by itself."""

    def __init__(self, endpoint: Endpoint) -> None:
        from awscrt import auth, s3
        from awscrt.io import ClientTlsContext, TlsContextOptions

        tls = None
        if endpoint.authority is not None:
            options = TlsContextOptions()
            options.override_default_trust_store_from_path(None, endpoint.authority)
            tls = ClientTlsContext(options).new_connection_options()
        keys = auth.AwsCredentialsProvider.new_delegate(lambda: auth.AwsCredentials("key", "secret"))
        self._host = urlsplit(endpoint.url).netloc
        self._client = s3.S3Client(
            region=REGION,
            tls_mode=s3.S3RequestTlsMode.ENABLED if tls else s3.S3RequestTlsMode.DISABLED,
            tls_connection_options=tls,
            signing_config=s3.create_default_s3_signing_config(region=REGION, credential_provider=keys),
            part_size=PART_BYTES,
            max_active_connections_override=STREAMS,
        )

    def put(self, view: memoryview) -> None:
        from awscrt import http, s3

        headers = http.HttpHeaders([("host", self._host), ("content-length", str(len(view)))])
        self._client.make_request(
            type=s3.S3RequestType.PUT_OBJECT,
            request=http.HttpRequest("PUT", f"/{BUCKET}/{PUT_KEY}", headers, Memory(view)),
            checksum_config=s3.S3ChecksumConfig(s3.S3ChecksumAlgorithm.CRC64NVME, s3.S3ChecksumLocation.TRAILER),
        ).finished_future.result()

    def get(self, into: memoryview) -> None:
        from awscrt import http, s3

        def receive(chunk: bytes, offset: int, **_: Any) -> None:
            into[offset : offset + len(chunk)] = chunk

        headers = http.HttpHeaders([("host", self._host)])
        self._client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            request=http.HttpRequest("GET", f"/{BUCKET}/bytes-{len(into)}", headers),
            on_body=receive,
        ).finished_future.result()


class Obstore:
    """obstore (Rust's object_store)."""

    def __init__(self, endpoint: Endpoint) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore = obstore
        trust = {"root_certificate": Path(endpoint.authority).read_bytes()} if endpoint.authority else {}
        self._store = S3Store(
            BUCKET,
            endpoint=endpoint.url,
            region=REGION,
            virtual_hosted_style_request=False,
            config={"unsigned_payload": "true", "checksum_algorithm": "CRC64NVME"},
            client_options={"allow_http": True, "timeout": "300s", **trust},
        )
        self._pool = ThreadPoolExecutor(STREAMS)

    def put(self, view: memoryview) -> None:
        parts = (view[at : at + PART_BYTES] for at in offsets(view))
        self._obstore.put(self._store, PUT_KEY, parts, chunk_size=PART_BYTES, max_concurrency=STREAMS)

    def get(self, into: memoryview) -> None:
        def fetch(at: int) -> None:
            part = into[at : at + PART_BYTES]
            part[:] = memoryview(self._obstore.get_range(self._store, f"bytes-{len(into)}", start=at, length=len(part)))

        for _ in self._pool.map(fetch, offsets(into)):
            pass


class S3TorchConnector:
    """s3torchconnector's writer and reader, which torch's distributed checkpoints use."""

    def __init__(self, endpoint: Endpoint) -> None:
        from s3torchconnector._s3client import S3Client, S3ClientConfig

        if endpoint.authority is not None:
            raise NotPossible("takes no authority")
        config = S3ClientConfig(part_size=PART_BYTES, force_path_style=True)
        self._client = S3Client(REGION, endpoint=endpoint.url, s3client_config=config)

    def put(self, view: memoryview) -> None:
        with self._client.put_object(BUCKET, PUT_KEY) as writer:
            for at in offsets(view):
                writer.write(view[at : at + PART_BYTES])

    def get(self, into: memoryview) -> None:
        reader = self._client.get_object(BUCKET, f"bytes-{len(into)}")
        done = 0
        while done < len(into):
            done += must_be_more(reader.readinto(into[done:]))


PEERS: dict[str, Callable[[Endpoint], Peer]] = {
    "ours (S3Store)": Ours,
    "boto3, parts by hand": BotoParts,
    "boto3, upload_fileobj": BotoTransfer,
    "obstore": Obstore,
    "awscrt S3Client": Awscrt,
    "s3torchconnector": S3TorchConnector,
}
"""The first is what the others are compared with."""


class Memory:
    """Memory as a file that is read or written in any order."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : end])
        self._at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        data = self._view[self._at : self._at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def write(self, data: bytes) -> int:
        self._view[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at


class Pieces(Memory):
    """Gives views of its own size, whatever was asked for: boto3 asks for 16 KiB, and sends what it gets."""

    def read(self, _: int | None = -1) -> memoryview:  # type: ignore[override]
        piece = self._view[self._at : self._at + PIECE_BYTES]
        self._at += len(piece)
        return piece


def boto3_client(endpoint: Endpoint) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        s3={"addressing_style": "path", "payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"total_max_attempts": 1},
    )
    return boto3.client("s3", endpoint_url=endpoint.url, config=config)


def offsets(view: memoryview) -> Iterator[int]:
    return iter(range(0, len(view), PART_BYTES))


def must_be_more(count: int) -> int:
    if not count:
        raise EOFError("the object ended early")
    return count
