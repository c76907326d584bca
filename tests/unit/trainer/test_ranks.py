"""A process knows its rank by its process group, by its launcher, or is alone."""

from __future__ import annotations

import pytest
import torch.distributed

from harness.errors import ConfigError
from harness.trainer.ranks import Rank, find_rank

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)


@pytest.mark.parametrize(
    "environ",
    [{}, {"RANK": "0"}, {"WORLD_SIZE": "4"}, {"RANK": "", "WORLD_SIZE": ""}, {"RANK": "0", "WORLD_SIZE": "1"}],
)
def test_a_process_without_a_launcher_is_alone(environ: dict[str, str]) -> None:
    assert find_rank(environ) == Rank()
    assert find_rank(environ).is_alone


def test_the_launcher_tells_the_rank_before_there_is_a_process_group() -> None:
    assert find_rank(TORCHRUN) == Rank(2, 4, 2)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("environ", [{}, TORCHRUN])
def test_the_process_group_tells_the_rank(environ: dict[str, str]) -> None:
    assert find_rank(environ) == Rank(2, 4, 2)


@pytest.mark.usefixtures("group")
def test_a_launcher_and_a_process_group_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"says that this is rank 2 of 4, and .* that it is rank 1 of 4"):
        find_rank(TORCHRUN | {"RANK": "1"})


def test_ranks_of_several_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 4 and LOCAL_WORLD_SIZE 2: .* several machines"):
        find_rank(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"})


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="RANK is 4 and WORLD_SIZE 4"):
        find_rank(TORCHRUN | {"RANK": "4"})
