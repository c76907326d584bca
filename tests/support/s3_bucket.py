"""What the S3 server holds: objects, unfinished multipart uploads, and the sums of both.

Owns the state and its rules (what a sum covers, what completes an upload). Knows no HTTP but the names of headers in
which S3 speaks of sums. Not for several threads: the caller holds a lock.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from awscrt import checksums

from cloud.digest import crc64nvme
from tests.support.s3_wire import S3Error

CRCS: dict[str, tuple[int, Any]] = {
    "crc64nvme": (8, crc64nvme),
    "crc32": (4, checksums.crc32),
    "crc32c": (4, checksums.crc32c),
}
HASHES = ("sha256", "sha1")
HEADER = "x-amz-checksum-"
KEPT_HEADERS = ("content-type", "cache-control", "content-disposition", "content-language", "expires")
ENCRYPTION = "x-amz-server-side-encryption"


@dataclass(frozen=True)
class Settings:
    """How this store differs from AWS, or its bucket from a well-kept one.

    Attributes:
        ignore_conditions: If-Match and If-None-Match mean nothing, as in some S3-compatible stores.
        checksums: "verify"; "ignore" (neither verified nor kept); "reject" (their headers are 501 NotImplemented).
        min_part_bytes: of every part but the last.
        clock_offset_s: the server's clock, ahead of this machine's. Beyond 15 minutes requests are refused, as by AWS.
        abort_after_days: of the bucket's lifecycle rule; `None` is no lifecycle configuration at all.
        region: where the bucket is.
        role_prefix: of a run's keys: what its role (docs/operations.md, "IAM actions") may not do is denied.
    """

    ignore_conditions: bool = False
    checksums: str = "verify"
    min_part_bytes: int = 5 * 1024 * 1024
    clock_offset_s: float = 0.0
    abort_after_days: int | None = None
    region: str = "us-east-1"
    role_prefix: str = ""

    def __post_init__(self) -> None:
        if self.checksums not in ("verify", "ignore", "reject"):
            raise ValueError(f"checksums={self.checksums!r}; there are verify, ignore and reject")

    def changed(self, changes: Mapping[str, object]) -> Settings:
        unknown = set(changes) - {item.name for item in fields(self)}
        if unknown:
            raise ValueError(
                f"no setting {', '.join(sorted(unknown))}; there are {[item.name for item in fields(self)]}"
            )
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Checksum:
    """A sum as S3 names it: "crc64nvme", its value in base64, FULL_OBJECT or COMPOSITE."""

    algorithm: str
    value: str
    type: str = "FULL_OBJECT"

    def headers(self) -> dict[str, str]:
        return {HEADER + self.algorithm: self.value, HEADER + "type": self.type}


@dataclass(frozen=True)
class Part:
    data: bytearray
    etag: str
    checksum: Checksum | None
    modified: datetime


@dataclass(frozen=True)
class StoredObject:
    parts: tuple[bytearray, ...]
    etag: str
    checksum: Checksum | None
    headers: dict[str, str]
    modified: datetime

    @property
    def size(self) -> int:
        return sum(len(part) for part in self.parts)

    def read(self, start: int, stop: int) -> list[memoryview]:
        """The bytes from `start` to before `stop`, without a copy."""
        pieces = []
        for part in self.parts:
            if start < len(part) and stop > 0:
                pieces.append(memoryview(part)[max(start, 0) : stop])
            start, stop = start - len(part), stop - len(part)
        return pieces


@dataclass
class Upload:
    upload_id: str
    key: str
    algorithm: str
    checksum_type: str
    headers: dict[str, str]
    initiated: datetime
    parts: dict[int, Part] = field(default_factory=dict)

    def complete(
        self, listed: list[tuple[int, dict[str, str]]], headers: Mapping[str, str], *, min_part_bytes: int
    ) -> tuple[tuple[bytearray, ...], str, Checksum | None]:
        """Parts, ETag and sum of the object that `listed` makes of this upload. Raises S3Error."""
        numbers = [number for number, _ in listed]
        if numbers != sorted(set(numbers)):
            raise S3Error(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
        if not listed:
            raise S3Error(400, "MalformedXML", "You must specify at least one part.")
        parts = [self._listed_part(number, fields) for number, fields in listed]
        if any(len(part.data) < min_part_bytes for part in parts[:-1]):
            raise S3Error(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size.")
        size = sum(len(part.data) for part in parts)
        claimed = headers.get("x-amz-mp-object-size")
        if claimed is not None and claimed != str(size):
            raise S3Error(
                400,
                "InvalidRequest",
                f"The provided 'x-amz-mp-object-size' header value {claimed} does not match what was computed: {size}",
            )
        data = tuple(part.data for part in parts)
        checksum = self._whole(parts)
        if checksum and (sent := headers.get(HEADER + checksum.algorithm)) and sent != checksum.value:
            raise bad_digest(checksum.algorithm)
        joined = "".join(part.etag for part in parts)
        return data, f"{hashlib.md5(joined.encode()).hexdigest()}-{len(parts)}", checksum

    def _listed_part(self, number: int, fields: dict[str, str]) -> Part:
        part = self.parts.get(number)
        if part is None or fields.get("ETag", "").strip('"') != part.etag:
            raise invalid_part()
        if part.checksum:
            name = f"Checksum{part.checksum.algorithm.upper()}"
            if name not in fields and self.checksum_type == "COMPOSITE":
                raise S3Error(
                    400,
                    "InvalidRequest",
                    f"The upload was created using a {self.algorithm} checksum. The complete request must include the "
                    f"checksum for each part. It was missing for part {number} in the request.",
                )
            if fields.get(name, part.checksum.value) != part.checksum.value:
                raise invalid_part()
        return part

    def _whole(self, parts: list[Part]) -> Checksum | None:
        if any(part.checksum is None for part in parts):
            return None
        if self.checksum_type == "COMPOSITE":
            digests = b"".join(base64.b64decode(part.checksum.value) for part in parts if part.checksum)
            value = compute(self.algorithm, digests)
            return Checksum(self.algorithm, f"{value}-{len(parts)}", "COMPOSITE")
        return Checksum(self.algorithm, compute(self.algorithm, *(part.data for part in parts)))


@dataclass
class Bucket:
    name: str
    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    exists: bool = True

    def vanish(self) -> None:
        self.exists = False
        self.objects.clear()
        self.uploads.clear()

    def upload(self, upload_id: str, key: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise S3Error(
                404,
                "NoSuchUpload",
                "The specified upload does not exist. The upload ID may be invalid, or the upload may have been "
                "aborted or completed.",
                UploadId=upload_id,
            )
        return upload

    def flip(self, key: str, offset: int) -> None:
        """Change one bit of a stored object and leave its sum: a medium that rots."""
        (piece,) = self.objects[key].read(offset, offset + 1)
        piece[0] ^= 1


def etag_of(data: bytes | bytearray) -> str:
    """An ETag that is not the MD5 of the bytes, as with SSE-KMS: nobody may rely on that. And it costs nothing."""
    return hashlib.md5(f"{len(data)} {crc64nvme(data)}".encode()).hexdigest()


def compute(algorithm: str, *pieces: bytes | bytearray) -> str:
    """The base64 sum of the pieces in a row."""
    if algorithm in CRCS:
        width, function = CRCS[algorithm]
        crc = 0
        for piece in pieces:
            crc = function(piece, crc)
        return base64.b64encode(crc.to_bytes(width, "big")).decode()
    digest = hashlib.new(algorithm)
    for piece in pieces:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def sent_checksum(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Algorithm and base64 value of the sum that the client sent, in a header or behind the body."""
    for algorithm in (*CRCS, *HASHES):
        if HEADER + algorithm in headers:
            return algorithm, headers[HEADER + algorithm]
    return None


