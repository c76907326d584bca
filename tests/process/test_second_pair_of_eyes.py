"""Rules that a review found broken, each with the scenario that showed it."""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.support.world import World


@pytest.mark.long("several lives of a training with torch")
def test_an_exit_with_a_code_in_the_middle_of_a_loop_is_not_the_end_of_the_run(world: World) -> None:
    """Python tells nobody at exit that a SystemExit was a failure: the run was sealed as ended, in mid-epoch."""
    script = world.root / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from harness import Checkpointer\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "ckpt = Checkpointer(model=model, optimizer=optimizer)\n"
        "for epoch in ckpt.epochs(3):\n"
        "    for x in ckpt.batches(list(torch.arange(8.0).view(4, 2))):\n"
        "        model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "        print('step', ckpt.step_count + 1, flush=True)\n"
        "        if ckpt.step_count == 5 and 'fail' in sys.argv: sys.exit(3)\n"
    )
    failing = world.run_harness("--max-crashes", "0", command=[sys.executable, script, "fail"])
    assert failing.wait() == 3

    again = world.run_harness(command=[sys.executable, script])

    assert again.wait() == 0, again.stderr
    assert world.survey().finished_at == 12


def test_a_trainer_that_its_own_parent_starts_again_resumes_in_a_new_generation(world: World) -> None:
    """As torchrun does, or a shell's loop: it began at step 0 again, under numbers that were used already."""
    crash, train = (shlex.join(str(word) for word in world.tiny(*more)) for more in (["--raise-at", "12"], []))

    process = world.run_rigged(command=["bash", "-c", f"{crash}; {train}"])

    assert process.wait() == 0, process.stderr
    assert "Restored" in process.stderr
    assert world.survey().last_claim is not None
    assert world.survey().finished_at == 20
    world.check_tiny()


def test_a_terminal_that_is_gone_does_not_end_the_agent(world: World) -> None:
    """`harness run ... 2>&1 | head`, or a session that was hung up: saving matters most then."""
    command = shlex.join(str(word) for word in world.harness("run", *world.options(), "--", *world.tiny()))

    done = world.start("bash", "-c", f"set -o pipefail; {command} 2>&1 | head -n 1")

    assert done.wait() == 0
    assert world.survey().finished_at == 20
