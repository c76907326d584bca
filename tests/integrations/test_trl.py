"""TRL's trainers, which count by themselves: with the callback alone, every log and tensor is an unbroken run's."""

from __future__ import annotations

import pytest

from tests.support.framework_lives import check_same, command, live
from tests.support.installed import environment_of
from tests.support.world import World

pytest.importorskip("transformers")
pytestmark = [pytest.mark.long("a library is installed, and trains several times"), pytest.mark.nightly]


@pytest.mark.parametrize("mode", ["sft", "lora", "dpo", "grpo"])
def test_what_ended_early_goes_on_bit_identical(
    mode: str, world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environ = environment_of("trl", tmp_path_factory)
    plain = world.elsewhere()
    process = plain.start(*command("trl_trainer", plain, mode, "--plain"), env=environ)
    assert process.wait() == 0, process.stderr
    killed = "Published:1:kill-trainer,TrainerFinished:1:kill-trainer"
    live(world, command("trl_trainer", world, mode), [("Published:1:terminate", 75), (killed, 0)], env=environ)
    check_same(world, plain)
