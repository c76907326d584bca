"""The process that trains: its signals, its forks, and how it ends.

Owns the handlers that were there before ours, and what the interpreter tells nobody at exit: whether it is a failure.
Decides nothing; knows neither snapshots nor the agent. Everything here is called in the main thread.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import signal
import sys
import threading
import types
from _sitebuiltins import Quitter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from harness.errors import ConfigError, StateError

Handler = Callable[[int, types.FrameType | None], Any] | int | None


class Process:
    """One for each Checkpointer; lives as long as the process."""

    def __init__(
        self,
        takes_signal: Callable[[int], bool],
        on_fork: Callable[[], None],
        on_exit: Callable[[], None],
        on_sys_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Changes nothing.

        Args:
            takes_signal: whether a signal is answered at the next boundary; where not, what was there before us does.
            on_fork: called in each forked child.
            on_exit: called when the interpreter ends, while everything is there still.
            on_sys_exit: called when the program calls sys.exit, which it may catch.
        """
        self._takes_signal, self._on_fork, self._on_exit = takes_signal, on_fork, on_exit
        self._on_sys_exit = on_sys_exit
        self._hooked = False
        self._undo: list[Callable[[], None]] = []
        """What takes the hooks away, newest last."""
        self.ctrl_c = False
        """Whether it was pressed."""
        self.exiting = False
        """Whether the program has called sys.exit, and has not gone on training."""
        self.trains_in: int | None = None
        """The thread that trains, by its identifier; `None` until one does."""
        self._exit_failed = self._thread_failed = False
        self._exit_error: BaseException | None = None
        self._chains: dict[int, _Chain] = {}
        self._forked = False
        self._masks: dict[int, set[Any]] = {}
        """Of threads that fork, by thread: several may at once."""
        self._real_install, self._real_ask = signal.signal, signal.getsignal

    @property
    def crashed(self) -> bool:
        """Whether an exception ends the process, or has ended the thread that trains."""
        return self._thread_failed or getattr(sys, "last_value", None) is not None

    @property
    def failed(self) -> bool:
        """Whether it crashed, or has called sys.exit with a code that says so: if that was caught, it goes on."""
        return self._exit_failed or self.crashed

    @property
    def hopeless(self) -> bool:
        """Whether it ends by one of our own errors that the same program would meet again."""
        # A framework may have wrapped it, or have caught it and left by sys.exit(1).
        return any(_is_hopeless(error) for error in (getattr(sys, "last_value", None), self._exit_error))

    def go_on(self) -> None:
        """The program trains: if it has called sys.exit, that was caught."""
        self.exiting = self._exit_failed = False
        self._exit_error = None
        self.trains_in = threading.get_ident()

    def attach(self) -> None:
        """From now on forks and the end of the process are told. What the program does and sees stays as it was.

        Handlers of signals are put in place here, since a loop may begin in another thread, which cannot do that. Until
        `hook` a signal does what it did before: they only pass it on.
        """
        atexit.register(self._on_exit)
        _tell_forks_to(self)
        self._hook_signals()

    def hook(self) -> None:
        """The loop begins: from now on signals, `sys.exit` and exceptions of threads are heard, too. Idempotent."""
        if self._hooked:
            return
        self._hooked = True
        self._hook_exit()
        self._hook_threads()
        self._hook_signals()

    def detach(self) -> None:
        """Nothing is told any more, and everything is as it was before `attach` and `hook`."""
        atexit.unregister(self._on_exit)
        _attached.remove(self)
        while self._undo:
            self._undo.pop()()

    def has_handler(self, signum: int) -> bool:
        """Whether the program has one of its own: what it does next need not be another boundary."""
        chain = self._chains.get(signum)
        return chain is not None and callable(chain.newest) and not _only_interrupts(chain.newest)

    def keep_hold(self) -> None:
        """See that our handlers are in place still: whoever imported `signal.signal` before us goes past it."""
        if threading.current_thread() is not threading.main_thread() or self._forked:
            return
        for signum, chain in self._chains.items():
            found = self._real_ask(signum)
            if found != self._on_signal:
                chain.add(signal.default_int_handler if found == self._interrupt else found)
                self._real_install(signum, self._on_signal)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _hook_exit(self) -> None:
        """The interpreter tells nobody at exit whether a SystemExit was a failure."""
        python_exit = sys.exit

        def exit_(code: Any = None, /) -> NoReturn:
            self.exiting, self._exit_failed = True, code not in (None, 0)
            self._exit_error = sys.exc_info()[1]
            self._on_sys_exit()
            python_exit(code)

        self._replace(sys, "exit", exit_)
        for name in ("exit", "quit"):  # site's, for whoever types them; scripts use them as well
            if isinstance(getattr(builtins, name, None), Quitter):
                self._replace(builtins, name, exit_)

    def _replace(self, module: types.ModuleType, name: str, ours: Any) -> None:
        """Put ours in its place until `detach`; what somebody has put there since then stays."""
        before = getattr(module, name)
        setattr(module, name, ours)

        def undo() -> None:
            if getattr(module, name) == ours:
                setattr(module, name, before)

        self._undo.append(undo)

    def _hook_threads(self) -> None:
        """An exception in the thread that trains ends that thread alone, and the process with code 0."""
        report = threading.excepthook

        def hook(args: threading.ExceptHookArgs, /) -> Any:
            if args.thread is not None and args.thread.ident == self.trains_in:
                self._thread_failed = not isinstance(args.exc_value, SystemExit)
            return report(args)

        self._replace(threading, "excepthook", hook)

    # ---- forks ------------------------------------------------------------------------------------------------------

    def _forks(self) -> None:
        self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, self._chains)

    def _forked_parent(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(threading.get_ident(), set()))

    def _forked_child(self) -> None:
        """It has the program's own handlers from its first moment on; a signal is kept until it does."""
        self._forked = True
        for signum, chain in self._chains.items():
            self._real_install(signum, _swallow_once if _only_interrupts(chain.newest) else chain.newest)
        self._on_fork()
        self._forked_parent()

    # ---- signals ----------------------------------------------------------------------------------------------------

    def _hook_signals(self) -> None:
        """Put our handlers in place, if they are not, and this is the thread that can."""
        if self._chains or threading.current_thread() is not threading.main_thread():
            return
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN or signum == signal.SIGTERM:
                self._chains[signum] = _Chain(signal.signal(signum, self._on_signal))
        self._replace(signal, "signal", self._install)
        self._replace(signal, "getsignal", self._ask)
        self._undo.append(self._unhook_signals)

    def _unhook_signals(self) -> None:
        for signum, chain in self._chains.items():
            if self._real_ask(signum) == self._on_signal:
                self._real_install(signum, chain.newest)
        self._chains.clear()

    def _install(self, signalnum: Any, handler: Any, /) -> Any:
        """`signal.signal`: a handler that the program installs comes after ours, instead of taking its place."""
        chain = self._chains.get(int(signalnum))
        before = self._real_install(signalnum, handler)  # raises what it always did
        if chain is None or self._forked:
            return before
        self._real_install(signalnum, self._on_signal)
        shown = self._shown(chain)
        if handler == self._on_signal:  # it puts back what it had found before it knew of this
            chain.cut()
        else:
            chain.add(signal.default_int_handler if handler == self._interrupt else handler)
        return shown

    def _ask(self, signalnum: Any, /) -> Any:
        """`signal.getsignal`: what the program has installed, so that it finds its own there."""
        chain = self._chains.get(int(signalnum))
        return self._real_ask(signalnum) if chain is None or self._forked else self._shown(chain)

    def _shown(self, chain: _Chain) -> Handler:
        """What the program may have for a handler that it found: it may call that by itself, and put it back."""
        interrupts = self._hooked and chain.newest is signal.default_int_handler
        return self._interrupt if interrupts else chain.newest

    def _interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        """Python's own handler of Ctrl-C, but for the first one, which we have taken: that leaves at a boundary."""
        if signal.SIGINT not in self._chains or not self._chains[signal.SIGINT].taken:
            signal.default_int_handler(signum, frame)

    def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
        """Ours first, then the program's. A second Ctrl-C is Python's own."""
        chain = self._chains.get(signum)
        if chain is None:
            return  # taken away just now
        if not chain.depth:  # else the program's handler calls the one that was there before: us
            again = self.ctrl_c
            self.ctrl_c |= self._hooked and signum == signal.SIGINT
            chain.taken = self._hooked and not (again and signum == signal.SIGINT) and self._takes_signal(signum)
        with chain.next() as handler:
            if callable(handler) and not (chain.taken and _only_interrupts(handler)):
                handler(signum, frame)
            elif not chain.taken and handler == signal.SIG_DFL:
                self._real_install(signum, signal.SIG_DFL)
                signal.raise_signal(signum)


