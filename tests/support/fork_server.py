"""Processes of tests as forks of one that has imported what they import, which is most of a short life.

A server is a Python that has imported the programs of one of `KINDS` and has no thread. It forks what it is asked for,
and makes of the fork what a new interpreter is at its begin: arguments, environment, directory, descriptors, signals,
`__main__`, and what /proc shows. The asking process becomes its parent, as it would be that of a new interpreter. So
pid, exit code, process group and a kill are the real ones; the modules and the hash seed of strings are the server's.
It ends as an interpreter does until all that was registered has run and every file is flushed: its objects go with it.

Only programs of `KINDS`, and scripts that import torch, are forked; all others are new interpreters, and with
HARNESS_TEST_EXEC=1 these are too.
Agents and launchers that were forked are servers for what they start: it has to be their child.

    python -m tests.support.fork_server KIND PADDING
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
AGENT = ("harness", "tests.support.harness_run", "tests.support.launcher")
KINDS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    # programs, and what is imported besides them; each has those of AGENT too. A second word: of that program's first
    # argument, the name
    "plain": (
        [
            *AGENT,
            *(f"tests.support.{name}" for name in ("saving_program", "self_portrait", "tiny_rank", "tiny_trainer")),
        ],
        ["boto3", "harness.agent.main", "harness.cli.app"],
    ),
    "torch": (
        [
            "tests.support.graph_trainer",
            "tests.support.leaving_trainer",
            "tests.support.lora_trainer",
            "tests.support.loops",
            *(f"tests.support.library_program {library}" for library in ("accelerate", "dcp", "torch", "torch-one")),
            *(f"tests.support.patiently {script}" for script in ("watch_torch_save.py", "with_accelerate.py")),
            "tests.support.rank_trainer",
            "tests.support.torch_trainer",
            "tests.support.generating_ranks",
            "tests.support.validating_ranks",
        ],
        ["torch._dynamo", "torch.distributed.run"],  # the first optimizer imports torch._dynamo
    ),
    "transformers": (
        [
            "tests.support.hf_trainer",
            "tests.support.library_program transformers",
            "tests.support.patiently huggingface.py",
        ],
        ["torch._dynamo", "torch.distributed.run", "transformers.trainer"],
    ),
    "lightning": (
        [
            "tests.support.library_program lightning",
            "tests.support.lightning_trainer",
            "tests.support.patiently with_lightning.py",
        ],
        ["torch._dynamo", "torch.distributed.run", "lightning.pytorch"],
    ),
}
LAUNCHERS = ("torch.distributed.run",)
"""Programs that are forked where they start one that is."""
_STARTS = {
    # which module has the Popen by which a program starts others
    "harness": "subprocess",
    "tests.support.harness_run": "subprocess",
    "tests.support.launcher": "subprocess",
    "torch.distributed.run": "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
}
UNBUFFERED, SAFE_PATH = "-u", "-P"
"""Options of an interpreter; PYTHONUNBUFFERED says the first as well."""
_IMPORT = re.compile(r"^\s*(?:import|from) (torch|transformers|lightning)\b", re.MULTILINE)
_READ_AT_BEGIN = ("PYTHON", "LD_", "MALLOC_", "OMP_", "MKL_", "CUDA_", "TZ", "LANG", "LC_", "HF_", "TRANSFORMERS_")
"""Variables that an interpreter or a library reads once: what is started with others of them has another server."""
_MOST_SERVERS = 3
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PR_SET_CHILD_SUBREAPER = 36
_ENVIRONMENT_BYTES = 32_768
_BLANK = "-" * 8_192


# ---- who asks -------------------------------------------------------------------------------------------------------


def kind_of(command: Sequence[str]) -> str | None:
    """Return the kind of server that may fork a command; None for one that must be a new interpreter."""
    known = [_module(program) for programs, _ in KINDS.values() for program in programs]
    module, script = _module_of(command), _script_of(command)
    is_ours = module in (*LAUNCHERS, *known) or (script is not None and _imports(Path(script)))
    if os.environ.get("HARNESS_TEST_EXEC") or not is_ours:
        return None
    there = {*command, *(f"{word} {Path(argument).name}" for word, argument in itertools.pairwise(command))}
    imported = {name for word in command if word.endswith(".py") for name in _imports(Path(word))}
    for kind in reversed([*KINDS]):
        if not there.isdisjoint(KINDS[kind][0]) or kind in imported:
            return kind
    return None


def _imports(script: Path) -> set[str]:
    """What a script imports; nothing where it is none that can be read from here."""
    try:
        return {*_IMPORT.findall(script.read_text())}
    except (OSError, UnicodeDecodeError):
        return set()


def _module(program: str) -> str:
    return program.partition(" ")[0]


def _module_of(command: Sequence[str]) -> str | None:
    words = _words_of(command)
    return words[1] if len(words) > 1 and words[0] == "-m" else None


def _script_of(command: Sequence[str]) -> str | None:
    words = _words_of(command)
    return words[0] if words and words[0].endswith(".py") else None


def _words_of(command: Sequence[str]) -> Sequence[str]:
    """What this interpreter is told; nothing where it is another."""
    if not command or shutil.which(command[0]) != sys.executable:
        return []
    return [word for word in command[1:5] if word not in (UNBUFFERED, SAFE_PATH)]


def _read_at_begin(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_BEGIN)}


class Popen(subprocess.Popen[bytes]):
    """As `subprocess.Popen`, by a fork where that is possible."""

    def _execute_child(self, *arguments: Any, **named: Any) -> None:
        given = _SIGNATURE.bind(self, *arguments, **named).arguments
        command, environ = [os.fspath(word) for word in given["args"]], dict(given["env"] or os.environ)
        kind = kind_of(command)
        server = None if kind is None else _server(kind, _read_at_begin(environ))
        if server is None:
            super()._execute_child(*arguments, **named)  # type: ignore[misc]
            return
        kept = list(given["pass_fds"])
        streams = [
            own if own >= 0 else number
            for number, own in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"]))
        ]
        self.pid = server.fork(
            {
                "command": command,
                "environ": environ,
                "cwd": os.fspath(given["cwd"] or Path.cwd()),
                "session": given["start_new_session"],
                "kept": kept,
                "ignored": [number for number in signal.valid_signals() if _is_ignored(number)],
                "blocked": [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))],
            },
            [*streams, *kept],
        )
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def _is_ignored(number: int) -> bool:
    return number not in (signal.SIGPIPE, signal.SIGXFSZ) and signal.getsignal(number) is signal.SIG_IGN


class _Server:
    """A server's other end."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._connection, self._process, self._one_at_a_time = connection, process, threading.Lock()

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Have a process forked, with these descriptors, and return its pid: it is a child of this one."""
        with self._one_at_a_time, _adopting():
            data = json.dumps(request).encode()
            socket.send_fds(self._connection, [len(data).to_bytes(8, "big")], descriptors)
            self._connection.sendall(data)
            answer = self._connection.recv(8, socket.MSG_WAITALL)
        assert answer, "the server of forks has ended"
        return int.from_bytes(answer, "big")

    def close(self) -> None:
        """End it, even if a data worker that was forked from here holds the connection as well."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        if self._process is not None:
            self._process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Be who becomes the parent of a process whose own one has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_servers: dict[tuple[object, ...], _Server] = {}
