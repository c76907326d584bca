"""A node under a real init, from its boot to its end: whatever ends it, its group, its owner and its power are as told.

Real are systemd, the units, the scripts and `harness resume`. AWS is moto, and the group does not end instances by
itself: where a node leaves that to its group, it still runs at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cloud.testing.metadata_sim import MetadataSimulator
from tests.node.machine import ROOT, Machine
from tests.support.fleet_server import REGION, FleetServer
from tests.support.init_box import Box, CannotBoot, write_python
from tests.support.needs import lacking

pytestmark = pytest.mark.long("systemd boots, and harness resume imports boto3")

TOPIC = f"arn:aws:sns:{REGION}:123456789012:harness-gpt"
GROUP = "trainers"
USER_DATA = """
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=/opt/harness/bin/bootstrap-node.sh
"""
DECIDED = "stop-fleet: nothing is left to do"


class Node:
    """An instance of a group of one, and what it does to it."""

    def __init__(self, box: Box, server: FleetServer, metadata: MetadataSimulator) -> None:
        self.box, self.server, self.metadata = box, server, metadata
        self.settings = box.machine.settings

    def boot(self, *more: str) -> None:
        try:
            self.box.boot("user-data.service", *more)
        except CannotBoot as why:
            lacking("init", str(why))

    @property
    def desired(self) -> int:
        """How many instances the group wants."""
        return self.server.sizes(GROUP)[1]

    def told(self) -> list[str]:
        """The subjects of the owner's mails."""
        return [message["Subject"] for message in self.server.asked("Publish")]

    def actions(self) -> list[str]:
        """What it did to its group, in order."""
        looks = ("DescribeAutoScalingGroups", "PutMetricData", "Publish", "SetInstanceProtection")
        in_service = {"LifecycleHookName": "ready", "LifecycleActionResult": "CONTINUE"}  # or not, if it ends soon
        return list(
            dict.fromkeys(
                action
                for action, asked in self.server.requests
                if action not in looks and not in_service.items() <= asked.items()
            )
        )


