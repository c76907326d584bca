"""How soon is a cold, verified snapshot in the live state? Good enough is:

- the best of safe_open and a copy, torch.load and a copy, DCP.load: at least 1.8 times ours;
- at most 1.25 times a plain O_DIRECT read of as many bytes into memory that is there already.

Ours is a start of `harness run` that resumes, with every byte compared with its committed checksum: what the agent
fetches and what the trainer restores, one after the other; and another start in which they overlap, as in earnest,
whose bar is that of bench_resume_overlap.py. The others compare nothing. In each round everybody reads once, in a new
process, files that were taken out of the page cache just before.

    python benchmarks/bench_load.py [--sizes 0.4,2] [--rounds 5] [--directory /mnt/disk] [--check] [--json]

Sizes as in bench_save.py. The disk needs room for five states.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from circumstances import Row, Verdict, at_least, at_most, circumstances, environment, show, spread
from gpt_state import Size
from limits import have_memory, make_cold
from load_session import LIMIT, MEMORY_FOR

BAR_PEER, BAR_LIMIT = 1.8, 1.25
SCRIPT = Path(__file__).with_name("load_session.py")
PATIENCE_S = 600.0


def main() -> int:
    """Measure, print, judge."""
    options = parse()
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as name:
            found = measure(Path(name), size, options.rounds)
        rows += rows_of(size, found)
        verdicts += judge(size, found)
    show(circumstances(["torch", "safetensors"]), rows, verdicts, as_json=options.json)
    return 1 if options.check and not all(verdict.met for verdict in verdicts) else 0


@dataclass
class Found:
    """Seconds, a number for each round.

    Attributes:
        bytes: of the state.
        others: by name; the limit among them.
        fetch: the agent's, verified, into a slot.
        loaded: import and construction, after the fetch.
        restore: from the slot into the live state.
        first_step: in a start where they overlap, since the agent's start.
    """

    bytes: int
    others: dict[str, list[float]] = field(default_factory=dict)
    fetch: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)

    @property
    def ours(self) -> list[float]:
        return [fetch + restore for fetch, restore in zip(self.fetch, self.restore, strict=True)]


def measure(directory: Path, size: Size, rounds: int) -> Found:
    """Save once, by everybody; then load, round after round."""
    peers, store = directory / "peers", directory / "store"
    peers.mkdir()
    wrote = ask("write", str(peers), str(size))
    save(directory, store, size)
    found = Found(int(wrote["bytes"]))
    for number in range(rounds):
        for name, seconds in ask("read", str(peers), str(size)).items():
            found.others.setdefault(name, []).append(seconds)
        for after in (True, False):
            have_memory(MEMORY_FOR * found.bytes)
            with resumed(directory / f"round-{number}-{after}", store, size, after=after) as (log, told):
                if told["digest"] != wrote["digest"]:
                    raise AssertionError("the harness did not restore what was saved")
                if after:
                    found.fetch.append(seconds_of("Fetched", log))
                    found.restore.append(seconds_of("Restored", log))
                    found.loaded.append(told["loaded_s"])
                else:
                    found.first_step.append(seconds_of("FirstStep", log))
    return found


def ask(*arguments: str) -> dict[str, float]:
    """What a process of load_session.py says."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
    told: dict[str, float] = json.loads(done.stdout)
    return told


def save(directory: Path, store: Path, size: Size) -> None:
    """A run that was interrupted after its first steps."""
    directory.joinpath("save").mkdir()
    with harness_run(directory / "save", store, ["train", str(size)]) as (process, log):
        wait_for(process, log, "FirstStep")
        process.send_signal(signal.SIGTERM)
        wait_for(process, log, "Ended outcome=interrupted")
        process.wait(PATIENCE_S)


@contextlib.contextmanager
def resumed(directory: Path, store: Path, size: Size, *, after: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """A start of the run from a copy of its cold store: the agent's log, and what the trainer told."""
    directory.mkdir()
    shutil.copytree(store, directory / "store", copy_function=os.link)  # nothing is ever modified there
    make_cold(directory / "store")
    arguments = ["resume", str(size), str(directory / "log"), *(["--after"] if after else [])]
    with harness_run(directory, directory / "store", arguments) as (process, log):
        told = json.loads(wait_for(process, directory / "told", "}"))
        yield log.read_text(), told
    shutil.rmtree(directory)


@contextlib.contextmanager
def harness_run(
    directory: Path, store: Path, arguments: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A running `harness run` of load_session.py, and its log. It is killed at the end."""
    with (directory / "log").open("wb") as log, (directory / "told").open("wb") as told:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "harness", "run", "--store", str(store), "--run", "bench-load"),
                *("--metadata", "off", "--every-s", "100000", "--"),
                *(sys.executable, "-W", "ignore", str(SCRIPT), *arguments),
            ],
            env=environment(XDG_RUNTIME_DIR=str(directory)),
            stdout=told,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process, directory / "log"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(process: subprocess.Popen[bytes], path: Path, words: str) -> str:
    """The file's text, once `words` are in it."""
    give_up_at = time.monotonic() + PATIENCE_S
    while words not in (text := path.read_text(errors="replace")):
        if time.monotonic() > give_up_at or process.poll() is not None:
            log = path.with_name("log").read_text(errors="replace")
            raise SystemExit(f"{path.name} did not say {words!r}; the log of the run:\n{log[-4000:]}")
        time.sleep(0.01)
    return text


def seconds_of(event: str, log: str) -> float:
    """What the agent's log says that it took."""
    found = re.search(rf"\b{event} .*?\bseconds=([\d.]+)", log)
    if found is None:
        raise SystemExit(f"the agent told no seconds of {event}:\n{log}")
    return float(found[1])


def rows_of(size: Size, found: Found) -> list[Row]:
    what = f"{size.words} ({found.bytes / 1e9:.2f})"
    figures = {
        "ours: fetch, verify, restore": found.ours,
        **found.others,
        "ours: fetch and verify": found.fetch,
        "ours: restore": found.restore,
        "import and construction": found.loaded,
        "ours: first step, all of it overlapping": found.first_step,
    }
    return [{"state": what, "cold": name, "seconds": spread(seconds)} for name, seconds in figures.items()]


def judge(size: Size, found: Found) -> list[Verdict]:
    medians: dict[str, Any] = {name: statistics.median(seconds) for name, seconds in found.others.items()}
    ours, limit = statistics.median(found.ours), medians.pop(LIMIT)
    nearest = min(medians, key=medians.__getitem__)
    return [
        at_least(f"{size.words}: cold resume, {nearest} / ours, verified", BAR_PEER, medians[nearest] / ours),
        at_most(f"{size.words}: cold resume, ours, verified / O_DIRECT read", BAR_LIMIT, ours / limit),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [Size.parse(part) for part in text.split(",")], default="0.4,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk that is measured; default: the temporary one")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
