"""An AWS account of the tests' own: a moto server in a process of its own, which can be copied with all that is in it.

Owns its start, copies and their end; knows nothing of what is in them. The server is `tests.support.aws_server`: what
only asks it does not import moto.

A server lives as long as anybody holds its *lease*, a lock on a file: tests of several processes share one, and it ends
by itself with the last of them, even where that one was killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3

from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
NUMBER = "123456789012"  # moto's, of every account that nobody has named
REGION = "eu-west-1"
COPY = "/copy-this-account"


@dataclass(frozen=True)
class Account:
    """A server that answers for all of AWS."""

    url: str
    pid: int

    def client(self, service: str, region: str = REGION) -> Any:
        return _client(self.url, service, region)

    def environment(self, region: str = REGION) -> dict[str, str]:
        """For a process that is to find this account by itself."""
        names = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
        return {
            **{names[name]: value for name, value in credentials().items()},
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": region,
            "AWS_REGION": region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def copy(self) -> Account:
        """Another account that has all that this one has now. Of objects: those below moto's 16 MB of memory."""
        with urlopen(Request(self.url + COPY, method="POST"), timeout=HANG_S) as reply:
            return Account(**json.load(reply))

    def end(self) -> None:
        """Nobody answers any more when this returns."""
        process = os.pidfd_open(self.pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            assert select.select([process], [], [], HANG_S)[0], f"{self.pid} does not die"
        finally:
            os.close(process)


@cache
def _client(url: str, service: str, region: str) -> Any:
    """Made once: reading a service's model takes longer than most calls."""
    return boto3.client(service, region_name=region, endpoint_url=url, **credentials())


def credentials() -> dict[str, str]:
    return {"aws_access_key_id": "tests", "aws_secret_access_key": "tests"}


class Lease:
    """While one of these is held, the servers that were started on `path` live."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def release(self) -> None:
        self._file.close()


def open_account(lease_path: Path, log: Path) -> Account:
    """Start an empty account; somebody, its caller too, holds a `Lease` on `lease_path`."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.aws_server", str(lease_path)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # an interrupt of the first test process is not the end of the last one
            env={name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))},
        )
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.readline()
    process.returncode = 0  # it is everybody's now: nobody waits for it here
    if not said:
        raise RuntimeError(f"no account: the server died, and left in {log}: {log.read_text()[-2000:]}")
    return Account(**json.loads(said))
