"""`harness run` as a transparent parent: terminal, signals, exit codes; notices, crashes, and a user's mistakes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud.testing.metadata_sim import Fault, MetadataSimulator
from harness.agent.outcome import read_outcome
from tests.support.needs import lacking
from tests.support.process import Process
from tests.support.world import World, steps_said

STEPS = 20
HOLD = ("--hold-at", "12")
FAST = ("--back-off-s", "0.05", "--every-s", "1000")
OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.dup2(0, 1); os.dup2(0, 2); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def script(world: World, text: str, name: str = "script.py") -> list[str | Path]:
    """The command of a program of a few lines."""
    path = world.root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return [sys.executable, path]


def held(world: World, *options: str | Path, trainer: tuple[str, ...] = HOLD) -> Process:
    """A run whose trainer has made 12 steps, and stays there, with a durable snapshot of an earlier one."""
    process = world.run_harness(*options, command=world.tiny(*trainer))
    process.wait_for(" Published ")
    return process


def check_left_with_everything(world: World, process: Process, code: int = 75, outcome: str = "interrupted") -> None:
    """The run left with the very last step durable, and its outcome is recorded."""
    assert process.wait() == code, process.stderr
    known = world.survey()
    assert known.done is not None
    assert (known.done.outcome, known.done.step) == (outcome, world.steps_of_curve()[-1]), process.stderr
    assert known.commits[-1].step == known.done.step


def finish(world: World, *trainer: str) -> str:
    """Start the same command again; what it said. It must go on from what there is, and come to the right end."""
    world.released.touch()
    floor = world.survey().commits[-1].step
    process = world.run_harness(command=world.tiny(*(trainer or HOLD)))
    assert process.wait() == 0, process.stderr
    (restored,) = steps_said(process.stderr, "Restored")
    assert restored >= floor, "more, where somebody was killed between a part and its manifest"
    world.check_tiny(STEPS)
    return process.stderr


# ---- a transparent parent -------------------------------------------------------------------------------------------


def test_stdin_stdout_and_stderr_are_the_programs_own(world: World) -> None:
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.stderr.write('own\\rwords\\n')"
    command = script(world, echo)

    process = world.start(*world.harness("run", *world.options(), "--", *command), stdin=subprocess.PIPE)
    with process.input as stdin:
        stdin.write(bytes(range(256)) * 100)

    assert process.wait() == 0
    assert process.stdout == bytes(range(256)) * 100
    assert "own\rwords\n" in process.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_never_calls_the_harness_keeps_its_exit_code(world: World, code: int) -> None:
    process = world.run_harness(command=script(world, f"raise SystemExit({code})"))

    assert process.wait() == code
    assert ("without ever creating a Checkpointer" in process.stderr) == (code == 0)
    assert "TrainerStarted pid" in process.stderr
    assert process.stderr.count("TrainerStarted") == 1, "it is not started again"
    assert world.survey().finished_at is None


def test_a_code_of_the_programs_own_is_recorded_as_its_failure(world: World) -> None:
    process = world.run_harness(command=script(world, "raise SystemExit(75)"))

    assert process.wait() == 75
    assert read_outcome(world.place, process.pid) == "failed"


def test_a_program_that_makes_no_checkpointer_is_told_so_once_and_hears_of_a_notice(world: World) -> None:
    file = world.root / "drain"
    command = script(world, "import time\nwhile True: time.sleep(0.01)")
    process = world.run_rigged("--hello-s", "0.01", "--drain-file", str(file), command=command)
    process.wait_for("has not created a Checkpointer")
    file.touch()

    assert process.wait() == 75, process.stderr
    assert process.stderr.count("has not created a Checkpointer") == 1
    assert "TrainerLeft code=143" in process.stderr, "by SIGTERM, not at the deadline"


def test_a_program_that_makes_no_checkpointer_keeps_its_own_0_on_a_notice(world: World) -> None:
    text = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('ready', file=sys.stderr)\n"
    process = world.run_rigged(
        "--drain-file", str(world.root / "drain"), command=script(world, text + "while True: time.sleep(0.01)")
    )
    process.wait_for("ready")
    process.wait_for(" NothingToResume ")
    (world.root / "drain").touch()

    assert process.wait() == 0, process.stderr


def test_a_program_that_a_signal_ended_is_128_and_the_signal(world: World) -> None:
    process = world.run_harness(command=script(world, "import os; os.kill(os.getpid(), 9)"))

    assert process.wait() == 137


@contextlib.contextmanager
def terminal(
    world: World, command: list[str | Path], rows: int = 24, columns: int = 80
) -> Iterator[tuple[Process, int]]:
    """A process with a terminal of its own, and the terminal's other end."""
    master, slave = pty.openpty()
    try:
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        process = world.start(sys.executable, "-c", OWN_TERMINAL, *command, stdin=slave)
        os.close(slave)
        yield process, master
    finally:
        os.close(master)


