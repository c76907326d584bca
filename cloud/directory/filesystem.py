"""FileSystem: the system calls of a DirectoryStore. Tests replace it to make a call fail, fall short, or be the last.

Owns only the names of the calls. A DirectoryStore touches files in no other way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


class FileSystem:
    """The functions of `os`, except for `fallocate` and `scandir`. Called from several threads at once."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    write = staticmethod(os.write)
    pwrite = staticmethod(os.pwrite)
    preadv = staticmethod(os.preadv)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync)
    fstat = staticmethod(os.fstat)
    stat = staticmethod(os.stat)
    statvfs = staticmethod(os.statvfs)
    rename = staticmethod(os.rename)
    link = staticmethod(os.link)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    ftruncate = staticmethod(os.ftruncate)
    flock = staticmethod(fcntl.flock)

    @staticmethod
    def scandir(fd: int) -> contextlib.AbstractContextManager[Iterator[os.DirEntry[str]]]:
        """Call os.scandir on an open directory."""
        return os.scandir(fd)

    @staticmethod
    def fallocate(fd: int, size: int) -> None:
        """Preallocate. Not by `os.posix_fallocate`: on a file system that cannot (NFS), it writes every block."""
        import ctypes  # 10 ms that only a reservation or a large object costs

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
