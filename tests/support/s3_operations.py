"""What each S3 operation does to the bucket, and what it answers; the names that AWS gives them.

Owns the meaning of a request. Knows no connection and no fault; one call at a time, under the service's lock.
"""

from __future__ import annotations

import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import quote, unquote

from tests.support.s3_bucket import (
    HEADER,
    Bucket,
    Checksum,
    Part,
    Settings,
    StoredObject,
    Upload,
    compute,
    encryption,
    etag_of,
    kept,
    sent_checksum,
    verify_checksum,
    verify_transport,
)
from tests.support.s3_wire import NAMESPACE, Body, Reply, Request, S3Error, document, element, text

IAM_ACTIONS = {
    "PutObject": "s3:PutObject",
    "CopyObject": "s3:PutObject",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "HeadBucket": "s3:ListBucket",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "UploadPartCopy": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListParts": "s3:ListMultipartUploadParts",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "GetBucketLocation": "s3:GetBucketLocation",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "GetBucketEncryption": "s3:GetEncryptionConfiguration",
}
# (method, whether there is a key, the query parameters that tell it from others) -> operation; the first that fits.
_ROUTES: list[tuple[str, bool, set[str], str]] = [
    ("PUT", True, {"uploadId", "partNumber"}, "UploadPart"),
    ("PUT", True, set(), "PutObject"),
    ("GET", True, {"uploadId"}, "ListParts"),
    ("GET", True, set(), "GetObject"),
    ("HEAD", True, set(), "HeadObject"),
    ("DELETE", True, {"uploadId"}, "AbortMultipartUpload"),
    ("DELETE", True, set(), "DeleteObject"),
    ("POST", True, {"uploads"}, "CreateMultipartUpload"),
    ("POST", True, {"uploadId"}, "CompleteMultipartUpload"),
    ("POST", False, {"delete"}, "DeleteObjects"),
    ("HEAD", False, set(), "HeadBucket"),
    ("GET", False, {"location"}, "GetBucketLocation"),
    ("GET", False, {"lifecycle"}, "GetBucketLifecycleConfiguration"),
    ("GET", False, {"encryption"}, "GetBucketEncryption"),
    ("GET", False, {"uploads"}, "ListMultipartUploads"),
    ("GET", False, {"list-type"}, "ListObjectsV2"),
]
_SUBRESOURCES = {"acl", "tagging", "policy", "versioning", "versions", "cors", "attributes", "retention", "torrent"}
MAX_SKEW_S = 15 * 60
MAX_KEY_BYTES = 1024


@dataclass(frozen=True)
class Target:
    """What a request is about."""

    operation: str
    bucket: str
    key: str

    @property
    def action(self) -> str:
        return IAM_ACTIONS.get(self.operation, "")