def read_until(fd: int, words: str) -> str:
    """What a terminal shows, until it shows `words`."""
    shown = ""
    while words not in shown:
        shown += os.read(fd, 65536).decode(errors="replace")  # OSError when the last one has closed its end
    return shown


def test_the_program_has_the_terminal_its_size_and_is_told_when_that_changes(world: World) -> None:
    shows = """
        import os, signal, time
        def resized(*_):
            print("resized", *os.get_terminal_size(0), flush=True)
            os._exit(0)
        signal.signal(signal.SIGWINCH, resized)
        print("terminals", *map(os.isatty, range(3)), "size", *os.get_terminal_size(0), flush=True)
        print("foreground", os.tcgetpgrp(0) == os.getpgrp(), "ready", flush=True)
        while True:
            time.sleep(0.01)  # signal.pause() would not see one that came just before it
    """
    command = script(world, "if True:" + shows)
    with terminal(world, world.harness("run", *world.options(), "--", *command), 40, 132) as (process, master):
        shown = read_until(master, "ready")
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
        shown += read_until(master, "resized 100 50")

        assert "terminals True True True size 132 40" in shown
        assert "foreground True" in shown
        assert process.wait() == 0


def test_a_terminal_reads_sentences_and_a_pipe_key_value_lines(world: World) -> None:
    command = world.harness("run", *world.options(), "--", *world.tiny())
    with terminal(world, command, 40, 200) as (process, master):
        shown = read_until(master, "finished: step")
        assert process.wait() == 0
    assert re.search(r"harness: saved step \d+ \(.*\) in \d+ m?s; durable in the store ", shown), shown
    assert "starting at step 0: " in shown
    assert " Sealed " not in shown

    again = world.run_harness("--fresh", command=world.tiny())
    assert again.wait() == 0
    assert " Ended outcome=finished" in again.stderr
    assert "finished: step" not in again.stderr


# ---- what a user can get wrong --------------------------------------------------------------------------------------


def refused(world: World, process: Process, *words: str) -> None:
    """64, with words that say what and what to do, and without a traceback; nobody was started."""
    assert process.wait() == 64, process.stderr
    for word in words:
        assert word in process.stderr, process.stderr
    assert "Traceback" not in process.stderr
    assert "TrainerStarted" not in process.stderr


def test_a_script_that_does_not_exist_is_refused_before_anything_starts(world: World) -> None:
    refused(world, world.run_harness(command=[sys.executable, "nowhere.py"]), "nowhere.py: no such script")
    assert not world.store.exists()


def test_a_command_that_does_not_exist_is_refused(world: World) -> None:
    refused(world, world.run_harness(command=["no-such-program"]), "no-such-program: command not found")


def test_nothing_to_run_is_refused(world: World) -> None:
    refused(world, world.run_harness(command=[]), "nothing to run: harness run -- python train.py")


