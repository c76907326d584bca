"""I10 against real processes: a run whose snapshots are all damaged is refused each time, and never begins anew."""

from __future__ import annotations

import pytest

from tests.support.process import Process
from tests.support.world import World


def start(world: World, steps: int) -> Process:
    """A whole life of the run."""
    process = world.run_rigged("--reread-s", "0.01", command=world.tiny(steps=steps))
    process.wait()
    return process


def interrupted_run(world: World) -> None:
    """A run with snapshots that was not finished: the record of its end says so."""
    assert start(world, steps=12).wait() == 0
    for done in (world.store / world.run / "generations").glob("*.done.json"):
        done.unlink()


def damage(world: World) -> None:
    """Flip a bit of every shard."""
    shards = world.shards()
    assert shards
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.unlink()
        shard.write_bytes(data)


def test_a_run_whose_snapshots_are_all_damaged_exits_70_and_is_not_restarted(world: World) -> None:
    interrupted_run(world)
    damage(world)

    refused = start(world, steps=20)

    assert refused.wait() == 70, refused.stderr
    assert "Restarting" not in refused.stderr


@pytest.mark.sample
def test_a_run_whose_snapshots_are_all_quarantined_never_starts_at_step_0(world: World) -> None:
    interrupted_run(world)
    damage(world)
    start(world, steps=20)
    curve = world.curve.read_text()

    again = start(world, steps=20)

    assert again.wait() == 70, again.stderr
    assert "NothingToResume" not in again.stderr
    assert world.curve.read_text() == curve, "not one step was made"
