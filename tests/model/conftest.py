from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.agent.resume import finder
from harness.agent.save import upkeep


@pytest.fixture(scope="package", autouse=True)
def _without_pauses() -> Iterator[None]:
    """A model reads damaged snapshots by the thousand, and what is damaged there stays so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finder, "PAUSES_S", [0.0] * len(finder.PAUSES_S))
        patch.setattr(upkeep, "AGAIN_S", [0.0] * len(upkeep.AGAIN_S))
        yield
