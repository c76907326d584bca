"""No test depends on how fast the machine is today: what would make one do so is refused here, as it is written.

A limit of one's own, a stopwatch and a process that nobody reaps are how tests became red by luck. What may stand in
spite of it is listed, each with its reason; an entry that is not needed any more is refused too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
WAITS = {"wait", "join", "wait_for", "acquire", "communicate", "result", "sleep", "select"}
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}

A_POLL = "a look again: the end of the wait is what is looked for"
NOT_TOO_EARLY = "time for what must not happen: on a slow machine it passes too easily, and never fails"
PRODUCT = "a limit of the product, which has to run out"
LEAST_GRACE_S = 30.0
"""What a run needs to leave on a machine that stands still for a while."""

ALLOWED: dict[tuple[str, str], str] = {
    # Clocks
    ("soak", "clock"): "how long the soak disturbs, and how long ago something was durable, is its subject",
    ("support/clock.py", "clock"): "the one clock",
    ("terraform/every_case.py", "clock"): "how long a case took is told, and judges nothing",
    ("support/harness_run.py", "clock"): "it puts the wall clock ahead",
    ("support/steady.py", "clock"): "how long a round took is told, and judges nothing",
    ("support/s3_faults.py", "clock"): "a fault that lasts for seconds; tests wait for its end, not for the seconds",
    ("support/tiny_trainer.py", "clock"): "moments that a trainer tells its agent",
    # Waits and limits
    ("power/disk.py", "wait"): A_POLL,
    ("soak", "wait"): A_POLL,
    ("support/init_box.py", "wait"): A_POLL,
    ("support/library_program.py", "wait"): A_POLL,
    ("support/leaving_trainer.py", "wait"): A_POLL,
    ("support/process.py", "wait"): A_POLL,
    ("support/saving_program.py", "wait"): A_POLL,
    ("support/patiently.py", "wait"): A_POLL,
    ("support/validating_ranks.py", "wait"): A_POLL,
    ("support/tiny_trainer.py", "wait"): A_POLL,
    ("support/torch_trainer.py", "wait"): A_POLL,
    ("support/world.py", "wait"): A_POLL,
    (
        "unit/agent/resume/test_startup.py",
        "wait",
    ): NOT_TOO_EARLY,
    (
        "unit/agent/resume/test_finder.py",
        "wait",
    ): NOT_TOO_EARLY,
    ("unit/agent/save/test_pipeline.py", "wait"): A_POLL,
    ("unit/agent/save/test_tier.py", "wait"): A_POLL,
    ("unit/node/test_attempts.py", "wait"): A_POLL,
    ("unit/watch/test_asking.py", "wait"): A_POLL,
    ("unit/watch/test_watcher.py", "wait"): A_POLL,
    ("unit/cloud/aws/test_metadata.py", "wait"): "a service that drips, for as long as a test wants",
    ("unit/inspect/doctor/test_host.py", "limit"): PRODUCT,
    ("unit/cloud/aws/test_metadata.py", "limit"): PRODUCT,
    ("conftest.py", "limit"): "it sets every test's",
    # Deadlines
    ("soak", "deadline"): "the soak asks a store that may hang",
    ("support/harness_run.py", "deadline"): "of a notice: in five minutes, by the product's clock",
    ("unit/cloud/aws/test_instance.py", "deadline"): PRODUCT,
    # Graces
    ("process/faults/test_silence.py", "grace"): PRODUCT,
    ("process/kills/test_every_event.py", "grace"): "too short for any snapshot is the subject",
    ("process/s3/test_s3.py", "grace"): PRODUCT,
    ("process/test_third_pair_of_eyes.py", "grace"): PRODUCT,
    ("ranks/test_faults.py", "grace"): PRODUCT,
    # Processes
    ("node/machine.py", "process"): "a script of the node, in a group that is killed with it",
    ("power/test_power_loss.py", "process"): "it is stopped and continued from outside, call by call",
    ("soak", "process"): "hosts of the soak: each kills its own",
    ("support", "process"): "here are those who reap",
    ("unit/cloud/directory/test_store.py", "process"): "writers that race, or die in the middle, and are waited for",
    ("unit/ipc/test_channel.py", "process"): "listens as another user until it is killed",
    ("unit/ipc/test_process.py", "process"): "whose death is the subject",
    ("unit/ipc/test_runtime_dir.py", "process"): "holds a lock until it is killed",
    ("unit/node/test_attempts.py", "process"): "somebody else's process, which its own parent reaps",
    ("unit/node/test_job.py", "process"): "whom nobody can kill is the subject",
}

Found = Iterator[tuple[int, str]]


def number(node: ast.expr) -> bool:
    """Whether this is a number, as it stands there, and another one than 0."""
    if isinstance(node, ast.UnaryOp):
        return number(node.operand)
    if isinstance(node, ast.BinOp):
        return number(node.left) and number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value != 0


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def clocks(tree: ast.AST) -> Found:
    """A stopwatch."""
    for node in ast.walk(tree):
        of_time = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
        if of_time and node.attr in CLOCKS:
            yield node.lineno, "clock"


def waits(tree: ast.AST) -> Found:
    """A wait for so many seconds."""
    for call in calls(tree):
        if name_of(call) in WAITS and isinstance(call.func, ast.Attribute) and len(call.args) == 1:
            seconds = call.args[0]
            if number(seconds) and isinstance(ast.literal_eval(seconds), float):  # a whole number counts something
                yield call.lineno, "wait"


def limits(tree: ast.AST) -> Found:
    """A time-out, or pytest's limit for a single test."""
    for call in calls(tree):
        if any(keyword.arg in ("timeout", "timeout_s") and number(keyword.value) for keyword in call.keywords):
            yield call.lineno, "limit"
        if ast.unparse(call.func) == "pytest.mark.timeout":
            yield call.lineno, "limit"


