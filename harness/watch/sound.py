"""Sound: whether a file is whole by its own form, without running anything that is in it.

Owns the forms that have an end which can be recognized: zip (torch.save, numpy), safetensors, JSON, pickle, HDF5. Reads
the ends of files, and of small ones all. Never unpickles.
"""

from __future__ import annotations

import os
import pickletools
import struct
from pathlib import Path, PurePath
from typing import BinaryIO

import msgspec

from harness.watch.look import Seen

_EOCD = b"PK\x05\x06"
_EOCD_BYTES = 22
_EOCD64 = b"PK\x06\x06"
_LOCATOR64 = b"PK\x06\x07"
_COMMENT = 65_536
_SMALL = 64 << 20
_HDF5 = b"\x89HDF\r\n\x1a\n"
_HDF5_ENDS = {0: 40, 1: 44, 2: 28, 3: 28}
"""Where the end of the file stands, by the version of the head, if offsets have 8 bytes (HDF5 file format, II.A)."""
_LEAST_PICKLE = 4  # its protocol, one operation and its end
_MOST_HEADER = 100 << 20
_LEGACY_TORCH = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of torch's older form, a number. Its tensors come behind all pickles; nothing tells their end."""
_PICKLES = (".pkl", ".pickle", ".pth", ".pt", ".bin", ".ckpt", ".metadata")
_HDF5_NAMES = (".h5", ".hdf5")
_WEIGHTS = (*_HDF5_NAMES, *_PICKLES, ".safetensors", ".npz", ".npy", ".distcp")
_NEVER_EMPTY = (*_WEIGHTS, ".json")


class Sound:
    """Remembers what was read: a file that did not change is not read again. One thread."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._known: dict[tuple[str, Seen], str | None] = {}

    def why_not(self, root: Path, path: str, seen: Seen) -> str | None:
        """Return why a file is not whole; `None` if it is, or if its form tells nothing."""
        key = (path, seen)
        if key not in self._known:
            self._known[key] = _why_not(root / path, seen.size)
        return self._known[key]

    def forget_others(self, kept: set[tuple[str, Seen]]) -> None:
        """Forget what is not there any more."""
        self._known = {key: why for key, why in self._known.items() if key in kept}


def is_of_weights(path: str) -> bool:
    """Whether a file has a name as of weights: one of their suffixes, also before another one."""
    return not set(PurePath(path).suffixes).isdisjoint(_WEIGHTS)


def has_end(path: Path) -> bool:
    """Whether a file is of a form whose end can be recognized."""
    try:
        with path.open("rb") as file:
            head, size = file.read(16), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if head.startswith((b"PK\x03\x04", _HDF5)) or path.suffix in (".json", ".safetensors"):
        return True
    return _is_pickle(head) and not _is_legacy(head) and size <= _SMALL


def _why_not(path: Path, size: int) -> str | None:
    if not size:
        return "is empty" if path.name.endswith(_NEVER_EMPTY) else None
    if size < _LEAST_PICKLE and path.name.endswith(_PICKLES):
        return "is cut off"
    try:
        with path.open("rb") as file:
            head = file.read(16)
            if head.startswith(b"PK") and path.suffix != ".distcp":  # that is several zips, one behind the other
                return _why_no_zip(file, size)
            if head.startswith(_HDF5):
                return _why_no_hdf5(file, head, size)
            if path.suffix in _HDF5_NAMES and (not head.strip(b"\0") or _HDF5.startswith(head)):
                return "is cut off (HDF5)"  # its head may be written last
            if path.suffix == ".safetensors":
                return _why_no_safetensors(file, head, size)
            if path.suffix == ".json" and size <= _SMALL:
                file.seek(0)
                return _why_no_json(file.read())
            if _is_pickle(head) and not _is_legacy(head) and path.name.endswith(_PICKLES) and size <= _SMALL:
                file.seek(0)
                return _why_no_pickle(file, size)
    except OSError as err:
        return f"cannot be read ({err.strerror})"
    except ValueError:
        return "is damaged (it tells of a place that no file has)"
    return None


def _is_pickle(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


def _is_legacy(head: bytes) -> bool:
    return head[2:].startswith(_LEGACY_TORCH[:14])


def _why_no_zip(file: BinaryIO, size: int) -> str | None:
    """A zip ends with a record of where its directory lies, and the directory ends where that record begins."""
    tail_bytes = min(size, _EOCD_BYTES + _COMMENT + 76)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    at = tail.rfind(_EOCD)
    if at < 0 or len(tail) - at < _EOCD_BYTES:
        return "is cut off (a zip without its end)"
    directory, offset, comment = struct.unpack_from("<IIH", tail, at + 12)
    end, begin = size - tail_bytes + at, offset + directory
    if at + _EOCD_BYTES + comment != len(tail):
        return "is cut off, or goes on behind its end (a zip)"
    locator = at - 20
    if locator >= 0 and tail[locator : locator + 4] == _LOCATOR64:
        (at64,) = struct.unpack_from("<Q", tail, locator + 8)
        file.seek(at64)
        record = file.read(56)
        if record[:4] != _EOCD64 or len(record) < 56:
            return "is damaged (a zip whose directory is not where it says)"
        directory, offset = struct.unpack_from("<QQ", record, 40)
        begin, end = offset + directory, at64
    if begin != end:
        return "is damaged (a zip whose directory is not where it says)"
    file.seek(offset)
    first = file.read(4)
    return None if first == b"PK\x01\x02" or not directory else "is damaged (a zip without its directory)"


def _why_no_safetensors(file: BinaryIO, head: bytes, size: int) -> str | None:
    if len(head) < 8:
        return "is cut off (safetensors)"
    length = int.from_bytes(head[:8], "little")
    if length > min(_MOST_HEADER, size - 8):
        return "is cut off (safetensors)"
    file.seek(8)
    try:
        header = msgspec.json.decode(file.read(length))
        ends = [int(value["data_offsets"][1]) for name, value in header.items() if name != "__metadata__"]
    except (msgspec.MsgspecError, AttributeError, KeyError, TypeError, IndexError, ValueError, RecursionError):
        return "has no header (safetensors)"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"has {size} bytes of {expected} (safetensors)"


def _why_no_hdf5(file: BinaryIO, head: bytes, size: int) -> str | None:
    """Its head says how long it is."""
    if len(head) < 16:
        return "is cut off (HDF5)"
    place = _HDF5_ENDS.get(head[8])
    offset_bytes = head[13] if head[8] < 2 else head[9]
    if place is None or offset_bytes != 8:
        return None
    file.seek(place)
    end = int.from_bytes(file.read(8), "little")
    return None if size == end else f"has {size} bytes of {end} (HDF5)"


def _why_no_json(data: bytes) -> str | None:
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return "is cut off, or no JSON"
    return None


def _why_no_pickle(file: BinaryIO, size: int) -> str | None:
    """Step through it, without running it."""
    try:
        for operation, _, _ in pickletools.genops(file):
            if operation.name == "STOP":
                return None if file.tell() == size else "goes on behind its end (a pickle)"
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, struct.error, OverflowError):
        pass
    return "is cut off (a pickle)"
