"""What is to be run: options before environment before tags, and `harness run` resolves the very same."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import resolve
from harness.errors import ConfigError
from harness.node import fitness
from harness.node.fitness import choose_test, run_test
from harness.node.job import Job, Request, metadata_url, resolve_job
from harness.node.signals import Signals

TAGS = {"harness-run": "tagged", "harness-store": "s3://tagged/prefix", "harness-command": "python tagged.py"}


class Tags:
    """The tags of an instance, and which were asked for."""

    def __init__(self, tags: Mapping[str, str] = TAGS) -> None:
        self._tags, self.asked = tags, list[str]()

    def __call__(self, key: str) -> str | None:
        self.asked.append(key)
        return self._tags.get(key)


def job(
    cwd: Path,
    environ: Mapping[str, str],
    *words: str,
    line: str | None = None,
    tags: Mapping[str, str] = TAGS,
    **flags: Any,
) -> Job:
    return resolve_job(Request(flags, words, line, {"HOME": str(cwd), **environ}, cwd), Tags(tags))


def test_options_come_before_the_environment(tmp_path: Path) -> None:
    given = job(tmp_path, {"HARNESS_RUN": "b", "HARNESS_STORE": "/b"}, "x", run="a", store="/a")

    assert (given.settings.run, given.settings.store, given.command) == ("a", "/a", ("x",))


def test_the_environment_comes_before_tags(tmp_path: Path) -> None:
    environ = {"HARNESS_RUN": "b", "HARNESS_STORE": "/b", "HARNESS_COMMAND": "python 'my file.py'"}

    given = job(tmp_path, environ)

    assert (given.settings.run, given.settings.store) == ("b", "/b")
    assert given.command == ("python", "my file.py")


def test_tags_come_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "harness.toml").write_text('run = "filed"\nstore = "/filed"\nevery_s = 7.0\n')

    given = job(tmp_path, {})

    assert (given.settings.run, given.settings.store, given.settings.every_s) == ("tagged", "s3://tagged/prefix", 7.0)
    assert given.command == ("python", "tagged.py")


def test_the_file_comes_before_defaults(tmp_path: Path) -> None:
    (tmp_path / "harness.toml").write_text('store = "/filed"\n')

    given = job(tmp_path, {}, "train.py", tags={})

    assert (given.settings.run, given.settings.store) == ("train", "/filed")


def test_an_empty_variable_is_none(tmp_path: Path) -> None:
    given = job(tmp_path, {"HARNESS_RUN": "", "HARNESS_COMMAND": ""})

    assert (given.settings.run, given.command) == ("tagged", ("python", "tagged.py"))


def test_only_what_is_missing_is_asked_of_the_instance(tmp_path: Path) -> None:
    tags = Tags()

    resolve_job(Request({"run": "a"}, ("x",), None, {"HARNESS_STORE": "/b"}, tmp_path), tags)

    assert tags.asked == []


def test_what_is_missing_and_has_no_tag_has_its_default(tmp_path: Path) -> None:
    given = job(tmp_path, {}, "python", "train.py", tags={})

    assert (given.settings.run, given.settings.run_named) == ("train", False)
    assert given.settings.store == str(tmp_path / ".harness")


@pytest.mark.parametrize(
    ("words", "line", "message"),
    [
        ((), None, "nothing to run"),
        ((), "  ", "nothing to run"),
        (("x",), "y", "given twice"),
        ((), "python 'train.py", "cannot be read"),
    ],
)
def test_a_program_that_is_none_or_two_is_refused(
    tmp_path: Path, words: tuple[str, ...], line: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(tmp_path, {}, *words, line=line, tags={})


def test_a_run_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no name"):
        job(tmp_path, {}, "python", "-m", "train", tags={})


def test_harness_run_resolves_the_very_same_settings(tmp_path: Path) -> None:
    """Its own parser is the one that counts: everything that can be given is given, and read back."""
    import typer.main

    from harness.cli import app

    (tmp_path / "harness.toml").write_text("keep_every = 1000\n")
    flags = {
        "local": "l", "every_s": 0.1, "durable_every_s": 1e-3, "every_steps": 5, "keep_last": 2, "slots": 1,
        "grace_s": 12.5, "drain_file": "--odd", "handover_s": 1e6, "upload_bytes_s": 123456789.25, "metadata": "off",
        "s3_sse": "AES256", "max_crashes": None, "fresh": True,
    }  # fmt: skip
    request = Request(flags, ("python", "t.py", "--store", "x"), None, {"HARNESS_GRACE_S": "9"}, tmp_path)
    given = resolve_job(request, Tags())

    arguments = given.arguments(anew=True)
    run = typer.main.get_command(app.app).commands["run"]  # type: ignore[attr-defined]
    context = run.make_context("run", arguments[arguments.index("run") + 1 :])

    assert context.args == ["python", "t.py", "--store", "x"]
    assert resolve(context.params, given.environ, tmp_path, script="t.py") == given.settings
    assert given.settings.run == "tagged"


def test_the_child_is_this_interpreter_and_begins_anew_only_if_told(tmp_path: Path) -> None:
    given = job(tmp_path, {}, "x", fresh=True)

    assert given.arguments(anew=False) == [
        sys.executable, "-P", "-m", "harness", "run", "--", "x"
    ]  # fmt: skip
    assert "--fresh" in given.arguments(anew=True)


def test_a_run_goes_back_at_its_first_start_only(tmp_path: Path) -> None:
    given = job(tmp_path, {}, "x", from_="00000001-000000000020")

    assert "--from" not in given.arguments(anew=False)
    first = given.arguments(anew=True)
    assert first[first.index("--from") + 1] == "00000001-000000000020"
    assert given.anew


def test_the_metadata_service_is_known_before_the_run_and_without_valid_settings(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    (tmp_path / "harness.toml").write_text(f'metadata = "{url}"\n')
    assert metadata_url(Request({}, (), None, {}, tmp_path)) == url
    assert metadata_url(Request({"metadata": "off"}, (), None, {}, tmp_path)) == "off"

    environ = {"HARNESS_EVERY_S": "soon", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:2"}
    assert metadata_url(Request({}, (), None, environ, Path("/"))) == "http://127.0.0.1:2"


# ---- is this machine fit? -------------------------------------------------------------------------------------------


def test_the_self_test_is_the_option_then_the_environment_then_that_of_a_gpu(tmp_path: Path) -> None:
    none = tmp_path / "nvidia0"
    assert choose_test("a 'b c'", {"HARNESS_SELF_TEST": "d"}, none) == ["a", "b c"]
    assert choose_test(None, {"HARNESS_SELF_TEST": "d"}, none) == ["d"]
    assert choose_test(None, {}, none) == []
    assert choose_test("", {"HARNESS_SELF_TEST": "d"}, none) == []
    with pytest.raises(ConfigError, match="self-test"):
        choose_test("'", {}, none)


def test_a_gpu_without_the_tool_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, tools = tmp_path / "nvidia0", tmp_path / "tools"
    gpu.touch()
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert choose_test(None, {}, gpu) == []

    (tools / "nvidia-smi").touch(mode=0o755)
    assert choose_test(None, {}, gpu) == ["nvidia-smi", "-L"]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["true"], None),
        (["sh", "-c", "echo fell off the bus; exit 9"], "ended with 9: fell off the bus"),
        (["/no/such/tool"], "No such file"),
    ],
)
def test_a_self_test_says_what_is_wrong(command: list[str], why: str | None) -> None:
    found = run_test(command, Signals())

    assert (found is None) if why is None else (why in str(found))


def test_a_self_test_that_hangs_has_failed() -> None:
    assert "has not ended in 0.05 s" in str(run_test(["sleep", "60"], Signals(), 0.05))


def test_a_self_test_is_not_waited_for_once_a_signal_asks_to_leave() -> None:
    signals = Signals()
    signals.asked = signal.SIGTERM

    assert "has not ended" in str(run_test(["sleep", "60"], signals))


def test_a_self_test_that_cannot_even_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is with what hangs in a driver."""
    alive: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(fitness, "KILLED_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda test: alive.append(test))
        assert "has not ended" in str(run_test(["sleep", "60"], Signals(), 0.01))

    assert alive[0].poll() is None
    alive[0].kill()
    alive[0].wait()
