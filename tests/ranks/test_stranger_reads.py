"""docs/format.md is enough for several ranks, too: a hundred lines that know nothing of the harness restore a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import stranger, stranger_ranks
from tests.support.world import World

pytestmark = pytest.mark.long("trainings on several ranks")


def trained(world: World, divide: str, ranks: int) -> World:
    trainer = [*world.torchrun(ranks), "tests.support.rank_trainer", "--curve", world.curve, "--final", world.final]
    process = world.run_harness("--every-s", "1000", command=[*trainer, "--divide", divide])
    assert process.wait() == 0, process.stderr
    return world


def held(world: World, rank: int) -> dict[str, Any]:
    """What a rank held at the end, as it has written it down itself."""
    lines = Path(f"{world.final}.{rank}").read_text().splitlines()[1:]
    return {name: torch.tensor(eval(text)) for name, _, text in (line.partition(" ") for line in lines)}


def test_a_reader_has_a_hundred_lines_at_most() -> None:
    assert sum(len(Path(part.__file__).read_text().splitlines()) for part in (stranger, stranger_ranks)) <= 100


def test_a_model_of_ddp_is_restored_with_each_rank_s_own_buffers(world: World) -> None:
    trained(world, "ddp", 3)

    means = []
    for rank in range(3):
        state = stranger_ranks.read_newest(world.store / world.run, rank)
        model, expected = state["states"]["model"]["state"], held(world, rank)
        for name, tensor in model.items():
            assert torch.equal(tensor, expected[f"module.{name}"]), (rank, name)
        moments = state["states"]["optimizer"]["state"]["state"]
        assert torch.equal(moments["model/up.weight"]["exp_avg"], expected["0.exp_avg"])
        means.append(model["norm.running_mean"])
    assert not torch.equal(means[0], means[1]), "else it is not shown that they are each rank's own"


def test_a_sharded_model_is_restored_whole(world: World) -> None:
    trained(world, "fsdp", 2)

    for rank in range(2):
        model = stranger_ranks.read_newest(world.store / world.run, rank)["states"]["model"]["state"]
        for name, local in held(world, rank).items():
            if name in model:
                chunks = torch.chunk(model[name], 2)
                mine = chunks[rank] if rank < len(chunks) else model[name][:0]
                assert torch.equal(mine.reshape(-1), local.reshape(-1)), (rank, name)
    assert model["up.weight"].shape == (22, 10)


def test_whatever_reads_only_the_first_part_is_refused(world: World) -> None:
    """A reader of format 1 would take a third of the model for all of it."""
    trained(world, "ddp", 2)

    with pytest.raises(AssertionError, match="format 2"):
        stranger.read_latest(world.store / world.run)
