"""What bench_load.py starts again and again: a training script that saves or resumes, and a process where others load.

    load_session.py write DIRECTORY SIZE            every peer's files; prints the state's bytes and digest
    load_session.py read DIRECTORY SIZE             every peer loads them, from the disk; prints seconds by name
    load_session.py train SIZE                      under `harness run`: steps until it is told to leave
    load_session.py resume SIZE LOG [--after]       under `harness run`: resumes, steps once; prints seconds and digest

With `--after`, nothing is imported before the agent has fetched: what overlaps in a real start is told apart.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

STARTED = time.perf_counter()
LIMIT = "limit: O_DIRECT read"
MEMORY_FOR = 3  # times the state: a page cache's, a slot's, somebody's own
POLL_S = 0.005
PATIENCE_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["write", "read", "train", "resume"])
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--after", action="store_true")
    options = parser.parse_args()
    if options.what == "write":
        print(json.dumps(write(Path(options.paths[0]), options.paths[1])))
    elif options.what == "read":
        print(json.dumps(read(Path(options.paths[0]), options.paths[1])))
    elif options.what == "train":
        train(options.paths[0])
    else:
        print(json.dumps(resume(options.paths[0], Path(options.paths[1]), after=options.after)), flush=True)
        time.sleep(PATIENCE_S)  # it leaves by being killed: the end of a run would be another snapshot


def write(directory: Path, size: str) -> dict[str, float]:
    from gpt_state import Size, digest, gpt_state
    from peers import LOAD_PEERS, SAVE_PEERS, one_process_group

    state = gpt_state(Size.parse(size))
    with one_process_group():
        for name in dict.fromkeys(writer for writer, _ in LOAD_PEERS.values()):
            SAVE_PEERS[name](directory).save(state, directory / name)
    return {"bytes": state.bytes, "digest": digest(state)}


def read(directory: Path, size: str) -> dict[str, float]:
    """Seconds from a cold file to the live tensors."""
    from gpt_state import Size, digest, gpt_state
    from limits import Limits, have_memory, make_cold
    from peers import LOAD_PEERS, one_process_group

    state = gpt_state(Size.parse(size))
    good = digest(state)
    found: dict[str, float] = {}
    limits = Limits(state.bytes)
    found[LIMIT] = limits.read_s(directory / "safetensors" / "state.safetensors")
    with one_process_group():
        for name, (writer, load) in LOAD_PEERS.items():
            state.clear()
            if not make_cold(directory / writer):
                raise SystemExit(f"{directory} stays in the page cache: name one on a disk with --directory")
            have_memory(MEMORY_FOR * state.bytes)
            began = time.perf_counter()
            load(state, directory / writer)
            found[name] = time.perf_counter() - began
            if digest(state) != good:
                raise AssertionError(f"{name} did not load what was saved")
    return found


def train(size: str) -> None:
    from gpt_state import Size, gpt_state

    from harness import Checkpointer

    state = gpt_state(Size.parse(size))
    ckpt = Checkpointer(accumulate=1, model=state.model, optimizer=state.optimizer)
    ckpt.resume()
    while True:
        time.sleep(POLL_S)
        ckpt.step()


def resume(size: str, log: Path, *, after: bool) -> dict[str, float]:
    """Seconds until there is a state to restore into, and the digest of what it became."""
    began = STARTED
    if after:
        wait_for(log, "Fetched")
        began = time.perf_counter()
    from gpt_state import Size, digest, gpt_state

    from harness import Checkpointer

    state = gpt_state(Size.parse(size), seed=2)
    loaded = time.perf_counter()
    ckpt = Checkpointer(accumulate=1, model=state.model, optimizer=state.optimizer)
    ckpt.resume()
    ckpt.step()
    wait_for(log, "FirstStep")
    return {"loaded_s": loaded - began, "digest": digest(state)}


def wait_for(log: Path, words: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while words not in log.read_text(errors="replace"):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"the agent did not say {words}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
