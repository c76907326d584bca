"""How others save a training state and read it back: one class each, with the options that let it do its best.

A save returns when training may go on, with a question that is asked until it says that the checkpoint is durable:
its bytes and its name survive a power loss. Whoever leaves that out gets the syncs that are missing, in a thread of
their own. Nobody computes sums: torch.save's CRC-32 is off.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from gpt_state import State, named
from limits import sync_tree

LIBRARIES = ("safetensors", "torchsnapshot", "dlrover")
TRACKER_POLL_S = 0.005
Durable = Callable[[], bool]


class SavePeer(Protocol):
    """Saves the same state again and again, each time to a directory that is not there yet."""

    def save(self, state: State, target: Path) -> Durable: ...

    def close(self) -> None: ...


class Simple:
    """A save that blocks until everything is durable."""

    def __init__(self, _directory: Path) -> None:
        torch.serialization.set_crc32_options(False)

    def save(self, state: State, target: Path) -> Durable:
        target.mkdir()
        self.write(state, target)
        sync_tree(target)
        return lambda: True

    def write(self, state: State, target: Path) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class TorchSave(Simple):
    """torch.save and fsync."""

    def write(self, state: State, target: Path) -> None:
        torch.save(state.tree(), target / "state.pt")


class Safetensors(Simple):
    """safetensors' save_file and fsync."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        from safetensors.torch import save_file

        self._save_file = save_file

    def write(self, state: State, target: Path) -> None:
        self._save_file(state.tensors(), target / "state.safetensors")


class DcpSave(Simple):
    """torch.distributed.checkpoint.save, two threads."""

    def write(self, state: State, target: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state.tree(), storage_writer=_writer(target), planner=_planner())


class DcpAsync:
    """torch.distributed.checkpoint.async_save by a thread: two threads write, the stager keeps its memory.

    Several ranks need a process group for it alone: its thread and the training call collectives in any order.
    """

    shared = False

    def __init__(self, _directory: Path, group: Any = None) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._dcp = dcp
        self._kind = AsyncCheckpointerType.PROCESS if self.shared else AsyncCheckpointerType.THREAD
        pinned = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=self.shared,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        self._group = group
        self._background = ThreadPoolExecutor(1)

    def save(self, state: State, target: Path) -> Durable:
        saved: Any = self._dcp.async_save(
            state.tree(),
            storage_writer=_writer(target),
            planner=_planner(),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        return _when(self._background.submit(_sync_after, saved.result, target))

    def close(self) -> None:
        self._background.shutdown()
        self._stager.close()


class DcpAsyncProcess(DcpAsync):
    """The same by a process, through shared memory."""

    shared = True


class Torchsnapshot:
    """torchsnapshot's async_take, and fsync."""

    def __init__(self, _directory: Path, **options: Any) -> None:
        import torchsnapshot

        self._library, self._options = torchsnapshot, options
        self._background = ThreadPoolExecutor(1)

    def save(self, state: State, target: Path) -> Durable:
        app_state = {"model": state.model, "optimizer": state.optimizer}
        pending = self._library.Snapshot.async_take(str(target), app_state, **self._options)
        return _when(self._background.submit(_sync_after, pending.wait, target))

    def close(self) -> None:
        self._background.shutdown()


class DlroverFlash:
    """DLRover's Flash Checkpoint: into shared memory, and its saver process to the disk; and fsync.

    It tells that it is done by a tracker file, which is looked at every 5 ms: its own wait looks every 3 s.
    """

    def __init__(self, directory: Path) -> None:
        torch.serialization.set_crc32_options(False)
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._directory = directory / "dlrover"
        self._directory.mkdir()
        self._tracker = self._directory / CheckpointConstant.TRACER_FILE_NAME
        self._disk = StorageType.DISK
        self._checkpointer = DdpCheckpointer(str(self._directory))
        self._step = 0
        self._background = ThreadPoolExecutor(1)

    def save(self, state: State, target: Path) -> Durable:
        self._step += 1
        step = self._step
        self._checkpointer.save_checkpoint(step, state.tree(), str(target / "state.pt"), storage_type=self._disk)
        return _when(self._background.submit(lambda: self._finish(step, target)))

    def _finish(self, step: int, target: Path) -> None:
        while not self._tracker.exists() or self._tracker.read_text().strip() != str(step):
            time.sleep(TRACKER_POLL_S)
        sync_tree(target)
        sync_tree(self._directory)

    def close(self) -> None:
        self._background.shutdown()
        self._checkpointer._engine.close()


SAVE_PEERS: dict[str, Callable[[Path], SavePeer]] = {
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP save": DcpSave,
    "DCP async_save, thread": DcpAsync,
    "DCP async_save, process": DcpAsyncProcess,
    "torchsnapshot async_take": Torchsnapshot,
    "DLRover Flash Checkpoint": DlroverFlash,
}
ASYNCHRONOUS = frozenset(list(SAVE_PEERS)[3:])
STAGES = frozenset({"DCP async_save, thread", "DCP async_save, process", "DLRover Flash Checkpoint"})
"""Who keeps memory of the state's size while nothing is saved."""


def load_safetensors(state: State, directory: Path) -> None:
    """safe_open, and a copy into the live tensors."""
    from safetensors import safe_open

    live = state.tensors()
    with torch.no_grad(), safe_open(directory / "state.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  not a mapping
            live[name].copy_(file.get_tensor(name))


def load_torch(state: State, directory: Path, *, mapped: bool = False) -> None:
    """torch.load, and a copy into the live tensors."""
    live = state.tensors()
    loaded = dict(named(torch.load(directory / "state.pt", mmap=mapped, weights_only=True), ""))
    with torch.no_grad():
        torch._foreach_copy_([live[name] for name in loaded], list(loaded.values()))


def load_torch_mapped(state: State, directory: Path) -> None:
    """The same with mmap=True."""
    load_torch(state, directory, mapped=True)


def load_dcp(state: State, directory: Path) -> None:
    """DCP.load, which reads into the live tensors."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state.tree(), storage_reader=dcp.FileSystemReader(directory))


LOAD_PEERS: dict[str, tuple[str, Callable[[State, Path], None]]] = {
    "safe_open + copy": ("safetensors", load_safetensors),
    "torch.load + copy": ("torch.save", load_torch),
    "torch.load(mmap=True) + copy": ("torch.save", load_torch_mapped),
    "DCP.load": ("DCP save", load_dcp),
}
"""Who wrote what it loads, and how."""


def clean_up_after_dlrover(name: str) -> None:
    """Delete what it leaves behind when it is killed: its names have TORCHELASTIC_RUN_ID in them."""
    shutil.rmtree(Path("/tmp/ckpt_sock", name), ignore_errors=True)
    for path in Path("/dev/shm").glob(f"{name}_*"):
        path.unlink()


@contextlib.contextmanager
def one_process_group() -> Iterator[None]:
    """What DCP and torchsnapshot ask for: a process group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _writer(target: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemWriter(target, thread_count=2)


def _planner() -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    return DefaultSavePlanner(enable_plan_caching=True)


def _sync_after(written: Callable[[], object], target: Path) -> None:
    """Wait until all of it is written, and sync it."""
    written()
    sync_tree(target)


def _when(done: Future[Any]) -> Durable:
    """Whether it is done; raises what it raised."""

    def durable() -> bool:
        if done.done():
            done.result()
            return True
        return False

    return durable
