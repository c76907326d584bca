"""The command line in this process: words, exit codes, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from cloud.aws import firmware
from cloud.errors import Denied
from cloud.testing.memory import MemoryStore
from harness import __version__
from harness.cli import app, output
from harness.config.settings import OPTIONS
from harness.core.manifest import FORMAT, Claim
from harness.core.snapshot import SnapshotId
from harness.inspect import ls, status, tiers
from harness.node.signals import PASSED_ON
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.patience import HANG_S
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content
from tests.support.stores import FaultyStore

ROOT = Path(__file__).parents[3]


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`harness ARGUMENTS` in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["harness", *arguments])
        try:
            app.main()
            code = 0
        except SystemExit as leave:
            code = int(leave.code or 0)
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A run with two snapshots."""
    opened = open_store(str(tmp_path / ".harness"))
    claim = Claim(format=FORMAT, run_id=RUN_ID, generation=1, nonce="a" * 16, claimed_at="", host="here", pid=1,
                  fresh=False, parent=None, command=("python", "train.py"), named=True)  # fmt: skip
    commit.claim(opened, KEYS, claim, FOREVER)
    for step in (10, 20):
        commit.publish(opened, KEYS, Content(SnapshotId(1, step)).staged(), "remote", FOREVER, lambda event: None)
    return tmp_path / ".harness"


def is_one_line_of_usage(done: Done, *words: str) -> None:
    assert done.code == 64, done
    assert done.out == ""
    lines = [
        line for line in done.err.strip().splitlines() if not line.startswith("harness: run '")
    ]  # what was asked for
    assert len(lines) == 1, done.err
    assert lines[0].startswith("harness: error: ")
    for word in words:
        assert word in lines[0]


def commands() -> list[list[str]]:
    top = typer.main.get_command(app.app)
    found = [[name] for name in top.commands]  # type: ignore[attr-defined]
    for group in ("fleet", "metadata-sim"):
        found += [[group, name] for name in top.commands[group].commands]  # type: ignore[attr-defined]
    return found


# ---- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_the_help_of_every_command_shows_an_example(harness: Run, command: list[str]) -> None:
    done = harness(*command, "--help")

    assert done.code == 0
    assert f"harness {' '.join(command)}" in done.out.split("Example", 1)[1]


