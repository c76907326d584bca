"""Rehearse a program that saves by itself: unbroken, then killed behind a checkpoint and moved, and compare its files.

Owns the passes of such a program, and what of its checkpoints is compared. Both passes run in a directory of the same
name, so that a path in a checkpoint is no difference.

    unbroken ─▶ a few checkpoints
    killed behind its first ─▶ the directory is lost ─▶ laid back ─▶ the same checkpoints, to the last byte?
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cloud.directory.store import DirectoryStore
from cloud.notice import Deadline
from harness.core.manifest import Manifest
from harness.core.rehearsal import OUT
from harness.core.snapshot import RunKeys, SnapshotId
from harness.core.words import duration
from harness.errors import ConfigError, ExitCode
from harness.ipc.process import safe_python
from harness.rehearse.passes import ProgramFailed, offline
from harness.snapshots import records
from harness.watch import processes
from harness.watch.adapter import named
from harness.watch.look import Look, candidates
from harness.watch.ours import folder_of
from harness.watch.place import fetch_files, files_of
from harness.watch.record import Record, decode

_CHECKPOINTS = 3
_LOOK_S = 0.2
_SAY_S = 15.0
_CALL_S = 30.0
_LAST_LINES = 20
_KILLS = 2  # the second one of what a process was starting while it was killed
_KEYS = RunKeys("rehearsal")
_NO_TENSORS = (".json", ".txt", ".yaml", ".yml", ".md", ".csv", ".log")


@dataclass(frozen=True)
class WatchedVerdict:
    """The result of rehearsing a program that saves by itself.

    Attributes:
        killed_at: step of the checkpoint behind which it was killed; `None` if it had ended before.
        compared: steps of the checkpoints that were compared.
        different: step and path of the first file that has other tensors, or is missing; `None` if there is none.
        beside: paths of files that differ in what is no tensor, such as a time.
        written_again: what it has written again after the kill; `None` if it went on from its checkpoint.
    """

    killed_at: int | None
    compared: tuple[int, ...] = ()
    different: tuple[int, str] | None = None
    beside: tuple[str, ...] = ()
    written_again: str | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """Where the program was interrupted, in words."""
        shown = self.compared or self.written_again is not None
        return () if self.killed_at is None or not shown else (f"{self.killed_at} (killed, and moved)",)

    @property
    def step(self) -> int:
        """The step of the last comparison."""
        return max(self.compared, default=0)

    @property
    def identical(self) -> bool:
        """Whether the checkpoints have the same tensors, and there was anything to compare."""
        return bool(self.places) and self.different is None and self.written_again is None

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if self.killed_at is None:
            return (
                "nothing is shown: the program came to its end before it could be killed behind a checkpoint. Let it "
                "train longer, or save more often"
            )
        if self.written_again is not None:
            return (
                f"it does NOT GO ON from its checkpoint: killed behind step {self.killed_at}, it has written "
                f"{self.written_again} again, which it had before"
            )
        if not self.compared:
            return (
                f"nothing is shown: the two passes have no checkpoint behind step {self.killed_at} in common. Save "
                "every few seconds, and not more often"
            )
        if self.different is not None:
            step, path = self.different
            return f"DIFFERENT after it was killed behind step {self.killed_at}: {path} differs first, at step {step}"
        steps = ", ".join(str(step) for step in self.compared)
        return f"its checkpoints of step {steps} are identical, after it was killed behind step {self.killed_at}"

    @property
    def lines(self) -> list[str]:
        """The verdict, line by line."""
        lines = [self.summary]
        if self.written_again is not None:
            return [*lines, "usual cause: it needs an option to resume, such as --resume '{checkpoint}'"]
        if self.different is not None:
            lines += ["usual causes:", *(f"  - {cause}" for cause in _CAUSES)]
        return lines + [f"not compared: {path} differs in what is no tensor" for path in self.beside]

    def to_json(self) -> dict[str, Any]:
        """The verdict for machines."""
        found = None if self.different is None else {"step": self.different[0], "file": self.different[1]}
        return {
            "identical": self.identical,
            "interrupted_at": list(self.places),
            "compared": list(self.compared),
            "difference": found,
            "written_again": self.written_again,
            "beside": list(self.beside),
            "verdict": self.summary,
        }


_CAUSES = (
    "the program does not save the random states of Python, NumPy and torch, or draws before it restores them",
    "the position in the data is not saved, so a resume starts the epoch again",
    "only the weights are saved, so a resume starts with a new optimizer, scheduler or scaler",
    "it does not go on from its checkpoint at all: see the losses that it prints",
)


def rehearse_watched(
    command: Sequence[str],
    environ: Mapping[str, str],
    say: Callable[[str], None],
    watch: str,
    adapter: str | None = None,
) -> WatchedVerdict:
    """Run both passes, and return the verdict. Blocks for about twice the time of a few checkpoints.

    Args:
        command: the program; `{out}` in it is replaced by a directory of the passes.
        environ: its environment.
        say: prints a line for people.
        watch: the watched directory, with `{out}`.
        adapter: name of the adapter, or its file; `None` to find out.

    Raises:
        ConfigError: there is no `{out}`, or the program wrote no checkpoint.
        ProgramFailed: it failed by itself.
    """
    if OUT not in watch or not any(OUT in word for word in command):
        raise ConfigError(
            f"a rehearsal of a program that saves by itself runs it twice: write {OUT} for its directory, in the "
            f"command and in --watch, as in --watch {OUT} -- python train.py --output_dir {OUT}"
        )
    with tempfile.TemporaryDirectory(prefix="harness-rehearsal-", ignore_cleanup_errors=True) as name:
        passes = _Passes(command, environ, Path(name), say, watch, adapter)
        say(f"rehearsing {_CHECKPOINTS} checkpoints, twice, in 3 starts of the program. All of it goes to {name}")
        passes.start("unbroken", lambda taken: len(taken) >= _CHECKPOINTS and passes.is_numbered("unbroken"))
        wanted, is_numbered = passes.taken("unbroken"), passes.is_numbered("unbroken")
        # A file without a number shows by what it was before that it begins again.
        least = 1 if is_numbered or len(wanted) < _CHECKPOINTS else 2
        say(f"unbroken: {len(wanted)} checkpoints in {duration(passes.seconds)}. Now it is killed, and moved")
        if passes.start("interrupted", lambda taken: len(taken) >= least):
            return WatchedVerdict(None)
        killed = passes.taken("interrupted")
        killed_at, last = killed[-1].step, wanted[-1].step if is_numbered else None
        passes.start("interrupted", lambda taken: last is not None and taken[-1].step >= last, laid_back=killed[-1])
        again = passes.written_again or (None if is_numbered else _again(passes, killed[:-1], killed[-1]))
        return _compared(passes, killed_at) if again is None else WatchedVerdict(killed_at, written_again=again)


class _Passes:
    """Runs a program in one directory, once for each start, and knows what it has saved."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        scratch: Path,
        say: Callable[[str], None],
        watch: str,
        adapter: str | None,
    ) -> None:
        self._out, self.scratch, self._say = scratch / "out", scratch, say
        as_it_is = [] if adapter is None else ["--watch-as", adapter]
        fixed = ["--run", _KEYS.run, "--metadata", "off", "--max-crashes", "0", "--keep-last", "1000"]
        self._options = [*fixed, "--watch", watch.replace(OUT, str(self._out)), *as_it_is, "--log-format", "text"]
        self._command = [word.replace(OUT, str(self._out)) for word in command]
        self._environ = offline(environ, scratch)
        self._starts = 0
        self.seconds = 0.0
        self._root, self._adapter = Path(watch.replace(OUT, str(self._out))), adapter
        self._mark = "HARNESS_RUNTIME_DIR", self._environ["HARNESS_RUNTIME_DIR"]
        self._laid_back: Record | None = None
        self.written_again: str | None = None
        """A checkpoint that was written again, although the program was given that one or a newer one."""

    def store(self, name: str) -> DirectoryStore:
        """Return the store of a pass."""
        return DirectoryStore(self.scratch / name)

    def taken(self, name: str) -> list[SnapshotId]:
        """Return the snapshots of a pass, in the order in which they were taken."""
        return list(records.survey(self.store(name), _KEYS, Deadline.after(_CALL_S)).commits)

    def manifest(self, name: str, snapshot: SnapshotId) -> Manifest:
        """Return what a snapshot consists of."""
        return records.read_manifest(self.store(name), _KEYS, snapshot, Deadline.after(_CALL_S))

    def is_numbered(self, name: str) -> bool:
        """Whether checkpoints tell their step, so that those of two passes can be matched before the end."""
        newest = decode(self.manifest(name, self.taken(name)[-1]).parts[0].state)
        return newest.step == newest.order

    def start(
        self, name: str, is_enough: Callable[[list[SnapshotId]], bool], laid_back: SnapshotId | None = None
    ) -> bool:
        """Start the program in an empty directory, as on another machine, and kill it once it has saved enough.

        Args:
            name: of the pass.
            is_enough: whether these snapshots are enough.
            laid_back: the snapshot that it is to go on from. It is killed as well once it writes that one again.

        Returns:
            Whether it came to its own end before.
        """
        self._starts += 1
        self._laid_back = None if laid_back is None else decode(self.manifest(name, laid_back).parts[0].state)
        shutil.rmtree(self._out, ignore_errors=True)
        shutil.rmtree(folder_of(self._out), ignore_errors=True)
        self._out.mkdir()
        output = self.scratch / f"{self._starts}.output"
        store = ["--store", str(self.scratch / name)]
        command = [*safe_python("harness"), "run", *store, *self._options, "--", *self._command]
        began_at = time.monotonic()
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )
            try:
                code = self._wait(process, name, is_enough, began_at)
                self._note_written_again()
            finally:
                _kill(process, self._mark)
        self.seconds = time.monotonic() - began_at
        if code is None:
            return False
        _check(code, output, has_saved=bool(self.taken(name)))
        return True

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        name: str,
        is_enough: Callable[[list[SnapshotId]], bool],
        began_at: float,
    ) -> int | None:
        """Wait until it has saved enough. Return its exit code; `None` if it has not ended."""
        before, said_at = len(self.taken(name)), began_at
        while True:
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                survey = records.survey(self.store(name), _KEYS, Deadline.after(_CALL_S))
                taken = list(survey.commits)
            self._note_written_again()
            if self.written_again is not None:
                return None
            if survey.finished_at is not None:
                continue  # it is at its end, and about to exit
            if len(taken) > before and is_enough(taken):
                return None
            if time.monotonic() > said_at + _SAY_S:
                said_at = time.monotonic()
                newest = f"the newest of step {taken[-1].step}" if taken else "none yet"
                self._say(f"{len(taken)} checkpoints, {newest}, {duration(said_at - began_at)} after the start")

    def _note_written_again(self) -> None:
        """Note a checkpoint that is not newer than the one that was laid back, and whose files are all of now."""
        if (record := self._laid_back) is None:
            return
        laid_ns = max(record.modified_ns, record.order)
        for one in candidates(Look.at(self._root), named(self._adapter or record.adapter)):
            is_newer = one.is_dated or one.order > record.order
            if not is_newer and one.files and all(seen.modified_ns > laid_ns for seen in one.files.values()):
                self.written_again = one.name


