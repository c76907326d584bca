"""Process: the signals, the forks and the end of the process that trains.

Owns the signal handlers that the program had before ours, and whether the process ends by a failure, which the
interpreter does not tell its exit hooks. Decides nothing; knows neither snapshots nor the agent. Handlers run in the
main thread; `hook` and what follows it may be called from the thread that trains.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import dis
import inspect
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
from harness.trainer.collection import is_collecting

Handler = Callable[[int, types.FrameType | None], Any] | int | None
_POPS = ("POP_TOP", "POP_ITER")  # of a loop's iterator: until Python 3.13, and from 3.14 on


class Process:
    """Hooks into the process that trains. One for each Checkpointer; lives as long as the process."""

    def __init__(
        self,
        takes_signal: Callable[[int], bool],
        on_fork: Callable[[], None],
        on_exit: Callable[[], None],
        on_sys_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Hook nothing yet.

        Args:
            takes_signal: returns whether a signal is answered at the next boundary; if not, the handler that was there
                before ours is called.
            on_fork: called in each forked child.
            on_exit: called when the interpreter ends, while all modules and objects still exist.
            on_sys_exit: called when the program calls sys.exit, which it may catch.
        """
        self._takes_signal, self._on_fork, self._on_exit = takes_signal, on_fork, on_exit
        self._on_sys_exit = on_sys_exit
        self._hooked = False
        self._undo: list[Callable[[], None]] = []
        """Calls that remove the hooks, newest last."""
        self.ctrl_c = False
        """Whether Ctrl-C was pressed."""
        self.exiting = False
        """Whether the program has called sys.exit, and has not trained since."""
        self.trains_in: int | None = None
        """Identifier of the thread that trains; `None` until one does."""
        self._exit_failed = self._thread_failed = False
        self._exit_error: BaseException | None = None
        self._chains: dict[int, _Chain] = {}
        self._forked = False
        self._masks: dict[int, set[Any]] = {}
        """Signal masks of the threads that are forking, by thread: several may fork at once."""
        self._real_install, self._real_ask = signal.signal, signal.getsignal

    @property
    def crashed(self) -> bool:
        """Whether an exception is ending the process, or has ended the thread that trains."""
        return self._thread_failed or getattr(sys, "last_value", None) is not None

    @property
    def failed(self) -> bool:
        """Whether the process crashed, or called sys.exit with a code that means failure. `go_on` resets the latter."""
        return self._exit_failed or self.crashed

    @property
    def errors(self) -> list[BaseException]:
        """The exceptions that end the process: one that nothing has caught, and one in whose handler it exits."""
        found = (getattr(sys, "last_value", None), self._exit_error)
        return [error for error in found if error is not None]

    @property
    def hopeless(self) -> bool:
        """Whether the process ends by a `ConfigError` or `StateError`: the same program would meet it again."""
        # A framework may have wrapped the error, or have caught it and called sys.exit(1).
        return any(_is_hopeless(error) for error in self.errors)

    def go_on(self) -> None:
        """Note that this thread trains. If the program has called sys.exit before, it has caught that."""
        self.exiting = self._exit_failed = False
        self._exit_error = None
        self.trains_in = threading.get_ident()

    def attach(self) -> None:
        """Call back at forks and at the end of the process from now on. The program behaves as before.

        Signal handlers are installed here already, since a loop may begin in another thread, which cannot do that.
        Until `hook` is called, they only pass each signal on to the handler that was there before.
        """
        atexit.register(self._on_exit)
        _tell_forks_to(self)
        self._hook_signals()

    def hook(self) -> None:
        """Handle signals, `sys.exit` and exceptions of threads from now on: the loop begins. Idempotent."""
        if self._hooked:
            return
        self._hooked = True
        self._hook_exit()
        self._hook_threads()
        self._hook_signals()

    def detach(self) -> None:
        """Remove all hooks: everything is again as it was before `attach` and `hook`."""
        atexit.unregister(self._on_exit)
        _attached.remove(self)
        while self._undo:
            self._undo.pop()()

    def has_handler(self, signum: int) -> bool:
        """Whether the program has its own handler of this signal: it may end the program before the next boundary."""
        chain = self._chains.get(signum)
        return chain is not None and callable(chain.newest) and not _only_interrupts(chain.newest)

    def keep_hold(self) -> None:
        """Install our handlers again if code that imported `signal.signal` before us has replaced them."""
        if threading.current_thread() is not threading.main_thread() or self._forked:
            return
        for signum, chain in self._chains.items():
            found = self._real_ask(signum)
            if found != self._on_signal:
                chain.add(signal.default_int_handler if found == self._interrupt else found)
                self._real_install(signum, self._on_signal)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _hook_exit(self) -> None:
        """Replace `sys.exit`: the interpreter does not tell exit hooks whether a SystemExit was a failure."""
        python_exit = sys.exit

        def exit_(code: Any = None, /) -> NoReturn:
            self.exiting, self._exit_failed = True, code not in (None, 0)
            self._exit_error = sys.exc_info()[1]
            self._on_sys_exit()
            python_exit(code)

        self._replace(sys, "exit", exit_)
        for name in ("exit", "quit"):  # from `site`, for interactive use; scripts call them as well
            if isinstance(getattr(builtins, name, None), Quitter):
                self._replace(builtins, name, exit_)

    def _replace(self, module: types.ModuleType, name: str, ours: Any) -> None:
        """Replace `name` in `module` by `ours` until `detach`, which leaves a later replacement in place."""
        before = getattr(module, name)
        setattr(module, name, ours)

        def undo() -> None:
            if getattr(module, name) == ours:
                setattr(module, name, before)

        self._undo.append(undo)

    def _hook_threads(self) -> None:
        """Watch for an exception in the thread that trains: it ends that thread alone, and the process with code 0."""
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
        """Install the program's own handlers in a forked child. Signals are blocked until that is done."""
        self._forked = True
        for signum, chain in self._chains.items():
            self._real_install(signum, _swallow_once if _only_interrupts(chain.newest) else chain.newest)
        self._on_fork()
        self._forked_parent()

    # ---- signals ----------------------------------------------------------------------------------------------------

    def _hook_signals(self) -> None:
        """Install our signal handlers, if they are not installed and this is the main thread."""
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
        """Replace `signal.signal`: a handler that the program installs is called after ours, instead of ours."""
        chain = self._chains.get(int(signalnum))
        before = self._real_install(signalnum, handler)  # raises what `signal.signal` raises
        if chain is None or self._forked:
            return before
        self._real_install(signalnum, self._on_signal)
        shown = self._shown(chain)
        if handler == self._on_signal:  # the program puts back a handler that it got past our replacements
            chain.cut()
        else:
            chain.add(signal.default_int_handler if handler == self._interrupt else handler)
        return shown

    def _ask(self, signalnum: Any, /) -> Any:
        """Replace `signal.getsignal`: return the handler that the program has installed, not ours."""
        chain = self._chains.get(int(signalnum))
        return self._real_ask(signalnum) if chain is None or self._forked else self._shown(chain)

    def _shown(self, chain: _Chain) -> Handler:
        """Return the newest handler as the program may see it: the program may call it, and install it again."""
        interrupts = self._hooked and chain.newest is signal.default_int_handler
        return self._interrupt if interrupts else chain.newest

    def _interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        """Do what Python's handler of Ctrl-C does, except for the first one, which leaves the loop at a boundary."""
        if signal.SIGINT not in self._chains or not self._chains[signal.SIGINT].taken:
            signal.default_int_handler(signum, frame)

    def _on_signal(self, signum: int, frame: types.FrameType | None) -> None:
        """Handle a signal: call ours first, then the program's handler. A second Ctrl-C is left to Python's handler."""
        chain = self._chains.get(signum)
        if chain is None:
            return  # our handlers were just removed
        if not chain.depth:  # otherwise the program's handler calls the one that was there before, which is this
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
"""The objects that are called at each fork."""
_asked_for_forks: list[bool] = []


