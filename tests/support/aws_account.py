"""An AWS account of the tests' own: a moto server in a process of its own, which can be copied with all that is in it.

Owns the server, its copies and their end; knows nothing of what is in them. A copy is a fork of the server that listens
on a port of its own: what one test changes in its copy, another does not see, and nobody builds the same account twice.

A server lives as long as anybody holds its *lease*, a lock on a file: tests of several processes share one, and it ends
by itself with the last of them, even where that one was killed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from tests.support.moto_mended import mend
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
            [sys.executable, "-m", "tests.support.aws_account", str(lease_path)],
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


# ---- the server -----------------------------------------------------------------------------------------------------


class _Application:
    """moto, one call at a time: it has no locks of its own, and nothing is half done while it is copied."""

    def __init__(self, lease_path: Path) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lease_path = lease_path
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._one_at_a_time:
            if environ["PATH_INFO"] != COPY:
                return self._moto(environ, start_response)
            body = self._copy()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    def serve(self, announce: Callable[[bytes], None]) -> None:
        """Listen, say where, and answer until nobody holds the lease."""
        server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=_Quiet)
        threading.Thread(target=self._end_with_the_lease, daemon=True).start()
        announce(_described(server))
        server.serve_forever()

    def _copy(self) -> bytes:
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:  # of this process's threads only this one is left, and it does not return: it is the copy's server
                announcement = os.dup(writer)
                _let_go_of_all_but(announcement)  # the sockets and the lease's file are the other's
                self._one_at_a_time = threading.Lock()
                self.serve(lambda body: _say_and_close(announcement, body))
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb") as said:
            return said.read()

    def _end_with_the_lease(self) -> None:
        with self._lease_path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os._exit(0)


class _Quiet(MotoRequestHandler):
    # Head and body leave together. Between the two the provider closes one connection in some hundred, and asks again;
    # what it had asked was done: to delete a rule, which is not there the second time.
    wbufsize = -1

    def handle_expect_100(self) -> bool:
        """Let the client go on at once. It would wait for a second before it sends its body."""
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def log_request(self, *_: object) -> None:
        """What goes wrong is said all the same."""


def _described(server: BaseWSGIServer) -> bytes:
    return json.dumps(asdict(Account(f"http://127.0.0.1:{server.port}", os.getpid()))).encode()


def _let_go_of_all_but(kept: int) -> None:
    """Close what is open, and keep the numbers: an object that is collected later still closes its own."""
    with os.scandir("/proc/self/fd") as found:
        numbers = [int(entry.name) for entry in found]
    for number in numbers:
        if number > 2 and number != kept:
            os.dup2(0, number)  # which is /dev/null


def _say_and_close(descriptor: int, body: bytes) -> None:
    os.write(descriptor, body)
    os.dup2(0, descriptor)  # which is /dev/null: the number stays taken


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    mend()
    _Application(Path(sys.argv[1])).serve(lambda body: _say_and_close(1, body + b"\n"))


if __name__ == "__main__":
    main()