def deadlines(tree: ast.AST) -> Found:
    """A deadline that comes nearer by the real clock."""
    for call in calls(tree):
        if ast.unparse(call.func) == "Deadline.after" and len(call.args) == 1 and not call.keywords:
            yield call.lineno, "deadline"


def processes(tree: ast.AST) -> Found:
    """A process that may outlive its test."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "Popen":
            yield node.lineno, "process"


def tolerances(tree: ast.AST) -> Found:
    """Seconds that have to be about as many as others."""
    for call in calls(tree):
        if name_of(call) == "approx" and any(
            keyword.arg == "abs" and number(keyword.value) for keyword in call.keywords
        ):
            yield call.lineno, "tolerance"


def graces(tree: ast.AST) -> Found:
    """A run that has only so many seconds to leave."""
    for node in ast.walk(tree):
        words = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
        for pair in pairwise(words):
            match pair:
                case ast.Constant(value="--grace-s"), ast.Constant(value=str(text)) if float(text) < LEAST_GRACE_S:
                    yield pair[0].lineno, "grace"


RULES: tuple[Callable[[ast.AST], Found], ...] = (clocks, waits, limits, deadlines, processes, tolerances, graces)


def allowed_by(file: str, what: str) -> tuple[str, str] | None:
    """The entry of the list that lets this stand: the file's, or that of its folder."""
    places = [file, *(str(parent) for parent in Path(file).parents)]
    return next(((place, what) for place in places if (place, what) in ALLOWED), None)


def test_nothing_in_tests_depends_on_the_speed_of_the_machine() -> None:
    refused, used = list[str](), set[tuple[str, str]]()
    for path in sorted(TESTS.rglob("*.py")):
        file, tree = str(path.relative_to(TESTS)), ast.parse(path.read_text())
        for line, what in (found for rule in RULES for found in rule(tree)):
            entry = allowed_by(file, what)
            if entry is None:
                refused.append(f"tests/{file}:{line}: {what}")
            else:
                used.add(entry)

    assert not refused, "\n".join(refused)
    assert set(ALLOWED) == used, "nothing of this kind is there any more"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("began = time.monotonic()", "clock"),
        ("process.wait(5.0)", "wait"),
        ("event.wait(timeout=5)", "limit"),
        ("subprocess.run(command, timeout=2 * 60)", "limit"),
        ("@pytest.mark.timeout(600)\ndef test(): pass", "limit"),
        ("store.get('a', deadline=Deadline.after(0.2))", "deadline"),
        ("subprocess.Popen(['sleep'])", "process"),
        ("assert took == pytest.approx(3, abs=0.1)", "tolerance"),
        ("held(world, '--grace-s', '8')", "grace"),
        ("FAST = ('--grace-s', '0.5', '--slots', '2')", "grace"),
    ],
)
def test_each_rule_finds_what_it_is_for(text: str, what: str) -> None:
    assert [found for rule in RULES for _, found in rule(ast.parse(text))] == [what]


@pytest.mark.parametrize(
    "text",
    ["process.wait()", "event.wait(HANG_S)", "x.wait(timeout_s=0)", "Deadline.after(5.0, clock)", "standing(5.0)",
     "held('--grace-s', '30')", "held('--grace-s', str(HANG_S))", "approx(100.0, rel=0.5)"],
)  # fmt: skip
def test_what_does_not_depend_on_it_may_stand(text: str) -> None:
    assert not [found for rule in RULES for found in rule(ast.parse(text))]
