from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.agent import resume, tier


@pytest.fixture(scope="package", autouse=True)
def _without_pauses() -> Iterator[None]:
    """A model reads damaged snapshots by the thousand, and what is damaged there stays so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume, "PAUSES_S", [0.0] * len(resume.PAUSES_S))
        patch.setattr(tier, "AGAIN_S", [0.0] * len(tier.AGAIN_S))
        yield
