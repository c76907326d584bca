"""Sound: files that were cut off, and files that only look like something else."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from harness.watch.look import Seen
from harness.watch.sound import Sound, has_end
from tests.support.layouts import by_hdf5, by_json, by_pickle, by_safetensors, by_torch


def why_not(path: Path) -> str | None:
    return Sound().why_not(path.parent, path.name, Seen.of(path.stat()))


def zip64() -> bytes:
    """A zip whose directory is found by its longer record, as one of more than 4 GB has it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("a", b"content")
    data = file.getvalue()
    at = data.rfind(b"PK\x05\x06")
    size, offset = struct.unpack_from("<II", data, at + 12)
    record = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, size, offset)
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, at, 1)
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:at] + record + locator + end


FORMS = {
    "a.pt": by_torch(1),
    "a.ckpt": by_torch(2),
    "large.pt": zip64(),
    "a.safetensors": by_safetensors(1),
    "a.pkl": by_pickle(1),
    "a.json": by_json(step=1, names=["ä", "b"]),
    "a.weights.h5": by_hdf5(1),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_file_is_whole_with_its_last_byte_and_not_before(name: str, tmp_path: Path) -> None:
    data, path = FORMS[name], tmp_path / name
    path.write_bytes(data)
    assert why_not(path) is None
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert why_not(path) is not None, size
    path.write_bytes(data)
    assert has_end(path)


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.pkl", "a.weights.h5"])
def test_bytes_behind_its_end_are_not_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FORMS[name] + b"\0")
    assert why_not(tmp_path / name) is not None


@pytest.mark.parametrize("name", FORMS)
def test_a_file_with_a_hole_in_it_is_no_error(name: str, tmp_path: Path) -> None:
    """A crash may leave the size without the content."""
    data = FORMS[name]
    for begin in range(0, len(data), 7):
        (tmp_path / name).write_bytes(data[:begin] + bytes(len(data) - begin))
        why_not(tmp_path / name)


def test_what_it_says_of_a_pickle_it_says_without_running_it(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "run",)  # type: ignore[return-value]

    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Harmful()))
    assert why_not(tmp_path / "a.pkl") is None
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["log.txt", "a.distcp", "weights"])
def test_a_form_without_an_end_tells_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x00\x01 some bytes")
    assert why_not(tmp_path / name) is None
    assert not has_end(tmp_path / name)


def test_an_empty_file_is_cut_off_where_its_name_promises_content(tmp_path: Path) -> None:
    for name, whole in (("a.pt", False), ("a.json", False), (".done", True), ("log.txt", True)):
        (tmp_path / name).touch()
        assert (why_not(tmp_path / name) is None) is whole, name


def test_a_safetensors_header_that_is_anything_else_is_no_error(tmp_path: Path) -> None:
    for header in ([], {"w": 1}, {"w": {}}, {"w": {"data_offsets": []}}, {"w": {"data_offsets": ["a", "b"]}}):
        text = json.dumps(header).encode()
        (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
        assert why_not(tmp_path / "a.safetensors") is not None, header


def test_a_file_that_is_deleted_while_it_is_looked_at_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = Path.open, tmp_path / "a.pkl"

    def open_and_delete(path: Path, mode: str) -> object:
        file = real(path, mode)
        path.unlink()
        return file

    path.write_bytes(by_pickle(1))
    monkeypatch.setattr(Path, "open", open_and_delete)
    assert has_end(path)
    assert not has_end(path)


def test_what_leads_to_a_place_that_no_file_has_is_damaged(tmp_path: Path) -> None:
    locator = b"PK\x06\x07" + struct.pack("<IQI", 0, 2**64 - 1, 1)
    (tmp_path / "a.pt").write_bytes(b"PK\x03\x04" + locator + b"PK\x05\x06" + bytes(18))
    assert "damaged" in str(why_not(tmp_path / "a.pt"))


@pytest.mark.parametrize("content", [b"[" * 100_000, b'"\xff"'], ids=["deep", "no text"])
def test_json_that_python_cannot_read_is_no_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "a.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    assert why_not(tmp_path / "a.json") is not None
    assert why_not(tmp_path / "a.safetensors") is not None
