"""`harness run --watch`: a program that saves by itself is noticed, killed and moved, and comes to the unbroken end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.core.snapshot import RunKeys
from harness.snapshots import records
from harness.watch.ours import MOVED, folder_of
from tests.support.process import Process
from tests.support.protocol import FOREVER
from tests.support.s3_server import S3Server
from tests.support.world import World, nobody_left, steps_said

FAST = ("--back-off-s", "0.05", "--handover-s", "0.5", "--await-s", "0.1", "--watch-look-s", "0.1")
STEPS = 20


def out(world: World) -> Path:
    """The watched directory."""
    return world.root / "out"


def moved_files(world: World) -> list[Path]:
    """What was moved out of it."""
    return [path for path in (folder_of(out(world)) / MOVED).rglob("*") if path.is_file()]


def program(world: World, *options: str | Path, steps: int = STEPS) -> list[str | Path]:
    """The command of the program."""
    output = ["--curve", world.curve, "--final", world.final, "--hold-until", world.released]
    fixed = ["--out", out(world), *output, "--steps", str(steps)]
    return [sys.executable, "-m", "tests.support.saving_program", *fixed, *options]


def start(world: World, *options: str | Path, command: Sequence[str | Path]) -> Process:
    """Start it under the harness."""
    return world.run_rigged(*FAST, "--watch", str(out(world)), *options, command=command)


def wait_taken(process: Process, step: int) -> None:
    """Wait until the checkpoint of a step is durable."""
    process.wait_for(rf" Published [^\n]*step={step} ")


@pytest.mark.sample
@pytest.mark.parametrize("layout", ["numbered", "one"])
def test_a_program_that_is_left_alone_finishes_and_its_checkpoints_are_snapshots(layout: str, world: World) -> None:
    process = start(world, command=program(world, "--layout", layout))
    assert process.wait() == 0, process.stderr
    world.check_tiny(STEPS)
    newest = world.check_commits()[-1]
    assert world.survey().finished_at == newest.step
    manifest = records.read_manifest(world.opened(), RunKeys(world.run), newest, FOREVER)
    assert manifest.parts[0].files
    for entry in manifest.parts[0].files:
        stored = world.store / RunKeys(world.run).payload(manifest.directory, entry.name)
        assert stored.read_bytes() == (out(world) / entry.path).read_bytes()
    again = start(world, command=program(world))
    assert again.wait() == 64, "the run is finished"


@pytest.mark.parametrize("asked", [["--on-signal", "SIGTERM"], []], ids=["can-be-asked", "cannot"])
def test_a_drill_ends_it_and_nothing_else_is_possible(asked: list[str], world: World) -> None:
    """A program that is asked to save may leave, as most do. One that cannot be asked goes on until the time is up."""
    process = start(world, command=program(world, "--hold-at", "7", *asked))
    wait_taken(process, 5)
    drill = world.harness("drill", *world.named(), "--in", "4" if not asked else "60")
    refused = world.start(*drill)
    assert refused.wait() == 64
    assert "this program saves by itself, and may exit once it is asked to: there is only --end" in refused.stderr
    world.wait_until(lambda: world.steps_of_curve()[-1] == 7, "step 7")

    drilled = world.start(*drill, "--end", "--json")
    assert drilled.wait() == 0, drilled.stderr
    assert process.wait() == 75, process.stderr
    assert json.loads(drilled.stdout)["durable_step"] == (7 if asked else 5)
    world.released.touch()
    assert start(world, command=program(world)).wait() == 0
    world.check_tiny(STEPS)


def check_moved(layout: str, world: World) -> None:
    """A notice on one host, and the end on another."""
    process = start(world, command=program(world, "--layout", layout, "--on-signal", "SIGTERM", "--hold-at", "7"))
    wait_taken(process, {"numbered": 5, "one": 1}[layout])
    world.wait_until(lambda: world.steps_of_curve()[-1] == 7, "step 7")
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    assert "asked to save: SIGTERM" in process.stderr

    host = world.elsewhere()
    process = start(host, command=program(host, "--layout", layout))
    assert process.wait() == 0, process.stderr
    assert host.steps_of_curve()[0] == 8, "nothing is lost"
    host.check_tiny(STEPS, world)
    world.check_commits()


@pytest.mark.sample
@pytest.mark.parametrize("layout", ["numbered", "one"])
def test_after_a_notice_it_goes_on_elsewhere_from_what_it_was_asked_to_save(layout: str, world: World) -> None:
    check_moved(layout, world)


def test_one_that_cannot_be_asked_loses_what_it_has_not_saved_and_nothing_else(world: World) -> None:
    process = start(world, command=program(world, "--hold-at", "7"))
    wait_taken(process, 5)
    world.wait_until(lambda: world.steps_of_curve()[-1] == 7, "step 7")
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.stderr

    host = world.elsewhere()
    process = start(host, command=program(host))
    assert process.wait() == 0, process.stderr
    assert host.steps_of_curve()[0] == 6
    host.check_tiny(STEPS, world)


def test_a_program_behind_a_shell_script_does_not_outlive_the_run(world: World) -> None:
    """Only the script gets the signal, and ends by it."""
    command = ["bash", "-c", '"$@"; true', "train.sh", *program(world, "--hold-at", "7")]
    process = start(world, command=command)
    wait_taken(process, 5)
    world.wait_until(lambda: world.steps_of_curve()[-1] == 7, "step 7")
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    assert "processes that have outlived the program get SIGTERM" in process.stderr
    world.released.touch()
    again = start(world, command=program(world))
    assert again.wait() == 0, again.stderr
    assert world.steps_of_curve().count(8) == 1, "no other process has trained on"
    world.check_tiny(STEPS)


@pytest.mark.parametrize("asked", [["--on-signal", "SIGTERM"], []], ids=["can-be-asked", "cannot"])
def test_a_ctrl_c_that_reaches_the_agent_alone_is_passed_on(asked: list[str], world: World) -> None:
    process = start(world, command=program(world, "--hold-at", "7", *asked))
    wait_taken(process, 5)
    world.wait_until(lambda: world.steps_of_curve()[-1] == 7, "step 7")
    process.signal(signal.SIGINT)
    assert process.wait() == 130, process.stderr
    assert world.check_commits()[-1].step == (7 if asked else 5)


def test_one_that_saves_and_goes_on_is_ended_once_that_is_kept(world: World) -> None:
    table = world.root / "mine.toml"
    table.write_text(
        'title = "mine"\nsource = "its own script"\n'
        '[checkpoint]\ndirectory = "checkpoint-{step}"\n[complete]\nhas = ["trainer_state.json"]\n'
        '[resume]\nhow = "by itself"\n[save]\nsignal = "SIGUSR1"\nleaves = false\n'
    )
    command = program(world, "--on-signal", "SIGUSR1", "--stays", "--hold-at", "7", steps=10_000)
    process = start(world, "--watch-as", str(table), command=command)
    wait_taken(process, 5)
    world.wait_until(lambda: world.steps_of_curve()[-1] == 7, "step 7")
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    assert world.check_commits()[-1].step >= 7
    assert "SIGUSR1 to 1 process" in process.stderr


@pytest.mark.parametrize(
    ("layout", "write"), [*(("numbered", write) for write in range(0, 12, 3)), ("one", 1), ("one", 3)]
)
def test_what_it_was_writing_when_it_was_killed_is_moved_away_and_it_begins_again(
    layout: str, write: int, world: World
) -> None:
    process = start(world, command=program(world, "--layout", layout, "--die-in", f"10:{write}", "--step-s", "0.1"))
    assert process.wait() == 0, process.stderr
    world.check_tiny(STEPS)
    assert moved_files(world), "what was torn is kept"
    assert re.search(r"(checkpoint-10|last.pt) is no whole checkpoint, since it [^\n]+: moved to", process.stderr)
    assert process.stderr.count(" TrainerStarted ") == 2
    world.check_commits()


def test_a_crash_costs_no_more_than_it_would_have_without_the_harness(world: World) -> None:
    process = start(world, command=program(world, "--raise-at", "12", "--step-s", "0.05"))
    assert process.wait() == 0, process.stderr
    assert world.steps_of_curve().count(11) == 2
    assert world.steps_of_curve().count(10) == 1, "it went on from its own newest checkpoint"
    world.check_tiny(STEPS)


def test_a_whole_checkpoint_here_that_is_newer_than_the_store_s_wins(world: World) -> None:
    process = start(world, "--fail", "put:3-999", command=program(world, "--hold-at", "12", "--step-s", "0.02"))
    process.wait_for(r" SetAside step=10 ")
    world.signal_host(signal.SIGKILL)
    world.wait_gone()

    process = start(world, command=program(world))
    assert process.wait() == 0, process.stderr
    assert world.steps_of_curve().count(11) == 2
    assert world.steps_of_curve().count(10) == 1
    world.check_tiny(STEPS)
    assert 10 in {snapshot.step for snapshot in world.check_commits()} or world.check_commits()[-1].step == STEPS


def test_checkpoints_that_it_deletes_meanwhile_are_uploaded_all_the_same(world: World) -> None:
    process = start(world, command=program(world, "--keep", "1", "--step-s", "0.03"))
    assert process.wait() == 0, process.stderr
    assert [path.name for path in out(world).glob("checkpoint-*")] == ["checkpoint-20"]
    assert world.check_commits()
    assert "SaveFailed" not in process.stderr


def outlived(world: World) -> int:
    """The pid of a program that stands behind step 7, and whose agent was killed."""
    process = start(world, command=program(world, "--hold-at", "7"))
    wait_taken(process, 5)
    process.signal(signal.SIGKILL)
    process.wait_exit()
    return int(re.findall(r" TrainerStarted pid=(\d+)", process.stderr)[-1])


def test_a_second_start_does_not_write_beside_a_program_that_outlived_its_agent(world: World) -> None:
    child = outlived(world)
    again = start(world, "--earlier-s", "0.1", command=program(world))
    assert again.wait() == 64, again.stderr
    assert "a program of an earlier start still writes there" in again.stderr
    os.kill(child, signal.SIGKILL)
    world.wait_gone()
    assert start(world, command=program(world)).wait() == 0
    world.check_tiny(STEPS)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 74)])
def test_a_start_that_waits_for_such_a_program_ends_when_it_is_told_to(signum: int, code: int, world: World) -> None:
    child = outlived(world)
    waits = start(world, "--earlier-s", "1000", command=program(world))
    waits.wait_for("waiting up to 1000 s")
    waits.signal(signum)
    assert waits.wait() == code, waits.stderr
    assert "TrainerStarted" not in waits.stderr
    os.kill(child, signal.SIGKILL)


LAUNCHER = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal, sys; print('a rank runs', file=sys.stderr); signal.pause()"])
signal.pause()
"""