@pytest.mark.parametrize("plainly", [False, True], ids=["under harness run", "started plainly"])
def test_a_runtime_directory_that_others_may_write_to_is_refused(world: World, *, plainly: bool) -> None:
    """Whoever made it first could take the agent's place there, and was given every snapshot."""
    squatted = world.root / "r"
    squatted.mkdir()
    squatted.chmod(0o777)
    command = world.tiny() if plainly else [*world.harness("run", *world.options(), "--"), *world.tiny()]
    settings = {"HARNESS_STORE": str(world.store), "HARNESS_RUN": world.run, "HARNESS_METADATA": "off"}

    process = world.start(*command, env={**settings, "HARNESS_RUNTIME_DIR": str(squatted)})

    assert process.wait() == (1 if plainly else 64), process.stderr
    assert f"others may write to {squatted}" in process.stderr
    assert "HARNESS_RUNTIME_DIR names another directory" in process.stderr
    assert not world.curve.exists()


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_what_a_run_leaves_is_its_users_alone_unless_they_share_it(world: World, *, shared: bool) -> None:
    world.has_local = True
    world.released.touch()
    done = world.start(
        *("sh", "-c", 'umask 022; exec "$@"', "sh", *world.harness("run", *world.options(), "--"), *world.tiny()),
        env={"HARNESS_SHARED": "yes"} if shared else {},
    )

    assert done.wait() == 0, done.stderr
    for tier in (world.store, world.local):
        modes = {(path.is_dir(), path.stat().st_mode & 0o777) for path in tier.rglob("*")}
        assert modes == ({(True, 0o755), (False, 0o644)} if shared else {(True, 0o700), (False, 0o600)})


def test_a_second_trainer_of_a_live_run_is_refused_and_told_whose_it_is(world: World) -> None:
    first = held(world)
    trainer = first.wait_for(r"TrainerStarted pid=(\d+)")[1]

    refused(world, world.run_harness(command=world.tiny(*HOLD)), f"process {trainer}", "another --run")

    world.released.touch()
    assert first.wait() == 0, "the first one was not disturbed"
    world.check_tiny(STEPS)


def test_two_scripts_of_one_name_are_not_one_run(world: World) -> None:
    text = "import sys\nfrom tests.support.tiny_trainer import main\nsys.exit(main())\n"
    commands = [[*script(world, text, f"{where}/train.py"), *world.tiny(*HOLD)[3:]] for where in ("a", "b")]
    options = ["--store", str(world.store), "--metadata", "off"]
    first = world.start(*world.harness("run", *options, "--", *commands[0]))
    first.wait_for(" Published ")
    first.signal(signal.SIGTERM)
    assert first.wait() == 75, first.stderr

    refused(world, world.start(*world.harness("run", *options, "--", *commands[1])), "another script", "--run NAME")

    world.released.touch()
    again = world.start(*world.harness("run", *options, "--", *commands[0]))
    assert again.wait() == 0, again.stderr
    world.run = "train"
    world.check_tiny(STEPS)


def test_a_changed_command_is_told_and_goes_on(world: World) -> None:
    process = held(world)
    process.signal(signal.SIGTERM)
    check_left_with_everything(world, process)

    said = finish(world, *HOLD, "--every-steps", "4")

    assert "the command differs from the last start's, which was: " in said


def test_a_finished_run_is_refused_and_fresh_forgets_it_even_if_killed_before_its_first_snapshot(world: World) -> None:
    command = world.tiny()
    assert world.run_harness(command=command).wait() == 0

    refused(world, world.run_harness(command=command), f"finished at step {STEPS}", "--fresh", "another --run")

    fresh = world.run_rigged(
        "--fresh", "yes", "--at", "FirstStep:1:kill-both", command=world.tiny("--every-steps", "19")
    )
    fresh.wait()
    assert " NothingToResume reason=--fresh" in fresh.stderr
    assert world.steps_of_curve()[STEPS] == 1
    before = len(world.steps_of_curve())
    world.wait_gone()

    later = world.run_harness(command=command)
    assert later.wait() == 0, later.stderr
    assert " Restored " not in later.stderr, "what was there before --fresh is not this run's"
    assert world.steps_of_curve()[before:] == list(range(1, STEPS + 1))


def test_a_store_that_cannot_be_written_is_refused_at_the_start(world: World) -> None:
    (world.root / "file").write_text("in the way")
    world.store = world.root / "file" / "store"

    refused(world, world.run_harness(command=world.tiny()), str(world.store))
    assert not world.curve.exists()