_attached: list[Process] = []
"""Told of forks."""
_asked_for_forks: list[bool] = []


def _tell_forks_to(process: Process) -> None:
    """`os.register_at_fork` is for good: it is called once, whatever comes and goes."""
    _attached.append(process)
    if not _asked_for_forks:
        _asked_for_forks.append(True)
        os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def _before_fork() -> None:
    for process in _attached:
        process._forks()


def _in_parent() -> None:
    for process in _attached:
        process._forked_parent()


def _in_child() -> None:
    for process in _attached:
        process._forked_child()


class _Chain:
    """The program's handlers of one signal, oldest first."""

    def __init__(self, first: Handler) -> None:
        self._handlers = [first]
        self.depth = 0
        """How many of them are being called, one by the other."""
        self.taken = False
        """Whether the newest signal is answered at the next boundary."""

    @property
    def newest(self) -> Handler:
        return self._handlers[-1]

    def add(self, handler: Handler) -> None:
        """Install one; or put back an older one, which takes the newer ones away."""
        if handler in self._handlers:
            del self._handlers[self._handlers.index(handler) + 1 :]
        else:
            self._handlers.append(handler)

    def cut(self) -> None:
        """Back to the first."""
        del self._handlers[1:]

    @contextlib.contextmanager
    def next(self) -> Iterator[Handler]:
        """The newest, or inside of its call the one before it; `None` where there is no other."""
        handler = self._handlers[-1 - self.depth] if self.depth < len(self._handlers) else None
        self.depth += 1
        try:
            yield handler
        finally:
            self.depth -= 1


