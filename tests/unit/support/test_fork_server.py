"""A process that is forked cannot be told from a new interpreter, by itself or by who started it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.world import ROOT, World, nobody_left

PROGRAM = [sys.executable, "-m", "tests.support.self_portrait"]


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_TEST_EXEC", raising=False)


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with nobody_left(request, World(tmp_path)) as made:
        yield made


def portrait(
    world: World, *options: str, code: int = 0, program: Sequence[str] = PROGRAM, **given: Any
) -> dict[str, Any]:
    process = world.start(*program, *options, **given)
    assert process.wait() == code, process.stderr
    return {**json.loads(process.stdout.splitlines()[0]), "stderr": process.stderr}


@pytest.mark.parametrize("program", [PROGRAM, [PROGRAM[0], "-P", "-u", *PROGRAM[1:]]], ids=["module", "safe path"])
def test_it_sees_what_a_new_interpreter_sees(
    program: Sequence[str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.root / "input").write_text("a line\n")
    elsewhere = world.root / "elsewhere"
    elsewhere.mkdir()
    found = []
    for new in ("", "1"):
        monkeypatch.setenv("HARNESS_TEST_EXEC", new)
        with (world.root / "input").open("rb") as stdin:
            seen = portrait(world, "--some", "option", program=program, env={"ADDED": "ä"}, stdin=stdin, cwd=elsewhere)
        for part in ("environment", "shown environment"):
            assert "HARNESS_TEST_EXEC" in str(seen[part])
            seen[part] = str(seen[part]).replace("HARNESS_TEST_EXEC=1", "HARNESS_TEST_EXEC=")
            seen[part] = seen[part].replace("'HARNESS_TEST_EXEC': '1'", "'HARNESS_TEST_EXEC': ''")
        found.append(seen)
    assert found[0] == found[1]
    assert found[0]["parent"] == os.getpid()
    assert found[0]["input"] == "a line\n"
    assert found[0]["session is its own"]


def test_a_script_that_imports_torch_sees_what_a_new_interpreter_sees(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = world.root / "script.py"
    script.write_text((ROOT / "tests/support/self_portrait.py").read_text() + "if not sys.argv:\n    import torch\n")
    assert fork_server.kind_of([sys.executable, str(script)]) == "torch"
    found = []
    for new in ("", "1"):
        monkeypatch.setenv("HARNESS_TEST_EXEC", new)
        process = world.start(sys.executable, script, "--some", "option", cwd=world.root)
        assert process.wait() == 0, process.stderr
        seen = json.loads(process.stdout.replace(b"HARNESS_TEST_EXEC=1", b"HARNESS_TEST_EXEC="))
        seen["environment"]["HARNESS_TEST_EXEC"] = ""
        found.append(seen)
    assert found[0] == found[1]
    assert found[0]["path"][0] == str(world.root)


def test_what_is_ignored_and_blocked_is_inherited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ever = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        found = []
        for new in ("", "1"):
            monkeypatch.setenv("HARNESS_TEST_EXEC", new)
            seen = portrait(world)
            found.append((seen["handlers"], seen["blocked"]))
    finally:
        signal.signal(signal.SIGHUP, ever)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert found[0] == found[1]
    assert found[0][1] == [signal.SIGUSR2]


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--exit", "7"], 7), (["--raise"], 1), (["--kill"], -signal.SIGKILL)],
    ids=["exit", "raise", "kill"],
)
def test_its_end_is_its_own(options: list[str], code: int, world: World) -> None:
    seen = portrait(world, *options, code=code)
    assert ("RuntimeError: as it was told" in seen["stderr"]) == (code == 1)


@pytest.mark.parametrize("new", ["", "1"])
def test_what_it_leaves_behind_is_written(new: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_TEST_EXEC", new)

    process = world.start(*PROGRAM, "--leave", world.root / "left")

    assert process.wait() == 1
    assert process.stdout.splitlines()[1:] == [b"registered"]
    assert process.stderr.splitlines()[-1:] == ["the last word"]
    assert (world.root / "left").read_text() == "written, not flushed"


def test_the_child_of_an_agent_is_forked_as_well_and_is_its_child(world: World) -> None:
    agent = world.run_rigged(command=[*PROGRAM])
    assert agent.wait() == 0, agent.stderr
    seen = json.loads(agent.stdout.splitlines()[0])
    assert seen["parent"] == agent.pid
    assert seen["shown command"] == PROGRAM
    assert not seen["session is its own"]
    assert any(name.startswith("HARNESS_") for name in seen["environment"])


def test_one_that_was_forked_is_killed_with_its_group(world: World) -> None:
    agent = world.run_rigged(command=world.tiny("--hold-at", "3"))
    agent.wait_for("FirstStep")
    agent.signal_group(signal.SIGKILL)
    assert agent.wait() == -signal.SIGKILL
    world.wait_gone()


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["-m", "tests.support.tiny_trainer", "--steps", "3"], "plain"),
        (["-m", "harness", "run", "--", sys.executable, "-m", "tests.support.torch_trainer"], "torch"),
        (["-u", "-m", "tests.support.rank_trainer"], "torch"),
        (["-m", "harness", "run", "--", "train.sh"], "plain"),
        (["-m", "torch.distributed.run", "-m", "tests.support.hf_trainer"], "transformers"),
        (["-m", "tests.support.patiently", "/somewhere/examples/huggingface.py"], "transformers"),
        (["-m", "harness", "run", "--", sys.executable, "-m", "tests.support.library_program", "dcp"], "torch"),
        (["-m", "tests.support.library_program", "keras"], None),
        (["-m", "tests.support.patiently", "train.py", "huggingface.py"], None),
        (["-m", "torch.distributed.run", "train.py"], None),
        (["-m", "http.server"], None),
        (["train.py", "-m", "tests.support.tiny_trainer"], None),
        (["-P", "-m", "tests.support.tiny_trainer"], "plain"),
        (["-I", "-m", "tests.support.tiny_trainer"], None),
        (["-c", "pass"], None),
        ([], None),
    ],
)
def test_what_is_no_program_of_ours_is_a_new_interpreter(command: list[str], kind: str | None) -> None:
    assert fork_server.kind_of([sys.executable, *command]) == kind
    assert fork_server.kind_of(["/usr/bin/python3", *command]) is None


def test_a_script_has_the_kind_of_what_it_imports(tmp_path: Path) -> None:
    for name, text in (("a.py", "import torch"), ("b.py", "import torch\nfrom transformers import A"), ("c.py", "x")):
        (tmp_path / name).write_text(text)
    kinds = [fork_server.kind_of([sys.executable, "-u", str(tmp_path / name)]) for name in ("a.py", "b.py", "c.py")]
    assert kinds == ["torch", "transformers", None]
    launcher = [sys.executable, "-m", "torch.distributed.run", str(tmp_path / "a.py")]
    assert fork_server.kind_of(launcher) == "torch"


def test_other_variables_that_are_read_at_the_begin_take_another_server(world: World) -> None:
    """Packages of another PYTHONPATH, or other threads of libraries, are not those of the server that there is."""
    first, second = (portrait(world, env={"OMP_NUM_THREADS": threads}) for threads in ("1", "2"))
    assert [seen["environment"]["OMP_NUM_THREADS"] for seen in (first, second)] == ["1", "2"]
    assert len([key for key in fork_server._servers if key[0] == "plain"]) >= 2


def test_it_ends_though_a_data_worker_of_an_earlier_test_is_left() -> None:
    """It was forked while the server was there, and holds its connection as well."""
    server = fork_server._started("plain", {})
    waits, go = os.pipe()
    if not (left := os.fork()):
        os.close(go)
        os.read(waits, 1)
        os._exit(0)
    server.close()
    assert server._process is not None
    assert server._process.returncode == 0
    os.close(go)
    os.close(waits)
    os.waitpid(left, 0)