class Service:
    """The bucket behind the operations. May be called from several threads; each call is atomic."""

    def __init__(self, bucket: str, settings: Settings) -> None:
        self.lock = threading.RLock()
        self.bucket = Bucket(bucket)
        self.settings = settings
        self.denied: set[tuple[str, str]] = set()
        self.expired: set[str] = set()
        self._uploads_made = 0
        self._handlers: dict[str, Callable[[str, Request, Body], Reply]] = {
            "PutObject": self._put, "CopyObject": self._copy, "GetObject": self._get, "HeadObject": self._head,
            "DeleteObject": self._delete, "DeleteObjects": self._delete_several, "ListObjectsV2": self._list,
            "HeadBucket": self._head_bucket, "CreateMultipartUpload": self._create, "UploadPart": self._upload_part,
            "UploadPartCopy": self._copy_part, "CompleteMultipartUpload": self._complete,
            "AbortMultipartUpload": self._abort,
            "ListParts": self._list_parts, "ListMultipartUploads": self._list_uploads,
            "GetBucketLocation": self._location, "GetBucketLifecycleConfiguration": self._lifecycle,
            "GetBucketEncryption": self._encryption,
        }  # fmt: skip

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.settings.clock_offset_s)

    def target(self, request: Request) -> Target:
        """What the request is about; path-style, or virtual-host style where the host begins with the bucket."""
        host = request.headers.get("host", "")
        bucket, _, key = request.path.removeprefix("/").partition("/")
        if host.startswith(f"{self.bucket.name}."):
            bucket, key = self.bucket.name, request.path.removeprefix("/")
        operation = "Unknown"
        if not _SUBRESOURCES & set(request.query):
            for method, has_key, parameters, name in _ROUTES:
                if request.method == method and bool(key) == has_key and parameters <= set(request.query):
                    operation = name
                    break
        if "x-amz-copy-source" in request.headers:
            operation = {"PutObject": "CopyObject", "UploadPart": "UploadPartCopy"}.get(operation, operation)
        return Target(operation, bucket, key)

    def refusal(self, target: Target, request: Request) -> S3Error | None:
        """Why the request is refused whatever its body: the order is that of AWS."""
        sent_at = request.headers.get("x-amz-date")
        if sent_at and self._skew_s(sent_at) > MAX_SKEW_S:
            now = f"{self.now():%Y-%m-%dT%H:%M:%SZ}"
            message = "The difference between the request time and the current time is too large."
            return S3Error(403, "RequestTimeTooSkewed", message, RequestTime=sent_at, ServerTime=now)
        if access_key_of(request) in self.expired:
            return S3Error(400, "ExpiredToken", "The provided token has expired.")
        if target.bucket != self.bucket.name or not self.bucket.exists:
            return S3Error(404, "NoSuchBucket", "The specified bucket does not exist", BucketName=target.bucket)
        scope = target.key or request.query.get("prefix", "")
        if self._is_denied(target.action, scope) or not self._role_allows(target.action, scope):
            return S3Error(403, "AccessDenied", f"not authorized to perform: {target.action}")
        if target.operation not in self._handlers:
            return S3Error(501, "NotImplemented", f"{request.method} {request.path} is not part of this server")
        if len(target.key.encode()) > MAX_KEY_BYTES:
            return S3Error(400, "KeyTooLongError", "Your key is too long")
        speaks_of_sums = any(
            name.startswith((HEADER, "x-amz-trailer", "x-amz-sdk-checksum")) and name != f"{HEADER}mode"
            for name in request.headers
        )
        if self.settings.checksums == "reject" and speaks_of_sums:
            message = "A header you provided implies functionality that is not implemented."
            return S3Error(501, "NotImplemented", message)
        return None

    def _skew_s(self, sent_at: str) -> float:
        try:
            sent = datetime.strptime(sent_at, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:
            return 0.0
        return abs((self.now() - sent).total_seconds())

    def _role_allows(self, action: str, scope: str) -> bool:
        """Whether the role may do this to a key, or list below a prefix: least privilege, as the documents give it."""
        run = self.settings.role_prefix
        below = {
            "s3:ListBucket": [""],
            "s3:ListBucketMultipartUploads": [""],
            "s3:GetObject": [""],
            "s3:PutObject": [""],
            "s3:DeleteObject": ["snapshots/", "commits/", "quarantine/"],
            "s3:ListMultipartUploadParts": ["snapshots/"],
            "s3:AbortMultipartUpload": ["snapshots/"],
        }
        bucket = ("s3:GetLifecycleConfiguration", "s3:GetEncryptionConfiguration")
        return not run or action in bucket or any(scope.startswith(run + part) for part in below.get(action, []))

    def _is_denied(self, action: str, scope: str) -> bool:
        return any(action == denied and scope.startswith(prefix) for denied, prefix in self.denied)

    def answer(self, target: Target, request: Request, body: Body) -> Reply:
        """Let the call take effect. Raises S3Error."""
        verify_transport(body.data, request.headers)
        with self.lock:
            if not self.bucket.exists:
                raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist", BucketName=target.bucket)
            return self._handlers[target.operation](target.key, request, body)

    # Objects

    def _put(self, key: str, request: Request, body: Body) -> Reply:
        checksum = self._verified(request, body)
        self._check_conditions(key, request.headers)
        stored = StoredObject((body.data,), etag_of(body.data), checksum, kept(request.headers), self.now())
        self.bucket.objects[key] = stored
        return Reply(headers=_described(stored, with_checksum=True))

    def _verified(self, request: Request, body: Body, default: str = "crc64nvme") -> Checksum | None:
        if self.settings.checksums != "verify":
            return None
        return verify_checksum(body.data, request.headers | body.trailers, default)

    def _check_conditions(self, key: str, headers: Mapping[str, str]) -> None:
        if self.settings.ignore_conditions:
            return
        stored = self.bucket.objects.get(key)
        if_none_match, if_match = headers.get("if-none-match"), headers.get("if-match")
        if if_none_match not in (None, "*"):
            raise S3Error(501, "NotImplemented", "If-None-Match of a write takes only *", Header="If-None-Match")
        if if_none_match and stored:
            raise _precondition_failed("If-None-Match")
        if if_match and not stored:
            raise _no_such_key(key)
        if if_match and stored and if_match.strip('"') not in ("*", stored.etag):
            raise _precondition_failed("If-Match")

    def _copy(self, key: str, request: Request, _body: Body) -> Reply:
        stored = replace(self._source(request), modified=self.now())
        self._check_conditions(key, request.headers)
        algorithm = request.headers.get(f"{HEADER}algorithm", "").lower()
        checksum = stored.checksum
        if algorithm and self.settings.checksums == "verify":  # made anew, of what was read; else it goes along
            checksum = Checksum(algorithm, compute(algorithm, *stored.parts))
        data = tuple(bytearray(part) for part in stored.parts)
        headers = stored.headers | kept(request.headers)
        self.bucket.objects[key] = replace(stored, parts=data, checksum=checksum, headers=headers)
        result = [text("LastModified", _iso(stored.modified)), text("ETag", f'"{stored.etag}"'), *_sum_of(checksum)]
        return document(element("CopyObjectResult", *result, xmlns=NAMESPACE))

    def _source(self, request: Request) -> StoredObject:
        """What a request copies. Raises S3Error."""
        bucket, _, source = unquote(request.headers["x-amz-copy-source"]).removeprefix("/").partition("/")
        if bucket != self.bucket.name:
            raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist", BucketName=bucket)
        if self._is_denied("s3:GetObject", source) or not self._role_allows("s3:GetObject", source):
            raise S3Error(403, "AccessDenied", "not authorized to perform: s3:GetObject")
        return self._found(source)

    def _get(self, key: str, request: Request, _body: Body) -> Reply:
        stored = self._found(key)
        self._check_read_conditions(stored, request.headers)
        headers = {"Content-Type": "binary/octet-stream", "Accept-Ranges": "bytes", **_described(stored)}
        start, stop, partial = _span(stored, request)
        if partial:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
        if "partNumber" in request.query and len(stored.parts) > 1:
            headers["x-amz-mp-parts-count"] = str(len(stored.parts))
        wants_sum = request.headers.get(f"{HEADER}mode", "").upper() == "ENABLED"
        if wants_sum and stored.checksum and not partial:
            headers |= stored.checksum.headers()
        return Reply(206 if partial else 200, headers, list(stored.read(start, stop)))

    def _head(self, key: str, request: Request, body: Body) -> Reply:
        return self._get(key, request, body)  # whoever sends it leaves the body of every HEAD away

    def _found(self, key: str) -> StoredObject:
        stored = self.bucket.objects.get(key)
        if stored is None and (self._is_denied("s3:ListBucket", key) or self.settings.role_prefix):
            raise S3Error(403, "AccessDenied", "who may not list is not told that a key is absent")
        if stored is None:
            raise _no_such_key(key)
        return stored

    def _check_read_conditions(self, stored: StoredObject, headers: Mapping[str, str]) -> None:
        if self.settings.ignore_conditions:
            return
        if headers.get("if-match", stored.etag).strip('"') not in ("*", stored.etag):
            raise _precondition_failed("If-Match")
        if headers.get("if-none-match", "").strip('"') in ("*", stored.etag):
            raise S3Error(304, "NotModified")

    def _delete(self, key: str, request: Request, _body: Body) -> Reply:
        if "if-match" in request.headers:
            self._check_conditions(key, {"if-match": request.headers["if-match"]})
        self.bucket.objects.pop(key, None)
        return Reply(204)

    def _delete_several(self, _key: str, request: Request, body: Body) -> Reply:
        self._verified(request, body)
        keys = [found["Key"] for found in _children(body, "Object")]
        results = []
        for key in keys:
            if self._is_denied("s3:DeleteObject", key):
                results.append(element("Error", text("Key", key), text("Code", "AccessDenied")))
            else:
                self.bucket.objects.pop(key, None)
                results.append(element("Deleted", text("Key", key)))
        return document(element("DeleteResult", *results, xmlns=NAMESPACE))

    # The bucket

    def _list(self, _key: str, request: Request, _body: Body) -> Reply:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        token = query.get("continuation-token")
        after = unquote(token) if token else query.get("start-after", "")
        limit = min(int(query.get("max-keys", "1000")), 1000)
        encode = quote if query.get("encoding-type") == "url" else str
        entries: list[str] = []
        last, common, truncated = "", "", False
        # In UTF-8 the order of the bytes is that of the code points.
        for key in sorted(key for key in self.bucket.objects if key.startswith(prefix) and key > after):
            rest, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            group = prefix + rest + delimiter if found else ""
            if group and (group == common or after.startswith(group)):
                last = key
                continue
            if len(entries) == limit:
                truncated = limit > 0
                break
            last, common = key, group
            entries.append(
                element("CommonPrefixes", text("Prefix", encode(group)))
                if group
                else element("Contents", text("Key", encode(key)), *_listed(self.bucket.objects[key]))
            )
        result = [text("Name", self.bucket.name), text("Prefix", encode(prefix)), text("MaxKeys", limit)]
        result += [text("KeyCount", len(entries)), text("IsTruncated", str(truncated).lower())]
        result += [text("Delimiter", encode(delimiter))] * bool(delimiter)
        result += [text("EncodingType", "url")] * (encode is quote)
        result += [text("NextContinuationToken", quote(last))] * truncated
        reply = document(element("ListBucketResult", *result, *entries, xmlns=NAMESPACE))
        reply.headers["x-amz-bucket-region"] = self.settings.region
        return reply

    def _head_bucket(self, _key: str, _request: Request, _body: Body) -> Reply:
        return Reply(headers={"x-amz-bucket-region": self.settings.region})

    def _location(self, _key: str, _request: Request, _body: Body) -> Reply:
        region = "" if self.settings.region == "us-east-1" else self.settings.region
        return document(element("LocationConstraint", region, xmlns=NAMESPACE))

    def _lifecycle(self, _key: str, _request: Request, _body: Body) -> Reply:
        days = self.settings.abort_after_days
        if days is None:
            raise S3Error(404, "NoSuchLifecycleConfiguration", "The lifecycle configuration does not exist")
        abort = element("AbortIncompleteMultipartUpload", text("DaysAfterInitiation", days))
        whole = element("Filter", text("Prefix", ""))
        rule = element("Rule", text("ID", "abort"), whole, text("Status", "Enabled"), abort)
        return document(element("LifecycleConfiguration", rule, xmlns=NAMESPACE))

    def _encryption(self, _key: str, _request: Request, _body: Body) -> Reply:
        default = element("ApplyServerSideEncryptionByDefault", text("SSEAlgorithm", "AES256"))
        rule = element("Rule", default, text("BucketKeyEnabled", "false"))
        return document(element("ServerSideEncryptionConfiguration", rule, xmlns=NAMESPACE))

    # Multipart uploads

    def _create(self, key: str, request: Request, _body: Body) -> Reply:
        headers = request.headers
        algorithm = headers.get(f"{HEADER}algorithm", "crc64nvme").lower()
        default = "FULL_OBJECT" if algorithm == "crc64nvme" else "COMPOSITE"
        kind = headers.get(f"{HEADER}type", default)
        if (algorithm == "crc64nvme" and kind == "COMPOSITE") or (
            algorithm.startswith("sha") and kind == "FULL_OBJECT"
        ):
            message = f"The {kind} checksum type cannot be used with the {algorithm} checksum algorithm."
            raise S3Error(400, "InvalidRequest", message)
        self._uploads_made += 1
        upload = Upload(f"upload-{self._uploads_made:06}", key, algorithm, kind, kept(headers), self.now())
        self.bucket.uploads[upload.upload_id] = upload
        result = [text("Bucket", self.bucket.name), text("Key", key), text("UploadId", upload.upload_id)]
        reply = document(element("InitiateMultipartUploadResult", *result, xmlns=NAMESPACE))
        reply.headers |= encryption(upload.headers)
        if f"{HEADER}algorithm" in headers and self.settings.checksums == "verify":
            reply.headers |= {f"{HEADER}algorithm": algorithm.upper(), f"{HEADER}type": kind}
        return reply

    def _upload_part(self, key: str, request: Request, body: Body) -> Reply:
        upload = self.bucket.upload(request.query["uploadId"], key)
        number = int(request.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise S3Error(400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
        sent = sent_checksum(request.headers | body.trailers)
        if self.settings.checksums == "verify" and sent and sent[0] != upload.algorithm:
            raise S3Error(
                400,
                "InvalidRequest",
                f"Checksum Type mismatch occurred, expected checksum Type: {upload.algorithm}, "
                f"actual checksum Type: {sent[0]}",
            )
        checksum = self._verified(request, body, upload.algorithm)
        etag = etag_of(body.data)
        upload.parts[number] = Part(body.data, etag, checksum, self.now())
        sums = {HEADER + checksum.algorithm: checksum.value} if checksum else {}
        return Reply(headers={"ETag": f'"{etag}"', **sums, **encryption(upload.headers)})

    def _copy_part(self, key: str, request: Request, _body: Body) -> Reply:
        upload, stored = self.bucket.upload(request.query["uploadId"], key), self._source(request)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("x-amz-copy-source-range", ""))
        first, last = (int(found[1]), int(found[2])) if found else (0, stored.size - 1)
        if last >= stored.size:
            raise S3Error(
                400, "InvalidArgument", f"Range specified is not valid for source object of size {stored.size}"
            )
        data = bytearray().join(stored.read(first, last + 1))
        checksum = None
        if self.settings.checksums == "verify":
            checksum = Checksum(upload.algorithm, compute(upload.algorithm, data))
        part = Part(data, etag_of(data), checksum, self.now())
        upload.parts[int(request.query["partNumber"])] = part
        result = [text("LastModified", _iso(part.modified)), text("ETag", f'"{part.etag}"'), *_sum_of(checksum)]
        return document(element("CopyPartResult", *result, xmlns=NAMESPACE))

    def _complete(self, key: str, request: Request, body: Body) -> Reply:
        upload = self.bucket.upload(request.query["uploadId"], key)
        self._check_conditions(key, request.headers)
        listed = [(int(part["PartNumber"]), part) for part in _children(body, "Part")]
        data, etag, checksum = upload.complete(listed, request.headers, min_part_bytes=self.settings.min_part_bytes)
        self.bucket.objects[key] = StoredObject(data, etag, checksum, upload.headers, self.now())
        del self.bucket.uploads[upload.upload_id]
        result = [text("Location", request.path), text("Bucket", self.bucket.name), text("Key", key)]
        result.append(text("ETag", f'"{etag}"'))
        if checksum:
            result.append(text(f"Checksum{checksum.algorithm.upper()}", checksum.value))
            result.append(text("ChecksumType", checksum.type))
        reply = document(element("CompleteMultipartUploadResult", *result, xmlns=NAMESPACE))
        reply.headers |= encryption(upload.headers)
        return reply

    def _abort(self, key: str, request: Request, _body: Body) -> Reply:
        del self.bucket.uploads[self.bucket.upload(request.query["uploadId"], key).upload_id]
        return Reply(204)

    def _list_parts(self, key: str, request: Request, _body: Body) -> Reply:
        upload = self.bucket.upload(request.query["uploadId"], key)
        limit = min(int(request.query.get("max-parts", "1000")), 1000)
        marker = int(request.query.get("part-number-marker", "0"))
        numbers = sorted(number for number in upload.parts if number > marker)
        page = numbers[:limit]
        result = [text("Bucket", self.bucket.name), text("Key", key), text("UploadId", upload.upload_id)]
        result += [text("PartNumberMarker", marker), text("MaxParts", limit), text("StorageClass", "STANDARD")]
        result.append(text("NextPartNumberMarker", page[-1] if page else marker))
        result.append(text("IsTruncated", str(len(numbers) > limit).lower()))
        if self.settings.checksums == "verify":
            result += [text("ChecksumAlgorithm", upload.algorithm.upper()), text("ChecksumType", upload.checksum_type)]
        for number in page:
            part = upload.parts[number]
            fields = [text("PartNumber", number), text("ETag", f'"{part.etag}"'), text("Size", len(part.data))]
            fields.append(text("LastModified", _iso(part.modified)))
            if part.checksum:
                fields.append(text(f"Checksum{part.checksum.algorithm.upper()}", part.checksum.value))
            result.append(element("Part", *fields))
        return document(element("ListPartsResult", *result, xmlns=NAMESPACE))

    def _list_uploads(self, _key: str, request: Request, _body: Body) -> Reply:
        query = request.query
        prefix, limit = query.get("prefix", ""), min(int(query.get("max-uploads", "1000")), 1000)
        marker = (query.get("key-marker", ""), query.get("upload-id-marker", "\U0010ffff"))
        encode = quote if query.get("encoding-type") == "url" else str
        found = sorted((upload.key, upload.upload_id) for upload in self.bucket.uploads.values())
        found = [one for one in found if one[0].startswith(prefix) and one > marker]
        page = found[:limit]
        result = [text("Bucket", self.bucket.name), text("Prefix", encode(prefix)), text("MaxUploads", limit)]
        result += [text("KeyMarker", encode(marker[0])), text("IsTruncated", str(len(found) > limit).lower())]
        result += [text("EncodingType", "url")] * (encode is quote)
        if len(found) > limit:
            result += [text("NextKeyMarker", encode(page[-1][0])), text("NextUploadIdMarker", page[-1][1])]
        for key, upload_id in page:
            initiated = _iso(self.bucket.uploads[upload_id].initiated)
            fields = [text("Key", encode(key)), text("UploadId", upload_id), text("Initiated", initiated)]
            result.append(element("Upload", *fields, text("StorageClass", "STANDARD")))
        return document(element("ListMultipartUploadsResult", *result, xmlns=NAMESPACE))


def access_key_of(request: Request) -> str:
    """The access key that signed the request, or "": the signature itself is not looked at."""
    credential = request.query.get("X-Amz-Credential", "")
    found = re.search(r"Credential=([^/,\s]+)", request.headers.get("authorization", ""))
    return found.group(1) if found else credential.partition("/")[0]


def _span(stored: StoredObject, request: Request) -> tuple[int, int, bool]:
    """First byte, the byte behind the last, and whether that is an answer to a range. Raises S3Error."""
    size = stored.size
    if "partNumber" in request.query:
        number = int(request.query["partNumber"])
        if not 1 <= number <= len(stored.parts):
            raise S3Error(416, "InvalidPartNumber", "The requested partnumber is not satisfiable")
        start = sum(len(part) for part in stored.parts[: number - 1])
        return start, start + len(stored.parts[number - 1]), size > 0
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if not found or not any(found.groups()):
        return 0, size, False
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= size:
        raise S3Error(416, "InvalidRange", "The requested range is not satisfiable", ActualObjectSize=str(size))
    if stop <= start:
        return 0, size, False
    return start, stop, True


def _described(stored: StoredObject, *, with_checksum: bool = False) -> dict[str, str]:
    headers = {"ETag": f'"{stored.etag}"', **encryption(stored.headers)}
    if with_checksum:
        return headers | (stored.checksum.headers() if stored.checksum else {})
    described = {name.title() if name == "content-type" else name: value for name, value in stored.headers.items()}
    return headers | {"Last-Modified": format_datetime(stored.modified, usegmt=True)} | described


def _listed(stored: StoredObject) -> Iterable[str]:
    yield text("LastModified", _iso(stored.modified))
    yield text("ETag", f'"{stored.etag}"')
    yield text("Size", stored.size)
    yield text("StorageClass", "STANDARD")
    if stored.checksum:
        yield text("ChecksumAlgorithm", stored.checksum.algorithm.upper())
        yield text("ChecksumType", stored.checksum.type)


def _sum_of(checksum: Checksum | None) -> Iterable[str]:
    if checksum:
        yield text(f"Checksum{checksum.algorithm.upper()}", checksum.value)
        yield text("ChecksumType", checksum.type)


def _children(body: Body, name: str) -> list[dict[str, str]]:
    """The fields of each element `name` of an XML body. Raises S3Error."""
    try:
        root = ET.fromstring(bytes(body.data))
    except ET.ParseError:
        raise S3Error(400, "MalformedXML", "The XML you provided was not well-formed.") from None
    local = [element for element in root if element.tag.rpartition("}")[2] == name]
    return [{child.tag.rpartition("}")[2]: child.text or "" for child in element} for element in local]


def _iso(instant: datetime) -> str:
    return f"{instant:%Y-%m-%dT%H:%M:%S}.000Z"


def _no_such_key(key: str) -> S3Error:
    return S3Error(404, "NoSuchKey", "The specified key does not exist.", Key=key)


def _precondition_failed(header: str) -> S3Error:
    message = "At least one of the pre-conditions you specified did not hold"
    return S3Error(412, "PreconditionFailed", message, Condition=header)
