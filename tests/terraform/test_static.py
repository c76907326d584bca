"""The module looked at without an account: form, types, its own tests, and the script that it renders for a node."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import boto3
import pytest

from harness.config.settings import Settings
from tests.support.needs import lacking
from tests.support.once import once
from tests.support.s3_server import S3Server
from tests.support.terraform import NO_PROVIDER, PLUGINS, Unavailable

pytestmark = pytest.mark.long("terraform runs the 22 tests of the module")

ROOT = Path(__file__).resolve().parents[2]
LEFT_BEHIND = shutil.ignore_patterns(".terraform", "*.tfstate*", "*.tfplan", "*.tfvars")  # the lock file is obeyed
USER_DATA_BYTES = 16384  # EC2's limit, before base64
ROOM_FOR_A_USER_BYTES = 13_000  # of command, settings and setup_command, compressed
BUCKET = "new-bucket"  # of tests/account
KEYS = {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "secret"}
SCRIPTS = ("bootstrap-node.sh", "resume.sh", "stop-fleet.sh")
HOSTILE = "what_a_node_is_told_ends_no_quote_and_begins_no_command"  # of tests/choices.tftest.hcl
COMMAND = "echo \"$HOME\" `id` \\ 'x'"  # what it gives


def terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_VAR_")}
    return subprocess.run(
        ["terraform", *arguments],
        cwd=folder,
        env=environment | {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@dataclass(frozen=True)
class Examined:
    """What `terraform test` said of a copy of the module.

    Attributes:
        errors: those of all its runs.
        code: its exit code.
        packed: the user data that the launch template of the run `HOSTILE` has, in base64.
    """

    errors: list[str]
    code: int
    packed: str

    @property
    def user_data_gzip(self) -> bytes:
        return base64.b64decode(self.packed)

    @property
    def user_data(self) -> str:
        return gzip.decompress(self.user_data_gzip).decode()


def initialised(folder: Path, module: str = "terraform") -> Path:
    """A copy of the folder `module` and what it needs, ready for use: the clone stays as it is. Raises Unavailable."""
    if shutil.which("terraform") is None:
        raise Unavailable("terraform is not installed")
    shutil.copytree(ROOT / "terraform", folder / "terraform", ignore=LEFT_BEHIND)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    where, plugins = folder / module, os.environ.get(PLUGINS)
    begun = terraform(where, "init", "-input=false", "-no-color", *([f"-plugin-dir={plugins}"] if plugins else []))
    if begun.returncode and not plugins and any(problem in begun.stdout for problem in NO_PROVIDER):
        raise Unavailable(f"terraform init finds no provider, and {PLUGINS} is not set")
    assert begun.returncode == 0, begun.stdout
    return where


def examine(module: Path) -> Examined:
    """Run the module's own tests."""
    tested = terraform(module, "test", "-json", "-verbose")  # each state comes with the provider's schema: megabytes
    messages = tested.stdout.splitlines()
    found = [re.search(r'"user_data":"([^"]+)"', line) for line in messages if is_state_of(HOSTILE, line)]
    errors = [line for line in messages if '"@level":"error"' in line]
    return Examined(errors, tested.returncode, found[0][1] if found and found[0] else "")


def is_state_of(run: str, message: str) -> bool:
    return f'"@testrun":"{run}"' in message and '"type":"test_state"' in message


