"""scripts/resume.sh on a laptop, in Slurm, and on an instance of a fleet: what ends how, with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cloud.testing.metadata_sim import Fault, MetadataSimulator
from harness.core.snapshot import RunKeys
from tests.support.fleet_server import FleetServer
from tests.support.process import Process
from tests.support.world import ROOT, World

RESUME = ROOT / "scripts" / "resume.sh"
HOLD = ("--hold-at", "12")
TOPIC = "arn:aws:sns:us-east-1:123456789012:trainers"


def resume(
    world: World, *options: str | Path, command: Sequence[str | Path] = (), env: dict[str, str] | None = None
) -> Process:
    """Start scripts/resume.sh here, with an interpreter whose waits are shorter than a test."""
    python = world.root / "python"
    if not python.exists():  # another one may be reading it
        python.write_text(f'#!/bin/sh\n[ "$2" = -c ] || exec {sys.executable} -m tests.support.resume_run "$@"\n')
        python.chmod(0o755)
    behind = ["--", *command] if command else []
    return world.start(RESUME, *options, *behind, env={"HARNESS_PYTHON": str(python), **(env or {})})


def started(process: Process, nth: int = 1) -> int:
    """The pid of the agent of the `nth` start, once its trainer has a durable snapshot."""
    process.wait_for(r"(?s)" + r".*?TrainerStarted .*? Published " * nth)
    return int(process.wait_for(r"(?s)" + r".*?AgentStarted [^\n]*? pid=(\d+)" * nth)[nth])


class Node:
    """An instance of a group, with its metadata and its AWS."""

    def __init__(self, world: World, server: FleetServer, metadata: MetadataSimulator, instance: str) -> None:
        self.world, self.server, self.metadata, self.instance = world, server, metadata, instance

    @property
    def env(self) -> dict[str, str]:
        """What a node's files say, and how tests reach AWS."""
        return {
            "AWS_ENDPOINT_URL": self.server.url,
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "HARNESS_METADATA": self.metadata.url,
            "HARNESS_GROUP": "trainers",
            "HARNESS_HOOK": "drain",
            "HARNESS_TOPIC": TOPIC,
            "HARNESS_METRICS": "Harness",
        }

    def resume(
        self, *options: str | Path, command: Sequence[str | Path] = (), env: dict[str, str] | None = None
    ) -> Process:
        return resume(self.world, *options, command=command, env={**self.env, **(env or {})})

    def sizes(self) -> tuple[int, int, int]:
        group = self.server.client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=["trainers"])
        (found,) = group["AutoScalingGroups"]
        return found["MinSize"], found["DesiredCapacity"], len(found["Instances"])


@pytest.fixture
def node(world: World) -> Iterator[Node]:
    """The only instance of the group "trainers"."""
    with FleetServer() as server:
        (instance,) = server.create_group("trainers")
        topic = server.client("sns").create_topic(Name="trainers")["TopicArn"]
        assert topic == TOPIC
        tags = {"harness-run": world.run, "harness-store": str(world.store)}
        with MetadataSimulator(instance_id=instance, tags=tags) as metadata:
            yield Node(world, server, metadata, instance)


# ---- in a fleet -----------------------------------------------------------------------------------------------------


def test_a_notice_that_is_withdrawn_costs_a_pause_and_the_end_of_the_job_is_the_end_of_the_fleet(node: Node) -> None:
    world = node.world
    process = node.resume(*world.named(), command=world.tiny(*HOLD))
    started(process)
    node.metadata.notice(lead_s=120.0)
    process.wait_for("exit_code=75")
    process.wait_for("waiting for the end of this instance")
    assert node.sizes() == (0, 1, 1)

    node.metadata.withdraw()
    world.released.touch()

    assert process.wait() == 0, process.stderr
    assert "the notice was withdrawn: starting again" in process.stderr
    world.check_tiny()
    assert node.sizes() == (0, 0, 0)
    assert len(node.server.asked("TerminateInstanceInAutoScalingGroup")) == 1
    measured = [datum for put in node.server.asked("PutMetricData") for datum in put["MetricData"]]
    assert sum(datum["Value"] for datum in measured if datum["MetricName"] == "Starts") == 2
    assert not [datum for datum in measured if datum["MetricName"] == "FailedStarts"]