def _again(passes: _Passes, before: Sequence[SnapshotId], laid_back: SnapshotId) -> str | None:
    """Return a file that has, behind the one that was laid back, the content that it had before that."""
    sums = [_sums(passes.manifest("interrupted", snapshot)) for snapshot in before]
    later = [snapshot for snapshot in passes.taken("interrupted") if snapshot > laid_back]
    found = (_sums(passes.manifest("interrupted", snapshot)) for snapshot in later)
    return next((min(files) for files in found if files in sums), None)


def _sums(manifest: Manifest) -> dict[str, tuple[int, str]]:
    return {file.path: (file.size, file.crc64nvme) for file in files_of(manifest)}


def _compared(passes: _Passes, killed_at: int) -> WatchedVerdict:
    """Compare the checkpoints that both passes have, behind the interruption."""
    by_step = {snapshot.step: snapshot for snapshot in passes.taken("interrupted")}
    wanted = {snapshot.step: snapshot for snapshot in passes.taken("unbroken")}
    if passes.is_numbered("unbroken"):
        pairs = [(step, wanted[step], by_step[step]) for step in sorted(wanted) if step > killed_at and step in by_step]
    else:  # both came to their end
        last = max(wanted)
        pairs = [(last, wanted[last], by_step[max(by_step)])]
    different, beside = None, set[str]()
    for step, one, other in pairs:
        here, there = passes.manifest("unbroken", one), passes.manifest("interrupted", other)
        found = _different(passes, here, there)
        beside |= {path for path, has_tensors in found.items() if not has_tensors}
        first = next((path for path, has_tensors in sorted(found.items()) if has_tensors), None)
        if first is not None:
            different = (step, first)
            break
    return WatchedVerdict(killed_at, tuple(step for step, _, _ in pairs), different, tuple(sorted(beside)))


