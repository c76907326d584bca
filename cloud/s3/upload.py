"""One multipart upload: planned, resumed, sent by several threads, completed, and then checked in the store.

    an unfinished one of this key? ──▶ send the parts that it lacks ──▶ complete ──▶ look at size and sum

Owns how much may be in flight, the list of parts that the store has, and the meaning of a lost reply to the completion.
A failed upload stays in the store: the next put of the same key continues it, and `abandon` aborts it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from cloud.digest import combine
from cloud.errors import CloudError, NotFound, OutcomeUnknown, Unavailable, call_with_retry
from cloud.notice import Deadline
from cloud.pool import Pool
from cloud.s3.client import S3Client
from cloud.s3.errors import PartMissing, UploadGone
from cloud.s3.transfer import Body, Pace, Reader, Stopped, decode_crc, encode_crc, send
from cloud.store import CHUNK_BYTES, Progress, Receipt

MAX_PARTS = 10_000
PART_ATTEMPTS = 6  # of one part inside one put; a retry of the put continues with the parts that the store has


def plan_part_bytes(size: int, unit: int) -> int:
    """Return the bytes of each part but the last: the least multiple of `unit` for which 10 000 parts suffice."""
    return unit * max(1, -(-size // (unit * MAX_PARTS)))


def list_uploads(client: S3Client, prefix: str, deadline: Deadline) -> Iterator[tuple[str, str]]:
    """Return key and id of every unfinished upload whose key starts with `prefix`, newest first within a key."""
    found: list[dict[str, Any]] = []
    markers: dict[str, str] = {}
    while True:
        page = client.call("ListMultipartUploads", None, deadline=deadline, Prefix=prefix, **markers)
        found += page.get("Uploads", [])
        if not page.get("IsTruncated"):
            break
        markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
    found.sort(key=lambda upload: upload["Initiated"], reverse=True)
    found.sort(key=lambda upload: str(upload["Key"]))
    return ((str(upload["Key"]), str(upload["UploadId"])) for upload in found)


@dataclass(frozen=True)
class StoredPart:
    """A part that the store has, of an unfinished upload."""

    size: int
    crc: int
    etag: str


@dataclass(frozen=True)
class SentPart:
    """A part that is in the store. `leaves`: sum and size of each chunk in it, or of itself if smaller than a chunk."""

    leaves: Sequence[tuple[int, int]]
    etag: str


@dataclass(frozen=True)
class Sending:
    """Client and settings that all uploads to one store share.

    Attributes:
        client: sends the requests.
        pace: the pace of all uploads together.
        sums: whether the store takes CRC64NVME.
        options: parameters of CreateMultipartUpload (encryption).
        sleep: how to pause before a part is sent again.
    """

    client: S3Client
    pace: Pace
    sums: bool
    options: dict[str, str]
    sleep: Callable[[float], None] = time.sleep


class Upload:
    """Sends one source as one object. For one calling thread, which gets the progress of each part.

    When `run` has returned or raised, no thread reads the source any more.

    Args:
        sending: client and settings of the store.
        key: the full key.
        reader: the source.
        part_bytes: bytes of a part; divides `CHUNK_BYTES` or is a multiple of it.
        deadline: for the whole.
    """

    def __init__(self, sending: Sending, key: str, reader: Reader, part_bytes: int, deadline: Deadline) -> None:
        self._sending, self._key, self._reader = sending, key, reader
        self._part_bytes, self._deadline = part_bytes, deadline
        self._count = -(-reader.size // part_bytes)
        self._resumed = False
        self._lock = threading.Lock()
        self._ended_at = time.monotonic()  # when a thread was last done with a part
        self._bodies: set[Body] | None = set()  # that threads are reading; `None` once reading is over

    def run(self, progress: Progress | None) -> Receipt:
        """Send the parts, complete the upload, and check the object. Raises CloudError."""
        try:
            found = self._resume()
            self._resumed = found is not None
            upload_id, stored = found or (self._create(), {})
            parts = self._send_all(upload_id, stored, progress)
            receipt = self._receipt(parts)
            self._complete(upload_id, parts, receipt)
        except (UploadGone, PartMissing) as err:
            raise Unavailable(f"{err}; another attempt sends what is missing") from err
        return receipt

    # --------------------------------------------------------------------------------------------------- beginning

    def _create(self) -> str:
        sums = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if self._sending.sums else {}
        return str(self._call("CreateMultipartUpload", **sums, **self._sending.options)["UploadId"])

    def _resume(self) -> tuple[str, dict[int, StoredPart]] | None:
        """Return the newest unfinished upload of this key whose parts, if any, have sums to compare; or `None`."""
        if not self._sending.sums:
            return None
        try:
            for key, upload_id in list_uploads(self._sending.client, self._key, self._deadline):
                if key == self._key and (stored := self._list_parts(upload_id)) is not None:
                    return upload_id, stored
        except CloudError as err:
            if err.retryable:
                raise
        return None  # not allowed, or not supported: a put does not depend on it

    def _list_parts(self, upload_id: str) -> dict[int, StoredPart] | None:
        """Return the stored parts by number; `None` if it was begun without our kind of sum, so cannot end with it."""
        stored: dict[int, StoredPart] = {}
        marker = 0
        while True:
            page = self._call("ListParts", UploadId=upload_id, PartNumberMarker=marker)
            if page.get("ChecksumType") != "FULL_OBJECT" or page.get("ChecksumAlgorithm") != "CRC64NVME":
                return None
            for part in page.get("Parts", []):
                if (crc := decode_crc(part.get("ChecksumCRC64NVME"))) is not None:
                    stored[part["PartNumber"]] = StoredPart(part["Size"], crc, part["ETag"])
            if not page.get("IsTruncated"):
                return stored
            marker = page["NextPartNumberMarker"]

    # ------------------------------------------------------------------------------------------------------ sending

    def _send_all(self, upload_id: str, stored: dict[int, StoredPart], progress: Progress | None) -> list[SentPart]:
        """Send missing parts, and return all parts. Begins another part only when `progress` has returned."""
        sent: dict[int, SentPart] = {}
        pending: dict[Future[SentPart], int] = {}
        waiting = iter(range(1, self._count + 1))
        pool = Pool(self._sending.pace.most, "harness-s3-put")
        try:
            while len(sent) < self._count:
                while len(pending) < self._sending.pace.window and (number := next(waiting, None)) is not None:
                    pending[pool.submit(self._send_part, upload_id, number, stored.get(number))] = number
                done, _ = wait(pending, min(self._deadline.remaining_s, 3600.0), FIRST_COMPLETED)
                new = {pending.pop(future): future.result() for future in done}
                sent |= new
                if new and progress is not None:
                    count = sum(size for part in new.values() for _, size in part.leaves)
                    progress(count, idle_s=lambda: self._idle_s(pending))
                if self._deadline.expired and len(sent) < self._count:
                    raise Unavailable(f"{self._key}: no time left; {len(sent)} of {self._count} parts are there")
        finally:
            self._let_go()
            pool.shutdown()
        return [sent[number] for number in range(1, self._count + 1)]

    def _idle_s(self, pending: Iterable[Future[SentPart]]) -> float:
        """Return for how many seconds no part has been on its way."""
        with self._lock:
            ended_at = self._ended_at
        return 0.0 if any(not future.done() for future in pending) else time.monotonic() - ended_at

    def _let_go(self) -> None:
        """Stop all reads of the source. A thread that hangs in the network ends by its own time-out."""
        with self._lock:
            bodies, self._bodies = self._bodies or set(), None
        for body in bodies:
            body.close()

    def _send_part(self, upload_id: str, number: int, stored: StoredPart | None) -> SentPart:
        offset = (number - 1) * self._part_bytes
        size = min(self._part_bytes, self._reader.size - offset)
        with self._lock:
            if self._bodies is None:
                raise Stopped("given up")
            body = self._reader.body(offset, size)
            self._bodies.add(body)
        try:
            step = min(self._part_bytes, CHUNK_BYTES)
            pieces = [(at, min(step, size - at)) for at in range(0, size, step)]
            leaves = [(body.crc(at, piece), piece) for at, piece in pieces]
            crc = _fold(leaves)
            if stored is not None and (stored.size, stored.crc) == (size, crc):
                return SentPart(leaves, stored.etag)
            return SentPart(leaves, self._send_body(upload_id, number, body, crc))
        finally:
            with self._lock:
                self._ended_at = time.monotonic()
                if self._bodies is not None:
                    self._bodies.discard(body)
            body.close()

    def _send_body(self, upload_id: str, number: int, body: Body, crc: int) -> str:
        sums = {"ChecksumCRC64NVME": encode_crc(crc)} if self._sending.sums else {}
        names = {"UploadId": upload_id, "PartNumber": number, **sums}

        def attempt() -> dict[str, Any]:
            return send(
                self._sending.client, "UploadPart", self._key, body, self._sending.pace, self._deadline, **names
            )

        reply = call_with_retry(attempt, self._deadline, sleep=self._sending.sleep, attempts=PART_ATTEMPTS)
        return str(reply["ETag"])

    # --------------------------------------------------------------------------------------------------- completing

    def _receipt(self, parts: Sequence[SentPart]) -> Receipt:
        chunks: list[int] = []
        group: list[tuple[int, int]] = []
        leaves = [leaf for part in parts for leaf in part.leaves]
        for leaf in leaves:
            group.append(leaf)
            if sum(size for _, size in group) == CHUNK_BYTES:
                chunks.append(_fold(group))
                group = []
        if group:
            chunks.append(_fold(group))
        return Receipt(self._reader.size, _fold(leaves), tuple(chunks))

    def _complete(self, upload_id: str, parts: Sequence[SentPart], receipt: Receipt) -> None:
        listed: list[dict[str, Any]] = [
            {"PartNumber": number, "ETag": part.etag} for number, part in enumerate(parts, start=1)
        ]
        whole: dict[str, Any] = {}
        if self._sending.sums:
            for entry, part in zip(listed, parts, strict=True):
                entry["ChecksumCRC64NVME"] = encode_crc(_fold(part.leaves))
            whole = {
                "ChecksumType": "FULL_OBJECT",
                "ChecksumCRC64NVME": encode_crc(receipt.crc64nvme),
                "MpuObjectSize": receipt.size,
            }
        told = reply_lost = False

        def attempt() -> None:
            nonlocal told, reply_lost
            try:
                if not told:
                    self._call(
                        "CompleteMultipartUpload", UploadId=upload_id, MultipartUpload={"Parts": listed}, **whole
                    )
                told = True
            except OutcomeUnknown:
                reply_lost = True
                raise
            except UploadGone:
                # The completion whose reply was lost may have ended the upload; the object itself shows it.
                if not reply_lost:
                    raise
            self._look(receipt, told=told)

        call_with_retry(attempt, self._deadline, sleep=self._sending.sleep)

    def _look(self, receipt: Receipt, *, told: bool) -> None:
        """Check that the object has our size and sum; the reply to the completion alone is not trusted.

        Args:
            receipt: size and sum of the sent bytes.
            told: whether the store has reported that the upload is complete.
        """
        try:
            reply = self._call("HeadObject", ChecksumMode="ENABLED")
        except NotFound as err:
            raise UploadGone(f"{self._key}: the upload is complete, but there is no object") from err
        size, crc = reply["ContentLength"], decode_crc(reply.get("ChecksumCRC64NVME"))
        if size == receipt.size and (crc == receipt.crc64nvme or (crc is None and told)):
            asked = self._sending.options.get("ServerSideEncryption")
            found = reply.get("ServerSideEncryption", asked)
            # Encryption is fixed when an upload is begun, and only the object shows it.
            if self._resumed and asked and found != asked:
                self._call("DeleteObject")
                raise PartMissing(f"{self._key}: deleted: its upload was begun with encryption {found}, not {asked}")
            return
        if told:
            self._call("DeleteObject")
            raise PartMissing(f"{self._key}: deleted: the store assembled it wrongly ({size} of {receipt.size} bytes)")
        raise UploadGone(f"{self._key}: the object there is not the one that was sent")

    def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return self._sending.client.call(operation, self._key, deadline=self._deadline, **parameters)


def _fold(leaves: Sequence[tuple[int, int]]) -> int:
    """Return the sum of adjacent pieces, from the sum and size of each."""
    crc = 0
    for leaf, size in leaves:
        crc = combine(crc, leaf, size)
    return crc
