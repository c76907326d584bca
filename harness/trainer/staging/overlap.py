"""Overlap: copies the tensors that a torch optimizer owns while the next forward and backward run.

Owns which tensors may be copied late, the thread that copies them, and the checks that they did not change. Knows
neither slots nor when a snapshot is due: it has sources, targets, and a hook that is called before an optimizer steps.

    boundary ─▶ everything else is copied ─▶ forward, backward ─▶ pre-hook: wait, check, seal ─▶ optimizer.step()
                       └─ a thread copies parameters and moments ─────┘

The copy is right only if nothing but `Optimizer.step()` changes those tensors. Everything else bypasses the hook: CUDA
graphs, hand-written updates, foreign optimizers, weights that are swapped for validation. So these are checked:

- always: the version counter of each tensor, which every write by torch raises unless it goes through `.data`; and the
  first and last bytes of each, live and in the slot, which have to be those of the boundary;
- for the first `VALIDATIONS` snapshots, which are copied at the boundary: each byte is compared, by the thread at the
  time when it would have copied, and once more when the optimizer is about to step;
- if a step was counted and the hook was not called: each byte again.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from harness.trainer.copy import cuda_runtime
from harness.trainer.copy.to_slot import is_block

VALIDATIONS: Final = 2
"""Number of snapshots that are copied at the boundary and compared, before the first late copy."""

MIN_BYTES: Final = 64 * 1024
"""Smaller tensors are copied at the boundary: they are most of a model's tensors, but few of its bytes."""

_PIECE: Final = 16 * 1024 * 1024
_END: Final = 4096
_LATE_DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True)
class Deferred:
    """A tensor that is copied late.

    Attributes:
        name: the tensor's name, for messages.
        target: its view into the slot.
        source: the live tensor, detached. Holding it keeps its memory from being used for another tensor.
        version: the live tensor's version counter at the boundary.
        address: address of the live tensor's memory at the boundary.
    """

    name: str
    target: Tensor
    source: Tensor
    version: int
    address: int

    @property
    def moved(self) -> bool:
        """Whether the storage has other memory now, or none (`resize_`): then there is nothing to read any more."""
        return self.source.data_ptr() != self.address


@dataclass(frozen=True)
class Work:
    """One copy, or one comparison, in the thread.

    Attributes:
        deferred: the tensors that it copies or compares.
        validating: whether it compares them with the copies that were made at the boundary.
        ends: the first and last bytes of each tensor at the boundary.
        result: the seconds that it took, and the name of a tensor that differed or whose memory was gone.
    """

    deferred: tuple[Deferred, ...]
    validating: bool
    ends: Mapping[torch.device, Tensor]
    result: Future[tuple[float, str | None]]

    @property
    def done(self) -> bool:
        """Whether the thread neither reads nor writes any more."""
        return self.result.done()

    def wait(self) -> float:
        """Block until the thread is done; return the seconds that it took. Raises the error of the thread, if any."""
        return self.result.result()[0]

    def changed(self, *, thoroughly: bool) -> str | None:
        """Return the name of a tensor that has changed since the boundary; `None` if none has. Call it after `wait`.

        Args:
            thoroughly: compare every byte, as well as every version and the ends.
        """
        if (name := self.result.result()[1]) is not None:
            return name
        for item in self.deferred:
            if item.source._version != item.version or item.moved:
                return item.name
        if (name := _first_other_end(self.deferred, self.ends)) is not None:
            return name
        return _first_difference(self.deferred) if thoroughly else None