@pytest.fixture(scope="session")
def examined(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Examined:
    """Once for all workers: about 20 s, for whoever asks first."""

    def make(folder: Path) -> None:
        (folder / "examined.json").write_text(json.dumps(asdict(examine(initialised(folder, "terraform/aws")))))

    try:
        folder = once(tmp_path_factory, worker_id, "static", make)
    except Unavailable as why:
        lacking("terraform", str(why))
    return Examined(**json.loads((folder / "examined.json").read_text()))


class Fresh:
    """An instance that has only its user data, and a bucket with the scripts."""

    def __init__(self, examined: Examined, folder: Path, bucket: S3Server) -> None:
        self.root, self.bucket = folder / "root", bucket
        self._script = folder / "user-data.sh"
        self._script.write_text(examined.user_data)
        self.keys = dict(re.findall(r'^script [0-9a-f]{64} "([^"]+)" (\S+)$', examined.user_data, re.MULTILINE))
        self.client = boto3.client("s3", endpoint_url=bucket.url, region_name="us-east-1", **KEYS)
        for key, name in self.keys.items():
            self.client.put_object(Bucket=BUCKET, Key=key, Body=(ROOT / "scripts" / name).read_bytes())

    def boot(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the user data, with an argument that makes bootstrap-node.sh do nothing."""
        found = {
            "HARNESS_ROOT": str(self.root), "AWS_ENDPOINT_URL": self.bucket.url, "AWS_MAX_ATTEMPTS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HARNESS_FETCH_PAUSE_S": "0.05",
            **{name.upper(): value for name, value in KEYS.items()},
        }  # fmt: skip
        return subprocess.run(
            ["bash", str(self._script), "--help"],
            env=os.environ | found | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


@pytest.fixture
def fresh(examined: Examined, tmp_path: Path) -> Iterator[Fresh]:
    with S3Server(bucket=BUCKET) as bucket:
        yield Fresh(examined, tmp_path, bucket)


@pytest.fixture
def node(fresh: Fresh) -> Path:
    """A root folder in which the user data has run."""
    booted = fresh.boot()
    assert booted.returncode == 0, booted.stdout
    return fresh.root


@pytest.mark.sample
def test_every_file_has_terraforms_own_form() -> None:
    if shutil.which("terraform") is None:
        lacking("terraform", "terraform is not installed")
    done = terraform(ROOT / "terraform", "fmt", "-check", "-recursive", "-diff", "-no-color")
    assert done.returncode == 0, done.stdout


@pytest.mark.sample
def test_the_module_is_valid(tmp_path: Path) -> None:
    try:
        said = terraform(initialised(tmp_path), "validate", "-no-color").stdout
    except Unavailable as why:
        lacking("terraform", str(why))

    assert said.rstrip().endswith("Success! The configuration is valid."), said


def test_what_each_variable_changes_and_what_is_refused(examined: Examined) -> None:
    assert not examined.errors, "\n".join(examined.errors)
    assert examined.code == 0


def test_ec2_takes_the_user_data_with_room_for_a_users_own_words(examined: Examined) -> None:
    assert 0 < len(examined.user_data_gzip) <= USER_DATA_BYTES - ROOM_FOR_A_USER_BYTES


def test_the_rendered_user_data_is_clean_shell(examined: Examined, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        lacking("shellcheck")
    script = tmp_path / "user-data.sh"
    script.write_text(examined.user_data)
    done = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_user_data_writes_the_scripts_of_this_clone(node: Path) -> None:
    for name in SCRIPTS:
        written = node / "opt/harness/bin" / name
        assert written.read_bytes() == (ROOT / "scripts" / name).read_bytes()
        assert written.stat().st_mode & 0o777 == 0o755
    assert {path.name for path in node.rglob("*") if path.is_file()} == {"node.env", *SCRIPTS}


def test_bash_and_systemd_read_in_node_env_what_the_user_wrote(node: Path) -> None:
    path = node / "etc/harness/node.env"
    read = subprocess.run(
        ["bash", "-c", 'set -eu; source "$1"; printf %s "$HARNESS_COMMAND"', "-", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert read.stdout == COMMAND
    # systemd.exec(5), EnvironmentFile=: in double quotes a backslash stands before \ " $ and `.
    assert 'HARNESS_COMMAND="echo \\"\\$HOME\\" \\`id\\` \\\\ \'x\'"' in path.read_text().splitlines()
    assert path.stat().st_mode & 0o777 == 0o644


def test_user_data_run_again_leaves_the_same(node: Path, fresh: Fresh) -> None:
    before = {path: path.read_bytes() for path in node.rglob("*") if path.is_file()}
    assert fresh.boot().returncode == 0
    assert {path: path.read_bytes() for path in node.rglob("*") if path.is_file()} == before


def test_a_store_that_answers_late_is_waited_for(fresh: Fresh) -> None:
    fresh.bucket.fault("error", ("GetObject", "HeadObject"), status=503, code="SlowDown", times=3)

    booted = fresh.boot()

    assert booted.returncode == 0, booted.stdout
    assert (fresh.root / "opt/harness/bin/bootstrap-node.sh").exists()


def test_another_script_than_terraform_has_seen_is_not_run(fresh: Fresh) -> None:
    (key,) = (key for key, name in fresh.keys.items() if name == "bootstrap-node.sh")
    fresh.client.put_object(Bucket=BUCKET, Key=key, Body=b"#!/bin/sh\ntouch /tmp/hijacked\n")

    booted = fresh.boot(HARNESS_FETCH_S="0")

    assert booted.returncode == 70
    assert "cannot be fetched: given up" in booted.stdout
    assert not (fresh.root / "opt/harness/bin/bootstrap-node.sh").exists()


@pytest.mark.sample
def test_the_root_asks_for_all_that_the_module_takes_and_passes_all_of_it_on() -> None:
    module, root = ROOT / "terraform" / "aws", ROOT / "terraform"
    for path in module.glob("variables-*.tf"):
        assert (root / path.name).resolve() == path, "the root asks in the same words"

    asked = re.findall(
        r'^variable "(\w+)"', "".join(p.read_text() for p in module.glob("variables-*.tf")), re.MULTILINE
    )
    passed = re.findall(r"^  (\w+) += var\.(\w+)$", (root / "main.tf").read_text(), re.MULTILINE)
    assert sorted(passed) == sorted((name, name) for name in asked)

    outputs = {
        folder: re.findall(r'^output "(\w+)"', (folder / "outputs.tf").read_text(), re.M) for folder in (module, root)
    }
    assert outputs[module] == outputs[root]


TAGGED = {  # by the provider's documents: what takes tags, of the kinds that are made here
    "aws_budgets_budget", "aws_cloudwatch_event_rule", "aws_cloudwatch_log_group", "aws_cloudwatch_metric_alarm",
    "aws_fis_experiment_template", "aws_iam_instance_profile", "aws_iam_role", "aws_launch_template",
    "aws_placement_group", "aws_s3_bucket", "aws_s3_object", "aws_security_group", "aws_sns_topic", "aws_vpc_endpoint",
    "aws_vpc_security_group_egress_rule", "aws_vpc_security_group_ingress_rule",
}  # fmt: skip


@pytest.mark.sample
def test_everything_that_takes_tags_says_whose_it_is() -> None:
    """A provider block could say it for all of them; but the module has none, and several runs share the caller's."""
    for path in (ROOT / "terraform" / "aws").rglob("*.tf"):
        for kind, body in re.findall(
            r'^resource "(\w+)" "\w+" \{\n(.*?)^\}', path.read_text(), re.MULTILINE | re.DOTALL
        ):
            if kind in TAGGED:
                assert re.search(r"^  tags += (merge\(local\.tags|local\.tags$|var\.tags$)", body, re.MULTILINE), (
                    path,
                    kind,
                )


RECIPE = ROOT / "terraform" / "aws" / "image" / "node.pkr.hcl"


def test_the_recipe_of_an_image_is_in_the_language_of_packer_and_in_its_form() -> None:
    """It is Terraform's, which says where something does not belong; what Packer's plugins take, only they know."""
    if shutil.which("terraform") is None:
        lacking("terraform", "terraform is not installed")
    text = RECIPE.read_text()
    done = subprocess.run(["terraform", "fmt", "-"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, text), done.stderr


@pytest.mark.sample
def test_an_image_is_prepared_with_the_words_that_a_node_will_be_told() -> None:
    given = set(re.findall(r"^      ((?:HARNESS|AWS)_\w+) +=", RECIPE.read_text(), re.MULTILINE))
    (read,) = re.findall(r"^for name in (.*); do$", RECIPE.with_name("bake.sh").read_text(), re.MULTILINE)
    told = (ROOT / "terraform" / "aws" / "user-data.tf").read_text()

    assert given == set(read.split())
    assert all(re.search(rf"^    {name} +=", told, re.MULTILINE) for name in given)
    assert set(re.findall(r"var\.(\w+)", RECIPE.read_text())) == set(
        re.findall(r'^variable "(\w+)"', RECIPE.read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize("example", sorted(p.name for p in (ROOT / "terraform" / "examples").iterdir()))
def test_each_example_is_valid(example: str, tmp_path: Path) -> None:
    try:
        said = terraform(initialised(tmp_path, f"terraform/examples/{example}"), "validate", "-no-color").stdout
    except Unavailable as why:
        lacking("terraform", str(why))

    assert said.rstrip().endswith("Success! The configuration is valid."), said


MADE_HERE = {"run", "run_named", "store", "metadata", "s3_endpoint", "runtime_dir"}
ONLY_ONCE = {"fresh", "continue_", "from_"}  # of a start by hand
OF_RESUME = {"self_test"}


@pytest.mark.sample
def test_the_plan_knows_every_setting_by_its_name() -> None:
    text = (ROOT / "terraform" / "aws" / "variables-run.tf").read_text()
    (named,) = re.findall(r"setting_names = \[(.*?)\]", text, re.DOTALL)

    fields = {field.name for field in dataclasses.fields(Settings)}
    assert set(re.findall(r'"(\w+)"', named)) == fields - MADE_HERE - ONLY_ONCE | OF_RESUME


# AWS patches a line of its Deep Learning AMIs until a year after the release of its PyTorch (the table "DLAMI support
# policy"). Images of PyTorch 2.13 were there in August 2026; 2.10 was released on 2026-01-21, and a release takes two
# months or more: so 2.13 is patched until July 2027 at least. Look the table up, and newer lines, when this fails.
LINE, PATCHED_UNTIL = "pytorch-2.13-ubuntu-26.04", datetime.date(2027, 7, 1)
IN_ADVANCE = datetime.timedelta(days=120)


@pytest.mark.sample
def test_the_default_image_is_of_a_line_that_is_patched_for_months_to_come() -> None:
    text = (ROOT / "terraform" / "aws" / "variables-fleet.tf").read_text()

    assert f"oss-nvidia-driver-gpu-{LINE}/latest/ami-id" in text
    today = datetime.datetime.now(datetime.UTC).date()
    assert today < PATCHED_UNTIL - IN_ADVANCE, "time for a newer line of images: see the comment above this test"