def verify_transport(data: bytearray, headers: Mapping[str, str]) -> None:
    """Refuse bytes that are not those of Content-MD5 or of the signed payload's SHA-256. Raises S3Error."""
    if "content-md5" in headers:
        try:
            expected = base64.b64decode(headers["content-md5"], validate=True)
        except binascii.Error:
            raise S3Error(400, "InvalidDigest", "The Content-MD5 you specified was invalid.") from None
        if hashlib.md5(data).digest() != expected:
            raise S3Error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
    sha256 = headers.get("x-amz-content-sha256", "")
    if len(sha256) == 64 and hashlib.sha256(data).hexdigest() != sha256:
        raise S3Error(
            400,
            "XAmzContentSHA256Mismatch",
            "The provided 'x-amz-content-sha256' header does not match what was computed.",
        )


def verify_checksum(data: bytearray, headers: Mapping[str, str], default: str = "crc64nvme") -> Checksum:
    """Refuse bytes that are not those of the sum that was sent; without one, S3 computes its own. Raises S3Error."""
    sent = sent_checksum(headers)
    if sent is None:
        announced = headers.get("x-amz-trailer")
        if announced:
            raise S3Error(400, "MalformedTrailerError", f"The trailer {announced} was announced and did not come.")
        return Checksum(default, compute(default, data))
    algorithm, value = sent
    try:
        width = len(base64.b64decode(value, validate=True))
    except binascii.Error:
        width = 0
    if width != (CRCS[algorithm][0] if algorithm in CRCS else hashlib.new(algorithm).digest_size):
        raise S3Error(400, "InvalidRequest", f"Value for {HEADER}{algorithm} header is invalid.")
    if compute(algorithm, data) != value:
        raise bad_digest(algorithm)
    return Checksum(algorithm, value)


def bad_digest(algorithm: str) -> S3Error:
    name = algorithm.upper()
    return S3Error(400, "BadDigest", f"The {name} you specified did not match the calculated checksum.")


def invalid_part() -> S3Error:
    return S3Error(
        400,
        "InvalidPart",
        "One or more of the specified parts could not be found. The part may not have been uploaded, or the specified "
        "entity tag may not match the part's entity tag.",
    )


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that an object keeps: its type, its metadata, its encryption and class."""
    return {
        name: value
        for name, value in headers.items()
        if name in KEPT_HEADERS or name.startswith(("x-amz-meta-", ENCRYPTION, "x-amz-storage-class"))
    }


def encryption(headers: Mapping[str, str]) -> dict[str, str]:
    """The part of an object's headers that every reply about it repeats."""
    found = {name: value for name, value in headers.items() if name.startswith(ENCRYPTION)}
    return found or {ENCRYPTION: "AES256"}
