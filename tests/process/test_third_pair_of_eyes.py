"""Rules of two generations at once that a review found broken, each with the scenario that showed it."""

from __future__ import annotations

import os
import re
import shlex
import signal

from tests.support.world import World

FAST = ("--back-off-s", "0.05", "--heartbeat-s", "0.2", "--await-s", "0.1", "--look-s", "0.1", "--every-s", "1000")


def test_a_newcomer_that_waits_does_not_call_durable_what_only_its_disk_has(world: World) -> None:
    """75 means anywhere: whoever believed it went back to an older snapshot on another machine."""
    world.has_local = True
    first = world.run_rigged(
        *FAST, "--durable-every-s", "1000", "--at", "Published@local:5:kill-both",
        command=world.tiny("--every-steps", "10", steps=300, step_s=0.01),
    )  # fmt: skip
    assert first.wait() == -signal.SIGKILL
    after_reboot = world.elsewhere()
    after_reboot.local = world.local
    second = after_reboot.run_rigged(*FAST, command=world.tiny(steps=300))
    second.wait_for(" HandoverAwaited generation=1 ")
    second.signal(signal.SIGTERM)

    assert second.wait() == 74, second.stderr


def test_a_second_signal_leaves_one_that_is_superseded_superseded(world: World) -> None:
    """An instance that exits 75 is started again, and would take the run back."""
    host = world.elsewhere()
    stuck = world.tiny("--every-steps", "10", "--stuck-at", "105", steps=300)
    first = world.run_rigged(*FAST, "--grace-s", "6", command=stuck)
    first.wait_for(" Published tier=remote ")
    world.wait_until(lambda: world.steps_of_curve()[-1:] == [105], "the step that hangs")
    second = host.run_rigged(*FAST, command=host.tiny(steps=300))
    first.wait_for(" SupersededBy ")
    first.signal(signal.SIGTERM)
    first.wait_for(" NoticeSeen ")
    first.signal(signal.SIGTERM)

    assert first.wait() == 73, first.stderr
    assert second.wait() == 0, second.stderr


def test_the_program_itself_says_too_that_it_was_superseded(world: World) -> None:
    """Without `harness run` its code is all there is: it said 75, and was started again to take the run back."""
    train = shlex.join(str(word) for word in world.tiny("--every-steps", "10", "--hold-at", "290", steps=300))
    first = world.run_rigged(*FAST, command=["bash", "-c", f"{train}; echo it left with $? >&2"])
    first.wait_for(" Published tier=remote ")
    host = world.elsewhere()
    second = host.run_rigged(*FAST, command=host.tiny(steps=30))

    first.wait_for("it left with 73\n")
    assert first.wait() == 73, first.stderr
    assert second.wait() == 0, second.stderr


def test_a_detached_newcomer_that_is_told_to_leave_does_not_come_back(world: World) -> None:
    """Its program took the agent's end for a crash, started another agent, and asked for the run again."""
    first = world.run_rigged(
        *FAST, "--look-s", "1000", command=world.tiny("--every-steps", "10", "--hold-at", "290", steps=300)
    )
    first.wait_for(" Published tier=remote ")
    host = world.elsewhere()
    settings = {"HARNESS_STORE": str(world.store), "HARNESS_RUN": world.run, "HARNESS_METADATA": "off"}
    program = host.start(*host.tiny(steps=30), env=settings)
    host.wait_until(lambda: host.place.log.exists() and "HandoverAwaited" in host.place.log.read_text(), "the wait")

    agent = re.search(r"AgentStarted [^\n]*pid=(\d+)", host.place.log.read_text())
    assert agent is not None
    os.kill(int(agent[1]), signal.SIGTERM)

    assert program.wait() == 1
    assert "no training was done here" in program.stderr
    host.wait_gone()
    log = host.place.log.read_text()
    assert "Ended outcome=interrupted exit_code=75" in log
    assert log.count("AgentStarted") == 1
    first.signal(signal.SIGTERM)
    assert first.wait() == 75, first.stderr
