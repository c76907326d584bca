"""The module, applied once for the tests of all workers, and copies of it for those that change something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.applied import Applied, apply_once
from tests.support.aws_account import Lease
from tests.support.terraform import Unavailable


@pytest.fixture(scope="session")
def applied(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Applied]:
    """The module as it was applied, to look at. About 65 s, for whoever asks first."""
    own = tmp_path_factory.getbasetemp()
    shared = (own if worker_id == "master" else own.parent) / "applied"
    shared.mkdir(exist_ok=True)
    lease = Lease(shared / "lease")
    try:
        yield apply_once(shared)
    except Unavailable as why:
        pytest.skip(str(why))
    finally:
        lease.release()


@pytest.fixture
def copied(applied: Applied, tmp_path: Path) -> Iterator[Applied]:
    """A copy of the module, its state and its account, to change."""
    made = applied.copy(tmp_path / "copied")
    yield made
    made.account.end()
