"""The source of a `put`, in chunks: slices of a buffer, or pieces of a file that are read into aligned memory.

Owns how a source file is opened and read, and the error for a file that is gone or has become shorter. Several threads
may take chunks at once; each chunk is valid until it is given back.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

from cloud.directory import direct
from cloud.directory.filesystem import FileSystem
from cloud.errors import SourceUnreadable
from cloud.store import CHUNK_BYTES, Source


class Chunks(direct.Chunks, Protocol):
    """An open source.

    Attributes:
        aligned: whether the source is large, and each chunk is aligned for direct I/O.
    """

    aligned: bool


@contextlib.contextmanager
def opened(fs: FileSystem, source: Source) -> Generator[Chunks]:
    """Open the source for the duration of the `with` block. Raises SourceUnreadable."""
    if not isinstance(source, Path):
        yield _Buffer(source.cast("B"))
        return
    try:
        fd = fs.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as err:
        raise SourceUnreadable(f"the source {source} is gone") from err
    except OSError as err:
        raise _unreadable(source, err) from err
    with contextlib.ExitStack() as stack:
        stack.callback(fs.close, fd)
        try:
            file = _File(fs, source, fd, stack)
        except OSError as err:
            raise _unreadable(source, err) from err
        yield file


class _Buffer:
    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)
        self.aligned = direct.is_aligned(view)

    @contextlib.contextmanager
    def take(self, at: int) -> Generator[memoryview]:
        yield self._view[at : at + CHUNK_BYTES]


class _File:
    """A source file, read past the page cache if the file system allows it: these bytes are read only once."""

    def __init__(self, fs: FileSystem, path: Path, fd: int, stack: contextlib.ExitStack) -> None:
        self._fs, self._path, self._fd = fs, path, fd
        self.size = fs.fstat(fd).st_size
        self.aligned = self.size >= direct.LEAST_BYTES
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._io = direct.DirectIO()
        self._direct = -1
        if not self.aligned:
            return
        try:
            self._direct = fs.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            stack.callback(fs.close, self._direct)
        except OSError as err:
            if not self._io.refuses(err):
                raise

    @contextlib.contextmanager
    def take(self, at: int) -> Generator[memoryview]:
        try:
            buffer = self._buffers.get_nowait()
        except queue.Empty:
            buffer = direct.aligned_buffer(min(self.size, CHUNK_BYTES))
        try:
            chunk = buffer[: self.size - at]
            self._read(chunk, at)
            yield chunk
        finally:
            self._buffers.put(buffer)

    def _read(self, into: memoryview, at: int) -> None:
        try:
            done = self._read_directly(into, at)
            while done < len(into):
                try:
                    count = self._fs.preadv(self._fd, [into[done:]], at + done)
                except InterruptedError:
                    continue
                if count == 0:
                    raise SourceUnreadable(
                        f"the source {self._path} had {self.size} bytes and now ends after {at + done}"
                    )
                done += count
        except OSError as err:
            raise _unreadable(self._path, err) from err

    def _read_directly(self, into: memoryview, at: int) -> int:
        if self._direct < 0 or not self._io.usable:
            return 0
        try:
            return direct.read(self._fs, self._direct, into, at)
        except OSError as err:
            if not self._io.refuses(err):
                raise
            return 0


def _unreadable(path: Path, err: OSError) -> SourceUnreadable:
    return SourceUnreadable(f"cannot read the source {path}: {err.strerror}")
