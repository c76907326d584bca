"""Watched: a program that begins again is told from one that goes on; nothing outlives a pass."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cloud.directory.store import DirectoryStore
from harness.core.snapshot import RunKeys, SnapshotId
from harness.rehearse import watched
from harness.rehearse.watched import WatchedVerdict
from harness.watch import processes
from harness.watch.record import decode
from tests.support.layouts import by_torch
from tests.support.process import Process
from tests.support.watched import publish_newest, write

KEYS = RunKeys("rehearsal")


def test_a_program_that_begins_again_is_not_identical() -> None:
    verdict = WatchedVerdict(5, written_again="model_1.pt")
    assert not verdict.identical
    assert verdict.places, "the result is kept"
    assert "does NOT GO ON" in verdict.lines[0]
    assert verdict.to_json()["written_again"] == "model_1.pt"


@pytest.fixture
def passes(tmp_path: Path) -> watched._Passes:
    return watched._Passes(["true"], {}, tmp_path, lambda words: None, "{out}", None)


@pytest.mark.parametrize(
    ("written", "written_again"), [([], None), ([30], None), ([10], "checkpoint-10"), ([20], "checkpoint-20")]
)
def test_what_is_written_again_shows_that_it_begins_again(
    written: Sequence[int], written_again: str | None, passes: watched._Passes, tmp_path: Path
) -> None:
    made, root = tmp_path / "made", tmp_path / "out"
    write(made, "transformers", 20)
    manifest = publish_newest(DirectoryStore(tmp_path / "store"), made, "transformers", 20)
    record = passes._laid_back = decode(manifest.parts[0].state)
    write(root, "transformers", 20)
    for path in (root / "checkpoint-20").iterdir():
        os.utime(path, ns=(record.modified_ns, record.modified_ns))
    write(root, "transformers", *written)
    passes._note_written_again()
    assert passes.written_again == written_again


def test_a_file_without_a_number_that_has_its_earlier_content_shows_it_too(
    passes: watched._Passes, tmp_path: Path
) -> None:
    store, ids = DirectoryStore(tmp_path / "interrupted"), list[SnapshotId]()
    for number, content in enumerate((1, 2, 3, 1), start=1):
        write(tmp_path / "out", "torch-save-one", content)
        manifest = publish_newest(store, tmp_path / "out", "torch-save-one", number, KEYS)
        ids.append(manifest.id)
        if number > 2:
            assert watched._again(passes, ids[:1], ids[1]) == ("last.pt" if number == 4 else None)


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def arrays(value: int) -> bytes:
    file = io.BytesIO()
    np.savez(file, weights=np.full(9, value))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "here", "there", "differ"),
    [
        ("a.pt", by_torch(1), by_torch(2), True),
        ("a.pt", by_torch(1).replace(b"step", b"stop"), by_torch(1), False),
        ("a.npz", arrays(1), arrays(2), True),
        ("a.zip", zipped(policy=by_torch(1)), zipped(policy=by_torch(2)), True),
        ("a.zip", zipped(policy=by_torch(1)), zipped(), True),
        ("a.zip", zipped(data=b"{}", policy=by_torch(1)), zipped(data=b'{\n"time": 1}', policy=by_torch(1)), False),
        ("a.zip", zipped(buffer=pickle.dumps([1])), zipped(buffer=pickle.dumps([2])), True),
        ("a.json", b"{}", b"[]", False),
        ("a.bin", b"{}", b"[]", True),
    ],
    ids=["torch", "a-pickled-name", "numpy", "inside", "missing", "text-inside", "pickle-inside", "json", "unknown"],
)
def test_two_files_differ_by_the_tensors_in_them_whatever_holds_these(
    name: str, here: bytes, there: bytes, tmp_path: Path, *, differ: bool
) -> None:
    paths = [tmp_path / "here" / name, tmp_path / "there" / name]
    for path, content in zip(paths, (here, there), strict=True):
        path.parent.mkdir()
        path.write_bytes(content)
    assert watched._has_other_tensors(*paths) == differ


RANK = """
import os, signal, sys
if not os.fork():
    os.setsid()
    print("a rank runs", file=sys.stderr, flush=True)
    os.closerange(0, 3)
signal.pause()
"""


def test_a_rank_with_a_session_of_its_own_does_not_outlive_a_pass(tmp_path: Path) -> None:
    mark = "MARK", str(tmp_path)
    process = Process([sys.executable, "-c", RANK], cwd=tmp_path, env=dict([mark]))
    process.wait_for("a rank runs")
    assert len(processes.marked(*mark)) == 2
    watched._kill(process, mark)  # type: ignore[arg-type]
    assert processes.alive(processes.marked(*mark)) == []