def test_the_help_of_a_command_lists_every_option_whole(harness: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    done = harness("run", "--help")

    for option in OPTIONS.values():
        assert re.search(rf"{option.flag} +<{option.kind.__name__}> +{re.escape(option.help)} ", done.out), option


def test_the_version_is_printed(harness: Run) -> None:
    assert harness("--version") == (0, f"harness {__version__}\n", "")


def test_no_command_shows_help_and_is_no_success(harness: Run) -> None:
    done = harness()

    assert (done.code, done.err) == (64, "")
    assert "Usage: harness" in done.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(harness: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_HARNESS_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "harness ver")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("COMP_WORDS", "harness ver")
    monkeypatch.setenv("COMP_CWORD", "1")

    assert "verify" in harness().out


def test_help_names_every_command(harness: Run) -> None:
    done = harness("--help")

    for command in commands():
        assert command[0] in done.out


# ---- what cannot be -------------------------------------------------------------------------------------------------


def test_a_script_that_is_not_there(harness: Run, tmp_path: Path) -> None:
    is_one_line_of_usage(harness("run", "--", "python", "nowhere.py"), "nowhere.py", "no such script", str(tmp_path))


def test_doctor_takes_what_run_takes() -> None:
    run, doctor = ({option.name for option in typer.main.get_command(app.app).commands[name].params}  # type: ignore[attr-defined]
                   for name in ("run", "doctor"))  # fmt: skip

    assert run - doctor == {"fresh", "continue_"}


def test_nothing_to_run(harness: Run) -> None:
    is_one_line_of_usage(harness("run"), "nothing to run", "python train.py")


def test_one_of_several_processes_is_refused(harness: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    script = tmp_path / "train.py"
    script.touch()
    is_one_line_of_usage(harness("run", "--", "python", str(script)), "WORLD_SIZE is 2")


def test_a_module_has_no_name_to_guess(harness: Run) -> None:
    is_one_line_of_usage(harness("run", "--", "python", "-m", "mine"), "--run NAME")


def test_a_name_that_cannot_be(harness: Run) -> None:
    is_one_line_of_usage(harness("run", "--run", "a/b", "--", "python", "-m", "mine"), "a/b")


@pytest.mark.parametrize(
    "arguments", [("--every-s", "0"), ("--every-s", "soon"), ("--keep-last", "0"), ("--slots", "99")]
)
def test_a_number_that_cannot_be(harness: Run, arguments: tuple[str, ...]) -> None:
    is_one_line_of_usage(harness("run", *arguments, "--run", "x", "--", "python", "-m", "mine"))


@pytest.mark.parametrize(
    "arguments",
    [("ls", "--nonsense"), ("nonsense",), ("rm",), ("metadata-sim", "nonsense"), ("status", "--run")],
    ids=" ".join,
)
def test_a_word_that_there_is_not(harness: Run, arguments: tuple[str, ...]) -> None:
    is_one_line_of_usage(harness(*arguments))


def test_a_bad_option_before_the_command(harness: Run) -> None:
    is_one_line_of_usage(harness("run", "--shop", "x", "--", "python", "-m", "mine"), "--shop")


def test_a_bad_configuration_file(harness: Run, tmp_path: Path) -> None:
    (tmp_path / "harness.toml").write_text('shop = "x"\n')

    is_one_line_of_usage(harness("status", "--run", "run"), "shop")


def test_an_empty_name_of_a_store_is_no_store(harness: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--store "$UNSET"` was the current directory, and `rm ALL` deleted there."""
    is_one_line_of_usage(harness("rm", "ALL", "--run", "run", "--store", "", "--yes"), "is a variable unset?")
    monkeypatch.setenv("HARNESS_STORE", "")
    is_one_line_of_usage(harness("ls", "--run", "run"), "is a variable unset?")


@pytest.mark.parametrize("program", ["./no-such-program", "no-such-program", ".", "./train.py"])
def test_a_program_that_cannot_be_executed_asks_for_no_run(harness: Run, tmp_path: Path, program: str) -> None:
    """A host with a slip of the pen ended the training of another host, and trained nothing itself."""
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()

    is_one_line_of_usage(harness("run", "--run", "run", "--metadata", "off", "--", program), program)
    assert not (tmp_path / ".harness").exists()


def test_a_directory_that_is_gone_is_told(harness: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    is_one_line_of_usage(harness("ls", "--run", "run", "--store", str(tmp_path)), "the current directory")


def test_output_that_nobody_takes_is_told(store: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness", "ls", "--run", "run"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )

    assert done.returncode == 64
    assert done.stderr == "harness: error: the output could not be written: No space left on device\n"


def test_a_port_that_is_taken_is_told(harness: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_one_line_of_usage(harness("metadata-sim", "start", "--port", str(server.getsockname()[1])), "port")
    is_one_line_of_usage(harness("metadata-sim", "start", "--port", "99999"), "port")


@pytest.mark.parametrize(
    "store", ["/proc/nowhere/store", "file/below/a/file", "gs://bucket", "s3://Not_A_Bucket/x", "~nobody-has-this/x"]
)
def test_a_store_that_cannot_be_used(harness: Run, tmp_path: Path, store: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "train.py").write_text("")

    is_one_line_of_usage(harness("run", "--store", store, "--metadata", "off", "--", sys.executable, "train.py"))
    looked = harness("ls", "--store", store, "--run", "run")
    assert looked.code in (0, 64)  # a store that nobody has made yet is an empty one
    assert len(looked.err.strip().splitlines()) == 1


def test_s3_without_credentials_is_told_with_the_remedy(
    harness: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))

    done = harness("run", "--store", "s3://bucket/x", "--metadata", "off", "--", sys.executable, "train.py")

    assert done.code == 64
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("harness: error: the store s3://bucket/x cannot be used: ")
    assert "AWS_PROFILE" in last


@pytest.mark.parametrize("directory", ["/proc/nowhere", "/tmp/" + "x" * 100])
def test_a_runtime_directory_that_cannot_be_used(
    harness: Run, monkeypatch: pytest.MonkeyPatch, store: Path, directory: str
) -> None:
    monkeypatch.setenv("HARNESS_RUNTIME_DIR", directory)

    done = harness("status", "--run", "run")

    if done.code != 0:  # a path at which nobody can listen may as well be one at which nobody listens
        is_one_line_of_usage(done)


@pytest.mark.parametrize("command", ["status", "ls", "verify"])
def test_a_store_that_may_not_even_be_looked_at_is_an_error_and_no_traceback(
    harness: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A directory on the way to it is another user's; one with too long a name says the same to everybody."""
    monkeypatch.setenv("HARNESS_STORE", "/tmp/" + "x" * 300)

    is_one_line_of_usage(harness(command, "--run", "run"), "cannot be used", "File name too long")


def test_a_store_that_refuses_is_an_error_and_no_traceback(harness: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = FaultyStore(MemoryStore(), "list", fail_on=None, error=Denied("permission denied: /mnt/store"))
    for module in (status, tiers):
        monkeypatch.setattr(module, "open_existing_store", lambda location, settings: denied)
    for command in ("status", "ls", "verify"):
        done = harness(command, "--run", "run")

        assert done.code == 64
        assert done.err.strip().splitlines() == ["harness: error: permission denied: /mnt/store"]


def test_who_may_not_list_all_runs_is_told_to_name_one(harness: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = FaultyStore(MemoryStore(), "list", fail_on=None, error=Denied("allow s3:ListBucket"))
    monkeypatch.setattr(ls, "open_existing_store", lambda location, settings: denied)

    is_one_line_of_usage(harness("verify"), "name a run with --run", "allow s3:ListBucket")


def test_who_waits_hears_a_word(harness: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = threading.Event()
    say = output.say
    monkeypatch.setattr(output, "_SILENCE_S", 0.0)
    monkeypatch.setattr(output, "say", lambda text: (say(text), said.set()))
    found = status.status
    monkeypatch.setattr(status, "status", lambda settings: found(settings) if said.wait(HANG_S) else {})

    done = harness("status", "--run", "run")

    assert done.err == "harness: still at work on the store …\n"
    assert "step 20 is durable" in done.out


def test_a_finished_run_is_not_run_again(store: Path, tmp_path: Path) -> None:
    commit.end(open_store(str(store)), KEYS, 1, "a" * 16, "finished", 20, FOREVER)
    (tmp_path / "train.py").write_text("print('it runs')")
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        "--run",
        "run",
        "--metadata",
        "off",
        "--",
        sys.executable,
        "train.py",
    ]

    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout) == (64, "")
    *told, last = done.stderr.strip().splitlines()
    assert last.startswith("harness: error: run 'run' finished at step 20: --fresh")
    assert all(line.startswith("harness: ") for line in told)


@pytest.mark.parametrize("command", ["status", "verify"])
def test_a_run_that_there_is_not(harness: Run, store: Path, command: str) -> None:
    is_one_line_of_usage(harness(command, "--run", "nowhere"), "nowhere")


def test_a_simulator_that_does_not_answer(harness: Run) -> None:
    is_one_line_of_usage(harness("metadata-sim", "notice", "--port", "1"), "metadata-sim start --port 1")


# ---- what can be ----------------------------------------------------------------------------------------------------


def test_ls_names_runs_and_snapshots(harness: Run, store: Path) -> None:
    assert json.loads(harness("ls", "--json").out) == ["run"]
    assert "00000001-000000000020" in harness("ls", "--run", "run").out
    rows = json.loads(harness("ls", "--run", "run", "--json").out)
    assert [(row["snapshot"], row["unusable"]) for row in rows] == [
        ("00000001-000000000010", None),
        ("00000001-000000000020", None),
    ]


def test_a_snapshot_is_one_line_in_a_pipe_and_in_eighty_columns(
    harness: Run, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit.quarantine(open_store(str(store)), KEYS, SnapshotId(1, 10), "rotten " * 30, "here", FOREVER)
    first, second = harness("ls", "--run", "run").out.splitlines()[1:]
    assert first.split()[0] == "00000001-000000000010"
    assert first.count("rotten") == 30

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for a terminal
    monkeypatch.setenv("COLUMNS", "80")
    folded = harness("ls", "--run", "run").out.splitlines()[1:]
    assert folded[-1].rstrip() == second.rstrip()
    assert all(len(line) <= 80 for line in folded)


def test_what_a_store_says_moves_no_cursor(
    harness: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reason, a host and a command are anybody's words who may write to the store; to rich they were markup too."""
    harmful, shown = "\x1b]0;mine\x07\x1b[2J[red]me[/red]", r"\x1b]0;mine\x07\x1b[2J[red]me[/red]"
    opened = open_store(str(store))
    commit.quarantine(opened, KEYS, SnapshotId(1, 10), harmful, harmful, FOREVER)
    claim = Claim(format=FORMAT, run_id=RUN_ID, generation=2, nonce="b" * 16, claimed_at="", host=harmful, pid=1,
                  fresh=False, parent=None, command=(harmful,), named=True)  # fmt: skip
    commit.claim(opened, KEYS, claim, FOREVER)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for a terminal
    monkeypatch.setenv("COLUMNS", "400")

    (tmp_path / "train.py").write_text("")
    program = ("--metadata", "off", "--", sys.executable, "train.py")
    for command in (("ls",), ("status",), ("verify",), ("resume", "--dry-run"), ("doctor",), ("rm", "ALL", "--yes")):
        done = harness(*command, "--run", "run", *(program if command[0] in ("resume", "doctor") else ()))
        assert "\x07" not in done.out + done.err
        assert "\x1b]" not in done.out + done.err
        assert "\x1b[2J" not in done.out + done.err
        if command in (("ls",), ("resume", "--dry-run")):
            assert shown in done.out


def test_ls_of_nothing_says_so(harness: Run, store: Path) -> None:
    done = harness("ls", "--run", "another")

    assert (done.code, done.out, done.err) == (0, "", "harness: nothing there\n")


def test_looking_at_a_store_that_there_is_not_makes_none(harness: Run, tmp_path: Path) -> None:
    done = harness("ls", "--run", "run")

    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_status_is_data_on_stdout(harness: Run, store: Path) -> None:
    found = json.loads(harness("status", "--run", "run", "--json").out)

    assert (found["durable_step"], found["generation"], found["state"]) == (20, 1, "not running here")
    assert "safe   step 20 is durable" in harness("status", "--run", "run").out


def test_status_says_whether_there_is_a_fleet(harness: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_METADATA", "off")

    found = json.loads(harness("status", "--run", "run", "--json").out)

    why = "the metadata service is turned off"
    assert found["fleet"] == {"group": None, "desired": None, "instances": None, "why": why}
    assert "fleet" not in harness("status", "--run", "run").out
    monkeypatch.setattr(firmware, "is_ec2", lambda: True)
    assert f"none ({why})" in harness("status", "--run", "run").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--run", "run"), "nothing to run"),
        (("--run", "run", "--json", "--", "true"), "--json needs --dry-run"),
        (("--dry-run", "--", "true"), "no name: pass --run"),
        (("--run", "run", "--command", "x", "--", "true"), "given twice"),
        (("--run", "run", "--self-test", "'", "--", "true"), "self-test cannot be read"),
    ],
)
def test_a_resume_that_cannot_be_is_refused_before_anything_starts(
    harness: Run, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    before = {signum: signal.getsignal(signum) for signum in PASSED_ON}
    try:
        done = harness("resume", "--metadata", "off", *arguments)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    assert (done.code, done.out) == (64, "")
    assert message in done.err
    assert not list(tmp_path.iterdir())


def test_verify_exits_70_if_one_byte_differs(harness: Run, store: Path) -> None:
    assert harness("verify", "--run", "run").code == 0
    path = next((store / "run" / "snapshots").glob("*/*.00.safetensors"))
    path.write_bytes(b"x" + path.read_bytes()[1:])

    assert harness("verify", "--run", "run").code == 70


def test_rm_deletes_when_it_is_told_yes(harness: Run, store: Path) -> None:
    done = harness("rm", "00000001-000000000010", "--run", "run", "--yes")

    assert (done.code, done.err) == (0, "harness: deleted 00000001-000000000010 from remote\n")
    assert len(json.loads(harness("ls", "--run", "run", "--json").out)) == 1


def test_rm_of_what_is_not_there(harness: Run, store: Path) -> None:
    is_one_line_of_usage(harness("rm", "00000009-000000000010", "--run", "run", "--yes"), "harness ls --run run")
