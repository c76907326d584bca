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
import json, os, signal, sys
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
    Process(takes, lambda: None, lambda: None).hook()


def send(signum=signal.SIGTERM):
    os.kill(os.getpid(), signum)


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