@pytest.fixture(scope="session")
def _why_no_init(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Why no machine boots here; empty if one does."""
    directory = tmp_path_factory.mktemp("box")
    machine = Machine(directory)
    box = Box(directory, machine)
    box.write_unit("off.service", "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/bin/systemctl poweroff\n")
    try:
        box.boot("off.service")
        box.wait_powered_off()
    except (CannotBoot, AssertionError) as err:
        return str(err)
    finally:
        box.close()
    return ""


@pytest.fixture
def node(machine: Machine, tmp_path: Path, _why_no_init: str) -> Iterator[Node]:
    if _why_no_init:
        lacking("init", _why_no_init)
    box = Box(tmp_path, machine)
    (machine.root / "opt/harness/bin/resume.sh").write_bytes((ROOT / "scripts/resume.sh").read_bytes())
    (machine.root / "opt/pytorch/bin").mkdir(parents=True)
    write_python(machine.root / "opt/pytorch/bin/python")
    with FleetServer() as server:
        (instance,) = server.create_group(GROUP)
        server.client("sns").create_topic(Name="harness-gpt")
        server.waiting.add(instance)
        with MetadataSimulator(instance_id=instance, region=REGION, tags={"harness-run": "gpt"}) as metadata:
            machine.settings |= {
                "HARNESS_STORE": str(tmp_path / "store"),
                "HARNESS_PYTHON": "",  # as Terraform writes it, unless `python` is given
                "HARNESS_COMMAND": "true", "HARNESS_GROUP": GROUP, "HARNESS_TOPIC": TOPIC, "HARNESS_HOOK": "drain",
                "HARNESS_LAUNCH_HOOK": "ready", "HARNESS_METRICS": "Harness", "HARNESS_METADATA": metadata.url,
                "HARNESS_MAX_CRASHES": "1", "HARNESS_RUNTIME_DIR": "/run/harness-agents",
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url, "AWS_ENDPOINT_URL": server.url,
                "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": REGION,
                "AWS_DEFAULT_REGION": REGION, "AWS_MAX_ATTEMPTS": "1",
            }  # fmt: skip
            soon = "[Service]\nEnvironment=HARNESS_STOP_S=2 HARNESS_STOP_PAUSE_S=0.2 HARNESS_LET_GO_S=0\n"
            box.write_unit("user-data.service", USER_DATA)
            for name in ("harness-ended.service", "harness-node.service", "user-data.service"):
                box.write_unit(f"{name}.d/soon.conf", soon)
            box.write_unit("harness.service.d/soon.conf", "[Service]\nRestartSec=0.1\n")
            made = Node(box, server, metadata)
            yield made
            box.close()


@dataclass(frozen=True)
class Ending:
    """How a node ends, and what follows."""

    settings: dict[str, str]
    desired: int
    actions: tuple[str, ...]
    told: tuple[str, ...] = ()


# A program whose run another host takes over: it writes that host's claim itself.
SUPERSEDED = (
    "import json, os, pathlib, time; claims = pathlib.Path(os.environ['HARNESS_STORE'], 'gpt/generations');"
    " mine = claims / '00000001.json'; [time.sleep(0.1) for _ in iter(mine.exists, True)];"
    " newer = json.loads(mine.read_text()) | {'generation': 2, 'nonce': 'b' * 16, 'agent': 'c' * 16};"
    " (claims / '00000002.json').write_text(json.dumps(newer)); time.sleep(600)"
)

DECISIONS = {
    "finished": Ending(
        {"HARNESS_COMMAND": "true"}, 0, ("TerminateInstanceInAutoScalingGroup", "CompleteLifecycleAction")
    ),
    "the program fails": Ending(
        {"HARNESS_COMMAND": "sh -c 'exit 3'"}, 0, ("SetDesiredCapacity", "CompleteLifecycleAction"),
        ("run gpt: the fleet is stopped",),
    ),
    "nothing to run": Ending(
        {"HARNESS_COMMAND": "no-such-program"}, 0, ("SetDesiredCapacity", "CompleteLifecycleAction"),
        ("run gpt: the fleet is stopped",),
    ),
    "settings that cannot be": Ending(
        {"HARNESS_EVERY_S": "soon"}, 0, ("SetDesiredCapacity", "CompleteLifecycleAction"),
        ("run gpt: the fleet is stopped",),
    ),
    "superseded": Ending(
        {"HARNESS_COMMAND": f'python -c "{SUPERSEDED}"'}, 1,
        ("TerminateInstanceInAutoScalingGroup", "CompleteLifecycleAction"),
    ),
    "the self-test fails": Ending(
        {"HARNESS_SELF_TEST": "false"}, 1, ("CompleteLifecycleAction",), ("run gpt: this instance is replaced",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_what_harness_resume_has_decided_is_all_that_happens(node: Node, name: str) -> None:
    expected = DECISIONS[name]
    node.settings.update(expected.settings)

    node.boot()
    node.box.wait_for("stop-fleet: ", "harness.log")

    assert DECIDED in node.box.log("harness.log") or "self-test" in name or "cannot be" in name, node.box.report()
    assert node.desired == expected.desired, node.box.report()
    assert tuple(node.actions()) == expected.actions, node.box.report()
    assert tuple(node.told()) == expected.told
    assert node.box.runs, "its group ends it"


def test_an_instance_that_its_group_ends_lets_go_of_it_and_stops_nothing(node: Node) -> None:
    node.settings["HARNESS_COMMAND"] = "sh -c 'echo trains; exec sleep 600'"
    node.boot()
    node.box.wait_for("trains", "harness.log")

    node.metadata.lifecycle("Terminated")
    node.box.wait_for("stop-fleet: ", "harness.log")

    assert DECIDED in node.box.log("harness.log"), node.box.report()
    assert node.desired == 1, "the group wants another one"
    assert "CompleteLifecycleAction" in node.actions()
    assert set(node.actions()) <= {"CompleteLifecycleAction", "RecordLifecycleActionHeartbeat"}
    assert node.told() == []


def assert_stopped_and_off(node: Node, subject: str) -> None:
    node.box.wait_powered_off()
    assert node.desired == 0, node.box.report()
    assert node.told() == [f"gpt: {subject}"]
    assert "CompleteLifecycleAction" in node.actions()


WITHOUT_A_DECISION = "the supervisor has ended without a decision"


def test_a_supervisor_that_is_killed_again_and_again_stops_the_fleet(node: Node) -> None:
    node.box.machine.root.joinpath("opt/harness/bin/resume.sh").write_text("#!/bin/bash\nkill -9 $$\n")

    node.boot()

    assert_stopped_and_off(node, WITHOUT_A_DECISION)


@pytest.mark.parametrize("code", [1, 64, 125, 126, 127])
def test_a_supervisor_that_ends_by_itself_stops_the_fleet(node: Node, code: int) -> None:
    """A traceback, no interpreter that has the harness, and what docker says of a container that never started."""
    node.box.machine.root.joinpath("opt/harness/bin/resume.sh").write_text(
        f"#!/bin/bash\necho 'could not select device driver' >&2\nexit {code}\n"
    )

    node.boot()

    assert_stopped_and_off(node, WITHOUT_A_DECISION)
    assert "could not select device driver" in node.server.asked("Publish")[0]["Message"]


def test_a_restart_by_hand_is_no_end(node: Node) -> None:
    node.box.machine.root.joinpath("opt/harness/bin/resume.sh").write_text(
        "#!/bin/bash\necho started\n[ ! -e /run/again ] || exec sleep infinity\ntouch /run/again\nsleep infinity\n"
    )
    node.box.write_unit("harness.service.d/root.conf", "[Service]\nUser=root\n")
    node.box.write_unit(
        "again.service",
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\n"
        "ExecStart=/bin/bash -c 'until [ -e /run/again ]; do sleep 0.1; done; systemctl restart harness.service'\n",
    )

    node.boot("again.service")
    node.box.wait_for("stop-fleet: harness.service starts again", "harness.log")

    assert node.box.log("harness.log").count("started") == 2
    assert node.desired == 1
    assert node.told() == []
    assert node.box.runs


def test_an_end_of_success_that_nobody_has_decided_stops_the_fleet(node: Node) -> None:
    node.box.machine.root.joinpath("opt/harness/bin/resume.sh").write_text("#!/bin/bash\nexit 0\n")

    node.boot()

    assert_stopped_and_off(node, WITHOUT_A_DECISION)


@pytest.mark.sample
def test_an_instance_that_cannot_be_prepared_stops_the_fleet(node: Node) -> None:
    node.settings["HARNESS_SOURCE"] = "ftp://host/code"

    node.boot()

    assert_stopped_and_off(node, "no instance can be prepared")


def test_a_fleet_whose_aws_does_not_answer_costs_nothing_all_the_same(node: Node) -> None:
    node.settings |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "HARNESS_TEST_ACT_S": "1"}  # of two minutes
    node.settings["HARNESS_COMMAND"] = "sh -c 'exit 3'"

    node.boot()

    node.box.wait_powered_off()
    assert node.desired == 1
    assert "could not be set to zero" in node.box.log("harness.log")


def test_the_program_runs_as_a_user_of_its_own_in_a_folder_of_its_own(node: Node) -> None:
    node.settings["HARNESS_COMMAND"] = "sh -c 'id -un; touch here; env | sort'"
    node.settings["WANDB_PROJECT"] = "gpt"  # as `env` gives it

    node.boot()
    node.box.wait_for("stop-fleet: ", "harness.log")

    said = node.box.log("harness.log").splitlines()
    assert "harness" in said, node.box.report()
    assert "HOME=/home/harness" in said
    assert "WANDB_PROJECT=gpt" in said
    assert not any("Permission denied" in line for line in said)


def test_harness_on_the_node_knows_its_run_as_the_runs_user_and_as_root(node: Node) -> None:
    node.settings["HARNESS_COMMAND"] = "sh -c 'harness status --json'"
    node.box.write_unit(
        "harness.service.d/look.conf",
        "[Service]\nExecStopPost=+/bin/sh -c '/usr/local/bin/harness status >/var/log/harness/looked 2>&1'\n",
    )

    node.boot()
    node.box.wait_for("stop-fleet: ", "harness.log")

    assert '"run": "gpt"' in node.box.log("harness.log"), node.box.report()
    assert "gpt" in node.box.log("looked"), node.box.report()
    assert "no run" not in node.box.log("looked"), node.box.report()


def test_a_call_that_fails_once_is_made_again_by_what_comes_after(node: Node) -> None:
    """The supervisor's own call is denied; harness-ended.service makes it once more."""
    node.settings["HARNESS_COMMAND"] = "sh -c 'exit 3'"
    node.server.fault("SetDesiredCapacity", code="AccessDenied", status=403, times=1)

    node.boot()

    node.box.wait_powered_off()
    assert node.desired == 0, node.box.report()
    assert node.told()[-1] == f"gpt: {WITHOUT_A_DECISION}"


def test_a_third_instance_in_a_row_that_is_not_fit_stops_the_fleet(node: Node) -> None:
    node.settings["HARNESS_SELF_TEST"] = "false"
    events = Path(node.settings["HARNESS_STORE"], "gpt/events")
    events.mkdir(parents=True)
    for folder in (events, *events.parents[:2]):
        folder.chmod(0o777)  # the run is another user
    for number in range(2):
        (events / f"00000000-i-0000000000000000{number}.unfit.json").write_text("{}")

    node.boot()
    node.box.wait_for("stop-fleet: ", "harness.log")

    assert node.desired == 0, node.box.report()
    assert node.told() == ["run gpt: the fleet is stopped"]
    assert "instance number 3 in a row" in node.server.asked("Publish")[0]["Message"]