@contextlib.contextmanager
def mounted(directory: Path, size: str, *options: str) -> Iterator[None]:
    """A small file system in memory; skips loudly without root."""
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", directory],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lacking("mounts", done.stderr)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.root
def test_a_store_on_a_read_only_file_system_is_refused_at_the_start(world: World) -> None:
    with mounted(world.root / "disk", "1m", "ro"):
        world.store = world.root / "disk" / "store"

        refused(world, world.run_harness(command=world.tiny()), str(world.store))
    assert not world.curve.exists()


@pytest.mark.root
def test_a_store_that_becomes_full_is_told_and_training_goes_on_until_there_is_room_again(world: World) -> None:
    with mounted(world.root / "disk", "72m"):
        world.store = world.root / "disk" / "store"
        process = world.run_harness(command=world.tiny("--careless", steps=100_000, step_s=0.01))
        process.wait_for(" Published ")
        filler = world.root / "disk" / "filler"
        filler.write_bytes(bytes(40 * 1024 * 1024))

        told = process.wait_for(r" SaveFailed tier=remote step=(\d+) reason=\"([^\"]*)\"")
        world.wait_until(lambda: world.steps_of_curve()[-1] > int(told[1]) + 10, "ten more steps")
        filler.unlink()
        process.wait_for(r" SaveFailed [^\0]* Published ")
        process.signal(signal.SIGTERM)

        check_left_with_everything(world, process)
        assert "free in" in told[2]
        assert "--keep-last" in told[2]


@pytest.mark.parametrize("local", [False, True], ids=["remote", "both-tiers"])
@pytest.mark.parametrize("who", ["trainer", "agent", "both"])
def test_where_memory_has_no_room_for_a_snapshot_the_disk_takes_it(world: World, who: str, local: bool) -> None:
    world.has_local = local
    small = ("--memory", "100000000", *FAST)
    hold = ("--hold-at", "12")
    process = world.run_rigged(*small, "--at", f"Published:2:kill-{who}", command=world.tiny(*hold))
    process.wait()
    world.wait_gone()
    said = process.stderr
    if not world.final.exists():
        again = world.run_rigged(*small, command=world.tiny(*hold))
        assert again.wait() == 0, again.stderr
        said += again.stderr

    assert "training waits for that disk meanwhile" in said
    assert world.survey().finished_at == STEPS
    world.check_tiny(STEPS)


def test_where_memory_has_room_for_fewer_slots_than_are_wanted_that_is_told_and_they_do(world: World) -> None:
    one_and_a_half = str(256 * 1024**2 + 800_000)
    process = world.run_rigged(*FAST, "--slots", "2", "--memory", one_and_a_half, command=world.tiny())

    assert process.wait() == 0, process.stderr
    assert "there is memory for 1 of 2 slots" in process.stderr
    assert "waits for that disk" not in process.stderr
    world.check_tiny(STEPS)


@pytest.mark.root
def test_too_little_memory_and_no_disk_for_a_snapshot_is_a_clear_error(world: World) -> None:
    with mounted(world.root / "disk", "256k"):
        world.store = world.root / "disk" / "store"
        process = world.run_rigged(*FAST, "--max-crashes", "1", "--memory", "100000000", command=world.tiny())

        assert process.wait() == 1, process.stderr
    assert re.search(
        r"NoSpace: a snapshot needs [\d.]+ GB of memory, 0\.10 GB are free here, and the disk at .* has no room for it "
        r"either: No space left on device",
        process.stderr,
    )
    assert not world.final.exists()


# ---- crashes --------------------------------------------------------------------------------------------------------


def test_an_exception_is_shown_and_restarted_from_memory_until_nothing_is_gained_by_it(world: World) -> None:
    process = world.run_rigged(*FAST, "--max-crashes", "2", command=world.tiny("--raise-at", "7"))

    assert process.wait() == 1, "the program's own code"
    said = process.stderr
    assert said.count("ArithmeticError: injected after step 7") == 3
    assert said.count("Traceback") == 3
    assert re.findall(r" Fetched [^\n]*tier=(\w+)", said) == ["memory", "memory"]
    assert steps_said(said, "Restored") == [5, 5]
    assert world.steps_of_curve() == [1, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7]
    assert " GaveUp crashes=3" in said
    assert finish(world, "--raise-at", "999")


