"""Bytes between this process's memory or a file and S3, one request at a time.

Owns the body of an upload, the filling of a buffer, and when a request is too slow. It is the seam for the client of
the data path: the modules above choose *which* part or range to send or fetch, this module does it.

A caller that stops (cancelled, out of time) closes the body or the target first. From then on no thread touches the
caller's memory, even if one still hangs in the network: bytes go through a small buffer of the request's own, which
costs 0.05 s/GB and stays in the processor's cache for TLS.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from cloud.digest import crc64nvme
from cloud.errors import CloudError, SourceUnreadable, Truncated, Unavailable
from cloud.notice import Clock, Deadline
from cloud.s3.client import S3Client
from cloud.s3.errors import Unsupported
from cloud.store import Source

PIECE_BYTES = 256 * 1024


class Stopped(CloudError):
    """The caller has stopped; this error reaches no caller."""


class Pace:
    """The speed of large requests of one kind, and how many may run at once. Safe for threads.

    A request that is far slower than the others is aborted: another connection will be faster. If the network has
    become slow, all requests are; so after a few aborted requests in a row the next one has no limit, and the speed of
    the aborted ones counts in the median from then on.

    Args:
        streams: requests in flight at most.
        clock: monotonic seconds.
    """

    TIMES = 4.0  # times the median: S3's manual advises to repeat the slowest 5 % of large requests
    AT_LEAST_S = 2.0
    SAMPLES = 8
    IN_A_ROW = 3
    LARGE_BYTES = 1024 * 1024
    HALVED_EVERY_S = 1.0  # failures of all requests at once count once

    def __init__(self, streams: int, clock: Clock = time.monotonic) -> None:
        self.most = streams
        self._clock = clock
        self._halved_at = -math.inf
        self._lock = threading.Lock()
        self._window = streams
        self._rates: deque[float] = deque(maxlen=64)  # seconds per byte
        self._given_up = 0

    @property
    def window(self) -> int:
        """Number of requests that may be in flight now."""
        return self._window

    def limit_s(self, size: int) -> float:
        """Return the seconds that a request for `size` bytes may take; `math.inf` for no limit."""
        with self._lock:
            if size < self.LARGE_BYTES or len(self._rates) < self.SAMPLES or self._given_up >= self.IN_A_ROW:
                return math.inf
            return max(self.AT_LEAST_S, self.TIMES * statistics.median(self._rates) * size)

    def finished(self, size: int, seconds: float) -> None:
        """Note that a request of `size` bytes succeeded after `seconds`."""
        with self._lock:
            if size >= self.LARGE_BYTES:
                self._rates.append(seconds / size)
                self._given_up = 0
            self._window = min(self._window + 1, self.most)

    def gave_up(self, done: int, seconds: float) -> None:
        """Note that a request was aborted because it was slow, after `done` bytes and `seconds`."""
        with self._lock:
            self._given_up += 1
            if done:
                self._rates.append(seconds / done)

    def failed(self) -> None:
        """Note a transient failure: store or network may not bear so many requests at once. Halves the window."""
        with self._lock:
            if self._clock() - self._halved_at >= self.HALVED_EVERY_S:
                self._halved_at = self._clock()
                self._window = max(1, self._window // 2)


class Body:
    """`size` bytes of a source from `offset` on, as a file for the client to read. Rewindable; any thread may close it.

    Args:
        view: the memory, or `None` for a file.
        fd: the file's descriptor; this object closes it.
        offset: position in the source.
        size: bytes.

    Attributes:
        check: called before each piece; raises to abort the request.
    """

    def __init__(self, view: memoryview | None, fd: int, offset: int, size: int) -> None:
        self._lock = threading.Lock()
        self._view, self._fd = view, fd
        self._offset, self._size = offset, size
        self._closed = False
        self._position = 0
        self._buffer = bytearray(min(PIECE_BYTES, size))
        self.check: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self._size

    def read(self, _: int = -1) -> memoryview:
        """Return the next piece, of a size that this class chooses; valid until the next call."""
        self.check()
        count = min(len(self._buffer), self._size - self._position)
        piece = memoryview(self._buffer)[:count]
        self._copy(self._position, piece)
        self._position += count
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as of a file; return it."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        """Return the position, as of a file."""
        return self._position

    def crc(self, start: int, size: int) -> int:
        """Return the CRC-64/NVME of a range of the body, before it is sent."""
        with self._lock:
            self._check_open()
            if self._view is not None:
                return crc64nvme(self._view[self._offset + start : self._offset + start + size])
        crc = 0
        for at in range(start, start + size, PIECE_BYTES):
            piece = memoryview(self._buffer)[: min(PIECE_BYTES, start + size - at)]
            self._copy(at, piece)
            crc = crc64nvme(piece, crc)
        return crc

    def close(self) -> None:
        """Release the source. A thread that reads gets `Stopped`. Idempotent."""
        with self._lock:
            if self._view is None and not self._closed:
                with contextlib.suppress(OSError):  # advice: pages that the training loop has cached are worth more
                    os.posix_fadvise(self._fd, self._offset, self._size, os.POSIX_FADV_DONTNEED)
                os.close(self._fd)
            self._view, self._closed = None, True

    def _check_open(self) -> None:
        if self._closed:
            raise Stopped("given up")

    def _copy(self, position: int, piece: memoryview) -> None:
        at = self._offset + position
        with self._lock:
            self._check_open()
            if self._view is not None:
                piece[:] = self._view[at : at + len(piece)]
                return
            done = 0
            while done < len(piece):
                try:
                    count = os.preadv(self._fd, [piece[done:]], at + done)
                except OSError as err:
                    raise SourceUnreadable(f"cannot read the source at byte {at + done}: {err.strerror}") from err
                if count == 0:
                    raise SourceUnreadable(f"the source has become shorter than {at + len(piece)} bytes")
                done += count


class Reader:
    """A source that is opened once and makes bodies. The caller closes it when no more bodies are needed."""

    def __init__(self, source: Source) -> None:
        """Open the source if it is a file. Raises SourceUnreadable."""
        self._view: memoryview | None = None
        self._fd = -1
        if isinstance(source, Path):
            try:
                self._fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
                self.size = os.fstat(self._fd).st_size
            except FileNotFoundError as err:
                raise SourceUnreadable(f"the source {source} is gone") from err
            except OSError as err:
                raise SourceUnreadable(f"cannot read the source {source}: {err.strerror}") from err
        else:
            self._view = source.cast("B")
            self.size = len(self._view)

    def body(self, offset: int, size: int) -> Body:
        """Return a body of `size` bytes from `offset` on; the caller closes it."""
        return Body(self._view, os.dup(self._fd) if self._view is None else -1, offset, size)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._view = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Target:
    """A caller's buffer that a request fills, until the caller closes the target."""

    def __init__(self, into: memoryview) -> None:
        self._lock = threading.Lock()
        self._into: memoryview | None = into
        self.size = len(into)

    def write(self, at: int, data: bytes) -> None:
        """Copy `data` into the buffer. Raises `Stopped` after `close`."""
        with self._lock:
            if self._into is None:
                raise Stopped("given up")
            self._into[at : at + len(data)] = data

    def close(self) -> None:
        """Release the buffer. Idempotent."""
        with self._lock:
            self._into = None


