"""The run's code reaches the node whole or not at all, once, and nothing of it lands elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.node.machine import Machine, tar, zipped
from tests.support.needs import lacking
from tests.support.s3_server import S3Server

KEY = "sources/gpt/code.tar.gz"
URL = f"s3://bucket/{KEY}"


@pytest.fixture
def store(machine: Machine) -> Iterator[S3Server]:
    """The machine's S3."""
    with S3Server() as server:
        machine.settings |= {"HARNESS_SOURCE": URL, "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"}
        machine.environment |= {
            "AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        yield server


def put(store: S3Server, content: bytes) -> None:
    """Store an archive that a machine can unpack, or skip the test: it has this Python, or a new environment of it."""
    if not hasattr(tarfile, "data_filter"):
        lacking("safe-tarfile")
    store_archive(store, content)


def store_archive(store: S3Server, content: bytes) -> None:
    client = boto3.client(
        "s3", endpoint_url=store.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    client.put_object(Bucket="bucket", Key=KEY, Body=content)
    store.forget_calls()


def test_an_archive_is_unpacked_and_fetched_again_only_when_it_is_another(machine: Machine, store: S3Server) -> None:
    put(store, tar(("train.py", b"first"), ("data/words.txt", b"a b")))

    first = machine.prepare("source")
    second = machine.prepare("source")

    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert (machine.current / "train.py").read_text() == "first"
    assert [call.status for call in store.calls()] == [200, 304]

    put(store, tar(("train.py", b"second"), ("data/words.txt", b"a b")))
    assert machine.prepare("source").returncode == 0
    assert (machine.current / "train.py").read_text() == "second"


def test_the_single_folder_at_the_top_of_an_archive_is_entered(machine: Machine, store: S3Server) -> None:
    put(store, tar(("my project/train.py", b"here"), ("my project/.hidden", b"")))

    assert machine.prepare("source").returncode == 0
    assert (machine.current / "train.py").read_text() == "here"


def test_a_zip_is_unpacked_too(machine: Machine, store: S3Server) -> None:
    put(store, zipped(("train.py", b"here"), ("lib/a.py", b"")))

    assert machine.prepare("source").returncode == 0
    assert (machine.current / "train.py").read_text() == "here"


def test_what_is_executable_in_a_zip_is_executable_on_the_node(machine: Machine, store: S3Server) -> None:
    script = zipfile.ZipInfo("run.sh")
    script.external_attr = 0o100755 << 16
    put(store, zipped((script, b"#!/bin/sh\n"), ("train.py", b"")))

    assert machine.prepare("source").returncode == 0
    assert os.access(machine.current / "run.sh", os.X_OK)
    assert not os.access(machine.current / "train.py", os.X_OK)


def test_no_source_is_an_empty_folder(machine: Machine) -> None:
    assert machine.prepare("source").returncode == 0
    assert list(machine.current.iterdir()) == []


def test_without_a_source_a_folder_that_the_program_makes_is_not_entered_at_the_next_boot(machine: Machine) -> None:
    machine.prepare("source")
    (machine.current / "outputs").mkdir()
    machine.prepare("source")

    assert [path.name for path in machine.current.iterdir()] == ["outputs"]


def test_an_absent_archive_is_an_error_that_names_the_variable(machine: Machine, store: S3Server) -> None:
    done = machine.prepare("source")

    assert done.returncode == 64
    assert f"source_archive: {URL} is not there" in done.stdout
    assert not machine.current.exists()


def test_a_role_without_permission_is_an_error_that_names_it(machine: Machine, store: S3Server) -> None:
    put(store, tar(("train.py", b"")))
    store.deny("s3:GetObject", "")

    done = machine.prepare("source")

    assert done.returncode == 64
    assert "source_archive: the instance's role may not read" in done.stdout
    assert "s3:GetObject" in done.stdout


def test_a_store_out_of_reach_stops_only_an_instance_without_the_code(machine: Machine, store: S3Server) -> None:
    put(store, tar(("train.py", b"here"), ("b", b"")))
    store.down()
    without = machine.prepare("source")
    store.up()
    machine.prepare("source")
    store.down()
    with_code = machine.prepare("source")

    assert without.returncode == 70
    assert with_code.returncode == 0
    assert "WARNING: source_archive: the earlier copy is used" in with_code.stdout
    assert (machine.current / "train.py").read_text() == "here"


def _member(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made, b""


def _zip_link() -> zipfile.ZipInfo:
    made = zipfile.ZipInfo("link")
    made.external_attr = 0o120777 << 16
    return made


@pytest.mark.parametrize(
    "archive",
    [
        tar(("good", b""), ("/absolute", b"x")),
        tar(("good", b""), ("../outside", b"x")),
        tar(("good", b""), ("a/../../outside", b"x")),
        tar(("good", b""), _member("link", tarfile.SYMTYPE, "/etc"), ("link/outside", b"x")),
        tar(("good", b""), _member("link", tarfile.SYMTYPE, "../.."), ("link/outside", b"x")),
        tar(("good", b""), _member("link", tarfile.LNKTYPE, "../../node.env")),
        tar(("good", b""), _member("device", tarfile.BLKTYPE)),
        tar(("good", b""), _member("pipe", tarfile.FIFOTYPE)),
        zipped(("good", b""), ("/absolute", b"x")),
        zipped(("good", b""), ("../outside", b"x")),
        zipped(("good", b""), (_zip_link(), b"/etc")),
        tar(("good", os.urandom(100_000)))[:50_000],
        b"no archive",
        b"",
    ],
    ids=[
        "absolute", "dots", "inner dots", "link", "relative link", "hard link", "device", "pipe", "absolute in zip",
        "dots in zip", "link in zip", "truncated", "no archive", "empty",
    ],
)  # fmt: skip
def test_a_hostile_or_damaged_archive_is_refused_and_leaves_nothing(
    machine: Machine, store: S3Server, archive: bytes
) -> None:
    put(store, archive)
    before = {path for path in machine.root.rglob("*") if "/source" not in str(path)}

    done = machine.prepare("source")

    assert done.returncode == 64, done.stdout
    assert f"source_archive: {URL} is refused: " in done.stdout
    assert "Traceback" not in done.stdout
    assert not machine.current.exists()
    assert {path.name for path in machine.current.parent.iterdir()} <= {".lock", ".work", "none"}
    after = {path for path in machine.root.rglob("*") if "/source" not in str(path)}
    assert {path.name for path in after - before} <= {"etc", "harness", "node.env", "var", "log"}


def test_an_instance_whose_pythons_unpack_what_they_are_given_refuses_archives(
    machine: Machine, store: S3Server
) -> None:
    store_archive(store, tar(("train.py", b"here"), ("b", b"")))
    older = machine.root / "older"
    older.mkdir()
    (older / "sitecustomize.py").write_text("import tarfile; vars(tarfile).pop('data_filter', None)\n")
    machine.environment["PYTHONPATH"] = str(older)

    done = machine.prepare("source")

    assert done.returncode == 64
    assert "python: none here unpacks safely (3.11.4 or newer)" in done.stdout
    assert not machine.current.exists()


def test_a_start_that_is_killed_while_unpacking_leaves_nothing_half_done(machine: Machine, store: S3Server) -> None:
    put(store, tar(("train.py", b"here"), ("b", b"")))
    machine.replace_program("sync", "kill -9 0")  # between unpacking and renaming

    machine.prepare("source", killed=True)
    assert not machine.current.exists()
    machine.no_longer_replaced()

    assert machine.prepare("source").returncode == 0
    assert (machine.current / "train.py").read_text() == "here"


def test_without_boto3_the_command_line_client_fetches_it(machine: Machine, store: S3Server) -> None:
    if shutil.which("aws") is None:
        lacking("aws-cli")
    put(store, tar(("train.py", b"here"), ("b", b"")))
    del machine.settings["HARNESS_PYTHON"]
    machine.replace_program("python3", f'exec {sys.executable} -I -S "$@"')

    first = machine.prepare("source")
    second = machine.prepare("source")

    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert (machine.current / "train.py").read_text() == "here"
    assert [call.status for call in store.calls()] == [200, 304]


def test_details_that_the_command_line_client_adds_do_not_hide_what_is_wrong(machine: Machine) -> None:
    machine.settings |= {"HARNESS_SOURCE": URL, "HARNESS_PYTHON": ""}
    machine.replace_program("python3", f'exec {sys.executable} -I -S "$@"')
    error = "aws: [ERROR]: An error occurred (NoSuchBucket) when calling the GetObject operation: It does not exist"
    details = "Additional error details:\nBucketName: bucket"
    machine.replace_program("aws", f"printf '\\n%s\\n\\n%s\\n' '{error}' '{details}' >&2; exit 254")

    done = machine.prepare("source")

    assert done.returncode == 64
    assert f"source_archive: {URL} is not there ({error})" in done.stdout


def test_where_no_client_can_be_had_any_more_the_code_that_is_here_is_used(machine: Machine, store: S3Server) -> None:
    put(store, tar(("train.py", b"here"), ("b", b"")))
    machine.prepare("source")
    machine.settings["HARNESS_PYTHON"] = ""
    machine.without("aws")
    machine.replace_program("python3", f'test "$2" != venv || exit 1; exec {sys.executable} -I -S "$@"')

    done = machine.prepare("source")

    assert done.returncode == 0, done.stdout
    assert "boto3 cannot be installed" in done.stdout
    assert "WARNING: source_archive: the earlier copy is used" in done.stdout
    assert (machine.current / "train.py").read_text() == "here"


def test_another_kind_of_address_is_refused(machine: Machine) -> None:
    machine.settings["HARNESS_SOURCE"] = "https://example.com/code.tar.gz"

    done = machine.prepare("source")

    assert done.returncode == 64
    assert "source_archive: 'https://example.com/code.tar.gz' is neither s3://bucket/key nor git+https" in done.stdout


@pytest.mark.parametrize("ref", ["", "@v1", "@main"])
def test_a_repository_is_checked_out_at_its_ref(machine: Machine, tmp_path: Path, ref: str) -> None:
    commits = _repository(tmp_path / "repository")
    machine.settings["HARNESS_SOURCE"] = f"git+file://{tmp_path}/repository{ref}"

    first = machine.prepare("source")
    second = machine.prepare("source")

    wanted = 0 if ref == "@v1" else 1
    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert (machine.current / "train.py").read_text() == str(wanted)
    assert machine.current.resolve().name == commits[wanted]


def test_a_submodule_at_a_relative_address_is_fetched_from_beside_the_repository(
    machine: Machine, tmp_path: Path
) -> None:
    _repository(tmp_path / "library")
    _repository(tmp_path / "repository")
    git = ["git", "-C", str(tmp_path / "repository"), "-c", "user.name=a", "-c", "user.email=a@b"]
    git += ["-c", "protocol.file.allow=always"]
    add = [*git, "submodule", "--quiet", "add", str(tmp_path / "library"), "library"]
    subprocess.run(add, check=True, capture_output=True)
    subprocess.run([*git, "config", "-f", ".gitmodules", "submodule.library.url", "../library"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--all", "--message", "with a library"], check=True)
    machine.settings["HARNESS_SOURCE"] = f"git+file://{tmp_path}/repository"
    machine.environment |= {
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always",
    }  # fmt: skip

    done = machine.prepare("source")

    assert done.returncode == 0, done.stdout
    assert (machine.current / "library/train.py").read_text() == "1"


def test_a_ref_that_is_not_there_is_an_error_that_names_both(machine: Machine, tmp_path: Path) -> None:
    _repository(tmp_path / "repository")
    machine.settings["HARNESS_SOURCE"] = f"git+file://{tmp_path}/repository@gone"

    done = machine.prepare("source")

    assert done.returncode == 70
    assert f"source_archive: file://{tmp_path}/repository has no gone" in done.stdout
    assert not machine.current.exists()


# ------------------------------------------------------------------------------------------------ node.env, by the way


@pytest.mark.parametrize("line", ['A="$(touch pwned)"', "A=`touch pwned`", 'A="two\nlines"', "A='b'", "touch pwned"])
def test_settings_that_a_shell_would_run_are_refused_and_not_run(machine: Machine, tmp_path: Path, line: str) -> None:
    machine.write_settings()
    settings = machine.root / "etc/harness/node.env"
    hostile = settings.read_text() + line.replace("pwned", str(tmp_path / "pwned")) + "\n"
    machine.write_settings = lambda: settings.write_text(hostile)  # type: ignore[method-assign, assignment]

    done = machine.prepare("source")

    assert done.returncode == 64
    assert f"{settings}, line 3: is not NAME=" in done.stdout
    assert not (tmp_path / "pwned").exists()


def test_a_missing_name_of_the_run_is_an_error_that_names_the_variable(machine: Machine) -> None:
    machine.settings["HARNESS_RUN"] = ""

    done = machine.prepare("source")

    assert done.returncode == 64
    assert "run: HARNESS_RUN is missing" in done.stdout


def test_without_arguments_a_failure_sets_the_group_to_zero(machine: Machine, store: S3Server) -> None:
    machine.settings |= {"HARNESS_GROUP": "trainers", "HARNESS_TOPIC": "arn:aws:sns:us-east-1:123456789012:harness"}

    done = machine.prepare()

    assert done.returncode == 64
    assert (machine.root / "var/log/harness/bootstrap.log").read_text().count("is not there") >= 1
    assert "could not be set to zero" in done.stdout or "cannot notify" in done.stdout  # S3 is neither of the two
    assert len([call for call in store.calls() if call.operation == "GetObject"]) == 1


def _repository(directory: Path) -> list[str]:
    """Two commits, the first of them tagged v1."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    directory.mkdir()
    git("init", "--quiet", "--initial-branch", "main")
    commits = []
    for number in range(2):
        (directory / "train.py").write_text(str(number))
        git("add", ".")
        git("commit", "--quiet", "--message", "change")
        commits.append(git("rev-parse", "HEAD"))
        if number == 0:
            git("tag", "--annotate", "--message", "one", "v1")
    return commits