class Overlap:
    """Makes late copies, one at a time. Switches off for good, with a message, when a tensor changes during one."""

    def __init__(self, say: Callable[[str], None], executor: Executor | None = None) -> None:
        """Begin switched on, with no snapshot validated.

        Args:
            say: shows a line to the user.
            executor: runs the copies; by default a thread of its own.
        """
        self._say = say
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="harness-overlap")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._validated = 0
        self.on = True

    def choose(
        self, states: Mapping[str, object], tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[Deferred, ...]:
        """Return the captured tensors that may be copied late: whole blocks of memory that a torch optimizer owns.

        Args:
            states: the live objects.
            tensors: the tensors that were captured of them.
            targets: the slot's views, by the same names.
        """
        if not self.on:
            return ()
        owned = {tensor.data_ptr(): tensor.nbytes for tensor in _owned(states)}
        deferred = tuple(
            Deferred(name, targets[name], tensor, tensor._version, tensor.data_ptr())
            for name, tensor in tensors.items()
            if (size := tensor.nbytes) >= MIN_BYTES
            and owned.get(tensor.data_ptr()) == size
            and is_block(tensor)
            and tensor.device.type in _LATE_DEVICES
            and not tensor.is_inference()  # those count no versions
        )
        if not deferred:
            self.on = False
            self._say(f"overlap is OFF: no tensor of {MIN_BYTES} bytes or more belongs to a torch optimizer")
        return deferred

    @property
    def validating(self) -> bool:
        """Whether the next snapshot has to be copied at the boundary and compared."""
        return self._validated < VALIDATIONS

    def begin(self, deferred: tuple[Deferred, ...]) -> Work:
        """Copy `deferred` in the thread; while `validating`, compare it with the copies made already. Does not wait.

        The work that the current CUDA streams have so far is done first.
        """
        validating = self.validating
        devices = {item.source.device for item in deferred if item.source.device.type == "cuda"}
        ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        work = _first_difference if validating else _copy
        ends = {device: _ends([item.source for item in there]) for device, there in _by_device(deferred).items()}
        return Work(deferred, validating, ends, self._executor.submit(self._run, work, deferred, ready))

    def note_valid(self, deferred: Sequence[Deferred]) -> None:
        """Note that a snapshot was compared up to an optimizer's step, and nothing had changed."""
        self._validated += 1
        if not self.validating:
            size = sum(item.source.nbytes for item in deferred)
            self._say(f"overlap is on: {size / 1e9:.3g} GB are copied during the step after a snapshot's boundary")

    def switch_off(self, name: str, step: int) -> None:
        """Switch off, since `name` changed during a copy: from now on every snapshot is copied at its boundary."""
        self.on = False
        self._say(
            f"overlap is OFF from now on: {name} changed between the boundary of step {step} and the optimizer's step. "
            "Something else than torch.optim writes to it (a CUDA graph, an update of your own, a foreign optimizer, "
            "swapped weights). The stored snapshots are right; every snapshot is copied at its boundary again"
        )

    def _run(
        self,
        work: Callable[[Sequence[Deferred]], str | None],
        deferred: Sequence[Deferred],
        ready: Mapping[torch.device, torch.cuda.Event],
    ) -> tuple[float, str | None]:
        started = time.perf_counter()
        found = None
        with contextlib.ExitStack() as ending:  # if one fails too: once there is a result, the thread is done
            for device, there in _by_device(deferred).items():
                if device.type == "cpu":
                    found = found or work(there)
                    continue
                ending.enter_context(cuda_runtime.relaxed())
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream = self._streams[device]
                ending.callback(_sleep_until_over, stream)
                with torch.cuda.stream(stream):
                    stream.wait_event(ready[device])
                    found = found or work(there)
        return time.perf_counter() - started, found


def before_updates(call: Callable[[], object]) -> RemovableHandle:
    """Register `call`: it is called before each step of any torch optimizer, in the thread that steps it."""

    def about_to_step(*_: object) -> None:
        # Nothing is updated while a CUDA graph is recorded, and waiting would spoil the recording.
        if not cuda_runtime.is_recording():
            call()

    # Not to be traced: an optimizer compiled as one graph would be refused in the middle of a run, by the first wait.
    return register_optimizer_step_pre_hook(torch.compiler.disable(about_to_step))  # type: ignore[no-untyped-call]


def _owned(states: Mapping[str, object]) -> Iterator[Tensor]:
    """Every tensor that a torch optimizer among `states` changes in its step."""
    for state in states.values():
        if isinstance(state, Optimizer):
            for group in state.param_groups:
                yield from group["params"]
            yield from _tensors(state.state.values())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _by_device(deferred: Iterable[Deferred]) -> dict[torch.device, list[Deferred]]:
    found: dict[torch.device, list[Deferred]] = {}
    for item in deferred:
        found.setdefault(item.source.device, []).append(item)
    return found


def _ends(tensors: Iterable[Tensor]) -> Tensor:
    """Return the first and the last bytes of each tensor, one after another, on the CPU. All lie on one device."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([end for each in flat for end in (each[:_END], each[-_END:])]).cpu()


def _first_other_end(deferred: Sequence[Deferred], ends: Mapping[torch.device, Tensor]) -> str | None:
    """Return the name of the first tensor whose first or last bytes, or those of its target, have changed."""
    for device, there in _by_device(deferred).items():
        for now in (_ends([item.source for item in there]), _ends([item.target for item in there])):
            if not torch.equal(now, ends[device]):
                return there[int((now != ends[device]).nonzero()[0]) // (2 * _END)].name
    return None


# In the thread. Long operations do not hold the GIL: memmove and memcmp through ctypes, and torch. -------------------


def _copy(deferred: Sequence[Deferred]) -> str | None:
    """Copy all. Return the name of a tensor whose memory is gone, if any: then not all is copied."""
    if (gone := next((item.name for item in deferred if item.moved), None)) is not None:
        return gone
    if deferred[0].source.device.type == "cpu":
        # Not by torch: in another thread it starts a second team of OpenMP threads beside that of the training.
        for item in deferred:
            ctypes.memmove(item.target.data_ptr(), item.address, item.source.nbytes)
        return None
    with torch.no_grad():
        torch._foreach_copy_([item.target for item in deferred], [item.source for item in deferred], non_blocking=True)
    return None


def _first_difference(deferred: Sequence[Deferred]) -> str | None:
    """Return the name of the first tensor whose bytes differ from its target's. By bytes, a nan equals itself."""
    return next((item.name for item in deferred if item.moved or not _same_bytes(item.target, item.source)), None)


def _same_bytes(target: Tensor, source: Tensor) -> bool:
    if source.device.type == "cpu":
        return _equal(target.data_ptr(), source.data_ptr(), source.nbytes)
    there, live = (tensor.reshape(-1).view(torch.uint8) for tensor in (target, source))
    for start in range(0, live.nbytes, _PIECE):
        piece = live[start : start + _PIECE].cpu()
        if not _equal(there[start:].data_ptr(), piece.data_ptr(), piece.nbytes):
            return False
    return True


def _sleep_until_over(stream: torch.cuda.Stream) -> None:
    """Block until the stream's copy is over. The thread sleeps, so it does not spin on a core of the training."""
    stream.record_event(torch.cuda.Event(blocking=True)).synchronize()  # type: ignore[no-untyped-call]


def _equal(one: int, other: int, size: int) -> bool:
    memcmp = ctypes.CDLL(None).memcmp
    return bool(memcmp(ctypes.c_void_p(one), ctypes.c_void_p(other), ctypes.c_size_t(size)) == 0)