def test_a_second_start_does_not_write_beside_ranks_whose_launcher_is_gone_too(world: World) -> None:
    process = start(world, command=[sys.executable, "-c", LAUNCHER])
    process.wait_for("a rank runs")
    launcher = int(re.findall(r" TrainerStarted pid=(\d+)", process.stderr)[-1])
    process.signal(signal.SIGKILL)
    os.kill(launcher, signal.SIGKILL)
    process.wait_exit()
    again = start(world, "--earlier-s", "0.1", command=program(world))
    assert again.wait() == 64, again.stderr
    (rank,) = re.findall(r"processes of a program of an earlier start still run: (\d+)", again.stderr)

    waits = start(world, "--earlier-s", "1000", command=program(world))
    waits.wait_for(f"waiting up to 1000 s for {out(world)}: processes .* still run: {rank}")
    os.kill(int(rank), signal.SIGKILL)
    assert waits.wait() == 0, waits.stderr
    world.check_tiny(STEPS)


def test_fresh_moves_what_is_there_away(world: World) -> None:
    assert start(world, command=program(world, steps=10)).wait() == 0
    before = {path: path.read_bytes() for path in out(world).glob("checkpoint-*/*")}
    process = start(world, "--fresh", "yes", command=program(world))
    assert process.wait() == 0, process.stderr
    assert world.steps_of_curve()[10] == 1, "it began at step 0"
    kept = {path.read_bytes() for path in moved_files(world)}
    assert set(before.values()) <= kept
    assert world.survey().finished_at == STEPS


