"""The program's own signal handlers, whenever it installs them: beside ours, and not instead of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import json, os, signal, sys, time
from harness.trainer.process import Process

heard = []

def handler(name, calls=None):
    def handle(signum, frame):
        heard.append(name)
        if callable(calls):
            calls(signum, frame)
    return handle


def takes(signum):
    heard.append("ours")
    return True


def hook():
    process = Process(takes, lambda: None, lambda: None)
    process.attach()
    process.hook()
    return process


def send(signum=signal.SIGTERM):
    os.kill(os.getpid(), signum)


def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def rest():
    while True:  # signal.pause() would not see a signal that came just before it
        time.sleep(0.01)


def run(own, between):
    if own is not None:
        signal.signal(signal.SIGTERM, own)
    hook()
    between()
    send()
    print(json.dumps(heard))
"""

CASES = {
    "none": ("run(None, lambda: None)", ["ours"]),
    "one before": ("run(handler('a'), lambda: None)", ["ours", "a"]),
    "one after": ("run(None, lambda: signal.signal(signal.SIGTERM, handler('a')))", ["ours", "a"]),
    "one before and one after": (
        "run(handler('a'), lambda: signal.signal(signal.SIGTERM, handler('b')))",
        ["ours", "b"],  # it takes the place of the program's own first one, as ever
    ),
    "one that calls the one before": (
        "run(handler('a'), lambda: signal.signal(signal.SIGTERM, handler('b', signal.getsignal(signal.SIGTERM))))",
        ["ours", "b", "a"],
    ),
    "one that is told of the one before": (
        "run(handler('a'), lambda: chain())\n",
        ["ours", "b", "a"],
    ),
    "one that is put back": (
        "run(handler('a'), lambda: signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, handler('b'))))",
        ["ours", "a"],
    ),
    "one that is put back as it was found": (
        "run(handler('a'), lambda: put_back())",
        ["ours", "a"],
    ),
    "one that gives it up": ("run(handler('a'), lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))", ["ours"]),
    "the system's own": ("run(handler('a'), lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))", ["ours"]),
    "one of a thread": ("run(handler('a'), lambda: in_thread())", ["ours", "a"]),
}

HELPERS = """
import threading


def chain():
    before = []
    before.append(signal.signal(signal.SIGTERM, lambda *got: (heard.append("b"), before[0](*got))))


def put_back():
    found = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, handler("b"))
    signal.signal(signal.SIGTERM, found)


def in_thread():
    def install():
        try:
            signal.signal(signal.SIGTERM, handler("b"))
        except ValueError:
            pass  # only in the main thread, as ever
    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("case", CASES)
def test_a_handler_of_the_program_s_own_is_called_after_ours(case: str) -> None:
    call, heard = CASES[case]
    program = PROGRAM + HELPERS + call
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == heard


OTHERS = {
    "a handler installed past us is found and chained": (
        """
from signal import signal as install
process = Process(takes, lambda: None, lambda: None)
process.hook()
install(signal.SIGTERM, handler("a"))
process.keep_hold()
send()
print(json.dumps(heard))
""",
        ["ours", "a"],
    ),
    "what the program asks for is its own": (
        """
mine = handler("a")
hook()
signal.signal(signal.SIGTERM, mine)
print(json.dumps([signal.getsignal(signal.SIGTERM) is mine, signal.signal(signal.SIGTERM, signal.SIG_DFL) is mine]))
""",
        [True, True],
    ),
    "a first Ctrl-C that was delayed by the program interrupts nothing": (
        """
hook()
late = []
before = signal.signal(signal.SIGINT, lambda *got: late.append(got))
send(signal.SIGINT)
signal.signal(signal.SIGINT, before)
before(*late[0])
print(json.dumps(heard))
""",
        ["ours"],
    ),
    "a second one does": (
        """
hook()
send(signal.SIGINT)
try:
    send(signal.SIGINT)
except KeyboardInterrupt:
    heard.append("interrupted")
print(json.dumps(heard))
""",
        ["ours", "interrupted"],
    ),
    "asyncio's handler interrupts nothing either": (
        """
import asyncio

async def main():
    hook()
    send(signal.SIGINT)
    await asyncio.sleep(0)
    heard.append("went on")

asyncio.run(main())
print(json.dumps(heard))
""",
        ["ours", "went on"],
    ),
    "SIGHUP that is ignored stays ignored": (
        """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
hook()
send(signal.SIGHUP)
print(json.dumps(heard))
""",
        [],
    ),
    "SIGHUP is ours": (
        """
