"""FileSystem: the system calls of a DirectoryStore, the seam where tests make one fail, fall short, or be the last.

Owns nothing but their names. No file of a DirectoryStore is touched by any other way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


class FileSystem:
    """Each call as `os` has it, but for `fallocate` and `scandir`. Called from several threads at once."""

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
        """os.scandir of an open directory."""
        return os.scandir(fd)

    @staticmethod
    def fallocate(fd: int, size: int) -> None:
        """Preallocate. Not `os.posix_fallocate`: where the file system cannot (NFS), that writes every block."""
        import ctypes  # 10 ms that only a reservation or a large object costs

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