@pytest.mark.parametrize(
    "how", [("--raise-at", "0"), ("--raise-at", "7", "--raise", "StateError")], ids=["before-a-step", "ours"]
)
def test_what_would_be_the_same_again_ends_the_run_at_once(world: World, how: tuple[str, ...]) -> None:
    process = world.run_rigged(*FAST, command=world.tiny(*how))

    assert process.wait() == 1
    assert process.stderr.count(" TrainerStarted ") == 1
    assert " GaveUp crashes=1" in process.stderr


def test_an_exception_before_the_first_step_of_a_resumed_run_is_worth_another_start(world: World) -> None:
    first = held(world)
    first.signal(signal.SIGTERM)
    check_left_with_everything(world, first)
    process = world.run_rigged(*FAST, "--max-crashes", "1", command=world.tiny("--raise-at", "12"))

    assert process.wait() == 1
    assert process.stderr.count(" TrainerStarted ") == 2


def test_a_second_kill_before_the_restarted_program_says_hello_is_a_crash_like_any_other(world: World) -> None:
    process = world.run_rigged(
        *FAST, "--at", "Published:1:kill-trainer,TrainerStarted:2:kill-trainer", command=world.tiny(*HOLD)
    )

    assert process.wait() == 0, process.stderr
    assert process.stderr.count(" TrainerStarted pid=") == 3
    world.check_tiny(STEPS)


def test_forks_of_the_trainer_disturb_nothing(world: World) -> None:
    process = world.run_harness(command=world.tiny("--fork-at", "7"))

    assert process.wait() == 0, process.stderr
    world.released.touch()
    world.check_tiny(STEPS)
    assert world.steps_of_curve() == list(range(1, STEPS + 1))


def test_a_fork_that_outlives_a_killed_trainer_does_not_hide_its_death(world: World) -> None:
    never = ("--release", world.root / "nobody-waits-for-this")

    process = world.run_rigged(*FAST, *never, "--at", "Published:1:kill-trainer", command=world.tiny("--fork-at", "3"))

    assert process.wait() == 0, process.stderr
    assert any("tiny_trainer" in command for command in world.running().values()), "the fork lives on"
    assert steps_said(process.stderr, "Restored")[0] >= 5
    world.released.touch()
    world.check_tiny(STEPS)


# ---- signals --------------------------------------------------------------------------------------------------------


def test_ctrl_c_once_takes_a_snapshot_and_is_130(world: World) -> None:
    process = held(world)
    process.signal_group(signal.SIGINT)

    check_left_with_everything(world, process, 130, "stopped")
    assert "Traceback" not in process.stderr
    finish(world)


def test_ctrl_c_in_a_terminal_is_the_same(world: World) -> None:
    command = world.harness("run", *world.options(), "--", *world.tiny(*HOLD))
    with terminal(world, command) as (process, master):
        read_until(master, "saved step ")
        os.write(master, b"\x03")
        read_until(master, "stopped: step ")

        check_left_with_everything(world, process, 130, "stopped")


def test_ctrl_c_twice_leaves_at_once(world: World) -> None:
    process = world.run_rigged("--grace-s", "100000", command=world.tiny("--stuck-at", "12"))
    process.wait_for(" Published ")
    process.signal_group(signal.SIGINT)
    process.wait_for(" Draining ")
    process.signal_group(signal.SIGINT)

    assert process.wait() == 130
    known = world.survey()
    assert known.commits[-1].step >= 5
    assert known.done is not None
    assert known.done.outcome == "stopped"
    finish(world, "--stuck-at", "12")


@pytest.mark.parametrize("whole_group", [False, True], ids=["to-the-agent", "to-the-group"])
def test_sigterm_loses_no_step_and_is_75(world: World, whole_group: bool) -> None:
    process = world.run_harness(command=world.tiny(steps=100_000, step_s=0.003))
    process.wait_for(" Published ")
    (process.signal_group if whole_group else process.signal)(signal.SIGTERM)

    check_left_with_everything(world, process)


def test_sigterm_to_the_trainer_alone_counts_as_well(world: World) -> None:
    process = held(world)
    os.kill(int(process.wait_for(r"TrainerStarted pid=(\d+)")[1]), signal.SIGTERM)

    check_left_with_everything(world, process)
    finish(world)