def _only_interrupts(handler: Handler) -> bool:
    """Whether a handler of SIGINT is Python's, or asyncio's in its stead: it raises KeyboardInterrupt somewhere."""
    called = getattr(handler, "func", handler)
    return handler is signal.default_int_handler or getattr(called, "__qualname__", "") == "Runner._on_sigint"


def _swallow_once(signum: int, frame: types.FrameType | None) -> None:
    """In a forked child: the first Ctrl-C is the trainer's business, which needs its workers until it leaves."""
    signal.signal(signum, signal.default_int_handler)


def _is_hopeless(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ConfigError | StateError):
        error = error.__cause__ or error.__context__
    return error is not None


@dataclass(frozen=True)
class CallStack:
    """Where in the program somebody asks our iterator for more: a `for`, and whatever stands between it and us.

    Attributes:
        frames: code and line of each function that is being executed, the innermost first.
    """

    frames: tuple[tuple[types.CodeType, int | None], ...]

    @classmethod
    def now(cls) -> CallStack:
        """Of the generator that calls this."""
        frames, frame = [], sys._getframe(1).f_back
        while frame is not None:
            frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return cls(tuple(frames))

    def is_left(self, now: CallStack) -> bool:
        """Whether an iterator that was first asked for here, and is closed `now`, was broken off.

        A `break`, a `return` and an exception close it from another line than the one that asks; `zip` and `islice`
        that are through close it from the same line. What is kept in a variable is closed when its function is over,
        whatever the reason: then the program is taken to be through.
        """
        if not now.frames:
            return False  # the interpreter ends
        code, line = now.frames[0]
        lines = [asked for asked_from, asked in self.frames if asked_from is code]
        return bool(lines) and line not in lines


def script() -> str | None:
    """The training script's file, or `None` in a notebook, and for `-c` and `-m`."""
    main = sys.modules.get("__main__")
    if main is None or main.__spec__ is not None or not getattr(main, "__file__", None):
        return None
    return sys.argv[0] or None
