"""The server behind a `tests.support.aws_account`: moto, which forks a copy of itself when it is asked for one.

A copy listens on a port of its own: what one test changes in its copy, another does not see, and nobody builds the same
account twice.

    python -m tests.support.aws_server LEASE
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from tests.support.aws_account import COPY, Account
from tests.support.moto_mended import mend


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
