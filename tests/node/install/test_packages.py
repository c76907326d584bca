"""The same software on every node: what the first one resolved, or what was packed with the code."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.node.machine import ROOT, Machine, wheel
from tests.support.s3_server import S3Server

HARNESS = wheel("harness", __main__="", requires="library")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def store() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """What pip finds: a folder of wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    publish(folder, "library", "1")
    return folder


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The run's repository, with a wheel of the harness that needs `library`."""
    folder = tmp_path / "code"
    (folder / "wheels").mkdir(parents=True)
    (folder / "train.py").touch()
    (folder / "wheels/harness-1-py3-none-any.whl").write_bytes(HARNESS)
    subprocess.run(["git", "init", "--quiet", "--initial-branch=main", str(folder)], check=True)
    return folder


@pytest.fixture
def nodes(tmp_path: Path, store: S3Server, index: Path, code: Path, image_python: str) -> Iterator[list[Machine]]:
    """Two instances of one fleet."""
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        machine = Machine(tmp_path / name)
        machine.settings |= {
            "HARNESS_PYTHON": image_python, "HARNESS_STORE": "s3://bucket/checkpoints",
            "HARNESS_SOURCE": f"git+file://{code}@main",
            "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        machine.environment |= {
            "AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true", "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": "/dev/null",
        }  # fmt: skip
        made.append(machine)
    yield made
    for machine in made:
        machine.close()


def publish(index: Path, name: str, version: str) -> Path:
    path = index / f"{name}-{version}-py3-none-any.whl"
    path.write_bytes(wheel(name, version=version))
    return path


def commit(code: Path) -> None:
    git = ["git", "-C", str(code), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "change"], check=True)


def prepared(machine: Machine) -> str:
    done = machine.prepare("source", "environment")
    assert done.returncode == 0, done.stdout
    return done.stdout


def version_on(machine: Machine, name: str) -> str:
    line = f"import importlib.metadata as m; print(m.version({name!r}))"
    python = machine.local_env()["HARNESS_PYTHON"]
    return subprocess.run([python, "-P", "-c", line], check=True, capture_output=True, text=True).stdout.strip()


