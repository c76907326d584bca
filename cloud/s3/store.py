"""S3Store: objects in an S3 bucket, on AWS or on any S3-compatible store.

Owns which requests of S3 keep which promise of an ObjectStore; knows nothing of how the requests are sent:

    put             PutObject up to one part, a multipart upload above; CRC-64/NVME of every part and of the whole is
                    sent along, so that the store refuses bytes that were damaged on the way
    put_if_absent   PutObject with If-None-Match: * (412: AlreadyExists; 409: undecided, ask again)
    copy            HeadObject of the source, CopyObject or copies of its parts, HeadObject of the copy
    get             one ranged GetObject for each chunk, several at a time; callers that know the sums compare them
    list            ListObjectsV2, which is ordered; `unfinished` and `abandon` look after multipart uploads

Every call is one request, or several different ones: `cloud.retry.RetryingStore` retries whole calls. This module
retries only the parts of an upload and the ranges of a get, so that a whole shard is not sent again. A request that
could make an object visible, and got no answer, raises `OutcomeUnknown`.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cloud.digest import crc64nvme
from cloud.errors import CannotCopy, CloudError, CopyDiffers, Denied, NotFound, TooLarge, Unavailable, call_with_retry
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.s3.client import S3Client
from cloud.s3.copy import COPY_BYTES, copy
from cloud.s3.errors import Unsupported, UploadGone
from cloud.s3.facts import BucketFacts, ask
from cloud.s3.probe import Quirks, probe
from cloud.s3.transfer import Pace, Reader, Target, decode_crc, encode_crc, fetch, send
from cloud.s3.upload import PART_ATTEMPTS, Sending, Upload, list_uploads, plan_part_bytes
from cloud.store import CHUNK_BYTES, ObjectInfo, Progress, Receipt, Source, check_key, check_prefix, is_key

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_UNPROBED = Quirks(checks_sums=False)  # assumed of a store before its probe: its own sums are no proof yet


@dataclass(frozen=True)
class S3Options:
    """How to reach and use a bucket; boto3 finds credentials, region and proxies.

    Attributes:
        endpoint: URL of an S3-compatible store; `None` for AWS's, or that of AWS_ENDPOINT_URL_S3 or the profile.
        sse: server-side encryption of new objects: "" for the bucket's default, "AES256", or "aws:kms".
        sse_kms_key_id: id of the key for "aws:kms"; "" for AWS's own.
        streams: parts or ranges in flight. One transfers about 0.09 GB/s on EC2.
    """

    endpoint: str | None = None
    sse: str = ""
    sse_kms_key_id: str = ""
    streams: int = 16

    def __post_init__(self) -> None:
        if self.sse not in ("", "AES256", "aws:kms"):
            raise ValueError(f'server-side encryption is "AES256" or "aws:kms", not {self.sse!r}')
        if self.sse_kms_key_id and self.sse != "aws:kms":
            raise ValueError('a KMS key needs server-side encryption "aws:kms"')
        if self.endpoint is not None and not re.match(r"https?://[^/]", self.endpoint):
            raise ValueError(f"not the URL of an endpoint: {self.endpoint!r}")
        if self.endpoint is not None and "@" in urlsplit(self.endpoint).netloc:
            raise ValueError(
                "the endpoint's URL holds a user or a password: set AWS_ACCESS_KEY_ID and its like instead"
            )
        if self.streams < 1:
            raise ValueError(f"at least one stream, not {self.streams}")


class S3Store:
    """Objects below a prefix of a bucket. Safe for threads. Sends no request before the first call.

    Args:
        url: "s3://bucket" or "s3://bucket/prefix".
        options: see `S3Options`.
        part_bytes: bytes of a part of a multipart upload, unless the object needs larger parts; for tests.
        copy_bytes: bytes that one request copies; for tests.
        sleep: how to pause before a part or range is tried again.

    Raises:
        ValueError: `url` names no bucket that this store can use.
    """

    def __init__(
        self,
        url: str,
        options: S3Options | None = None,
        *,
        part_bytes: int = CHUNK_BYTES,
        copy_bytes: int = COPY_BYTES,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bucket, self._prefix = _parse(url)
        self.url = f"s3://{self.bucket}/{self._prefix}".rstrip("/")
        self._options = options or S3Options()
        self._part_bytes, self._copy_bytes = part_bytes, copy_bytes
        self._sleep = sleep
        self._client = S3Client(self.bucket, self._options.endpoint, connections=2 * self._options.streams)
        self._quirks: Quirks | None = None
        self._uploads = Pace(self._options.streams)
        self._downloads = Pace(self._options.streams)

    # ------------------------------------------------------------------------------------------- knowing the store

    def probe(self, prefix: str, *, deadline: Deadline) -> Quirks:
        """Find out by trial what this endpoint honours, with keys that start with `prefix`, and adapt to it.

        Raises:
            Denied: not allowed to write there.
            CloudError: the store could not be asked; its quirks are as unknown as before.
        """
        check_prefix(prefix)
        self._quirks = Quirks() if self._client.is_aws else probe(self._client, self._prefix + prefix, deadline)
        return self._quirks

    @property
    def conditional(self) -> bool:
        """Whether put_if_absent can be trusted, as far as is known. False only after a `probe` has shown it."""
        return self._known.conditional

    def facts(self, prefix: str, *, deadline: Deadline) -> BucketFacts:
        """Return facts about the bucket; `prefix` is the run's. Raises CloudError if the bucket is out of reach."""
        check_prefix(prefix)
        return ask(self._client, self._prefix + prefix, deadline)

    @property
    def _known(self) -> Quirks:
        if self._quirks is None:
            return Quirks() if self._client.is_aws else _UNPROBED
        return self._quirks

    # ------------------------------------------------------------------------------------------------------ writing

    def put(self, key: str, source: Source, *, deadline: Deadline, progress: Progress | None = None) -> Receipt:
        """See `ObjectStore.put`. The source is not touched any more when this returns or raises.

        Continues an unfinished upload of the same key: parts in the store that have our sums are not sent again. A put
        that is cancelled, or has no time left, leaves its unfinished upload in the store. At most `streams` parts are
        in flight beyond those for which `progress` has returned.
        """
        full = self._full(key)
        reader = Reader(source)
        try:
            if reader.size > self._part_bytes:
                sums, encryption = self._known.takes_sums, self._encryption
                sending = Sending(self._client, self._uploads, sums, encryption, self._sleep)
                part_bytes = plan_part_bytes(reader.size, self._part_bytes)
                return Upload(sending, full, reader, part_bytes, deadline).run(progress)
            receipt = self._put_small(full, reader, deadline)
        finally:
            reader.close()
        if progress is not None and receipt.size:
            progress(receipt.size)
        return receipt

    def put_if_absent(self, key: str, data: bytes, *, deadline: Deadline) -> None:
        """See `ObjectStore.put_if_absent`. Raises `Denied` on a store that is known not to honour conditions."""
        full = self._full(key)
        if not self.conditional:
            raise Denied(f"{key}: {self.url} ignores If-None-Match; nothing would guard it against a second writer")
        sums = {"ChecksumCRC64NVME": encode_crc(crc64nvme(data))} if self._known.takes_sums else {}
        self._client.call("PutObject", full, deadline=deadline, Body=data, IfNoneMatch="*", **sums, **self._encryption)

    def copy(self, source: str, key: str, expected: Receipt, *, deadline: Deadline) -> None:
        """See `ObjectStore.copy`. Refuses if the store's own sums are no proof, as `probe` found out."""
        full, origin = self._full(key), self._full(source)
        self._check_is(source, expected, deadline)
        try:
            copy(
                self._client,
                origin,
                full,
                expected,
                part_bytes=self._copy_bytes,
                streams=self._options.streams,
                options=self._encryption,
                deadline=deadline,
                sleep=self._sleep,
            )
        except Denied as err:
            raise self._denied_or_absent(err, origin, deadline) from err
        except NotFound as err:
            raise NotFound(f"{source} has gone from {self.url} while it was copied") from err
        try:
            self._check_is(key, expected, deadline)
        except (CopyDiffers, CannotCopy):
            with contextlib.suppress(CloudError):  # deleting is not allowed: the caller's put replaces it
                self.delete(key, deadline=deadline)
            raise

    def delete(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.delete`."""
        try:
            self._client.call("DeleteObject", self._full(key), deadline=deadline)
        except NotFound:
            return

    # ------------------------------------------------------------------------------------------------------ reading

    def get(self, key: str, into: memoryview, *, offset: int = 0, deadline: Deadline) -> None:
        """See `ObjectStore.get`. Uses one request up to a chunk, and several at a time for a larger buffer.

        `into` is not touched any more when this returns or raises. Several threads may each fetch a chunk: that is as
        fast as one call for all of it, and each thread can compare its sum while the next chunk arrives.
        """
        full, into = self._full(key), into.cast("B")
        if not into:
            self.stat(key, deadline=deadline)  # S3 has no empty range
            return
        try:
            if len(into) <= CHUNK_BYTES:
                fetch(self._client, full, Target(into), offset, self._downloads, deadline)
            else:
                self._fetch_all(full, into, offset, deadline)
        except Denied as err:
            raise self._denied_or_absent(err, full, deadline) from err
        finally:
            into.release()  # an error's traceback may hold this frame until the next collection

    def read(self, key: str, *, limit_bytes: int, deadline: Deadline) -> bytes:
        """See `ObjectStore.read`."""
        full = self._full(key)
        try:
            reply = self._client.call("GetObject", full, deadline=deadline)
        except Denied as err:
            raise self._denied_or_absent(err, full, deadline) from err
        body, size = reply["Body"], reply["ContentLength"]
        try:
            if size > limit_bytes:
                raise TooLarge(f"{key} in {self.url} has {size} bytes; at most {limit_bytes} were expected")
            data = b""
            while len(data) < size and (piece := self._client.read_body(body, size - len(data), full, deadline)):
                data += piece
        finally:
            body.close()
        if len(data) != size:
            raise Unavailable(f"{key} in {self.url}: the answer ended after {len(data)} of {size} bytes")
        return data

    def stat(self, key: str, *, deadline: Deadline) -> ObjectInfo:
        """See `ObjectStore.stat`. Returns a sum only if the store itself has checked it."""
        full = self._full(key)
        try:
            reply = self._client.call("HeadObject", full, deadline=deadline, ChecksumMode="ENABLED")
        except NotFound:
            # HEAD has no body that tells an absent object from an absent bucket. Not HeadBucket: S3 denies it to a role
            # that may list only below its prefix, as ours should.
            self._client.call("ListObjectsV2", None, deadline=deadline, Prefix=full, MaxKeys=1)
            raise
        except Denied as err:
            raise self._denied_or_absent(err, full, deadline) from err
        whole = reply.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and self._known.checks_sums
        crc = decode_crc(reply.get("ChecksumCRC64NVME")) if whole else None
        return ObjectInfo(key, reply["ContentLength"], crc)

    def list(self, prefix: str, *, after: str = "", deadline: Deadline) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. A request lists a thousand objects, and is made when its turn comes."""
        check_prefix(prefix)
        return self._list(prefix, after, deadline)

    # ----------------------------------------------------------------------------------------- unfinished uploads

    def unfinished(self, prefix: str, *, deadline: Deadline) -> Sequence[str]:
        """See `ObjectStore.unfinished`."""
        found = {key for key, _ in self._list_uploads(self._prefix + check_prefix(prefix), deadline)}
        return sorted(key for full in found if is_key(key := full.removeprefix(self._prefix)))

    def abandon(self, key: str, *, deadline: Deadline) -> None:
        """See `ObjectStore.abandon`."""
        full = self._full(key)
        for found, upload_id in self._list_uploads(full, deadline):
            if found == full:
                try:
                    self._client.call("AbortMultipartUpload", full, deadline=deadline, UploadId=upload_id)
                except UploadGone:
                    continue

    def _list_uploads(self, prefix: str, deadline: Deadline) -> Iterator[tuple[str, str]]:
        try:
            return list_uploads(self._client, prefix, deadline)
        except Unsupported:
            return iter(())  # a store without this request cleans up by itself, or its owner does

    # ---------------------------------------------------------------------------------------------------- no files

    def local_path(self, key: str) -> Path | None:
        """Always `None`: there are no files."""
        check_key(key)
        return None

    def free_bytes(self) -> int | None:
        """Always `None`: there is no limit."""
        return None

    def reserve(self, size: int) -> None:
        """Do nothing: there is no limit."""

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()

    # -------------------------------------------------------------------------------------------------------- pieces

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _denied_or_absent(self, err: Denied, full: str, deadline: Deadline) -> CloudError:
        """Return the error for a refused read: `NotFound` if a listing shows that the key is absent, else `err`.

        For an absent key, S3 answers 404 to a role that may list the bucket, and 403 to any other. A role that may list
        only below a prefix, as ours should, gets 403, since a read has no prefix.
        """
        try:
            listed = self._client.call("ListObjectsV2", None, deadline=deadline, Prefix=full, MaxKeys=1)
        except Denied:
            return err
        there = any(entry["Key"] == full for entry in listed.get("Contents", []))
        return err if there else NotFound(f"s3://{self.bucket}/{full} is not there")

    def _check_is(self, key: str, expected: Receipt, deadline: Deadline) -> None:
        """Raise `CopyDiffers` if S3 reports another size or sum, and `CannotCopy` if its report proves nothing."""
        info = self.stat(key, deadline=deadline)
        if info.crc64nvme is None:
            raise CannotCopy(f"{key} in {self.url}: the store reports no sum of it that it has checked itself")
        if (info.size, info.crc64nvme) != (expected.size, expected.crc64nvme):
            raise CopyDiffers(f"{key} in {self.url}: its {info.size} bytes are not those that were expected")

    @property
    def _encryption(self) -> dict[str, str]:
        sse = {"ServerSideEncryption": self._options.sse} if self._options.sse else {}
        return sse | ({"SSEKMSKeyId": self._options.sse_kms_key_id} if self._options.sse_kms_key_id else {})

    def _put_small(self, full: str, reader: Reader, deadline: Deadline) -> Receipt:
        body = reader.body(0, reader.size)
        try:
            crc = body.crc(0, reader.size)
            sums = {"ChecksumCRC64NVME": encode_crc(crc)} if self._known.takes_sums else {}
            send(self._client, "PutObject", full, body, self._uploads, deadline, **sums, **self._encryption)
        finally:
            body.close()
        return Receipt(reader.size, crc, (crc,) if reader.size else ())

    def _fetch_all(self, full: str, into: memoryview, offset: int, deadline: Deadline) -> None:
        targets = [(at, Target(into[at : at + CHUNK_BYTES])) for at in range(0, len(into), CHUNK_BYTES)]

        def fetch_range(at: int, target: Target) -> None:
            def attempt() -> None:
                fetch(self._client, full, target, offset + at, self._downloads, deadline)

            call_with_retry(attempt, deadline, sleep=self._sleep, attempts=PART_ATTEMPTS)

        pool = Pool(self._downloads.window, "harness-s3-get")
        try:
            futures = [pool.submit(fetch_range, at, target) for at, target in targets]
            done, pending = wait(futures, min(deadline.remaining_s, 1e6), FIRST_EXCEPTION)
            for future in done:
                future.result()
            if pending:
                raise Unavailable(f"{full}: no time left; {len(done)} of {len(futures)} chunks are there")
        finally:
            for _, target in targets:
                target.close()
            pool.shutdown()

    def _list(self, prefix: str, after: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        where = {"StartAfter": self._prefix + after} if after else {}
        while True:
            page = self._client.call("ListObjectsV2", None, deadline=deadline, Prefix=self._prefix + prefix, **where)
            for entry in page.get("Contents", []):
                key = str(entry["Key"]).removeprefix(self._prefix)
                if is_key(key):  # a console's "folder" is an object whose key ends with a slash; others differ, too
                    yield ObjectInfo(key, entry["Size"])
            if not page.get("IsTruncated"):
                return
            where = {"ContinuationToken": page["NextContinuationToken"]}


def _parse(url: str) -> tuple[str, str]:
    """Return bucket and prefix; the prefix is empty or ends with a slash."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not url.startswith("s3://"):
        raise ValueError(f"not s3://bucket/prefix: {url!r}")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"{bucket!r} is no bucket's name: it has 3 to 63 lower-case letters, digits, dots and hyphens, and begins"
            " and ends with a letter or digit"
        )
    if bucket.endswith("--x-s3"):
        raise ValueError(f"{url}: a directory bucket lists its keys in no order; use a general purpose bucket")
    if prefix and not is_key(prefix):
        raise ValueError(
            f"{url}: not a prefix of keys, which are words of letters, digits and _.=+-, joined by single slashes"
        )
    return bucket, prefix + "/" if prefix else ""