# ---- notices --------------------------------------------------------------------------------------------------------


def test_a_drain_file_is_a_notice(world: World) -> None:
    file = world.root / "drain"
    process = held(world, "--drain-file", str(file))
    file.touch()

    check_left_with_everything(world, process)
    finish(world)


@pytest.mark.parametrize("clock", ["right", "an hour wrong"])
def test_a_spot_notice_loses_no_step_whatever_the_clock_says(world: World, clock: str) -> None:
    with MetadataSimulator() as metadata:
        if clock != "right":
            metadata.fault(Fault.CLOCK_OFFSET)
        process = held(world, "--metadata", metadata.url)
        metadata.notice(lead_s=3600.0)

        check_left_with_everything(world, process)

    seen = process.wait_for(r"NoticeSeen kind=interrupt source=\"ec2 spot\" in_s=([\d.]+)")
    assert 3000 < float(seen[1]) <= 3601
    finish(world)


def test_the_end_of_an_auto_scaling_instance_is_a_notice(world: World) -> None:
    with MetadataSimulator() as metadata:
        metadata.lifecycle("InService")
        process = held(world, "--metadata", metadata.url)
        metadata.lifecycle("Terminated")

        check_left_with_everything(world, process)
    assert "ec2 autoscaling" in process.stderr


def test_a_rebalance_recommendation_makes_a_snapshot_durable_and_training_goes_on(world: World) -> None:
    world.has_local = True  # where the store's turn would come much later
    with MetadataSimulator() as metadata:
        process = held(world, "--durable-every-s", "1000", "--metadata", metadata.url)
        metadata.rebalance()
        process.wait_for(" NoticeSeen kind=rebalance")
        process.wait_for(" Published tier=remote [^\n]*step=12 ")
        world.released.touch()

        assert process.wait() == 0, process.stderr
    assert " Draining " not in process.stderr
    world.check_tiny(STEPS)


def test_a_notice_before_the_trainer_connects_is_told_to_it_and_nothing_durable_is_lost(world: World) -> None:
    process = held(world)
    process.signal(signal.SIGTERM)
    check_left_with_everything(world, process)

    ready, drain = world.root / "ready", world.root / "drain"
    waits = 'trap "" TERM; touch "$1"; while [ ! -e "$2" ]; do sleep 0.01; done; shift 2; exec "$@"'
    late = ["sh", "-c", waits, "sh", ready, world.released, *world.tiny(*HOLD)]
    noticed = world.run_rigged(*FAST, "--drain-file", str(drain), "--at", "NoticeSeen:1:release", command=late)
    world.wait_until(ready.exists, "a program that does not hear SIGTERM")
    drain.touch()

    assert noticed.wait() == 75, noticed.stderr
    assert noticed.stderr.index(" NoticeSeen ") < noticed.stderr.index(" TrainerConnected ")
    finish(world)


def test_a_trainer_that_reaches_no_boundary_in_time_is_stopped_and_the_newest_sealed_is_durable(world: World) -> None:
    file = world.root / "drain"
    process = held(world, "--drain-file", str(file), trainer=("--stuck-at", "12"))
    process.wait_for(r" Published [^\n]*step=10 ")
    file.write_text("3")

    assert process.wait() == 75, process.stderr
    known = world.survey()
    assert known.done is not None
    assert known.done.step == known.commits[-1].step == max(steps_said(process.stderr, "Sealed"))
    finish(world, "--stuck-at", "12")


def test_a_machine_without_a_metadata_service_is_not_noisier(world: World) -> None:
    process = world.run_harness("--metadata", "http://127.0.0.1:9", command=world.tiny())

    assert process.wait() == 0, process.stderr
    assert "Source" not in process.stderr


def test_a_metadata_service_that_does_not_answer_is_not_waited_for(world: World) -> None:
    """The first question is given so much time that whoever waited for its answer, in passing or at the end, hung."""
    with MetadataSimulator() as metadata:
        metadata.fault(Fault.HANG)
        process = world.run_rigged(*FAST, "--metadata", metadata.url, "--answer-s", "100000", command=world.tiny(*HOLD))
        world.wait_until(lambda: bool(metadata.state()["requests"]), "a question")
        process.wait_for(" FirstStep ")
        world.released.touch()

        assert process.wait() == 0, process.stderr
    assert "Source" not in process.stderr
    world.check_tiny(STEPS)


