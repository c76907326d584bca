"""An hour of a spot fleet on this machine: a real training, and everything that can happen to it.

    ./scripts/soak                      # an hour, and some minutes to compare
    ./scripts/soak --minutes 2 --seed 7

The driver plays the cloud: hosts with a disk and a metadata service each, one S3 server, strikes at random. At the end
the run is left alone on a fresh host, has to tidy its bucket and to finish; then the same training runs unbroken, and
every step of every life has to be the same, bit by bit. Exit code 0: nothing was violated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from cloud.errors import CloudError
from tests.soak.account import Account, account, table
from tests.soak.bucket import Bucket, Found, Promise
from tests.soak.fleet import Fleet
from tests.soak.hosts import TRAIN, Setting
from tests.soak.losses import read_curves
from tests.soak.strikes import STRIKES, Strike
from tests.soak.train import STEPS_PER_EPOCH
from tests.soak.troubles import Deck, MetadataTroubles, StoreTroubles
from tests.support.s3_server import serving

TURN_S, SAMPLE_S = 0.2, 1.0
PACE_S = 0.1
EVERY_S, DURABLE_EVERY_S, HANDOVER_S, GRACE_S = 0.7, 2.0, 20.0, 10.0
KEEP_LAST = 3
QUIET_STEPS = 120  # of the last life, in which the bucket has to become exact: a dozen seconds
AFTER_A_STEP = 0.6  # share of the strikes that wait until the job trains; the others meet it at a start, or waiting
STEADY = (0.35, 0.65)  # in this share of the time the agent is spared, so that one lives for long
LEAST_STRIKES = 3  # a short soak takes longer rather than that less happens in it
FINISHES_S, UNBROKEN_STEP_S = 300.0, 0.5


class Soak:
    """One soak, from an empty bucket to its account."""

    def __init__(self, directory: Path, endpoint: str, minutes: float, seed: int, console: Console) -> None:
        self._directory, self._console = directory, console
        self._rng, store_rng, metadata_rng = (Random(f"{seed} {of}") for of in ("strikes", "store", "metadata"))
        self._began_at = time.monotonic()
        self._for_s = 60 * minutes - min(40.0, 30 * minutes)  # what is left is for the last life and the comparison
        store = "s3://bucket/prefix"
        promise = Promise(KEEP_LAST, keep_every=50 * max(2, round(minutes)))
        options = {
            "every-s": EVERY_S,
            "durable-every-s": DURABLE_EVERY_S,
            "every-steps": 50,
            "keep-last": promise.keep_last,
            "keep-every": promise.keep_every,
            "handover-s": HANDOVER_S,
            "grace-s": GRACE_S,
            "max-crashes": 20,
        }
        flags = tuple(word for name, value in options.items() for word in (f"--{name}", f"{value:g}"))
        self._setting = Setting(directory, store, endpoint, flags, PACE_S)
        self._troubles, self._metadata = StoreTroubles(endpoint, store_rng), MetadataTroubles(metadata_rng)
        self._fleet = Fleet(self._setting, self._troubles.refuses, self.say)
        self._bucket = Bucket(endpoint, store, promise)
        self._strikes: Deck[Strike] = Deck(STRIKES, self._rng)

    def run(self) -> Account:
        """All of it. Blocks for as long as was asked, and some minutes more."""
        try:
            self._disturb()
            exact, final = self._leave_alone()
        finally:
            self._fleet.close()
        self._fleet.listen()
        unbroken = self._train_unbroken()
        same = (self._directory / "final.safetensors").exists() and (
            (self._directory / "final.safetensors").read_bytes() == (unbroken / "final.safetensors").read_bytes()
        )
        return account(
            self._fleet,
            self._troubles,
            self._metadata,
            samples=self._setting.samples,
            exact=exact,
            final=final,
            steps=read_curves(host.curve for host in self._fleet.hosts if host.curve.exists()),
            unbroken=read_curves([unbroken / "curve"]),
            same_weights=same,
            seconds=time.monotonic() - self._began_at,
        )

    # ---- what happens -----------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """Everything at random, until there is just time enough to end, and the least has happened."""
        rng, fleet, when = self._rng, self._fleet, Random()  # what comes when cannot be repeated, what comes next can
        fleet.provision(time.monotonic())
        strike_at = self._began_at + rng.uniform(4.0, 10.0)
        store_at, metadata_at, sample_at = strike_at, strike_at, 0.0
        after_a_step = True  # the next strike waits until the job trains
        struck_at = self._began_at
        for now in self._turns(math.inf):
            if now >= self._began_at + self._for_s and (fleet.strikes.total() >= LEAST_STRIKES or fleet.violations):
                break
            fleet.turn(now)
            self._troubles.access_key = fleet.active.access_key
            self._troubles.turn(now)
            if now >= sample_at:
                fleet.sample()
                sample_at = now + SAMPLE_S
            if self._troubles.is_quiet and now >= store_at:
                self.say(f"store: {self._troubles.begin(now, spare=self._is_steady(now))}")
                store_at = now + when.uniform(6.0, 16.0)
            if now >= metadata_at:
                self.say(f"metadata: {self._metadata.begin(fleet.active, now, spare=self._is_steady(now))}")
                metadata_at = now + when.uniform(8.0, 25.0)
            if after_a_step and fleet.grown_at <= struck_at:
                strike_at = max(strike_at, now + 1.0)
            elif now >= strike_at and fleet.is_whole and fleet.strike(self._strikes.draw(self._fits(now)), rng, now):
                after_a_step, struck_at = rng.random() < AFTER_A_STEP, now
                strike_at = now + (rng.uniform(2.0, 8.0) if after_a_step else rng.uniform(0.3, 6.0))

    def _is_steady(self, now: float) -> bool:
        return STEADY[0] <= (now - self._began_at) / self._for_s < STEADY[1]

    def _fits(self, now: float) -> Callable[[Strike], bool]:
        is_steady = self._is_steady(now)
        is_crowded = len(self._fleet.leaving) >= 2
        return lambda strike: (strike.spares_agent or not is_steady) and not (strike.replaced and is_crowded)

    def _leave_alone(self) -> tuple[Found | None, Found]:
        """The last life: on a fresh host, undisturbed. The bucket when it was exact (or never), and at the very end."""
        fleet = self._fleet
        self._troubles.heal()
        self.say("undisturbed from here on: the last host is told to leave, and another one finishes the run")
        fleet.clear_out(time.monotonic())
        steps = max((step.number for step in read_curves(h.curve for h in fleet.hosts if h.curve.exists())), default=0)
        self._setting.epochs = -(-(steps + QUIET_STEPS) // STEPS_PER_EPOCH)
        host = fleet.provision(time.monotonic())
        exact, seen = None, None
        for _ in self._turns(time.monotonic() + FINISHES_S):
            fleet.listen()
            fleet.sample()
            if exact is None and host.exit_code is None:
                seen = self._look() or seen
                exact = seen if seen is not None and seen.is_exact else None
            if host.has_ended():
                break
        if host.exit_code != 0:
            fleet.violate(f"h{host.number}: undisturbed, it has not finished: exit code {host.exit_code}")
        if left := fleet.left_behind():
            fleet.violate(f"processes are left behind: {left}")
        fleet.listen()
        if exact is None:
            fleet.violate(f"the bucket was never exact: {seen.words() if seen else 'nothing in it'}")
        final = self._look()
        assert final is not None, "nobody deletes any more"
        return exact, final

    def _look(self) -> Found | None:
        with contextlib.suppress(CloudError):  # retired while we looked
            return self._bucket.look(self._fleet.durable, self._fleet.quarantined)
        return None

    def _train_unbroken(self) -> Path:
        """The same training, with nothing in its way; the directory with its curve and end."""
        directory = self._directory / "unbroken"
        directory.mkdir()
        steps = self._setting.epochs * STEPS_PER_EPOCH
        self.say(f"the same {steps} steps, unbroken")
        environment = self._fleet.active.environment() | {
            "SOAK_CURVE": str(directory / "curve"),
            "SOAK_FINAL": str(directory / "final.safetensors"),
            "SOAK_PACE_S": "0",
            "HARNESS_RUNTIME_DIR": str(directory / "run"),
            "TMPDIR": str(directory),
        }
        # Under the harness too: it seeds the data workers for each batch.
        command = [
            sys.executable,
            "-m",
            "harness",
            "run",
            "--run",
            "unbroken",
            "--store",
            str(directory / "store"),
        ]
        command += ["--metadata", "off", "--every-s", "3600", "--", sys.executable, str(TRAIN)]
        with (directory / "log").open("wb") as log:
            patience_s = 60 + steps * UNBROKEN_STEP_S
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=True, timeout=patience_s)
        return directory

    def _turns(self, until: float) -> Iterator[float]:
        while (now := time.monotonic()) < until:
            yield now
            threading.Event().wait(TURN_S)

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began_at:7.1f} s  {text}"
        with (self._directory / "soak.log").open("a") as log:
            log.write(f"{line}\n")
        self._console.print(Text(line), soft_wrap=True)


@contextlib.contextmanager
def workspace() -> Iterator[tuple[Path, list[bool]]]:
    """A directory that is removed at the end unless the list says that it is to be kept."""
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp"  # sockets' paths end at 107 bytes
    directory, kept = Path(tempfile.mkdtemp(prefix="soak-", dir=parent)), [True]
    yield directory, kept
    if not kept[0]:
        shutil.rmtree(directory)


def main() -> int:
    """Exit code 0: nothing was violated."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of everything that is drawn; printed")
    parser.add_argument("--json", action="store_true", help="the account on stdout; everything else is on stderr")
    parser.add_argument("--keep", action="store_true", help="leave the directory with logs and curves in any case")
    args = parser.parse_args()

    def stop(signum: int, _frame: object) -> NoReturn:
        sys.exit(128 + signum)  # by way of every `finally`

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)
    os.environ |= {"AWS_ACCESS_KEY_ID": "DRIVER", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    console = Console(stderr=True, highlight=False)
    seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
    with workspace() as (directory, kept):
        console.print(f"soak: {args.minutes:g} minutes, --seed {seed}, {directory}", soft_wrap=True)
        with serving(bucket="bucket") as endpoint:
            found = Soak(directory, endpoint, args.minutes, seed, console).run()
        kept[0] = args.keep or bool(found.violations)
        if args.json:
            print(json.dumps({"seed": seed, **dataclasses.asdict(found)}, indent=2))
        else:
            console.print("", table(found))
        for violation in found.violations:
            console.print(Text(f"VIOLATION: {violation}"), style="bold red", soft_wrap=True)
        if kept[0]:
            console.print(f"kept: {directory}", soft_wrap=True)
        if not found.violations:
            console.print("bit-identical, nothing lost that was durable, nothing left behind", style="bold green")
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