_own: list[tuple[dict[str, str], _Server]] = []
"""In a process that was forked: the server that is its child, and the variables that both began with."""


def _server(kind: str, variables: dict[str, str]) -> _Server | None:
    """Return a server; it ends with this process, or when others were asked since. None if there can be none."""
    if _own:
        return _own[0][1] if _own[0][0] == variables else None
    key = (kind, *sorted(variables.items()))
    server = _servers.pop(key, None) or _started(kind, variables)
    _servers[key] = server
    if len(_servers) > _MOST_SERVERS:
        _servers.pop(next(iter(_servers))).close()
    return server


def _started(kind: str, variables: Mapping[str, str]) -> _Server:
    ours, its = socket.socketpair()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_BEGIN)}
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", kind, _BLANK],
            env={**inherited, **variables, "PADDING": "-" * _ENVIRONMENT_BYTES},
            stdin=its,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd=ROOT,
        )
    return _Server(ours, process)


_exit_code: list[int] = []
"""In a process that was forked, once its program has ended."""


@atexit.register
def _leave() -> None:
    """End a fork, after all that its program has registered: letting go of each object would copy it first.

    That is a second of a core with torch, for thousands of objects that nobody made.
    """
    if not _exit_code:
        return
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase) and not each.closed and each.writable():
            with contextlib.suppress(OSError):
                each.flush()
    os._exit(_exit_code[0] & 0xFF)


@atexit.register
def _close() -> None:
    for server in _servers.values():
        server.close()