def records(store: S3Server) -> dict[str, str]:
    """What the first node has left, by the beginning of its name."""
    s3 = boto3.client(
        "s3", endpoint_url=store.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    listed = s3.list_objects_v2(Bucket="bucket", Prefix="checkpoints/gpt/environment/").get("Contents", [])
    return {
        found["Key"].rpartition("/")[2].split(".")[0]: s3.get_object(Bucket="bucket", Key=found["Key"])["Body"]
        .read()
        .decode()
        for found in listed
    }


# ---- what the first node resolved -----------------------------------------------------------------------------------


@pytest.mark.sample
def test_a_later_node_installs_what_the_first_one_did_though_the_index_has_a_newer_one(
    nodes: list[Machine], store: S3Server, index: Path, code: Path
) -> None:
    (code / "requirements.txt").write_text("extra\n")
    extra = publish(index, "extra", "1")
    commit(code)

    prepared(nodes[0])
    publish(index, "library", "2")
    publish(index, "extra", "2")
    told = prepared(nodes[1])

    assert [version_on(node, name) for node in nodes for name in ("library", "extra")] == ["1"] * 4
    assert "packages: as in s3://bucket/checkpoints/gpt/environment/packages." in told
    lines = records(store)["packages"].splitlines()
    assert f"extra==1 --hash=sha256:{hashlib.sha256(extra.read_bytes()).hexdigest()}" in lines
    assert [line.split()[0] for line in lines] == ["extra==1", "library==1"]


def simple_index(folder: Path, name: str) -> str:
    """The address of an index with one package."""
    publish(folder, name, "1")
    (folder / name).mkdir()
    (folder / name / "index.html").write_text(f'<a href="../{name}-1-py3-none-any.whl">{name}-1-py3-none-any.whl</a>')
    return folder.as_uri()


@pytest.mark.parametrize("where", ["--index-url={0}", "--extra-index-url ${{INDEX_OF_MINE}}", "-i {0} --pre"])
def test_a_later_node_asks_the_indexes_that_the_requirements_name_and_no_record_has_their_addresses(
    nodes: list[Machine], store: S3Server, code: Path, tmp_path: Path, where: str
) -> None:
    (tmp_path / "private").mkdir()
    private = simple_index(tmp_path / "private", "special")
    (code / "requirements.txt").write_text(f"-r more.txt\n{where.format(private)}  # of mine\n")
    (code / "more.txt").write_text("special\n")
    commit(code)
    for node in nodes:
        node.environment |= {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": (tmp_path / "none").as_uri()}
        node.settings["INDEX_OF_MINE"] = private

    prepared(nodes[0])
    prepared(nodes[1])

    assert [version_on(node, "special") for node in nodes] == ["1", "1"]
    assert [line.split()[0] for line in records(store)["packages"].splitlines()] == ["library==1", "special==1"]


@pytest.mark.parametrize("folder", [".", "needs"])
def test_a_later_node_looks_in_the_folders_of_its_own_code(nodes: list[Machine], code: Path, folder: str) -> None:
    """A path is relative to the file that has it; the code may lie elsewhere on another node."""
    (code / folder / "mine").mkdir(parents=True)
    publish(code / folder / "mine", "special", "1")
    (code / "requirements.txt").write_text(f"-r {folder}/more.txt\n")
    (code / folder / "more.txt").write_text("special\n-f \\\n  mine\n")
    commit(code)

    prepared(nodes[0])
    prepared(nodes[1])

    assert version_on(nodes[1], "special") == "1"


def test_other_bytes_of_the_same_version_are_not_installed(nodes: list[Machine], index: Path, code: Path) -> None:
    commit(code)
    prepared(nodes[0])
    (index / "library-1-py3-none-any.whl").write_bytes(wheel("library", evil="print('hello')"))

    done = nodes[1].prepare("source", "environment")

    assert done.returncode == 70
    assert "pip cannot install what an earlier node of this run had" in done.stdout
    assert "delete that object" in done.stdout


def test_what_pip_knows_no_sum_of_is_installed_by_its_commit_or_from_the_archive(
    nodes: list[Machine], store: S3Server, code: Path, tmp_path: Path
) -> None:
    (code / "mine-1-py3-none-any.whl").write_bytes(wheel("mine"))
    (code / "requirements.txt").write_text("./mine-1-py3-none-any.whl\n")
    commit(code)

    prepared(nodes[0])
    prepared(nodes[1])

    assert "# also: ./mine-1-py3-none-any.whl" in records(store)["packages"].splitlines()
    assert version_on(nodes[1], "mine") == "1"


def test_new_requirements_are_resolved_anew(nodes: list[Machine], index: Path, code: Path) -> None:
    commit(code)
    prepared(nodes[0])
    publish(index, "library", "2")
    (code / "requirements.txt").write_text("library\n")
    commit(code)
    for node in nodes:
        node.settings["HARNESS_SOURCE"] = f"git+file://{code}"  # another address: new code was asked for

    prepared(nodes[1])

    assert version_on(nodes[1], "library") == "2"


def bring(code: Path, node: Machine) -> None:
    """Have new code reach the node, as a new archive or reference does."""
    commit(code)
    node.settings["HARNESS_SOURCE"] = f"git+file://{code}"


@pytest.mark.parametrize(
    "requirements",
    [
        "-r needs/base.txt\n",
        "--requirement=needs/all.txt\n",
        "tool\n-c needs/base.txt\n",
        "-c \\\n  ${NEEDS}/base.txt # pinned\ntool\n",
    ],
)
def test_new_requirements_behind_requirements_are_resolved_anew(
    nodes: list[Machine], index: Path, code: Path, requirements: str
) -> None:
    publish(index, "tool", "1")
    publish(index, "tool", "2")
    (code / "needs").mkdir()
    (code / "needs/all.txt").write_text("-rbase.txt\n")
    (code / "requirements.txt").write_text(requirements)
    (code / "needs/base.txt").write_text("tool==1\n")
    for node in nodes:
        node.settings["NEEDS"] = "needs"
    commit(code)
    prepared(nodes[0])
    (code / "needs/base.txt").write_text("tool==2\n")
    bring(code, nodes[1])

    prepared(nodes[1])

    assert version_on(nodes[1], "tool") == "2"


@pytest.mark.parametrize("line", ["./mine-1-py3-none-any.whl", "mine-1-py3-none-any.whl"])
def test_what_a_package_in_the_code_needs_is_resolved_anew_for_new_code(
    nodes: list[Machine], index: Path, code: Path, line: str
) -> None:
    publish(index, "tool", "1")
    publish(index, "tool", "2")
    mine = code / "mine-1-py3-none-any.whl"
    (code / "requirements.txt").write_text(line)
    mine.write_bytes(wheel("mine", requires="tool==1"))
    commit(code)
    prepared(nodes[0])
    mine.write_bytes(wheel("mine", requires="tool==2"))
    bring(code, nodes[1])

    prepared(nodes[1])

    assert version_on(nodes[1], "tool") == "2"


def test_new_wheels_in_a_folder_of_the_code_are_found(nodes: list[Machine], code: Path) -> None:
    (code / "mine").mkdir()
    (code / "requirements.txt").write_text("special\n-f mine\n")
    publish(code / "mine", "special", "1")
    commit(code)
    prepared(nodes[0])
    publish(code / "mine", "special", "2")
    bring(code, nodes[1])

    prepared(nodes[1])

    assert version_on(nodes[1], "special") == "2"


def test_a_setup_command_of_new_code_is_not_held_to_the_versions_of_the_old(
    nodes: list[Machine], index: Path, code: Path
) -> None:
    publish(index, "tool", "1")
    publish(index, "tool", "2")
    (code / "setup.sh").write_text("pip install --quiet -r needs.txt\n")
    (code / "needs.txt").write_text("tool==1\n")
    commit(code)
    for node in nodes:
        node.settings["HARNESS_SETUP"] = "bash setup.sh"
    prepared(nodes[0])
    (code / "needs.txt").write_text("tool==2\n")
    bring(code, nodes[1])

    prepared(nodes[1])

    assert version_on(nodes[1], "tool") == "2"


def test_new_code_with_the_same_requirements_keeps_the_packages(nodes: list[Machine], index: Path, code: Path) -> None:
    (code / "extra").mkdir()  # no path is meant: pip wants one to have a slash, or a dot at its beginning
    (code / "extra/__init__.py").touch()
    (code / "requirements.txt").write_text("extra\nother @ git+https://example.org/a/b ; python_version < '3'\n")
    publish(index, "extra", "1")
    commit(code)
    prepared(nodes[0])
    publish(index, "extra", "2")
    (code / "train.py").write_text("another program")
    bring(code, nodes[1])

    prepared(nodes[1])

    assert version_on(nodes[1], "extra") == "1"


def test_setup_command_is_held_to_the_versions_of_the_first_node(
    nodes: list[Machine], store: S3Server, index: Path, code: Path
) -> None:
    publish(index, "extra", "1")
    commit(code)
    for node in nodes:
        node.settings["HARNESS_SETUP"] = "pip install --quiet extra"

    prepared(nodes[0])
    publish(index, "extra", "2")
    prepared(nodes[1])

    assert version_on(nodes[1], "extra") == "1"
    assert "extra==1" in records(store)["setup"].splitlines()


def test_a_store_that_does_not_answer_is_no_reason_to_take_other_packages(
    nodes: list[Machine], store: S3Server, code: Path
) -> None:
    commit(code)
    nodes[0].settings["HARNESS_SOURCE"] = f"git+file://{code}@{head(code)}"
    store.fault("error", ("ListObjectsV2",), status=503, code="SlowDown", times=1)

    done = nodes[0].prepare("source", "environment")

    assert done.returncode == 70
    assert "cannot recall it" in done.stdout
    prepared(nodes[0])


# ---- the code -------------------------------------------------------------------------------------------------------


def head(code: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(code), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_branch_goes_on_and_the_run_does_not(nodes: list[Machine], store: S3Server, code: Path) -> None:
    commit(code)
    first = head(code)
    prepared(nodes[0])
    (code / "train.py").write_text("another program")
    commit(code)

    prepared(nodes[1])

    assert [(node.current / "train.py").read_text() for node in nodes] == ["", ""]
    assert records(store)["source"].strip() == first
    assert prepared(nodes[0]), "and a later boot of the first one"
    assert (nodes[0].current / "train.py").read_text() == ""


# ---- an image that has it all ---------------------------------------------------------------------------------------


def test_a_node_of_a_baked_image_has_nothing_to_prepare(
    nodes: list[Machine], index: Path, code: Path, tmp_path: Path
) -> None:
    commit(code)
    node = nodes[0]
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    scripts = [ROOT / "scripts" / name for name in ("bootstrap-node.sh", "resume.sh", "stop-fleet.sh")]
    for path in (*scripts, ROOT / "terraform/aws/image/bake.sh"):
        shutil.copy(path, recipe)
    told = {name: value for name, value in node.settings.items() if name != "AWS_DEFAULT_REGION"}
    baked = subprocess.run(
        ["bash", recipe / "bake.sh"],
        env=os.environ | node.environment | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert baked.returncode == 0, baked.stderr
    assert not list((node.root / "etc/harness").glob("*.env"))

    node.environment |= {"PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1"}  # nothing can be installed any more
    told_at_boot = prepared(node)

    assert "making" not in told_at_boot
    assert "packages:" not in told_at_boot
    assert version_on(node, "library") == "1"


# ---- wheels in the archive ------------------------------------------------------------------------------------------


def vendored(code: Path, *, python: str = HERE, tampered: bool = False) -> None:
    """As scripts/pack --vendor leaves them."""
    lines = [f"# python {python}", "# torch 2.13.0"]
    for name in ("harness", "library"):
        path = code / "wheels" / f"{name}-1-py3-none-any.whl"
        if name == "library":
            path.write_bytes(wheel(name))
        lines.append(f"{name}==1 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
        if tampered:
            path.write_bytes(path.read_bytes() + b"\n")
    (code / "wheels/requirements.lock").write_text("\n".join(lines) + "\n")


def test_packed_wheels_are_installed_and_no_index_is_asked(nodes: list[Machine], store: S3Server, code: Path) -> None:
    vendored(code)
    commit(code)
    nodes[0].environment |= {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}

    prepared(nodes[0])

    assert version_on(nodes[0], "library") == "1"
    assert set(records(store)) == {"source"}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            {"python": "3.99"},
            f"its wheels are for Python 3.99, and here is {HERE}: scripts/pack --vendor --python {HERE}",
        ),
        ({"tampered": True}, "its wheels cannot be installed here"),
    ],
)
def test_packed_wheels_that_are_wrong_are_refused(
    nodes: list[Machine], code: Path, how: dict[str, object], why: str
) -> None:
    vendored(code, **how)  # type: ignore[arg-type]
    commit(code)

    done = nodes[0].prepare("source", "environment")

    assert done.returncode == 64
    assert why in done.stdout


@pytest.mark.usefixtures("package_index")
@pytest.mark.long("pip fetches the harness's own needs")
def test_pack_finds_the_wheels_for_another_python_than_this_one(tmp_path: Path) -> None:
    project, archive = tmp_path / "project", tmp_path / "a.tar.gz"
    project.mkdir()
    (project / "train.py").touch()
    (project / "requirements.txt").write_text("six\n")
    other = "3.12" if HERE != "3.12" else "3.13"

    done = subprocess.run(
        [ROOT / "scripts/pack", "--vendor", "--python", other, project, archive],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    listed = subprocess.run(
        ["tar", "--list", "--file", archive], check=True, capture_output=True, text=True
    ).stdout.split()
    assert any(name.startswith("wheels/msgspec-") and f"cp{other.replace('.', '')}" in name for name in listed)
    assert any(name.startswith("wheels/six-") for name in listed)
    assert not any("torch" in name for name in listed), "the image has it"
    lock = subprocess.run(
        ["tar", "--extract", "--to-stdout", "--file", archive, "wheels/requirements.lock"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert lock[0] == f"# python {other}"
    assert len([line for line in lock if "--hash=sha256:" in line]) == len(
        [name for name in listed if name.endswith(".whl")]
    )
