"""Real libraries, killed at one system call after the other while they save: what is torn never counts as whole."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from tests.support.installed import environment_of
from tests.support.needs import lacking
from tests.support.torn_library import LIBRARIES
from tests.support.world import World

pytestmark = pytest.mark.long("a real library's checkpoint, written some fifty times")


@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=[] if name in ("transformers", "dcp") else [pytest.mark.nightly]) for name in LIBRARIES],
)
def test_what_a_library_had_not_ended_when_it_was_killed_is_not_whole(
    library: str, world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environ = environment_of(library, tmp_path_factory)
    if shutil.which("strace") is None:
        lacking("strace")
    program = [sys.executable, "-m", "tests.support.torn_library", library, world.root / "torn"]
    process = world.start(*program, env=environ)
    assert process.wait() == 0, process.stderr
    *moments, end = [json.loads(line) for line in process.stdout.splitlines() if line.startswith(b"{")]
    assert [moment for moment in moments if moment["torn"]] == []
    assert {"openat", "write", "close"} <= {moment["call"] for moment in moments}
    assert end["after"] != end["before"], "the second one counts once it is whole"
