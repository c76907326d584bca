"""A job from `terraform apply` to its end: an instance boots, is taken away; the next one goes on, and is the last."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cloud.testing.metadata_sim import MetadataSimulator
from tests.support.applied import COMMAND, PAUSE, RUN, STEPS, Applied
from tests.support.aws_account import REGION, ROOT
from tests.support.process import Process
from tests.support.world import World

pytestmark = pytest.mark.long("an apply, and a training on two instances", minutes=1)


class Node:
    """One instance of the group, in a folder of its own: nothing of it outlives it."""

    def __init__(self, root: Path, applied: Applied, simulator: MetadataSimulator, runtime_dir: str) -> None:
        root.mkdir()
        self.world = World(root)
        self.files = root / "files"
        self.log = root / "log"
        self.simulator = simulator
        self._user_data = applied.user_data
        self._env = {
            **{name: value for name, value in applied.account.environment().items() if "METADATA" not in name},
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": simulator.url,
            "HARNESS_ROOT": str(self.files),
            "HARNESS_RUNTIME_DIR": runtime_dir,
        }

    def boot(self) -> Process:
        """What cloud-init does, but for the disks and systemd; then what harness.service does."""
        script = self.world.root / "user-data"
        script.write_text(self._user_data)
        made = self.world.start("bash", script, "source", "environment", env=self._env)
        assert made.wait() == 0, made.stderr
        return self.world.start(self.files / "opt/harness/bin/resume.sh", env=self._env, cwd=self.source)

    @property
    def source(self) -> Path:
        return self.files / "opt/harness/source/current"

    def lose(self) -> None:
        """The machine is gone."""
        self.world.signal_host(signal.SIGKILL)
        self.world.wait_gone()


@pytest.fixture
def nodes(tmp_path: Path, copied: Applied) -> Iterator[Nodes]:
    with ExitStack() as stack:
        made = Nodes(tmp_path, copied, stack)
        yield made
        for node in made.all:
            node.world.close()


class Nodes:
    """The group's instances, one after the other."""

    def __init__(self, root: Path, applied: Applied, stack: ExitStack) -> None:
        self.root, self.applied, self.all = root, applied, list[Node]()
        self._stack = stack
        self._scaling = applied.client("autoscaling")

    def group(self) -> dict[str, object]:
        (found,) = self._scaling.describe_auto_scaling_groups()["AutoScalingGroups"]
        return dict(found)

    def next(self) -> Node:
        """The instance that the group has now."""
        (member,) = self._scaling.describe_auto_scaling_groups()["AutoScalingGroups"][0]["Instances"]
        simulator = MetadataSimulator(instance_id=member["InstanceId"], region=REGION, tags={"harness-run": RUN})
        self._stack.enter_context(simulator)
        runtime_dir = self._stack.enter_context(TemporaryDirectory(prefix="harness-"))  # a socket's path is short
        self.all.append(Node(self.root / member["InstanceId"], self.applied, simulator, runtime_dir))
        return self.all[-1]

    def take_away(self, node: Node) -> None:
        """EC2 ends the instance, and the group starts another."""
        node.lose()
        (member,) = self._scaling.describe_auto_scaling_groups()["AutoScalingGroups"][0]["Instances"]
        self._scaling.terminate_instance_in_auto_scaling_group(
            InstanceId=member["InstanceId"], ShouldDecrementDesiredCapacity=False
        )


def test_a_job_survives_its_instance_and_ends_with_no_instance_at_all(nodes: Nodes, tmp_path: Path) -> None:
    first = nodes.next()
    running = first.boot()
    running.wait_for(r" FirstStep ")
    first.simulator.notice(in_s=0.0, lead_s=60.0)
    running.wait_for(r" Ended outcome=interrupted exit_code=75 ")
    nodes.take_away(first)
    running.wait()
    trained = (first.source / "curve").read_text().splitlines()
    assert 0 < len(trained) < STEPS, "taken away in the middle"

    second = nodes.next()
    last = second.boot()

    assert last.wait() == 0, last.stderr
    assert second.source.resolve() != first.source.resolve()
    trained += (second.source / "curve").read_text().splitlines()
    assert [int(line.split()[0]) for line in trained] == list(range(1, STEPS + 1)), "no step lost, none made twice"
    group = nodes.group()
    assert (group["DesiredCapacity"], group["Instances"]) == (0, [])
    assert trained == unbroken(tmp_path)


def unbroken(root: Path) -> list[str]:
    """The curve of the same command, undisturbed and without pauses, with a directory as its store."""
    world = World(root)
    python, script, *options = COMMAND.removesuffix(PAUSE).split()
    assert (python, script) == ("python", "gpt.py")
    process = world.run_harness(command=[sys.executable, ROOT / "examples" / script, *options])
    assert process.wait() == 0, process.stderr
    return (root / "curve").read_text().splitlines()