def _tell_forks_to(process: Process) -> None:
    """Call `process` at each fork. `os.register_at_fork` cannot be undone, so it is called only once."""
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
        """Number of these handlers that are running, each called by the one before."""
        self.taken = False
        """Whether the newest signal is answered at the next boundary."""

    @property
    def newest(self) -> Handler:
        return self._handlers[-1]

    def add(self, handler: Handler) -> None:
        """Install a handler. If it is an older one, it is put back, and the newer ones are removed."""
        if handler in self._handlers:
            del self._handlers[self._handlers.index(handler) + 1 :]
        else:
            self._handlers.append(handler)

    def cut(self) -> None:
        """Remove all handlers but the first."""
        del self._handlers[1:]

    @contextlib.contextmanager
    def next(self) -> Iterator[Handler]:
        """Context manager around the call of the newest handler; inside of that, of the one before. `None` if none."""
        handler = self._handlers[-1 - self.depth] if self.depth < len(self._handlers) else None
        self.depth += 1
        try:
            yield handler
        finally:
            self.depth -= 1


def _only_interrupts(handler: Handler) -> bool:
    """Whether a SIGINT handler is Python's, or the one of asyncio that replaces it: it raises KeyboardInterrupt."""
    called = getattr(handler, "func", handler)
    return handler is signal.default_int_handler or getattr(called, "__qualname__", "") == "Runner._on_sigint"