def test_it_goes_back_to_a_snapshot_and_what_is_newer_is_kept_aside(world: World) -> None:
    for hold_at, taken in ((12, 10), (17, 15)):
        process = start(world, command=program(world, "--hold-at", str(hold_at)))
        wait_taken(process, taken)
        process.signal(signal.SIGTERM)
        assert process.wait() == 75, process.stderr
    process = start(world, "--from", "10", command=program(world))
    assert process.wait() == 0, process.stderr
    trained = world.steps_of_curve()
    assert trained[trained.index(17) + 1] == 11
    assert any(path.parent.name == "checkpoint-15" for path in moved_files(world))
    world.check_tiny(STEPS)


def test_the_path_of_the_checkpoint_is_put_into_its_command(world: World) -> None:
    def named(host: World, *options: str) -> list[str | Path]:
        return program(host, "--resume", "{checkpoint}", *options)

    process = start(world, command=named(world, "--on-signal", "SIGTERM", "--hold-at", "7"))
    wait_taken(process, 5)
    process.signal(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    host = world.elsewhere()
    assert start(host, command=named(host)).wait() == 0
    host.check_tiny(STEPS, world)


def test_a_checkpointer_is_one_too_many(world: World) -> None:
    process = start(world, command=world.tiny())
    assert process.wait() not in (0, 75)
    assert "its checkpoints are watched (--watch)" in process.stderr


def test_a_program_that_saves_nothing_known_is_told_so(world: World) -> None:
    out(world).mkdir()
    process = start(world, command=["true"])
    assert process.wait() == 0
    assert f"nothing in {out(world)} is known as a checkpoint" in process.stderr


def test_while_it_runs_it_is_told_of_weights_in_a_layout_that_is_not_known_and_of_no_checkpointer(
    world: World,
) -> None:
    text = "mkdir -p $0/a-1; while :; do printf PK >> $0/a-1/model.pth; done"
    options = ("--hello-s", "0.01", "--watch-stands-s", "0.1")
    process = start(world, *options, command=["sh", "-c", text, out(world)])
    process.wait_for(f"weights are written to {out(world)}, but nothing there is known as a checkpoint")
    assert f"see harness watch {out(world)}" in process.stderr
    process.signal(signal.SIGTERM)
    assert process.wait() not in (0, 75)
    assert "Checkpointer" not in process.stderr


@pytest.mark.long("two lives on two hosts, over S3's real protocol")
def test_it_is_the_same_over_s3(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with S3Server() as server, nobody_left(request, World(tmp_path, s3=server)) as world:
        check_moved("numbered", world)


def test_a_store_that_goes_away_while_a_checkpoint_is_laid_back_is_waited_for(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with S3Server() as server, nobody_left(request, World(tmp_path, s3=server)) as world:
        process = start(world, "--at", "Published:1:terminate", command=program(world, "--hold-at", "7"))
        assert process.wait() == 75, process.stderr
        payloads = re.escape(RunKeys(world.run).snapshots)
        server.fault("error", "GetObject", key=payloads, nth=2, status=503, code="SlowDown", times=None)

        host = world.elsewhere()
        process = start(host, "--attempts", "2", command=program(host))
        process.wait_for(r" StoreBlind ")
        assert not host.curve.exists()
        assert [path for path in out(host).rglob("*") if path.is_file()] == []
        server.clear()
        assert process.wait() == 0, process.stderr
        assert steps_said(process.stderr, "Restored") == [5]
        assert "Rejected" not in process.stderr
        host.check_tiny(STEPS, world)


def test_the_commands_that_look_at_a_run_know_files(world: World) -> None:
    process = start(world, command=program(world))
    assert process.wait() == 0, process.stderr

    for command in (["ls"], ["verify"], ["status"]):
        looked = world.start(*world.harness(*command, *world.named()))
        assert looked.wait() == 0, looked.stderr
    target = world.root / "exported"
    exported = world.start(*world.harness("export", target, *world.named()))
    assert exported.wait() == 0, exported.stderr
    for path in sorted(target.rglob("*")):
        assert path.is_dir() or path.read_bytes() == (out(world) / path.relative_to(target)).read_bytes()
    seen = world.start(*world.harness("watch", "--explain", out(world)))
    assert seen.wait() == 0, seen.stderr
    assert b"checkpoint-20" in seen.stdout
    assert "adapter transformers" in seen.stderr


@pytest.mark.long("two passes, each with checkpoints a second apart")
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--layout", "numbered"], 0, "are identical, after it was killed behind step"),
        (["--layout", "one", "--steps", "20"], 0, "are identical, after it was killed behind step"),
        (["--layout", "numbered", "--forgets"], 70, r"checkpoint-\d+/state.bin differs first, at step"),
        (["--layout", "numbered", "--never-resumes"], 70, r"it has written checkpoint-\d+ again"),
        (["--steps", "2"], 64, "has written no whole checkpoint"),
        (["--raise-at", "2"], 70, "ArithmeticError"),
        (["--layout", "numbered", "--steps", "5"], 70, "nothing is shown"),
    ],
)
def test_a_rehearsal_says_whether_it_goes_on_exactly(options: list[str], code: int, words: str, world: World) -> None:
    files = ["--out", "{out}/saved", "--curve", "{out}/curve", "--final", "{out}/final"]
    steps = ["--steps", "400", "--await-commits"]
    command = [sys.executable, "-m", "tests.support.saving_program", *files, *steps, *options]
    rehearsed = world.start(*world.harness("rehearse", *world.named(), "--watch", "{out}/saved", "--", *command))
    assert rehearsed.wait() == code, rehearsed.stderr
    assert re.search(words, rehearsed.stderr), rehearsed.stderr


KILLS = [
    ("Claimed:1", ("agent",)),
    ("TrainerStarted:1", ("agent", "trainer", "both")),
    ("SetAside:1", ("agent", "trainer", "both")),
    ("ShardStored:1", ("agent", "trainer", "both")),
    ("PartStored:1", ("agent", "trainer", "both")),
    ("Published:1", ("agent", "trainer", "both")),
    ("Published:2", ("agent", "trainer", "both")),
    ("Published:1:kill-trainer,Located:1", ("agent",)),
    ("Published:1:kill-trainer,Fetched:1", ("agent",)),
    ("Published:1:kill-trainer,Restored:1", ("agent",)),
    ("Published:1:terminate,Draining:1", ("agent", "trainer", "both")),
    ("TrainerLeft:1", ("agent",)),
]


@pytest.mark.long("several lives")
@pytest.mark.parametrize(
    ("at", "who"), [pytest.param(at, who, id=f"{at}-{who}") for at, all_of_them in KILLS for who in all_of_them]
)
def test_a_kill_at_any_event_loses_nothing_durable(at: str, who: str, world: World) -> None:
    world.curve.touch()
    command = program(world, "--on-signal", "SIGTERM", "--await-commits")
    process = start(world, "--at", f"{at}:kill-{who}", command=command)
    if process.wait() == 0:
        assert who == "trainer"
        world.check_tiny(STEPS)
        return
    world.signal_host(signal.SIGKILL)
    world.wait_gone()
    assert f"test: kill-{who}" in process.stderr, process.stderr
    floor = world.newest()

    host = world.elsewhere()
    process = start(host, command=program(host))
    assert process.wait() == 0, process.stderr
    restored = steps_said(process.stderr, "Restored")
    assert floor is None or restored[0] >= floor.step, process.stderr
    host.check_tiny(STEPS, world)
    world.check_commits()