def test_a_source_that_is_blind_is_told_once(world: World) -> None:
    process = world.run_rigged(
        *FAST, "--notices", "down", "--blind-after-s", "0.5", command=world.tiny(steps=100_000, step_s=0.01)
    )
    process.wait_for(" SourceBlind ")
    process.wait_for(r"( Published [^\n]*\n[^\0]*){5}")
    process.signal(signal.SIGTERM)

    check_left_with_everything(world, process)
    assert process.stderr.count("SourceBlind") == 1


# ---- without `harness run` ------------------------------------------------------------------------------------------


def test_a_script_that_is_started_plainly_starts_an_agent_and_leaves_none(world: World) -> None:
    settings = {"HARNESS_STORE": str(world.store), "HARNESS_RUN": world.run, "HARNESS_METADATA": "off"}
    killed = world.start(*world.tiny(*HOLD), env=settings)
    world.wait_until_durable(5)
    killed.signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    world.wait_gone()
    floor = world.survey().commits[-1].step

    world.released.touch()
    before = len(world.steps_of_curve())
    again = world.start(*world.tiny(*HOLD), env=settings)

    assert again.wait() == 0, again.stderr
    world.wait_gone()
    assert not world.place.socket.exists()
    assert world.steps_of_curve()[before] == floor + 1
    assert world.survey().finished_at == STEPS
    world.check_tiny(STEPS)


def test_a_script_that_is_started_again_at_once_takes_over_from_the_agent_that_still_saves(world: World) -> None:
    settings = {"HARNESS_STORE": str(world.store), "HARNESS_RUN": world.run, "HARNESS_METADATA": "off"}
    killed = world.start(*world.tiny(*HOLD), env=settings)
    world.wait_until_durable(5)
    killed.signal(signal.SIGKILL)
    world.released.touch()
    again = world.start(*world.tiny(*HOLD), env=settings)

    assert again.wait() == 0, again.stderr
    assert killed.wait() == -signal.SIGKILL
    world.wait_gone()
    world.check_tiny(STEPS)


def test_a_script_that_is_started_plainly_is_told_why_its_run_does_not_begin(world: World) -> None:
    """Its agent ended without a word, and so did four others that it started: "the agent died"."""
    settings = {"HARNESS_STORE": str(world.store), "HARNESS_RUN": world.run, "HARNESS_METADATA": "off"}
    assert world.start(*world.tiny(), env=settings).wait() == 0
    world.wait_gone()

    again = world.start(*world.tiny(), env=settings)

    assert again.wait() == 1
    last = again.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"harness.errors.RunFinished: run '{world.run}' finished at step {STEPS}: --fresh (in Python:"
    )
    assert "the agent died" not in again.stderr
    world.wait_gone()


LATE = """
import os, sys

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=int(sys.argv.pop(1))):
        kill(pid, signum)

sys.late = Late()  # which goes when Python takes itself down, and has let go of its handlers
from harness.cli.app import main
main()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_after_the_last_word_does_not_change_the_exit_code(world: World, signum: int) -> None:
    """In the soak: 74 was recorded, and the shutdown of the machine made it 143."""
    late = (sys.executable, "-c", LATE, str(int(signum)))
    process = world.start(*late, "run", *world.options(), "--", *script(world, "raise SystemExit(3)"))

    assert process.wait() == 3, process.stderr
    assert " Ended outcome=failed exit_code=3" in process.stderr


CARELESS = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets how children ended
from harness.cli.app import main
main()
"""


def test_a_crash_is_a_crash_also_where_the_launcher_ignores_how_its_children_end(world: World) -> None:
    """It was recorded as a program that had stopped well, with exit code 0, and no start followed."""
    killed = script(world, "import os; os.kill(os.getpid(), 9)")
    process = world.start(sys.executable, "-c", CARELESS, "run", *world.options(), "--", *killed)

    assert process.wait() == 128 + signal.SIGKILL, process.stderr