# ---- the server -----------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork what is asked for, until nobody is left to ask. Returns a request in each fork, and None at the end."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 8, 64)
        if not head:
            return None
        request = json.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        (found, told), (waits, go) = os.pipe(), os.pipe()
        between = os.fork()  # it ends at once, so that the fork's parent becomes who asks
        if not between:
            pid = os.fork()
            if not pid:
                connection.detach()
                os.close(go)
                os.read(waits, 1)  # until it has its parent
                return {**request, "descriptors": descriptors}
            os.write(told, pid.to_bytes(8, "big"))
            os._exit(0)
        os.close(told)
        os.waitpid(between, 0)
        connection.sendall(os.read(found, 8))
        for descriptor in (*descriptors, found, waits, go):
            os.close(descriptor)


def become(request: Mapping[str, Any]) -> None:
    """Make this process what a new interpreter would be, and run its program."""
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    _take_descriptors(request["descriptors"], [0, 1, 2, *request["kept"]])
    _take_signals(request["ignored"], request["blocked"])
    os.environ.clear()
    os.environ.update(request["environ"])
    command = request["command"]
    _show(command, request["environ"])
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as random does by itself
    sys.path[0] = request["cwd"]
    module, script = _module_of(command), _script_of(command)
    if module in _STARTS:
        _be_server(_STARTS[module])
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if script is not None:
        path = str(Path(script).absolute())
        sys.argv[:] = command[command.index(script) :]
        sys.path[0] = str(Path(script).resolve().parent)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __loader__=loader, __package__=None, __cached__=None)
        code = loader.get_code("__main__")
    else:
        assert module is not None
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
        assert spec is not None, f"there is no module {module}"
        assert spec.origin is not None
        sys.argv[:] = [spec.origin, *command[command.index(module) + 1 :]]
        main.__dict__.update(__spec__=spec, __file__=spec.origin, __loader__=spec.loader, __package__=spec.parent)
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        if SAFE_PATH in command[: command.index(module)]:
            del sys.path[0]
    try:
        exec(code, main.__dict__)
    except KeyboardInterrupt:
        raise
    except SystemExit as err:
        _exit_code.append(err.code if isinstance(err.code, int) else int(err.code is not None))
        raise
    except BaseException:
        _exit_code.append(1)
        raise
    _exit_code.append(0)


def _take_descriptors(given: Sequence[int], wanted: Sequence[int]) -> None:
    high = [os.dup2(descriptor, 500 + nth) for nth, descriptor in enumerate(given)]
    for own, number in zip(high, wanted, strict=True):
        os.dup2(own, number)
    edge = 3
    for number in sorted(number for number in wanted if number > 2):
        os.closerange(edge, number)
        edge = number + 1
    os.closerange(edge, os.sysconf("SC_OPEN_MAX"))


def _take_signals(ignored: Sequence[int], blocked: Sequence[int]) -> None:
    as_python = {signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):  # some are the C library's own
            signal.signal(number, as_python.get(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL))
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _show(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Write a command and its environment where /proc reads them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    at, end, environ_at, environ_end = map(int, fields[45:49])
    words = [f"{name}={value}" for name, value in environ.items()]
    for first, last, shown in ((at, end, command), (environ_at, environ_end, words)):
        data = b"".join(os.fsencode(word) + b"\0" for word in shown)
        assert len(data) < last - first, "it has no room in /proc"
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, data, len(data))


def _be_server(module: str) -> None:
    """Fork a server, as this process is now, and have the Popen of a module use it."""
    ours, its = socket.socketpair()
    if os.fork():
        its.close()
        _own.append((_read_at_begin(os.environ), _Server(ours)))
        importlib.import_module(module).Popen = Popen  # type: ignore[attr-defined]
        return
    ours.close()
    _quiet()
    request = serve(its)
    if request is None:
        os._exit(0)
    become(request)
    sys.exit()


def _quiet() -> None:
    """Hold nobody's output, and end by nothing but the end of who asks."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Import, and serve the socket that is the standard input."""
    connection = socket.socket(fileno=os.dup(0))
    programs, besides = KINDS[sys.argv[1]]
    for module in (*besides, *map(_module, programs), *KINDS["plain"][0], *KINDS["plain"][1]):
        importlib.import_module(module)
    _quiet()
    gc.freeze()  # what is here is not looked through in each fork, which would copy it
    request = serve(connection)
    if request is not None:
        become(request)


if __name__ == "__main__":
    importlib.import_module("tests.support.fork_server").main()  # the module that others import, and no second one