def send(
    client: S3Client, operation: str, key: str, body: Body, pace: Pace, deadline: Deadline, **parameters: Any
) -> dict[str, Any]:
    """Send `body` by one PutObject or UploadPart. Raises CloudError as `S3Client.call`, and if it is too slow."""
    with _paced(pace, len(body), body.tell, deadline) as bound:
        body.seek(0)
        body.check = lambda: _check(bound, f"{operation} {key}", body.tell(), len(body))
        return client.call(operation, key, deadline=bound, Body=body, **parameters)


def fetch(client: S3Client, key: str, target: Target, offset: int, pace: Pace, deadline: Deadline) -> None:
    """Fill `target` with the object's bytes from `offset` on, by one ranged GetObject.

    Raises:
        Truncated: the object ends before the target is full.
        CloudError: as `S3Client.call`, and if it is too slow.
    """
    done = 0
    with _paced(pace, target.size, lambda: done, deadline) as bound:
        last = offset + target.size - 1
        reply = client.call("GetObject", key, deadline=bound, Range=f"bytes={offset}-{last}")
        body = reply["Body"]
        try:
            found, _, total = str(reply.get("ContentRange", "")).removeprefix("bytes ").partition("/")
            if found and found != f"{offset}-{last}":
                raise Truncated(f"{key} has {total} bytes; {last + 1} were expected")
            if not found and (offset or reply["ContentLength"] != target.size):
                raise Unsupported(f"GetObject {key}: this store ignores ranges")
            while done < target.size:
                _check(bound, f"GetObject {key}", done, target.size)
                data = client.read_body(body, min(PIECE_BYTES, target.size - done), key, bound)
                if not data:
                    raise Unavailable(f"GetObject {key}: the answer ended after {done} of {target.size} bytes")
                target.write(done, data)
                done += len(data)
        finally:
            body.close()  # returns the connection to the pool if the body is at its end, else closes it


@contextlib.contextmanager
def _paced(pace: Pace, size: int, done: Callable[[], int], deadline: Deadline) -> Generator[Deadline]:
    """Bound one request by the pace of the others, for a `with` block; report its result to the pace."""
    started = time.monotonic()
    bound = deadline.sooner(pace.limit_s(size))
    try:
        yield bound
    except CloudError as err:
        if bound.expired and not deadline.expired:
            pace.gave_up(done(), time.monotonic() - started)
        elif err.retryable:
            pace.failed()
        raise
    pace.finished(size, time.monotonic() - started)


def _check(bound: Deadline, what: str, done: int, size: int) -> None:
    if bound.expired:
        raise Unavailable(f"{what}: too slow or out of time, after {done} of {size} bytes")


def encode_crc(crc: int) -> str:
    """Return the sum as S3's headers hold it: the base64 of eight big-endian bytes."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def decode_crc(text: str | None) -> int | None:
    """Return the sum that `encode_crc` encoded; `None` for any other text, such as a sum of sums ("...-3")."""
    try:
        data = base64.b64decode(text or "", validate=True)
    except ValueError:
        return None
    return int.from_bytes(data, "big") if len(data) == 8 else None