hook()
send(signal.SIGHUP)
print(json.dumps(heard))
""",
        ["ours"],
    ),
    "a child that is ended at once ends": (
        """
hook()
codes = []
for _ in range(20):
    if not (child := os.fork()):
        rest()
    os.kill(child, signal.SIGTERM)
    codes.append(wait(child))
print(json.dumps(sorted(set(codes))))
""",
        [-15],
    ),
    "a child has the program's own handler": (
        """
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
hook()
if not (child := os.fork()):
    rest()
os.kill(child, signal.SIGTERM)
print(json.dumps([wait(child), heard]))
""",
        [7, []],
    ),
    "a child outlives the first Ctrl-C, and not the second": (
        """
hook()
ready, tell = os.pipe()
if not (child := os.fork()):
    send(signal.SIGINT)
    try:
        os.write(tell, b"x")
        rest()
    except KeyboardInterrupt:
        os._exit(9)
os.read(ready, 1)
os.kill(child, signal.SIGINT)
print(json.dumps(wait(child)))
""",
        9,
    ),
    "exit and quit are sys.exit": (
        """
process = Process(takes, lambda: None, lambda: None)
process.hook()
told = []
for leave in (sys.exit, exit, quit):
    process.go_on()
    try:
        leave(3)
    except SystemExit as err:
        told.append([err.code, process.exiting, process.failed])
process.go_on()
print(json.dumps([told, process.exiting, process.failed]))
""",
        [[[3, True, True]] * 3, False, False],
    ),
    "one of our errors that a framework turns into an exit code is hopeless": (
        """
from harness.errors import StateError
process = Process(takes, lambda: None, lambda: None)
process.hook()
try:
    raise StateError("other loops")
except StateError:
    try:
        sys.exit(1)
    except SystemExit:
        pass
print(json.dumps(process.hopeless))
""",
        True,
    ),
    "an exception in the thread that trains is a failure, and in another it is none": (
        """
import threading
threading.excepthook = lambda args: heard.append(str(args.exc_value))
process = Process(takes, lambda: None, lambda: None)
process.hook()

def fail(trains):
    if trains:
        process.go_on()
    raise RuntimeError("x")

for trains in (False, True):
    thread = threading.Thread(target=fail, args=(trains,))
    thread.start()
    thread.join()
    heard.append(process.failed)
print(json.dumps(heard))
""",
        ["x", False, "x", True],
    ),
}


@pytest.mark.parametrize("rule", OTHERS)
def test_that(rule: str) -> None:
    program, said = OTHERS[rule]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == said


UNSEEN = """
import signal, sys, threading
from harness.trainer.process import Process

heard = []
own = lambda signum, frame: heard.append("own")
signal.signal(signal.SIGTERM, own)

def seen():
    handlers = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    return [sys.exit, exit, quit, threading.excepthook, *handlers]

before, functions = seen(), (signal.signal, signal.getsignal)
process = Process(lambda signum: heard.append("ours") or True, lambda: None, lambda: print("exit"))
process.attach()
assert seen() == before, "nothing is changed before the loop begins"
signal.raise_signal(signal.SIGTERM)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    heard.append("Ctrl-C")
assert heard == ["own", "Ctrl-C"], "and a signal does what it did"
assert not process.ctrl_c

process.hook()
signal.raise_signal(signal.SIGTERM)
assert heard == ["own", "Ctrl-C", "ours", "own"]
process.detach()
assert seen() == before and functions == (signal.signal, signal.getsignal), "everything is as it was"
signal.raise_signal(signal.SIGTERM)
assert heard == ["own", "Ctrl-C", "ours", "own", "own"]
print("end")
"""


def test_before_the_loop_and_after_it_the_process_is_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", UNSEEN], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("end\n", "")


@pytest.mark.parametrize(("loops", "code"), [("pass", -15), ("process.hook()", 0)])
def test_a_signal_before_the_loop_ends_a_program_that_has_no_handler(loops: str, code: int) -> None:
    program = f"""
import signal
from harness.trainer.process import Process
process = Process(lambda signum: True, lambda: None, lambda: None)
process.attach()
{loops}
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (code, "")


def test_a_loop_in_a_thread_hears_signals_too() -> None:
    program = """
import signal, threading
from harness.trainer.process import Process
heard = []
process = Process(lambda signum: heard.append(signum) or True, lambda: None, lambda: None)
process.attach()
thread = threading.Thread(target=process.hook)
thread.start()
thread.join()
signal.raise_signal(signal.SIGTERM)
print(heard == [signal.SIGTERM])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("True\n", "")