def test_an_instance_that_is_spared_trains_on(node: Node) -> None:
    world = node.world
    process = node.resume(*world.named(), command=world.tiny(*HOLD))
    os.kill(started(process), signal.SIGTERM)  # nobody's notice
    process.wait_for("this instance is still alive: starting again")
    world.released.touch()

    assert process.wait() == 0, process.stderr
    world.check_tiny()


def test_the_end_of_an_instance_by_its_group_is_kept_waiting_and_then_let_go(node: Node) -> None:
    world = node.world
    process = node.resume(*world.named(), command=world.tiny(*HOLD))
    started(process)
    node.server.waiting.add(node.instance)
    node.metadata.lifecycle("Terminated")

    assert process.wait() == 75, process.stderr
    assert process.stderr.count("AgentStarted") == 1
    assert node.server.asked("CompleteLifecycleAction")[-1]["LifecycleActionResult"] == "CONTINUE"
    assert node.server.waiting == set()
    assert node.sizes() == (0, 1, 1), "the group is not made smaller: it starts another instance"


def test_sigterm_is_75_and_out_and_the_group_is_as_it_was(node: Node) -> None:
    world = node.world
    process = node.resume(*world.named(), command=world.tiny(*HOLD))
    started(process)
    process.signal(signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert "second signal" not in process.stderr
    assert world.survey().commits[-1].step == world.steps_of_curve()[-1]
    assert node.sizes() == (0, 1, 1)
    assert not node.server.asked("TerminateInstanceInAutoScalingGroup")


def test_a_run_that_cannot_be_started_stops_the_fleet_and_people_are_told(node: Node) -> None:
    process = node.resume(*node.world.named(), "--every-s", "-1", command=["true"])

    assert process.wait() == 64, process.stderr
    assert node.sizes()[:2] == (0, 0)
    (told,) = node.server.asked("Publish")
    assert told["Subject"] == "run a: the fleet is stopped"
    assert "every_s must be more than 0" in told["Message"]
    assert node.instance in told["Message"]


def test_tags_say_what_the_environment_does_not_and_a_fleet_that_says_no_costs_nothing(node: Node) -> None:
    """Run and store are tags of the instance; the command comes from a file of the node."""
    world = node.world
    etc = world.root / "root" / "etc" / "harness"
    etc.mkdir(parents=True)
    command = " ".join(f"'{word}'" for word in world.tiny())
    (etc / "node.env").write_text(
        f'HARNESS_COMMAND="{command}"\nHARNESS_EVERY_S="17"\nHARNESS_PYTHON="/usr/bin/false"\n'
    )
    (etc / "local.env").write_text(f'HARNESS_LOCAL="{world.local}"\nHARNESS_EVERY_S="23"\n')
    for action in ("TerminateInstanceInAutoScalingGroup", "SetDesiredCapacity"):
        node.server.fault(action, code="AccessDenied", status=403, times=99)

    process = node.resume(env={"HARNESS_ROOT": str(world.root / "root"), "HARNESS_LOCAL": str(world.local)})

    assert process.wait() == 0, process.stderr
    assert f"run 'a', store {world.store}, local tier {world.local}, a snapshot every 23 s" in process.stderr
    world.check_tiny()
    assert "allow autoscaling:SetDesiredCapacity on this group's ARN" in process.stderr
    assert node.server.asked("Publish")[0]["Subject"] == "run a: could not end the job"


def test_a_machine_that_fails_its_self_test_is_replaced_and_trains_nothing(node: Node) -> None:
    process = node.resume(*node.world.named(), "--self-test", "sh -c 'echo no GPU; exit 9'", command=["true"])

    assert process.wait() == 70, process.stderr
    assert "AgentStarted" not in process.stderr
    assert node.server.asked("SetInstanceHealth")[0]["HealthStatus"] == "Unhealthy"
    assert "no GPU" in node.server.asked("Publish")[0]["Message"]


# ---- who dies -------------------------------------------------------------------------------------------------------


def test_a_killed_agent_s_program_lives_on_and_is_waited_for(world: World) -> None:
    process = resume(world, *world.options(), command=world.tiny(*HOLD))
    os.kill(started(process), signal.SIGKILL)
    process.wait_for("its program lives on")
    world.released.touch()

    assert process.wait() == 0, process.stderr
    world.check_tiny()
    assert world.steps_of_curve() == list(range(1, 21)), "one life, and no second one beside it"


def test_a_watched_program_whose_agent_is_killed_is_ended_and_goes_on_from_its_checkpoint(world: World) -> None:
    """It starts no agent of its own: nothing that it saves would become a snapshot."""
    files = ["--out", world.root / "out", "--curve", world.curve, "--final", world.final]
    held = ["--hold-at", "7", "--hold-until", world.released]
    command = [sys.executable, "-m", "tests.support.saving_program", *files, *held]
    process = resume(world, *world.options(), "--watch", world.root / "out", command=command)
    os.kill(started(process), signal.SIGKILL)
    process.wait_for("(?s)the program that it watched is ended.* AgentStarted ")
    world.released.touch()

    assert process.wait() == 0, process.stderr
    world.check_tiny()
    assert world.steps_of_curve() == [*range(1, 8), *range(6, 21)]
    assert world.survey().finished_at == 20


def test_a_program_whose_agent_is_killed_while_it_leaves_is_told_again_and_waited_for(world: World) -> None:
    process = resume(world, *world.options(), command=world.tiny(*HOLD))
    agent = started(process)
    os.kill(agent, signal.SIGSTOP)
    process.signal(signal.SIGTERM)
    os.kill(agent, signal.SIGKILL)

    assert process.wait() == 75, process.stderr
    assert world.survey().commits[-1].step == world.steps_of_curve()[-1]


def test_a_killed_agent_and_program_are_started_again(world: World) -> None:
    process = resume(world, *world.options(), command=world.tiny(*HOLD))
    agent = started(process)
    trainer = int(process.wait_for(r"TrainerStarted pid=(\d+)")[1])
    os.kill(agent, signal.SIGSTOP)
    os.kill(trainer, signal.SIGKILL)
    world.released.touch()
    os.kill(agent, signal.SIGKILL)

    assert process.wait() == 0, process.stderr
    assert "the agent died (signal 9): starting again in" in process.stderr
    world.check_tiny()


def test_who_comes_after_a_killed_resume_waits_for_the_run_that_it_left(world: World) -> None:
    first = resume(world, *world.options(), command=world.tiny(*HOLD))
    started(first)
    first.signal(signal.SIGKILL)
    assert first.wait_exit() == -signal.SIGKILL
    second = resume(world, *world.options(), command=world.tiny(*HOLD))
    second.wait_for("is being trained on this host already: waiting for its end")
    world.released.touch()

    assert second.wait() == 0, second.stderr
    assert "AgentStarted" not in second.stderr
    world.check_tiny()


def test_a_signal_to_whoever_waits_reaches_the_run_that_was_left(world: World) -> None:
    first = resume(world, *world.options(), command=world.tiny(*HOLD))
    started(first)
    first.signal(signal.SIGKILL)
    assert first.wait_exit() == -signal.SIGKILL
    second = resume(world, *world.options(), command=world.tiny(*HOLD))
    second.wait_for("waiting for its end")
    second.signal(signal.SIGTERM)

    assert second.wait() == 75, second.stderr
    assert world.survey().commits[-1].step == world.steps_of_curve()[-1]


# ---- elsewhere ------------------------------------------------------------------------------------------------------


def test_a_laptop_needs_nothing_of_aws(world: World) -> None:
    """With the interpreter of a clone, and everything as a user has it."""
    env = {"HARNESS_VENV": str(Path(sys.executable).parents[1])}
    process = world.start(RESUME, *world.options(), "--", *world.tiny(), env=env)

    assert process.wait() == 0, process.stderr
    world.check_tiny()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_job_is_one_signal(world: World, signum: int) -> None:
    process = resume(world, *world.options(), command=world.tiny(*HOLD))
    started(process)
    process.signal_group(signum)

    assert process.wait() == (130 if signum == signal.SIGINT else 75), process.stderr
    assert "second signal" not in process.stderr
    assert world.survey().commits[-1].step == world.steps_of_curve()[-1]


@pytest.fixture
def slurm(world: World) -> dict[str, str]:
    """The environment of a job; what scontrol is asked is in the file "asked"."""
    tools = world.root / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >>{world.root}/asked\n')
    (tools / "scontrol").chmod(0o755)
    return {"SLURM_JOB_ID": "4711", "PATH": f"{tools}:{os.environ['PATH']}"}


def test_an_interrupted_slurm_job_is_requeued_and_says_so_by_its_code(world: World, slurm: dict[str, str]) -> None:
    process = resume(world, *world.options(), command=world.tiny(*HOLD), env=slurm)
    started(process)
    process.signal(signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert (world.root / "asked").read_text() == "requeue 4711\n"


def test_a_job_that_is_told_to_leave_before_its_agent_can_listen_is_requeued_as_well(
    world: World, slurm: dict[str, str]
) -> None:
    process = resume(world, *world.options(), command=world.tiny(*HOLD), env=slurm)
    world.wait_until(lambda: any("harness run" in line for line in world.running().values()), "harness run")
    process.signal_group(signal.SIGTERM)

    assert process.wait() == 75, process.stderr
    assert (world.root / "asked").read_text() == "requeue 4711\n"


def test_a_signal_while_it_is_found_out_where_this_is_is_75(world: World) -> None:
    with MetadataSimulator() as metadata:
        metadata.fault(Fault.HANG)
        deaf = ("--metadata", metadata.url)  # which it waits for, whatever it is told
        process = resume(world, *world.named(), *deaf, command=world.tiny(), env={"HARNESS_TEST_LONGER": "5"})
        world.wait_until(lambda: bool(metadata.state()["requests"]), "a question")
        process.signal(signal.SIGTERM)

        assert process.wait() == 75, process.stderr
    assert "AgentStarted" not in process.stderr


def test_ctrl_c_during_the_self_test_says_nothing_about_the_machine(world: World) -> None:
    begun = world.root / "begun"
    test = f"sh -c 'touch {begun}; exec sleep 60'"
    process = resume(world, *world.options(), "--self-test", test, command=world.tiny())
    world.wait_until(begun.exists, "the self-test")
    process.signal_group(signal.SIGINT)

    assert process.wait() == 130, process.stderr
    assert "AgentStarted" not in process.stderr


def test_no_interpreter_is_said_with_what_was_tried(world: World) -> None:
    clone = world.root / "clone" / "scripts" / "resume.sh"  # of its own: beside the real one there may be a .venv
    clone.parent.mkdir(parents=True)
    shutil.copy(RESUME, clone)
    done = subprocess.run(
        [clone, "--dry-run"],
        env={"PATH": "/usr/bin:/bin", "HARNESS_PYTHON": "/usr/bin/false", "HARNESS_ROOT": str(world.root)},
        capture_output=True,
        text=True,
        cwd=world.root,
    )
    helped = subprocess.run([RESUME, "--help"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})

    assert done.returncode == 64
    assert "no Python with the harness was found" in done.stderr
    assert "/usr/bin/false:" in done.stderr
    assert "HARNESS_PYTHON=" in done.stderr
    assert (helped.returncode, helped.stdout.splitlines()[0]) == (0, "usage: scripts/resume.sh [OPTION…] [-- COMMAND…]")


# ---- dry run --------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_which_snapshot_which_not_and_what_is_run_and_changes_nothing(world: World) -> None:
    first = resume(world, *world.options(), command=world.tiny(*HOLD))
    started(first)
    first.signal(signal.SIGTERM)
    assert first.wait() == 75
    *_, older, newest = world.survey().commits
    for shard in world.shards(newest):
        shard.write_bytes(b"short")
    before = {path: path.read_bytes() for path in world.store.rglob("*") if path.is_file()}

    said = resume(world, *world.options(), "--dry-run", "--command", "python 'my train.py'")
    told = resume(world, *world.options(), "--dry-run", "--json", command=["python", "my train.py"])

    assert (said.wait(), told.wait()) == (0, 0), said.stderr
    text = said.stdout.decode()
    assert f"snapshot  {older}, step {older.step}, remote tier: committed" in text
    assert f"rejected  {newest}, remote tier: {world.run}/snapshots/" in text
    assert "command   python 'my train.py'\n" in text
    found = json.loads(told.stdout)
    assert found["used"] == {"snapshot": str(older), "tier": "remote", "step": older.step, "reason": ""}
    assert (found["command"], found["run"], found["refused"]) == (["python", "my train.py"], "a", None)
    assert {path: path.read_bytes() for path in world.store.rglob("*") if path.is_file()} == before
    assert not (world.store / RunKeys("a").quarantined(newest)).exists()