def _different(passes: _Passes, here: Manifest, there: Manifest) -> dict[str, bool]:
    """Return the paths of files that differ, each with whether they differ in tensors. Fetches them only then."""
    sums = [_sums(manifest) for manifest in (here, there)]
    differing = [path for path in sums[0].keys() | sums[1].keys() if sums[0].get(path) != sums[1].get(path)]
    if not differing:
        return {}
    folders = []
    for name, manifest in (("unbroken", here), ("interrupted", there)):
        folders.append(passes.scratch / f"{name}-files")
        fetch_files(folders[-1], passes.store(name), _KEYS, manifest, lambda: Deadline.after(_CALL_S))
    return {path: _has_other_tensors(*(folder / path for folder in folders)) for path in differing}


def _has_other_tensors(here: Path, there: Path) -> bool:
    """Whether two files that differ have different tensors, as far as their form tells."""
    if not (here.exists() and there.exists()):
        return True
    if zipfile.is_zipfile(here) and zipfile.is_zipfile(there):
        return _tensors(here) != _tensors(there)
    return here.suffix not in _NO_TENSORS


def _tensors(archive: Path | BinaryIO) -> dict[str, tuple[int, int]]:
    """Return size and sum of each tensor in a file of torch.save, and of whatever is no text in any other zip.

    Another zip may hold files of torch.save, arrays of NumPy, or pickles.
    """
    found: dict[str, tuple[int, int]] = {}
    with zipfile.ZipFile(archive) as file:
        members = {info.filename: info for info in file.infolist()}
        is_torchs = any(name.endswith("/data.pkl") for name in members)
        for name, info in members.items():
            if is_torchs:  # below a directory with the file's own name
                if (path := name.partition("/")[2]).startswith("data/"):
                    found[path] = info.file_size, info.CRC
            elif not name.endswith(_NO_TENSORS):
                content = io.BytesIO(file.read(name))
                if zipfile.is_zipfile(content):
                    found |= {f"{name}/{inner}": sums for inner, sums in _tensors(content).items()}
                elif not _is_text(content.getvalue()):
                    found[name] = info.file_size, info.CRC
    return found


def _is_text(content: bytes) -> bool:
    try:
        return all(letter.isprintable() or letter.isspace() for letter in content.decode())
    except UnicodeDecodeError:
        return False


def _kill(process: subprocess.Popen[bytes], mark: tuple[str, str]) -> None:
    """Kill the agent, its program and all that they have started, as if the machine were gone.

    Args:
        process: of the agent.
        mark: a variable, and its value, in the environment of all of them: torchrun gives each rank its own session.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(_KILLS):
        processes.kill(processes.alive(processes.marked(*mark)))


def _check(code: int, output: Path, *, has_saved: bool) -> None:
    """Raise unless the program has ended well, and has saved something."""
    text = output.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    shown = "".join(f"\n    {line}" for line in text)
    if code != ExitCode.FINISHED:
        raise ProgramFailed(f"the program failed with exit code {code}. Its last lines:{shown}")
    if not has_saved:
        raise ConfigError(f"the program has written no whole checkpoint. Its last lines:{shown}")