def _swallow_once(signum: int, frame: types.FrameType | None) -> None:
    """Ignore the first Ctrl-C in a forked child: the trainer handles it, and needs its workers until it leaves."""
    signal.signal(signum, signal.default_int_handler)


def _is_hopeless(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ConfigError | StateError):
        error = error.__cause__ or error.__context__
    return error is not None


@dataclass(frozen=True)
class CallStack:
    """The place in the program that asks a Checkpointer's iterator for the next item, with all its callers.

    Attributes:
        frames: code and line of each function that is being executed, the innermost first.
    """

    frames: tuple[tuple[types.CodeType, int | None], ...]

    @classmethod
    def now(cls) -> CallStack:
        """Return the call stack of the generator that calls this, without the generator."""
        frames, frame = [], sys._getframe(1).f_back
        while frame is not None:
            frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return cls(tuple(frames))

    def is_left(self, now: CallStack) -> bool:
        """Whether an iterator that was first asked here, and is closed `now`, was left before its end.

        A `break`, a `return` and an exception close it from another line than the one that asks; a `zip` or `islice`
        that has ended closes it from the same line. An iterator in a variable is closed when the function ends, for
        whatever reason: then the loop counts as ended, not as left.
        """
        if not now.frames:
            return False  # the interpreter ends
        code, line = now.frames[0]
        lines = [asked for asked_from, asked in self.frames if asked_from is code]
        return bool(lines) and line not in lines


def breaks_off() -> bool:
    """Whether a `break` or a `return` of the program closes the generator that calls this, and not an exception.

    Either pops the loop's iterator by an instruction of its own. An exception leaves the function at the instruction
    that raised. Generators of the program in between (tqdm) are closed by what their own caller does.
    """
    if is_collecting():
        return False  # it was left long ago
    frame = sys._getframe(1).f_back
    while frame is not None:
        code = frame.f_code
        if frame.f_lasti >= 0 and dis.opname[code.co_code[frame.f_lasti]] in _POPS:
            return True
        frame = frame.f_back if code.co_flags & inspect.CO_GENERATOR else None
    return False


def script() -> str | None:
    """Return the training script's file; `None` in a notebook, and for `-c` and `-m`."""
    main = sys.modules.get("__main__")
    if main is None or main.__spec__ is not None or not getattr(main, "__file__", None):
        return None
    return sys.argv[0] or None
