"""The module, applied once for the tests of all workers, and copies of it for those that change something.

The apply begins when the tests are collected, and is waited for by the first that needs it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.applied import Applied, Early, apply_once
from tests.support.aws_account import Lease
from tests.support.needs import lacking
from tests.support.terraform import Unavailable

EARLY = pytest.StashKey[Early]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin in one of the processes of this run, if any test will want it."""
    config = session.config
    worker = getattr(config, "workerinput", {"workerid": "gw0"})["workerid"]
    to_run = not config.option.collectonly and any(
        "applied" in getattr(item, "fixturenames", ()) for item in session.items
    )
    if worker == "gw0" and to_run and shutil.which("terraform"):
        config.stash[EARLY] = Early(shared_by_all(config._tmp_path_factory, hasattr(config, "workerinput")))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Leave nothing behind."""
    if (early := session.config.stash.get(EARLY, None)) is not None:
        early.end(at_once=exitstatus == pytest.ExitCode.INTERRUPTED)


def shared_by_all(factory: pytest.TempPathFactory, is_worker: bool) -> Path:
    """The folder of the apply, for all processes of this run."""
    own = factory.getbasetemp()
    shared = (own.parent if is_worker else own) / "applied"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def applied(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Applied]:
    """The module as it was applied, to look at."""
    shared = shared_by_all(tmp_path_factory, worker_id != "master")
    lease = Lease(shared / "lease")
    try:
        yield apply_once(shared)
    except Unavailable as why:
        lacking("terraform", str(why))
    finally:
        lease.release()


@pytest.fixture
def copied(applied: Applied, tmp_path: Path) -> Iterator[Applied]:
    """A copy of the module, its state and its account, to change."""
    made = applied.copy(tmp_path / "copied")
    yield made
    made.account.end()
